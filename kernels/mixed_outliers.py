"""Outliers in a fused product: packed entries, asked for early and added up by some lanes of a warp for each row.

Entries are CSR by row: a word of column and float16, or where float16 would lose something two words, column and
float32. The device functions here know nothing of the kernel around them: a kernel keeps x in shared memory, calls
:func:`outlier_fetcher` one tile ahead and :func:`outlier_sum` while its other warps multiply.
"""

from __future__ import annotations

from typing import Any

from bcqfmt.kernels import ptx
from bcqfmt.kernels.mixed_vectors import element_at
from bcqfmt.kernels.ptx_bits import bulk_copy, bulk_expect
from bcqfmt.kernels.ptx_numba import cuda, inlined, types
from bcqfmt.kernels.unroll import static, unrolled

__all__ = ["outlier_fetcher", "outlier_sum"]


def outlier_fetcher(size: int) -> Any:
    """A device function: one lane asks for entries ``first`` .. ``last`` (``size`` bytes each) of a warp's rows.

    At most ``room`` bytes; the copy starts at a multiple of 16 bytes. Nothing is asked for where there is no entry.
    """
    each = 16 // size

    def fetch(entries: Any, first: Any, last: Any, room: Any, slot: Any, bar: Any) -> None:
        begin = ptx.u32(first // each)
        count = min(ptx.u32((last + (each - 1)) // each - begin), ptx.u32(room >> 4))
        bulk_expect(bar, ptx.u32(count * 16))
        bulk_copy(entries, begin, slot, ptx.u32(count * 16), bar)

    return inlined(fetch)


def outlier_sum(kind: int, size: int) -> Any:
    """A device function: the sum of value times x over every ``step``-th entry from ``k`` to ``end``, in that order.

    Entries of ``size`` bytes (column and float16 in a word, or column and float32 in two) are in shared memory at
    ``slot``, from entry ``first`` on; those beyond its ``room`` bytes are read where they come from. ``xs``: x in
    shared memory, in original order. Four entries are on their way at a time: one by one they are all latency.
    """
    element, short = element_at(kind), size == 4

    def entry_at(slot: Any, at: Any) -> Any:
        if short:
            word = ptx.lds32(ptx.u32(slot + at * 4), ptx.u32(0))
            return ptx.u32(word & 0xFFFF), ptx.hi_f16(word)
        words = ptx.lds64(ptx.u32(slot + at * 8), ptx.u32(0))
        return words[0], ptx.bits_f32(words[1])

    def entry_of(entries: Any, k: Any) -> Any:
        if short:
            word = ptx.ldg32(entries, k)
            return ptx.u32(word & 0xFFFF), ptx.hi_f16(word)
        words = ptx.ldg64(entries, k)
        return words[0], ptx.bits_f32(words[1])

    near, far = inlined(entry_at), inlined(entry_of)

    def added_up(
        entries: Any, k: Any, end: Any, step: Any, first: Any, slot: Any, room: Any, xs: Any, columns: Any
    ) -> Any:
        total = ptx.f32(0.0)
        there, start = min(end, ptx.u32(first + room // size)), k
        while k < there:
            values = cuda.local.array(4, types.float32)
            places = cuda.local.array(4, types.uint32)
            for i in static(4):
                place, value = near(slot, ptx.u32(min(ptx.u32(k + i * step), ptx.u32(there - 1)) - first))
                values[i], places[i] = value, min(place, columns)
            for i in static(4):
                more = ptx.fma_f32(values[i], element(xs, places[i]), total)
                if ptx.u32(k + i * step) < there:
                    total = more
            k = ptx.u32(k + 4 * step)
        while k > start and ptx.u32(k - step) >= there:  # what the last four went too far
            k = ptx.u32(k - step)
        while k < end:
            place, value = far(entries, k)
            total = ptx.fma_f32(value, element(xs, min(place, columns)), total)
            k = ptx.u32(k + step)
        return total

    return inlined(unrolled(added_up))
