"""Slices are weights of their own with exactly the same values, or are refused for a documented reason."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import bcqfmt
from bcqfmt import BcqError, BcqWeight, UnsupportedError, UsageError
from weights import oracle
from weights.oracle import Plain
from weights.strategies import bits_of, build, examples, plain_of, tiled_weights, weights

Pair = tuple[BcqWeight, Plain]


def whole(plain: Plain) -> Any:
    return np.array(oracle.values(plain), np.uint64).reshape(plain.shape)


def interval(data: st.DataObject, size: int, step: int = 1) -> tuple[int, int]:
    start = data.draw(st.integers(0, (size - 1) // step)) * step
    stop = data.draw(st.integers(start + 1, size))
    return start, min(size, -(-stop // step) * step)


def must_be(sliced: BcqWeight, expected: Any, folder: Any) -> None:
    """Equal values; legal content; and a file that the validator accepts and the oracle reads alike."""
    assert sliced.shape == expected.shape
    assert bits_of(sliced.dequantize()) == expected.reshape(-1).tolist()
    sliced.check()
    path = folder / "slice.safetensors"
    bcqfmt.save(path, {"w.weight": sliced}, overwrite=True)
    assert not bcqfmt.validate(path, deep=True).errors
    with bcqfmt.open(path) as checkpoint:
        plain = plain_of(checkpoint.weight("w.weight"))
    assert oracle.values(plain) == expected.reshape(-1).tolist()


# -- rows ------------------------------------------------------------------------------------------------------


def second_order_rows(plain: Plain) -> list[int]:
    kinds = [s.get(key) for s in plain.segments for key in ("scale", "offset")]
    return [kind["rows"] for kind in kinds if isinstance(kind, dict)]


def crowded(plain: Plain, rows: tuple[int, int], columns: tuple[int, int]) -> bool:
    """More than one outlier in eight elements of the slice: the format has no room for them (BCQ-V410)."""
    if "outliers" not in plain.scheme:
        return False
    indptr, indices = plain.parts["outlier_indptr"][2], plain.parts["outlier_indices"][2]
    count = 0
    for e in range(plain.stack):
        for r in range(*rows):
            row = indices[indptr[e * plain.out + r] : indptr[e * plain.out + r + 1]]
            count += sum(columns[0] <= c < columns[1] for c in row)
    return count * 8 > plain.stack * (rows[1] - rows[0]) * (columns[1] - columns[0])


@given(weights(max_rows=9), st.data())
@examples(100)
def test_rows(tmp_path_factory: pytest.TempPathFactory, pair: Pair, data: st.DataObject) -> None:
    weight, plain = pair
    start, stop = interval(data, plain.out)
    steps = second_order_rows(plain)
    cut = any((start % g2 or (stop % g2 and stop != plain.out)) and start // g2 != (stop - 1) // g2 for g2 in steps)
    if cut or crowded(plain, (start, stop), (0, plain.columns)):
        with pytest.raises(UnsupportedError) as caught:
            weight.rows(start, stop)
        assert caught.value.code == "BCQ-E303"
        return
    must_be(weight.rows(start, stop), whole(plain)[..., start:stop, :], tmp_path_factory.mktemp("rows"))


# -- columns ---------------------------------------------------------------------------------------------------


def expressible(plain: Plain, start: int, stop: int) -> bool:
    """Whether the documented rule lets a range of columns be a weight, worked out group by group."""
    kept = []
    for e in range(plain.stack):
        perm = plain.matrix("perm", e) if "perm" in plain.parts else list(range(plain.columns))
        kept.append([j for j, c in enumerate(perm) if start <= c < stop])
    if any(other != kept[0] for other in kept) or crowded(plain, (0, plain.out), (start, stop)):
        return False
    at, groups = 0, []  # (segment, columns kept, whole group size)
    for k, width in enumerate(plain.widths):
        g = plain.group_size(k)
        counts: dict[int, int] = {}
        for j in kept[0]:
            if at <= j < at + width:
                counts[(j - at) // g] = counts.get((j - at) // g, 0) + 1
        groups += [(k, count, g) for _, count in sorted(counts.items())]
        at += width
    pieces, run = 0, None  # run: the segment of the piece of whole groups that is being collected
    for i, (k, count, g) in enumerate(groups):
        last = i == len(groups) - 1
        if count == g or (last and run == k):
            pieces += run != k
            run = k if count == g else None
        else:
            if count < 8:
                return False
            pieces, run = pieces + 1, None
    return pieces <= 16


def check_columns(weight: BcqWeight, plain: Plain, start: int, stop: int, folder: Any) -> None:
    if not expressible(plain, start, stop):
        with pytest.raises(UnsupportedError) as caught:
            weight.columns(start, stop)
        assert caught.value.code == "BCQ-E303"
        return
    must_be(weight.columns(start, stop), whole(plain)[..., start:stop], folder)


@given(weights(perm=False), st.data())
@examples(120)
def test_columns(tmp_path_factory: pytest.TempPathFactory, pair: Pair, data: st.DataObject) -> None:
    start, stop = interval(data, pair[1].columns, data.draw(st.sampled_from((1, 8))))
    check_columns(*pair, start, stop, tmp_path_factory.mktemp("columns"))


@given(weights(perm=True, stack=False), st.data())
@examples(80)
def test_columns_of_reordered_weights(
    tmp_path_factory: pytest.TempPathFactory, pair: Pair, data: st.DataObject
) -> None:
    start, stop = interval(data, pair[1].columns)
    check_columns(*pair, start, stop, tmp_path_factory.mktemp("columns"))


@given(weights(perm=True, max_segments=2), st.data())
@examples(60)
def test_columns_where_the_order_keeps_halves_together(
    tmp_path_factory: pytest.TempPathFactory, pair: Pair, data: st.DataObject
) -> None:
    """A permutation within blocks, as quantizers for tensor parallelism make it: slices at the blocks are exact."""
    _, plain = pair
    if "outliers" in plain.scheme:
        del plain.scheme["outliers"]
        plain.parts = {s: raw for s, raw in plain.parts.items() if not s.startswith("outlier_")}
    cut = plain.group_size(0)
    flat = []
    for e in range(plain.stack):
        row = plain.matrix("perm", e)
        flat += [c for c in row if c < cut] + [c for c in row if c >= cut]
    plain.parts["perm"] = ("I32", plain.parts["perm"][1], flat)
    folder = tmp_path_factory.mktemp("columns")
    weight = build(plain)
    must_be(weight.columns(0, cut), whole(plain)[..., :cut], folder)
    if plain.columns > cut:
        check_columns(weight, plain, cut, plain.columns, folder)


@pytest.mark.parametrize(
    ("start", "stop", "shared"),
    [(0, 64, 8), (64, 192, 8), (32, 96, 4), (16, 240, 2), (24, 88, 5), (24, 200, 1), (72, 128, 8)],
)
def test_groups_that_share_numbers_share_them_after_a_cut(start: int, stop: int, shared: int) -> None:
    """Blocks of eight groups of 8 columns: a cut at blocks keeps them, any other one shares as far as it can."""
    rng = np.random.default_rng(start)
    d, codes = rng.normal(size=(3, 4)).astype(np.float16), rng.integers(0, 64, (2, 3, 32))
    zeros = rng.integers(0, 64, (3, 4))
    numbers = [bcqfmt.Coded(codes[0], d, zeros, 6, groups=8), bcqfmt.Coded(codes[1], -d, 3, 6, groups=8)]
    weight = BcqWeight.from_offset(rng.integers(0, 16, (3, 256)), *numbers, group_size=8, bits=4)
    cut = weight.columns(start, stop)
    assert cut.dequantize("float64").tobytes() == weight.dequantize("float64")[:, start:stop].tobytes()
    segment = cut.scheme.segments[0]
    assert (segment.scale.groups, segment.offset.groups) == (shared, shared)
    assert cut.parts()["s0_offset_scale"].shape == (3, -(-(stop - start) // 8 // shared))


@given(tiled_weights(), st.data())
@examples(40)
def test_slices_of_tiles(tmp_path_factory: pytest.TempPathFactory, pair: Pair, data: st.DataObject) -> None:
    weight, plain = pair
    folder = tmp_path_factory.mktemp("tiles")
    start, stop = interval(data, plain.out, plain.segments[0]["scale"]["rows"])
    if not crowded(plain, (start, stop), (0, plain.columns)):
        sliced = weight.rows(start, stop)
        assert sliced.scheme.aligned64
        must_be(sliced, whole(plain)[..., start:stop, :], folder)
    start, stop = interval(data, plain.columns, 16)
    check_columns(weight, plain, start, stop, folder)


@pytest.mark.parametrize("parts", [2, 4])
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_tensor_parallel_halves_put_together_are_the_whole(bits: int, parts: int) -> None:
    rng = np.random.default_rng(bits)
    codes = rng.integers(0, 2**bits, (8, 256))
    weight = BcqWeight.from_affine(
        codes, rng.normal(size=(8, 8)).astype(np.float16), rng.integers(0, 2**bits, (8, 8)), group_size=32, bits=bits
    )
    full = weight.dequantize()
    step = 256 // parts
    pieces = [weight.columns(i * step, (i + 1) * step) for i in range(parts)]
    assert np.concatenate([p.dequantize() for p in pieces], axis=1).tobytes() == full.tobytes()
    assert all(len(p.scheme.segments) == 1 and p.scheme.segments[0].group_size == 32 for p in pieces)
    pieces = [weight.rows(i * 8 // parts, (i + 1) * 8 // parts) for i in range(parts)]
    assert np.concatenate([p.dequantize() for p in pieces]).tobytes() == full.tobytes()


def test_the_limit_of_sixteen_segments() -> None:
    """Every second column of a weight whose groups are all cut: as many segments as groups."""
    for groups, fits in ((16, True), (17, False)):
        rng = np.random.default_rng(groups)
        codes = rng.integers(0, 4, (1, 16 * groups))
        scale = rng.normal(size=(1, groups)).astype(np.float16)
        order = np.concatenate(
            [np.arange(groups * 8).reshape(groups, 8), groups * 8 + np.arange(groups * 8).reshape(groups, 8)], axis=1
        )
        weight = BcqWeight.from_affine(codes, scale, 1, group_size=16, bits=2).with_perm(order.reshape(-1))
        if fits:
            sliced = weight.columns(0, groups * 8)
            assert len(sliced.scheme.segments) == 16
            assert sliced.dequantize().tobytes() == weight.dequantize()[:, : groups * 8].tobytes()
        else:
            with pytest.raises(UnsupportedError) as caught:
                weight.columns(0, groups * 8)
            assert caught.value.code == "BCQ-E303"


def test_a_slice_of_a_slice() -> None:
    rng = np.random.default_rng(5)
    weight = BcqWeight.from_bcq(
        rng.integers(0, 2, (3, 6, 96)), rng.normal(size=(3, 6, 3)).astype(np.float32), group_size=32, dtype="bfloat16"
    )
    inner = weight.rows(1, 5).columns(32, 96).rows(1, 3).columns(8, 64)
    assert inner.dequantize().tobytes() == weight.dequantize()[2:4, 40:96].tobytes()


def test_the_whole_is_a_slice_too() -> None:
    weight = BcqWeight.from_affine(np.arange(40).reshape(2, 20) % 4, np.ones((2, 3), np.float16), 1, group_size=8)
    for sliced in (weight.rows(0, 2), weight.columns(0, 20)):
        assert sliced.digest() == weight.digest()


@pytest.mark.parametrize("bad", [(0, 0), (3, 2), (-1, 2), (0, 5), (4, 4)])
def test_ranges_outside(bad: tuple[int, int]) -> None:
    weight = BcqWeight.from_affine(np.ones((4, 8), int), np.ones((4, 1), np.float16), 1, group_size=8)
    with pytest.raises(UsageError):
        weight.rows(*bad)
    with pytest.raises(UsageError):
        weight.columns(bad[0] * 4, bad[1] * 4)


def test_zero_points_get_their_shortest_form() -> None:
    """A slice in which all zero points are equal has none stored; smaller ones take fewer bits."""
    zeros = np.array([[1, 1, 3], [1, 1, 7], [2, 1, 15]])
    weight = BcqWeight.from_affine(np.zeros((3, 24), int), np.ones((3, 3), np.float16), zeros, group_size=8, bits=4)
    assert weight.scheme.segments[0].zero == bcqfmt.PackedZero(4)
    assert weight.columns(0, 8).scheme.segments[0].zero == bcqfmt.PackedZero(2)
    assert weight.columns(8, 16).scheme.segments[0].zero == 1
    assert weight.rows(0, 2).scheme.segments[0].zero == bcqfmt.PackedZero(3)
    for sliced in (weight.columns(0, 8), weight.columns(8, 16), weight.rows(0, 2)):
        sliced.check()


def test_errors_of_slices_name_no_internals() -> None:
    weight = BcqWeight.from_affine(np.ones((4, 16), int), np.ones((4, 1), np.float16), 1, group_size=16)
    with pytest.raises(BcqError, match="7 columns"):
        weight.columns(0, 7)


@pytest.mark.parametrize("cut", ["rows", "columns"])
def test_a_slice_crowded_with_outliers_is_refused_as_a_slice(cut: str) -> None:
    """One element in eight may be an outlier; a slice in which more are has no form (BCQ-E303, not BCQ-V410)."""
    weight = BcqWeight.from_affine(np.ones((4, 16), int), np.ones((4, 2), np.float16), 1, group_size=8)
    weight = weight.with_outliers(np.array([0, 8, 8, 8, 8]), np.arange(8), np.ones(8, np.float16))
    with pytest.raises(UnsupportedError) as caught:
        weight.rows(0, 1) if cut == "rows" else weight.columns(0, 8)
    assert caught.value.code == "BCQ-E303"
    assert weight.rows(1, 4).dequantize().tobytes() == weight.dequantize()[1:].tobytes()
