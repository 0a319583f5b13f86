"""y = W x on binary tensor cores: bits against bits, the fast product for one to four vectors.

x becomes a block-fixed-point number: in every 128 columns (256 for wide groups) a power of two 2^e and signed integers
of 8 ``parts`` bits, so x is 8 ``parts`` bit planes itself. The product of a weight plane and a plane of x is a popcount
of their conjunction, which one instruction does for 16 rows, 128 columns and 8 planes of x. So the planes of a weight
go from memory into the tensor cores as they are: no table, no unpacking, no multiplication. The integer sums are exact;
what is rounded is x (to 2^-15 of the largest of its 128 neighbours with two parts, 2^-22 with three; subnormal float32
numbers count as zero), and the products with the scales, in float32.

A lane of a warp gets counts for rows r and r + 8 and for some of the planes of x; shifted and added they are its share
of ``sum(b * x)``. With signs s = 2b - 1 the sum is ``2 * share - C``, C the same share of sum(x), known beforehand: the
integer starts at the pattern of 1.5 * 2^23 minus C, so reading it as float32 costs one subtraction. Lanes with other
planes (or other groups, where a group is shorter than 128 columns) are added up at the end of a tile.

A block holds x as bits for all columns in shared memory, made by its consumer warps (`prepare`) while the first
weights are in flight; copies of weights may start before the previous kernel has ended, loads of x may not. Consumers
take the chunks of a tile in turn (``slices`` warps, with ``tiles`` side by side), through a ring of ``stages`` buffers
that a producer warp fills (`ring`). Slices are added in a fixed order, so two runs give the same bits. Blocks of
threads start at different places of their rows: equal strides would use the same memory channels.
"""

from __future__ import annotations

import functools
from typing import Any

from bcqfmt.kernels import ptx
from bcqfmt.kernels.device_functions.numbers import ONES, number_pairs, sums_as_floats
from bcqfmt.kernels.runtime.launch import Kernel, kernel
from bcqfmt.kernels.runtime.numba_cuda import cuda, types
from bcqfmt.kernels.runtime.unroll import static, unrolled

from .layout import STEP_MASKS
from .outliers import outlier_warp
from .prepare import bit_vectors
from .ring import epilogue, producer_warp, stage_release, waiter, warp_roles
from .shape import BitShape


def declared(kind: int, out: int) -> str:
    """The arguments of products with operands in the order of `layout`."""
    x, y = "u32" if kind == 0 else "u16", "f32" if out == 0 else "u16"
    pointers = f"u32* planes, u32* numbers, {x}* x, i32* perm, f32* addend, {y}* y, u32* indptr, u32* entries"
    return f"{pointers}, u32 rows, u32 tiles, u32 columns, u32 start, u32 rotation, u32 count, u32 room"


