"""The kernel for 2/4-bit weights in the simulator, against the float64 product of the normative decoder."""

from __future__ import annotations

import numpy as np
import pytest

from bcqfmt import BcqWeight
from bcqfmt.container.dtypes import numpy_dtype
from bcqfmt.kernels import mixed
from bcqfmt.kernels.mixed.layout import FourBit, TwoBit, pack_units
from bcqfmt.kernels.mixed.shape import MixedShape, space_for
from bcqfmt.kernels.operands.outliers import OutlierNeeds
from bcqfmt.kernels.runtime.limits import SHARED_LIMIT
from products import kernel_samples as ks
from products import product_reference as reference
from simulated import sim_mixed
from simulated.cuda_sim import SimulationError, simulate

BOUND = 2e-5  # 16-bit integers for x
LARGE = 1e-4  # where one element of a group is twenty times the others


def normal(batch: int, columns: int, dtype: str = "F16") -> np.ndarray:
    """Activations of one size."""
    return np.random.default_rng(columns).normal(size=(batch, columns)).astype(numpy_dtype(dtype))


@pytest.mark.parametrize(
    ("rows", "low", "high", "perm", "outliers", "dtype"),
    [
        (16, 256, 128, False, "", "F16"),
        (33, 528, 200, True, "add", "F16"),
        (1, 768, 256, True, "replace", "F16"),
        (70, 272, 8, True, "add", "BF16"),
        (17, 256, 0, False, "add", "F16"),
        (20, 0, 300, True, "", "F16"),
        (40, 1536, 512, True, "add", "BF16"),
        (18, 48, 16, True, "replace", "BF16"),
    ],
)
def test_any_shape(rows: int, low: int, high: int, perm: bool, outliers: str, dtype: str) -> None:
    weight = sim_mixed.weight(rows, low, high, perm=perm, outliers=outliers)
    x = normal(1, low + high, dtype)
    found = simulate(sim_mixed.product, weight, x)
    assert (found.same, found.intact) == (True, True)
    assert reference.relative_error(found.value, reference.product(weight, x)) < BOUND


def test_float32_vectors_keep_their_precision() -> None:
    weight = sim_mixed.weight(19, 272, 136, outliers="add")
    x = ks.vectors(1, 408)
    found = simulate(sim_mixed.product, weight, x)
    assert reference.relative_error(found.value, reference.product(weight, x)) < 1e-6


@pytest.mark.parametrize("dtype", ["F16", "F32"])
def test_two_vectors_at_once(dtype: str) -> None:
    weight = sim_mixed.weight(19, 256, 136, outliers="replace")
    x = normal(2, 392, dtype)
    found = simulate(sim_mixed.product, weight, x)
    assert (found.same, found.intact) == (True, True)
    assert reference.relative_error(found.value, reference.product(weight, x)) < BOUND
    alone = simulate(sim_mixed.product, weight, x[1:])
    assert alone.value.tobytes() == found.value[1:].tobytes()


def test_outliers_most_of_which_are_in_few_rows() -> None:
    weight = ks.in_few_rows(sim_mixed.weight(37, 256, 136), (2, 15, 36))
    x = normal(2, 392, "F16")
    found = simulate(sim_mixed.product, weight, x)
    assert (found.same, found.intact) == (True, True)
    assert reference.relative_error(found.value, reference.product(weight, x)) < BOUND


@pytest.mark.parametrize(("result", "bound"), [("F16", 1e-3), ("BF16", 4e-3)])
def test_results_in_every_type(result: str, bound: float) -> None:
    weight = sim_mixed.weight(21, 256, 128, outliers="add")
    x = ks.vectors(1, 384, "F16")
    found = simulate(sim_mixed.product, weight, x, result=result)
    assert (found.same, found.intact) == (True, True)
    assert reference.relative_error(found.value, reference.product(weight, x)) < bound


def test_the_number_of_stages_changes_no_bit() -> None:
    weight = sim_mixed.weight(40, 528, 128, outliers="add")
    x = ks.vectors(1, 656, "F16")
    found = [simulate(sim_mixed.product, weight, x, stages=stages).value for stages in (3, 1)]
    assert found[0].tobytes() == found[1].tobytes()
    assert reference.relative_error(found[0], reference.product(weight, x)) < LARGE


@pytest.mark.parametrize(("slices", "sides"), [(1, 1), (2, 3), (4, 2)])
def test_other_shares_of_the_work(slices: int, sides: int) -> None:
    weight = sim_mixed.weight(70, 528, 128, outliers="add", share=0.1)
    x = normal(1, 656)
    found = simulate(sim_mixed.product, weight, x, slices=slices, sides=sides)
    assert (found.same, found.intact) == (True, True)
    assert reference.relative_error(found.value, reference.product(weight, x)) < BOUND


