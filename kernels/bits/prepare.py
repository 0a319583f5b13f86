"""Vectors become bit planes or bytes in shared memory, in the order in which tensor cores take them: device functions.

`bit_vectors` serves the kernel on binary tensor cores, `byte_vectors` and `short_vectors` those on integer ones.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bcqfmt.kernels import ptx
from bcqfmt.kernels.device_functions.numbers import MAGIC, ONES, PATTERN, bit_turner, step_turner
from bcqfmt.kernels.runtime.numba_cuda import cuda, inlined, types
from bcqfmt.kernels.runtime.unroll import static, unrolled

from .columns import column_walker
from .layout import STEP_MASKS
from .shape import BitShape, ByteShape, ShortShape

_PRECISION = 14
_BYTE_MAGIC = np.float32(12582912.0 + 128)  # integers that begin 128 higher: their second byte is rounded, not cut
_BYTE_BIAS = 12 * (PATTERN + 128) & 0xFFFFFFFF
_SHORT_BIAS = 8 * (PATTERN + 128) & 0xFFFFFFFF


def bit_vectors(shape: BitShape) -> Any:
    """A device function for all warps that multiply: bits to ``base``, shares of sums and powers of two behind them.

    Eight columns a thread, a byte of every plane. All threads of the block synchronise when the bits are stored; it
    ends with a barrier of these warps.
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
                    ptx.sts8(here, ptx.u32(at), ptx.u32(bits >> (j % 4 * 8)))
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
        ptx.sync_block()
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
                            counts = ptx.mma_b1_wide(ones, ones, ones, ones, word, other)
                        else:
                            counts = ptx.mma_b1(ones, ones, word)
                        share = ptx.i32(share + (counts[0] << (2 * m)))
                        share = ptx.i32(share + (counts[1] << (2 * m + 1)) * (sign if m == pairs - 1 else 1))
                    if r8 == 0:
                        entry = ptx.u32(base + t_base + t * 16 + ((b * chunks * halves + s) * passes + p) * 64)
                        first_value = ptx.u32(start_value - (share if bcq else 0))
                        ptx.sts64(entry, ptx.u32(0), first_value, ptx.f32_bits(ptx.f32(share)))
                s = ptx.u32(s + warps)
        ptx.sync_warps(ptx.u32(1), ptx.u32(threads))

    return inlined(unrolled(prepare))


def _power_of_128() -> Any:
    """A device function for 16 lanes that have eight columns each: the bits of the largest, and the exponent for all.

    Numbers are integers of 16 bits in units of 2^(exponent - 127 - _PRECISION).
    """

    def power(v: Any) -> Any:
        largest = ptx.u32(0)
        for k in static(8):
            largest = max(largest, ptx.u32(ptx.f32_bits(v[k]) & 0x7FFFFFFF))
        for k in static(4):
            largest = max(largest, ptx.shfl_xor_u32(largest, ptx.u32(1 << k)))
        # 127 * 256 + 127 is the largest integer: a little more than 1.99 times a power of two
        return largest, max(ptx.u32((largest + 0x18000) >> 23), ptx.u32(_PRECISION + 8))

    return inlined(unrolled(power))


