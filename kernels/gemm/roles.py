"""The product with the tensor cores of sm_90a: producer warps copy, consumer warps decode and multiply.

One thread of each producer warp starts copies: three of weights, in bulk, without waiting for the previous kernel, one
of x, in boxes that the copy engine stores as the tensor cores want them. The consumer warps, four for every 64 rows,
turn codes into numbers and start the tensor cores, which read x from shared memory and multiply while the next codes
are turned into numbers. Two barriers for every stage: *filled*, at which the producers and their bytes arrive, and
*free*, at which every consumer thread does. Nothing else waits, so the warps of different rows are soon at different
places, and the tensor cores always have work.

The steps of a tile are a loop of their own: where the sums of another tile could come into it, the compiler would wait
for the tensor cores at every step.
"""

from __future__ import annotations

from typing import Any

from bcqfmt.kernels import ptx
from bcqfmt.kernels.runtime.launch import Kernel, kernel
from bcqfmt.kernels.runtime.numba_cuda import cuda, inlined, types
from bcqfmt.kernels.runtime.unroll import static, unrolled

from .decode import decoder
from .layout import SIDE
from .shape import COPYING, GemmShape
from .tile_end import row_of, scales_of, tile_end

__all__ = ["roles_kernel"]

WEIGHT_WARPS = 3  # that copy weights; a fourth one copies x