@functools.cache
def bit_gemv_kernel(shape: BitShape) -> Kernel:
    """The kernel for one layout, batch and choice of types."""
    bulk, wait = shape.bulk, waiter(shape.bulk)
    layout, batch, ring = shape.layout, shape.batch, shape.ring
    q, chunks, wide, sharing = layout.bits, layout.chunks, layout.wide, layout.sharing
    passes, places, set_bytes = layout.passes, layout.places, layout.set_bytes
    slices, stages, blocks = shape.slices, shape.stages, ring.blocks
    bcq, offset = layout.formula == "bcq", layout.formula == "offset"
    number_bytes, pair_bytes = places * 32 * layout.pair_words, 4 * layout.pair_words
    halves = 256 // layout.span  # sets of a chunk
    sharers, held, stride, t_base = shape.sharers, shape.held, shape.stride, shape.sums_at
    pairs, last = held // 2, layout.numbers - 1
    masks = STEP_MASKS[passes]
    floats, b_words = 2 * batch, batch * pairs
    plane_bytes, consumers = ring.plane_bytes, slices * shape.tiles
    adders, add_outliers = consumers + shape.tiles, outlier_warp(shape)
    held_base, held_bytes, finished = shape.fixed_bytes + ring.held_at, ring.held_bytes, ring.finished
    role, release = warp_roles(ring, shape.fixed_bytes), stage_release(ring)
    pair_at, value_of = number_pairs(layout.number), sums_as_floats(shape.converted)
    prepare, produce, finish = bit_vectors(shape), producer_warp(ring), epilogue(ring, shape.out, shape.added)

    @kernel(declared(shape.kind, shape.out), threads=ring.threads, variant=repr(shape))
    @unrolled
    def bit_gemv(
        planes: Any, numbers: Any, x: Any, perm: Any, addend: Any, y: Any, indptr: Any, entries: Any,
        rows: Any, tiles: Any, columns: Any, start: Any, rotation: Any, outlier_count: Any, room: Any,
    ) -> None:  # fmt: skip
        memory = cuda.shared.array(0, types.uint32)
        base = ptx.shared_address(memory)
        thread = ptx.u32(cuda.threadIdx.x)
        lane, warp, side, tile, step, turn, place, bars = role(base, thread, rotation)
        if warp >= adders:  # none, where there are no outliers
            add_outliers(indptr, entries, x, outlier_count, room, columns, base, tile, tiles, step, side, bars, lane)
            return
        if warp >= consumers:
            produce(planes, numbers, tile, tiles, step, turn, place, bars, lane)
            return
        if bulk:
            ptx.wait_previous_kernel()
            ptx.launch_next_kernel()
        prepare(x, perm, base, thread, columns, start)
        t, r8, mine = ptx.u32(lane & 3), ptx.u32(lane >> 2), ptx.u32(warp % slices)
        sign = -1 if t % sharers == sharers - 1 else 1
        top = ptx.i32(sign << (2 * pairs - 1))
        factor = ptx.bits_f32(ptx.u32((127 + (t % sharers) * held) << 23))
        keep = ptx.u32(ONES) if t // sharers == (r8 >> 1) // sharers else ptx.u32(0)
        # addresses, passed through a shuffle: the compiler would otherwise recompute them for every chunk
        xlane = ptx.u32(base + (((r8 >> 1) % sharers * 2 + (r8 & 1)) * 4 + t) * 4 + mine * (2 * stride))
        xlane = ptx.shfl_u32(xlane, lane)
        tlane = ptx.shfl_u32(ptx.u32(base + t_base + t * 16 + mine * (halves * passes * 64)), lane)
        wlane = ptx.shfl_u32(ptx.u32(mine * (q * 512) + lane * 16), lane)
        nlane = ptx.u32(plane_bytes + (t // sharers * 8 + r8) * pair_bytes)
        nlane = ptx.shfl_u32(ptx.u32(nlane + (mine * (halves * set_bytes) if sharing == 1 else 0)), lane)
        hlane = ptx.u32(base + held_base + side * (finished * held_bytes))
        mine_at = ptx.shfl_u32(ptx.u32(hlane + mine * (batch * 64) + r8 * 4), lane)
        ended = ptx.u32(bars + 2 * stages * 8)
        sums = cuda.local.array(floats, types.float32)
        for k in static(floats):
            sums[k] = ptx.f32(0.0)
        slot, bar, parity = place, bars, ptx.u32(0)
        adding, buffer, phase = ptx.u32(0), ptx.u32(0), ptx.u32(0)
        while tile < tiles:
            block, left = turn, ptx.u32(blocks)
            while left > 0:  # counted in 32 bits, as everything in this loop
                left = ptx.u32(left - 1)
                c = ptx.u32(block * slices)
                wait(bar, parity)
                if chunks % slices == 0 or c + mine < chunks:
                    xc, tc = ptx.u32(xlane + c * (2 * stride)), ptx.u32(tlane + c * (halves * passes * 64))
                    wc, nc = ptx.u32(slot + wlane), ptx.u32(slot + nlane)
                    h = ptx.u32(0)
                    while h < halves:  # not unrolled: Numba would take minutes
                        part = cuda.local.array(floats, types.float32)
                        units = cuda.local.array(batch, types.float32)
                        nh = nc
                        if sharing > 1:
                            first_set = ptx.u32(ptx.u32(c * halves) // sharing)
                            nh = ptx.u32(nc + (ptx.u32((c + mine) * halves + h) // sharing - first_set) * set_bytes)
                        for k in static(floats):
                            part[k] = ptx.f32(0.0)
                        for p in static(passes):
                            bits = cuda.local.array(b_words, types.uint32)
                            others = cuda.local.array(b_words, types.uint32)
                            count = cuda.local.array(floats, types.int32)
                            share = cuda.local.array(batch, types.float32)
                            begin = cuda.local.array(batch, types.int32)
                            for b in static(batch):
                                ahead = b * chunks * 2 * stride
                                for m in static(pairs):
                                    word = ptx.lds32(xc, ptx.u32(ahead + m * sharers * 32))
                                    if sharers < 4:
                                        word = ptx.u32(word & keep)
                                    if passes > 1:
                                        word = ptx.u32(word & masks[p])
                                    bits[b * pairs + m] = word
                                    if wide:
                                        others[b * pairs + m] = ptx.lds32(
                                            xc, ptx.u32(ahead + m * sharers * 32 + stride)
                                        )
                                known = ptx.lds128(tc, ptx.u32((b * chunks * halves * passes + p) * 64))
                                begin[b] = ptx.i32(known[0])
                                share[b] = ptx.bits_f32(known[1])
                                units[b] = ptx.bits_f32(known[2])
                                count[2 * b] = begin[b]
                                count[2 * b + 1] = begin[b]
                            low, high = pair_at(nh, p * (set_bytes // passes) + last * number_bytes)
                            scale, scale8 = pair_at(nh, p * (set_bytes // passes))
                            for b in static(batch):
                                if bcq or offset:  # z or the offset, times the share of sum(x)
                                    part[2 * b] = ptx.f32(part[2 * b] + low * share[b])
                                    part[2 * b + 1] = ptx.f32(part[2 * b + 1] + high * share[b])
                            for i in range(q):
                                if wide:
                                    a = ptx.lds128(wc, ptx.u32(i * 512))
                                else:
                                    a = ptx.lds64(wc, ptx.u32(i * 512))
                                if bcq and i > 0:
                                    scale, scale8 = pair_at(nh, p * (set_bytes // passes) + i * number_bytes)
                                more = 1 if bcq else q - 1 - i  # how far plane i is shifted
                                for b in static(batch):
                                    for m in static(pairs):
                                        if wide:
                                            d = ptx.mma_b1_wide(
                                                a[0], a[1], a[2], a[3], bits[b * pairs + m], others[b * pairs + m]
                                            )
                                        else:
                                            d = ptx.mma_b1(a[0], a[1], bits[b * pairs + m])
                                        one, two = 2 * m + more, 2 * m + 1 + more
                                        if m < pairs - 1:
                                            count[2 * b] = ptx.i32(count[2 * b] + (d[0] << one) + (d[1] << two))
                                            count[2 * b + 1] = ptx.i32(count[2 * b + 1] + (d[2] << one) + (d[3] << two))
                                        else:  # the plane of the sign has a negative weight
                                            weight = ptx.i32(top << more)
                                            sum8 = ptx.i32(count[2 * b + 1] + (d[2] << one))
                                            sum0 = ptx.i32(count[2 * b] + (d[0] << one))
                                            count[2 * b] = ptx.mad_i32(d[1], weight, sum0)
                                            count[2 * b + 1] = ptx.mad_i32(d[3], weight, sum8)
                                    if bcq:
                                        part[2 * b] = ptx.f32(part[2 * b] + scale * value_of(count[2 * b]))
                                        part[2 * b + 1] = ptx.f32(part[2 * b + 1] + scale8 * value_of(count[2 * b + 1]))
                                        count[2 * b] = begin[b]
                                        count[2 * b + 1] = begin[b]
                            if not bcq:
                                for b in static(batch):
                                    below = ptx.f32(0.0) if offset else ptx.f32(low * share[b])
                                    below8 = ptx.f32(0.0) if offset else ptx.f32(high * share[b])
                                    part[2 * b] = ptx.f32(part[2 * b] + scale * ptx.f32(value_of(count[2 * b]) - below))
                                    part[2 * b + 1] = ptx.f32(
                                        part[2 * b + 1] + scale8 * ptx.f32(value_of(count[2 * b + 1]) - below8)
                                    )
                        for k in static(floats):
                            sums[k] = ptx.f32(sums[k] + units[k // 2] * part[k])
                        xc, tc, wc = ptx.u32(xc + stride), ptx.u32(tc + passes * 64), ptx.u32(wc + 8)
                        if sharing == 1:
                            nc = ptx.u32(nc + set_bytes)
                        h = ptx.u32(h + 1)
                block, slot, bar, parity = release(lane, place, bars, block, slot, bar, parity)
            for k in static(floats):
                value = ptx.f32(sums[k] * factor)
                sums[k] = ptx.f32(0.0)
                value = ptx.f32(value + ptx.shfl_xor_f32(value, ptx.u32(1)))
                value = ptx.f32(value + ptx.shfl_xor_f32(value, ptx.u32(2)))
                if t == 0:
                    ptx.sts_f32(ptx.u32(mine_at + buffer * held_bytes), ptx.u32(k // 2 * 64 + k % 2 * 32), value)
            adding, buffer, phase = finish(
                addend, y, rows, tile, hlane, ended, mine, lane, t == 0, adding, buffer, phase
            )
            tile = ptx.u32(tile + step)

    return bit_gemv