def byte_vectors(shape: ByteShape) -> Any:
    """A device function for all warps that multiply, eight columns a thread; it ends with a barrier of the block.

    In 128 columns of a vector there is one power of two, U. Columns 32 t + 8 j + k with even k are integers of 16 bits
    in units of U, those with odd k in units of 2 U; both are ``256 high + low``, signed bytes. Bytes go to ``base``:
    [128 columns][k % 4][set][column of the product][t][k / 4][j]. Column ``2 (places b + p) + (0 high, 1 low)`` has
    what vector b has in group p, and zeros elsewhere. Behind it: [128 columns][set][4] pairs of U and the sum in it.
    """
    layout, batch, sets, stride, sums_at = shape.layout, shape.batch, shape.sets, shape.stride, shape.sums_at
    places = layout.places
    sharers, folds, members = 4 // places, {1: 4, 2: 3, 4: 2}[places], 16 // places
    threads, total_columns, power = 32 * shape.slices * shape.tiles, layout.chunks * 256, _power_of_128()

    def put(v: Any, b: Any, column: Any, base: Any, lane: Any) -> None:
        near = ptx.u32(0x3715) if (lane & 1) != 0 else ptx.u32(0x6240)
        far = ptx.u32(0x3276) if (lane & 2) != 0 else ptx.u32(0x5410)
        t, m = ptx.u32((lane >> 2) & 3), ptx.u32(lane & 3)
        to = ptx.u32(base + (1 - (m & 1)) * 32 + t * 8 + (m >> 1) * 4)
        here = ptx.u32(to + (column >> 7) * stride)
        info = ptx.u32(base + sums_at + (column >> 7) * (sets * 32) + ptx.u32((lane & 15) // members) * 8)
        turned = cuda.local.array(4, types.uint32)
        largest, exponent = power(v)
        unit = ptx.bits_f32(ptx.u32((exponent - _PRECISION) << 23))
        inverse = ptx.bits_f32(ptx.u32((254 + _PRECISION - exponent) << 23))
        half = ptx.bits_f32(ptx.u32((253 + _PRECISION - exponent) << 23))
        n = cuda.local.array(8, types.uint32)
        for k in static(8):
            n[k] = ptx.f32_bits(ptx.fma_f32(v[k], half if k % 2 else inverse, _BYTE_MAGIC))
        total = ptx.u32(n[0] + n[2] + n[4] + n[6] + 2 * (n[1] + n[3] + n[5] + n[7]) - _BYTE_BIAS)
        for k in static(folds):
            total = ptx.u32(total + ptx.shfl_xor_u32(total, ptx.u32(1 << k)))
        for s in static(4):
            word = ptx.u32(ptx.prmt(n[s], n[s + 4], ptx.u32(0x5410)) ^ 0x00800080)
            word = ptx.prmt(word, ptx.shfl_xor_u32(word, ptx.u32(1)), near)  # 4 x 4 bytes of four lanes,
            turned[s] = ptx.prmt(word, ptx.shfl_xor_u32(word, ptx.u32(2)), far)  # transposed
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
        ptx.sync_block()

    return inlined(unrolled(prepare))


def short_vectors(shape: ShortShape) -> Any:
    """A device function for all warps that multiply, eight columns a thread; it ends with a barrier of the block.

    In 128 columns of a vector there is one power of two, U. Columns 32 t + 8 s + k are integers of 16 bits in units of
    U, in groups of 16 columns those with odd s in units of 2 U: ``256 high + low``, signed bytes. They go to ``base``:
    [128 columns][s][vector][t][high, low][k]. Then as many zeros as 128 columns take. Behind them, for 128 columns,
    [pass][vector][t] pairs: the sum of x in the group, times 2^s, added to 1.5 * 2^23 and as it is; and [vector][t]
    pairs whose first is U. In groups of 16 columns, s is the first of its group.
    """
    layout, batch, stride, sums_at, zeros_at = shape.layout, shape.batch, shape.stride, shape.sums_at, shape.zeros_at
    passes, sums_bytes = layout.passes, shape.sums_bytes
    threads, total_columns, power = 32 * shape.slices * shape.tiles, layout.chunks * 256, _power_of_128()

    def put(v: Any, b: Any, column: Any, base: Any, lane: Any) -> None:
        t, s = ptx.u32((lane >> 2) & 3), ptx.u32(lane & 3)
        largest, exponent = power(v)
        unit = ptx.bits_f32(ptx.u32((exponent - _PRECISION) << 23))
        scale = ptx.bits_f32(ptx.u32((254 + _PRECISION - (s & (1 if passes == 2 else 0)) - exponent) << 23))
        n = cuda.local.array(8, types.uint32)
        for k in static(8):
            n[k] = ptx.f32_bits(ptx.fma_f32(v[k], scale, _BYTE_MAGIC))
        total = ptx.u32(n[0] + n[1] + n[2] + n[3] + n[4] + n[5] + n[6] + n[7] - _SHORT_BIAS)
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
        ptx.sync_block()

    return inlined(unrolled(prepare))