def roles_kernel(shape: GemmShape, declared: str) -> Kernel:
    """The kernel of `kernel.gemm_kernel` for the engine wgmma; x is a tensor map."""
    layout, n, depth, stages, sums_count = shape.layout, shape.vectors, shape.depth, shape.stages, shape.vectors // 2
    steps, stage_bytes, members, pieces = shape.steps, shape.stage_bytes, shape.members, shape.x_bytes // 16
    codes_at, numbers_at, barriers_at = shape.codes_at, shape.numbers_at, shape.barriers_at
    own_sets, multiplying = shape.sets, 4 * shape.groups
    code_bytes, set_bytes, per_set = layout.code_bytes, layout.set_bytes, depth // shape.sets
    warp_codes, warp_set = code_bytes // 4, set_bytes // 4
    running = min(1, depth - 1)  # products that go on when the next numbers are made
    held_words, load_numbers, decode = decoder(layout)
    registers, copying = min(240, shape.registers), COPYING
    wgmma = ptx.wgmma(n, "bf16" if shape.kind == 2 else "f16")
    zero_sums, finish = ptx.zero_sums(sums_count), tile_end(shape)
    first_row, (load_scales, scale) = row_of(shape), scales_of(shape)
    next_tile, copying_warps = _next_tile(), min(WEIGHT_WARPS, shape.groups)
    copy_weight, copy_x = _copier(shape, _weight_copier(shape)), _copier(shape, _x_copier(shape))

    @kernel(declared, threads=shape.threads, blocks=shape.blocks, variant=repr(shape), specific=True)
    @unrolled
    def gemm(
        codes: Any, numbers: Any, row_scale: Any, x: Any, addend: Any, y: Any, partials: Any, tickets: Any, rows: Any,
        row_blocks: Any, columns: Any, start: Any, count: Any, total: Any, vector_tiles: Any, addend_step: Any,
        whole: Any,
    ) -> None:  # fmt: skip
        memory = cuda.shared.array(0, types.uint32)
        base = ptx.u32((ptx.shared_address(memory) + 1023) & 0xFFFFFC00)
        thread, lane = ptx.u32(cuda.threadIdx.x), ptx.u32(cuda.threadIdx.x & 31)
        # so the compiler knows that a warp does not diverge where roles do, and lets products overlap
        warp = ptx.shfl_u32(ptx.u32(cuda.threadIdx.x >> 5), ptx.u32(0))
        group = ptx.u32(warp >> 2)
        block, grid = ptx.u32(cuda.blockIdx.x), ptx.u32(cuda.gridDim.x)
        # the units of the block: those of whole tiles, then a part of those that all blocks share
        begin = ptx.div_u32(ptx.u32(total * block), grid)
        end = ptx.div_u32(ptx.u32(total * (block + 1)), grid)
        waves = ptx.div_u32(ptx.u32(whole + grid - 1 - block), grid)
        units = ptx.u32(waves * steps + end - begin)
        shared_tile = ptx.u32(whole + ptx.div_u32(begin, ptx.u32(steps)))
        shared_step = ptx.rem_u32(begin, ptx.u32(steps))
        tile, step, entire = block if waves > 0 else shared_tile, ptx.u32(0) if waves > 0 else shared_step, waves
        filled = ptx.u32(base + barriers_at)
        last = ptx.u32(filled + (stages - 1) * 16)
        if thread == members:
            for i in static(stages):
                ptx.mbarrier_init_arrivals(ptx.u32(filled + i * 16), ptx.u32(copying_warps + 1))
                ptx.mbarrier_init_arrivals(ptx.u32(filled + i * 16 + 8), ptx.u32(members))
            ptx.mbarrier_fence()
        ptx.sync_block()
        if warp >= multiplying:
            ptx.fewer_registers(copying)
            own = ptx.u32(warp - multiplying)
            if own == WEIGHT_WARPS and lane == 0:
                ptx.prefetch_map(x)
                ptx.wait_previous_kernel()
                ptx.launch_next_kernel()
                copy_x(
                    codes, numbers, x, base, filled, last, units, tile, step, entire, shared_tile, shared_step,
                    vector_tiles, row_blocks, own,
                )  # fmt: skip
            elif own < copying_warps and lane == 0:
                copy_weight(
                    codes, numbers, x, base, filled, last, units, tile, step, entire, shared_tile, shared_step,
                    vector_tiles, row_blocks, own,
                )  # fmt: skip
        else:
            ptx.more_registers(registers)
            ptx.wait_previous_kernel()
            sums, scales = cuda.local.array(sums_count, types.float32), cuda.local.array(2, types.float32)
            place, bar, parity, unit = base, filled, ptx.u32(0), ptx.u32(0)
            while unit < units:
                zero_sums(sums)
                load_scales(scales, row_scale, rows, first_row(tile, vector_tiles, thread))
                left, before = ptx.min_u32(ptx.u32(steps - step), ptx.u32(units - unit)), ptx.u32(0)
                unit = ptx.u32(unit + left)
                while left > 0:
                    ptx.mbarrier_wait(bar, parity)
                    numbers_of = ptx.u32(place + numbers_at + group * (own_sets * set_bytes) + (warp & 3) * warp_set)
                    codes_of = ptx.u32(place + codes_at + group * (depth * code_bytes) + (warp & 3) * warp_codes)
                    held = cuda.local.array(held_words, types.uint32)
                    for d in static(depth):
                        a = cuda.local.array(16, types.uint32)
                        own_numbers = ptx.u32(numbers_of + d // per_set * set_bytes)
                        if d % per_set == 0:
                            load_numbers(held, own_numbers, lane)
                        ptx.wgmma_wait(running)  # the fragment before the last one is free
                        if d == running and before != 0:
                            ptx.mbarrier_arrive(before)
                        decode(a, ptx.u32(codes_of + d * code_bytes), own_numbers, lane, held)
                        ptx.wgmma_fence()
                        for piece in static(d * pieces, d * pieces + 8, 2):
                            k = 2 * (piece - d * pieces)
                            wgmma(
                                sums, ptx.u32(a[k]), ptx.u32(a[k + 1]), ptx.u32(a[k + 2]), ptx.u32(a[k + 3]),
                                place, piece,
                            )  # fmt: skip
                        ptx.wgmma_commit()
                    before, left = ptx.u32(bar + 8), ptx.u32(left - 1)
                    if bar == last:
                        place, bar, parity = base, filled, ptx.u32(parity ^ 1)
                    else:
                        place, bar = ptx.u32(place + stage_bytes), ptx.u32(bar + 16)
                ptx.wgmma_wait(0)
                ptx.mbarrier_arrive(before)
                scale(sums, scales)
                finish(
                    sums, addend, y, partials, tickets, rows, count, total, vector_tiles, addend_step,
                    tile, ptx.u32(tile - whole), entire, begin, end, ptx.u32(filled + stages * 16), thread,
                )  # fmt: skip
                tile, step, entire = next_tile(tile, entire, shared_tile, shared_step)

    return gemm


def _next_tile() -> Any:
    """A device function: the tile, its first step and how many whole tiles are left, after a tile."""

    def advance(tile: Any, entire: Any, shared_tile: Any, shared_step: Any) -> Any:
        step = ptx.u32(0)
        if entire > 1:
            tile, entire = ptx.u32(tile + cuda.gridDim.x), ptx.u32(entire - 1)
        elif entire == 1:
            tile, step, entire = shared_tile, shared_step, ptx.u32(0)
        else:
            tile = ptx.u32(tile + 1)
        return tile, step, entire

    return inlined(advance)


def _weight_copier(shape: GemmShape) -> Any:
    """A device function for a thread: codes and numbers of a unit, of the groups ``own``, ``own`` + 3, ...

    Of rows after the last, those of the last.
    """
    layout, groups, depth = shape.layout, shape.groups, shape.depth
    codes_at, numbers_at, sets, sharing = shape.codes_at, shape.numbers_at, shape.sets, layout.sharing
    code_bytes, set_bytes, per_set = layout.code_bytes, layout.set_bytes, depth // shape.sets
    row_codes, row_sets = layout.blocks * code_bytes // 16, layout.sets * set_bytes // 16
    copies = 1 if sharing % depth == 0 or depth % sharing == 0 else sets  # sets that are not neighbours
    copied, expected = sets // copies * set_bytes, depth * code_bytes + sets * set_bytes

    def copy(
        codes: Any, numbers: Any, x: Any, place: Any, bar: Any, tile: Any, step: Any, vector_tiles: Any,
        row_blocks: Any, own: Any,
    ) -> None:  # fmt: skip
        first = ptx.div_u32(tile, vector_tiles)
        several = ptx.u32(2 if own + WEIGHT_WARPS < groups else 1)
        ptx.mbarrier_expect(bar, ptx.u32(several * expected))
        g = own
        while g < groups:
            row_block = ptx.min_u32(ptx.u32(first * groups + g), ptx.u32(row_blocks - 1))
            index = ptx.u32(row_block * row_codes + step * (depth * code_bytes // 16))
            target = ptx.u32(place + codes_at + g * (depth * code_bytes))
            ptx.bulk_copy(codes, index, target, ptx.u32(depth * code_bytes), bar)
            for d in static(copies):
                chosen = ptx.u32(ptx.u32(step * depth + d * per_set) // sharing)
                index = ptx.u32(row_block * row_sets + chosen * (set_bytes // 16))
                target = ptx.u32(place + numbers_at + d * set_bytes + g * (sets * set_bytes))
                ptx.bulk_copy(numbers, index, target, ptx.u32(copied), bar)
            g = ptx.u32(g + WEIGHT_WARPS)

    return inlined(unrolled(copy))


def _x_copier(shape: GemmShape) -> Any:
    """A device function for a thread: 64 ``depth`` columns of the vectors of a unit, as boxes of a tensor map.

    Boxes of fewer vectors take longer: 32 and 16 at once made products of 512 up to 1.8 times as long.
    """
    n, depth, x_bytes = shape.vectors, shape.depth, shape.x_bytes

    def copy(
        codes: Any, numbers: Any, x: Any, place: Any, bar: Any, tile: Any, step: Any, vector_tiles: Any,
        row_blocks: Any, own: Any,
    ) -> None:  # fmt: skip
        ptx.mbarrier_expect(bar, ptx.u32(depth * x_bytes))
        vector = ptx.u32(ptx.rem_u32(tile, vector_tiles) * n)
        for d in static(depth):
            column, target = ptx.u32((step * depth + d) * SIDE), ptx.u32(place + d * x_bytes)
            ptx.tensor_copy(x, column, vector, target, bar)

    return inlined(unrolled(copy))


def _copier(shape: GemmShape, start_copies: Any) -> Any:
    """A device function for a thread that copies: ``start_copies`` for every unit, when its stage is free."""
    stage_bytes, steps, next_tile = shape.stage_bytes, shape.steps, _next_tile()

    def copy(
        codes: Any, numbers: Any, x: Any, base: Any, filled: Any, last: Any, units: Any, tile: Any, step: Any,
        entire: Any, shared_tile: Any, shared_step: Any, vector_tiles: Any, row_blocks: Any, own: Any,
    ) -> None:  # fmt: skip
        place, bar, parity, unit = base, filled, ptx.u32(1), ptx.u32(0)
        while unit < units:
            ptx.mbarrier_wait(ptx.u32(bar + 8), parity)
            start_copies(codes, numbers, x, place, bar, tile, step, vector_tiles, row_blocks, own)
            if bar == last:
                place, bar, parity = base, filled, ptx.u32(parity ^ 1)
            else:
                place, bar = ptx.u32(place + stage_bytes), ptx.u32(bar + 16)
            unit, step = ptx.u32(unit + 1), ptx.u32(step + 1)
            if step == steps:
                tile, step, entire = next_tile(tile, entire, shared_tile, shared_step)

    return inlined(copy)
