"""Vectors become bytes in shared memory for groups of 8 and 16 columns: a device function."""

from __future__ import annotations

from typing import Any

from bcqfmt.kernels import ptx
from bcqfmt.kernels.device_functions.numbers import PATTERN
from bcqfmt.kernels.ptx.ptx_bits import meet
from bcqfmt.kernels.runtime.numba_cuda import cuda, inlined, types
from bcqfmt.kernels.runtime.unroll import static, unrolled

from .byte_prepare import MAGIC, PRECISION, power_of_128
from .columns import column_walker
from .short_shape import ShortShape

__all__ = ["short_vectors"]

_BIAS = 8 * (PATTERN + 128) & 0xFFFFFFFF


def short_vectors(shape: ShortShape) -> Any:
    """A device function for all warps that multiply, eight columns a thread; at its end all threads of the block meet.

    In 128 columns of a vector there is one power of two, U. Columns 32 t + 8 s + k are integers of 16 bits in units of
    U, in groups of 16 columns those with odd s in units of 2 U: ``256 high + low``, signed bytes. They go to ``base``:
    [128 columns][s][vector][t][high, low][k]. Then as many zeros as 128 columns take. Behind them, for 128 columns,
    [pass][vector][t] pairs: the sum of x in the group, times 2^s, added to 1.5 * 2^23 and as it is; and [vector][t]
    pairs whose first is U. In groups of 16 columns, s is the first of its group.
    """
    layout, batch, stride, sums_at, zeros_at = shape.layout, shape.batch, shape.stride, shape.sums_at, shape.zeros_at
    passes, sums_bytes = layout.passes, shape.sums_bytes
    threads, total_columns, power = 32 * shape.slices * shape.tiles, layout.chunks * 256, power_of_128()

    def put(v: Any, b: Any, column: Any, base: Any, lane: Any) -> None:
        t, s = ptx.u32((lane >> 2) & 3), ptx.u32(lane & 3)
        largest, exponent = power(v)
        unit = ptx.bits_f32(ptx.u32((exponent - PRECISION) << 23))
        scale = ptx.bits_f32(ptx.u32((254 + PRECISION - (s & (1 if passes == 2 else 0)) - exponent) << 23))
        n = cuda.local.array(8, types.uint32)
        for k in static(8):
            n[k] = ptx.f32_bits(ptx.fma_f32(v[k], scale, MAGIC))
        total = ptx.u32(n[0] + n[1] + n[2] + n[3] + n[4] + n[5] + n[6] + n[7] - _BIAS)
        total = ptx.u32(total << s)  # what the masks make of it
        if passes == 2:
            total = ptx.u32(total + ptx.shfl_xor_u32(total, ptx.u32(1)))
        if largest >= 0x7F800000:  # infinities and NaNs in x: everything is NaN
            unit = ptx.bits_f32(ptx.u32(0x7FC00000))
        if column < total_columns:
            half = ptx.u32(column >> 7)
            to = ptx.u32(base + half * stride + (s * batch + b) * 64 + t * 16)
            high = cuda.local.array(2, types.uint32)
            low = cuda.local.array(2, types.uint32)
            for h in static(2):
                one = ptx.prmt(n[4 * h], n[4 * h + 1], ptx.u32(0x5140))
                two = ptx.prmt(n[4 * h + 2], n[4 * h + 3], ptx.u32(0x5140))
                high[h] = ptx.prmt(one, two, ptx.u32(0x7632))
                low[h] = ptx.u32(ptx.prmt(one, two, ptx.u32(0x5410)) ^ 0x80808080)
            ptx.sts64(to, ptx.u32(0), high[0], high[1])
            ptx.sts64(to, ptx.u32(8), low[0], low[1])
            info = ptx.u32(base + sums_at + half * sums_bytes + b * 32 + t * 8)
            if passes == 4 or (s & 1) == 0:
                row = ptx.u32((s if passes == 4 else s >> 1) * (batch * 32))
                ptx.sts64(
                    ptx.u32(info + row), ptx.u32(0), ptx.u32(PATTERN + total), ptx.f32_bits(ptx.f32(ptx.i32(total)))
                )
            if s == 0:
                ptx.sts_f32(info, ptx.u32(passes * batch * 32), unit)

    walk = column_walker(layout, batch, shape.kind, threads, shape.reordered, inlined(unrolled(put)))

    def prepare(x: Any, perm: Any, base: Any, thread: Any, columns: Any, start: Any) -> None:
        place = ptx.u32(thread * 4)
        while place < stride:
            ptx.sts32(ptx.u32(base + zeros_at + place), ptx.u32(0), ptx.u32(0))
            place = ptx.u32(place + threads * 4)
        walk(x, perm, base, thread, columns, start)
        meet()

    return inlined(unrolled(prepare))
