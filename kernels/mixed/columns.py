"""x becomes integers for `kernel`: reordered, in blocks of 16 columns with a power of two each.

A tensor-core instruction takes bytes of x of two groups, a word of each, from every lane; three quarters of the lanes
give zeros (`units`). So that one load brings the words for two instructions into the registers where they are
needed, bytes are stored together with the zeros: 16 bytes of a lane are (word, 0, word, 0) or (0, word, 0, word).
A 2-bit unit has 2 x 32 of them, for the first and the second 128 columns, a 4-bit unit 32. ``^`` in addresses
avoids bank conflicts of stores. Negated sums and powers of two: [group % 4][group // 4] pairs.
"""

from __future__ import annotations

from typing import Any

from bcqfmt.kernels import ptx
from bcqfmt.kernels.device_functions.numbers import PRECISION, block_integers
from bcqfmt.kernels.device_functions.vectors import element_at
from bcqfmt.kernels.runtime.numba_cuda import cuda, inlined, types
from bcqfmt.kernels.runtime.unroll import static, unrolled

TOGETHER = 2  # times eight columns that a thread handles at once


def order_loader(threads: int) -> Any:
    """A device function: the places of ``TOGETHER`` times eight columns, four words each, from item ``item`` on."""

    def ask(perm: Any, order: Any, item: Any, items: Any) -> None:
        for i in static(TOGETHER):
            for w in static(4):
                order[i * 4 + w] = ptx.u32(0)
            if ptx.u32(item + i * threads) < items:
                found = ptx.ldcg128(perm, ptx.u32(item + i * threads))
                for w in static(4):
                    order[i * 4 + w] = found[w]

    return inlined(unrolled(ask))


def column_integers(batch: int, parts: int, kind: int, threads: int) -> Any:
    """A device function for all warps that multiply: eight reordered columns a thread, two threads a group.

    x is in shared memory at ``base``, ``xs_bytes`` a vector; ``order`` has the first columns of this thread. Bytes go
    to ``planes_at``, negated sums and powers of two to ``info_at``.
    """
    least, words = parts * PRECISION + 12, 4 * TOGETHER
    element, integers, ask = element_at(kind), block_integers(), order_loader(threads)

    def prepare(
        perm: Any, order: Any, thread: Any, base: Any, xs_bytes: Any, planes_at: Any, info_at: Any, padded: Any,
        twos: Any, columns: Any,
    ) -> None:  # fmt: skip
        items = ptx.u32(padded >> 3)
        item = thread
        while ptx.u32(item & 0xFFFFFFE0) < items:
            after = cuda.local.array(words, types.uint32)
            ask(perm, after, ptx.u32(item + TOGETHER * threads), items)
            for i in static(TOGETHER):
                here = ptx.u32(item + i * threads)
                if ptx.u32(here & 0xFFFFFFE0) < items:  # whole warps: they exchange numbers
                    group = ptx.u32(here >> 1)
                    below = group < ptx.u32(twos * 16)
                    past = ptx.u32(0) if below else ptx.u32(group - twos * 16)
                    quarter = ptx.u32(group & 3)
                    # where the words of this thread lie: column // 4 is 2 (here % 2) and the next
                    at = ptx.u32((group >> 4) * 1024 + (group >> 3 & 1) * 512 + (group >> 2 & 1) * 8)
                    turned = ptx.u32((here & 1) * 2 ^ quarter | (group >> 3 & 1) * 4)
                    info = ptx.u32((group >> 4) * 128 + quarter * 32 + (group >> 2 & 3) * 8)
                    if not below:
                        at = ptx.u32(twos * 1024 + (past >> 3) * 512 + (past >> 2 & 1) * 8)
                        turned = ptx.u32((here & 1) * 2 ^ quarter)
                        info = ptx.u32(twos * 128 + (past >> 3) * 64 + quarter * 16 + (past >> 2 & 1) * 8)
                    at = ptx.u32(at + quarter * 128)
                    one, two = ptx.u32(at + turned * 16), ptx.u32(at + (turned ^ 1) * 16)
                    right = quarter & 1 != 0
                    large = below and group & 4 != 0
                    for b in static(batch):
                        v = cuda.local.array(8, types.float32)
                        largest = ptx.u32(0)
                        for k in static(8):
                            place = min(ptx.u32(order[i * 4 + k // 2] >> (k % 2 * 16) & 0xFFFF), columns)
                            v[k] = element(ptx.u32(base + b * xs_bytes), place)
                            largest = max(largest, ptx.u32(ptx.f32_bits(v[k]) & 0x7FFFFFFF))
                        largest = max(largest, ptx.shfl_xor_u32(largest, ptx.u32(1)))
                        # 127 * 256 + 127 is the largest integer: a little more than 1.99 times a power of two
                        exponent = max(ptx.u32((largest + 0x18000) >> 23), ptx.u32(least))
                        for e in static(parts):
                            lower = ptx.u32(PRECISION * (e + 1))
                            unit, total, high, low, v0, v1, v2, v3 = integers(v[0], v[1], v[2], v[3], exponent, lower)
                            unit, total4, high4, low4, v4, v5, v6, v7 = integers(
                                v[4], v[5], v[6], v[7], exponent, lower
                            )
                            v[0], v[1], v[2], v[3] = v0, v1, v2, v3
                            v[4], v[5], v[6], v[7] = v4, v5, v6, v7
                            total = ptx.u32(total + total4)
                            total = ptx.u32(total + ptx.shfl_xor_u32(total, ptx.u32(1)))
                            if here < items:
                                planes, zero = ptx.u32(planes_at + (b * parts + e) * (padded * 4)), ptx.u32(0)
                                left, other = (zero, high) if right else (high, zero)
                                ptx.sts64(ptx.u32(planes + one), ptx.u32(0), left, other)
                                left, other = (zero, high4) if right else (high4, zero)
                                ptx.sts64(ptx.u32(planes + two), ptx.u32(0), left, other)
                                left, other = (zero, low) if right else (low, zero)
                                ptx.sts64(ptx.u32(planes + (one ^ 64)), ptx.u32(0), left, other)
                                left, other = (zero, low4) if right else (low4, zero)
                                ptx.sts64(ptx.u32(planes + (two ^ 64)), ptx.u32(0), left, other)
                                if here & 1 == 0:
                                    if largest >= 0x7F800000:  # infinities and NaNs in x: everything is NaN
                                        unit = ptx.bits_f32(ptx.u32(0x7FC00000))
                                    # sums are up to 64 times too large, those of odd 2-bit 64 columns 16 times more
                                    unit = ptx.f32(unit * (ptx.f32(2.0**-10) if large else ptx.f32(2.0**-6)))
                                    place = ptx.u32(info_at + (b * parts + e) * (padded >> 1) + info)
                                    ptx.sts64(place, ptx.u32(0), ptx.u32(-total), ptx.f32_bits(unit))
            for w in static(words):
                order[w] = after[w]
            item = ptx.u32(item + TOGETHER * threads)

    return inlined(unrolled(prepare))
