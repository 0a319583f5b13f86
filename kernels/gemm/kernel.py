"""y = W x for many vectors: codes become 16-bit numbers on their way into the tensor cores, and are never stored.

A block of threads takes tiles of 64 ``groups`` rows and ``vectors`` vectors. Codes, numbers and x come to shared memory
by asynchronous copies, ``stages`` deep. Every thread turns its codes into the fragment of W that it has to bring, in
registers, two numbers at a time (`decode`): the code is put into the last bits of a word, which makes it a 16-bit
number, then scaled and shifted. Values of bcq weights and tables are looked up (`look_up`); where bcq has one plane,
more than four or short groups, the sign of each plane's scale is flipped by its bit, and the scales are added.

x is the other operand, in shared memory, 128 bytes of every vector with their 16-byte pieces exchanged so that no two
are in the same bank. Here ``mma`` (sm_80 and later) loads it into registers, and all threads copy and multiply.
``wgmma`` (sm_90a, `roles`) reads x from shared memory itself, and multiplies while the next codes are turned into
numbers; there some threads only copy.

Work is divided evenly among the blocks, also in the middle of a tile. A block that has a part of a tile stores its
sums, and the last one to finish adds up all parts in their order (`tile_end`): two runs give the same bits.
"""

from __future__ import annotations

import functools
from typing import Any

from bcqfmt.kernels import ptx
from bcqfmt.kernels.runtime.launch import Kernel, kernel
from bcqfmt.kernels.runtime.numba_cuda import cuda, inlined, types
from bcqfmt.kernels.runtime.unroll import static, unrolled

from .decode import decoder
from .layout import SIDE, GemmLayout
from .roles import roles_kernel
from .shape import GemmShape, gemm_shape
from .tile_end import tile_end

__all__ = ["compile_cases", "gemm_kernel"]


@functools.cache
def gemm_kernel(shape: GemmShape) -> Kernel:
    """The kernel for one layout, number of vectors and choice of types.

    Arrays: codes, numbers and row_scale as in `layout`; x [count, columns]; addend float32, row ``v * addend_step`` for
    vector v; y [count, rows]; partials [2 blocks][numbers of a tile]; tickets, zeros, a word for every shared tile.
    Tiles are numbered along the vectors. ``whole``: how many, the first ones, one block has alone, only with wgmma;
    ``total``: steps of all others.
    """
    x, y = "map" if shape.engine == "wgmma" else "u16*", "f32*" if shape.out == 0 else "u16*"
    declared = (
        f"u32* codes, u32* numbers, f32* row_scale, {x} x, f32* addend, {y} y, f32* partials, u32* tickets, "
        "u32 rows, u32 row_blocks, u32 columns, u32 start, u32 count, u32 total, "
        "u32 vector_tiles, u32 addend_step, u32 whole"
    )
    return (roles_kernel if shape.engine == "wgmma" else _mma_kernel)(shape, declared)


