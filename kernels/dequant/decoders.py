"""32 columns of a lane to 16-bit numbers: device functions that `rows.to_rows` calls.

`table_decoder`: at most 4 planes in groups of whole words. A group has at most 16 different values, so a lane computes
those exactly, once for its 32 columns, and then only looks up: the values' bytes lie in registers and PRMT fetches four
at a time. `word_decoder`: where there are more values than a table holds, or than a group has columns, every element is
computed. Planes are loaded once for 32 columns, numbers once for a group or for eight of its columns.
"""

from __future__ import annotations

from typing import Any

from bcqfmt.kernels import ptx
from bcqfmt.kernels.device_functions.numbers import rounding
from bcqfmt.kernels.runtime.numba_cuda import cuda, inlined, types
from bcqfmt.kernels.runtime.unroll import static, unrolled

from .rows import eight_putter
from .values import code_value


def table_decoder(q: int, formula: int, logical: int, result: int, finite: bool, twice: bool) -> Any:
    """A device function that decodes as `to_rows` wants it. ``finite``: no value can be a NaN."""
    codes, put, value_of = 2**q, eight_putter(), code_value(formula, logical)
    rounded = rounding(logical if twice else None)
    narrow, nan = (ptx.f64_to_f16, 0x7E00) if result == 1 else (ptx.f64_to_bf16, 0x7FC0)
    ones = 0x11111111

    def decode(
        planes: Any, first: Any, second: Any, rows: Any, words: Any, groups: Any, span: Any, row: Any, word: Any,
        lane: Any, base: Any,
    ) -> None:  # fmt: skip
        packed = cuda.local.array(8, types.uint32)
        low = cuda.local.array(4, types.uint32)
        high = cuda.local.array(4, types.uint32)
        nibbles = cuda.local.array(4, types.uint32)
        pairs = cuda.local.array(16, types.uint32)
        word = ptx.min_u32(ptx.u32(word + lane), words - 1)
        group = ptx.div_u32(word, span)
        at = ptx.u32(row * groups + group)
        # -- nibble j of nibbles[m] is the code of column 4 j + m
        for m in range(4):
            nibbles[m] = ptx.u32(0)
        for i in range(q):
            plane = ptx.ldg32(planes, ptx.u32((i * rows + row) * words + word))
            up = q - 1 - i
            for m in range(4):
                moved = plane >> (m - up) if m >= up else plane << (up - m)
                nibbles[m] = ptx.u32(nibbles[m] | moved & (ones << up))
        # -- the values of all codes, two to a word
        for i in range(8):
            packed[i] = ptx.u32(0)
        for code in range(codes):
            if formula == 3:
                exact = ptx.f64(second[at])
                for i in range(q):
                    alpha = ptx.f64(first[ptx.u32((i * rows + row) * groups + group)])
                    if code >> (q - 1 - i) & 1:
                        exact = ptx.add_f64(exact, alpha)
                    else:
                        exact = ptx.sub_f64(exact, alpha)
            else:
                exact = value_of(ptx.f64(first[at]), ptx.f64(second[at]), code)
            exact = rounded(exact)
            bits = narrow(exact)
            if not finite and exact != exact:
                bits = ptx.u32(nan)
            packed[code >> 1] = ptx.u32(packed[code >> 1] | bits << (16 * (code & 1)))
        for i in range(4):  # bytes apart: low[i] has the low bytes of the values of codes 4 i .. 4 i + 3
            low[i] = ptx.prmt(packed[2 * i], packed[2 * i + 1], 0x6420)
            high[i] = ptx.prmt(packed[2 * i], packed[2 * i + 1], 0x7531)
        # -- look-up; pairs[8 h + 2 j + m / 2] becomes columns 16 h + 4 j + m and + m + 1
        for h in range(2):
            for pair in range(2):
                left = ptx.u32(nibbles[2 * pair] >> (16 * h))
                right = ptx.u32(nibbles[2 * pair + 1] >> (16 * h))
                if q < 4:
                    a = ptx.prmt(low[0], low[1], left)
                    b = ptx.prmt(high[0], high[1], left)
                    c = ptx.prmt(low[0], low[1], right)
                    d = ptx.prmt(high[0], high[1], right)
                else:
                    choose = ptx.u32(left >> 1 & 0x4444 | 0x3210)
                    left = ptx.u32(left & 0x7777)
                    a = ptx.prmt(ptx.prmt(low[0], low[1], left), ptx.prmt(low[2], low[3], left), choose)
                    b = ptx.prmt(ptx.prmt(high[0], high[1], left), ptx.prmt(high[2], high[3], left), choose)
                    choose = ptx.u32(right >> 1 & 0x4444 | 0x3210)
                    right = ptx.u32(right & 0x7777)
                    c = ptx.prmt(ptx.prmt(low[0], low[1], right), ptx.prmt(low[2], low[3], right), choose)
                    d = ptx.prmt(ptx.prmt(high[0], high[1], right), ptx.prmt(high[2], high[3], right), choose)
                e = ptx.prmt(a, b, 0x5140)
                f = ptx.prmt(c, d, 0x5140)
                pairs[8 * h + pair] = ptx.prmt(e, f, 0x5410)
                pairs[8 * h + 2 + pair] = ptx.prmt(e, f, 0x7632)
                e = ptx.prmt(a, b, 0x7362)
                f = ptx.prmt(c, d, 0x7362)
                pairs[8 * h + 4 + pair] = ptx.prmt(e, f, 0x5410)
                pairs[8 * h + 6 + pair] = ptx.prmt(e, f, 0x7632)
        for k in range(4):
            put(base, lane, k, pairs[4 * k], pairs[4 * k + 1], pairs[4 * k + 2], pairs[4 * k + 3])

    return inlined(decode)


