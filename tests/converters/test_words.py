"""Every word layout, both ways, against the places that its definition gives to single bits."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bcqfmt.compiled.loops import compiled, types
from bcqfmt.converters import words
from bcqfmt.converters.words import runs
from bcqfmt.converters.words.straight import straight_rows
from bcqfmt.weight.packing import pack_planes, unpack_codes

Array = np.ndarray[Any, Any]
Place = Callable[[Array, Array, int], tuple[tuple[Array, ...], Array]]
ROOT = Path(__file__).resolve().parents[2]


# ------------------------------------------------------------------------------------------------------- oracle
# place(n, k, t): where bit t (0: the lowest) of code (n, k) lies, as (index of the word, bit of the word).
def stream_rows(bits: int) -> Place:
    return lambda n, k, t: (((k * bits + t) // 32, n), (k * bits + t) % 32)


def stream_columns(bits: int) -> Place:
    return lambda n, k, t: ((n, (k * bits + t) // 32), (k * bits + t) % 32)


def slots(bits: int) -> Place:
    per = 32 // bits
    return lambda n, k, t: ((n, k // per), k % per * bits + t)


def planar(bits: int, axis: int) -> Place:
    def place(n: Array, k: Array, t: int) -> tuple[tuple[Array, ...], Array]:
        base = 0
        for width in {2: [2], 3: [2, 1], 4: [4], 5: [4, 1], 6: [4, 2], 7: [4, 2, 1], 8: [8]}[bits]:
            if t < base + width:
                break
            base += width
        per = 32 // width
        word = k // 32 * bits + base + k % 32 // per
        return ((word, n) if axis == 0 else (n, word)), k % per * width + t - base

    return place


def awq(_: int) -> Place:
    nibble = np.array([0, 4, 1, 5, 2, 6, 3, 7])
    return lambda n, k, t: ((k, n // 8), 4 * nibble[n % 8] + t)


def gemv_fast(_: int) -> Place:
    return lambda n, k, t: ((n // 4, 64 * (k // 64) + 16 * (n % 4) + 8 * (k % 64 // 32) + k % 8), 4 * (k % 32 // 8) + t)


def planes(bits: int) -> Place:
    return lambda n, k, t: ((np.full_like(n, bits - 1 - t), n, k // 32), k % 32)


def anybcq(bits: int) -> Place:
    return lambda n, k, t: ((k // 32, np.full_like(n, bits - 1 - t), n), k % 32)


def hqq(bits: int, columns: int, group: int, lines: int) -> Place:
    slabs = {8: 1, 6: 1, 5: 1, 4: 2, 3: 10, 2: 4, 1: 8}[bits]

    def place(n: Array, k: Array, t: int) -> tuple[tuple[Array, ...], Array]:
        row, column = np.divmod(n * columns + k, group)
        return (row % lines, column), bits * (slabs - 1 - row // lines) + t

    return place


def read(source: Array, place: Place, bits: int, n: int, k: int) -> Array:
    rows, columns = np.indices((n, k))
    codes = np.zeros((n, k), np.uint8)
    for t in range(bits):
        index, bit = place(rows, columns, t)
        codes |= ((source[index].astype(np.int64) >> bit & 1) << t).astype(np.uint8)
    return codes


def write(codes: Array, place: Place, bits: int, shape: tuple[int, ...], dtype: Any = np.uint32) -> Array:
    rows, columns = np.indices(codes.shape)
    wide = np.zeros(shape, np.int64)
    for t in range(bits):
        index, bit = place(rows, columns, t)
        np.add.at(wide, index, (codes.astype(np.int64) >> t & 1) << bit)  # an address that occurs twice would show
    return wide.astype(np.uint64).astype(np.dtype(dtype).str.replace("i", "u")).view(dtype)


def ceil(a: int, b: int) -> int:
    return -(-a // b)


@dataclass
class Layout:
    """Both directions by the package, and what its bits mean by the oracle."""

    widths: tuple[int, ...]
    multiples: tuple[int, int]  # of N, of K
    shape: Callable[[int, int, int], tuple[int, ...]]  # bits, n, k
    place: Callable[[int], Place]
    unpack: Callable[[Array, int, int, int], Array]  # words, bits, k, threads
    pack: Callable[[Array, int, int], Array]  # codes (or planes), bits, threads
    to_planes: Callable[[Array, int, int, int], Array] | None = None
    from_planes: Callable[[Array, int, int], Array] | None = None  # planes, k, threads
    dtype: Any = np.uint32


ALL = tuple(range(1, 9))
PLANAR = tuple(range(2, 9))
W = words
LAYOUTS = {
    "stream_rows": Layout(
        *(ALL, (1, 1), lambda b, n, k: (ceil(k * b, 32), n), stream_rows),
        *(W.stream_rows_to_codes, W.codes_to_stream_rows, W.gptq_to_planes),
        lambda p, k, threads: W.planes_to_gptq(p, len(p), k, threads),
    ),
    "stream_columns": Layout(
        *(ALL, (1, 1), lambda b, n, k: (n, ceil(k * b, 32)), stream_columns),
        *(W.stream_columns_to_codes, W.codes_to_stream_columns, W.columns_to_planes),
        lambda p, k, threads: W.planes_to_columns(p, k=k, threads=threads),
    ),
    "slots": Layout(
        *(ALL, (1, 1), lambda b, n, k: (n, ceil(k, 32 // b)), slots, W.slots_to_codes, W.codes_to_slots),
    ),
    "planar_rows": Layout(
        *(PLANAR, (1, 32), lambda b, n, k: (k * b // 32, n), lambda b: planar(b, 0)),
        lambda w, b, k, threads: W.planes_to_codes(W.planar_to_planes(w, b, k, threads), k),
        lambda c, b, threads: W.planes_to_planar(W.codes_to_planes(c, b), threads=threads),
        W.planar_to_planes,
        lambda p, k, threads: W.planes_to_planar(p, len(p), k, threads),
    ),
    "planar_columns": Layout(
        *(PLANAR, (1, 32), lambda b, n, k: (n, k * b // 32), lambda b: planar(b, 1)),
        *(W.planar_columns_to_codes, W.codes_to_planar_columns),
    ),
    "awq_gemm": Layout(
        *((4,), (8, 1), lambda b, n, k: (k, n // 8), awq),
        lambda w, b, k, threads: W.awq_gemm_to_codes(w, threads),
        lambda c, b, threads: W.codes_to_awq_gemm(c, threads),
        lambda w, b, k, threads: W.awq_to_planes(w, threads),
        lambda p, k, threads: W.planes_to_awq(p, k, threads),
    ),
    "gemv_fast": Layout(
        *((4,), (4, 64), lambda b, n, k: (n // 4, k), gemv_fast),
        lambda w, b, k, threads: W.planes_to_codes(W.gemv_fast_to_planes(w, threads), k),
        lambda c, b, threads: W.planes_to_gemv_fast(W.codes_to_planes(c, b), threads=threads),
        lambda w, b, k, threads: W.gemv_fast_to_planes(w, threads),
        lambda p, k, threads: W.planes_to_gemv_fast(p, k, threads),
        np.int16,
    ),
    "planes": Layout(
        *(ALL, (1, 1), lambda b, n, k: (b, n, ceil(k, 32)), planes),
        lambda w, b, k, threads: W.planes_to_codes(w, k, threads=threads),
        lambda c, b, threads: W.codes_to_planes(c, b, threads=threads),
    ),
    "anybcq": Layout(
        *(ALL, (1, 32), lambda b, n, k: (k // 32, b, n), anybcq),
        lambda w, b, k, threads: W.planes_to_codes(W.anybcq_to_planes(w, threads), k),
        lambda c, b, threads: W.planes_to_anybcq(W.codes_to_planes(c, b), threads),
    ),
}
CASES = [(name, bits) for name, layout in LAYOUTS.items() for bits in layout.widths]


def random_words(shape: tuple[int, ...], dtype: Any, seed: int) -> Array:
    """Any bits; one seed in eight gives all ones, one all zeros."""
    size = np.dtype(dtype).itemsize
    raw = np.random.default_rng(seed).integers(0, 256, int(np.prod(shape)) * size, np.uint8)
    if seed % 8 < 2:
        raw[:] = (255, 0)[seed % 8]
    return raw.view(dtype).reshape(shape)


def check(layout: Layout, bits: int, n: int, k: int, seed: int, *threads: int) -> None:
    source = random_words(layout.shape(bits, n, k), layout.dtype, seed)
    place = layout.place(bits)
    codes = read(source, place, bits, n, k)
    clean = write(codes, place, bits, source.shape, layout.dtype)  # the same words, unused bits zero
    used = write(np.full((n, k), 2**bits - 1, np.uint8), place, bits, source.shape, layout.dtype)
    assert np.array_equal(clean, source & used)
    stored = pack_planes(codes, bits)
    dirty = stored.copy()
    dirty[:, :, -1] |= np.uint32((0xFFFFFFFF << k % 32) & 0xFFFFFFFF if k % 32 else 0)
    for count in threads:
        got = layout.unpack(source, bits, k, count)
        assert got.dtype == np.uint8
        assert got.flags.c_contiguous
        assert np.array_equal(got, codes)
        back = layout.pack(got, bits, count)
        assert back.dtype == source.dtype
        assert np.array_equal(back, clean)
        if layout.to_planes and layout.from_planes:
            assert np.array_equal(layout.to_planes(source, bits, k, count), stored)
            assert np.array_equal(layout.from_planes(dirty, k, count), clean)


@given(st.sampled_from(CASES), st.integers(1, 40), st.integers(1, 170), st.integers(0, 2**32), st.booleans())
@settings(max_examples=300, deadline=None)
def test_any_words_are_read_and_written_back(case: tuple[str, int], n: int, k: int, seed: int, signed: bool) -> None:
    name, bits = case
    layout = LAYOUTS[name]
    n, k = (ceil(size, multiple) * multiple for size, multiple in zip((n, k), layout.multiples, strict=True))
    check(layout, bits, n, k, seed, 1)
    if signed:
        source = random_words(layout.shape(bits, n, k), layout.dtype, seed)
        other = source.view(np.uint16 if layout.dtype == np.int16 else np.int32)
        assert np.array_equal(layout.unpack(other, bits, k, 1), layout.unpack(source, bits, k, 1))


@pytest.mark.parametrize(("name", "bits"), CASES)
def test_many_tiles_and_threads(name: str, bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = LAYOUTS[name]
    monkeypatch.setattr(runs, "_TILE", 1 << 10)  # so that small arrays have many tiles
    monkeypatch.setattr(runs, "_WORTH", 1 << 10)  # and use threads
    check(layout, bits, 72, 1251 if layout.multiples[1] == 1 else 1280, 8 * bits + 5, 1, 3)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize(("n", "k"), [(4, 128), (7, 160), (133, 672)])
def test_whole_blocks_and_some_of_them(bits: int, n: int, k: int) -> None:
    """Sizes that straight code takes (all but 3 bits), and words of which only some columns are filled."""
    check(LAYOUTS["stream_rows"], bits, n, k, 8 * n + 5, 1, 3)
    source = random_words((k * bits // 32, n), np.uint32, 8 * n + 5)
    planes = words.gptq_to_planes(source, bits)
    planar = words.planes_to_planar(planes)
    found, other = np.zeros_like(source), np.zeros_like(source)
    for first, stop in ((0, 3), (3, n)):
        words.planes_to_gptq(planes[:, first:stop], bits, out=found[:, first:stop])
        words.planes_to_planar(planes[:, first:stop], bits, out=other[:, first:stop])
    assert np.array_equal(found, source)
    assert np.array_equal(other, planar)


@pytest.mark.parametrize("bits", [2, 4])
def test_packing_compares_what_it_rebuilds(bits: int) -> None:
    source = random_words((8 * bits, 70), np.uint32, 5)
    proof: list[bool] = []
    planes = words.gptq_to_planes(source, bits, proof=proof)
    assert proof == [True]
    loop, flat = straight_rows(bits, True, True), np.zeros_like(planes).reshape(-1)
    assert loop(source.reshape(-1), flat, 70, 70 * 8, 8, 8, 0, 70) == 0
    assert loop(source.reshape(-1), flat, 70, 70 * 8, 0, 8, 0, 70) != 0  # all lanes in one place: the last one is kept


@pytest.mark.parametrize(("n", "k"), [(8, 0), (0, 64), (0, 0)])
def test_nothing_stays_nothing(n: int, k: int) -> None:
    for name, bits in CASES:
        layout = LAYOUTS[name]
        source = np.zeros(layout.shape(bits, n, k), layout.dtype)
        codes = layout.unpack(source, bits, k, 2)
        assert codes.shape == (n, k)
        assert layout.pack(codes, bits, 2).shape == source.shape


# ---------------------------------------------------------------------------------------------------------- HQQ
@given(
    st.sampled_from([8, 6, 5, 4, 3, 2, 1]),
    *(st.integers(1, 12), st.integers(1, 6), st.sampled_from([1, 3, 8, 16]), st.integers(0, 2**32), st.integers(1, 2)),
)
@settings(max_examples=150, deadline=None)
def test_hqq_slabs(bits: int, n: int, groups: int, group: int, seed: int, threads: int) -> None:
    slabs = {8: 1, 6: 1, 5: 1, 4: 2, 3: 10, 2: 4, 1: 8}[bits]
    n = n if bits == 3 else n * slabs
    k = groups * group
    dtype = np.int32 if bits == 3 else np.uint8
    lines = ceil(n * groups, slabs)
    packed = random_words((lines, group), dtype, seed)
    width = 8 if slabs == 1 else bits  # 5 and 6 bits: the byte as it is
    place = hqq(bits, k, group, lines)
    codes = words.hqq_to_codes(packed, bits, n, k, threads)
    assert np.array_equal(codes, read(packed, place, width, n, k))
    back = words.codes_to_hqq(codes, bits, group, threads)
    assert back.dtype == packed.dtype
    assert np.array_equal(back, write(codes, place, width, packed.shape, dtype))
    if bits != 3:
        assert np.array_equal(back, packed)


def test_hqq_in_many_pieces() -> None:
    rng = np.random.default_rng(3)
    for bits, group in ((4, 64), (3, 64), (1, 128)):
        codes = rng.integers(0, 2**bits, (1024, 640), np.uint8)
        packed = [words.codes_to_hqq(codes, bits, group, threads) for threads in (1, 2)]
        assert np.array_equal(*packed)
        for threads in (1, 2):
            assert np.array_equal(words.hqq_to_codes(packed[0], bits, *codes.shape, threads), codes)


# -------------------------------------------------------------------------------------------------- golden words
GOLDEN = {
    2: "93939393 93939393",
    3: "43c67543 7543c675 c67543c6",
    4: "61c72d83 e94fa50b 61c72d83 e94fa50b",
    8: "120d0803 26211c17 3a35302b 4e49443f 625d5853 76716c67 8a85807b 9e99948f",
}
_FOUR = "61c72d83 e94fa50b 61c72d83 e94fa50b"
GOLDEN_PLANAR = {
    3: "93939393 93939393 b4b4b4b4",
    5: f"{_FOUR} e1c71e38",
    6: f"{_FOUR} 03fea540 5403fa95",
    7: f"{_FOUR} 03fea540 5403fa95 01ffe000",
    **{bits: GOLDEN[bits] for bits in (2, 4, 8)},
}


def golden(text: str) -> Array:
    return np.array([int(word, 16) for word in text.split()], np.uint32)


def rule(bits: int) -> Array:
    return ((5 * np.arange(32) + 3) % 2**bits).astype(np.uint8)[None]


@pytest.mark.parametrize("bits", GOLDEN)
def test_golden_streams(bits: int) -> None:
    expected = golden(GOLDEN[bits])
    assert words.codes_to_stream_rows(rule(bits), bits)[:, 0].tolist() == expected.tolist()
    assert words.codes_to_stream_columns(rule(bits), bits)[0].tolist() == expected.tolist()
    assert words.stream_rows_to_codes(expected[:, None], bits, 32).tolist() == rule(bits).tolist()
    assert words.planes_to_gptq(pack_planes(rule(bits), bits))[:, 0].tolist() == expected.tolist()


@pytest.mark.parametrize("bits", GOLDEN_PLANAR)
def test_golden_planar_words(bits: int) -> None:
    expected = golden(GOLDEN_PLANAR[bits])
    assert words.planes_to_planar(pack_planes(rule(bits), bits))[:, 0].tolist() == expected.tolist()
    assert words.planar_columns_to_codes(expected[None], bits).tolist() == rule(bits).tolist()


def test_golden_awq_word() -> None:
    codes = np.array([[3], [8], [13], [2], [7], [12], [1], [6]], np.uint8)
    assert words.codes_to_awq_gemm(codes).tolist() == [[0x6C2817D3]]
    assert words.awq_gemm_to_codes(np.array([[0x6C2817D3]], np.uint32)).tolist() == codes.tolist()
    assert words.codes_to_stream_columns(codes.T.copy(), 4).tolist() == [[0x61C72D83]]


def test_golden_zero_points() -> None:
    for bits, v1, v2 in (
        (2, "55555555 " * 2, "aaaaaaaa " * 2),
        (3, "db6db6db b6db6db6 6db6db6d", "24924924 49249249 92492492"),
        (4, "77777777 " * 4, "88888888 " * 4),
        (8, "7f7f7f7f " * 8, "80808080 " * 8),
    ):
        for text, field in ((v1, 2 ** (bits - 1) - 1), (v2, 2 ** (bits - 1))):
            assert set(words.stream_columns_to_codes(golden(text)[None], bits, 32).ravel().tolist()) == {field}
    swapped = words.stream_columns_to_codes(golden("00000000 b6db6db7 49249249")[None], 3, 32)[0]
    assert swapped.tolist() == [0] * 10 + [4] + [3] * 11 + [2] * 10


# --------------------------------------------------------------------------------------------------- reordering
@given(st.integers(1, 8), st.integers(1, 40), st.integers(1, 200), st.integers(0, 2**32), st.integers(1, 2))
@settings(max_examples=60, deadline=None)
def test_columns_in_another_order(bits: int, n: int, k: int, seed: int, threads: int) -> None:
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 2**bits, (n, k), np.uint8)
    perm = rng.permutation(k).astype(rng.choice(["i4", "i8", "u2"]))
    stored = pack_planes(codes[:, perm], bits)
    assert np.array_equal(words.codes_to_planes(codes, bits, perm, threads), stored)
    assert np.array_equal(words.planes_to_codes(stored, k, perm, threads), codes)
    rows, columns = words.codes_to_stream_rows(codes, bits), words.codes_to_stream_columns(codes, bits)
    assert np.array_equal(words.gptq_to_planes(rows, bits, k, threads, perm), stored)
    assert np.array_equal(words.planes_to_gptq(stored, bits, k, threads, perm), rows)
    assert np.array_equal(words.columns_to_planes(columns, bits, k, threads, perm), stored)
    assert np.array_equal(words.planes_to_columns(stored, bits, k, threads, perm), columns)


def test_many_columns_in_another_order() -> None:
    rng = np.random.default_rng(7)
    perm = rng.permutation(320)
    for bits in (3, 4, 8):
        source = random_words((10 * bits, 611), np.uint32, 5)  # sheets of lanes, and some lanes that fill no word
        stored = pack_planes(words.stream_rows_to_codes(source, bits, 320)[:, perm], bits)
        for threads in (1, 2, 3):
            assert np.array_equal(words.gptq_to_planes(source, bits, threads=threads, perm=perm), stored)
            assert np.array_equal(words.planes_to_gptq(stored, threads=threads, perm=perm), source)


def test_planar_words_in_another_order() -> None:
    rng = np.random.default_rng(1)
    perm = rng.permutation(96)
    for bits in PLANAR:
        source = random_words((3 * bits, 70), np.uint32, 5)
        codes = unpack_codes(words.planar_to_planes(source, bits), 96)
        stored = words.planar_to_planes(source, bits, perm=perm)
        assert np.array_equal(unpack_codes(stored, 96), codes[:, perm])
        assert np.array_equal(words.planes_to_planar(stored, perm=perm), source)


# ------------------------------------------------------------------------------------------------ what is handed in
def test_arrays_may_be_read_only_misaligned_or_strided() -> None:
    source = random_words((12, 40), np.uint32, 5)
    expected = words.gptq_to_planes(source, 4)
    frozen = source.copy()
    frozen.flags.writeable = False
    raw = np.zeros(source.nbytes + 1, np.uint8)
    raw[1:] = source.reshape(-1).view(np.uint8)
    strided = np.zeros((12, 80), np.uint32)
    strided[:, ::2] = source
    for other in (frozen, raw[1:].view(np.uint32).reshape(12, 40), strided[:, ::2], np.asfortranarray(source)):
        assert np.array_equal(words.gptq_to_planes(other, 4), expected)
    codes = unpack_codes(expected, 96)
    shifted = np.zeros(codes.size + 1, np.uint8)
    shifted[1:] = codes.reshape(-1)
    for other in (shifted[1:].reshape(codes.shape), np.asfortranarray(codes)):
        assert np.array_equal(words.codes_to_stream_rows(other, 4), source)
    half = random_words((4, 64), np.int16, 5)
    raw = np.zeros(half.nbytes + 2, np.uint8)
    raw[2:] = half.reshape(-1).view(np.uint8)
    moved = raw[2:].view(np.int16).reshape(4, 64)
    assert np.array_equal(words.gemv_fast_to_planes(moved), words.gemv_fast_to_planes(half))


def test_code_bits_above_the_width_are_ignored() -> None:
    codes = np.random.default_rng(2).integers(0, 256, (16, 96), np.uint8)
    for bits in ALL:
        low = codes & np.uint8(2**bits - 1)
        for pack in (words.codes_to_stream_rows, words.codes_to_stream_columns, words.codes_to_slots):
            assert np.array_equal(pack(codes, bits), pack(low, bits))
        assert np.array_equal(words.codes_to_planes(codes, bits), words.codes_to_planes(low, bits))


def test_what_does_not_fit_is_refused() -> None:
    u32, u8 = np.zeros((4, 8), np.uint32), np.zeros((4, 8), np.uint8)
    for wrong in (
        lambda: words.stream_rows_to_codes(u32, 4, 33),
        lambda: words.stream_rows_to_codes(u32, 9, 8),
        lambda: words.stream_columns_to_codes(u32, 0, 8),
        lambda: words.stream_rows_to_codes(u32.astype(np.int64), 4, 32),
        lambda: words.stream_rows_to_codes(u32.astype(np.float32), 4, 32),
        lambda: words.stream_rows_to_codes(u32.astype(">u4"), 4, 32),
        lambda: words.slots_to_codes(u32, 3, 100),
        lambda: words.slots_to_codes(u32, 9, 24),
        lambda: words.planar_columns_to_codes(u32, 3),
        lambda: words.planar_columns_to_codes(u32, 4, 32),
        lambda: words.codes_to_planar_columns(u8, 4),
        lambda: words.planar_to_planes(u32, 3),
        lambda: words.codes_to_awq_gemm(u8),
        lambda: words.gemv_fast_to_planes(np.zeros((1, 32), np.int16)),
        lambda: words.gemv_fast_to_planes(u32),
        lambda: words.hqq_to_codes(u8, 7, 4, 8),
        lambda: words.hqq_to_codes(u8, 4, 4, 8),
        lambda: words.hqq_to_codes(np.zeros((2, 8), np.int32), 3, 1, 8),
        lambda: words.codes_to_hqq(u8, 4, 5),
        lambda: words.codes_to_hqq(u8, 1, 8),
        lambda: words.codes_to_planes(u8.astype(np.int8), 4),
        lambda: words.codes_to_planes(u8, 4, np.arange(7)),
        lambda: words.codes_to_planes(u8, 4, np.array([0, 1, 2, 3, 4, 5, 6, 6])),
        lambda: words.codes_to_planes(u8, 4, np.array([0, 1, 2, 3, 4, 5, 6, -1])),
        lambda: words.codes_to_planes(u8, 4, np.array([0, 1, 2, 3, 4, 5, 6, 8])),
        lambda: words.codes_to_planes(u8, 4, np.arange(8.0)),
        lambda: words.planes_to_codes(u32[None], 300),
        lambda: words.planes_to_gptq(u32[None], 2),
        lambda: words.planes_to_planar(u32[None], 1, 250),
        lambda: words.planes_to_awq(np.zeros((4, 4, 1), np.uint32)),
        lambda: words.planes_to_awq(np.zeros((3, 8, 1), np.uint32)),
        lambda: words.planes_to_gemv_fast(np.zeros((4, 4, 1), np.uint32)),
    ):
        with pytest.raises(ValueError, match=r"\w"):
            wrong()


# --------------------------------------------------------------------------------------------------- compilation
PROBE = """
import sys, bcqfmt
assert 'numba' not in sys.modules
import numpy as np
from bcqfmt.converters import words
from bcqfmt.converters.words.loop import shuffle
words.codes_to_planes(np.zeros((2, 64), np.uint8), 4, np.arange(64))
print(sum(shuffle.stats.cache_hits.values()))
"""


def test_the_loop_is_cached_where_there_is_room(tmp_path: Path) -> None:
    """In the user's cache folder when the folder of the source cannot be written; one loop serves every layout."""
    site = tmp_path / "site"
    shutil.copytree(ROOT / "bcqfmt", site / "bcqfmt", ignore=shutil.ignore_patterns("__pycache__"))
    (site / "bcqfmt" / "converters" / "words" / "__pycache__").write_text("in the way of a folder\n")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("NUMBA", "PYTHON"))}
    environment |= {"PYTHONPATH": str(site), "PYTHONSAFEPATH": "1", "XDG_CACHE_HOME": str(tmp_path / "cache")}

    def hits() -> int:
        done = subprocess.run(
            [sys.executable, "-c", PROBE], env=environment, capture_output=True, text=True, check=True
        )
        return int(done.stdout)

    assert hits() == 0
    assert len(list((tmp_path / "cache").rglob("*.nbi"))) == 1
    assert hits() == 1


def test_loops_run_where_there_is_no_room_for_a_cache() -> None:
    scope: dict[str, Any] = {}
    exec(compile("def double(x):\n    x[0] *= 2\n", "<nowhere>", "exec"), scope)  # numba cannot place its cache
    double = compiled(scope["double"], types.void, types.uint32[::1])
    x = np.array([21], np.uint32)
    double(x)
    assert x[0] == 42
