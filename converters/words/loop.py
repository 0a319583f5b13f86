"""The one compiled loop under every word layout.

``shuffle`` copies 32-bit words from one array to another and rearranges their bits on the way. An array is lanes times
blocks times the words of a block; what happens to the bits is a program (`bit_programs`) that a tile of many lanes and
blocks runs through at once. No layout is known here. The loop is compiled when this file is imported.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bcqfmt.compiled.intrinsics import Emit, intrinsic, ir
from bcqfmt.compiled.loops import compiled, inner, types

SWAP, MOVE, CLEAR, TAIL = range(4)

_BOTH = np.uint64(0x1_0000_0001)  # times a mask of 32 bits: that mask for each of two words
_EIGHT = ir.VectorType(Emit.i32, 8)
# the three rounds of a transpose: which words of two rows become the next two rows
_WORDS = [0, 8, 1, 9, 4, 12, 5, 13], [2, 10, 3, 11, 6, 14, 7, 15]
_PAIRS = [0, 1, 8, 9, 4, 5, 12, 13], [2, 3, 10, 11, 6, 7, 14, 15]
_HALVES = [0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]


@intrinsic
def _transpose(to: Any, to_first: Any, to_step: Any, at: Any, at_first: Any, at_step: Any) -> Any:
    """8 x 8 words: ``to[to_first + to_step * i + j] = at[at_first + at_step * j + i]``."""

    def write(emit: Emit) -> None:
        def row(argument: int, i: int) -> Any:
            first, step = emit.values[argument + 1], emit.values[argument + 2]
            return emit.at(argument, emit.builder.add(first, emit.builder.mul(step, step.type(i))), _EIGHT)

        r = [emit.load(row(3, i)) for i in range(8)]
        r = [emit.shuffle(r[i], r[i + 1], chosen) for i in (0, 2, 4, 6) for chosen in _WORDS]
        r = [emit.shuffle(r[i], r[i + 2], chosen) for i in (0, 1, 4, 5) for chosen in _PAIRS]
        r = [emit.shuffle(r[i], r[i + 4], chosen) for chosen in _HALVES for i in range(4)]
        for i, value in enumerate(r):
            emit.store(value, row(0, i))

    return None, write


@inner
def _copy(
    to: Any, to_first: Any, to_lane: Any, to_block: Any, at: Any, at_first: Any, at_lane: Any, at_block: Any,
    lanes: Any, blocks: Any,
) -> None:  # fmt: skip
    """lanes x blocks words: ``to[to_first + to_lane * i + to_block * j] = at[at_first + at_lane * i + at_block * j]``.

    Eight by eight where neighbours along a lane on one side are neighbours along a block on the other.
    """
    done_lanes = done_blocks = 0
    if (at_lane == 1 and to_block == 1) or (to_lane == 1 and at_block == 1):
        done_lanes, done_blocks = lanes // 8 * 8, blocks // 8 * 8
        to_step = to_lane if to_block == 1 else to_block
        at_step = at_lane if at_block == 1 else at_block
        for j in range(0, done_blocks, 8):
            for i in range(0, done_lanes, 8):
                y, x = to_first + i * to_lane + j * to_block, at_first + i * at_lane + j * at_block
                _transpose(to, y, to_step, at, x, at_step)
    for i in range(lanes):
        y, x = to_first + i * to_lane, at_first + i * at_lane
        if at_block == 1 and to_block == 1:
            row, other = to[y : y + blocks], at[x : x + blocks]
            for j in range(row.size):  # slices, so that numba knows that no index is negative: vector code
                row[j] = other[j]
        else:
            for j in range(done_blocks if i < done_lanes else 0, blocks):
                to[y + j * to_block] = at[x + j * at_block]


@inner
def _swap(x: Any, y: Any, right: Any, mask: Any) -> None:
    """``mask << right`` of the numbers of x changes places with ``mask`` of those of y."""
    for i in range(x.size):
        change = ((x[i] >> right) ^ y[i]) & mask
        y[i] ^= change
        x[i] ^= change << right


@inner
def _move(x: Any, y: Any, right: Any, left: Any, mask: Any) -> None:
    """The numbers of x, shifted and masked, are added to those of y."""
    for i in range(x.size):
        y[i] |= (x[i] >> right << left) & mask


def _shuffle(
    source: Any, source_lane: Any, source_block: Any, source_table: Any, target: Any, target_lane: Any,
    target_block: Any, target_table: Any, steps: Any, tile: Any, words: Any, result: Any, chunk: Any, width: Any,
    depth: Any, blocks: Any, first: Any, stop: Any,
) -> None:  # fmt: skip
    """Words of lanes ``first`` to ``stop`` from ``source`` through ``steps`` to ``target``, both uint32 [any].

    Word w of a block lies at ``table[w, 0]`` + lane * ``source_lane`` + block * ``source_block`` in the source and goes
    to row ``table[w, 1]`` of the tile; ``table[w, 2]``: the last block has it too. The same for the target.
    The tile has rows of ``width`` lanes times ``depth`` blocks; ``words`` is its memory as uint32, ``result`` the same
    read-only (one `_copy` is compiled for both sides), ``tile`` the same as uint64: a step shifts two words at once,
    and its mask removes what crosses between them. ``chunk`` lanes at a time, an even number, run through all steps, so
    that they stay in the first cache. Tables and steps are int64.
    """
    size = width * depth
    for lane in range(first, stop, width):
        lanes = min(width, stop - lane)
        for block in range(0, blocks, depth):
            count = min(depth, blocks - block)
            at_end = block + count == blocks
            for w in range(len(source_table)):
                place = source_table[w, 0] + lane * source_lane + block * source_block
                row, some = source_table[w, 1] * size, count
                if at_end and not source_table[w, 2]:
                    some = count - 1
                    for i in range(lanes):
                        words[row + i * depth + some] = 0
                _copy(words, row, depth, 1, source, place, source_lane, source_block, lanes, some)
            for begin in range(0, lanes, chunk):
                end = min(begin + chunk, width)
                for p in range(len(steps)):
                    kind, right, left, mask = steps[p, 0], np.uint64(steps[p, 3]), np.uint64(steps[p, 4]), steps[p, 5]
                    first_x, first_y = steps[p, 1] * size + begin * depth, steps[p, 2] * size + begin * depth
                    rest = (end - begin) * depth
                    x = tile[first_x // 2 : (first_x + rest) // 2]
                    y = tile[first_y // 2 : (first_y + rest) // 2]
                    if kind == SWAP:
                        _swap(x, y, right, np.uint64(mask) * _BOTH)
                    elif kind == MOVE:
                        _move(x, y, right, left, np.uint64(mask) * _BOTH)
                    elif kind == CLEAR:
                        for i in range(x.size):
                            x[i] = 0
                    elif at_end:  # TAIL: the last block of every lane
                        for i in range(end - begin):
                            words[first_x + i * depth + count - 1] &= np.uint32(mask)
            for w in range(len(target_table)):
                place = target_table[w, 0] + lane * target_lane + block * target_block
                row, some = target_table[w, 1] * size, count - (at_end and not target_table[w, 2])
                _copy(target, place, target_lane, target_block, result, row, depth, 1, lanes, some)


_n, _table = types.int64, types.int64[:, ::1]
_side = _n, _n, _table
_read_only = types.Array(types.uint32, 1, "C", readonly=True)
_arrays = _read_only, *_side, types.uint32[::1], *_side, _table, types.uint64[::1], types.uint32[::1], _read_only
shuffle = compiled(_shuffle, types.void, *_arrays, *(_n,) * 6)
