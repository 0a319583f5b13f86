"""packed(b) against the definition of its bit stream (spec section 6.1)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bcqfmt.weight.packing import pack, pack_planes, padding_is_zero, unpack, unpack_codes, words_for
from weights import oracle

WIDTHS = range(1, 10)


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("count", [1, 2, 3, 7, 31, 32, 33, 64, 97])
def test_pack_is_the_bit_stream(bits: int, count: int) -> None:
    rng = np.random.default_rng(bits * 1000 + count)
    fields = rng.integers(0, 2**bits, (3, count))
    expected = [oracle.pack(row, bits) for row in fields.tolist()]
    words = pack(fields, bits)
    assert words.dtype == np.uint32
    assert words.tolist() == expected
    assert words.shape[-1] == words_for(count, bits) == -(-count * bits // 32)
    assert unpack(words, bits, count).tolist() == fields.tolist()


@given(st.integers(1, 9), st.integers(1, 70), st.randoms(use_true_random=False))
def test_unpack_reads_any_words(bits: int, count: int, random: object) -> None:
    words = [random.getrandbits(32) for _ in range(words_for(count, bits))]  # type: ignore[attr-defined]
    expected = [oracle.get_field(words, bits, j) for j in range(count)]
    assert unpack(np.array([words], np.uint32), bits, count)[0].tolist() == expected
    assert unpack(np.array([words], np.uint32).view(np.int32), bits, count)[0].tolist() == expected
    used = count * bits % 32
    assert padding_is_zero(np.array([words], np.uint32), bits, count) == (used == 0 or words[-1] >> used == 0)


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("lead", [(), (2,)])
def test_planes_hold_the_most_significant_bit_first(bits: int, lead: tuple[int, ...]) -> None:
    codes = np.random.default_rng(bits).integers(0, 2**bits, (*lead, 3, 45), np.uint8)
    planes = pack_planes(codes, bits)
    assert planes.shape == (*lead, bits, 3, 2)
    for index in np.ndindex(*lead):
        for i in range(bits):
            rows = [oracle.pack([code >> (bits - 1 - i) & 1 for code in row], 1) for row in codes[index].tolist()]
            assert planes[index][i].tolist() == rows
        assert unpack_codes(planes[index], 45).tolist() == codes[index].tolist()
        for p in range(1, bits):
            assert unpack_codes(planes[index][:p], 45).tolist() == (codes[index] >> (bits - p)).tolist()


def test_the_word_of_the_specification() -> None:
    assert pack(np.array([5, 3, 6]), 3).tolist() == [0x0000019D]
    assert pack(np.array([5, 3, 6]), 3).tobytes().hex(" ") == "9d 01 00 00"


def test_fields_straddle_words() -> None:
    assert pack(np.full(4, 511), 9).tolist() == [0xFFFFFFFF, 0x0000000F]
    assert pack(np.array([0] * 10 + [7]), 3).tolist() == [0xC0000000, 0x00000001]


@pytest.mark.parametrize("bits", WIDTHS)
def test_one_padding_bit_is_seen(bits: int) -> None:
    words = pack(np.zeros((4, 5), int), bits)
    assert padding_is_zero(words, bits, 5)
    for t in range(5 * bits, 32 * words.shape[1]):
        if t // 32 == words.shape[1] - 1:
            dirty = words.copy()
            dirty[2, t // 32] |= np.uint32(1 << t % 32)
            assert not padding_is_zero(dirty, bits, 5)