def word_decoder(q: int, formula: int, logical: int, result: int, twice: bool, short: bool) -> Any:
    """A device function that decodes as `to_rows` wants it. ``short``: groups of eights of columns, not of words."""
    put, load, value_of = eight_putter(), _numbers(q, formula), code_value(formula, logical)
    rounded = rounding(logical if twice else None)
    narrow = ptx.f64_to_f16 if result == 1 else ptx.f64_to_bf16
    nan = 0x7E00 if result == 1 else 0x7FC0

    def decode(
        planes: Any, first: Any, second: Any, rows: Any, words: Any, groups: Any, span: Any, row: Any, word: Any,
        lane: Any, base: Any,
    ) -> None:  # fmt: skip
        plane = cuda.local.array(q, types.uint32)
        alpha = cuda.local.array(q, types.float64)
        word = ptx.min_u32(ptx.u32(word + lane), words - 1)
        for i in static(q):
            plane[i] = ptx.ldg32(planes, ptx.u32((i * rows + row) * words + word))
        if not short:
            scale, other = load(alpha, first, second, rows, row, groups, ptx.div_u32(word, span))
        for k in range(4):
            if short:
                group = ptx.min_u32(ptx.div_u32(ptx.u32(word * 4 + k), span), groups - 1)
                scale, other = load(alpha, first, second, rows, row, groups, group)
            pairs = cuda.local.array(4, types.uint32)
            for m in static(8):
                if formula == 3:
                    exact = other
                    for i in static(q):
                        chosen = alpha[i] if plane[i] >> m & 1 else -alpha[i]
                        exact = ptx.add_f64(exact, chosen)
                else:
                    code = ptx.u32(0)
                    for i in static(q):
                        up = q - 1 - i
                        moved = plane[i] >> (m - up) if m >= up else plane[i] << (up - m)
                        code = ptx.u32(code | moved & (1 << up))
                    exact = value_of(scale, other, code)
                exact = rounded(exact)
                bits = narrow(exact) if exact == exact else ptx.u32(nan)
                pairs[m // 2] = ptx.u32(pairs[m // 2] | bits << 16) if m % 2 else bits
            for i in static(q):
                plane[i] = ptx.u32(plane[i] >> 8)
            put(base, lane, k, pairs[0], pairs[1], pairs[2], pairs[3])

    return inlined(unrolled(decode))


def _numbers(q: int, formula: int) -> Any:
    """A device function: scale (0 for bcq, which has ``alpha`` filled) and zero point, offset or bias of a group."""

    def load(alpha: Any, first: Any, second: Any, rows: Any, row: Any, groups: Any, group: Any) -> Any:
        at = ptx.u32(row * groups + group)
        scale, other = ptx.f64(0.0), ptx.f64(second[at])
        if formula == 3:
            for i in static(q):
                alpha[i] = ptx.f64(first[ptx.u32((i * rows + row) * groups + group)])
        else:
            scale = ptx.f64(first[at])
        return scale, other

    return inlined(unrolled(load))