@pytest.mark.parametrize(
    ("rows", "low", "high", "outliers", "dtype", "batch", "shape"),
    [
        pytest.param(200, 1536, 512, "add", "F16", 1, {"slices": 4, "sides": 2, "stages": 2}, marks=pytest.mark.soak),
        (100, 512, 256, "add", "F16", 1, {"slices": 4, "sides": 2, "stages": 2}),
        (70, 272, 8, "replace", "BF16", 2, {"slices": 2, "sides": 3, "stages": 1}),
        (50, 256, 131, "add", "F32", 1, {"slices": 2, "sides": 1, "stages": 3}),
        (20, 0, 300, "", "F16", 1, {"slices": 5, "sides": 2, "stages": 2}),
    ],
)
def test_buffers_and_warps(
    rows: int, low: int, high: int, outliers: str, dtype: str, batch: int, shape: dict[str, int]
) -> None:
    weight = sim_mixed.weight(rows, low, high, outliers=outliers)
    x = normal(batch, low + high, dtype)
    found = simulate(sim_mixed.product, weight, x, **shape)
    assert (found.same, found.intact) == (True, True)
    assert reference.relative_error(found.value, reference.product(weight, x)) < BOUND


def test_more_outliers_than_a_tile_has_room_for() -> None:
    plain = sim_mixed.weight(18, 1280, 128)
    counts = np.zeros(18, np.int64)
    counts[4:6] = 1400  # more bytes than the 8192 that are asked for ahead
    columns = np.tile(np.arange(1400), 2)
    values = np.random.default_rng(2).normal(size=2800).astype(np.float16)
    weight = plain.with_outliers(np.concatenate([[0], np.cumsum(counts)]), columns, values, mode="replace")
    x = normal(1, 1408)
    found = simulate(sim_mixed.product, weight, x)
    assert reference.relative_error(found.value, reference.product(weight, x)) < BOUND


def test_outliers_of_which_there_are_none() -> None:
    weight = sim_mixed.weight(5, 256, 128, perm=False).with_outliers(
        np.zeros(6, np.int64), np.zeros(0, np.int64), np.zeros(0, np.float16)
    )
    x = normal(1, 384)
    found = simulate(sim_mixed.product, weight, x)
    assert reference.relative_error(found.value, reference.product(weight, x)) < BOUND


def test_the_layout_aligned64_gives_the_same_bits() -> None:
    rng = np.random.default_rng(1)
    low = BcqWeight.from_affine(
        rng.integers(0, 4, (20, 192)),
        np.ones((20, 12), np.float16),
        rng.integers(0, 4, (20, 12)),
        group_size=16,
        bits=2,
    )
    low = low.with_second_order(
        rng.integers(0, 8, (20, 12)), np.full((2, 12), 0.01, np.float16), rng.integers(0, 8, (2, 12)), bits=4, rows=16
    )
    scale = rng.normal(size=(20, 1)).astype(np.float16)
    high = BcqWeight.from_affine(rng.integers(0, 16, (20, 64)), scale, 8, group_size=64, bits=4)
    plain = BcqWeight.from_segments([low, high], perm=rng.permutation(256))
    x = normal(1, 256)
    tiled = simulate(sim_mixed.product, plain.to_aligned64(), x).value
    assert reference.relative_error(tiled, reference.product(plain, x)) < BOUND
    assert tiled.tobytes() == simulate(sim_mixed.product, plain, x).value.tobytes()


def test_infinities_in_x_are_not_hidden() -> None:
    weight = sim_mixed.weight(16, 256, 0, perm=False)
    x = normal(1, 256)
    x[0, 3] = np.inf
    assert np.isnan(simulate(sim_mixed.product, weight, x).value).all()


def test_the_smallest_and_the_largest_numbers() -> None:
    weight = sim_mixed.weight(16, 256, 128)
    for size in (2.0**-24, 60000.0, 0.0):
        x = np.full((1, 384), size, np.float16)
        found = simulate(sim_mixed.product, weight, x)
        assert reference.relative_error(found.value, reference.product(weight, x)) < BOUND
    x = np.full((1, 384), 1e38, np.float32)
    found = simulate(sim_mixed.product, sim_mixed.weight(16, 256, 128, perm=False), x * np.float32(1e-3))
    assert np.isfinite(found.value).all()


def test_bytes_stay_those_of_the_format() -> None:
    weight = sim_mixed.weight(64, 3072, 1024)
    assert 8 * simulate(sim_mixed.bytes_per_weight, weight) < weight.bits_per_weight + 0.03 + 16 / 64


