"""How the benchmarks of kernels measure: graph replay, weights past the cache, energy, and one row for each figure."""

from __future__ import annotations

import ctypes
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

__all__ = ["CYCLED", "Row", "bandwidth", "early_and_alone", "energy", "relative_error", "replayed"]

CYCLED = 260_000_000  # bytes of weights that are used in turn: more than the L2 cache holds


class Row(NamedTuple):
    """One measurement: microseconds, and what the floor and the peers need.

    ``alone``: microseconds where every product is launched when the one before has ended, without fetching its weight
    while that one still runs (`cubins`). ``error``: relative, in L2, against the float64 product with the exact matrix;
    ``errors``: the same of those peers that had the same matrix.
    """

    kernel: str
    rows: int
    columns: int
    bits: float
    group_size: int
    batch: int
    microseconds: float
    floor: float
    peers: dict[str, float]
    bytes: int
    error: float | None = None
    joules: float | None = None
    alone: float | None = None
    errors: dict[str, float] | None = None


def replayed(call: Callable[[int], object], count: int, rounds: int = 7) -> float:
    """Median microseconds of one call among ``count`` in a graph."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        for i in range(2):
            call(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for i in range(count):
            call(i)
    times: list[float] = []
    for _ in range(rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / count)
    return statistics.median(times)


def early_and_alone(product: Callable[[Any], object], weights: Sequence[Any]) -> tuple[float, float]:
    """Median microseconds of a product, as `Row` tells them apart: with these settled weights, and if they were not."""
    torch.cuda.synchronize()  # which settles them
    count = len(weights)
    early = replayed(lambda i: product(weights[i % count]), 2 * count)
    plain = [replace(weight, settled=False) for weight in weights]
    return early, replayed(lambda i: product(plain[i % count]), 2 * count)


def bandwidth() -> float:
    """Bytes per second that a sum over 4 GB reads."""
    values = torch.empty(1 << 30, dtype=torch.float32, device="cuda").normal_()
    return 4 * values.numel() / (replayed(lambda _: values.sum(), 4) * 1e-6)


def relative_error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """``|found - exact| / |exact|`` in L2, of tensors of one shape."""
    return float((found.double() - exact).norm() / exact.norm())


def energy(call: Callable[[int], object], microseconds: float) -> float | None:
    """Joules of one product, from the GPU's own counter over about 0.3 s; None where it has none."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    handle, before, after = ctypes.c_void_p(), ctypes.c_ulonglong(), ctypes.c_ulonglong()
    if library.nvmlInit_v2() or library.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(handle)):
        return None
    times = max(1, int(0.3e6 / microseconds))
    torch.cuda.synchronize()
    if library.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(before)):
        return None
    for i in range(times):
        call(i)
    torch.cuda.synchronize()
    library.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(after))
    return (after.value - before.value) * 1e-3 / times
