"""The end of a tile: sums are scaled; where several blocks share it, the last one adds up their parts; y is written."""

from __future__ import annotations

from typing import Any

from bcqfmt.kernels import ptx
from bcqfmt.kernels.runtime.numba_cuda import cuda, inlined, types
from bcqfmt.kernels.runtime.unroll import static, unrolled

from .shape import GemmShape


def row_of(shape: GemmShape) -> Any:
    """A device function: the first of a thread's rows."""
    tall = shape.rows

    def first(tile: Any, vector_tiles: Any, thread: Any) -> Any:
        return ptx.u32(ptx.div_u32(tile, vector_tiles) * tall + (thread >> 5) * 16 + ((thread & 31) >> 2) * 2)

    return inlined(first)


def scales_of(shape: GemmShape) -> tuple[Any, Any]:
    """Two device functions: the scales of a thread's rows, two for every ``height``, into an array; sums times these.

    They are powers of two, so parts of sums can be scaled. Loaded with the first codes, they are there at the end.
    """
    height, further, half = shape.height, shape.rows // shape.height, shape.vectors // 2
    scale_rows, scale_more_rows = ptx.scale_sums(half), ptx.scale_sums(half, (height - 1) * half)

    def load(scales: Any, row_scale: Any, rows: Any, row: Any) -> None:
        for k in static(2 * height):
            scales[k] = row_scale[ptx.min_u32(ptx.u32(row + (k // 2 * further + k % 2)), ptx.u32(rows - 1))]

    def scale(sums: Any, scales: Any) -> None:
        scale_rows(sums, scales[0], scales[1])
        if height == 2:
            scale_more_rows(sums, scales[2], scales[3])

    return inlined(unrolled(load)), inlined(scale)


def tile_end(shape: GemmShape) -> Any:
    """A device function for the threads that have the scaled sums of a tile.

    ``part``: the tile among the ``total`` / steps shared ones, of which the block has the units ``begin`` to ``end``.
    ``entire``: not 0 where the block has all of it. ``said``: the address of a word of shared memory.
    """
    n, steps, members, height, further = shape.vectors, shape.steps, shape.members, shape.height, shape.rows // 2
    count_of = height * n // 2
    quarter, several, everyone = count_of // 4, ptx.at_once(count_of), members == shape.threads
    zero_sums, save_sums, load_sums = ptx.zero_sums(count_of), ptx.save_sums(count_of), ptx.load_sums(count_of)
    write_rows, write_more_rows, first_row = writer(shape, 0), writer(shape, count_of - n // 2), row_of(shape)

    def all_members() -> None:
        if everyone:
            ptx.sync_block()
        else:
            ptx.sync_warps(ptx.u32(1), ptx.u32(members))

    sync = inlined(all_members)

    def write(
        sums: Any, addend: Any, y: Any, rows: Any, count: Any, vector_tiles: Any, addend_step: Any, tile: Any,
        thread: Any,
    ) -> None:  # fmt: skip
        row = first_row(tile, vector_tiles, thread)
        vector = ptx.u32(ptx.rem_u32(tile, vector_tiles) * n + (thread & 3) * 2)
        write_rows(sums, addend, y, rows, count, addend_step, row, vector)
        if height == 2:
            write_more_rows(sums, addend, y, rows, count, addend_step, ptx.u32(row + further), vector)

    written = inlined(write)

    def finish(
        sums: Any, addend: Any, y: Any, partials: Any, tickets: Any, rows: Any, count: Any, total: Any,
        vector_tiles: Any, addend_step: Any, tile: Any, part: Any, entire: Any, begin: Any, end: Any, said: Any,
        thread: Any,
    ) -> None:  # fmt: skip
        block, grid = ptx.u32(cuda.blockIdx.x), ptx.u32(cuda.gridDim.x)
        thread, rows, addend_step = ptx.here(thread), ptx.here(rows), ptx.here(addend_step)
        begin_tile = ptx.u32(part * steps)
        end_tile = ptx.u32(begin_tile + steps)
        if entire > 0 or (begin_tile >= begin and end_tile <= end):
            written(sums, addend, y, rows, count, vector_tiles, addend_step, tile, thread)
        else:  # other blocks have the rest of it
            first_block = ptx.div_u32(ptx.u32((begin_tile + 1) * grid - 1), total)
            last_block = ptx.div_u32(ptx.u32(end_tile * grid - 1), total)
            slot = ptx.u32(2 * block + (0 if begin_tile < begin else 1))
            save_sums(sums, partials, ptx.u32(slot * quarter * members + thread), ptx.u32(members))
            sync()
            if thread == 0:  # its fences are those of all, which it waited for and which wait for it
                cuda.threadfence()
                ptx.sts32(said, ptx.u32(0), ptx.atomic_inc(tickets, part, ptx.u32(last_block - first_block)))
                cuda.threadfence()
            sync()
            if ptx.lds32(said, ptx.u32(0)) == last_block - first_block:
                whole = cuda.local.array(count_of, types.float32)  # another array: fewer registers than the same
                zero_sums(whole)
                # the first block's part is in its second place, all others' in their first
                place, left = ptx.u32((2 * first_block + 1) * (quarter * members) + thread), ptx.u32(1)
                load_sums(whole, partials, place, ptx.u32(members), ptx.u32(0), left)
                place, left = ptx.u32(place + quarter * members), ptx.u32(last_block - first_block)
                while left > 0:
                    load_sums(whole, partials, place, ptx.u32(members), ptx.u32(2 * quarter * members), left)
                    place = ptx.u32(place + several * (2 * quarter * members))
                    left = ptx.u32(left - ptx.min_u32(left, ptx.u32(several)))
                written(whole, addend, y, rows, count, vector_tiles, addend_step, tile, thread)

    return inlined(finish)


def writer(shape: GemmShape, first: int) -> Any:
    """A device function: the sums of a row and the next, which begin with ``first``, are written to y."""
    half, added = shape.vectors // 2, shape.added
    add_rows, store_sums = ptx.add_rows(half, first), ptx.store_sums(half, shape.out, shape.paired, first)

    def write(
        sums: Any, addend: Any, y: Any, rows: Any, count: Any, addend_step: Any, row: Any, vector: Any
    ) -> None:  # fmt: skip
        inside = ptx.u32(1 if row < rows else 0)
        next_inside = ptx.u32(1 if ptx.u32(row + 1) < rows else 0)
        left = ptx.u32(count - vector) if vector < count else ptx.u32(0)
        if added:
            at = ptx.u32(vector * addend_step + row)
            add_rows(sums, addend, at, addend_step, left, inside, next_inside)
        store_sums(sums, y, ptx.u32(vector * rows + row), rows, left, inside, next_inside)

    return inlined(write)
