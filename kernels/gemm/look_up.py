"""Values looked up in tables of eight numbers by byte permutes, four codes at a time; device functions for `decode`.

A permute takes four bytes out of eight, chosen by the nibbles of a selector: one gives the low bytes of four numbers,
one their high bytes, and two bring these together. The codes are stored as such selectors (`layout`): eight of a word,
four of row 2 r, then four of row 2 r + 1. Of 4 bits the fourth cannot choose. In bcq weights its plane is the sign of
the others, which are then chosen as if it were a plus; for other tables it chooses between two halves.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bcqfmt.kernels import ptx
from bcqfmt.kernels.runtime.numba_cuda import cuda, inlined, types
from bcqfmt.kernels.runtime.unroll import static, unrolled

from .layout import GemmLayout
from .words import words_of

__all__ = ["HELD", "bcq", "load_bcq", "table"]

HELD = 10  # words of the tables of two rows, and their biases
_FLIP, _CHOOSE = 0x6A, 0xCA  # a & b ^ c, a ? b : c
_TOPS = 0x80808080  # the highest bit of every byte; as float16, twice -128 * 2^-24
_SIGNS = 0x80008000  # the signs of two numbers; as numbers, twice minus zero
_ONE = {"F16": 0x3C003C00, "BF16": 0x3F803F80}
# selectors of a permute of words a and b
_FIRST, _SECOND = 0x5140, 0x7362  # bytes 0 and 1 of a, each followed by that of b; bytes 2 and 3
_TOP_BYTES = 0xBA98  # 255 for every byte of a with its highest bit set, else 0


def load_bcq(layout: GemmLayout) -> Any:
    """The tables of rows 2 r and 2 r + 1, each as low bytes (2 words) and high bytes (2); of 4 bits, their biases."""
    q = layout.bits

    def load(held: Any, numbers: Any, lane: Any) -> None:
        pair = ptx.u32(lane >> 2)
        if q == 2:
            held[0], held[2], held[4], held[6] = ptx.lds128(ptx.u32(numbers + pair * 16), ptx.u32(0))
        else:
            tables = ptx.u32(numbers + pair * 32)
            held[0], held[1], held[2], held[3] = ptx.lds128(tables, ptx.u32(0))
            held[4], held[5], held[6], held[7] = ptx.lds128(tables, ptx.u32(16))
        if q == 4:
            bias = ptx.lds32(ptx.u32(numbers + pair * 4), ptx.u32(256))
            held[8], held[9] = ptx.prmt(bias, bias, ptx.u32(0x1010)), ptx.prmt(bias, bias, ptx.u32(0x3232))

    return inlined(load)


def bcq(layout: GemmLayout) -> Any:
    """Values of a bcq weight of 2, 3 or 4 planes from the tables of :func:`load_bcq`."""
    signed, selectors, (fma, one) = layout.bits == 4, _selectors(layout.bits), _arithmetic(layout)
    other = 1 if layout.bits > 2 else 0  # the second word of a table

    def decode(a: Any, codes: Any, numbers: Any, lane: Any, held: Any) -> None:
        chosen, tops = cuda.local.array(4, types.uint32), cuda.local.array(4, types.uint32)
        selectors(chosen, tops, codes, lane)
        for w in static(4):
            for k in static(2):
                pick = ptx.u32(chosen[w] >> 16) if k else ptx.u32(chosen[w])
                low = ptx.prmt(ptx.u32(held[4 * k]), ptx.u32(held[4 * k + other]), pick)
                high = ptx.prmt(ptx.u32(held[4 * k + 2]), ptx.u32(held[4 * k + 2 + other]), pick)
                if signed:
                    top = ptx.u32(tops[w] << 4) if k else ptx.u32(tops[w])
                    high = ptx.lop3(top, ptx.u32(_TOPS), high, _FLIP)
                a[4 * w + k] = ptx.prmt(low, high, ptx.u32(_FIRST))
                a[4 * w + 2 + k] = ptx.prmt(low, high, ptx.u32(_SECOND))
                if signed:
                    bias = ptx.u32(held[8 + k])
                    a[4 * w + k] = fma(ptx.u32(a[4 * w + k]), ptx.u32(one), bias)
                    a[4 * w + 2 + k] = fma(ptx.u32(a[4 * w + 2 + k]), ptx.u32(one), bias)

    return inlined(unrolled(decode))


def table(layout: GemmLayout, load: Any) -> Any:
    """Values of 16 given numbers times a scale; ``load`` brings the scales of a place.

    Of integers only a byte is looked up, 128 more than they are: a subnormal number, as affine codes are.
    """
    places, place_bytes, selectors, (fma, _) = layout.places, layout.place_bytes, _selectors(4), _arithmetic(layout)
    kind, in_bytes = np.float16 if layout.number == "F16" else np.float32, layout.in_bytes
    patterns = np.array(layout.table, kind).view(np.uint16).reshape(16, -1)[:, -1]  # of float32 the upper half
    if in_bytes:
        patterns = np.array(layout.table, np.int16).view(np.uint16) + 128
    low_bytes, high_bytes = (part.astype(np.uint8).view(np.uint32).tolist() for part in (patterns & 255, patterns >> 8))
    l0, l1, l2, l3 = low_bytes
    h0, h1, h2, h3 = high_bytes

    def decode(a: Any, codes: Any, numbers: Any, lane: Any, held: Any) -> None:
        chosen, tops = cuda.local.array(4, types.uint32), cuda.local.array(4, types.uint32)
        selectors(chosen, tops, codes, lane)
        for w in static(4):
            if w > 0 and w * places % 4 == 0:
                load(held, ptx.u32(numbers + w * places // 4 * place_bytes), lane)
            for k in static(2):
                scale = ptx.u32(held[k])
                plus = ptx.hmul2(scale, ptx.u32(_TOPS)) if in_bytes else ptx.u32(_SIGNS)  # -128 times the scale, or -0
                pick = ptx.u32(chosen[w] >> 16) if k else ptx.u32(chosen[w])
                top = ptx.u32(tops[w] << 4) if k else ptx.u32(tops[w])
                second = ptx.prmt(top, top, ptx.u32(_TOP_BYTES))
                low = ptx.prmt(ptx.u32(l0), ptx.u32(l1), pick)
                low = ptx.lop3(second, ptx.prmt(ptx.u32(l2), ptx.u32(l3), pick), low, _CHOOSE)
                high = ptx.u32(0)
                if not in_bytes:
                    high = ptx.prmt(ptx.u32(h0), ptx.u32(h1), pick)
                    high = ptx.lop3(second, ptx.prmt(ptx.u32(h2), ptx.u32(h3), pick), high, _CHOOSE)
                a[4 * w + k] = fma(ptx.prmt(low, high, ptx.u32(_FIRST)), scale, plus)
                a[4 * w + 2 + k] = fma(ptx.prmt(low, high, ptx.u32(_SECOND)), scale, plus)

    return inlined(unrolled(decode))


def _selectors(bits: int) -> Any:
    """A device function: four words of selectors, and of 4 bits the words that they are in."""
    load = words_of(bits)

    def of_four(chosen: Any, tops: Any, codes: Any, lane: Any) -> None:
        w = load(codes, lane)
        for i in static(4):
            tops[i], chosen[i] = w[i], ptx.u32(w[i] & 0x77777777)

    def of_three(chosen: Any, tops: Any, codes: Any, lane: Any) -> None:
        w = load(codes, lane)
        for i in static(3):
            chosen[i] = ptx.u32(w[i] & 0x77777777)
        last = ptx.u32(ptx.u32(w[0] >> 3 & 0x11111111) | ptx.u32(w[1] >> 2 & 0x22222222))
        chosen[3] = ptx.u32(last | ptx.u32(w[2] >> 1 & 0x44444444))

    def of_two(chosen: Any, tops: Any, codes: Any, lane: Any) -> None:
        w = load(codes, lane)
        for i in static(2):
            chosen[2 * i], chosen[2 * i + 1] = ptx.u32(w[i] & 0x33333333), ptx.u32(w[i] >> 2 & 0x33333333)

    return inlined(unrolled({4: of_four, 3: of_three, 2: of_two}[bits]))


def _arithmetic(layout: GemmLayout) -> tuple[Any, int]:
    """Multiplication and addition of both halves, and one, in the type of the numbers."""
    return ptx.hfma2 if layout.number == "F16" else ptx.bfma2, _ONE[layout.number]
