"""The fast products on the device at full size: bits and bytes of x, against the normative decoder."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bcqfmt import BcqWeight
from bcqfmt.kernels import matmul
from bcqfmt.kernels.bits import BitOperand, batch_limit, bit_gemv, bit_operand
from bcqfmt.kernels.bits.shape import Chip, Wanted, bit_shape_for, product_shape
from bcqfmt.kernels.operands import operand
from bcqfmt.kernels.runtime import device
from products import kernel_samples as ks
from products import product_reference as reference
from products.gpu_arrays import to_gpu, twice
from simulated import sim_mixed

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
    ("bcq", 1, 4096, 4096, 128, 1, "F16"), ("affine", 1, 1001, 2056, 64, 4, "BF16"),
    ("bcq", 6, 1024, 4096, 128, 1, "F16"), ("affine", 6, 777, 3000, 32, 8, "F16"),
    ("bcq", 7, 515, 4096, 128, 2, "BF16"), ("affine", 7, 1000, 2048, 64, 1, "F32"),
    ("bcq", 4, 1000, 4096, 8, 1, "F16"), ("affine", 3, 777, 1032, 8, 4, "BF16"), ("bcq", 1, 100, 2048, 8, 2, "F32"),
    ("second-order", 2, 512, 2044, 8, 3, "F16"), ("bcq", 8, 1000, 12288, 8, 1, "F16"),
    ("affine", 8, 777, 4096, 8, 2, "BF16"), ("affine", 4, 1000, 8192, 16, 4, "F16"),
    ("bcq", 3, 515, 8192, 16, 2, "BF16"), ("offset", 5, 1001, 2056, 16, 1, "F16"),
    ("bcq", 1, 4096, 12288, 8, 1, "BF16"), ("bcq", 6, 333, 11008, 16, 8, "F16"),
    ("float-zero", 4, 1024, 1032, 8, 1, "F16"),
]  # fmt: skip
LIMITS = {"F16": 7e-4, "BF16": 4e-3, "F32": 3e-6}


def fitting(weight: BcqWeight, kind: str, gpu: tuple[int, int], planes: int | None = None) -> BitOperand:
    """The weight on the device; other GPUs than sm_90 may not have the shared memory for one of its vectors."""
    placed = bit_operand(operand(weight, planes=planes))
    if gpu != (9, 0) and not batch_limit(placed, kind, kind):
        pytest.skip(f"a vector of {weight.spec.columns} columns does not fit into the shared memory of this GPU")
    return placed


@pytest.mark.parametrize(("encoding", "q", "rows", "columns", "g", "batch", "kind"), CASES)
def test_products(
    encoding: str, q: int, rows: int, columns: int, g: int, batch: int, kind: str, gpu: tuple[int, int]
) -> None:
    weight = ks.weight(encoding, q, rows, columns, g, seed=q)
    x = ks.vectors(batch, columns, kind)
    placed, on_gpu = fitting(weight, kind, gpu), to_gpu(x)
    found = twice((batch, rows), on_gpu.dtype, lambda out: bit_gemv(placed, on_gpu, out=out)).float().cpu().numpy()
    assert reference.relative_error(found, reference.product(weight, x)) < LIMITS[kind]


# encoding, group size, vectors, dtype of x, planes of five; affine float32 in groups of 8 columns stops at four
FIRST_PLANES = [
    (*case, planes)
    for case in (
        ("bcq", 128, 1, "F16"), ("affine", 128, 8, "BF16"), ("affine", 8, 2, "F16"), ("bcq", 32, 2, "F32"),
        ("second-order", 16, 1, "F16"), ("affine", 8, 1, "F32"),
    )
    for planes in (1, 2, 3, 5)
    if case != ("affine", 8, 1, "F32") or planes < 5
]  # fmt: skip


@pytest.mark.parametrize(("encoding", "g", "batch", "kind", "planes"), FIRST_PLANES)
def test_the_first_planes(
    encoding: str, g: int, batch: int, kind: str, planes: int, gpu: tuple[int, int]
) -> None:  # fmt: skip
    """Every kind of fast product: `make test-gpu-sanitizer` runs those with two planes."""
    weight = ks.weight(encoding, 5, 1000, 2048, g, perm=True, outliers="add", share=0.002)
    x = ks.vectors(batch, 2048, kind)
    placed, on_gpu = fitting(weight, kind, gpu, planes), to_gpu(x)
    found = twice((batch, 1000), on_gpu.dtype, lambda out: bit_gemv(placed, on_gpu, out=out)).float().cpu().numpy()
    assert reference.relative_error(found, reference.product(weight, x, planes=planes)) < LIMITS[kind]


def without_outliers(weight: BcqWeight, mode: str) -> BcqWeight:
    """A weight that may have outliers and has none."""
    return weight.with_outliers(
        np.zeros(weight.spec.out + 1, np.int64), np.zeros(0, np.int64), np.zeros(0, np.float16), mode=mode
    )


@pytest.mark.parametrize("mode", ["add", "replace"])
@pytest.mark.parametrize(("encoding", "g", "batch", "kind"), [("bcq", 128, 1, "F16"), ("affine", 8, 4, "F32")])
def test_a_rule_for_outliers_and_none_of_them(encoding: str, g: int, batch: int, kind: str, mode: str) -> None:
    plain = ks.weight(encoding, 4, 1000, 2048, g, perm=True)
    weight = without_outliers(plain, mode)
    x = ks.vectors(batch, 2048, kind)
    placed, on_gpu = bit_operand(operand(weight)), to_gpu(x)
    found = twice((batch, 1000), on_gpu.dtype, lambda out: bit_gemv(placed, on_gpu, out=out))
    assert reference.relative_error(found.float().cpu().numpy(), reference.product(plain, x)) < LIMITS[kind]
    for made in (weight, plain):
        every = matmul.MatmulWeight(operand(made), None, made)
        paths = [matmul.matmul(every, on_gpu, path=path) for path in ("bits", "look-up", "dequantize")]
        for path in paths:
            assert reference.relative_error(path.float().cpu().numpy(), reference.product(plain, x)) < 2e-3
        assert torch.equal(paths[0], found)  # as if there was no rule


@pytest.mark.sm_90
def test_a_mixed_weight_with_a_rule_for_outliers_and_none_of_them() -> None:
    plain = sim_mixed.weight(1000, 1536, 512)
    weight = without_outliers(plain, "add")
    x = ks.vectors(2, 2048, "F16")
    every = matmul.MatmulWeight(operand(weight), None, weight)
    assert matmul.path_of(every, 2).kernel == "mixed"
    first, second = (matmul.matmul(every, to_gpu(x)) for _ in range(2))
    assert torch.equal(first, second)
    assert reference.relative_error(first.float().cpu().numpy(), reference.product(plain, x)) < LIMITS["F16"]


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
    encoding: str, q: int, rows: int, columns: int, g: int, batch: int, kind: str, share: float, mode: str,
    gpu: tuple[int, int],
) -> None:  # fmt: skip
    """In one launch where all vectors fit into shared memory a second time, else in several."""
    weight = ks.weight(encoding, q, rows, columns, g, seed=q, perm=True, outliers=mode, share=share)
    x = ks.vectors(batch, columns, kind)
    placed, on_gpu = fitting(weight, kind, gpu), to_gpu(x)
    found = twice((batch, rows), on_gpu.dtype, lambda out: bit_gemv(placed, on_gpu, out=out)).float().cpu().numpy()
    assert reference.relative_error(found, reference.product(weight, x)) < LIMITS[kind]


def test_outliers_of_a_reordered_weight_in_two_segments() -> None:
    weight = ks.mixed(1000, 3072, 1024, perm=True)
    x = ks.vectors(3, 4096, "F16")
    found = matmul.matmul(matmul.MatmulWeight(operand(weight)), to_gpu(x), path="bits").float().cpu().numpy()
    assert reference.relative_error(found, reference.product(weight, x)) < 7e-4


@pytest.mark.parametrize("kind", ["F16", "BF16", "F32"])
@pytest.mark.parametrize("path", [pytest.param("mixed", marks=pytest.mark.sm_90), "bits"])
def test_an_odd_number_of_rows_one_vector_at_a_time(path: str, kind: str) -> None:
    """The second result of 16 bits starts at no multiple of four bytes."""
    if path == "mixed":
        weight = sim_mixed.weight(101, 21504, 7168, perm=False)
    else:
        columns = {227: 57344, 163: 36864, 99: 20480}[device.shared_limit() // 1024]  # of which one vector fits
        weight = ks.weight("bcq", 2, 101, columns, 128)
    x = ks.vectors(3, weight.spec.columns, kind)
    placed, on_gpu = matmul.MatmulWeight(operand(weight), None, weight), to_gpu(x)
    assert path == "mixed" or placed.at_once(kind) == 1
    first, second = (matmul.matmul(placed, on_gpu, path=path) for _ in range(2))
    assert torch.equal(first, second)
    limit = {**LIMITS, "F32": 1e-5}[kind]
    assert reference.relative_error(first.float().cpu().numpy(), reference.product(weight, x)) < limit


def test_both_ways_agree_and_matmul_takes_any_number(gpu: tuple[int, int]) -> None:
    weight = ks.weight("bcq", 4, 512, 4096, 128)
    placed, x = bit_operand(operand(weight)), ks.vectors(19, 4096, "F16")
    layout = placed.segments[0].layout
    wanted = Wanted(layout, 3, 1, 0, chip=Chip(gpu >= (9, 0), device.shared_limit()))
    bits, with_bytes = bit_shape_for(wanted), product_shape(wanted)
    assert type(bits) is not type(with_bytes)
    first, second = (
        bit_gemv(placed, to_gpu(x[:3]), out=torch.empty(3, 512, device="cuda"), shapes=(shape,)).cpu().numpy()
        for shape in (bits, with_bytes)
    )
    assert reference.relative_error(first, second) < 4e-4
    found = matmul.matmul(matmul.MatmulWeight(operand(weight)), to_gpu(x), path="bits").float().cpu().numpy()
    assert reference.relative_error(found, reference.product(weight, x)) < 2e-3
