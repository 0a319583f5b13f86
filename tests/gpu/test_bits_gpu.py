"""The fast products on the device at full size: bits and bytes of x, against the normative decoder."""

from __future__ import annotations

import pytest
import torch

import kernel_samples as ks
from bcqfmt.kernels import matmul, reference
from bcqfmt.kernels.bit_gemv import bit_gemv, bit_operand
from bcqfmt.kernels.bit_shape import BitShape
from bcqfmt.kernels.byte_shape import product_shape
from bcqfmt.kernels.operands import operand
from gpu_arrays import to_gpu, twice

# encoding, q, rows, columns, group size, vectors, dtype of x
CASES = [
    ("bcq", 2, 4096, 4096, 128, 1, "F16"), ("bcq", 4, 1000, 8192, 128, 1, "BF16"),
    ("affine", 3, 777, 2048, 64, 1, "F16"), ("bcq", 4, 1024, 4096, 128, 2, "F16"),
    ("affine", 4, 4096, 1024, 16, 2, "F16"), ("offset", 5, 100, 3000, 3000, 1, "F16"),
    ("bcq", 3, 1024, 4096, 128, 4, "F32"), ("affine", 8, 515, 12288, 128, 1, "BF16"),
    ("bcq", 4, 4096, 4096, 128, 8, "F16"), ("affine", 4, 1000, 8192, 128, 8, "F16"),
    ("bcq", 2, 4095, 1032, 128, 5, "BF16"), ("bcq", 4, 2048, 4096, 32, 1, "F16"),
    ("affine", 3, 777, 2048, 32, 2, "BF16"), ("bcq", 8, 333, 4096, 64, 3, "F16"),
    ("float-zero", 4, 1024, 11008, 128, 4, "F16"), ("second-order", 2, 512, 2048, 256, 6, "F16"),
]  # fmt: skip


@pytest.mark.parametrize(("encoding", "q", "rows", "columns", "g", "batch", "kind"), CASES)
def test_products(encoding: str, q: int, rows: int, columns: int, g: int, batch: int, kind: str) -> None:
    weight = ks.weight(encoding, q, rows, columns, g, seed=q)
    x = ks.vectors(batch, columns, kind)
    placed, on_gpu = bit_operand(operand(weight)), to_gpu(x)
    found = twice((batch, rows), on_gpu.dtype, lambda out: bit_gemv(placed, on_gpu, out=out)).float().cpu().numpy()
    limit = {"F16": 7e-4, "BF16": 4e-3, "F32": 3e-6}[kind]
    assert reference.relative_error(found, reference.product(weight, x)) < limit


@pytest.mark.parametrize("batch", [1, 3])
def test_a_reordered_weight_in_two_segments(batch: int) -> None:
    weight = ks.mixed(1000, 3072, 1024, outliers="", perm=True)
    placed = bit_operand(operand(weight))
    x = ks.vectors(batch, 4096, "F16")
    found = bit_gemv(placed, to_gpu(x)).float().cpu().numpy()
    assert reference.relative_error(found, reference.product(weight, x)) < 7e-4


# encoding, q, rows, columns, group size, vectors, dtype of x, share of outliers, what they do
OUTLIERS = [
    ("bcq", 2, 4096, 4096, 128, 1, "F16", 0.002, "add"), ("affine", 4, 4096, 8192, 128, 1, "F16", 0.015, "add"),
    ("affine", 3, 777, 2048, 64, 2, "BF16", 0.1, "replace"), ("bcq", 4, 1000, 4096, 32, 1, "F16", 0.005, "add"),
    ("affine", 4, 1000, 4096, 128, 8, "F16", 0.005, "add"), ("affine", 4, 333, 8192, 128, 8, "BF16", 0.02, "add"),
    ("bcq", 3, 1024, 4100, 128, 7, "F32", 0.01, "replace"), ("second-order", 2, 515, 1032, 16, 3, "F16", 0.03, "add"),
    ("affine", 4, 200, 28672, 128, 1, "F16", 0.01, "add"), ("bcq", 2, 28672, 1024, 128, 1, "F16", 0.005, "add"),
    ("affine", 4, 20000, 2048, 128, 4, "F16", 0.015, "add"), ("affine", 3, 28672, 2048, 64, 1, "BF16", 0.02, "replace"),
]  # fmt: skip


@pytest.mark.parametrize(("encoding", "q", "rows", "columns", "g", "batch", "kind", "share", "mode"), OUTLIERS)
def test_outliers(
    encoding: str, q: int, rows: int, columns: int, g: int, batch: int, kind: str, share: float, mode: str
) -> None:
    """In one launch where all vectors fit into shared memory a second time, else in several."""
    weight = ks.weight(encoding, q, rows, columns, g, seed=q, perm=True, outliers=mode, share=share)
    x = ks.vectors(batch, columns, kind)
    placed, on_gpu = bit_operand(operand(weight)), to_gpu(x)
    found = twice((batch, rows), on_gpu.dtype, lambda out: bit_gemv(placed, on_gpu, out=out)).float().cpu().numpy()
    limit = {"F16": 7e-4, "BF16": 4e-3, "F32": 3e-6}[kind]
    assert reference.relative_error(found, reference.product(weight, x)) < limit


def test_outliers_of_a_reordered_weight_in_two_segments() -> None:
    weight = ks.mixed(1000, 3072, 1024, perm=True)
    x = ks.vectors(3, 4096, "F16")
    found = matmul.matmul(matmul.MatmulWeight(operand(weight)), to_gpu(x), path="bits").float().cpu().numpy()
    assert reference.relative_error(found, reference.product(weight, x)) < 7e-4


def test_both_ways_agree_and_matmul_takes_any_number() -> None:
    weight = ks.weight("bcq", 4, 512, 4096, 128)
    placed, x = bit_operand(operand(weight)), ks.vectors(19, 4096, "F16")
    layout = placed.segments[0].layout
    bits, with_bytes = BitShape(layout, 3, 1, 0, 2), product_shape(layout, 3, 1, 0, reordered=False, added=False)
    first, second = (
        bit_gemv(placed, to_gpu(x[:3]), out=torch.empty(3, 512, device="cuda"), shapes=(shape,)).cpu().numpy()
        for shape in (bits, with_bytes)
    )
    assert reference.relative_error(first, second) < 4e-4
    found = matmul.matmul(matmul.MatmulWeight(operand(weight)), to_gpu(x), path="bits").float().cpu().numpy()
    assert reference.relative_error(found, reference.product(weight, x)) < 2e-3
