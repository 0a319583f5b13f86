"""Errors by looking values up equal errors by decoding every value, whatever the scheme."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bcqfmt.converters.methods import errors as measuring
from bcqfmt.converters.methods import figures
from bcqfmt.converters.methods.errors_loops import widen
from bcqfmt.weight.weight import BcqWeight
from peers import any_words
from samples import affine, planes, rich

FLOATS: dict[str, Any] = {"F16": np.float16, "F32": np.float32}


def exact(weight: np.ndarray[Any, Any], quantized: BcqWeight) -> tuple[float, float]:
    decoded = quantized.dequantize().astype(np.float64).ravel()
    dense = weight.astype(np.float64).ravel()
    return math.fsum(dense**2), math.fsum((dense - decoded) ** 2)


def check(quantized: BcqWeight, monkeypatch: pytest.MonkeyPatch, *, quick: bool = True, threads: int = 1) -> None:
    slow: list[int] = []
    real = figures.square_sums

    def watched(weight: Any, weights: BcqWeight, planes: int | None = None) -> tuple[float, float]:
        slow.append(1)
        return real(weight, weights, planes)

    monkeypatch.setattr(figures, "square_sums", watched)
    weight = np.random.default_rng(3).normal(size=quantized.shape).astype(np.float32)
    power, noise = measuring.square_sums(weight, quantized, threads)
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
    found, want = measuring.square_sums(weight, quantized), figures.square_sums(weight, quantized)
    assert found == (pytest.approx(want[0], rel=1e-12), pytest.approx(want[1], rel=1e-12))


def test_threads_change_nothing() -> None:
    quantized = pieces(3, 256, 64, 0, rows=100)
    weight = np.random.default_rng(3).normal(size=quantized.shape).astype(np.float32)
    assert len({measuring.square_sums(weight, quantized, threads) for threads in (1, 2, 5)}) == 1


def test_every_half_becomes_the_same_single() -> None:
    halves = np.arange(65536, dtype=np.uint16)
    found = np.empty(65536, np.float32)
    widen(halves, found)
    assert np.array_equal(found.view(np.uint32), halves.view(np.float16).astype(np.float32).view(np.uint32))
