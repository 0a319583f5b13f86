"""x becomes bit planes in shared memory, for the product on binary tensor cores: a device function."""

from __future__ import annotations

from typing import Any

from bcqfmt.kernels import ptx
from bcqfmt.kernels.device_functions.numbers import MAGIC, ONES, PATTERN, bit_turner, step_turner
from bcqfmt.kernels.ptx.ptx_bits import barrier_of, meet, mma_b1, mma_b1_wide, sts8
from bcqfmt.kernels.runtime.numba_cuda import cuda, inlined, types
from bcqfmt.kernels.runtime.unroll import static, unrolled

from .columns import column_walker
from .layout import STEP_MASKS
from .shape import BitShape

__all__ = ["bit_vectors"]


def bit_vectors(shape: BitShape) -> Any:
    """A device function for all warps that multiply: bits to ``base``, shares of sums and powers of two behind them.

    Eight columns a thread, a byte of every plane. All threads of the block meet when the bits are there; it ends with a
    barrier of these warps.
    """
    layout, batch, parts = shape.layout, shape.batch, shape.parts
    chunks, wide, passes = layout.chunks, layout.wide, layout.passes
    bcq, halves = layout.formula == "bcq", 256 // layout.span
    sharers, held, pairs, stride, t_base = shape.sharers, shape.held, shape.held // 2, shape.stride, shape.sums_at
    precision, start_value = (14 if parts == 2 else 21), 0 if shape.converted else PATTERN
    masks, in_steps = STEP_MASKS[passes], step_turner()
    threads, total_columns = 32 * shape.slices * shape.tiles, layout.chunks * 256
    warps, turn_bits = threads // 32, bit_turner()

    def put(v: Any, b: Any, column: Any, base: Any, lane: Any) -> None:
        largest = ptx.u32(0)
        for k in static(8):
            largest = max(largest, ptx.u32(ptx.f32_bits(v[k]) & 0x7FFFFFFF))
        for k in static(5 if wide else 4):
            largest = max(largest, ptx.shfl_xor_u32(largest, ptx.u32(1 << k)))
        exponent = max(ptx.u32(largest >> 23), ptx.u32(precision + 2))
        unit_value = ptx.bits_f32(ptx.u32((exponent - precision) << 23))
        if exponent == 255:  # infinities and NaNs in x: everything is NaN
            unit_value = ptx.bits_f32(ptx.u32(0x7FC00000))
        inverse = ptx.bits_f32(ptx.u32((254 + precision - exponent) << 23))
        n = cuda.local.array(8, types.uint32)
        for k in static(8):
            n[k] = ptx.u32(ptx.f32_bits(ptx.fma_f32(v[k], inverse, MAGIC)) - PATTERN)
        if column < total_columns:
            here = ptx.u32(base + (b * chunks * 2 + (column >> 7)) * stride + (lane & 15))
            for e in static(parts):
                pick = ptx.u32(e | (e + 4) << 4)
                turned, rest = turn_bits(n[0], n[1], n[2], n[3], n[4], n[5], n[6], n[7], pick)
                for j in static(8):
                    # plane 8 e + j lies where the lanes that hold it look for it
                    at = ((8 * e + j) % held // 2 * (2 * sharers) + (8 * e + j) // held * 2 + j % 2) * 16
                    bits = turned if j < 4 else rest
                    sts8(here, ptx.u32(at), ptx.u32(bits >> (j % 4 * 8)))
            if lane % (32 if wide else 16) < 4:
                entry = ptx.u32(b * chunks * halves + (column >> (8 if wide else 7)))
                for p in static(passes):
                    at = ptx.u32(base + t_base + (entry * passes + p) * 64 + (lane & 3) * 16)
                    ptx.sts_f32(at, ptx.u32(8), unit_value)

    walk = column_walker(layout, batch, shape.kind, threads, shape.reordered, inlined(unrolled(put)))

    def prepare(x: Any, perm: Any, base: Any, thread: Any, columns: Any, start: Any) -> None:
        lane, warp = ptx.u32(thread & 31), ptx.u32(thread >> 5)
        t, r8 = ptx.u32(lane & 3), ptx.u32(lane >> 2)
        walk(x, perm, base, thread, columns, start)
        meet()
        sign = -1 if t % sharers == sharers - 1 else 1
        xlane = ptx.u32(base + (((r8 >> 1) % sharers * 2 + (r8 & 1)) * 4 + t) * 4)
        keep = ptx.u32(ONES) if t // sharers == (r8 >> 1) // sharers else ptx.u32(0)
        # shares of sum(x), by the same instruction with all weights set
        for b in range(batch):
            s = warp
            while s < chunks * halves:
                at = ptx.u32(xlane + (b * chunks * 2 + s * (2 // halves)) * stride)
                if passes > 1:  # bits of x as those of the weight; several lanes have the same word
                    for m in static(pairs):
                        word = in_steps(ptx.lds32(at, ptx.u32(m * sharers * 32)))
                        ptx.syncwarp()
                        if r8 < 2 * sharers:
                            ptx.sts32(at, ptx.u32(m * sharers * 32), word)
                    ptx.syncwarp()
                for p in static(passes):
                    share = ptx.i32(0)
                    for m in static(pairs):
                        word = ptx.u32(ptx.lds32(at, ptx.u32(m * sharers * 32)) & keep)
                        if passes > 1:
                            word = ptx.u32(word & masks[p])
                        ones = ptx.u32(ONES)
                        if wide:
                            other = ptx.lds32(at, ptx.u32(m * sharers * 32 + stride))
                            counts = mma_b1_wide(ones, ones, ones, ones, word, other)
                        else:
                            counts = mma_b1(ones, ones, word)
                        share = ptx.i32(share + (counts[0] << (2 * m)))
                        share = ptx.i32(share + (counts[1] << (2 * m + 1)) * (sign if m == pairs - 1 else 1))
                    if r8 == 0:
                        entry = ptx.u32(base + t_base + t * 16 + ((b * chunks * halves + s) * passes + p) * 64)
                        first_value = ptx.u32(start_value - (share if bcq else 0))
                        ptx.sts64(entry, ptx.u32(0), first_value, ptx.f32_bits(ptx.f32(share)))
                s = ptx.u32(s + warps)
        barrier_of(ptx.u32(1), ptx.u32(threads))

    return inlined(unrolled(prepare))
