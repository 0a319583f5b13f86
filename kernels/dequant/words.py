"""Any number of planes, also in short groups, to 16-bit numbers: 32 columns of a lane one by one. Device functions.

Where there are more values than a table holds, or than a group has columns, every element is computed. Planes are
loaded once for 32 columns, numbers once for a group or for eight of its columns.
"""

from __future__ import annotations

from typing import Any

from bcqfmt.kernels import ptx
from bcqfmt.kernels.runtime.numba_cuda import cuda, inlined, types
from bcqfmt.kernels.runtime.unroll import static, unrolled

from .rows import eight_putter
from .values import code_value, rounding

__all__ = ["word_decoder"]


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
