"""Squared errors against exact sums, and by looking values up as by decoding every value, whatever the scheme."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bcqfmt.converters.methods import errors
from bcqfmt.converters.methods.errors import Sums, decoded_square_sums, square_sums
from bcqfmt.weight.weight import BcqWeight
from methods.method_samples import DTYPES, matrix
from sources.peers import any_words
from weights.samples import affine, planes, rich

FLOATS: dict[str, Any] = {"F16": np.float16, "F32": np.float32}


def exact(weight: np.ndarray[Any, Any], quantized: BcqWeight) -> tuple[float, float]:
    decoded = quantized.dequantize().astype(np.float64).ravel()
    dense = weight.astype(np.float64).ravel()
    return math.fsum(dense**2), math.fsum((dense - decoded) ** 2)


def check(quantized: BcqWeight, monkeypatch: pytest.MonkeyPatch, *, quick: bool = True, threads: int = 1) -> None:
    slow: list[int] = []
    real = decoded_square_sums

    def watched(weight: Any, weights: BcqWeight, planes: int | None = None) -> tuple[float, float]:
        slow.append(1)
        return real(weight, weights, planes)

    monkeypatch.setattr(errors, "decoded_square_sums", watched)
    weight = np.random.default_rng(3).normal(size=quantized.shape).astype(np.float32)
    power, noise = square_sums(weight, quantized, threads)
    assert (power, noise) == (pytest.approx(exact(weight, quantized)[0]), pytest.approx(exact(weight, quantized)[1]))
    assert bool(slow) != quick


def pieces(bits: int, columns: int, group_size: int, seed: int, rows: int = 20) -> BcqWeight:
    return affine(rows, columns, bits, seed, group_size)


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 5, 6])
@pytest.mark.parametrize("columns", [128, 200, 131])
def test_affine(bits: int, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    check(pieces(bits, columns, 128, bits), monkeypatch, threads=2)


def test_binary_codes_with_more_scale_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    check(planes(8, 96, 3), monkeypatch)


def test_float_zeros_and_offsets(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    codes, scale = rng.integers(0, 16, (12, 100)), rng.normal(size=(12, 2)).astype(np.float32)
    other = rng.normal(size=(12, 2)).astype(np.float16)
    check(BcqWeight.from_float_zero(codes, scale, other, group_size=64, bits=4), monkeypatch)
    check(BcqWeight.from_offset(codes, scale, other, group_size=64, bits=4, dtype="F16"), monkeypatch)


def test_segments_second_order_and_perm(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(1)
    left = pieces(2, 64, 16, 0).with_second_order(
        rng.integers(0, 16, (20, 4)), rng.normal(size=(2, 4)).astype(np.float16), rng.integers(0, 9, (2, 4)),
        bits=4, rows=16,
    )  # fmt: skip
    weight = BcqWeight.from_segments([left, pieces(4, 70, 64, 1)], perm=rng.permutation(134))
    check(weight, monkeypatch)


def test_short_groups_and_outliers_are_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    check(pieces(4, 64, 16, 0), monkeypatch, quick=False)
    check(rich(), monkeypatch, quick=False)


@any_words
@given(
    st.integers(0, 2**31), st.integers(1, 4), st.integers(1, 6), st.integers(32, 120), st.sampled_from(["F16", "F32"])
)
def test_any_affine_weight(seed: int, bits: int, rows: int, columns: int, dtype: str) -> None:
    rng = np.random.default_rng(seed)
    groups = -(-columns // 32)
    scale = rng.normal(size=(rows, groups)).astype(FLOATS[dtype])
    zeros = rng.integers(0, 2**bits + 1, (rows, groups))
    codes = rng.integers(0, 2**bits, (rows, columns))
    quantized = BcqWeight.from_affine(codes, scale, zeros, group_size=32, bits=bits)
    weight = rng.normal(size=(rows, columns)).astype(np.float32)
    found, want = square_sums(weight, quantized), decoded_square_sums(weight, quantized)
    assert found == (pytest.approx(want[0], rel=1e-12), pytest.approx(want[1], rel=1e-12))


def test_threads_change_nothing() -> None:
    quantized = pieces(3, 256, 64, 0, rows=100)
    weight = np.random.default_rng(3).normal(size=quantized.shape).astype(np.float32)
    assert len({square_sums(weight, quantized, threads) for threads in (1, 2, 5)}) == 1


def weight_of(rows: int = 5, columns: int = 40, dtype: str = "F16") -> BcqWeight:
    rng = np.random.default_rng(1)
    bits, groups = rng.integers(0, 2, (3, rows, columns)), -(-columns // 16)
    alpha = (np.abs(rng.normal(size=(3, rows, groups))) * 0.02).astype(np.float16)
    return BcqWeight.from_bcq(bits, alpha, alpha[0], group_size=16, dtype=DTYPES[dtype])


@pytest.mark.parametrize("dtype", ["F16", "BF16", "F32"])
@pytest.mark.parametrize("planes", [None, 2])
def test_sums_are_those_of_the_decoded_values(dtype: str, planes: int | None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(errors, "_BLOCK", 80)  # two rows at a time
    weight, quantized = matrix(5, 40), weight_of(dtype=dtype)
    decoded = quantized.dequantize(planes=planes)
    power = sum(Fraction(float(w)) ** 2 for w in weight.flat)
    noise = sum((Fraction(float(w)) - Fraction(float(d))) ** 2 for w, d in zip(weight.flat, decoded.flat, strict=True))
    found = decoded_square_sums(weight, quantized, planes)
    assert found == pytest.approx((float(power), float(noise)), rel=1e-14)
    numbers = Sums(*found, weight.size).figures()
    assert numbers["mse"] == pytest.approx(float(noise / 200), rel=1e-14)
    assert numbers["relative"] == pytest.approx(math.sqrt(noise / power), rel=1e-14)
    assert numbers["sqnr_db"] == pytest.approx(-10 * math.log10(noise / power), rel=1e-12)


def test_no_error_and_no_weight():
    quantized = weight_of()
    exact_sums = decoded_square_sums(quantized.dequantize().astype(np.float32), quantized)
    assert Sums(*exact_sums, 200).figures() == {"mse": 0.0, "relative": 0.0, "sqnr_db": None}
    of_zeros = Sums(*decoded_square_sums(np.zeros((5, 40), np.float32), quantized), 200).figures()
    assert of_zeros == {
        "mse": pytest.approx(exact(np.zeros(200), quantized)[1] / 200),
        "relative": None,
        "sqnr_db": None,
    }
    assert Sums(0.0, 0.0, 16).figures() == {"mse": 0.0, "relative": 0.0, "sqnr_db": None}


def test_shapes_must_agree():
    with pytest.raises(ValueError, match=r"\[4, 40\] compared with one of \[5, 40\]"):
        decoded_square_sums(matrix(4, 40), weight_of())


def test_a_signalling_nan_is_measured_without_a_warning():
    """Some processors set a flag when one is converted, and numpy then warns."""
    weight = matrix(5, 40)
    weight.view(np.uint32)[0, 0] = 0x7F800001
    power, noise = decoded_square_sums(weight, weight_of())
    assert math.isnan(power)
    assert math.isnan(noise)
