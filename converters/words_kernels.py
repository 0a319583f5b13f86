"""The one compiled loop under every word layout.

``shuffle`` copies 32-bit words from one array to another and rearranges their bits on the way. An array is lanes times
blocks times the words of a block; what happens to the bits is a program (`words_programs`) that a tile of many lanes
and blocks runs through at once. No layout is known here.

The loop releases the GIL, is compiled at import (explicit signature) and cached by numba: in NUMBA_CACHE_DIR if that is
set, else beside this file, else in the user's cache folder, else (nothing writable) not at all.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numba
import numpy as np
from numba import types

__all__ = ["CLEAR", "MOVE", "SWAP", "TAIL", "each_share", "shuffle"]

SWAP, MOVE, CLEAR, TAIL = range(4)

# Indices are unsigned throughout: numba then needs no test for negative ones, and the loops become vector code.
_0, _1, _2, _3, _4 = (np.uintp(i) for i in range(5))


def _copy(
    target: Any,
    to: Any,
    to_outer: Any,
    to_inner: Any,
    source: Any,
    at: Any,
    at_outer: Any,
    at_inner: Any,
    outer: Any,
    inner: Any,
) -> None:
    """outer x inner words from one pair of strides to another; one of the inner strides is 1."""
    done = _0
    if at_inner == _1 and to_outer == _1:
        done = outer - outer % _4
        for i in range(_0, done, _4):  # four rows at once: each column of them is a run in the target
            x0 = at + i * at_outer
            x1 = x0 + at_outer
            x2 = x1 + at_outer
            x3 = x2 + at_outer
            for j in range(inner):
                y = to + i + j * to_inner
                target[y] = source[x0 + j]
                target[y + _1] = source[x1 + j]
                target[y + _2] = source[x2 + j]
                target[y + _3] = source[x3 + j]
    for i in range(done, outer):
        x = at + i * at_outer
        y = to + i * to_outer
        if at_inner == _1 and to_inner == _1:
            for j in range(inner):
                target[y + j] = source[x + j]
        elif to_inner == _1:
            for j in range(inner):
                target[y + j] = source[x + j * at_inner]
        else:
            for j in range(inner):
                target[y + j * to_inner] = source[x + j]


def _shuffle(
    source: Any,
    source_lane: Any,
    source_block: Any,
    source_words: Any,
    target: Any,
    target_lane: Any,
    target_block: Any,
    target_words: Any,
    steps: Any,
    pairs: Any,
    tile: Any,
    chunk: Any,
    width: Any,
    depth: Any,
    blocks: Any,
    first: Any,
    stop: Any,
) -> None:
    """Lanes first..stop. Rows of ``source_words`` and ``target_words``: offset, row of the tile, in the last block too?

    The tile has rows of ``width`` lanes times ``depth`` blocks; word (lane, block) is item lane * depth + block. Its
    memory as 64-bit numbers is ``pairs``: a shift shifts two words, and the masks remove what crosses between them.
    """
    size = width * depth
    half = size // _2
    for lane in range(first, stop, width):
        lanes = min(width, stop - lane)
        for block in range(_0, blocks, depth):
            count = min(depth, blocks - block)
            ends = block + count == blocks
            for w in range(source_words.shape[0]):
                at = source_words[w, 0] + lane * source_lane + block * source_block
                row = source_words[w, 1] * size
                some = count
                if ends and source_words[w, 2] == _0:
                    some = count - _1
                    for i in range(lanes):
                        tile[row + i * depth + some] = 0
                outer, inner, to_outer, to_inner, at_outer, at_inner = lanes, some, depth, _1, source_lane, source_block
                if source_lane == _1:
                    outer, inner, to_outer, to_inner, at_outer, at_inner = some, lanes, _1, depth, source_block, _1
                _move(tile, row, to_outer, to_inner, source, at, at_outer, at_inner, outer, inner)
            for start in range(_0, half, chunk):
                rest = min(chunk, half - start)
                for p in range(steps.shape[0]):
                    kind = steps[p, 0]
                    x = steps[p, 1] * half + start
                    y = steps[p, 2] * half + start
                    right = steps[p, 3]
                    left = steps[p, 4]
                    mask = steps[p, 5]
                    if kind == SWAP:
                        for i in range(rest):
                            differ = ((pairs[x + i] >> right) ^ pairs[y + i]) & mask
                            pairs[y + i] ^= differ
                            pairs[x + i] ^= differ << right
                    elif kind == MOVE:
                        for i in range(rest):
                            pairs[y + i] |= ((pairs[x + i] >> right) << left) & mask
                    elif kind == CLEAR:
                        for i in range(rest):
                            pairs[x + i] = _0
                    elif ends:  # TAIL: the last block of every lane that is in this chunk
                        for i in range(lanes):
                            item = i * depth + count - _1
                            if start <= item // _2 < start + rest:
                                tile[steps[p, 1] * size + item] &= np.uint32(mask)
            for w in range(target_words.shape[0]):
                to = target_words[w, 0] + lane * target_lane + block * target_block
                row = target_words[w, 1] * size
                some = count
                if ends and target_words[w, 2] == _0:
                    some = count - _1
                outer, inner, to_outer, to_inner, at_outer, at_inner = lanes, some, target_lane, target_block, depth, _1
                if target_lane == _1:
                    outer, inner, to_outer, to_inner, at_outer, at_inner = some, lanes, target_block, _1, _1, depth
                _move(target, to, to_outer, to_inner, tile, row, at_outer, at_inner, outer, inner)


def _compiled(function: Callable[..., None], *arguments: Any) -> Callable[..., None]:
    signature = types.void(*arguments)
    try:
        kernel: Callable[..., None] = numba.njit(signature, nogil=True, cache=True)(function)
    except RuntimeError:  # numba finds no folder that it could write a cache to
        kernel = numba.njit(signature, nogil=True)(function)
    return kernel


_N = types.uint64
_TABLE = types.Array(_N, 2, "C", readonly=True)
_WORDS_IN = types.Array(types.uint32, 1, "C", readonly=True)
_WORDS = types.uint32[::1]
_move = _compiled(_copy, _WORDS, _N, _N, _N, _WORDS_IN, _N, _N, _N, _N, _N)
shuffle = _compiled(
    _shuffle,
    *(_WORDS_IN, _N, _N, _TABLE),
    *(_WORDS, _N, _N, _TABLE),
    *(_TABLE, types.uint64[::1], _WORDS),
    *(_N,) * 6,
)


def each_share(work: Callable[[int, int], None], count: int, grain: int, threads: int) -> None:
    """``work(first, stop)`` over 0..count in at most ``threads`` shares that begin at multiples of ``grain``."""
    share = -(-count // (grain * max(threads, 1))) * grain
    if share >= count:
        work(0, count)
        return
    starts = range(share, count, share)
    with ThreadPoolExecutor(len(starts)) as pool:
        others = [pool.submit(work, first, min(first + share, count)) for first in starts]
        work(0, share)
        for other in others:
            other.result()
