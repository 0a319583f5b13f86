"""RN_t: one rounding from binary64, against exact fractions (spec section 8)."""

from __future__ import annotations

import math
import struct

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from bcqfmt.container.dtypes import float64_of, numpy_dtype, round_to
from weights import oracle
from weights.strategies import bits_of

TYPES = ("F16", "BF16", "F32")


def agree(values: list[float], dtype: str) -> None:
    found = bits_of(round_to(np.array(values, np.float64), dtype))
    wrong = [
        (x.hex(), hex(a), hex(oracle.rounded(x, dtype)))
        for x, a in zip(values, found, strict=True)
        if a != oracle.rounded(x, dtype)
    ]
    assert not wrong


def neighbours(x: float) -> list[float]:
    """x, the doubles next to it, and points a little further off that a detour through binary32 would lose."""
    near = [x, math.nextafter(x, math.inf), math.nextafter(x, -math.inf)]
    return near + [x * (1 + sign * 2.0**-k) for k in (25, 26, 30, 40, 48, 52) for sign in (1, -1)]


def borders(dtype: str) -> list[float]:
    """Every kind of number where the rounding changes: midpoints, powers of two, the ends of the range."""
    precision, emin, emax = oracle.PRECISION[dtype]
    points = [
        2.0**e for e in (emin - precision - 1, emin - precision, emin - precision + 1, emin - 1, emin, 0, 1, emax)
    ]
    points += [
        math.ldexp(2 - 2.0 ** (1 - precision), emax),
        math.ldexp(2 - 2.0**-precision, emax),
        math.ldexp(1, emax + 1),
    ]
    step = 2.0 ** (emin - precision + 1)  # the smallest subnormal
    points += [step * k / 2 for k in range(12)] + [step * (2 ** (precision - 1) + k / 2) for k in range(-4, 5)]
    for exponent in (emin, -3, 0, 5, emax - 1):
        points += [math.ldexp(1 + k * 2.0**-precision, exponent) for k in range(9)]
        points += [math.ldexp(2 - k * 2.0**-precision, exponent) for k in range(1, 6)]
    return points


@pytest.mark.parametrize("dtype", TYPES)
def test_borders(dtype: str) -> None:
    points = [y for x in borders(dtype) for y in neighbours(x)]
    agree(points + [-x for x in points] + [math.inf, -math.inf, math.nan, 0.0, -0.0], dtype)


@pytest.mark.parametrize("dtype", TYPES)
def test_random_patterns_over_all_exponents(dtype: str) -> None:
    raw = np.random.default_rng(7).integers(0, 2**64, 6000, np.uint64)
    agree(raw.view(np.float64).tolist(), dtype)


@pytest.mark.parametrize("dtype", TYPES)
def test_random_numbers_within_the_range_of_the_type(dtype: str) -> None:
    _, emin, emax = oracle.PRECISION[dtype]
    rng = np.random.default_rng(11)
    numbers = np.ldexp(rng.uniform(-2, 2, 6000), rng.integers(emin - 15, emax + 1, 6000))
    agree(numbers.tolist(), dtype)


@given(st.floats(width=64), st.sampled_from(TYPES))
@example(65519.99, "F16")
@example(65520.0, "F16")
@example(1 + 2.0**-8 + 2.0**-40, "BF16")
@example(1 + 2.0**-11 + 2.0**-40, "F16")
@example(1 + 2.0**-24 + 2.0**-52, "F32")
@example(2.0**-134 + 2.0**-180, "BF16")
@example(-(2.0**-134), "BF16")
def test_any_double(x: float, dtype: str) -> None:
    agree([x, -x, math.nextafter(x, 0.0)], dtype)


@pytest.mark.parametrize("dtype", ["F16", "BF16"])
def test_every_number_of_a_type_is_kept(dtype: str) -> None:
    patterns = np.arange(2**16, dtype=np.uint16)
    back = bits_of(round_to(float64_of(patterns.view(numpy_dtype(dtype))), dtype))
    nan = np.isnan(float64_of(patterns.view(numpy_dtype(dtype))))
    assert back == np.where(nan, oracle.NAN[dtype], patterns).tolist()


def test_overflow_of_f16_begins_at_65520() -> None:
    values = np.array([65519.999999999, 65520.0, -65519.999999999, -65520.0, 65504.0])
    assert bits_of(round_to(values, "F16")) == [0x7BFF, 0x7C00, 0xFBFF, 0xFC00, 0x7BFF]


def test_bfloat16_is_rounded_once() -> None:
    x = struct.unpack(">d", bytes.fromhex("3FF0100000001000"))[0]
    assert x == 1 + 2.0**-8 + 2.0**-40
    assert bits_of(round_to(np.array([x]), "BF16")) == [0x3F81]
    assert bits_of(round_to(np.array([x]).astype(np.float32).astype(np.float64), "BF16")) == [0x3F80]  # the wrong way


def test_nan_is_canonical_whatever_its_payload() -> None:
    raw = np.array([0x7FF0000000000001, 0xFFF8000000000000, 0xFFFFFFFFFFFFFFFF, 0x7FF8000000000000], np.uint64)
    for dtype in TYPES:
        assert bits_of(round_to(raw.view(np.float64), dtype)) == [oracle.NAN[dtype]] * 4


def test_float64_passes_through() -> None:
    values = np.array([[0.1, -0.0], [math.inf, 5e-324]])
    assert round_to(values, "F64").tobytes() == values.tobytes()


@pytest.mark.parametrize("dtype", TYPES)
def test_a_view_with_strides_is_rounded_like_its_copy(dtype: str) -> None:
    values = np.random.default_rng(3).normal(size=(6, 8))
    values[1, 2] = math.nan
    assert bits_of(round_to(values[::2, 1:7:2], dtype)) == bits_of(round_to(values[::2, 1:7:2].copy(), dtype))
