"""y = W x by dot products (`dots`): x as bytes, then the loop over rows.

A row depends on no other, so the result does not depend on which thread computes it. Numbers lie as the loop reads
them, float32 ``[vector of rows][slot][scale, z][row][per]``, or with a scale for every plane. ``per`` 4 or 2: a slot is
a chunk of 128 columns (or the part of it that one of several groups in a word has), with the number of every word or of
every two. 1: a slot is a group.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from bcqfmt.compiled import intrinsics
from bcqfmt.compiled.loops import compiled, stamp_of
from bcqfmt.compiled.threads import scratch

from . import dots, lanes, machine
from .dots import CHUNK, DIGITS, WORDS, codes, load_sums, multiply, store_sums, with_bias
from .lanes import claim, prefetch, types
from .machine import dot

_0, _1, _2, _3, _4, _8 = (np.uint64(i) for i in (0, 1, 2, 3, 4, 8))
_ROWS, _VECTORS, _TILE = (np.uint64(n) for n in (dot().rows, dot().vectors, dot().tile))
_SUMS = _TILE * _4  # numbers that add up to those of a tile
_NEAR = 3 if dot().rows == 1 else 2  # the cache that lines are asked into: tiles of many rows leave none in the first
_N = types.uint64
_FLOATS = types.float32[::1]
_READ = {kind: types.Array(kind, 1, "C", readonly=True) for kind in (types.float32, types.uint32)}

Digits = tuple[Any, Any, Any]


def digits(x: Any, pieces: int, centre: int) -> Digits:
    """x (batch, chunks * 128) float32 as the loop reads it, in memory of this thread's own.

    For every chunk, vector and piece of a word (``pieces``: groups in it): three times eight vectors of bytes, zero for
    columns of other pieces; -``centre`` times the sums of the upper 16 and the lower 8 bits; four factors, four sums.
    """
    batch, columns = x.shape
    count = batch * columns // CHUNK * pieces
    made = (
        scratch("digits", (count * 8 * DIGITS * 16,), np.int8),
        scratch("starts", (count * 2 * WORDS,), np.int32),
        scratch("factors", (count * 2 * WORDS,), np.float32),
    )
    _digit_kernel()(x, np.uint64(pieces), centre, scratch("wholes", (32,), np.int32), *made)
    return made


@functools.cache
def _digit_kernel() -> Any:
    """``(x, pieces, centre, wholes, bytes, starts, factors)``, see `digits`; wholes: int32 (32)."""

    def fill(x: Any, pieces: Any, centre: Any, wholes: Any, made: Any, starts: Any, factors: Any) -> None:
        if pieces > _1:
            made[:] = np.int8(0)
        width = np.uint64(32) // pieces
        batch, words = np.uint64(x.shape[0]), np.uint64(x.shape[1]) // np.uint64(32)
        for number in range(batch * words):
            vector, word = number // words, number % words
            chunk, lane, first = word // _4 * batch + vector, word % _4, word * np.uint64(32)
            largest = np.int32(0)
            for j in range(32):  # patterns without the sign are in the order of the numbers
                pattern = np.float32(x[vector, first + np.uint64(j)]).view(np.int32)
                largest = max(largest, np.int32(pattern & np.int32(0x7FFFFFFF)))
            finite = largest < np.int32(0x7F800000)
            # |x| * 2^up is less than 127 * (2^16 + 2^8 + 1), the largest number of three signed bytes.
            # For the tiniest x it is less, so that factors are not rounded to zero.
            exponent: Any = (np.float64(np.int32(largest).view(np.float32) * 1.005).view(np.int64) >> 52 & 2047) - 1022
            up: Any = min(23 - exponent, 123) if finite else np.int64(0)
            scale = np.float32(np.int64((up + 1023) << 52).view(np.float64))
            for j in range(32):
                value = x[vector, first + np.uint64(j)] if finite else np.float32(0)
                wholes[j] = np.int32(np.rint(value * scale))
            for n in range(pieces):
                at = chunk * pieces + n
                total = low = np.int32(0)
                for j in range(n * width, n * width + width):
                    whole = wholes[j]
                    raised = whole + np.int32(0x8080)  # so that no byte is borrowed from
                    signed = raised ^ np.int32(0x8080)
                    total, low = total + whole, low + np.int32(np.int8(signed))
                    place = at * np.uint64(384) + j % _8 * np.uint64(16) + lane * _4 + j // _8
                    made[place] = np.int8(signed >> np.int32(16))
                    made[place + np.uint64(128)] = np.int8(signed >> np.int32(8))
                    made[place + np.uint64(256)] = np.int8(signed)
                starts[at * _8 + lane] = -centre * ((total - low) >> np.int32(8))
                starts[at * _8 + _4 + lane] = -centre * low
                factor = np.int64((1023 - up) << 52).view(np.float64)
                factors[at * _8 + lane] = factor if finite else np.nan
                factors[at * _8 + _4 + lane] = total * factor if finite else np.nan

    return compiled(
        fill, types.void, types.Array(types.float32, 2, "C", readonly=True), _N, types.int32, types.int32[::1],
        types.int8[::1], types.int32[::1], _FLOATS,
    )  # fmt: skip


@functools.cache
def row_kernel(
    bits: int, pieces: int, by_plane: bool, per: int, single: bool, whole: bool, looked: bool = False
) -> Any:
    """The loop over rows for ``bits`` planes.

    ``pieces``: groups in a word, 1 (or less than one), 2 or 4; ``by_plane``: a scale for every plane; ``per``: see
    above; ``single``: the batch is 1; ``whole``: rows end with a whole chunk; ``looked``: codes stand for the bytes of
    a table. Arguments: counter uint64[1]; run, the rows that a thread takes at a time, whole tiles; planes uint32 (bits
    * rows * words); rows, words, span (chunks of a group) uint64; the three arrays of `digits`; numbers float32, of
    whole tiles; y (batch, rows or more) float32; more: add to y; held uint32 (rows of a tile * 8 * 4) and totals
    float32 (batch * rows of a tile * 4) of the thread's own; table int8 (16, or none).
    """
    stamp = stamp_of(intrinsics, lanes, machine, dots)
    by_table, wide = int(looked), 8 if looked else (1 if by_plane else bits)
    sets, each = (bits, 1) if by_plane else (1, bits)
    sets_, each_, pieces_, per_ = (np.uint64(n) for n in (sets, each, pieces, per))
    per_ = per_ * _ROWS
    kinds = (sets_ + _1) * per_

    def loop(
        counter: Any, run: Any, planes: Any, rows: Any, words: Any, span: Any, x: Any, starts: Any,
        factors: Any, numbers: Any, y: Any, more: Any, held: Any, totals: Any, table: Any,
    ) -> None:  # fmt: skip
        batch, chunks, plane = _1 if single else np.uint64(y.shape[0]), (words + _3) // _4, rows * words
        gap = np.uint64(numbers.size) // ((rows + _TILE - _1) // _TILE * _VECTORS)
        while stamp:
            top = claim(counter) * run
            if top >= rows:
                break
            for r in range(top, min(top + run, rows), _TILE):
                count = min(_TILE, rows - r)
                totals[:] = np.float32(0)
                sums = load_sums(totals, _0)
                group, left = _0, span
                for c in range(chunks):
                    short = not whole and c * _4 + _4 > words
                    for i in range(sets_):
                        at = (i * rows + r) * words + c * _4
                        if short:  # nothing is read beyond the last word
                            for t in range(_TILE):
                                for k in range(each_):
                                    for w in range(_4):
                                        place = at + min(t, count - _1) * words + k * plane + w
                                        there = c * _4 + w < words
                                        held[(t * each_ + k) * _4 + w] = planes[place] if there else np.uint32(0)
                        if c % _4 == _0:
                            for k in range(each_):  # the line that these rows' successors begin at
                                for t in range(_TILE, _TILE + _TILE):
                                    prefetch(planes, at + k * plane + t * words, _NEAR)
                        found = codes(planes, at, plane, words, count, held, short, each, table, by_table)
                        for b in range(batch):
                            if not single:
                                sums = load_sums(totals, b * _SUMS)
                            for n in range(pieces_):
                                slot = group if per == 1 else c * pieces_ + n
                                piece = (c * batch + b) * pieces_ + n
                                number = r // _ROWS * gap + slot * kinds
                                if i == _0:
                                    bias = number + sets_ * per_
                                    sums = with_bias(sums, factors, piece, numbers, bias, gap, per)
                                number += i * per_
                                sums = multiply(
                                    sums, found, x, starts, factors, piece, numbers, number, gap, wide, per,
                                )  # fmt: skip
                            if not single:
                                store_sums(totals, b * _SUMS, sums)
                    left -= _1
                    if left == _0:
                        group, left = group + _1, span
                if single:  # they were in registers until now
                    store_sums(totals, _0, sums)
                for b in range(batch):
                    for k in range(count):
                        at = b * _SUMS + k * _4
                        total = (totals[at] + totals[at + _1]) + (totals[at + _2] + totals[at + _3])
                        y[b, r + k] = y[b, r + k] + total if more else total

    return compiled(
        loop, types.void, types.uint64[::1], _N, _READ[types.uint32], _N, _N, _N, types.int8[::1],
        types.int32[::1], _FLOATS, _FLOATS, types.float32[:, ::1], types.boolean, types.uint32[::1], _FLOATS,
        types.Array(types.int8, 1, "C", readonly=True),
    )  # fmt: skip
