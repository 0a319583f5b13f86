"""Vectors become bytes in shared memory, in the order in which integer tensor cores take them: a device function."""

from __future__ import annotations

from typing import Any

import numpy as np

from bcqfmt.kernels import ptx
from bcqfmt.kernels.device_functions.numbers import PATTERN
from bcqfmt.kernels.ptx.ptx_bits import meet
from bcqfmt.kernels.runtime.numba_cuda import cuda, inlined, types
from bcqfmt.kernels.runtime.unroll import static, unrolled

from .byte_shape import ByteShape
from .columns import column_walker

__all__ = ["MAGIC", "PRECISION", "byte_vectors", "power_of_128"]

PRECISION = 14
MAGIC = np.float32(12582912.0 + 128)  # integers that begin 128 higher: their second byte is rounded, not cut
_BIAS = 12 * (PATTERN + 128) & 0xFFFFFFFF


def power_of_128() -> Any:
    """A device function for 16 lanes that have eight columns each: the bits of the largest, and the exponent for all.

    Numbers are integers of 16 bits in units of 2^(exponent - 127 - PRECISION).
    """

    def power(v: Any) -> Any:
        largest = ptx.u32(0)
        for k in static(8):
            largest = max(largest, ptx.u32(ptx.f32_bits(v[k]) & 0x7FFFFFFF))
        for k in static(4):
            largest = max(largest, ptx.shfl_xor_u32(largest, ptx.u32(1 << k)))
        # 127 * 256 + 127 is the largest integer: a little more than 1.99 times a power of two
        return largest, max(ptx.u32((largest + 0x18000) >> 23), ptx.u32(PRECISION + 8))

    return inlined(unrolled(power))


def byte_vectors(shape: ByteShape) -> Any:
    """A device function for all warps that multiply, eight columns a thread; at its end all threads of the block meet.

    In 128 columns of a vector there is one power of two, U. Columns 32 t + 8 j + k with even k are integers of 16 bits
    in units of U, those with odd k in units of 2 U; both are ``256 high + low``, signed bytes. Bytes go to ``base``:
    [128 columns][k % 4][set][column of the product][t][k / 4][j]. Column ``2 (places b + p) + (0 high, 1 low)`` has
    what vector b has in group p, and zeros elsewhere. Behind it: [128 columns][set][4] pairs of U and the sum in it.
    """
    layout, batch, sets, stride, sums_at = shape.layout, shape.batch, shape.sets, shape.stride, shape.sums_at
    places = layout.places
    sharers, folds, members = 4 // places, {1: 4, 2: 3, 4: 2}[places], 16 // places
    threads, total_columns, power = 32 * shape.slices * shape.tiles, layout.chunks * 256, power_of_128()

    def put(v: Any, b: Any, column: Any, base: Any, lane: Any) -> None:
        near = ptx.u32(0x3715) if (lane & 1) != 0 else ptx.u32(0x6240)
        far = ptx.u32(0x3276) if (lane & 2) != 0 else ptx.u32(0x5410)
        t, m = ptx.u32((lane >> 2) & 3), ptx.u32(lane & 3)
        to = ptx.u32(base + (1 - (m & 1)) * 32 + t * 8 + (m >> 1) * 4)
        here = ptx.u32(to + (column >> 7) * stride)
        info = ptx.u32(base + sums_at + (column >> 7) * (sets * 32) + ptx.u32((lane & 15) // members) * 8)
        turned = cuda.local.array(4, types.uint32)
        largest, exponent = power(v)
        unit = ptx.bits_f32(ptx.u32((exponent - PRECISION) << 23))
        inverse = ptx.bits_f32(ptx.u32((254 + PRECISION - exponent) << 23))
        half = ptx.bits_f32(ptx.u32((253 + PRECISION - exponent) << 23))
        n = cuda.local.array(8, types.uint32)
        for k in static(8):
            n[k] = ptx.f32_bits(ptx.fma_f32(v[k], half if k % 2 else inverse, MAGIC))
        total = ptx.u32(n[0] + n[2] + n[4] + n[6] + 2 * (n[1] + n[3] + n[5] + n[7]) - _BIAS)
        for k in static(folds):
            total = ptx.u32(total + ptx.shfl_xor_u32(total, ptx.u32(1 << k)))
        for s in static(4):
            word = ptx.u32(ptx.prmt(n[s], n[s + 4], ptx.u32(0x5410)) ^ 0x00800080)
            word = ptx.prmt(word, ptx.shfl_xor_u32(word, ptx.u32(1)), near)  # 4 x 4 bytes of four
            turned[s] = ptx.prmt(word, ptx.shfl_xor_u32(word, ptx.u32(2)), far)  # lanes, turned over
        if largest >= 0x7F800000:  # infinities and NaNs in x: everything is NaN
            unit = ptx.bits_f32(ptx.u32(0x7FC00000))
        if column < total_columns:
            for p in static(places):
                j = ptx.u32(b * places + p)
                at = ptx.u32(here + (j // 4) * 256 + j % 4 * 64)
                for s in static(4):
                    given = turned[s] if places == 1 or t // sharers == p else ptx.u32(0)
                    ptx.sts32(at, ptx.u32(s * sets * 256), given)
            if ptx.u32((lane & 15) % members) == 0:
                ptx.sts64_f32(ptx.u32(info + b * (places * 8)), ptx.u32(0), unit, ptx.f32(ptx.i32(total)))

    walk = column_walker(layout, batch, shape.kind, threads, shape.reordered, inlined(unrolled(put)))

    def prepare(x: Any, perm: Any, base: Any, thread: Any, columns: Any, start: Any) -> None:
        walk(x, perm, base, thread, columns, start)
        meet()

    return inlined(unrolled(prepare))
