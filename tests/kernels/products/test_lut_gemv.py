"""The readable look-up kernel in the simulator, against the float64 product of the normative decoder."""

from __future__ import annotations

import numpy as np
import pytest

from bcqfmt import BcqWeight
from products import kernel_samples as ks
from products import product_reference as reference
from simulated import sim_kernels
from simulated.cuda_sim import simulate

# every encoding with every number of planes; the rest goes around with periods that have no common factor
GROUPS = (8, 24, 32, 64, 12, 33, 128)
SHAPES = ((3, 128), (33, 160), (1, 200), (5, 129))
CASES = [
    (encoding, q, *SHAPES[(i + q) % 4], GROUPS[(3 * i + q) % 7], 1 + (2 * i + q) % 3)
    for i, encoding in enumerate(ks.ENCODINGS)
    for q in range(1, 9)
]


@pytest.mark.parametrize(("encoding", "q", "rows", "columns", "g", "batch"), CASES)
def test_every_encoding_and_number_of_planes(
    encoding: str, q: int, rows: int, columns: int, g: int, batch: int
) -> None:
    weight = ks.weight(encoding, q, rows, columns, min(g, columns), seed=q)
    x = ks.vectors(batch, columns, ("F32", "F16", "BF16")[q % 3])
    found = simulate(sim_kernels.lut_gemv, weight, x)
    assert found.same
    assert found.intact
    assert reference.relative_error(found.value, reference.product(weight, x)) < 1e-6


@pytest.mark.parametrize("batch", range(1, 9))
def test_every_batch_and_the_whole_row_as_group(batch: int) -> None:
    weight = ks.weight("bcq", 2, 5, 96, 96)
    x = ks.vectors(batch, 96, "F16")
    found = simulate(sim_kernels.lut_gemv, weight, x)
    assert reference.relative_error(found.value, reference.product(weight, x)) < 1e-6
    alone = simulate(sim_kernels.lut_gemv, weight, x[-1:])
    assert reference.relative_error(found.value[-1:], alone.value.astype(np.float64)) < 1e-6


@pytest.mark.parametrize(("columns", "g"), [(576, 512), (520, 320)])
def test_groups_of_several_tables_the_last_one_short(columns: int, g: int) -> None:
    weight, x = ks.weight("bcq", 2, 3, columns, g), ks.vectors(1, columns, "F16")
    found = simulate(sim_kernels.lut_gemv, weight, x)
    assert (found.same, found.intact) == (True, True)
    assert reference.relative_error(found.value, reference.product(weight, x)) < 1e-6


@pytest.mark.parametrize("outliers", ["add", "replace"])
def test_segments_reordering_and_outliers(outliers: str) -> None:
    weight = ks.mixed(19, 48, 96, outliers=outliers)
    x = ks.vectors(2, 144, "BF16")
    found = simulate(sim_kernels.lut_gemv, weight, x)
    assert (found.same, found.intact) == (True, True)
    assert reference.relative_error(found.value, reference.product(weight, x)) < 1e-6


def test_outliers_most_of_which_are_in_few_rows() -> None:
    weight, x = ks.in_few_rows(ks.weight("bcq", 2, 19, 200, 64), (3, 18)), ks.vectors(2, 200, "F16")
    found = simulate(sim_kernels.lut_gemv, weight, x)
    assert (found.same, found.intact) == (True, True)
    assert reference.relative_error(found.value, reference.product(weight, x)) < 1e-6


def test_outliers_of_which_there_are_none() -> None:
    weight = ks.weight("affine", 3, 4, 64, 32).with_outliers(
        np.zeros(5, np.int64), np.zeros(0, np.int64), np.zeros(0, np.float32)
    )
    x = ks.vectors(1, 64)
    found = simulate(sim_kernels.lut_gemv, weight, x)
    assert reference.relative_error(found.value, reference.product(weight, x)) < 1e-6


@pytest.mark.parametrize(("encoding", "planes"), [("affine", 1), ("affine", 3), ("bcq", 2), ("second-order", 2)])
def test_the_first_planes_only(encoding: str, planes: int) -> None:
    weight = ks.weight(encoding, 4, 6, 64, 32)
    x = ks.vectors(1, 64)
    found = simulate(sim_kernels.lut_gemv, weight, x, planes=planes)
    assert reference.relative_error(found.value, reference.product(weight, x, planes=planes)) < 1e-6