def _mma_kernel(shape: GemmShape, declared: str) -> Kernel:
    layout, n = shape.layout, shape.vectors
    groups, depth, stages, threads = shape.groups, shape.depth, shape.stages, shape.threads
    steps, stage_bytes, sums_count, width = shape.steps, shape.stage_bytes, shape.vectors // 2, layout.width
    codes_at, numbers_at, x_bytes, own_sets = shape.codes_at, shape.numbers_at, shape.x_bytes, shape.sets
    # of a warp: bytes of codes and numbers of a block, and how many lanes copy 16 of them
    code_bytes, set_bytes = layout.code_bytes // 4, layout.set_bytes // 4
    code_pieces, set_pieces, x_pieces = code_bytes // 16, set_bytes // 16, n * 8
    blocks, sharing, sets = layout.blocks, layout.sharing, layout.sets
    warp_codes, warp_sets = depth * code_bytes, own_sets * set_bytes
    ahead, pending = stages - 2, stages - 3
    per_set, pieces = depth // own_sets, depth * x_pieces
    x_steps, ragged = -(-pieces // threads), width != blocks * SIDE
    (held_words, load_numbers, decode), multiply = decoder(layout), _multiplier(shape)
    zero_sums, finish = ptx.zero_sums(sums_count), tile_end(shape)

    def load_weight(
        codes: Any, numbers: Any, code_at: Any, set_at: Any, step: Any, size: Any, place: Any, warp: Any, lane: Any
    ) -> None:
        """The codes and numbers of a warp for one stage; ``size``: 16, or 0 for zeros."""
        target = ptx.u32(place + codes_at + warp * warp_codes + lane * 16)
        for d in static(depth):
            for i in static((code_pieces + 31) // 32):
                if (i + 1) * 32 <= code_pieces or lane < code_pieces - i * 32:
                    index = ptx.u32(code_at + (d * 4 * code_pieces + i * 32))
                    ptx.cp_async16(codes, index, ptx.u32(target + (d * code_bytes + i * 512)), size)
        target = ptx.u32(place + numbers_at + warp * warp_sets + lane * 16)
        for d in static(own_sets):
            chosen = ptx.u32(ptx.u32(step * depth + d * per_set) // sharing)
            for i in static((set_pieces + 31) // 32):
                if (i + 1) * 32 <= set_pieces or lane < set_pieces - i * 32:
                    index = ptx.u32(set_at + chosen * (4 * set_pieces) + i * 32)
                    ptx.cp_async16(numbers, index, ptx.u32(target + (d * set_bytes + i * 512)), size)

    def load_x(x: Any, x_at: Any, left: Any, per_row: Any, step: Any, target: Any, thread: Any) -> None:
        """The share of a thread of 64 ``depth`` columns of all vectors, zeros after the last vector and column.

        ``left``: vectors from that of the thread's first piece on.
        """
        for i in static(x_steps):
            more, further = i * threads % x_pieces // 8, i * threads // x_pieces
            if (i + 1) * threads <= pieces or thread < pieces - i * threads:
                size = ptx.u32(16) if more < left else ptx.u32(0)
                if ragged:
                    part = ptx.u32(thread // x_pieces + further)
                    column = ptx.u32((step * depth + part) * SIDE + (thread & 7) * 8)
                    rest = ptx.u32(width - column) if column < width else ptx.u32(0)
                    size = ptx.min_u32(size, ptx.u32(2 * rest))
                index = ptx.u32(x_at + (more * per_row + further * 8)) if size > 0 else ptx.u32(0)
                ptx.cp_async16(x, index, ptx.u32(target + (more * 128 + further * x_bytes)), size)

    fetch_weight, fetch_x = inlined(unrolled(load_weight)), inlined(unrolled(load_x))

    @kernel(declared, threads=threads, blocks=shape.blocks, variant=repr(shape))
    @unrolled
    def gemm(
        codes: Any, numbers: Any, row_scale: Any, x: Any, addend: Any, y: Any, partials: Any, tickets: Any, rows: Any,
        row_blocks: Any, columns: Any, start: Any, count: Any, total: Any, vector_tiles: Any, addend_step: Any,
        whole: Any,
    ) -> None:  # fmt: skip
        memory = cuda.shared.array(0, types.uint32)
        base = ptx.u32((ptx.shared_address(memory) + 1023) & 0xFFFFFC00)
        thread, lane = ptx.u32(cuda.threadIdx.x), ptx.u32(cuda.threadIdx.x & 31)
        warp, group = ptx.u32(cuda.threadIdx.x >> 5), ptx.u32(cuda.threadIdx.x >> 7)
        block, grid = ptx.u32(cuda.blockIdx.x), ptx.u32(cuda.gridDim.x)
        begin = ptx.div_u32(ptx.u32(total * block), grid)
        end = ptx.div_u32(ptx.u32(total * (block + 1)), grid)
        per_row = ptx.u32(columns >> 3)
        x_first = ptx.u32((thread % x_pieces >> 3) * per_row + (start >> 3) + (thread // x_pieces) * 8 + (thread & 7))
        weight_first, set_first = ptx.u32((warp & 3) * code_pieces + lane), ptx.u32((warp & 3) * set_pieces + lane)
        # what is fetched next: a step of a tile; its first pieces of codes, numbers and x
        target = base
        next_step = ptx.rem_u32(begin, ptx.u32(steps))
        next_tile = ptx.div_u32(begin, ptx.u32(steps))
        size, code_at, set_at = ptx.u32(0), ptx.u32(0), ptx.u32(0)
        x_at, left, at = ptx.u32(0), ptx.u32(0), ptx.u32(thread % x_pieces >> 3)
        x_target = ptx.u32((thread // x_pieces) * x_bytes + at * 128 + (((thread & 7) ^ (at & 7)) << 4))
        place, last = base, ptx.u32(base + (stages - 1) * stage_bytes)
        sums = cuda.local.array(sums_count, types.float32)
        zero_sums(sums)
        tile, unit, waiting = next_tile, begin, ptx.u32(ahead)
        while unit < end:
            if waiting == 0:
                ptx.cp_async_wait(pending)
                ptx.sync_block()
            fetched = ptx.u32(unit + ahead - waiting)
            if fetched < end:
                if next_step == 0 or fetched == begin:  # another tile
                    row_block = ptx.u32(ptx.div_u32(next_tile, vector_tiles) * groups + group)
                    first = ptx.u32(ptx.rem_u32(next_tile, vector_tiles) * n)
                    size = ptx.u32(16) if row_block < row_blocks else ptx.u32(0)
                    row_block = ptx.min_u32(row_block, ptx.u32(row_blocks - 1))
                    code_at = ptx.u32(row_block * (blocks * 4 * code_pieces) + weight_first)
                    set_at = ptx.u32(row_block * (sets * 4 * set_pieces) + set_first)
                    code_at = ptx.u32(code_at + next_step * (depth * 4 * code_pieces))
                    x_at = ptx.u32(first * per_row + x_first + next_step * (8 * depth))
                    left = ptx.u32(count - first - at) if ptx.u32(first + at) < count else ptx.u32(0)
                fetch_weight(codes, numbers, code_at, set_at, next_step, size, target, warp, lane)
                fetch_x(x, x_at, left, per_row, next_step, ptx.u32(target + x_target), thread)
                code_at, x_at = ptx.u32(code_at + depth * 4 * code_pieces), ptx.u32(x_at + 8 * depth)
                next_step = ptx.u32(next_step + 1)
                if next_step == steps:
                    next_step, next_tile = ptx.u32(0), ptx.u32(next_tile + 1)
            ptx.cp_async_commit()
            target = base if target == last else ptx.u32(target + stage_bytes)
            if waiting > 0:  # the first stages are on their way, nothing is there
                waiting = ptx.u32(waiting - 1)
                continue
            numbers_of = ptx.u32(place + numbers_at + warp * warp_sets)
            held = cuda.local.array(held_words, types.uint32)
            for d in static(depth):
                a = cuda.local.array(16, types.uint32)
                numbers_of_d = ptx.u32(numbers_of + d // per_set * set_bytes)
                if d % per_set == 0:
                    load_numbers(held, numbers_of_d, lane)
                codes_of = ptx.u32(place + codes_at + warp * warp_codes + d * code_bytes)
                decode(a, codes_of, numbers_of_d, lane, held)
                x_of = ptx.u32(place + d * x_bytes)
                for k in static(4):
                    multiply(
                        sums, ptx.u32(a[4 * k]), ptx.u32(a[4 * k + 1]), ptx.u32(a[4 * k + 2]), ptx.u32(a[4 * k + 3]),
                        x_of, k, lane,
                    )  # fmt: skip
            place = base if place == last else ptx.u32(place + stage_bytes)
            unit = ptx.u32(unit + 1)
            if unit == ptx.u32((tile + 1) * steps) or unit == end:
                finish(
                    sums, row_scale, addend, y, partials, tickets, rows, count, total, vector_tiles, addend_step, tile,
                    tile, ptx.u32(0), begin, end, ptx.u32(base + stages * stage_bytes), thread,
                )  # fmt: skip
                zero_sums(sums)
                tile = ptx.u32(tile + 1)

    return gemm


def _multiplier(shape: GemmShape) -> Any:
    """A device function: to the sums of 16 rows a warp, a fragment of W times columns 16 ``k`` .. of x is added."""
    n, pairs = shape.vectors, shape.vectors // 16
    mma = ptx.mma_bf16 if shape.kind == 2 else ptx.mma_f16

    def by_warp(sums: Any, a0: Any, a1: Any, a2: Any, a3: Any, address: Any, k: Any, lane: Any) -> None:
        # matrices of 8 vectors x 8 columns: columns 0..7 and 8..15 of vectors 0..7, then of vectors 8..15
        vector, piece = ptx.u32((lane & 7) + ((lane >> 4) << 3)), ptx.u32(2 * k + (lane >> 3 & 1))
        row = ptx.u32(address + vector * 128 + ((piece ^ (vector & 7)) << 4))
        for j in static(pairs):
            b = ptx.ldmatrix_x4(ptx.u32(row + j * 2048))
            for h in static(2):
                d = mma(
                    a0, a1, a2, a3, b[2 * h], b[2 * h + 1], sums[8 * j + 4 * h], sums[8 * j + 4 * h + 1],
                    sums[8 * j + 4 * h + 2], sums[8 * j + 4 * h + 3],
                )  # fmt: skip
                for i in static(4):
                    sums[8 * j + 4 * h + i] = d[i]

    def by_warp_of_eight(sums: Any, a0: Any, a1: Any, a2: Any, a3: Any, address: Any, k: Any, lane: Any) -> None:
        vector, piece = ptx.u32(lane & 7), ptx.u32(2 * k + (lane >> 3 & 1))
        b = ptx.ldmatrix_x4(ptx.u32(address + vector * 128 + ((piece ^ vector) << 4)))
        d = mma(a0, a1, a2, a3, b[0], b[1], sums[0], sums[1], sums[2], sums[3])
        for i in static(4):
            sums[i] = d[i]

    return inlined(unrolled(by_warp_of_eight if n == 8 else by_warp))


def compile_cases() -> dict[str, list[tuple[Any, ...]]]:
    """Both engines, formulas and types: what has to compile without spilling."""
    four, three = GemmLayout(4, 4096, 128, "affine", "F16"), GemmLayout(3, 4096, 64, "affine", "BF16", True)
    table = GemmLayout(4, 4096, 32, "table", "F16", table=tuple(float(i * i - 100) for i in range(16)))
    shapes = [
        gemm_shape(four, 16, 28672, 1, 1, "wgmma"),
        gemm_shape(four, 128, 28672, 1, 1, "wgmma"),
        gemm_shape(four, 512, 11008, 1, 1, "wgmma"),
        gemm_shape(four, 512, 28672, 1, 1, "wgmma"),
        gemm_shape(GemmLayout(4, 4096, 128, "bcq", "F16"), 64, 28672, 1, 0, "wgmma"),
        gemm_shape(GemmLayout(5, 4096, 128, "bcq", "F16"), 32, 28672, 1, 0, "wgmma"),
        GemmShape(table, 32, 1, 1, "mma", groups=2, blocks=2),
        GemmShape(four, 32, 1, 1, "mma", groups=2, blocks=2, paired=True),
        GemmShape(three, 8, 2, 2, "mma", groups=2, blocks=2, added=True),
    ]
    return {"gemm_kernel": [(shape,) for shape in shapes]}
