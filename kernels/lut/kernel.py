"""y = W x by table look-up, as LUT-GEMM does it: the readable kernel, for any weight.

With signs b in {-1, +1}, a row of a group is ``z * sum(x) + sum over planes of alpha * sum(b * x)``. The inner sum runs
over chunks of 8 columns. A chunk has only 2^8 possible sums, so a block computes them all once, as a table in shared
memory, and then each of its rows reads one entry per chunk and plane: 8 multiplications become one look-up.

- A block has one row per thread and walks over *tiles* of chunks: build the tables of a tile, look up, go on. The tiles
  are shared out among ``splits`` blocks; their partial sums are added by a second kernel, always in the same order, so
  two runs give the same bits. That kernel adds the outliers too.
- Every group begins a new chunk. A group size that is no multiple of 8 only means that the last chunk of a group
  is short: columns beyond it count as x = 0, so their bits do not matter.
- The sum of x over a chunk is the table's last entry (all bits one); z needs nothing else.
- With a batch, every chunk has one table per vector; the bits are read once for all.

Indices are checked when an operand is made. If ``perm`` or the outliers hold a wrong column nevertheless, it is
skipped.
"""

from __future__ import annotations

import functools
from typing import Any

from bcqfmt.kernels import ptx
from bcqfmt.kernels.runtime.launch import Kernel, kernel
from bcqfmt.kernels.runtime.numba_cuda import cuda, types

__all__ = ["CHUNK", "SHARERS", "THREADS", "gemv", "reduce", "shared_bytes", "tables_of"]

THREADS = 256
CHUNK = 8  # columns of a table
SHARERS = 32  # threads that add up the outliers of a row
_ENTRIES = 256  # of a table
_LAST = _ENTRIES - 1
_WORD = {0: "u32*", 1: "u16*", 2: "u16*"}


def tables_of(batch: int) -> int:
    """Chunks of a tile: as many as 32 KB of tables allow."""
    return 32 // batch


def shared_bytes(batch: int) -> int:
    """Dynamic shared memory: the tables, and the half tables they are made of."""
    return 4 * tables_of(batch) * batch * (_ENTRIES + 32)


@functools.cache
def gemv(q: int, batch: int, kind: int, aligned: bool, reordered: bool) -> Kernel:
    """The kernel for q planes, that many vectors, activations of ``kind``.

    ``aligned``: the group size is a multiple of 8, so no chunk straddles words. ``reordered``: x goes through perm.
    """
    tables = tables_of(batch)
    halves = tables * batch * _ENTRIES  # where the half tables begin: a table of 8 columns is made of two of 4

    @kernel(
        f"u32* words, f32* alpha, f32* z, {_WORD[kind]} x, i32* perm, f32* partial, u32 rows, u32 columns, "
        "u32 start, u32 width, u32 group_size, u32 per_group, u32 chunks, u32 tiles, u32 first_split",
        threads=THREADS,
        blocks=2,
        variant=repr((q, batch, kind, aligned, reordered)),
    )
    def lut_gemv(
        words: Any, alpha: Any, z: Any, x: Any, perm: Any, partial: Any, rows: Any, columns: Any, start: Any,
        width: Any, group_size: Any, per_group: Any, chunks: Any, tiles: Any, first_split: Any,
    ) -> None:  # fmt: skip
        table = cuda.shared.array(0, types.float32)  # [chunk of the tile][vector][bits], then the half tables
        sums = cuda.local.array(batch, types.float32)
        part = cuda.local.array(batch, types.float32)
        thread = ptx.u32(cuda.threadIdx.x)
        threads = ptx.u32(cuda.blockDim.x)
        row = ptx.u32(cuda.blockIdx.x * threads + thread)
        last_word = ptx.u32((width - 1) >> 5)
        for b in range(batch):
            sums[b] = ptx.f32(0)
        for tile in range(cuda.blockIdx.y, tiles, cuda.gridDim.y):
            begin = ptx.u32(tile * tables)
            count = ptx.min_u32(tables, chunks - begin)
            # -- tables: entry v is the sum of the chunk's x, with a minus where v has a 0
            for item in range(thread, ptx.u32((count * batch) << 5), threads):
                bits = ptx.u32(item & 15)
                piece = ptx.u32(item >> 4 & 1)
                c = ptx.div_u32(item >> 5, batch)
                b = ptx.u32((item >> 5) - c * batch)
                group = ptx.div_u32(begin + c, per_group)
                inside = ptx.u32((begin + c - group * per_group) * CHUNK + piece * 4)
                total = ptx.f32(0)
                for j in range(4):
                    column = ptx.u32(group * group_size + inside + j)
                    if inside + j < group_size and column < width:
                        source = ptx.u32(start + column)
                        if reordered:
                            source = ptx.u32(perm[source])
                        if source < columns:
                            place = b * columns + source
                            if kind == 0:
                                value = ptx.bits_f32(x[place])
                            elif kind == 1:
                                value = ptx.lo_f16(x[place])
                            else:
                                value = ptx.lo_bf16(x[place])
                            if bits >> j & 1:
                                total = ptx.add_f32(total, value)
                            else:
                                total = ptx.sub_f32(total, value)
                table[halves + item] = total
            cuda.syncthreads()
            for item in range(thread, ptx.u32(count * batch * _ENTRIES), threads):
                half = ptx.u32(halves + (item >> 8) * 32)
                table[item] = ptx.add_f32(table[half + (item & 15)], table[half + 16 + (item >> 4 & 15)])
            cuda.syncthreads()
            # -- look-ups: group by group, plane by plane
            if row < rows:
                for group in range(ptx.div_u32(begin, per_group), ptx.div_u32(begin + count - 1, per_group) + 1):
                    low = ptx.u32(ptx.max_u32(group * per_group, begin) - begin)
                    high = ptx.u32(ptx.min_u32((group + 1) * per_group, begin + count) - begin)
                    for i in range(q):
                        for b in range(batch):
                            part[b] = ptx.f32(0)
                        for c in range(low, high):
                            column = ptx.u32(group * group_size + (begin + c - group * per_group) * CHUNK)
                            if column < width:
                                word = ptx.u32(column >> 5)
                                here = words[ptx.u32((word * q + i) * rows + row)]
                                if aligned:
                                    bits = ptx.u32(here >> (column & 31))
                                else:
                                    after = ptx.min_u32(word + 1, last_word)
                                    bits = ptx.funnel_right(here, words[ptx.u32((after * q + i) * rows + row)], column)
                                for b in range(batch):
                                    entry = ptx.u32((c * batch + b) * _ENTRIES + (bits & _LAST))
                                    part[b] = ptx.add_f32(part[b], table[entry])
                        scale = alpha[ptx.u32((group * q + i) * rows + row)]
                        for b in range(batch):
                            sums[b] = ptx.fma_f32(scale, part[b], sums[b])
                    bias = z[ptx.u32(group * rows + row)]
                    for b in range(batch):
                        total = ptx.f32(0)
                        for c in range(low, high):
                            total = ptx.add_f32(total, table[ptx.u32((c * batch + b) * _ENTRIES + _LAST)])
                        sums[b] = ptx.fma_f32(bias, total, sums[b])
            cuda.syncthreads()
        if row < rows:
            split = ptx.u32(first_split + cuda.blockIdx.y)
            for b in range(batch):
                partial[ptx.u64((split * batch + b) * ptx.u64(rows) + row)] = sums[b]

    return lut_gemv


