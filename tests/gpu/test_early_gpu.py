"""Products that begin before the kernel in front has ended: the same bits as those that do not, wherever they run."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from bcqfmt.kernels.atom import operands as ao
from bcqfmt.kernels.atom import w4a4 as w4
from bcqfmt.kernels.bits import bit_gemv, bit_operand
from bcqfmt.kernels.gemm import gemm, gemm_operand
from bcqfmt.kernels.mixed import mixed_gemv, mixed_operand
from bcqfmt.kernels.operands import operand
from products import kernel_samples as ks
from products.gpu_arrays import to_gpu
from simulated import sim_atom, sim_mixed

SIZE = 2048
Product = Callable[..., torch.Tensor]


def atom(placed: Any, x: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """Activations of four bits, quantized on the way."""
    found: torch.Tensor = w4.w4a4(w4.quantize_reorder(x, placed.perm), placed, dtype="BF16", out=out)
    return found


KINDS: dict[str, tuple[Callable[[], Any], Product, int]] = {
    "bits": (lambda: bit_operand(operand(ks.weight("bcq", 2, SIZE, SIZE, 128))), bit_gemv, 1),
    "bytes": (lambda: bit_operand(operand(ks.weight("affine", 4, SIZE, SIZE, 32))), bit_gemv, 4),
    "two segments": (lambda: bit_operand(operand(ks.mixed(SIZE, 1536, 512, outliers="", perm=True))), bit_gemv, 2),
    "bits, outliers": (
        lambda: bit_operand(operand(ks.weight("affine", 3, SIZE, SIZE, 128, outliers="add", share=0.01))), bit_gemv, 1
    ),
    "bytes, outliers": (
        lambda: bit_operand(operand(ks.weight("affine", 2, SIZE, SIZE, 64, outliers="add", share=0.02))), bit_gemv, 4
    ),
    "w4a4": (lambda: w4.atom_to_device(ao.pack_w4(sim_atom.atom_weight(SIZE, SIZE // 128))), atom, 3),
    "mixed": (lambda: mixed_operand(sim_mixed.weight(SIZE, 1536, 512, outliers="add", share=0.01)), mixed_gemv, 1),
    "few": (lambda: gemm_operand(operand(ks.weight("affine", 4, SIZE, SIZE, 128)), "BF16"), gemm, 4),
    "few, 16 vectors": (lambda: gemm_operand(operand(ks.weight("affine", 4, SIZE, SIZE, 128)), "BF16"), gemm, 16),
    "few, bcq": (lambda: gemm_operand(operand(ks.weight("bcq", 4, SIZE, SIZE, 128)), "BF16"), gemm, 4),
    "many": (lambda: gemm_operand(operand(ks.weight("affine", 4, SIZE, SIZE, 128)), "BF16"), gemm, 40),
}  # fmt: skip
EACH = pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[pytest.mark.sm_90] if kind == "mixed" else []) for kind in KINDS]
)


def scaled(x: torch.Tensor) -> torch.Tensor:
    """What stands between two products."""
    return x / x.abs().max()


def compiled(early: bool) -> Callable[..., torch.Tensor]:
    """The same by kernels that torch makes, which begin early themselves and let the next one begin, or do not."""
    found: Callable[..., torch.Tensor] = torch.compile(scaled, dynamic=True, options={"triton.enable_pdl": early})
    return found


BETWEEN: dict[str, tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor]]] = {
    "nothing": (torch.Tensor.contiguous, torch.Tensor.contiguous),
    "torch": (scaled, scaled),
    "compiled": (compiled(False), compiled(True)),
}


def made(kind: str) -> tuple[Any, Product, torch.Tensor]:
    """A square weight, its product, vectors."""
    make, product, batch = KINDS[kind]
    placed = make()
    assert placed.settled
    return placed, product, to_gpu(ks.vectors(batch, SIZE, "BF16"))  # holds what eight products make of it


def chain(placed: Any, product: Product, x: torch.Tensor, between: Callable[..., torch.Tensor]) -> torch.Tensor:
    """Every product reads what the one in front of it writes, directly or through another kernel."""
    for _ in range(8):
        x = between(product(placed, x))
    return x


@EACH
@pytest.mark.parametrize("between", BETWEEN)
def test_the_same_bits_as_one_after_the_other(kind: str, between: str) -> None:
    (placed, product, x), (plain, early) = made(kind), BETWEEN[between]
    expected = chain(replace(placed, settled=False), product, x, plain)
    assert torch.isfinite(expected).all()
    for _ in range(20):
        assert torch.equal(chain(placed, product, x, early), expected)


@EACH
def test_x_that_the_kernel_in_front_writes_late(kind: str) -> None:
    """A long kernel and a copy in front, which have not written x when the product is launched."""
    placed, product, x = made(kind)
    expected = product(replace(placed, settled=False), x)
    held = torch.zeros_like(x)
    for _ in range(10):
        held.zero_()
        torch.cuda._sleep(2_000_000)
        held.copy_(x)
        assert torch.equal(product(placed, held), expected)


@EACH
def test_x_that_a_product_in_front_writes(kind: str) -> None:
    """The one in front lets the next begin while it works: until it has ended, x is not what it should be."""
    placed, product, x = made(kind)
    plain = replace(placed, settled=False)
    expected = product(plain, product(plain, x))
    held = torch.empty_like(x)
    for _ in range(50):
        held.fill_(float("nan"))
        product(placed, x, out=held)
        assert torch.equal(product(placed, held), expected)


@EACH
@pytest.mark.parametrize("between", ["torch", "compiled"])
def test_a_graph(kind: str, between: str) -> None:
    (placed, product, x), (plain, early) = made(kind), BETWEEN[between]
    expected = chain(replace(placed, settled=False), product, x, plain)
    chain(placed, product, x, early)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = chain(placed, product, x, early)
    for _ in range(5):
        y.zero_()
        graph.replay()
        assert torch.equal(y, expected)


@EACH
def test_a_thread_that_has_not_used_the_gpu(kind: str) -> None:
    placed, product, x = made(kind)
    expected, found = product(placed, x), list[Any]()

    def run() -> None:
        try:
            found.append(product(placed, x).cpu())
        except BaseException as fault:  # noqa: BLE001 - shown by the test
            found.append(fault)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert isinstance(found[0], torch.Tensor), found[0]
    assert torch.equal(found[0], expected.cpu())
