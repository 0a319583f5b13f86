"""The compiled decoder gives the bits of the normative one; its rounding is that of `dtypes.round_to`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numba
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bcqfmt import BcqWeight
from bcqfmt.container.dtypes import float64_of, numpy_dtype, round_to
from bcqfmt.kernels import cpu
from products import kernel_samples as ks
from weights.strategies import bits_of, examples, tiled_weights, weights

CALM: Any = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}  # compiling takes time
KINDS = ("F16", "BF16", "F32", "F64")


def assert_same(weight: BcqWeight, planes: int | None = None) -> None:
    for index in range(weight.spec.stack):
        stack = len(weight.shape) == 3
        matrix = cpu.prepare(weight, planes=planes, index=index if stack else None)
        for kind in KINDS:
            expected = weight.dequantize(kind, planes=planes)
            assert bits_of(matrix.dequantize(kind)) == bits_of(expected[index] if stack else expected)
        logical = weight.dequantize(planes=planes)
        for kind in KINDS[:2]:  # as a dense copy is loaded
            found = np.empty(matrix.shape, numpy_dtype(kind))
            matrix.decode_into(kind, 0, found.view(np.uint16), twice=True)
            assert bits_of(found) == bits_of(round_to(float64_of(logical[index] if stack else logical), kind))


@given(weights(nonfinite=None))
@settings(examples(40), **CALM)
def test_any_weight_decodes_to_the_same_bits(pair: tuple[BcqWeight, Any]) -> None:
    assert_same(pair[0])


@given(tiled_weights())
@settings(examples(20), **CALM)
def test_tiles_decode_to_the_same_bits(pair: tuple[BcqWeight, Any]) -> None:
    assert_same(pair[0])


@given(weights(encodings=("affine", "bcq"), max_segments=2))
@settings(examples(20), **CALM)
def test_the_first_planes_decode_to_the_same_bits(pair: tuple[BcqWeight, Any]) -> None:
    weight, _ = pair
    for planes in {1, max(segment.bits for segment in weight.scheme.segments) - 1} - {0}:
        assert_same(weight, planes)


@pytest.mark.parametrize("encoding", ks.ENCODINGS)
@pytest.mark.parametrize(("q", "g"), [(2, 64), (4, 16), (4, 128), (5, 40), (8, 32), (8, 270)])
def test_sixteen_at_a_time_and_one_at_a_time_agree(encoding: str, q: int, g: int) -> None:
    for extras in ({}, {"perm": True, "outliers": "add"}, {"outliers": "replace"}):
        assert_same(ks.weight(encoding, q, 11, 300, g, dtype="BF16", **extras))


@given(st.integers(1, 8), st.integers(8, 600), st.integers(1, 5), st.integers(1, 600))
def test_the_table_of_a_row_is_large_enough(q: int, g: int, whole: int, rest: int) -> None:
    """A value for every code of every group, the short last one too; sixteen are read from any of them on."""
    from bcqfmt.kernels.cpu.decode import row_table_size

    groups = -(-(whole * g + min(rest, g)) // g)
    if 2**q <= g:
        assert row_table_size(q, g, groups) >= max(groups * 2**q, (groups - 1) * 2**q + 16)


def float_weight(formula: str, q: int, scales: Any, seconds: Any, columns: int) -> BcqWeight:
    """Rows of F32 values with these scales and zero points or offsets, chosen at random for groups of 16."""
    rng = np.random.default_rng(q)
    codes = rng.integers(0, 1 << q, (9, columns), np.uint8)
    scale, second = (rng.choice(numbers, (9, columns // 16)) for numbers in (scales, seconds))
    made = BcqWeight.from_affine if formula == "affine" else BcqWeight.from_offset
    return made(codes, scale, second, group_size=16, bits=q, dtype="float32")


HALVES = np.array([0.0, -0.0, 2**-24, -(2**-24), 1.25, -0.0999, 60000, 3.3], np.float16)
SINGLES = np.array([1e-45, 1.1754944e-38, 3e38, -0.1, 16777215, 1 / 3], np.float32)


@pytest.mark.parametrize("q", range(1, 9))
def test_float32_arithmetic_where_it_gives_the_same_bits(q: int) -> None:
    from bcqfmt.kernels.cpu import floats

    zeros = np.arange(1 << q)
    for weight, fast in (
        (float_weight("affine", q, HALVES, zeros, 128), True),
        (float_weight("affine", q, SINGLES, zeros, 240), True),
        (float_weight("affine", q, HALVES, zeros, 4192), True),  # 131 words: more than are copied together
        (float_weight("offset", q, HALVES[:6], HALVES, 192), True),
        (float_weight("offset", q, SINGLES[-3:], SINGLES[-3:], 128), False),  # products are rounded
        (float_weight("offset", q, HALVES, SINGLES[:1], 128), False),  # the sum is rounded in binary64 already
        (float_weight("affine", q, HALVES, zeros, 112), False),  # too narrow
    ):
        assert floats.fits(cpu.prepare(weight)._operand.segments[0]) == fast
        for threads in (1, 3):
            found = cpu.prepare(weight).dequantize("F32", threads=threads)
            assert bits_of(found) == bits_of(weight.dequantize("F32"))
    rows = cpu.prepare(float_weight("affine", q, HALVES, zeros, 128))
    assert np.array_equal(rows.dequantize(rows=(3, 8)), rows.dequantize()[3:8])


def test_infinite_scales_are_left_to_the_exact_decoder() -> None:
    weight = float_weight("affine", 4, np.array([np.inf, 1, np.nan], np.float32), np.arange(16), 128)
    spec = replace(weight.spec, scheme=replace(weight.scheme, nonfinite=True))
    weight = BcqWeight(weight.name, spec, weight.parts())
    assert bits_of(cpu.prepare(weight).dequantize("F32")) == bits_of(weight.dequantize("F32"))


def test_a_range_of_rows() -> None:
    weight = ks.weight("affine", 4, 30, 96, 32, outliers="add")
    matrix = cpu.prepare(weight)
    for rows in ((0, 1), (7, 9), (3, 30)):
        assert np.array_equal(matrix.dequantize(rows=rows), weight.dequantize(rows=rows))


def patterns() -> np.ndarray[Any, Any]:
    """float64 numbers of every kind, and those around the borders of the short types."""
    rng = np.random.default_rng(0)
    anything = rng.integers(0, 2**64, 200_000, np.uint64).view(np.float64)
    near = rng.standard_normal(200_000) * 2.0 ** rng.integers(-160, 140, 200_000)
    edges = []
    for low, high, digits in ((-14, 15, 11), (-126, 127, 8), (-126, 127, 24)):
        for exponent in (low - digits - 1, low - digits, low - 2, low - 1, low, low + 1, 0, high - 1, high, high + 1):
            unit = 2.0 ** (exponent - digits + 1)
            steps = np.arange(-8, 9) * unit / 8
            edges.append(2.0**exponent + steps)
            edges.append(np.nextafter(2.0**exponent + steps, np.inf))
            edges.append(np.nextafter(2.0 ** (exponent + 1) - steps, 0))
    known = np.concatenate([*edges, [0.0, np.inf, np.nan, 5e-324, 1.7e308, 1 + 2**-8 + 2**-40, 65519.99, 65520.0]])
    return np.concatenate([anything, near, known, -known])


@pytest.mark.parametrize("kind", KINDS[:3])
def test_rounding_is_correct_for_every_kind_of_number(kind: str) -> None:
    from bcqfmt.compiled.rounding import pattern

    which = KINDS.index(kind)

    @numba.njit
    def every(numbers: Any, found: Any) -> None:
        for i in range(numbers.size):
            found[i] = pattern(numbers[i], which)

    numbers = patterns()
    found = np.empty(numbers.size, np.uint32)
    every(numbers, found)
    expected = round_to(numbers, kind)
    assert np.array_equal(found, expected.view(np.uint32 if kind == "F32" else np.uint16))
