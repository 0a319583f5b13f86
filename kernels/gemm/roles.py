"""The product with the tensor cores of sm_90a: producer warps copy, consumer warps decode and multiply.

Four producer warps copy x, whose 16-byte pieces have to change places, and one thread of them starts bulk copies of
weights. The consumer warps, four for every 64 rows, turn codes into numbers and start the tensor cores, which read x
from shared memory and multiply while the next codes are turned into numbers. Two barriers for every stage: *filled*, at
which the thread, its bytes and the producers arrive, and *free*, at which the consumers do. Nothing else waits, so the
warps of different rows are soon at different places, and the tensor cores always have work.
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
from .tile_end import tile_end

__all__ = ["roles_kernel"]


def roles_kernel(shape: GemmShape, declared: str) -> Kernel:
    """The kernel of `kernel.gemm_kernel` for shapes with roles, of 16 vectors and more."""
    layout, n, depth, stages, sums_count = shape.layout, shape.vectors, shape.depth, shape.stages, shape.vectors // 2
    steps, stage_bytes, members, x_bytes = shape.steps, shape.stage_bytes, shape.members, shape.x_bytes
    codes_at, numbers_at, barriers_at = shape.codes_at, shape.numbers_at, shape.barriers_at
    own_sets, multiplying = shape.sets, 4 * shape.groups
    code_bytes, set_bytes, per_set = layout.code_bytes, layout.set_bytes, depth // shape.sets
    warp_codes, warp_set = code_bytes // 4, set_bytes // 4
    running = min(1, depth - 1)  # products that go on when the next numbers are made
    held_words, load_numbers, decode = decoder(layout)
    registers, copying = min(240, shape.registers), COPYING
    wgmma = ptx.wgmma(n, "bf16" if shape.kind == 2 else "f16")
    zero_sums, finish = ptx.zero_sums(sums_count), tile_end(shape)
    copy, advance = _copier(shape), _next_unit(shape)

    @kernel(declared, threads=shape.threads, blocks=shape.blocks, variant=repr(shape), specific=True)
    @unrolled
    def gemm(
        codes: Any, numbers: Any, row_scale: Any, x: Any, addend: Any, y: Any, partials: Any, tickets: Any, rows: Any,
        row_blocks: Any, columns: Any, start: Any, count: Any, total: Any, row_tiles: Any, addend_step: Any,
        waves: Any,
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
        whole, units = ptx.u32(waves * grid), ptx.u32(waves * steps + end - begin)
        shared_tile = ptx.u32(whole + ptx.div_u32(begin, ptx.u32(steps)))
        shared_step = ptx.rem_u32(begin, ptx.u32(steps))
        tile, step, entire = block if waves > 0 else shared_tile, ptx.u32(0) if waves > 0 else shared_step, waves
        filled = ptx.u32(base + barriers_at)
        last = ptx.u32(filled + (stages - 1) * 16)
        if thread == members:
            for i in static(stages):
                ptx.mbarrier_init_arrivals(ptx.u32(filled + i * 16), ptx.u32(5))
                ptx.mbarrier_init_arrivals(ptx.u32(filled + i * 16 + 8), ptx.u32(multiplying))
            ptx.mbarrier_fence()
        ptx.sync_block()
        if warp >= multiplying:
            ptx.fewer_registers(copying)
            copy(
                codes, numbers, x, base, filled, last, units, tile, step, entire, shared_tile, shared_step, row_tiles,
                row_blocks, columns, start, count, ptx.u32(thread - members), lane,
            )  # fmt: skip
        else:
            ptx.more_registers(registers)
            ptx.wait_previous_kernel()
            sums = cuda.local.array(sums_count, types.float32)
            zero_sums(sums)
            place, bar, parity, before, unit = base, filled, ptx.u32(0), ptx.u32(0), ptx.u32(0)
            while unit < units:
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
                    if d == running and before != 0 and lane == 0:
                        ptx.mbarrier_arrive(before)
                    decode(a, ptx.u32(codes_of + d * code_bytes), own_numbers, lane, held)
                    ptx.wgmma_fence()
                    x_of = ptx.u32(place + d * x_bytes)
                    for k in static(4):
                        wgmma(
                            sums, ptx.u32(a[4 * k]), ptx.u32(a[4 * k + 1]), ptx.u32(a[4 * k + 2]),
                            ptx.u32(a[4 * k + 3]), x_of, k,
                        )  # fmt: skip
                    ptx.wgmma_commit()
                before = ptx.u32(bar + 8)
                if bar == last:
                    place, bar, parity = base, filled, ptx.u32(parity ^ 1)
                else:
                    place, bar = ptx.u32(place + stage_bytes), ptx.u32(bar + 16)
                unit = ptx.u32(unit + 1)
                if ptx.u32(step + 1) == steps or unit == units:
                    ptx.wgmma_wait(0)
                    finish(
                        sums, row_scale, addend, y, partials, tickets, rows, count, total, row_tiles, addend_step,
                        tile, ptx.u32(tile - whole), entire, begin, end, ptx.u32(filled + stages * 16), thread,
                    )  # fmt: skip
                tile, step, entire = advance(tile, step, entire, shared_tile, shared_step)

    return gemm


def _next_unit(shape: GemmShape) -> Any:
    """A device function: the tile, the step and how many whole tiles are left, after a unit."""
    steps = shape.steps

    def advance(tile: Any, step: Any, entire: Any, shared_tile: Any, shared_step: Any) -> Any:
        step = ptx.u32(step + 1)
        if step == steps:
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
    """A device function for one thread: codes and numbers of a unit; of rows after the last, those of the last."""
    layout, groups, depth = shape.layout, shape.groups, shape.depth
    codes_at, numbers_at, sets, sharing = shape.codes_at, shape.numbers_at, shape.sets, layout.sharing
    code_bytes, set_bytes, per_set = layout.code_bytes, layout.set_bytes, depth // shape.sets
    row_codes, row_sets = layout.blocks * code_bytes // 16, layout.sets * set_bytes // 16
    copies = 1 if sharing % depth == 0 or depth % sharing == 0 else sets  # sets that are not neighbours
    copied = sets // copies * set_bytes
    expected = groups * (depth * code_bytes + sets * set_bytes)

    def copy(
        codes: Any, numbers: Any, place: Any, bar: Any, tile: Any, step: Any, row_tiles: Any, row_blocks: Any
    ) -> None:  # fmt: skip
        ptx.mbarrier_expect(bar, ptx.u32(expected))
        first = ptx.u32(ptx.rem_u32(tile, row_tiles) * groups)
        for g in static(groups):
            row_block = ptx.min_u32(ptx.u32(first + g), ptx.u32(row_blocks - 1))
            index = ptx.u32(row_block * row_codes + step * (depth * code_bytes // 16))
            target = ptx.u32(place + (codes_at + g * depth * code_bytes))
            ptx.bulk_copy(codes, index, target, ptx.u32(depth * code_bytes), bar)
            for d in static(copies):
                chosen = ptx.u32(ptx.u32(step * depth + d * per_set) // sharing)
                index = ptx.u32(row_block * row_sets + chosen * (set_bytes // 16))
                target = ptx.u32(place + (numbers_at + (g * sets + d) * set_bytes))
                ptx.bulk_copy(numbers, index, target, ptx.u32(copied), bar)

    return inlined(unrolled(copy))


def _x_copier(shape: GemmShape) -> Any:
    """A device function for all threads of the warps of x: 64 ``depth`` columns of the vectors of a unit.

    Zeros after the last column.
    """
    layout, n, depth, x_bytes = shape.layout, shape.vectors, shape.depth, shape.x_bytes
    width, ragged = layout.width, layout.width != layout.blocks * SIDE
    rows, turns = 16, min(8, n // 16)  # vectors that all threads take at a time; how often, written out

    def copy(
        x: Any, place: Any, index: Any, step: Any, per_row: Any, limit: Any, at: Any, piece: Any
    ) -> None:  # fmt: skip
        further = ptx.u32(rows * per_row)
        for d in static(depth):
            own, size, v = ptx.u32(index + d * 8), ptx.u32(16), ptx.u32(0)
            if ragged and ptx.u32((step * depth + d) * SIDE + piece * 8) >= width:
                own, further, size = ptx.u32(0), ptx.u32(0), ptx.u32(0)
            to = ptx.u32(place + d * x_bytes)
            while ptx.u32(v + turns * rows) <= limit:
                for j in static(turns):
                    ptx.cp_async16(x, own, ptx.u32(to + j * rows * 128), size)
                    own = ptx.u32(own + further)
                v, to = ptx.u32(v + turns * rows), ptx.u32(to + turns * rows * 128)
            # vectors that do not exist: what is in memory is multiplied, and the results are not stored
            while ptx.u32(v + at) < limit:
                ptx.cp_async16(x, own, to, size)
                own, v, to = ptx.u32(own + further), ptx.u32(v + rows), ptx.u32(to + rows * 128)

    return inlined(unrolled(copy))


def _copier(shape: GemmShape) -> Any:
    """A device function for the warps that copy, ``mine`` the number of a thread of these.

    The first one starts the copies of weights, those of the first stages before the previous kernel has ended. Copies
    of x are announced when those of the next units are on the way.
    """
    n, depth, stages, stage_bytes, advance = (
        shape.vectors, shape.depth, shape.stages, shape.stage_bytes, _next_unit(shape),
    )  # fmt: skip
    copy_weight, copy_x, later = _weight_copier(shape), _x_copier(shape), max(1, stages - 3)

    def announce(bar: Any, filled: Any, last: Any, lane: Any) -> Any:
        ptx.fence_async()
        ptx.syncwarp()
        if lane == 0:
            ptx.mbarrier_arrive(bar)
        return filled if bar == last else ptx.u32(bar + 16)

    told = inlined(announce)

    def copy(
        codes: Any, numbers: Any, x: Any, base: Any, filled: Any, last: Any, units: Any, tile: Any, step: Any,
        entire: Any, shared_tile: Any, shared_step: Any, row_tiles: Any, row_blocks: Any, columns: Any, start: Any,
        count: Any, mine: Any, lane: Any,
    ) -> None:  # fmt: skip
        place, bar, unit = base, filled, ptx.u32(0)
        if mine == 0:
            t, s, e = tile, step, entire
            while unit < units and unit < stages:
                copy_weight(codes, numbers, place, bar, t, s, row_tiles, row_blocks)
                place, bar, unit = ptx.u32(place + stage_bytes), ptx.u32(bar + 16), ptx.u32(unit + 1)
                t, s, e = advance(t, s, e, shared_tile, shared_step)
        ptx.syncwarp()
        ptx.wait_previous_kernel()
        ptx.launch_next_kernel()
        place, bar, parity, unit, done = base, filled, ptx.u32(1), ptx.u32(0), filled
        per_row, at, piece = ptx.u32(columns >> 3), ptx.u32(mine >> 3), ptx.u32(mine & 7)
        x_first = ptx.u32(at * per_row + (start >> 3) + piece)
        x_target = ptx.u32(at * 128 + ((piece ^ (at & 7)) << 4))
        while unit < units:
            if unit >= stages:
                ptx.mbarrier_wait(ptx.u32(bar + 8), parity)
                if mine == 0:
                    copy_weight(codes, numbers, place, bar, tile, step, row_tiles, row_blocks)
                ptx.syncwarp()
            first = ptx.u32(ptx.div_u32(tile, row_tiles) * n)
            limit = ptx.min_u32(ptx.u32(count - first), ptx.u32(n))
            index = ptx.u32(first * per_row + x_first + step * (depth * 8))
            copy_x(x, ptx.u32(place + x_target), index, step, per_row, limit, at, piece)
            ptx.cp_async_commit()
            if unit >= later:
                ptx.cp_async_wait(later)
                done = told(done, filled, last, lane)
            if bar == last:
                place, bar, parity = base, filled, ptx.u32(parity ^ 1)
            else:
                place, bar = ptx.u32(place + stage_bytes), ptx.u32(bar + 16)
            unit = ptx.u32(unit + 1)
            tile, step, entire = advance(tile, step, entire, shared_tile, shared_step)
        ptx.cp_async_wait(0)
        rest = ptx.min_u32(units, ptx.u32(later))
        while rest > 0:
            done = told(done, filled, last, lane)
            rest = ptx.u32(rest - 1)

    return inlined(copy)
