"""Outliers in a fused product: packed entries, asked for early and added up by some lanes of a warp for each row.

Entries are CSR by row: a word of column and float16, or where float16 would lose something two words, column and
float32. The device functions here know nothing of the kernel around them: a kernel keeps x in shared memory, calls
:func:`outlier_fetcher` one tile ahead and :func:`outlier_sum` where the tile ends.
"""

from __future__ import annotations

from typing import Any

from bcqfmt.kernels import ptx
from bcqfmt.kernels.mixed_vectors import element_at
from bcqfmt.kernels.ptx_bits import bulk_copy, bulk_expect
from bcqfmt.kernels.ptx_numba import inlined

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
    """A device function: the sum of value times x over every ``step``-th entry from ``k`` to ``end``.

    Entries of ``size`` bytes (column and float16 in a word, or column and float32 in two) are in shared memory at
    ``slot``, from entry ``first`` on; those beyond its ``room`` bytes are read where they come from. ``xs``: x in
    shared memory, in original order.
    """
    element = element_at(kind)

    def narrow(
        entries: Any, k: Any, end: Any, step: Any, first: Any, slot: Any, room: Any, xs: Any, columns: Any
    ) -> Any:
        total = ptx.f32(0.0)
        while k < end:
            at = ptx.u32((k - first) * 4)
            if at < room:
                word = ptx.lds32(ptx.u32(slot + at), ptx.u32(0))
            else:
                word = ptx.ldg32(entries, k)
            column = min(ptx.u32(word & 0xFFFF), columns)
            total = ptx.fma_f32(ptx.hi_f16(word), element(xs, column), total)
            k = ptx.u32(k + step)
        return total

    def full(entries: Any, k: Any, end: Any, step: Any, first: Any, slot: Any, room: Any, xs: Any, columns: Any) -> Any:
        total = ptx.f32(0.0)
        while k < end:
            at = ptx.u32((k - first) * 8)
            if at < room:
                words = ptx.lds64(ptx.u32(slot + at), ptx.u32(0))
            else:
                words = ptx.ldg64(entries, k)
            column = min(ptx.u32(words[0]), columns)
            total = ptx.fma_f32(ptx.bits_f32(words[1]), element(xs, column), total)
            k = ptx.u32(k + step)
        return total

    return inlined(narrow if size == 4 else full)
