"""`bcq`: never worse than greedy and `rtn`, every code the nearest, every parameter what the format can hold."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bcqfmt import BcqWeight
from bcqfmt.converters.methods.bcq import Bcq
from bcqfmt.converters.methods.errors import decoded_square_sums
from bcqfmt.converters.methods.loops.bcq_fit import fit
from bcqfmt.converters.methods.loops.bcq_levels import (
    edge,
    gather,
    levels_of,
    measure,
    measure_nearest,
    move_levels,
    new_work,
    place,
    prefix_sums,
)
from bcqfmt.converters.methods.rtn import Rtn
from bcqfmt.errors import BcqError
from methods import bcq_oracle
from methods.method_samples import KINDS, as_dtype, calibration, digest, group_errors, groups, job, matrices, matrix

ALMOST = 1 + 1e-11  # two ways to add up the same squares


def quantized(weight: Any, dtype: str = "F16", threads: int = 1, **given: Any) -> BcqWeight:
    made = Bcq.build(given).quantize(job(weight, dtype, threads=threads)).weight
    made.check()
    return made


def numbers(weight: BcqWeight) -> tuple[Any, Any]:
    """alpha [q, out, G] and z [out, G] as stored, in float64."""
    parts = weight.parts()
    alpha = parts["s0_alpha"].array().astype(np.float64)
    return alpha, parts["s0_bias"].array().astype(np.float64) if "s0_bias" in parts else np.zeros(alpha.shape[1:])


# ------------------------------------------------------------------------------------------------- guarantees


SUBNORMAL = np.float32(2.0**-24) * np.array([[-1, 3, 1, -1, -1, 1, -1, -3], [-1, 0, -2, -1, 0, 1, 1, 1]], np.float32)


@settings(max_examples=40, deadline=None)
@given(matrices(), st.integers(1, 6), st.sampled_from([8, 16, 33, "row"]), st.booleans(), st.sampled_from([0, 1, 15]))
@example((SUBNORMAL, "F16"), 2, 8, True, 0)
def test_no_group_is_worse_than_greedy(sample: tuple[Any, str], bits: int, group_size: Any, bias: bool, rounds: int):
    weight, dtype = sample
    made = quantized(weight, dtype, bits=bits, group_size=group_size, bias=bias, rounds=rounds)
    size, parts = made.scheme.segments[0].group_size, made.parts()
    types = [parts[name].dtype for name in ("s0_alpha", "s0_bias") if name in parts]  # F32 where F16 is too coarse
    found = group_errors(weight, made.dequantize(), size)
    whole = weight.shape[1] // size
    for piece, errors in zip(bcq_oracle.grouped(weight, size), (found[:, :whole], found[:, whole:]), strict=False):
        for around_mean in {False, bias}:
            start = bcq_oracle.greedy(piece, bits, around_mean)
            limit = bcq_oracle.value_errors(piece, *start, types[0], dtype, types[-1])
            assert (errors.reshape(-1) <= limit * ALMOST).all()


@settings(max_examples=50, deadline=None)
@given(matrices(), st.integers(1, 6), st.sampled_from([8, 16, 33, "row"]), st.sampled_from(["F16", "BF16"]))
def test_no_matrix_is_worse_than_with_rtn(sample: tuple[Any, str], bits: int, group_size: Any, scale_dtype: str):
    weight, dtype = sample
    common = {"bits": bits, "group_size": group_size, "scale_dtype": scale_dtype}
    _, found = decoded_square_sums(weight, quantized(weight, dtype, **common))
    for symmetric in (False, True):
        for clip in ("none", "search"):
            method = Rtn.build({**common, "symmetric": symmetric, "clip": clip})
            _, limit = decoded_square_sums(weight, method.quantize(job(weight, dtype)).weight)
            assert found <= limit * ALMOST


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("dtype", ["F16", "F32"])
def test_a_matrix_that_was_quantized_before_is_not_worse_than_with_rtn(bits: int, dtype: str):
    grid = (
        Rtn.build({"bits": bits, "group_size": 32, "scale_dtype": "F16"})
        .quantize(job(matrix(8, 128, "shifted"), dtype))
        .weight
    )
    weight = grid.dequantize().astype(np.float32)
    for clip in ("none", "search"):
        given = {"bits": bits, "group_size": 32, "clip": clip, "scale_dtype": "F16"}
        again = Rtn.build(given).quantize(job(weight, dtype)).weight
        found = quantized(weight, dtype, bits=bits, group_size=32)
        assert decoded_square_sums(weight, found)[1] <= decoded_square_sums(weight, again)[1] * ALMOST


def test_the_bias_gets_more_bits_only_where_it_needs_them():
    codes = np.arange(64).reshape(2, 32) % 16
    zero = np.array([[3], [14]])
    grid = BcqWeight.from_affine(codes, np.full((2, 1), 0.0999, np.float16), zero, group_size=32, bits=4)
    weight = grid.dequantize("float32")
    made = quantized(weight, "F32", bits=4, group_size=32)
    assert (made.scheme.segments[0].alpha, made.scheme.segments[0].bias) == ("F16", "F32")
    assert (made.dequantize() == weight).all()
    tiny = BcqWeight.from_affine(codes, np.full((2, 1), 2.0**-24, np.float16), zero, group_size=32, bits=4)
    weight = tiny.dequantize("float32")  # half a step is below F16 as well
    made = quantized(weight, "F32", bits=4, group_size=32)
    assert (made.scheme.segments[0].alpha, made.scheme.segments[0].bias) == ("F32", "F32")
    assert (made.dequantize() == weight).all()
    made = quantized(matrix(2, 32), bits=4, group_size=32)
    assert (made.scheme.segments[0].alpha, made.scheme.segments[0].bias) == ("F16", "F16")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_the_published_alternation_does_not_get_further(kind: str, bias: bool, bits: int):
    weight = matrix(8, 512, kind)
    _, found = decoded_square_sums(weight, quantized(weight, bits=bits, bias=bias))
    (piece,) = bcq_oracle.grouped(weight, 128)
    limit = bcq_oracle.alternated(piece, bits, bias).sum()  # nothing rounded, but one start only
    assert found <= limit * 1.01


def test_more_rounds_and_more_planes_never_hurt():
    weight = matrix(8, 512, "heavy")
    errors = [decoded_square_sums(weight, quantized(weight, bits=3, rounds=rounds))[1] for rounds in (0, 1, 3, 15, 60)]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.9 * errors[0]
    errors = [decoded_square_sums(weight, quantized(weight, bits=bits))[1] for bits in range(1, 7)]
    assert all(after < 0.5 * before for before, after in itertools.pairwise(errors))


# ------------------------------------------------------------------------------------------------- the result


@settings(max_examples=80, deadline=None)
@given(matrices(), st.integers(1, 6), st.sampled_from([8, 16, 33, "row"]), st.booleans())
def test_codes_are_nearest_and_plane_0_is_the_largest(sample: tuple[Any, str], bits: int, group_size: Any, bias: bool):
    weight, dtype = sample
    made = quantized(weight, dtype, bits=bits, group_size=group_size, bias=bias)
    alpha, z = numbers(made)
    assert (alpha >= 0).all()
    assert (np.diff(alpha, axis=0) <= 0).all()
    assert not (np.signbit(alpha) | np.signbit(np.where(z == 0, z, 1))).any()
    size, codes, decoded = made.scheme.segments[0].group_size, made.codes(), made.dequantize().astype(np.float64)
    for row, columns in groups(weight, size):
        j = columns.start // size
        levels = bcq_oracle.levels(alpha[:, row, j], float(z[row, j]), dtype)
        values = weight[row, columns].astype(np.float64)
        assert (levels[codes[row, columns]] == decoded[row, columns]).all()
        assert (np.abs(values - decoded[row, columns]) <= np.abs(values[:, None] - levels).min(axis=1) * ALMOST).all()


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("value", [0.0, 0.3, -0.3, 6.1e-5, -(2.0**-24), 65504.0])
def test_zeros_and_constant_rows_are_exact(bits: int, bias: bool, value: float):
    weight = as_dtype(np.full((2, 19), value))
    assert (quantized(weight, bits=bits, bias=bias, group_size=8).dequantize() == weight).all()


def test_few_distinct_numbers_are_exact():
    rng = np.random.default_rng(0)
    weight = as_dtype(rng.choice([-0.5, 0.25, 0.75, 1.5], (4, 64)))  # 0.5 +- 0.625 +- 0.375
    assert (quantized(weight, bits=2, group_size=64).dequantize() == weight).all()


def test_threads_do_not_matter_and_neither_does_the_constructor():
    weight = matrix(37, 200, "heavy")
    made = [quantized(weight, threads=threads, bits=3, group_size=48) for threads in (1, 2, 5, 64)]
    assert len({one.digest() for one in made}) == 1
    codes, parts = made[0].codes(), made[0].parts()
    bits = np.stack([codes >> 2 & 1, codes >> 1 & 1, codes & 1])
    again = BcqWeight.from_bcq(bits, parts["s0_alpha"].array(), parts["s0_bias"].array(), group_size=48)
    assert again.digest() == made[0].digest()


@pytest.mark.parametrize("scale_dtype", ["F16", "BF16", "F32"])
@pytest.mark.parametrize("dtype", ["F16", "BF16", "F32"])
def test_types_of_parameters_and_values(scale_dtype: str, dtype: str):
    made = quantized(matrix(4, 96, dtype=dtype), dtype, scale_dtype=scale_dtype, group_size=32)
    assert (made.dtype, made.scheme.segments[0].alpha, made.scheme.segments[0].bias) == (
        dtype,
        scale_dtype,
        scale_dtype,
    )
    made = quantized(matrix(4, 96, dtype=dtype), dtype, scale_dtype=scale_dtype, bias=False)
    assert made.scheme.segments[0].bias is None


def test_notes_say_where_groups_come_from():
    result = Bcq.build({"group_size": 32}).quantize(job(matrix(8, 128)))
    assert sum(result.notes["starts"].values()) == 32
    assert all(
        name.split(",")[0] in ("greedy", "greedy around the mean", "rtn", "rtn symmetric")
        for name in result.notes["starts"]
    )


# ------------------------------------------------------------------------------------------------- bad input


def test_nan_shapes_and_overflow_are_refused():
    weight = matrix(4, 64)
    weight[0, 0] = np.nan
    with pytest.raises(BcqError, match="the first at 0x0") as caught:
        quantized(weight)
    assert caught.value.code == "BCQ-E622"
    with pytest.raises(BcqError, match="at least 1 row and 8 columns") as caught:
        quantized(matrix(4, 7))
    assert caught.value.code == "BCQ-E621"
    large = as_dtype(matrix(4, 64) * 1e9, "F32")
    for bias in (False, True):
        with pytest.raises(BcqError, match="plane scale of row 0, group 0 above 65504") as caught:
            quantized(large, "F32", bias=bias)
        assert caught.value.code == "BCQ-E621"
        quantized(large, "F32", bias=bias, scale_dtype="BF16")


# ------------------------------------------------------------------------------------------------- the steps


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 4), st.integers(8, 60), st.booleans(), st.booleans(), st.booleans())
def test_a_round_is_nearest_levels_and_least_squares(seed: int, q: int, n: int, bias: bool, few: bool, weighted: bool):
    rng = np.random.default_rng(seed)
    values = np.sort(rng.integers(-3, 4, n) if few else rng.normal(size=n)).astype(np.float32)
    work = new_work(n, q)
    if weighted:
        work.weights[:] = np.exp(rng.normal(size=n))
    weights = work.weights.copy()
    power = prefix_sums(values, work)
    assert power == pytest.approx(float((weights * np.square(values, dtype=np.float64)).sum()))
    alpha, z = np.abs(rng.normal(size=q)), float(rng.normal()) if bias else 0.0
    for _ in range(3):  # the second and third time from other edges and another order
        levels = bcq_oracle.levels(alpha, z, "F64")
        move_levels(alpha, z, work) if work.labels.any() else levels_of(alpha, z, 3, work)
        assert (np.diff(work.levels) >= 0).all()
        assert (levels[work.labels] == work.levels).all()
        place(values, work, 2**q)
        codes = np.repeat(work.labels, np.diff(work.edges))
        best = np.abs(values[:, None].astype(np.float64) - levels).min(axis=1)
        assert np.allclose(np.abs(values - levels[codes]), best, rtol=0, atol=1e-14)
        error = float((weights * np.square(values - levels[codes])).sum())
        assert gather(work, 2**q, power) == pytest.approx(error, abs=1e-10 * power)
        assert measure(values, work, 2**q) == pytest.approx(error, rel=1e-12)
        assert measure_nearest(values, work, 2**q) == pytest.approx(error, rel=1e-12)
        signs = np.array([[1.0 if code >> (q - 1 - i) & 1 else -1.0 for i in range(q)] for code in codes])
        columns = np.column_stack([signs, np.ones(n)]) if bias else signs
        roots = np.sqrt(weights)
        solution, *_ = np.linalg.lstsq(columns * roots[:, None], values * roots, rcond=None)
        least = float((weights * np.square(values - columns @ solution)).sum())
        z = float(fit(alpha, z, bias, work))
        reached = float((weights * np.square(values - signs @ alpha - z)).sum())
        assert reached == pytest.approx(least, rel=1e-7, abs=1e-12 * power)
        alpha = np.abs(alpha)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=40), st.integers(-1, 10), st.integers(0, 99), st.integers(0, 99)
)
def test_an_edge_is_found_from_anywhere(numbers: list[int], middle: int, low: int, hint: int):
    values = np.sort(np.array(numbers, np.float32))
    low = min(low, len(numbers))
    expected = max(low, int(np.searchsorted(values, middle, side="right")))
    assert edge(values, len(numbers), float(middle), low, hint) == expected
    shorter = len(numbers) // 2
    if low <= shorter:
        assert edge(values, shorter, float(middle), low, hint) == min(expected, max(shorter, low))


# ------------------------------------------------------------------------------------------------- weighting


def weighted_error(weight: Any, made: BcqWeight, stats: Any) -> float:
    importance = stats.square_sum / stats.square_sum.mean() + 0.01
    return float((np.square(weight.astype(np.float64) - made.dequantize()) * importance).sum())


@settings(max_examples=40, deadline=None)
@given(matrices(), st.integers(1, 5), st.sampled_from([8, 33, "row"]), st.integers(0, 99))
def test_weighted_errors_are_never_above_those_of_rtn(sample: tuple[Any, str], bits: int, group_size: Any, seed: int):
    weight, dtype = sample
    known = calibration(weight.shape[1], seed=seed)
    build = Bcq.build({"bits": bits, "group_size": group_size, "weighting": "activations"})
    found = weighted_error(weight, build.quantize(job(weight, dtype, known)).weight, known)
    for clip in ("none", "search"):
        given = {"bits": bits, "group_size": group_size, "clip": clip, "scale_dtype": "F16"}
        plain = Rtn.build(given).quantize(job(weight, dtype)).weight
        assert found <= weighted_error(weight, plain, known) * ALMOST


def test_columns_of_large_inputs_come_out_better_with_weighting():
    weight = matrix(64, 256, "gauss")
    known = calibration(256)
    known.square_sum[::32] *= 1e4
    plain = quantized(weight, bits=3, group_size=64)
    made = Bcq.build({"bits": 3, "group_size": 64, "weighting": "activations"}).quantize(job(weight, "F16", known))
    errors = [np.square(weight - one.dequantize())[:, ::32].sum() for one in (plain, made.weight)]
    assert errors[1] < 0.05 * errors[0]
    assert weighted_error(weight, made.weight, known) < 0.2 * weighted_error(weight, plain, known)


def test_weighting_does_not_depend_on_threads_and_says_what_it_needs():
    weight, known = matrix(40, 200, "gauss"), calibration(200)
    build = Bcq.build({"bits": 2, "group_size": 48, "weighting": "activations"})
    one, two = (digest(build.quantize(job(weight, "F16", known, threads))) for threads in (1, 2))
    assert one == two
    assert "squared inputs" in (build.needs_stats() or "")
    with pytest.raises(BcqError, match="BCQ-E623"):
        build.quantize(job(weight))
