"""The layout aligned64: its hex vector, its bijection, what does not fit (spec annex A)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import bcqfmt
from bcqfmt import BcqWeight, UnsupportedError
from weights import oracle
from weights.oracle import Plain
from weights.strategies import bits_of, build, examples, plain_of, tiled_weights

Pair = tuple[BcqWeight, Plain]


def canonical(
    out: int = 2,
    columns: int = 64,
    zeros: Any = None,
    codes: Any = None,
    low: dict[str, Any] | None = None,
    high: dict[str, Any] | None = None,
    seed: int = 0,
) -> BcqWeight:
    """A weight of two segments that fits, unless something is changed."""
    rng = np.random.default_rng(seed)
    groups = columns // 64 * 3
    first = {"bits": 2, "group_size": 16, **(low or {})}
    second = {"bits": 4, "group_size": 16, **(high or {})}
    if zeros is None:
        zeros = np.arange(out * groups).reshape(out, groups) % 4
    if codes is None:
        codes = rng.integers(0, 8, (out, groups))
    left = BcqWeight.from_affine(
        rng.integers(0, 4, (out, columns // 4 * 3)), np.ones((out, groups), np.float16), zeros, **first
    )
    left = left.with_second_order(
        codes, rng.normal(size=(1, groups)).astype(np.float16), rng.integers(0, 16, (1, groups)), bits=4, rows=8
    )
    right = BcqWeight.from_affine(
        rng.integers(0, 16, (out, columns // 4)),
        rng.normal(size=(out, -(-columns // 4 // second["group_size"]))).astype(np.float16),
        7,
        **second,
    )
    return BcqWeight.from_segments([left, right])


def test_hex_vector() -> None:
    low = np.tile(np.arange(16) % 4, 3)[None]
    left = BcqWeight.from_affine(low, np.ones((1, 3), np.float16), np.array([[1, 2, 3]]), group_size=16, bits=2)
    left = left.with_second_order(
        np.array([[9, 5, 7]]), np.ones((1, 3), np.float16), np.array([[0, 1, 2]]), bits=4, rows=1
    )
    right = BcqWeight.from_affine(np.arange(16)[None], np.ones((1, 1), np.float16), 8, group_size=16, bits=4)
    tiled = BcqWeight.from_segments([left, right]).to_aligned64()
    words = {suffix: part.array() for suffix, part in tiled.parts().items()}
    assert [f"{word:08x}" for word in words["tile"].view(np.uint32)[0, 0]] == ["e4e4e4e4"] * 3 + ["76543210"]
    assert f"{words['tile_extra'].view(np.uint32)[0, 0]:08x}" == "fedcba98"
    assert f"{words['tile_meta'][0, 0]:04x}" == "f679"
    assert words["s0_scale_zero"].tolist() == [[0, 1, 2]]
    assert sorted(words) == ["s0_scale_scale", "s0_scale_zero", "s1_scale", "tile", "tile_extra", "tile_meta"]


@given(tiled_weights())
def test_from_tiles_and_back(pair: Pair) -> None:
    """Any bits in the tiles are legal; the way to the canonical form and back changes none of them."""
    weight, plain = pair
    weight.check()
    flat = weight.to_canonical()
    flat.check()
    assert not flat.scheme.aligned64
    assert plain_of(flat.to_aligned64()) == plain
    assert oracle.values(plain_of(flat)) == oracle.values(plain) == bits_of(flat.dequantize())


@given(tiled_weights())
def test_the_canonical_form_holds_the_same_numbers(pair: Pair) -> None:
    weight, plain = pair
    flat = plain_of(weight.to_canonical())
    tiles = plain.columns // 64
    zeros = set()
    for e in range(plain.stack):
        codes = flat.matrix("s0_scale_codes", e)
        for r in range(plain.out):
            meta = plain.matrix("tile_meta", e)[r]
            for t in range(tiles):
                want = [meta[t] >> 6 & 15, meta[t] >> 10 & 7, meta[t] >> 13 & 7]
                assert [oracle.get_field(codes[r], 4, 3 * t + w) for w in range(3)] == want
                zeros |= {meta[t] >> 2 * w & 3 for w in range(3)}
        stored = flat.matrix("s0_scale_zero", e)
        for row, want in zip(stored, plain.matrix("s0_scale_zero", e), strict=True):
            assert [oracle.get_field(row, 4, a) for a in range(3 * tiles)] == want
    declared = flat.segments[0]["zero"]
    assert declared == (min(zeros) if len(zeros) == 1 else {"bits": max(zeros).bit_length()})
    assert ("s0_zero" in flat.parts) == (len(zeros) > 1)


@given(st.integers(1, 4), st.sampled_from((64, 128, 192)), st.integers(0, 99))
@examples(25)
def test_from_the_canonical_form_and_back(out: int, columns: int, seed: int) -> None:
    flat = canonical(out, columns, seed=seed)
    tiled = flat.to_aligned64()
    assert tiled.scheme.aligned64
    assert tiled.to_canonical().digest() == flat.digest()
    assert tiled.dequantize().tobytes() == flat.dequantize().tobytes()
    assert bits_of(tiled.dequantize()) == oracle.values(plain_of(tiled))


def test_zero_points_that_are_all_equal() -> None:
    flat = canonical(zeros=np.full((2, 3), 3))
    assert flat.scheme.segments[0].zero == 3
    tiled = flat.to_aligned64()
    assert tiled.scheme.segments[0].zero == bcqfmt.PackedZero(2)
    assert tiled.to_canonical().digest() == flat.digest()


def test_one_zero_point_that_needs_one_bit() -> None:
    flat = canonical(zeros=np.array([[0, 1, 0], [0, 0, 0]]))
    assert flat.scheme.segments[0].zero == bcqfmt.PackedZero(1)
    assert flat.to_aligned64().to_canonical().digest() == flat.digest()


def test_it_is_itself_when_nothing_has_to_change() -> None:
    flat = canonical()
    tiled = flat.to_aligned64()
    assert flat.to_canonical() is flat
    assert tiled.to_aligned64() is tiled


MISFITS = {
    "one segment": lambda: BcqWeight.from_affine(
        np.zeros((1, 64), int), np.ones((1, 4), np.float16), 1, group_size=16, bits=2
    ),
    "columns": lambda: canonical(columns=64, high={"group_size": 8}).columns(0, 56),
    "zero of 4": lambda: canonical(zeros=np.array([[4, 1, 2], [3, 0, 1]])),
    "constant zero of 4": lambda: canonical(zeros=4),
    "scale code 8 in the second group": lambda: canonical(codes=np.array([[15, 8, 7], [15, 7, 7]])),
    "scale code 8 in the third group": lambda: canonical(codes=np.array([[15, 7, 7], [15, 7, 8]])),
    "3-bit low": lambda: canonical(low={"bits": 3}),
    "5-bit high": lambda: canonical(high={"bits": 5}),
    "3-bit high": lambda: BcqWeight.from_segments(
        [
            canonical().columns(0, 48),
            BcqWeight.from_affine(np.zeros((2, 16), int), np.ones((2, 1), np.float16), 1, group_size=16, bits=3),
        ]
    ),
    "groups of 8": lambda: BcqWeight.from_segments(
        [
            BcqWeight.from_affine(
                np.zeros((2, 48), int), np.ones((2, 6), np.float16), 1, group_size=8, bits=2
            ).with_second_order(
                np.zeros((2, 6), int), np.ones((1, 6), np.float16), np.zeros((1, 6), int), bits=4, rows=2
            ),
            BcqWeight.from_affine(np.zeros((2, 16), int), np.ones((2, 1), np.float16), 1, group_size=16, bits=4),
        ]
    ),
    "first-order scale": lambda: BcqWeight.from_segments(
        [
            BcqWeight.from_affine(np.zeros((2, 48), int), np.ones((2, 3), np.float16), 1, group_size=16, bits=2),
            BcqWeight.from_affine(np.zeros((2, 16), int), np.ones((2, 1), np.float16), 1, group_size=16, bits=4),
        ]
    ),
    "float zeros of second order": lambda: BcqWeight.from_segments(
        [
            BcqWeight.from_affine(
                np.zeros((2, 48), int), np.ones((2, 3), np.float16), 1, group_size=16, bits=2
            ).with_second_order(
                np.zeros((2, 3), int), np.ones((1, 3), np.float16), np.ones((1, 3), np.float16), bits=4, rows=2
            ),
            BcqWeight.from_affine(np.zeros((2, 16), int), np.ones((2, 1), np.float16), 1, group_size=16, bits=4),
        ]
    ),
    "offset": lambda: BcqWeight.from_segments(
        [
            canonical().columns(0, 48),
            BcqWeight.from_offset(
                np.zeros((2, 16), int), np.ones((2, 1), np.float16), np.ones((2, 1), np.float16), group_size=16, bits=4
            ),
        ]
    ),
}


@pytest.mark.parametrize("case", MISFITS)
def test_what_does_not_fit_is_refused(case: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        MISFITS[case]().to_aligned64()
    assert caught.value.code == "BCQ-E305"


def test_the_largest_scale_codes_fit() -> None:
    flat = canonical(codes=np.array([[15, 7, 7], [0, 0, 0]]))
    assert flat.to_aligned64().to_canonical().digest() == flat.digest()


@given(tiled_weights())
@examples(20)
def test_a_file_of_tiles(tmp_path_factory: pytest.TempPathFactory, pair: Pair) -> None:
    _, plain = pair
    path = tmp_path_factory.mktemp("tiles") / "a.safetensors"
    path.write_bytes(oracle.file_bytes({"a.weight": plain}))
    assert not bcqfmt.validate(path, deep=True).errors
    with bcqfmt.open(path) as checkpoint:
        weight = checkpoint.weight("a.weight")
        assert checkpoint.features == oracle.features({"a.weight": plain})
        assert bits_of(weight.dequantize()) == oracle.values(plain)
        flat = weight.to_canonical()
        for first in (1, 2, 4):
            found = [planes.tobytes() for planes in weight.planes(first)]
            assert found == [planes.tobytes() for planes in flat.planes(first)]
        assert build(plain).digest() == weight.digest()