@functools.cache
def reduce(batch: int, kind: int, result: int, outliers: bool) -> Kernel:
    """The second kernel: partial sums and outliers, added in a fixed order and rounded to ``result``.

    A thread has a row; with outliers, a warp (:data:`SHARERS`), whose lanes take sums and outliers in turn.
    """
    sharers = SHARERS if outliers else 1

    @kernel(
        f"f32* partial, {_WORD[result]} y, {_WORD[kind]} x, i32* indptr, i32* indices, f32* added, "
        "u32 rows, u32 columns, u32 splits, u32 count",
        threads=THREADS,
        blocks=2,
        variant=repr((batch, kind, result, outliers)),
    )
    def lut_reduce(
        partial: Any, y: Any, x: Any, indptr: Any, indices: Any, added: Any, rows: Any, columns: Any, splits: Any,
        count: Any,
    ) -> None:  # fmt: skip
        thread, b = ptx.u32(cuda.threadIdx.x), ptx.u32(cuda.blockIdx.y)
        row = ptx.u32(cuda.blockIdx.x * (cuda.blockDim.x // sharers) + thread // sharers)
        lane = ptx.u32(thread % sharers)
        if row < rows:
            total = ptx.f32(0)
            for split in range(lane, splits, sharers):
                total = ptx.add_f32(total, partial[ptx.u64((split * batch + b) * ptx.u64(rows) + row)])
            if outliers:
                begin = ptx.u32(max(indptr[row], 0))
                end = ptx.u32(min(max(indptr[row + 1], 0), count))
                for e in range(begin + lane, end, sharers):
                    column = ptx.u32(indices[e])
                    if column < columns:
                        place = b * columns + column
                        if kind == 0:
                            value = ptx.bits_f32(x[place])
                        elif kind == 1:
                            value = ptx.lo_f16(x[place])
                        else:
                            value = ptx.lo_bf16(x[place])
                        total = ptx.fma_f32(added[e], value, total)
                ptx.syncwarp()
                for m in range(5):
                    total = ptx.add_f32(total, ptx.shfl_xor_f32(total, ptx.u32(16 >> m)))
            if lane == 0:
                if result == 0:
                    y[b * rows + row] = ptx.f32_bits(total)
                elif result == 1:
                    y[b * rows + row] = ptx.f32_to_f16(total)
                else:
                    y[b * rows + row] = ptx.f32_to_bf16(total)

    return lut_reduce
