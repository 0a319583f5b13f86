"""5 to 8 planes, or short groups, to 16-bit numbers on the device: as in `cuda_dequant.tables` a word for each thread.

More values than a group has columns, or than 16, are too many to compute beforehand, so every element is computed,
exactly as `cuda_dequant` says; its planes are loaded once for 32 columns, its numbers once for a group or for eight of
its columns, and stores go through shared memory.
"""

from __future__ import annotations

import functools
from typing import Any

from bcqfmt.kernels import ptx
from bcqfmt.kernels.cuda_dequant import code_value, rounding
from bcqfmt.kernels.dequant_rows import ARGUMENTS, THREADS, eight_putter, to_rows
from bcqfmt.kernels.launch import Kernel, kernel
from bcqfmt.kernels.ptx_numba import cuda, inlined, types
from bcqfmt.kernels.unroll import static, unrolled

__all__ = ["compile_cases", "words"]


@functools.cache
def words(
    q: int, formula: int, numbers: str, logical: int, result: int, twice: bool = False, short: bool = False,
    reordered: bool = False,
) -> Kernel:  # fmt: skip
    """One segment: group size a multiple of 32, if ``short`` of 8, everything a multiple of 8 columns.

    As `cuda_dequant.tables`; if ``short``, ``span`` counts eights of columns.
    """
    run = to_rows(_words(q, formula, logical, result, twice, short), reordered)

    @kernel(
        ARGUMENTS.format(numbers=numbers),
        threads=THREADS,
        blocks=3,
        variant=repr((q, formula, numbers, logical, result, twice, short, reordered)),
    )
    def dequantize_words(
        planes: Any, first: Any, second: Any, dense: Any, stored: Any, rows: Any, columns: Any, start: Any, width: Any,
        words: Any, groups: Any, span: Any, together: Any,
    ) -> None:  # fmt: skip
        base = ptx.shared_address(cuda.shared.array(0, types.uint32))
        run(planes, first, second, dense, stored, base, rows, columns, start, width, words, groups, span, together)

    return dequantize_words


def _words(q: int, formula: int, logical: int, result: int, twice: bool, short: bool) -> Any:
    """A device function that decodes as `to_rows` wants it."""
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


def compile_cases() -> dict[str, list[tuple[Any, ...]]]:
    """What `tests/kernels/compile_check.py` compiles."""
    cases = [
        (8, 0, "f32", 1, 1), (5, 3, "f32", 1, 2), (6, 1, "f32", 2, 2), (8, 0, "f32", 1, 2, True),
        (4, 0, "f32", 1, 1, False, True), (4, 3, "f32", 1, 2, False, True), (2, 2, "f64", 0, 1, True, True),
        (8, 0, "f32", 1, 1, False, False, True), (4, 3, "f32", 1, 1, False, True, True),
    ]  # fmt: skip
    return {"words": cases}
