"""Decoded numbers to their places in rows of a dense matrix of 16 bits: device functions, and a kernel that reorders.

A warp decodes 1024 columns of a row at a time, a word of 32 to each lane, into 2 KB of shared memory. Eight columns k
of lane l are at ``4 l + (k ^ (l >> 1 & 3))``, counted in 16 bytes: without bank conflicts both when lanes store their
columns and when neighbouring lanes read neighbouring columns. For a reordered weight a block decodes whole rows before
it writes any; then each thread gathers eight columns of a row. A reordered weight of several segments is decoded in
stored order, one launch per segment; `reorder_columns` then puts the columns in their original order, in place.
"""

from __future__ import annotations

import functools
from typing import Any

from bcqfmt.kernels import ptx
from bcqfmt.kernels.runtime.launch import Kernel, kernel
from bcqfmt.kernels.runtime.numba_cuda import cuda, inlined, types
from bcqfmt.kernels.runtime.unroll import static, unrolled

THREADS = 256
PIECE = 2048  # bytes of 1024 columns
_TOGETHER = 48 * 1024  # bytes of several rows, as measured with 4096 and 11008 columns
ARGUMENTS = (
    "u32* planes, {numbers}* first, {numbers}* second, u32* dense, u32* stored, u32 rows, u32 columns, u32 start, "
    "u32 width, u32 words, u32 groups, u32 span, u32 together"
)


def rows_together(columns: int) -> int:
    """Rows of a block that puts columns in order: what is read of the order serves all of them; 1, 2, 4 or 8."""
    fit = _TOGETHER // shared_bytes(columns, 1)
    return 1 << max(0, min(8, fit).bit_length() - 1)


