"""Codes of a thread become the numbers of its fragments: device functions for `kernel`; by look-ups in `look_up`."""

from __future__ import annotations

from typing import Any, NamedTuple

from bcqfmt.kernels import ptx
from bcqfmt.kernels.runtime.numba_cuda import cuda, inlined, types
from bcqfmt.kernels.runtime.unroll import static, unrolled

from . import look_up
from .layout import GemmLayout
from .words import words_of

__all__ = ["Decoder", "decoder"]

_AND_OR, _FLIP = 0xEA, 0xA6  # a & b | c, ~a & b ^ c
_START_BF16 = 0x43004300  # 128, twice
_ONE_BF16 = 0x3F803F80
_SIGNS = 0x80008000


class Decoder(NamedTuple):
    """Device functions for a warp.

    ``load(held, numbers, lane)`` puts what a group needs into ``held``, an array of ``words`` words, from a shared
    address. ``decode(a, codes, numbers, lane, held)`` puts the 16 words of four fragments into ``a``.
    """

    words: int
    load: Any
    decode: Any


def decoder(layout: GemmLayout) -> Decoder:
    """The functions for a layout."""
    if layout.formula == "table":
        load = _numbers(layout)
        return Decoder(4, load, look_up.table(layout, load))
    if layout.looked_up:
        return Decoder(look_up.HELD, look_up.load_bcq(layout), look_up.bcq(layout))
    if layout.formula == "bcq":
        return Decoder(1, _nothing(), _bcq(layout))
    return Decoder(4, _numbers(layout), _affine_f16(layout) if layout.number == "F16" else _affine_bf16(layout))


def _nothing() -> Any:
    def load(held: Any, numbers: Any, lane: Any) -> None:
        return

    return inlined(load)


def _numbers(layout: GemmLayout) -> Any:
    """A scale and what is added or taken off, each for rows 2 r and 2 r + 1."""
    flipped = _SIGNS if layout.number == "BF16" else 0  # a zero is added with its sign changed
    both, take = layout.formula != "table", words_of(layout.numbers)

    def load(held: Any, numbers: Any, lane: Any) -> None:
        n = take(numbers, ptx.u32(lane >> 2))
        first, second = ptx.u32(0x1010), ptx.u32(0x3232)
        held[0], held[1] = ptx.prmt(n[0], n[0], first), ptx.prmt(n[0], n[0], second)
        if both:
            held[2] = ptx.u32(ptx.prmt(n[1], n[1], first) ^ flipped)
            held[3] = ptx.u32(ptx.prmt(n[1], n[1], second) ^ flipped)

    return inlined(unrolled(load))


