"""The benchmarks of kernels without a GPU: host tensors for its own, every product carried out twice, nothing timed."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

from bcqfmt import bench
from kernel_bench import atom, matmul, mixed, outliers, peers, timing
from kernel_bench import products as bench_products

SPEED = 4e12
_TIMED = (atom, bench, bench_products, matmul, mixed, outliers, peers, timing)


class _Host(TorchFunctionMode):
    """Where torch is asked for "cuda", it is "cpu"."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        there = [("cpu" if isinstance(value, str) and value == "cuda" else value) for value in args]
        named = {
            name: "cpu" if name == "device" and value == "cuda" else value for name, value in (kwargs or {}).items()
        }
        return func(*there, **named)


def _packed(codes: torch.Tensor, inner: int) -> torch.Tensor:
    """tinygemm's weight as the host has it: of one code in an int32. In a byte the first column comes first (high)."""
    both = torch.stack([codes >> 4, codes & 15], 2).reshape(len(codes), -1)
    found: torch.Tensor = torch.ops.aten._convert_weight_to_int4pack_for_cpu(both.int(), inner)
    return found


def _twice(call: Callable[[int], object], count: int, rounds: int = 7) -> float:
    call(0)
    call(count - 1)
    return 10.0


@contextlib.contextmanager
def host() -> Iterator[None]:
    """Inside, benchmarks run on the host, always with the same weights; every product takes 10 us and 2 mJ."""
    torch.manual_seed(0)
    with contextlib.ExitStack() as stack:
        for module in _TIMED:
            stack.enter_context(mock.patch.object(module, "replayed", _twice))
        stack.enter_context(mock.patch.object(bench_products, "energy", return_value=0.002))
        stack.enter_context(mock.patch.object(torch.cuda, "synchronize", return_value=None))
        host_mm = torch.ops.aten._weight_int4pack_mm_for_cpu
        stack.enter_context(mock.patch.object(torch.ops.aten, "_convert_weight_to_int4pack", _packed))
        stack.enter_context(mock.patch.object(torch.ops.aten, "_weight_int4pack_mm", host_mm))
        stack.enter_context(_Host())
        yield


def products(*cases: tuple[str, int, int, int, int, int]) -> list[Any]:
    """Rows of `products.products` for these cases (formula, q, rows, columns, group size, batch), as tuples."""
    with host(), mock.patch.object(bench_products, "_cases", return_value=cases):
        return [tuple(row) for row in bench_products.products(SPEED)]


def measured(shape: tuple[int, int], vectors: tuple[int, ...]) -> list[Any]:
    """Rows of `bcqfmt.bench.measured` for two kinds of weights, as tuples."""
    with host(), mock.patch.multiple(bench, CYCLED=0, KINDS=(("affine", 4), ("bcq", 2))):
        return [tuple(row) for row in bench.measured(SPEED, [shape], vectors)]


def looked_up(q: int, columns: int, g: int) -> list[Any]:
    """A row of `products.sweep` where there is no fast product."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(host())
        stack.enter_context(mock.patch.object(bench_products, "SWEEP", [(q, g)]))
        stack.enter_context(mock.patch.object(bench_products, "_SQUARE", columns))
        stack.enter_context(mock.patch.object(bench_products, "CYCLED", 0))  # two copies: a cache is not simulated
        stack.enter_context(mock.patch.object(bench_products, "product_shape", return_value=None))
        return [tuple(row) for row in bench_products.sweep(SPEED)]


def with_outliers(rows: int, columns: int, share: float, batch: int, skewed: bool) -> list[Any]:
    """Rows of `outliers` for one case."""
    with host(), mock.patch.object(outliers, "CYCLED", 0):
        found = outliers._product(SPEED, rows, columns, share, {}, batch=batch, skewed=skewed)
        return [tuple(row) for row in found]
