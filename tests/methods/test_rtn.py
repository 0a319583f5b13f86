"""`rtn` against its rules written out in Python floats, one number at a time."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bcqfmt import BcqWeight
from bcqfmt.compiled.loops import compiled
from bcqfmt.compiled.rounding import KINDS, rounded
from bcqfmt.container.dtypes import round_to
from bcqfmt.converters.layouts.uniform import zero_points_of
from bcqfmt.converters.methods.rtn import Rtn
from bcqfmt.errors import BcqError
from methods.method_samples import DTYPES, as_dtype, group_errors, groups, job, matrices, matrix

SMALLEST = {"F16": 2.0**-24, "BF16": 2.0**-133, "F32": 2.0**-149}


def stored(x: float, dtype: str) -> float:
    """RN_dtype(x)."""
    return float(round_to(np.array([x]), dtype)[0])


def expected_grid(low: float, high: float, bits: int, symmetric: bool, dtype: str) -> tuple[float, int]:
    """(s, zp) by the rules."""
    size, top, middle = max(-low, high), 2**bits - 1, 2 ** (bits - 1)
    if size == 0:
        return 1.0, middle if symmetric else 0
    if symmetric and bits == 1:
        scale = -low if -low >= high else -high
    elif low == high:
        scale = size
    elif symmetric:
        scale = size / (middle - 0.5)
    else:
        low, high = min(low, 0.0), max(high, 0.0)
        scale = (high - low) / top
    scale = stored(scale, dtype) or math.copysign(SMALLEST[dtype], scale)
    if symmetric:
        return scale, middle
    if low == high:
        return scale, 1 if low < 0 else 0
    return scale, min(max(round(-low / scale), 0), top)


def expected_codes(values: Any, scale: float, zero: int, bits: int) -> list[int]:
    inverse = 1.0 / scale
    return [min(max(round(float(v) * inverse) + zero, 0), 2**bits - 1) for v in values]


def parts_of(weight: BcqWeight) -> tuple[Any, Any, Any]:
    return weight.codes(), weight.parts()["s0_scale"].array().astype(np.float64), zero_points_of(weight)


@settings(max_examples=300, deadline=None)
@given(
    matrices(),
    st.integers(1, 8),
    st.sampled_from([8, 9, 16, 32, 33, 64, "row"]),
    st.booleans(),
    st.sampled_from(["F16", "BF16", "F32"]),
)
def test_scales_zero_points_and_codes(
    sample: tuple[Any, str], bits: int, group_size: Any, symmetric: bool, scale_dtype: str
):
    weight, dtype = sample
    made = Rtn.build({"bits": bits, "group_size": group_size, "symmetric": symmetric, "scale_dtype": scale_dtype})
    quantized = made.quantize(job(weight, dtype)).weight
    quantized.check()
    size = weight.shape[1] if group_size == "row" else min(group_size, weight.shape[1])
    assert (quantized.scheme.segments[0].group_size, quantized.shape) == (size, weight.shape)
    assert (quantized.dtype, quantized.scheme.segments[0].scale) == (dtype, scale_dtype)
    codes, scale, zero = parts_of(quantized)
    for row, columns in groups(weight, size):
        values, j = weight[row, columns], columns.start // size
        s, zp = expected_grid(float(values.min()), float(values.max()), bits, symmetric, scale_dtype)
        assert (scale[row, j], zero[row, j]) == (s, zp)
        assert codes[row, columns].tolist() == expected_codes(values, s, zp, bits)


@settings(max_examples=60, deadline=None)
@given(matrices(), st.integers(1, 8), st.sampled_from([8, 32, "row"]), st.booleans())
def test_every_number_gets_the_nearest_value_of_its_grid(
    sample: tuple[Any, str], bits: int, group_size: Any, symmetric: bool
):
    weight, dtype = sample
    quantized = Rtn.build({"bits": bits, "group_size": group_size, "symmetric": symmetric}).quantize(job(weight, dtype))
    decoded = quantized.weight.dequantize("float64")
    size = quantized.weight.scheme.segments[0].group_size
    _, scale, zero = parts_of(quantized.weight)
    for row, columns in groups(weight, size):
        j = columns.start // size
        values = weight[row, columns].astype(np.float64)
        grid = scale[row, j] * (np.arange(2**bits) - int(zero[row, j]))
        nearest = np.abs(values[:, None] - grid).min(axis=1)
        assert (np.abs(values - decoded[row, columns]) <= nearest * (1 + 1e-12)).all()


@settings(max_examples=60, deadline=None)
@given(matrices(), st.integers(1, 8), st.sampled_from([8, 32, "row"]), st.booleans())
def test_the_search_finds_the_best_of_its_ranges(sample: tuple[Any, str], bits: int, group_size: Any, symmetric: bool):
    weight, dtype = sample
    options = {"bits": bits, "group_size": group_size, "symmetric": symmetric, "scale_dtype": "F16"}
    searched = Rtn.build({**options, "clip": "search"}).quantize(job(weight, dtype)).weight
    size = searched.scheme.segments[0].group_size
    errors = group_errors(weight, searched.dequantize("float64"), size)
    for row, columns in groups(weight, size):
        values = weight[row, columns].astype(np.float64)
        tried = []
        for k in range(9):
            factor = 1.0 - 0.1 * k
            low, high = float(values.min()) * factor, float(values.max()) * factor
            s, zp = expected_grid(low, high, bits, symmetric, "F16")
            codes = np.array(expected_codes(values, s, zp, bits))
            tried.append(float(np.square(values - s * (codes - zp)).sum()))
            if values.min() == values.max():
                break
        found = errors[row, columns.start // size]
        assert found <= min(tried) * (1 + 1e-12)  # finer steps beside the best may do better still
    plain = Rtn.build(options).quantize(job(weight, dtype)).weight
    assert (errors <= group_errors(weight, plain.dequantize("float64"), size) * (1 + 1e-12)).all()


@pytest.mark.parametrize(("bits", "least"), [(2, 0.6), (3, 0.9), (4, 0.97)])
def test_clipping_helps_where_few_codes_are_spread_over_a_wide_range(bits: int, least: float):
    weight = matrix(8, 1024)
    sums = []
    for clip in ("none", "search"):
        made = Rtn.build({"bits": bits, "clip": clip}).quantize(job(weight)).weight
        sums.append(group_errors(weight, made.dequantize(), 128).sum())
    assert sums[1] < least * sums[0]


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("value", [0.0, 0.3, -0.3, 6.1e-5, -(2.0**-24), 65504.0])
def test_zeros_and_constant_rows_are_exact(bits: int, symmetric: bool, value: float):
    weight = as_dtype(np.full((2, 19), value))
    made = Rtn.build({"bits": bits, "symmetric": symmetric, "group_size": 8}).quantize(job(weight)).weight
    assert (made.dequantize() == weight).all()
    if value == 0:
        assert (made.parts()["s0_scale"].array() == 1).all()


def test_a_scale_below_its_type_becomes_the_smallest_number():
    weight = as_dtype(np.linspace(-1e-9, 1e-9, 16)[None], "BF16")
    made = Rtn.build({"scale_dtype": "F16"}).quantize(job(weight, "BF16")).weight
    assert made.parts()["s0_scale"].array().tolist() == [[2.0**-24]]
    assert not made.dequantize().any()


@pytest.mark.parametrize("clip", ["none", "search"])
def test_threads_do_not_matter_and_neither_does_the_constructor(clip: str):
    weight = matrix(37, 200, "heavy")
    method = Rtn.build({"bits": 3, "group_size": 48, "clip": clip})
    made = [method.quantize(job(weight, threads=threads)).weight for threads in (1, 2, 5, 64)]
    assert len({one.digest() for one in made}) == 1
    codes, _, zero = parts_of(made[0])
    scale = made[0].parts()["s0_scale"].array()
    again = BcqWeight.from_affine(codes, scale, zero, group_size=48, bits=3)
    assert again.digest() == made[0].digest()


def test_the_weight_is_not_touched_and_any_order_in_memory_will_do():
    weight = matrix(16, 64)
    turned = np.asfortranarray(weight)
    before = weight.copy()
    assert Rtn.build({}).quantize(job(turned)).weight.digest() == Rtn.build({}).quantize(job(weight)).weight.digest()
    assert (weight == before).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nan_and_infinity_are_refused(bad: float):
    weight = matrix(4, 64)
    weight[2, 5] = bad
    with pytest.raises(BcqError, match=r"q_proj.*1 infinities or NaNs, the first at 2x5") as caught:
        Rtn.build({}).quantize(job(weight))
    assert caught.value.code == "BCQ-E622"


@pytest.mark.parametrize("shape", [(4, 7), (0, 64), (64,), (2, 4, 64)])
def test_shapes_without_a_group_are_refused(shape: tuple[int, ...]):
    with pytest.raises(BcqError, match=r"q_proj.*at least 1 row and 8 columns") as caught:
        Rtn.build({}).quantize(job(np.zeros(shape, np.float32)))
    assert caught.value.code == "BCQ-E621"


def test_a_scale_that_overflows_is_refused_and_a_wider_type_holds_it():
    weight = as_dtype(matrix(4, 64) * 1e9, "F32")
    with pytest.raises(BcqError, match=r"above 65504, the largest number of F16; expected .*scale_dtype F32") as caught:
        Rtn.build({"bits": 1, "scale_dtype": "F16"}).quantize(job(weight, "F32"))
    assert caught.value.code == "BCQ-E621"
    for wider in ("BF16", "F32"):
        Rtn.build({"bits": 1, "scale_dtype": wider}).quantize(job(weight, "F32")).weight.check()


@compiled
def rounded_in_a_loop(x: Any, kind: Any) -> Any:
    return rounded(x, kind)


@settings(max_examples=400, deadline=None)
@given(st.floats(allow_nan=False, allow_infinity=False), st.sampled_from(list(DTYPES)))
def test_rounding_in_compiled_loops_is_that_of_the_format(x: float, dtype: str):
    assert np.float64(rounded_in_a_loop(x, KINDS[dtype])).tobytes() == np.float64(stored(x, dtype)).tobytes()


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_rounding_at_the_ends_of_the_range(dtype: str):
    largest, smallest = float(np.finfo(np.float64).max), SMALLEST[dtype]
    for x in (smallest / 2, np.nextafter(smallest / 2, 1), smallest * 1.5, smallest * 2.5, -0.0, largest, -largest):
        assert np.float64(rounded_in_a_loop(x, KINDS[dtype])).tobytes() == np.float64(stored(x, dtype)).tobytes()
    assert rounded_in_a_loop(0.1, KINDS["F64"]) == 0.1