def test_units_hold_every_code_where_the_layout_says() -> None:
    rng = np.random.default_rng(5)
    codes, zeros = rng.integers(0, 4, (21, 300), np.uint8), rng.integers(0, 4, (21, 19), np.uint8)
    scales, units = rng.integers(0, 16, (21, 19), np.uint8), rng.normal(size=(2, 19)).astype(np.float16)
    lows = rng.integers(0, 16, (2, 19), np.uint8)
    four = FourBit(
        rng.integers(0, 16, (21, 130), np.uint8), rng.normal(size=(21, 2)).astype(np.float16),
        rng.integers(0, 16, (21, 2), np.uint8),
    )  # fmt: skip
    made = pack_units(TwoBit(codes, scales, zeros, units, lows), four).view(np.uint8).reshape(2, -1)
    assert made.shape[1] == 2 * 1264 + 2 * 1072
    for row, column in rng.integers(0, (21, 300), (200, 2)):
        tile, r, h = row // 16, row % 8, row % 16 // 8
        unit = made[tile, column // 256 * 1264 :][:1264]
        half, i, k, t, b = column % 256 // 128, column // 64 % 2, column // 16 % 4, column // 4 % 4, column % 4
        words = unit[:1024].view(np.uint32).reshape(2, 32, 4)
        assert words[half, 4 * r + t, k] >> (8 * b + 2 * (h + 2 * i)) & 3 == codes[row, column]
        j, t = column % 256 // 64, column // 16 % 4
        assert unit[1024:1152].view(np.uint32)[4 * r + t] >> (16 * h + 4 * j) & 15 == scales[row, column // 16]
        assert unit[1152:1216].view(np.uint16)[4 * r + t] >> (4 * j + 2 * h) & 3 == zeros[row, column // 16]
        assert unit[1216:1248].view(np.float16)[4 * t + j] == units[tile, column // 16]
        assert unit[1248:1264][4 * t + j] == lows[tile, column // 16]
    for row, column in rng.integers(0, (21, 130), (200, 2)):
        tile, r, h = row // 16, row % 8, row % 16 // 8
        unit = made[tile, 2 * 1264 + column // 128 * 1072 :][:1072]
        m, i, t, b = column % 128 // 32, column // 16 % 2, column // 4 % 4, column % 4
        words = unit[:1024].view(np.uint32).reshape(2, 32, 4)
        assert words[(2 * m + i) // 4, 4 * r + t, (2 * m + i) % 4] >> (8 * b + 4 * h) & 15 == four.codes[row, column]
        assert unit[1024:1056].view(np.float16)[2 * r + h] == four.scales[row, column // 128]
        assert unit[1056:1064][r] >> (4 * h) & 15 == four.zeros[row, column // 128]


def test_shapes_that_fit() -> None:
    space = space_for(MixedShape(1, 1, 1, 4, 10, 2, 3), 24, 16, 8192, OutlierNeeds(4, 8192, 300))
    assert space is not None
    assert space.shared_bytes <= SHARED_LIMIT
    assert space_for(MixedShape(2, 0, 0, 8), 96, 64, 32768, OutlierNeeds(8, 32768, 300)) is None


@pytest.mark.parametrize(("columns", "vectors"), [(4096, 2), (16384, 2), (22016, 1), (28672, 1), (49152, 0)])
def test_wide_weights_are_taken_one_vector_at_a_time(columns: int, vectors: int) -> None:
    two, four = columns * 3 // 4 // 256, columns // 4 // 128
    wide = mixed.MixedOperand(shape=(16, columns), twos=two, fours=four, units=None, perm=None)
    assert mixed.batch_limit(wide, "F16") == vectors


@pytest.mark.parametrize(
    ("weight", "said"),
    [
        (ks.weight("affine", 3, 4, 64, 32), "affine of 3 bits"),
        (ks.weight("bcq", 2, 4, 64, 32), "bcq of 2 bits"),
        (ks.weight("affine", 2, 4, 64, 16), "other scales"),
        (ks.weight("second-order", 2, 4, 64, 8), "groups of 8 columns"),
        (ks.weight("second-order", 2, 40, 64, 16, seed=1), "for 2 rows"),
        (ks.weight("affine", 4, 4, 256, 32), "groups of 32 columns"),
        (ks.weight("affine", 4, 4, 128, 128, numbers="F32"), "F16 cannot hold"),
    ],
)
def test_weights_that_it_cannot_take(weight: BcqWeight, said: str) -> None:
    with pytest.raises(SimulationError) as caught:
        simulate(sim_mixed.product, weight, normal(1, weight.spec.columns))
    assert caught.value.kind == "BCQ-E553"
    assert said in caught.value.text


def test_arguments_that_it_cannot_take() -> None:
    weight = sim_mixed.weight(16, 256, 0, perm=False)
    for x in (normal(3, 256), normal(1, 128), np.ones((1, 256)), normal(2, 256)[:, ::2]):
        with pytest.raises(SimulationError) as caught:
            simulate(sim_mixed.checked, weight, x)
        assert caught.value.kind == "BCQ-E552"
