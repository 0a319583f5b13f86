"""x becomes integers: reordered, in blocks of 16 columns with a power of two each, as a device function."""

from __future__ import annotations

from typing import Any

from bcqfmt.kernels import ptx
from bcqfmt.kernels.mixed_steps import PRECISION, block_integers
from bcqfmt.kernels.mixed_vectors import element_at
from bcqfmt.kernels.ptx_numba import cuda, inlined, types
from bcqfmt.kernels.unroll import static, unrolled

__all__ = ["vector_integers"]


def vector_integers(batch: int, parts: int, kind: int, threads: int) -> Any:
    """A device function for all threads of a block: four reordered columns a thread, four threads a group.

    x is in shared memory at ``base``, ``xs_bytes`` a vector; ``order0`` and ``order1`` are the first four columns of
    this thread. Bytes go to ``planes_at``, negated sums and powers of two to ``info_at``.
    """
    least = parts * PRECISION + 8
    element, integers = element_at(kind), block_integers()

    def prepare(
        perm: Any, order0: Any, order1: Any, thread: Any, base: Any, xs_bytes: Any, planes_at: Any, info_at: Any,
        padded: Any, columns: Any,
    ) -> None:  # fmt: skip
        quad = thread
        while quad < padded >> 2:
            after0, after1 = ptx.u32(0), ptx.u32(0)
            if ptx.u32(quad + threads) < padded >> 2:
                after0, after1 = ptx.ldg64_keep(perm, ptx.u32(quad + threads))
            for b in static(batch):
                v = cuda.local.array(4, types.float32)
                largest = ptx.u32(0)
                for k in static(4):
                    word = order0 if k < 2 else order1
                    place = min(ptx.u32(word >> (k % 2 * 16) & 0xFFFF), columns)
                    v[k] = element(ptx.u32(base + b * xs_bytes), place)
                    largest = max(largest, ptx.u32(ptx.f32_bits(v[k]) & 0x7FFFFFFF))
                largest = max(largest, ptx.shfl_xor_u32(largest, ptx.u32(1)))
                largest = max(largest, ptx.shfl_xor_u32(largest, ptx.u32(2)))
                # 127 * 256 + 127 is the largest integer: a little more than 1.99 times a power of two
                exponent = max(ptx.u32((largest + 0x18000) >> 23), ptx.u32(least))
                for e in static(parts):
                    unit, total, high, low, v0, v1, v2, v3 = integers(
                        v[0], v[1], v[2], v[3], exponent, ptx.u32(PRECISION * (e + 1))
                    )
                    v[0], v[1], v[2], v[3] = v0, v1, v2, v3
                    total = ptx.u32(total + ptx.shfl_xor_u32(total, ptx.u32(1)))
                    total = ptx.u32(total + ptx.shfl_xor_u32(total, ptx.u32(2)))
                    at = ptx.u32(planes_at + (b * parts + e) * (padded * 2) + (quad >> 2) * 32 + (quad & 3) * 4)
                    ptx.sts32(at, ptx.u32(0), high)
                    ptx.sts32(at, ptx.u32(16), low)
                    if quad & 3 == 0:
                        if largest >= 0x7F800000:  # infinities and NaNs in x: everything is NaN
                            unit = ptx.bits_f32(ptx.u32(0x7FC00000))
                        at = ptx.u32(info_at + (b * parts + e) * (padded >> 1) + (quad >> 2) * 8)
                        unit = ptx.f32(unit * ptx.f32(0.015625))  # sums are up to 64 times too large, see below
                        ptx.sts64(at, ptx.u32(0), ptx.u32(-total), ptx.f32_bits(unit))
            order0, order1 = after0, after1
            quad = ptx.u32(quad + threads)

    return inlined(unrolled(prepare))
