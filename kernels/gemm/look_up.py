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
_TOPS = 0x80808080  # the highest bit of every byte
_SIGNS = 0x80008000  # the signs of two numbers; as numbers, twice minus zero
_ONE = {"F16": 0x3C003C00, "BF16": 0x3F803F80}
# selectors of a permute of words a and b
_LOWER = 0x5410  # the lower halves of both
_FIRST, _SECOND = 0x5140, 0x7362  # bytes 0 and 1 of a, each followed by that of b; bytes 2 and 3
_TOP_BYTES = 0xBA98  # 255 for every byte of a with its highest bit set, else 0


def load_bcq(layout: GemmLayout) -> Any:
    """The sums of a row's scales for every index, as low bytes (2 words) and high bytes (2), for rows 2 r and 2 r + 1.

    Of 4 bits the first plane is a plus, and the bias follows; of fewer the bias is in the sums.
    """
    q, (fma, one), count = layout.bits, _arithmetic(layout), layout.numbers
    third, words = q > 2, 2 if q > 2 else 1
    base, first = (0, 1) if q == 4 else (q, 0)  # where sums begin, and the first scale that is added or taken off

    def load(held: Any, numbers: Any, lane: Any) -> None:
        row = ptx.u32(numbers + (lane >> 2) * (4 * count))
        n = cuda.local.array(count, types.uint32)  # number i of row 2 r in the lower half, of row 2 r + 1 in the upper
        for i in static(count):
            n[i] = ptx.lds32(row, ptx.u32(4 * i))
        v = cuda.local.array(8, types.uint32)
        scale, start = ptx.u32(n[first]), ptx.u32(n[base])
        minus, plus = ptx.u32(one ^ _SIGNS), ptx.u32(one)
        upper, lower = fma(scale, plus, start), fma(scale, minus, start)
        if third:
            both = fma(ptx.u32(n[first + 1]), plus, ptx.u32(n[first + 2]))
            apart = fma(ptx.u32(n[first + 2]), minus, ptx.u32(n[first + 1]))
            for k in static(2):
                half = upper if k else lower
                v[4 * k + 3], v[4 * k + 2] = fma(both, plus, half), fma(apart, plus, half)
                v[4 * k + 1], v[4 * k] = fma(apart, minus, half), fma(both, minus, half)
        else:
            for k in static(2):
                half = upper if k else lower
                v[2 * k + 1], v[2 * k] = fma(ptx.u32(n[1]), plus, half), fma(ptx.u32(n[1]), minus, half)
        # each of the four lanes of two rows collects one byte of every sum
        pick, first_lane = ptx.u32(0x40 + (lane & 3) * 0x11), ptx.u32(lane & 28)
        for i in static(words):
            one_pair = ptx.prmt(ptx.u32(v[4 * i]), ptx.u32(v[4 * i + 1]), pick)
            next_pair = ptx.prmt(ptx.u32(v[4 * i + 2]), ptx.u32(v[4 * i + 3]), pick)
            own = ptx.prmt(one_pair, next_pair, ptx.u32(_LOWER))
            for j in static(4):
                held[2 * j + i] = ptx.shfl_u32(own, ptx.u32(first_lane + j))
        bias = ptx.u32(n[q])
        held[8], held[9] = ptx.prmt(bias, bias, ptx.u32(0x1010)), ptx.prmt(bias, bias, ptx.u32(0x3232))

    return inlined(unrolled(load))


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
    """Values of 16 given numbers times a scale; ``load`` brings the scales of a place."""
    places, place_bytes, selectors, (fma, _) = layout.places, layout.place_bytes, _selectors(4), _arithmetic(layout)
    kind = np.float16 if layout.number == "F16" else np.float32
    patterns = np.array(layout.table, kind).view(np.uint16).reshape(16, -1)[:, -1]  # of float32 the upper half
    low_bytes, high_bytes = (part.astype(np.uint8).view(np.uint32).tolist() for part in (patterns & 255, patterns >> 8))
    short = not any(low_bytes)
    l0, l1, l2, l3 = low_bytes
    h0, h1, h2, h3 = high_bytes

    def decode(a: Any, codes: Any, numbers: Any, lane: Any, held: Any) -> None:
        chosen, tops = cuda.local.array(4, types.uint32), cuda.local.array(4, types.uint32)
        selectors(chosen, tops, codes, lane)
        for w in static(4):
            if w > 0 and w * places % 4 == 0:
                load(held, ptx.u32(numbers + w * places // 4 * place_bytes), lane)
            for k in static(2):
                pick = ptx.u32(chosen[w] >> 16) if k else ptx.u32(chosen[w])
                top = ptx.u32(tops[w] << 4) if k else ptx.u32(tops[w])
                second = ptx.prmt(top, top, ptx.u32(_TOP_BYTES))
                high = ptx.prmt(ptx.u32(h0), ptx.u32(h1), pick)
                high = ptx.lop3(second, ptx.prmt(ptx.u32(h2), ptx.u32(h3), pick), high, _CHOOSE)
                low = ptx.u32(0)
                if not short:
                    low = ptx.prmt(ptx.u32(l0), ptx.u32(l1), pick)
                    low = ptx.lop3(second, ptx.prmt(ptx.u32(l2), ptx.u32(l3), pick), low, _CHOOSE)
                scale = ptx.u32(held[k])
                a[4 * w + k] = fma(ptx.prmt(low, high, ptx.u32(_FIRST)), scale, ptx.u32(_SIGNS))
                a[4 * w + 2 + k] = fma(ptx.prmt(low, high, ptx.u32(_SECOND)), scale, ptx.u32(_SIGNS))

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
