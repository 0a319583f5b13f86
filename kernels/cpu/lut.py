"""y = W x by look-up tables, straight from the canonical planes: 16 rows at a time, 16 words of them at a time.

The loop of a tile of 16 rows: 16 words of every plane are transposed so that a vector holds one word of each row, then
looked up nibble by nibble (`lookup`); where a group ends, the sums of its planes are weighed and added up. A tile
depends on no other, so the result does not depend on which thread computes it.

Numbers lie as the loop reads them, float32 ``[tile][group][scale, z][16]`` or ``[tile][group][alpha_0 ..., z][16]``.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from bcqfmt.compiled import intrinsics
from bcqfmt.compiled.loops import compiled, stamp_of

from . import lanes, lookup, machine
from .lanes import LANES, claim, loads, prefetch, stores, transpose, types, zeros
from .lookup import flush, flush_planes, lookups, table

WORD_TABLES = 8 * LANES  # floats in the tables of the 32 columns of a word

_0, _1, _2, _3, _4, _16 = (np.uint64(i) for i in (0, 1, 2, 3, 4, 16))
_128 = np.uint64(WORD_TABLES)
_N = types.uint64
_FLOATS, _ROWS = types.float32[::1], types.float32[:, ::1]
_ROWS_IN = types.Array(types.float32, 2, "C", readonly=True)
_WORDS = types.Array(types.uint32, 1, "C", readonly=True)


@functools.cache
def table_kernel() -> Any:
    """``(x, tables, sums, size)``: tables (batch, words * 128) of x (batch, words * 32), and the sums (batch, groups)
    of every ``size`` columns; all float32.
    """
    stamp = stamp_of(intrinsics, lanes, machine, lookup)

    def fill(x: Any, tables: Any, sums: Any, size: Any) -> None:
        columns, groups = np.uint64(x.shape[1]), np.uint64(sums.shape[1])
        if stamp:
            for b in range(np.uint64(x.shape[0])):
                for c in range(_0, columns, _4):
                    table(x, b * columns + c, tables, (b * columns + c) * _4)
                for group in range(groups):
                    s0 = s1 = s2 = s3 = 0.0  # four independent chains of additions
                    for c in range(group * size, min(group * size + size, columns), _4):
                        s0 += x[b, c]
                        s1 += x[b, c + _1]
                        s2 += x[b, c + _2]
                        s3 += x[b, c + _3]
                    sums[b, group] = (s0 + s1) + (s2 + s3)

    return compiled(fill, types.void, _ROWS_IN, _ROWS, _ROWS, _N)


@functools.cache
def tile_kernel(bits: int, pieces: int, by_plane: bool, vectors: int) -> Any:
    """The loop over tiles for ``bits`` planes.

    ``pieces``: groups in a word, 1 (or less than one), 2 or 4; ``by_plane``: numbers of the second kind above;
    ``vectors``: how many inputs go through a look-up together, 1 or 2; the batch is a multiple of it.
    Arguments: counter uint64[1]; run uint64, the tiles that a thread takes at a time; planes uint32
    (bits * rows * words); rows, words, span (words a group) uint64; tables (batch, words * 128), sums (batch, groups),
    numbers, y (batch, tiles * 16), all float32; more: add to y;
    held uint32 (bits * 256) and totals float32 (batch * (bits + 1) * 16) of the thread's own.
    """
    stamp = stamp_of(intrinsics, lanes, machine, lookup)
    inner = bits * vectors  # vectors of sums within a group, one per plane and input
    nibbles = 8 // pieces
    planes_, pieces_, each = np.uint64(bits), np.uint64(pieces), np.uint64(vectors)
    step = planes_ * _16
    entry = (planes_ + _1 if by_plane else np.uint64(2)) * _16
    done = np.uint64(inner) * _16
    state = done + each * _16

    def loop(
        counter: Any, run: Any, planes: Any, rows: Any, words: Any, span: Any, tables: Any, sums: Any, numbers: Any,
        y: Any, more: Any, held: Any, totals: Any,
    ) -> None:  # fmt: skip
        batch, tiles = np.uint64(y.shape[0]), np.uint64(y.shape[1]) // _16
        groups, stride, plane = np.uint64(sums.shape[1]), np.uint64(tables.shape[1]), rows * words
        tile = ahead = _0
        while stamp:
            if tile == ahead:  # several tiles in a row, so that the tile that is prefetched is mostly this thread's
                tile = claim(counter) * run
                ahead = min(tile + run, tiles)
                if tile >= tiles:
                    break
            top = tile * _16
            count = min(_16, rows - top)
            totals[:] = np.float32(0)
            first = _0
            while first < words:
                stop = min(first + _16, words)
                base = _0
                if words >= _16:
                    base = min(first, words - _16)  # the last block overlaps the one before: no read past the end
                    for i in range(planes_):
                        transpose(planes, i * plane + top * words + base, words, count, held, i * _16, step)
                else:
                    for i in range(planes_):
                        for r in range(_16):
                            at = i * plane + (top + min(r, count - _1)) * words
                            for w in range(words):
                                held[w * step + i * _16 + r] = planes[at + w]
                for b in range(_0, batch, each):
                    place = b // each * state
                    inside = loads(totals, place, inner)
                    result = loads(totals, place + done, vectors)
                    group = first // span
                    left = span - first % span
                    for w in range(first, stop):
                        if b == _0:
                            for i in range(planes_):  # one line a plane of the tile after this one
                                prefetch(planes, i * plane + (top + _16) * words + w * _16, 2)
                        at = (w - base) * step
                        to = b * stride + w * _128
                        if pieces == 1:
                            inside = lookups(inside, held, at, _0, tables, to, stride, bits, 8)
                            left -= _1
                            if left == _0 or w + _1 == words:
                                number = (tile * groups + group) * entry
                                prefetch(numbers, number + groups * entry, 2)
                                to_sum = b * groups + group
                                if by_plane:
                                    result = flush_planes(result, inside, numbers, number, sums, to_sum, groups)
                                else:
                                    result = flush(result, inside, numbers, number, sums, to_sum, groups)
                                inside = zeros(inner)
                                left = span
                                group += _1
                        else:
                            for n in range(pieces_):
                                group = w * pieces_ + n
                                skip = n * np.uint64(nibbles)
                                inside = lookups(
                                    zeros(inner), held, at, skip * _4, tables, to + skip * _16, stride, bits, nibbles
                                )
                                number = (tile * groups + group) * entry
                                prefetch(numbers, number + groups * entry, 2)
                                to_sum = b * groups + group
                                if by_plane:
                                    result = flush_planes(result, inside, numbers, number, sums, to_sum, groups)
                                else:
                                    result = flush(result, inside, numbers, number, sums, to_sum, groups)
                    stores(totals, place, inside)
                    stores(totals, place + done, result)
                first = stop
            for b in range(batch):
                place = b // each * state + done + b % each * _16
                for r in range(_16):
                    if more:
                        y[b, top + r] += totals[place + r]
                    else:
                        y[b, top + r] = totals[place + r]
            tile += _1

    return compiled(
        loop, types.void, types.uint64[::1], _N, _WORDS, _N, _N, _N, _ROWS, _ROWS, _FLOATS, _ROWS, types.boolean,
        types.uint32[::1], _FLOATS,
    )  # fmt: skip
