"""Up to 16 vectors with the instructions of every GPU since sm_80: no two blocks of threads share a tile.

A block has 16 or 32 rows and all columns, which its warps take in turns of ``depth`` x 64. Each warp copies what it
needs of codes, numbers and x for itself, ``stages`` turns ahead, so warps wait for each other only at the end, where
some add up a part of the sums of all each, in their order. On sm_90 the first weights are copied before the previous
kernel ends.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bcqfmt.kernels import ptx
from bcqfmt.kernels.runtime.launch import Kernel, kernel
from bcqfmt.kernels.runtime.numba_cuda import cuda, inlined, types
from bcqfmt.kernels.runtime.unroll import static, unrolled

from .decode import decoder
from .layout import SIDE
from .portable import multiplier
from .shape import FewShape
from .tile_end import scales_of, writer


def few_kernel(shape: FewShape, declared: str) -> Kernel:
    """The kernel of `kernel.gemm_kernel` for up to 16 vectors."""
    layout, depth, stages, height, warps = shape.layout, shape.depth, shape.stages, shape.height, shape.groups
    steps, stage_bytes, per_set, x_bytes = shape.steps, shape.stage_bytes, shape.depth // shape.sets, shape.x_bytes
    codes_at, numbers_at, ahead, warp_bytes = shape.codes_at, shape.numbers_at, stages - 1, stages * stage_bytes
    row_codes, row_set, sums_count = layout.code_bytes // 4, layout.set_bytes // 4, shape.vectors // 2 * height
    (held_words, load_numbers, decode), zero_sums, early = decoder(layout), ptx.zero_sums(sums_count), shape.early
    copy_weight, copy_x, multiply = _weight_copier(shape), _x_copier(shape), multiplier(shape)
    eights, part = shape.vectors // 8, replace(shape, vectors=8, height=1)  # four sums of a lane
    (load_scales, scale), write, zero_part = scales_of(part), writer(part, 0), ptx.zero_sums(4)

    @kernel(declared, threads=shape.threads, blocks=shape.blocks, variant=repr(shape), specific=early)
    @unrolled
    def gemm(
        codes: Any, numbers: Any, row_scale: Any, x: Any, addend: Any, y: Any, partials: Any, tickets: Any, rows: Any,
        row_blocks: Any, columns: Any, start: Any, count: Any, total: Any, vector_tiles: Any, addend_step: Any,
        whole: Any,
    ) -> None:  # fmt: skip
        base = ptx.shared_address(cuda.shared.array(0, types.uint32))
        thread, lane = ptx.u32(cuda.threadIdx.x), ptx.u32(cuda.threadIdx.x & 31)
        warp, sixteen = ptx.u32(thread >> 5), ptx.u32(cuda.blockIdx.x * height)  # the first 16 rows
        first = ptx.u32(base + warp * warp_bytes)
        place, end, step = first, ptx.u32(first + warp_bytes), warp
        at, left = ptx.u32(lane >> 3), ptx.u32(count - (lane >> 3)) if lane >> 3 < count else ptx.u32(0)
        x_first = ptx.u32(at * (columns >> 3) + (start >> 3) + (lane & 7))
        x_target = ptx.u32(at * 128 + (((lane ^ at) & 7) << 4))
        for i in static(stages):
            copy_weight(codes, numbers, ptx.u32(first + i * stage_bytes), sixteen, ptx.u32(warp + i * warps), lane)
        if early:
            ptx.wait_previous_kernel()
            ptx.launch_next_kernel()
        for i in static(stages):
            place_of, step_of = ptx.u32(first + i * stage_bytes), ptx.u32(warp + i * warps)
            copy_x(x, place_of, step_of, x_first, x_target, columns, left, lane)
        sums, scales = cuda.local.array(sums_count, types.float32), cuda.local.array(2, types.float32)
        held, held_below = cuda.local.array(held_words, types.uint32), cuda.local.array(held_words, types.uint32)
        # what the warp adds up at the end: 16 rows of eight vectors
        row = ptx.u32((sixteen + warp // eights) * 16 + (lane >> 2) * 2)
        vector = ptx.u32(warp % eights * 8 + (lane & 3) * 2)
        zero_sums(sums)
        load_scales(scales, row_scale, rows, row)
        while step < steps:
            ptx.cp_async_wait(ahead)
            ptx.syncwarp()
            for d in static(depth):
                a, below = cuda.local.array(16, types.uint32), cuda.local.array(16, types.uint32)
                codes_of = ptx.u32(place + (codes_at + d * height * row_codes))
                numbers_of = ptx.u32(place + (numbers_at + d // per_set * height * row_set))
                if d % per_set == 0:
                    load_numbers(held, numbers_of, lane)
                decode(a, codes_of, numbers_of, lane, held)
                if height == 2:
                    numbers_of = ptx.u32(numbers_of + row_set)
                    if d % per_set == 0:
                        load_numbers(held_below, numbers_of, lane)
                    decode(below, ptx.u32(codes_of + row_codes), numbers_of, lane, held_below)
                multiply(sums, a, below, ptx.u32(place + d * x_bytes), lane)
            ptx.syncwarp()
            later = ptx.u32(step + stages * warps)
            copy_weight(codes, numbers, place, sixteen, later, lane)
            copy_x(x, place, later, x_first, x_target, columns, left, lane)
            step, place = ptx.u32(step + warps), ptx.u32(place + stage_bytes)
            if place == end:
                place = first
        own = ptx.u32(first + lane * 16)  # where its stages were; no two lanes in the same bank
        for k in static(sums_count // 4):
            ptx.sts128_f32(own, ptx.u32(512 * k), sums[4 * k], sums[4 * k + 1], sums[4 * k + 2], sums[4 * k + 3])
        ptx.sync_block()
        if warp < sums_count // 4:
            whole, own = cuda.local.array(4, types.float32), ptx.u32(base + warp * 512 + lane * 16)
            zero_part(whole)
            for w in static(warps):
                found = ptx.lds128_f32(own, ptx.u32(w * warp_bytes))
                for j in static(4):
                    whole[j] = ptx.add_f32(whole[j], found[j])
            scale(whole, scales)
            write(whole, addend, y, rows, count, addend_step, row, vector)

    return gemm


def _weight_copier(shape: FewShape) -> Any:
    """A device function for a warp: codes and numbers of a step, if there is one."""
    layout, depth, height, sets, steps = shape.layout, shape.depth, shape.height, shape.sets, shape.steps
    per_set, sharing, codes_at, numbers_at = depth // sets, layout.sharing, shape.codes_at, shape.numbers_at
    block_codes, block_set = layout.code_bytes // 16, layout.set_bytes // 16  # pieces of 16 bytes
    code_pieces, set_pieces = height * block_codes // 4, height * block_set // 4
    row_codes, row_sets = layout.blocks * block_codes, layout.sets * block_set

    def copy(codes: Any, numbers: Any, place: Any, sixteen: Any, step: Any, lane: Any) -> None:
        row_block, quarter = ptx.u32(sixteen >> 2), ptx.u32(sixteen & 3)
        if step < steps:
            index = ptx.u32(row_block * row_codes + step * (depth * block_codes) + quarter * (block_codes // 4) + lane)
            target = ptx.u32(place + codes_at + lane * 16)
            for d in static(depth):
                for i in static((code_pieces + 31) // 32):
                    if (i + 1) * 32 <= code_pieces or lane < code_pieces - i * 32:
                        to = ptx.u32(target + (d * code_pieces + i * 32) * 16)
                        ptx.cp_async16(codes, ptx.u32(index + (d * block_codes + i * 32)), to, 16)
            for d in static(sets):
                chosen = ptx.u32(ptx.u32(step * depth + d * per_set) // sharing)
                index = ptx.u32(row_block * row_sets + chosen * block_set + quarter * (block_set // 4) + lane)
                target = ptx.u32(place + numbers_at + d * set_pieces * 16 + lane * 16)
                for i in static((set_pieces + 31) // 32):
                    if (i + 1) * 32 <= set_pieces or lane < set_pieces - i * 32:
                        ptx.cp_async16(numbers, ptx.u32(index + i * 32), ptx.u32(target + i * 512), 16)

    return inlined(unrolled(copy))


def _x_copier(shape: FewShape) -> Any:
    """A device function for a warp: x of a step, if there is one; always the end of a group of copies."""
    depth, steps, width, fours = shape.depth, shape.steps, shape.layout.width, shape.vectors // 4
    x_bytes, ragged = shape.x_bytes, width != steps * depth * SIDE

    def copy(x: Any, place: Any, step: Any, x_first: Any, x_target: Any, columns: Any, left: Any, lane: Any) -> None:
        if step < steps:
            four = ptx.u32(columns >> 1)  # pieces of four vectors
            first = ptx.u32(x_first + step * (depth * 8))
            target, other = ptx.u32(place + x_target), ptx.u32(place + (x_target ^ 64))
            for i in static(fours * depth):  # 64 columns of four vectors; zeros after the last vector and column
                size = ptx.u32(16) if i % fours * 4 < left else ptx.u32(0)
                if ragged:
                    column = ptx.u32((step * depth + i // fours) * SIDE + (lane & 7) * 8)
                    size = ptx.min_u32(size, ptx.u32(2 * (width - column)) if column < width else ptx.u32(0))
                index = ptx.here(ptx.u32(first + (i % fours * four + i // fours * 8)) if size > 0 else ptx.u32(0))
                to = ptx.u32((other if i % 2 else target) + (i // fours * x_bytes + i % fours * 512))
                ptx.cp_async16(x, index, to, size)
        ptx.cp_async_commit()

    return inlined(unrolled(copy))
