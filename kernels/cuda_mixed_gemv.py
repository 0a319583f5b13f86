"""y = W x for 2/4-bit weights with second-order scales and outliers, on integer tensor cores, in one launch (sm_90).

x becomes a block-fixed-point number: in every 16 columns a power of two and signed 16-bit integers, as two bytes
``256 high + low`` (float32 vectors get a second integer for what the first leaves over). One ``mma.m16n8k32`` takes 16
rows and two groups of 16 columns of codes: its first half of columns is group 0, the second group 1, so a B operand
whose columns are (high, low) of one group and zeros for the other gives the sums of both groups apart; two of them
with different columns of B fill the accumulators, and lane 4 r + t holds group t of rows r and r + 8. Integer sums are
exact. What is rounded is x, and the products with scales, in float32.

Zero points take their share of sum(x), an integer too. The 16 rows of a tile share the second-order scale and zero of
a group: ``scale = unit * (code - zero)`` is made in registers out of the unit's own bytes, while the copies of the
next ``stages - 1`` units of this warp are on their way. Without ``overlap`` the warp waits for them first.

A block holds x twice in shared memory: as it came, for the outliers, and reordered in bytes. The warps of a tile take
its units in turn, each with a ring of buffers of its own. Outliers of a tile are asked for one tile ahead; ``32 /
rows of a warp`` lanes share a row. All sums are added in a fixed order: two runs give the same bits.
"""

from __future__ import annotations

import functools
from typing import Any

from bcqfmt.kernels import ptx
from bcqfmt.kernels.launch import Kernel, kernel
from bcqfmt.kernels.mixed_layout import FOUR_BYTES, FOUR_COLUMNS, ROWS, TWO_BYTES, TWO_COLUMNS
from bcqfmt.kernels.mixed_outliers import outlier_fetcher, outlier_sum
from bcqfmt.kernels.mixed_prepare import vector_integers
from bcqfmt.kernels.mixed_shape import SHAPES, MixedShape
from bcqfmt.kernels.mixed_steps import four_bit_sums, two_bit_sums, unit_fetcher
from bcqfmt.kernels.mixed_vectors import vector_piece
from bcqfmt.kernels.ptx_bits import ask_for, barrier_of, bulk_fence, bulk_init, bulk_wait
from bcqfmt.kernels.ptx_numba import cuda, types
from bcqfmt.kernels.unroll import static, unrolled

__all__ = ["compile_cases", "mixed_gemv_kernel"]

_ONES = 0xFFFFFFFF
_ARGUMENTS = (
    "u32* units, u32* perm, {x}* x, u32* indptr, u32* entries, {y}* y, u32 rows, u32 tiles, u32 columns, u32 twos, "
    "u32 fours, u32 count, u32 stages, u32 room"
)


def compile_cases() -> dict[str, list[tuple[Any, ...]]]:
    """What ``make kernels-check`` compiles; bulk copies need sm_90."""
    return {"mixed_gemv_kernel": [(shape,) for shape in SHAPES]}


