"""The product with the instructions that every GPU since sm_80 has: some warps copy, all others decode and multiply.

As in `roles`, but the warps that copy do so 16 bytes a lane, and ``mma`` takes x out of registers, into which each warp
loads it. Two barriers for every stage: *filled*, at which every copying thread arrives when its copies have, and
*free*, at which every other one does. A warp has 16 rows of ``height`` blocks of rows: what it loads of x serves for
all of them.
"""

from __future__ import annotations

from typing import Any

from bcqfmt.kernels import ptx
from bcqfmt.kernels.runtime.launch import Kernel, kernel
from bcqfmt.kernels.runtime.numba_cuda import cuda, inlined, types
from bcqfmt.kernels.runtime.unroll import static, unrolled

from .decode import decoder
from .layout import SIDE
from .shape import GemmShape
from .tile_end import row_of, scales_of, tile_end


def portable_kernel(shape: GemmShape, declared: str) -> Kernel:
    """The kernel of `kernel.gemm_kernel` for the engine mma."""
    layout, depth, stages, groups, height = shape.layout, shape.depth, shape.stages, shape.groups, shape.height
    steps, stage_bytes, members, x_bytes = shape.steps, shape.stage_bytes, shape.members, shape.x_bytes
    codes_at, numbers_at, barriers_at, own_sets = shape.codes_at, shape.numbers_at, shape.barriers_at, shape.sets
    code_bytes, set_bytes, per_set = layout.code_bytes, layout.set_bytes, depth // shape.sets
    warp_codes, warp_set, copying = code_bytes // 4, set_bytes // 4, shape.copiers
    block_codes, block_sets = depth * code_bytes, own_sets * set_bytes
    sums_count = height * shape.vectors // 2
    (held_words, load_numbers, decode), multiply = decoder(layout), multiplier(shape)
    zero_sums, finish, copy = ptx.zero_sums(sums_count), tile_end(shape), _copier(shape)
    first_row, (load_scales, scale), scale_count = row_of(shape), scales_of(shape), 2 * height

    @kernel(declared, threads=shape.threads, blocks=shape.blocks, variant=repr(shape))
    @unrolled
    def gemm(
        codes: Any, numbers: Any, row_scale: Any, x: Any, addend: Any, y: Any, partials: Any, tickets: Any, rows: Any,
        row_blocks: Any, columns: Any, start: Any, count: Any, total: Any, vector_tiles: Any, addend_step: Any,
        whole: Any,
    ) -> None:  # fmt: skip
        memory = cuda.shared.array(0, types.uint32)
        base = ptx.u32((ptx.shared_address(memory) + 1023) & 0xFFFFFC00)
        thread, lane = ptx.u32(cuda.threadIdx.x), ptx.u32(cuda.threadIdx.x & 31)
        warp = ptx.u32(cuda.threadIdx.x >> 5)
        block, grid = ptx.u32(cuda.blockIdx.x), ptx.u32(cuda.gridDim.x)
        begin = ptx.div_u32(ptx.u32(total * block), grid)
        end = ptx.div_u32(ptx.u32(total * (block + 1)), grid)
        tile, step = ptx.div_u32(begin, ptx.u32(steps)), ptx.rem_u32(begin, ptx.u32(steps))
        filled = ptx.u32(base + barriers_at)
        last = ptx.u32(filled + (stages - 1) * 16)
        if thread == 0:
            for i in static(stages):
                ptx.mbarrier_init_arrivals(ptx.u32(filled + i * 16), ptx.u32(copying))
                ptx.mbarrier_init_arrivals(ptx.u32(filled + i * 16 + 8), ptx.u32(members))
        ptx.sync_block()
        if thread >= members:
            copy(
                codes, numbers, x, base, filled, last, begin, end, tile, step, row_blocks, columns, start, count,
                vector_tiles, ptx.u32(thread - members),
            )  # fmt: skip
        else:
            group, own = ptx.u32(warp >> 2), ptx.u32(warp & 3)
            codes_first = ptx.u32(codes_at + group * block_codes + own * warp_codes)
            numbers_first = ptx.u32(numbers_at + group * block_sets + own * warp_set)
            sums, scales = cuda.local.array(sums_count, types.float32), cuda.local.array(scale_count, types.float32)
            held, held_below = cuda.local.array(held_words, types.uint32), cuda.local.array(held_words, types.uint32)
            place, bar, parity, unit = base, filled, ptx.u32(0), begin
            while unit < end:
                zero_sums(sums)
                load_scales(scales, row_scale, rows, first_row(tile, vector_tiles, thread))
                left = ptx.min_u32(ptx.u32(steps - step), ptx.u32(end - unit))
                unit = ptx.u32(unit + left)
                while left > 0:
                    ptx.mbarrier_poll(bar, parity)
                    for d in static(depth):
                        a, below = cuda.local.array(16, types.uint32), cuda.local.array(16, types.uint32)
                        codes_of = ptx.u32(place + codes_first + d * code_bytes)
                        numbers_of = ptx.u32(place + numbers_first + d // per_set * set_bytes)
                        if d % per_set == 0:
                            load_numbers(held, numbers_of, lane)
                        decode(a, codes_of, numbers_of, lane, held)
                        if height == 2:
                            numbers_of = ptx.u32(numbers_of + groups * block_sets)
                            if d % per_set == 0:
                                load_numbers(held_below, numbers_of, lane)
                            decode(below, ptx.u32(codes_of + groups * block_codes), numbers_of, lane, held_below)
                        multiply(sums, a, below, ptx.u32(place + d * x_bytes), lane)
                    ptx.mbarrier_arrive(ptx.u32(bar + 8))
                    left = ptx.u32(left - 1)
                    if bar == last:
                        place, bar, parity = base, filled, ptx.u32(parity ^ 1)
                    else:
                        place, bar = ptx.u32(place + stage_bytes), ptx.u32(bar + 16)
                scale(sums, scales)
                finish(
                    sums, addend, y, partials, tickets, rows, count, total, vector_tiles, addend_step,
                    tile, tile, ptx.u32(0), begin, end, ptx.u32(filled + stages * 16), thread,
                )  # fmt: skip
                tile, step = ptx.u32(tile + 1), ptx.u32(0)

    return gemm


def _copier(shape: GemmShape) -> Any:
    """A device function for the warps that copy: codes, numbers and x of every unit, when its stage is free."""
    layout, n, depth, tall = shape.layout, shape.vectors, shape.depth, shape.row_blocks
    steps, stage_bytes, x_bytes, width = shape.steps, shape.stage_bytes, shape.x_bytes, layout.width
    codes_at, numbers_at, sets, sharing = shape.codes_at, shape.numbers_at, shape.sets, layout.sharing
    block_codes, set_bytes, per_set, threads = depth * layout.code_bytes, layout.set_bytes, depth // sets, shape.copiers
    code_pieces, set_pieces, x_pieces = block_codes // 16, set_bytes // 16, n * 8
    row_codes, row_sets = layout.blocks * layout.code_bytes // 16, layout.sets * set_pieces
    ragged, (whole, rest) = width != layout.blocks * SIDE, divmod(code_pieces, threads)
    copy_codes = ptx.cp_async_run(whole, threads * 16)

    def copy(
        codes: Any, numbers: Any, x: Any, base: Any, filled: Any, last: Any, begin: Any, end: Any, tile: Any, step: Any,
        row_blocks: Any, columns: Any, start: Any, count: Any, vector_tiles: Any, thread: Any,
    ) -> None:  # fmt: skip
        per_row, at = ptx.u32(columns >> 3), ptx.u32(thread % x_pieces >> 3)
        x_first = ptx.u32((start >> 3) + thread // x_pieces * 8 + (thread & 7))
        x_target = ptx.u32(thread // x_pieces * x_bytes + at * 128 + (((thread & 7) ^ (at & 7)) << 4))
        place, bar, parity, unit, fresh = base, filled, ptx.u32(1), begin, ptx.u32(1)
        x_at, left = ptx.u32(0), ptx.u32(0)
        row_block = cuda.local.array(tall, types.uint32)
        while unit < end:
            ptx.mbarrier_poll(ptx.u32(bar + 8), parity)
            if fresh != 0:  # another tile; of rows after the last, those of the last
                first, fresh = ptx.div_u32(tile, vector_tiles), ptx.u32(0)
                vector = ptx.u32(ptx.rem_u32(tile, vector_tiles) * n + at)
                for r in static(tall):
                    row_block[r] = ptx.min_u32(ptx.u32(first * tall + r), ptx.u32(row_blocks - 1))
                x_at = ptx.u32(vector * per_row + x_first)
                left = ptx.u32(count - vector) if vector < count else ptx.u32(0)
            for r in static(tall):
                index = ptx.u32(ptx.u32(row_block[r]) * row_codes + step * code_pieces + thread)
                target = ptx.u32(place + codes_at + r * block_codes + thread * 16)
                copy_codes(codes, index, target)
                if thread < rest:
                    ptx.cp_async16(codes, ptx.u32(index + whole * threads), ptx.u32(target + whole * threads * 16), 16)
                for d in static(sets):
                    chosen = ptx.u32(ptx.u32(step * depth + d * per_set) // sharing)
                    index = ptx.u32(ptx.u32(row_block[r]) * row_sets + chosen * set_pieces + thread)
                    target = ptx.u32(place + numbers_at + (r * sets + d) * set_bytes + thread * 16)
                    for i in static((set_pieces + threads - 1) // threads):
                        if (i + 1) * threads <= set_pieces or thread < set_pieces - i * threads:
                            ptx.cp_async16(
                                numbers, ptx.u32(index + i * threads), ptx.u32(target + i * threads * 16), 16
                            )  # fmt: skip
            for i in static((depth * x_pieces + threads - 1) // threads):
                more, further = i * threads % x_pieces // 8, i * threads // x_pieces
                size = ptx.u32(16) if more < left else ptx.u32(0)  # zeros after the last vector and column
                if ragged:
                    column = ptx.u32((step * depth + thread // x_pieces + further) * SIDE + (thread & 7) * 8)
                    after = ptx.u32(width - column) if column < width else ptx.u32(0)
                    size = ptx.min_u32(size, ptx.u32(2 * after))
                index = ptx.u32(x_at + (more * per_row + step * (8 * depth) + further * 8)) if size > 0 else ptx.u32(0)
                target = ptx.u32(place + x_target + (more * 128 + further * x_bytes))
                ptx.cp_async16(x, index, ptx.u32(target ^ ((more & 4) << 4)), size)
            ptx.cp_async_arrive(bar)
            unit, step = ptx.u32(unit + 1), ptx.u32(step + 1)
            if step == steps:
                tile, step, fresh = ptx.u32(tile + 1), ptx.u32(0), ptx.u32(1)
            if bar == last:
                place, bar, parity = base, filled, ptx.u32(parity ^ 1)
            else:
                place, bar = ptx.u32(place + stage_bytes), ptx.u32(bar + 16)

    return inlined(unrolled(copy))


def multiplier(shape: GemmShape) -> Any:
    """A device function: to the sums of a warp's rows, its fragments of 64 columns of W times those of x are added."""
    half, pairs, height = shape.vectors // 2, shape.vectors // 16, shape.height
    mma = ptx.mma_bf16 if shape.kind == 2 else ptx.mma_f16

    def add(sums: Any, s: Any, a: Any, f: Any, b0: Any, b1: Any) -> None:
        d = mma(
            ptx.u32(a[f]), ptx.u32(a[f + 1]), ptx.u32(a[f + 2]), ptx.u32(a[f + 3]), b0, b1, sums[s], sums[s + 1],
            sums[s + 2], sums[s + 3],
        )  # fmt: skip
        for i in static(4):
            sums[s + i] = d[i]

    product = inlined(unrolled(add))

    def by_sixteen(sums: Any, a: Any, below: Any, address: Any, lane: Any) -> None:
        # matrices of 8 vectors x 8 columns: columns 0..7 and 8..15 of vectors 0..7, then of vectors 8..15
        vector = ptx.u32((lane & 7) + ((lane >> 4) << 3))
        row = ptx.u32(address + vector * 128)
        for k in static(4):
            piece = ptx.u32((2 * k + (lane >> 3 & 1)) ^ (vector & 7))
            for j in static(pairs):
                b = ptx.ldmatrix_x4(ptx.u32(row + (piece << 4) + j * 2048))
                for h in static(2):
                    product(sums, 8 * j + 4 * h, a, 4 * k, b[2 * h], b[2 * h + 1])
                    if height == 2:
                        product(sums, half + 8 * j + 4 * h, below, 4 * k, b[2 * h], b[2 * h + 1])

    def by_eight(sums: Any, a: Any, below: Any, address: Any, lane: Any) -> None:
        # matrices of 8 vectors x 8 columns, of 32 columns
        vector = ptx.u32(lane & 7)
        row = ptx.u32(address + vector * 128)
        for i in static(2):
            b = ptx.ldmatrix_x4(ptx.u32(row + (((4 * i + (lane >> 3)) ^ vector) << 4)))
            for k in static(2):
                product(sums, 0, a, 8 * i + 4 * k, b[2 * k], b[2 * k + 1])
                if height == 2:
                    product(sums, half, below, 8 * i + 4 * k, b[2 * k], b[2 * k + 1])

    return inlined(unrolled(by_eight if shape.vectors == 8 else by_sixteen))
