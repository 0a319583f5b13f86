"""y = W x by table look-up, as LUT-GEMM does it: the readable kernel, for any weight.

With signs b in {-1, +1}, a row of a group is ``z * sum(x) + sum over planes of alpha * sum(b * x)``. The inner sum runs
over chunks of 8 columns. A chunk has only 2^8 possible sums, so a block computes them all once, as a table in shared
memory, and then each of its rows reads one entry per chunk and plane: 8 multiplications become one look-up.

- A block has one vector and one *tile* of 32 chunks. It makes their table, and then each warp takes 32 rows, a lane
  one, and 32 others, until there are none. A second kernel adds up the sums of all tiles, always in the same order, so
  two runs give the same bits. That kernel adds the outliers too. On sm_90 it is launched *early*: it waits for the
  first one itself.
- The table is ``[entry][chunk]``, so a chunk has a bank of shared memory of its own. Lane l takes the chunks in the
  order l, l ^ 1, l ^ 2, ...: at every step the 32 lanes read 32 chunks, and none waits for another.
- Every group begins a new chunk, and a lane's words come in the order in which it wants them (`operands.device`). The
  chunks of a *span* have the same group and are added up before they are scaled. As soon as words have been used, those
  of the lane's next row are loaded in their place.
- Columns beyond the end of a group or row count as x = 0, so their bits do not matter.

Indices are checked when an operand is made. If ``perm`` or the outliers hold a wrong column nevertheless, it is
skipped.
"""

from __future__ import annotations

import functools
from typing import Any

from bcqfmt.kernels import ptx
from bcqfmt.kernels.device_functions.numbers import NARROW, WIDEN
from bcqfmt.kernels.runtime.launch import Kernel, kernel
from bcqfmt.kernels.runtime.numba_cuda import cuda, inlined, types
from bcqfmt.kernels.runtime.unroll import static, unrolled

THREADS = 256
CHUNK, TILE = 8, 32  # columns of a chunk, chunks of a table
SHARED = 4 * TILE * 256  # bytes of a table
_WORD = {0: "u32*", 1: "u16*", 2: "u16*"}