def shared_bytes(columns: int, together: int) -> int:
    """Shared memory for ``together`` whole rows."""
    return together * -(-columns // 1024) * PIECE


def to_rows(decode: Any, reordered: bool) -> Any:
    """A device function for a block of a kernel with `ARGUMENTS`, which calls ``decode`` for 1024 columns at a time.

    ``decode(planes, first, second, rows, words, groups, span, row, word, lane, base)``: a warp puts words ``word`` ..
    ``word + 31`` of a row at ``base``. The block at (i, j) has rows of i and words of j, if ``reordered`` all words of
    ``together`` rows of a weight of one segment.
    """
    write, gather = _writer(), _gatherer(swizzled=True)

    def straight(
        planes: Any, first: Any, second: Any, dense: Any, stored: Any, base: Any, rows: Any, columns: Any, start: Any,
        width: Any, words: Any, groups: Any, span: Any, together: Any,
    ) -> None:  # fmt: skip
        lane, warp = ptx.lane_id(), ptx.u32(cuda.threadIdx.x >> 5)
        base = ptx.u32(base + warp * PIECE)
        row = ptx.u32(cuda.blockIdx.x * (cuda.blockDim.x >> 5) + warp)
        front = ptx.u32(cuda.blockIdx.y * 32)
        if row < rows:
            decode(planes, first, second, rows, words, groups, span, row, front, lane, base)
            ptx.syncwarp()
            write(dense, base, lane, row, front, columns, start, width)

    def in_order(
        planes: Any, first: Any, second: Any, dense: Any, stored: Any, base: Any, rows: Any, columns: Any, start: Any,
        width: Any, words: Any, groups: Any, span: Any, together: Any,
    ) -> None:  # fmt: skip
        lane, task = ptx.lane_id(), ptx.u32(cuda.threadIdx.x >> 5)
        front, pieces = ptx.u32(cuda.blockIdx.x * together), ptx.u32((words + 31) >> 5)
        here = ptx.min_u32(together, rows - front)
        while task < ptx.u32(here * pieces):
            row = ptx.div_u32(task, pieces)
            word = ptx.u32((task - row * pieces) * 32)
            at = ptx.u32(base + task * PIECE)
            decode(planes, first, second, rows, words, groups, span, ptx.u32(front + row), word, lane, at)
            task = ptx.u32(task + (cuda.blockDim.x >> 5))
        cuda.syncthreads()
        gather(dense, stored, base, ptx.u32(pieces * PIECE), front, here, columns)

    return inlined(in_order if reordered else straight)


def eight_putter() -> Any:
    """A device function: eight columns k of a lane to their place at ``base``."""

    def put(base: Any, lane: Any, k: Any, a: Any, b: Any, c: Any, d: Any) -> None:
        ptx.sts128(ptx.u32(base + (lane * 4 + (k ^ (lane >> 1 & 3))) * 16), ptx.u32(0), a, b, c, d)

    return inlined(put)


def _gatherer(*, swizzled: bool) -> Any:
    """A device function for a block: rows ``front`` .. ``front + here`` from ``base``, ``pitch`` bytes each, in order.

    ``stored``: where every original column is. Unless ``swizzled``, columns follow one another at ``base``.
    """

    def source_of(column: Any) -> Any:
        if swizzled:
            piece = ptx.u32((column >> 3) ^ (column >> 6 & 3))
            return ptx.u32(piece * 16 + (column & 7) * 2)
        return ptx.u32(column * 2)

    place = inlined(source_of)

    def gather(dense: Any, stored: Any, base: Any, pitch: Any, front: Any, here: Any, columns: Any) -> None:
        p, eights = ptx.u32(cuda.threadIdx.x), ptx.u32(columns >> 3)
        while p < eights:
            sources = cuda.local.array(8, types.uint32)
            for h in static(2):
                a, b, c, d = ptx.ldg128_keep(stored, ptx.u32(2 * p + h))
                sources[4 * h], sources[4 * h + 1], sources[4 * h + 2], sources[4 * h + 3] = a, b, c, d
            for k in static(8):  # an index out of range is clamped
                sources[k] = ptx.u32(base + place(ptx.min_u32(sources[k], columns - 1)))
            row, to = ptx.u32(0), ptx.u64(front) * ptx.u64(eights) + ptx.u64(p)
            while row < here:
                pairs = cuda.local.array(4, types.uint32)
                across = ptx.u32(row * pitch)
                for k in static(4):
                    pairs[k] = ptx.u32(ptx.lds16(sources[2 * k], across) | ptx.lds16(sources[2 * k + 1], across) << 16)
                ptx.stg128_stream(dense, to, pairs[0], pairs[1], pairs[2], pairs[3])
                row, to = ptx.u32(row + 1), to + ptx.u64(eights)
            p = ptx.u32(p + cuda.blockDim.x)

    return inlined(unrolled(gather))


def _writer() -> Any:
    """A device function for a warp: 1024 columns of a row, from where its lanes have put them at ``base``."""

    def write(
        dense: Any, base: Any, lane: Any, row: Any, front: Any, columns: Any, start: Any, width: Any
    ) -> None:  # fmt: skip
        for k in range(4):
            source = ptx.u32(8 * k + (lane >> 2))
            slot = ptx.u32((source * 4 + ((lane & 3) ^ (source >> 1 & 3))) * 16)
            p0, p1, p2, p3 = ptx.lds128(base + slot, ptx.u32(0))
            column = ptx.u32((front + source) * 32 + (lane & 3) * 8)
            if column < width:
                place = ptx.u64(row) * ptx.u64(columns) + ptx.u64(start + column)
                ptx.stg128_stream(dense, place >> ptx.u64(3), p0, p1, p2, p3)

    return inlined(write)


@functools.cache
def reorder_columns() -> Kernel:
    """``dense`` (rows, columns) of 16 bits, columns a multiple of 8; ``stored``: where every original column is.

    ``together`` rows to a block, which has 2 * columns bytes of shared memory for each.
    """
    gather = _gatherer(swizzled=False)

    @kernel("u32* dense, u32* stored, u32 rows, u32 columns, u32 together", threads=THREADS, blocks=4, variant="")
    def reorder(dense: Any, stored: Any, rows: Any, columns: Any, together: Any) -> None:
        base = ptx.shared_address(cuda.shared.array(0, types.uint32))
        front, eights = ptx.u32(cuda.blockIdx.x * together), ptx.u32(columns >> 3)
        here = ptx.min_u32(together, rows - front)
        begin, i = ptx.u64(front) * ptx.u64(eights), ptx.u32(cuda.threadIdx.x)
        while i < ptx.u32(here * eights):
            a, b, c, d = ptx.ldcg128(dense, begin + ptx.u64(i))
            ptx.sts128(ptx.u32(base + i * 16), ptx.u32(0), a, b, c, d)
            i = ptx.u32(i + cuda.blockDim.x)
        cuda.syncthreads()
        gather(dense, stored, base, ptx.u32(columns * 2), front, here, columns)

    return reorder