def test_a_matrix_of_a_stack() -> None:
    rng = np.random.default_rng(0)
    weight = BcqWeight.from_affine(
        rng.integers(0, 4, (3, 5, 40)), rng.normal(size=(3, 5, 5)).astype(np.float16), 1, group_size=8, bits=2
    )
    x = ks.vectors(1, 40)
    for e in range(3):
        found = simulate(sim_kernels.lut_gemv, weight, x, index=e)
        assert reference.relative_error(found.value, reference.product(weight, x, index=e)) < 1e-6


def test_the_layout_aligned64() -> None:
    rng = np.random.default_rng(1)
    low = BcqWeight.from_affine(
        rng.integers(0, 4, (4, 48)), np.ones((4, 3), np.float16), rng.integers(0, 4, (4, 3)), group_size=16, bits=2
    )
    low = low.with_second_order(
        rng.integers(0, 8, (4, 3)), np.ones((1, 3), np.float16), rng.integers(0, 8, (1, 3)), bits=4, rows=4
    )
    high = BcqWeight.from_affine(
        rng.integers(0, 16, (4, 16)), rng.normal(size=(4, 1)).astype(np.float16), 8, group_size=16, bits=4
    )
    weight = BcqWeight.from_segments([low, high]).to_aligned64()
    x = ks.vectors(1, 64)
    found = simulate(sim_kernels.lut_gemv, weight, x)
    assert reference.relative_error(found.value, reference.product(weight, x)) < 1e-6


@pytest.mark.parametrize(("result", "bound"), [("F16", 1e-3), ("BF16", 4e-3), ("F32", 1e-6)])
def test_results_in_every_type(result: str, bound: float) -> None:
    weight = ks.weight("bcq", 3, 70, 64, 32)
    x = ks.vectors(2, 64, "F16")
    found = simulate(sim_kernels.lut_gemv, weight, x, result=result)
    assert (found.same, found.intact) == (True, True)
    assert reference.relative_error(found.value, reference.product(weight, x)) < bound


def test_many_tiles_blocks_and_columns() -> None:
    weight = ks.weight("bcq", 2, 70, 1100, 100)  # 143 chunks of 8: five tiles
    x = ks.vectors(1, 1100, "F16")
    found = simulate(sim_kernels.lut_gemv, weight, x)
    assert (found.same, found.intact) == (True, True)
    assert reference.relative_error(found.value, reference.product(weight, x)) < 1e-6


def test_float_zeros_that_round_are_taken_without_the_rounding() -> None:
    rng = np.random.default_rng(3)
    zeros = rng.normal(7, 1, (6, 2)).astype(np.float16)
    scale = rng.normal(1, 0.2, (6, 2)).astype(np.float16)
    codes = rng.integers(0, 16, (6, 64))
    weight = BcqWeight.from_float_zero(codes, scale, zeros, group_size=32, bits=4)
    x = ks.vectors(1, 64)
    found = simulate(sim_kernels.lut_gemv, weight, x)
    plain = np.repeat(scale.astype(float), 32, 1) * (codes - np.repeat(zeros.astype(float), 32, 1))
    assert reference.relative_error(found.value, x.astype(float) @ plain.T) < 1e-6
    assert 0 < reference.relative_error(found.value, reference.product(weight, x)) < 2**-10


@pytest.mark.parametrize("count", [1, 8, 9, 30])
def test_matmul_chooses_and_all_ways_agree(count: int) -> None:
    weight = ks.weight("affine", 4, 6, 64, 32)
    x = ks.vectors(count, 64)
    found = simulate(sim_kernels.product, weight, x)
    assert found.dtype == np.float32
    assert reference.relative_error(found, reference.product(weight, x)) < 1e-5


def test_matmul_keeps_leading_dimensions_and_takes_none() -> None:
    weight = ks.weight("affine", 2, 6, 64, 32)
    assert simulate(sim_kernels.product, weight, np.ones((2, 3, 64), np.float16)).shape == (2, 3, 6)
    assert simulate(sim_kernels.product, weight, np.ones((0, 64), np.float16)).shape == (0, 6)
    assert simulate(sim_kernels.product, weight, np.ones(64, np.float16)).shape == (6,)