def span_of(width: int, group_size: int) -> int:
    """Chunks in a row of a tile that have the same group: 1, 2, 4, ... 32."""
    chunks = -(-group_size // CHUNK)
    return TILE if group_size >= width else min(TILE, chunks & -chunks)


def blocks_of(q: int, span: int) -> int:
    """Blocks that a processor holds: with many planes or scales a thread needs many registers."""
    return 4 if q <= 4 and span > 2 else 2


def sharers_of(outliers: bool) -> int:
    """Threads that add up a row in :func:`reduce`."""
    return 32 if outliers else 4


@functools.cache
def gemv(q: int, span: int, kind: int, reordered: bool, half: bool, early: bool = False) -> Kernel:
    """The kernel for q planes, a `span_of` chunks and activations of ``kind``; ``reordered``: x goes through perm.

    ``half``: alpha and z are float16. ``per_group``: spans of a group. ``early``: of both kernels, needs sm_90.
    """
    take, make_table, load, add = _inputs(reordered), _table(kind), _words(q), _adder(q, span, half)
    number, held, across, steps = "u16*" if half else "f32*", 8 * q, TILE // span, span.bit_length() - 1

    @kernel(
        f"u32* words, {number} alpha, {number} z, {_WORD[kind]} x, i32* perm, f32* partial, u32 rows, u32 columns, "
        "u32 start, u32 width, u32 group_size, u32 groups, u32 per_group, u32 first_tile",
        threads=THREADS,
        blocks=blocks_of(q, span),
        variant=repr((q, span, kind, reordered, half, early)),
        specific=early,
    )
    @unrolled
    def lut_gemv(
        words: Any, alpha: Any, z: Any, x: Any, perm: Any, partial: Any, rows: Any, columns: Any, start: Any,
        width: Any, group_size: Any, groups: Any, per_group: Any, first_tile: Any,
    ) -> None:  # fmt: skip
        table = ptx.shared_address(cuda.shared.array(0, types.float32))
        thread, lane, vector = ptx.u32(cuda.threadIdx.x), ptx.u32(cuda.threadIdx.x & 31), ptx.u32(cuda.blockIdx.z)
        tile, last = ptx.u32(cuda.blockIdx.x), ptx.u32(rows - 1)
        row = ptx.u32(((thread >> 5) * cuda.gridDim.y + cuda.blockIdx.y) * 32 + lane)
        # the chunk that this lane has of the table: its group, its first column, how many it has
        first = ptx.u32(tile * across + lane // span)
        group = ptx.div_u32(first, per_group)
        inside = ptx.u32(((first - group * per_group) * span + lane % span) * CHUNK)
        column = ptx.u32(group * group_size + inside)
        left = ptx.u32(group_size - ptx.min_u32(inside, group_size))
        left = ptx.min_u32(left, ptx.u32(width - ptx.min_u32(column, width)))
        own_group = ptx.min_u32(group, ptx.u32(groups - 1))  # without columns the sums are 0, whatever the scale
        inputs, own = cuda.local.array(CHUNK, types.uint32), cuda.local.array(held, types.uint32)
        take(inputs, x, perm, ptx.u32(vector * columns), columns, start, column, width)
        ptx.syncwarp()  # the table's x first, then words, and all of it on the way before the table is made
        for h in static(2):
            load(own, h, words, rows, tile, ptx.min_u32(row, last))
        ptx.syncwarp()
        part = make_table(table, inputs, left, thread)
        for m in static(steps):  # the sum of x of the whole group
            part = ptx.add_f32(part, ptx.shfl_xor_f32(part, ptx.u32(1 << m)))
        cuda.syncthreads()
        place = ptx.u64(ptx.u64((first_tile + tile) * cuda.gridDim.z + vector) * rows)
        while row - lane < rows:
            after = ptx.u32(row + cuda.blockDim.x * cuda.gridDim.y)
            total = add(
                table, own, part, own_group, words, alpha, z, rows, tile, ptx.min_u32(row, last),
                ptx.min_u32(after, last), lane,
            )  # fmt: skip
            if row < rows:
                partial[ptx.u64(place + row)] = total
            row = after
        if early:
            ptx.launch_next_kernel()

    return lut_gemv


def _inputs(reordered: bool) -> Any:
    """A device function: the x of eight columns; beyond the width any."""

    def take(
        found: Any, x: Any, perm: Any, x_first: Any, columns: Any, start: Any, column: Any, width: Any
    ) -> None:  # fmt: skip
        for j in static(CHUNK):
            source = ptx.u32(start + ptx.min_u32(ptx.u32(column + j), ptx.u32(width - 1)))
            if reordered:
                source = ptx.u32(perm[source])
                found[j] = x[ptx.u32(x_first + source)] if source < columns else 0
            else:
                found[j] = x[ptx.u32(x_first + source)]

    return inlined(unrolled(take))


def _table(kind: int) -> Any:
    """A device function: the table of a tile, lane by lane its chunks; the sum of the chunk's x, ``left`` of eight.

    A warp has the entries with the same three upper bits.
    """
    number = WIDEN[kind]

    def both_signs(a: Any, b: Any) -> Any:
        total, difference = ptx.add_f32(a, b), ptx.sub_f32(a, b)
        return -total, difference, -difference, total

    four = inlined(both_signs)

    def make(table: Any, found: Any, left: Any, thread: Any) -> Any:
        v = cuda.local.array(CHUNK, types.float32)
        part = ptx.f32(0)
        for j in static(CHUNK):
            v[j] = number(found[j]) if ptx.u32(j) < left else ptx.f32(0)
            part = ptx.add_f32(part, v[j])
        low, middle = four(v[0], v[1]), four(v[2], v[3])
        upper = ptx.u32(thread >> 5)
        while upper < 8:
            rest = ptx.add_f32(v[5] if upper & 1 else -v[5], v[6] if upper & 2 else -v[6])
            rest = ptx.add_f32(rest, v[7] if upper & 4 else -v[7])
            minus, plus = ptx.sub_f32(rest, v[4]), ptx.add_f32(rest, v[4])
            first = ptx.u32(table + upper * (32 * 4 * TILE) + (thread & 31) * 4)
            for e in static(4):
                below, above = ptx.add_f32(minus, middle[e]), ptx.add_f32(plus, middle[e])
                for f in static(4):
                    ptx.sts_f32(first, ptx.u32((4 * e + f) * 4 * TILE), ptx.add_f32(below, low[f]))
                    ptx.sts_f32(first, ptx.u32((16 + 4 * e + f) * 4 * TILE), ptx.add_f32(above, low[f]))
            upper = ptx.u32(upper + (cuda.blockDim.x >> 5))
        return part

    return inlined(unrolled(make))


def _words(q: int) -> Any:
    """A device function: half ``h`` of the eight words of every plane of a row.

    Word k is the one that the lane wants at steps 4 k ...
    """

    def load(own: Any, h: Any, words: Any, rows: Any, tile: Any, row: Any) -> None:
        for i in static(q):
            four = ptx.ldcg128(words, ptx.u32(((2 * tile + h) * q + i) * rows + row))
            for k in static(4):
                own[8 * i + 4 * h + k] = four[k]

    return inlined(unrolled(load))


def _adder(q: int, span: int, half: bool) -> Any:
    """A device function: the sum of a row over a tile, group by group; the row ``later`` is loaded meanwhile."""
    across, load, look_up = TILE // span, _words(q), ptx.looked_up(4 * TILE, span, q)
    wide = ptx.lo_f16 if half else ptx.f32

    def add(
        table: Any, own: Any, part: Any, own_group: Any, words: Any, alpha: Any, z: Any, rows: Any, tile: Any,
        row: Any, later: Any, lane: Any,
    ) -> Any:  # fmt: skip
        total = ptx.f32(0)
        for g in static(across):
            found = look_up(own, table, lane, g)
            group, x_sum = ptx.shfl_xor_u32(own_group, ptx.u32(g * span)), ptx.shfl_xor_f32(part, ptx.u32(g * span))
            place = ptx.u32(group * q * rows + row)
            for i in static(q):
                total = ptx.fma_f32(wide(alpha[ptx.u32(place + i * rows)]), found[i], total)
            total = ptx.fma_f32(wide(z[ptx.u32(group * rows + row)]), x_sum, total)
            for h in static(g * span // 16, (g + 1) * span // 16):
                load(own, h, words, rows, tile, later)
        return total

    return inlined(unrolled(add))


@functools.cache
def reduce(batch: int, kind: int, result: int, outliers: bool, early: bool = False) -> Kernel:
    """The second kernel: partial sums and outliers, added in a fixed order and rounded to ``result``.

    The lanes of a warp that have a row (:func:`sharers_of`) take its sums and outliers in turn.
    """
    sharers = sharers_of(outliers)
    each, halvings, widen, narrow = 32 // sharers, sharers.bit_length() - 1, WIDEN[kind], NARROW[result]

    @kernel(
        f"f32* partial, {_WORD[result]} y, {_WORD[kind]} x, i32* indptr, i32* indices, f32* added, "
        "u32 rows, u32 columns, u32 splits, u32 count",
        threads=THREADS,
        blocks=2,
        variant=repr((batch, kind, result, outliers, early)),
        specific=early,
    )
    def lut_reduce(
        partial: Any, y: Any, x: Any, indptr: Any, indices: Any, added: Any, rows: Any, columns: Any, splits: Any,
        count: Any,
    ) -> None:  # fmt: skip
        thread, b = ptx.u32(cuda.threadIdx.x), ptx.u32(cuda.blockIdx.y)
        row = ptx.u32((cuda.blockIdx.x * (cuda.blockDim.x >> 5) + (thread >> 5)) * each + thread % each)
        share, there = ptx.u32((thread & 31) // each), ptx.min_u32(row, ptx.u32(rows - 1))
        if early:
            ptx.wait_previous_kernel()
        total = ptx.f32(0)
        for split in range(share, splits, sharers):
            total = ptx.add_f32(total, ptx.ldcg_f32(partial, ptx.u32((split * batch + b) * rows + there)))
        if outliers:
            begin = ptx.u32(max(indptr[there], 0))
            end = ptx.u32(min(max(indptr[there + 1], 0), count))
            for e in range(begin + share, end, sharers):
                column = ptx.u32(indices[e])
                if column < columns:
                    value = widen(x[b * columns + column])
                    total = ptx.fma_f32(added[e], value, total)
        ptx.syncwarp()
        for m in range(halvings):
            total = ptx.add_f32(total, ptx.shfl_xor_f32(total, ptx.u32(16 >> m)))
        if share == 0 and row < rows:
            y[b * rows + row] = narrow(total)

    return lut_reduce