@functools.cache
def mixed_gemv_kernel(shape: MixedShape) -> Kernel:
    """The kernel for one batch and choice of types; widths are arguments of the launch."""
    batch, kind, out, parts, size = shape.batch, shape.kind, shape.out, shape.parts, shape.outliers
    slices, side, threads, overlap = shape.slices, shape.tiles, shape.threads, shape.overlap
    deep, slot_bytes = shape.deep, TWO_BYTES * shape.deep
    vectors, floats, warps, per = batch * parts, 2 * batch * parts, slices * side, 4 if kind == 0 else 8
    share, lanes = ROWS // slices, 32 * slices // ROWS  # rows of a warp, lanes of a row
    held_bytes = (warps + side) * batch * 64
    each = 16 // size if size else 1
    fetch, piece, to_integers = unit_fetcher(deep), vector_piece(kind), vector_integers(batch, parts, kind, threads)
    two_bit, four_bit = two_bit_sums(), four_bit_sums()
    ask, added_up = outlier_fetcher(size or 4), outlier_sum(kind, size or 4)
    narrow = ptx.f32_to_bf16 if out == 2 else ptx.f32_to_f16
    declared = _ARGUMENTS.format(x="u32" if kind == 0 else "u16", y="f32" if out == 0 else "u16")

    @kernel(declared, threads=threads, variant=repr(shape))
    @unrolled
    def mixed_gemv(
        units: Any, perm: Any, x: Any, indptr: Any, entries: Any, y: Any, rows: Any, tiles: Any, columns: Any,
        twos: Any, fours: Any, count: Any, stages: Any, room: Any,
    ) -> None:  # fmt: skip
        memory = cuda.shared.array(0, types.uint32)
        base = ptx.shared_address(memory)
        thread = ptx.u32(cuda.threadIdx.x)
        lane, warp = ptx.u32(thread & 31), ptx.u32(thread >> 5)
        t, r8 = ptx.u32(lane & 3), ptx.u32(lane >> 2)
        mine, beside = ptx.u32(warp % slices), ptx.u32(warp // slices)
        chunks, padded = ptx.u32((twos + fours) // deep), ptx.u32(twos * TWO_COLUMNS + fours * FOUR_COLUMNS)
        low_chunks = ptx.u32(twos // deep)
        xs_bytes = ptx.u32(((columns + per) // per) * 16)
        planes_at = ptx.u32(base + batch * xs_bytes)
        info_at = ptx.u32(planes_at + vectors * padded * 2)
        held_base = ptx.u32(info_at + vectors * (padded >> 1))
        kept = ptx.u32(held_base + 2 * held_bytes + warp * room)  # outliers of this warp
        ring = ptx.u32(held_base + 2 * held_bytes + warps * room + warp * stages * slot_bytes)
        bars = ptx.u32(held_base + 2 * held_bytes + warps * (room + stages * slot_bytes) + warp * (stages + 1) * 8)
        kept_bar = ptx.u32(bars + stages * 8)
        step = ptx.u32(cuda.gridDim.x * side)
        tile = ptx.u32(cuda.blockIdx.x + cuda.gridDim.x * beside)
        pieces = ptx.u32(twos * (TWO_BYTES // 16) + fours * (FOUR_BYTES // 16))  # of a tile
        if lane == 0:
            for i in range(stages + 1):
                bulk_init(ptx.u32(bars + i * 8))
            bulk_fence()
        quick = columns % per == 0
        early = cuda.local.array(8, types.uint32)
        for i in static(2):  # the first vector is asked for before anything else
            s = ptx.u32(thread + i * threads)
            for w in static(4):
                early[i * 4 + w] = ptx.u32(0)
            if quick and ptx.u32((s + 1) * per) <= columns:
                found = ptx.ldg128_keep(x, s)
                for w in static(4):
                    early[i * 4 + w] = found[w]
        order0, order1 = ptx.u32(0), ptx.u32(0)
        if thread < (padded + 63) >> 6:  # 128 bytes each; later the order would stand in line behind the weights
            ask_for(perm, ptx.u32(thread * 8))
        if thread < padded >> 2:
            order0, order1 = ptx.ldg64_keep(perm, thread)
        begin, end, first, next_begin, next_end = ptx.u32(0), ptx.u32(0), ptx.u32(0), ptx.u32(0), ptx.u32(0)
        if size and tile < tiles:
            row = ptx.u32(tile * ROWS + mine * share + lane // lanes)
            begin, end = min(indptr[row], count), min(indptr[ptx.u32(row + 1)], count)
            if ptx.u32(tile + step) < tiles:
                row = ptx.u32(row + step * ROWS)
                next_begin, next_end = min(indptr[row], count), min(indptr[ptx.u32(row + 1)], count)
        ptx.syncwarp()

        next_tile, next_chunk, next_piece = tile, mine, ptx.u32(tile * pieces)
        for i in range(stages - 1):
            if next_chunk >= chunks:
                next_chunk, next_tile, next_piece = mine, ptx.u32(next_tile + step), ptx.u32(next_piece + step * pieces)
            if lane == 0 and next_tile < tiles:
                fetch(units, next_piece, next_chunk, low_chunks, ptx.u32(ring + i * slot_bytes), ptx.u32(bars + i * 8))
            next_chunk = ptx.u32(next_chunk + slices)
        if size:
            first, last = ptx.shfl_u32(begin, ptx.u32(0)), ptx.shfl_u32(end, ptx.u32(31))
            if lane == 0 and first < last:
                ask(entries, first, last, room, kept, kept_bar)

        for i in static(2):
            s = ptx.u32(thread + i * threads)
            if quick and ptx.u32(s * 16) < xs_bytes:
                w0, w1, w2, w3 = early[i * 4], early[i * 4 + 1], early[i * 4 + 2], early[i * 4 + 3]
                ptx.sts128(ptx.u32(base + s * 16), ptx.u32(0), w0, w1, w2, w3)
        for b in static(batch):
            s = ptx.u32(thread + 2 * threads) if b == 0 and quick else thread
            while ptx.u32(s * 16) < xs_bytes:
                w0, w1, w2, w3 = piece(x, ptx.u32(b), ptx.u32(s * per), columns, quick)
                ptx.sts128(ptx.u32(base + b * xs_bytes + s * 16), ptx.u32(0), w0, w1, w2, w3)
                s = ptx.u32(s + threads)
        cuda.syncthreads()

        to_integers(perm, order0, order1, thread, base, xs_bytes, planes_at, info_at, padded, columns)
        cuda.syncthreads()

        # places, by an instruction that the compiler cannot repeat: otherwise it works them out anew for every unit
        xlane, ilane = ptx.shfl_u32(ptx.u32(planes_at + lane * 4), lane), ptx.shfl_u32(ptx.u32(info_at + t * 8), lane)
        ring, bars = ptx.shfl_u32(ring, lane), ptx.shfl_u32(bars, lane)
        words_at, codes_at = ptx.shfl_u32(ptx.u32(ring + lane * 16), lane), ptx.shfl_u32(ptx.u32(ring + lane * 4), lane)
        zeros_at = ptx.shfl_u32(ptx.u32(ring + (lane >> 1) * 4), lane)
        scales_at, lows_at = ptx.shfl_u32(ptx.u32(ring + t * 8), lane), ptx.shfl_u32(ptx.u32(ring + t * 4), lane)
        pairs_at, ends_at = ptx.shfl_u32(ptx.u32(ring + r8 * 4), lane), ptx.shfl_u32(ptx.u32(ring + (r8 & 4)), lane)
        keep = cuda.local.array(4, types.uint32)
        for k in static(4):  # by an instruction that the compiler does not see through: products stay products
            keep[k] = ptx.prmt(ptx.u32(1) if r8 >> 1 == k else ptx.u32(0), ptx.u32(0), ptx.u32(0x3210))
        # codes are not moved within their bytes: 2-bit sums of rows r and r + 8 are 1 and 4 (odd groups: 16 and
        # 64) times too large, 4-bit ones 1 and 16 times; `large` makes these like those
        odd = t & 1 != 0
        large, large8 = (ptx.f32(16.0), ptx.f32(4.0)) if odd else (ptx.f32(1.0), ptx.f32(0.25))
        small, small8 = (ptx.f32(4.0), ptx.f32(1.0)) if odd else (ptx.f32(64.0), ptx.f32(16.0))
        bits, shift = (ptx.u32(0x30), ptx.u32(12)) if odd else (ptx.u32(0x03), ptx.u32(0))  # of zero points
        bits8 = ptx.u32(bits << 2)
        sums = cuda.local.array(floats, types.float32)
        part = cuda.local.array(floats, types.float32)
        for k in static(floats):
            sums[k] = ptx.f32(0.0)
        chunk, spot, parity, turned_over, kept_parity = mine, ptx.u32(0), ptx.u32(0), ptx.u32(0), ptx.u32(0)
        spare = ptx.u32(stages - 1)
        while tile < tiles:
            ptx.syncwarp()  # the buffer of the last unit is free: fill it before anything is multiplied
            if next_chunk >= chunks:
                next_chunk, next_tile, next_piece = mine, ptx.u32(next_tile + step), ptx.u32(next_piece + step * pieces)
            if lane == 0 and next_tile < tiles:
                slot = ptx.u32(ring + spare * slot_bytes)
                fetch(units, next_piece, next_chunk, low_chunks, slot, ptx.u32(bars + spare * 8))
            if not overlap and next_tile < tiles:
                bulk_wait(ptx.u32(bars + spare * 8), ptx.u32(parity ^ 1) if spot != 0 else parity)
            next_chunk = ptx.u32(next_chunk + slices)
            bulk_wait(ptx.u32(bars + spot * 8), parity)
            if chunk < low_chunks:
                for part_of in static(deep):
                    slot = ptx.u32(spot * slot_bytes + part_of * TWO_BYTES)
                    unit_at = ptx.u32(chunk * deep + part_of)
                    a = cuda.local.array(8, types.uint32)
                    for h in static(2):
                        found = ptx.lds128(ptx.u32(words_at + slot), ptx.u32(h * 512))
                        for w in static(4):
                            a[h * 4 + w] = found[w]
                    codes = ptx.lds32(ptx.u32(codes_at + slot), ptx.u32(1024))
                    zeros = ptx.u32(ptx.lds32(ptx.u32(zeros_at + slot), ptx.u32(1152)) >> shift)
                    scales = ptx.lds64(ptx.u32(scales_at + slot), ptx.u32(1216))
                    lows = ptx.lds32(ptx.u32(lows_at + slot), ptx.u32(1248))
                    for j in static(4):
                        # the second-order multiply: 1024 + code and 1024 + zero are float16 patterns
                        above = ptx.u32((ptx.u32(codes >> ptx.u32(4 * j)) & 0x000F000F) | 0x64006400)
                        above = ptx.hsub2(above, ptx.prmt(lows, ptx.u32(0x64646464), ptx.u32(0x4040 + j * 0x0101)))
                        scale = ptx.hi_f16(scales[j // 2]) if j % 2 else ptx.lo_f16(scales[j // 2])
                        moved = ptx.u32(zeros >> ptx.u32(4 * j))
                        zero, zero8 = ptx.i32(ptx.u32(moved & bits)), ptx.i32(ptx.u32(moved & bits8))
                        for v in static(vectors):
                            word = ptx.lds32(ptx.u32(xlane + v * (padded * 2) + unit_at * 512), ptx.u32(j * 128))
                            info = ptx.lds64(ptx.u32(ilane + v * (padded >> 1) + unit_at * 128), ptx.u32(j * 32))
                            d = two_bit(a[2 * j], a[2 * j + 1], word, keep[0], keep[1], keep[2], keep[3])
                            less, unit = ptx.i32(info[0]), ptx.f32(scale * ptx.bits_f32(info[1]))
                            low = ptx.f32(ptx.i32(d[0] * 256 + d[1] + zero * less))
                            high = ptx.f32(ptx.i32(d[2] * 256 + d[3] + zero8 * less))
                            sums[2 * v] = ptx.fma_f32(ptx.f32(unit * ptx.lo_f16(above)), low, sums[2 * v])
                            sums[2 * v + 1] = ptx.fma_f32(ptx.f32(unit * ptx.hi_f16(above)), high, sums[2 * v + 1])
            else:
                for part_of in static(deep):
                    slot = ptx.u32(spot * slot_bytes + part_of * FOUR_BYTES)
                    a = cuda.local.array(8, types.uint32)
                    for h in static(2):
                        found = ptx.lds128(ptx.u32(words_at + slot), ptx.u32(h * 512))
                        for w in static(4):
                            a[h * 4 + w] = found[w]
                    block = ptx.u32(twos * 2 + (chunk * deep + part_of) * 2)  # 64 columns each
                    pair = ptx.lds32(ptx.u32(pairs_at + slot), ptx.u32(1024))
                    zeros = ptx.u32(ptx.lds32(ptx.u32(ends_at + slot), ptx.u32(1056)) >> ((r8 & 3) * 8))
                    zero, zero8 = ptx.i32(zeros & 0x0F), ptx.i32(zeros & 0xF0)
                    for k in static(floats):
                        part[k] = ptx.f32(0.0)
                    for j in static(2):
                        for v in static(vectors):
                            word = ptx.lds32(ptx.u32(xlane + v * (padded * 2) + block * 128), ptx.u32(j * 128))
                            info = ptx.lds64(ptx.u32(ilane + v * (padded >> 1) + block * 32), ptx.u32(j * 32))
                            a0, a1, a2, a3 = a[4 * j], a[4 * j + 1], a[4 * j + 2], a[4 * j + 3]
                            d = four_bit(a0, a1, a2, a3, word, keep[0], keep[1], keep[2], keep[3])
                            less, unit = ptx.i32(info[0]), ptx.bits_f32(info[1])
                            low = ptx.f32(ptx.i32(d[0] * 256 + d[1] + zero * less))
                            high = ptx.f32(ptx.i32(d[2] * 256 + d[3] + zero8 * less))
                            part[2 * v] = ptx.fma_f32(unit, low, part[2 * v])
                            part[2 * v + 1] = ptx.fma_f32(unit, high, part[2 * v + 1])
                    scale, scale8 = ptx.f32(ptx.lo_f16(pair) * large), ptx.f32(ptx.hi_f16(pair) * large8)
                    for v in static(vectors):
                        sums[2 * v] = ptx.fma_f32(scale, part[2 * v], sums[2 * v])
                        sums[2 * v + 1] = ptx.fma_f32(scale8, part[2 * v + 1], sums[2 * v + 1])
            spare, spot = spot, ptx.u32(spot + 1)
            if spot == stages:
                spot, parity = ptx.u32(0), ptx.u32(parity ^ 1)
            chunk = ptx.u32(chunk + slices)
            if chunk >= chunks:  # the tile is done
                chunk = mine
                held_at = ptx.u32(held_base + turned_over * held_bytes)
                for k in static(2 * batch):
                    value = sums[k % 2 + k // 2 * parts * 2]
                    for e in static(1, parts):
                        value = ptx.f32(value + sums[k % 2 + (k // 2 * parts + e) * 2])
                    value = ptx.f32(value * (small8 if k % 2 else small))
                    value = ptx.f32(value + ptx.shfl_xor_f32(value, ptx.u32(1)))
                    value = ptx.f32(value + ptx.shfl_xor_f32(value, ptx.u32(2)))
                    if t == 0:
                        at = ptx.u32(held_at + (warp * (batch * 16) + k // 2 * 16 + k % 2 * 8 + r8) * 4)
                        ptx.sts_f32(at, ptx.u32(0), value)
                for k in static(floats):
                    sums[k] = ptx.f32(0.0)
                if size:
                    last = ptx.shfl_u32(end, ptx.u32(31))
                    if first < last:
                        bulk_wait(kept_bar, kept_parity)
                        kept_parity = ptx.u32(kept_parity ^ 1)
                    for b in static(batch):
                        k = ptx.u32(begin + lane % lanes)
                        start = ptx.u32(first // each * each)
                        xs = ptx.u32(base + b * xs_bytes)
                        value = added_up(entries, k, end, ptx.u32(lanes), start, kept, room, xs, columns)
                        for m in static(5):
                            if 1 << m < lanes:
                                value = ptx.f32(value + ptx.shfl_xor_f32(value, ptx.u32(1 << m)))
                        if lane % lanes == 0:
                            at = ptx.u32((warps + beside) * (batch * 16) + b * 16 + mine * share + lane // lanes)
                            ptx.sts_f32(ptx.u32(held_at + at * 4), ptx.u32(0), value)
                    begin, end = next_begin, next_end
                    first, last = ptx.shfl_u32(begin, ptx.u32(0)), ptx.shfl_u32(end, ptx.u32(31))
                    if lane == 0 and ptx.u32(tile + step) < tiles and first < last:
                        ask(entries, first, last, room, kept, kept_bar)
                    after = ptx.u32(tile + step + step)
                    if after < tiles:
                        row = ptx.u32(after * ROWS + mine * share + lane // lanes)
                        next_begin, next_end = min(indptr[row], count), min(indptr[ptx.u32(row + 1)], count)
                barrier_of(ptx.u32(beside + 1), ptx.u32(slices * 32))
                e = ptx.u32(mine * 32 + lane)
                while e < batch * 16:
                    row = ptx.u32(tile * ROWS + (e & 15))
                    if row < rows:
                        value = ptx.f32(0.0)
                        for k in range(slices):
                            at = ptx.u32(held_at + ((beside * slices + k) * (batch * 16) + e) * 4)
                            value = ptx.f32(value + ptx.lds_f32(at, ptx.u32(0)))
                        if size:
                            at = ptx.u32((warps + beside) * (batch * 16) + e)
                            value = ptx.f32(value + ptx.lds_f32(ptx.u32(held_at + at * 4), ptx.u32(0)))
                        place = ptx.u32((e >> 4) * rows + row)
                        if out == 0:
                            y[place] = value
                        else:
                            y[place] = narrow(value)
                    e = ptx.u32(e + slices * 32)
                turned_over = ptx.u32(turned_over ^ 1)
                tile = ptx.u32(tile + step)

    return mixed_gemv