def _affine_f16(layout: GemmLayout) -> Any:
    """Codes are subnormal numbers: one multiplication and addition makes them values."""
    places, place_bytes = layout.places, layout.place_bytes
    fill, again = _fields(layout, 0), _numbers(layout)

    def decode(a: Any, codes: Any, numbers: Any, lane: Any, held: Any) -> None:
        fill(a, codes, lane)
        for p in static(places):
            if p > 0:
                again(held, ptx.u32(numbers + p * place_bytes), lane)
            for k in static(16 // places):
                i = p * (16 // places) + k
                a[i] = ptx.hfma2(ptx.u32(a[i]), ptx.u32(held[k % 2]), ptx.u32(held[2 + k % 2]))

    return inlined(unrolled(_in_place(layout) if layout.bits in (2, 3, 4) else decode))


def _in_place(layout: GemmLayout) -> Any:
    """The same with fewer instructions: codes within the lowest bits of a half stay where they are, 2^n times as large,
    and their scales are that much smaller.
    """
    width, places, place_bytes = layout.bits, layout.places, layout.place_bytes
    per, again, load = 16 // width, _numbers(layout), words_of(width)
    near = 9 // width if width == 3 else 8 // width  # codes of a half that are mantissas as they stand
    odd, mask = width == 3, (2**width - 1) * 0x10001
    word_of = tuple(min(i // per, width - 1) for i in range(16))
    shifted = tuple(i % per >= near for i in range(16))
    places_of = tuple(2 if odd and i == 15 else i % per % near for i in range(16))
    masks = tuple(mask << width * place for place in places_of)
    smaller = tuple((15 - width * i << 10) * 0x10001 for i in range(near))  # 2^-width i in float16

    def decode(a: Any, codes: Any, numbers: Any, lane: Any, held: Any) -> None:
        w = load(codes, lane)
        far = cuda.local.array(width, types.uint32)
        for i in static(width):
            far[i] = ptx.funnel_right(w[i], ptx.u32(0), ptx.u32(near * width))
        for p in static(places):
            if p > 0:
                again(held, ptx.u32(numbers + p * place_bytes), lane)
            t, t8 = cuda.local.array(near, types.uint32), cuda.local.array(near, types.uint32)
            for i in static(near):
                t[i] = held[0] if i == 0 else ptx.hmul2(ptx.u32(held[0]), ptx.u32(smaller[i]))
                t8[i] = held[1] if i == 0 else ptx.hmul2(ptx.u32(held[1]), ptx.u32(smaller[i]))
            for k in static(16 // places):
                i = p * (16 // places) + k
                scale = ptx.u32(t8[places_of[i]] if k % 2 else t[places_of[i]])
                if odd and i == 15:  # a bit of each word
                    word = ptx.lop3(ptx.u32(far[1] << 1), ptx.u32(0x00800080), ptx.u32(far[0] & 0x00400040), _AND_OR)
                    word = ptx.lop3(ptx.u32(far[2] << 2), ptx.u32(0x01000100), word, _AND_OR)
                else:
                    word = ptx.u32((far[word_of[i]] if shifted[i] else w[word_of[i]]) & masks[i])
                a[i] = ptx.hfma2(word, scale, ptx.u32(held[2 + k % 2]))

    return decode


def _affine_bf16(layout: GemmLayout) -> Any:
    """A code in the last bits of 128; the zero is taken off, then the scale multiplied."""
    places, rest, place_bytes = layout.places, layout.rest, layout.place_bytes
    fill, again = _fields(layout, _START_BF16), _numbers(layout)

    def decode(a: Any, codes: Any, numbers: Any, lane: Any, held: Any) -> None:
        fill(a, codes, lane)
        for p in static(places):
            if p > 0:
                again(held, ptx.u32(numbers + p * place_bytes), lane)
            more, more8 = ptx.u32(0), ptx.u32(0)
            if rest:
                third = ptx.lds32(ptx.u32(numbers + (lane >> 2) * 12), ptx.u32(p * place_bytes + 8))
                more, more8 = ptx.prmt(third, third, ptx.u32(0x1010)), ptx.prmt(third, third, ptx.u32(0x3232))
            for k in static(16 // places):
                i = p * (16 // places) + k
                a[i] = ptx.bfma2(ptx.u32(a[i]), ptx.u32(_ONE_BF16), ptx.u32(held[2 + k % 2]))
                a[i] = ptx.bfma2(ptx.u32(a[i]), ptx.u32(held[k % 2]), more8 if k % 2 else more)

    return inlined(unrolled(decode))


def _fields(layout: GemmLayout, start: int) -> Any:
    """A device function: every word of ``a`` is ``start`` with two codes in its last bits."""
    first, second, third = (*(_field(layout, k) for k in range(len(layout.fields))), _no_field(), _no_field())[:3]

    def fill(a: Any, codes: Any, lane: Any) -> None:
        for k in static(16):
            a[k] = ptx.u32(start)
        first(a, codes, lane)
        second(a, codes, lane)
        third(a, codes, lane)

    return inlined(unrolled(fill))


def _field(layout: GemmLayout, number: int) -> Any:
    """A device function: the bits of one field are put into the words of ``a``."""
    width, offset = layout.fields[number], sum(layout.fields[number + 1 :])
    start, mask = 128 * sum(layout.fields[:number]), (2**width - 1) * 0x10001 << offset
    per, load, pairs, odd = 16 // width, words_of(width), 16 // width * width, width == 3

    def put(a: Any, codes: Any, lane: Any) -> None:
        w = load(ptx.u32(codes + start), lane)
        for k in static(pairs):
            down = k % per * width - offset
            word = ptx.u32(w[k // per] >> down) if down > 0 else ptx.u32(w[k // per] << -down)
            a[k] = ptx.lop3(word, ptx.u32(mask), ptx.u32(a[k]), _AND_OR)
        if odd:  # the last pair
            for i in static(3):
                a[15] = ptx.lop3(ptx.u32(w[i] >> (15 - i)), ptx.u32(0x00010001 << i), ptx.u32(a[15]), _AND_OR)

    return inlined(unrolled(put))


def _no_field() -> Any:
    def put(a: Any, codes: Any, lane: Any) -> None:
        return

    return inlined(put)


def _bcq(layout: GemmLayout) -> Any:
    q, places, half, row_bytes = layout.bits, layout.places, layout.number == "F16", 4 * layout.numbers
    place_bytes, picks = layout.place_bytes, (0x1010, 0x3232)

    def plus(x: Any, y: Any) -> Any:
        return ptx.hadd2(x, y) if half else ptx.bfma2(x, ptx.u32(_ONE_BF16), y)

    add = inlined(plus)

    def decode(a: Any, codes: Any, numbers: Any, lane: Any, held: Any) -> None:
        row = ptx.u32(numbers + (lane >> 2) * row_bytes)
        for p in static(places):
            bias = ptx.lds32(row, ptx.u32(p * place_bytes + 4 * q))
            for k in static(16 // places):
                a[p * (16 // places) + k] = ptx.prmt(bias, bias, ptx.u32(picks[k % 2]))
        for i in static(q):
            word = ptx.lds32(ptx.u32(codes + lane * 4), ptx.u32(i * 128))
            for p in static(places):
                scale = ptx.lds32(row, ptx.u32(p * place_bytes + 4 * i))
                low, high = ptx.prmt(scale, scale, ptx.u32(picks[0])), ptx.prmt(scale, scale, ptx.u32(picks[1]))
                for k in static(16 // places):
                    pair = p * (16 // places) + k
                    bits = ptx.u32(word << (15 - pair))
                    # a bit of 0 is a minus
                    a[pair] = add(ptx.u32(a[pair]), ptx.lop3(bits, ptx.u32(_SIGNS), high if k % 2 else low, _FLIP))

    return inlined(unrolled(decode))
