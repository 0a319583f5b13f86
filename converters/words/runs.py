"""Where the words of a layout lie, as numbers for the loop, and the calls of the loop.

A layout is a `Side`: an array of words and the container they form. A *lane* is what is independent of its neighbours
(an output row; in AWQ words eight of them), a *block* is a run of codes along it that fills whole words.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from bcqfmt.compiled.threads import aligned, each_share

from . import bit_programs as programs
from .arrays import flat
from .bit_programs import Container
from .loop import shuffle

Array = npt.NDArray[Any]

_TILE = 1 << 16  # words of a tile: it stays in the second cache
_CHUNK = 1 << 13  # words that a program runs through at once: they stay in the first cache
_DEPTH = 128  # blocks of a tile: 512 bytes of a plane, so that stores fill cache lines
_GRAIN = 16  # lanes, or blocks: a cache line of words
_WORTH = 1 << 16  # words that are worth a thread
_SHEET = 256  # lanes whose columns are put in order at once


@dataclass(frozen=True)
class Side:
    """Word w of block k of lane n is words[n * lane + k * block + word[w]]; last[w]: it exists in the last block."""

    words: npt.NDArray[np.uint32]  # one-dimensional
    container: Container
    lanes: int
    blocks: int
    lane: int
    block: int
    word: npt.NDArray[np.int64]
    last: npt.NDArray[np.bool_]

    def part(self, first: int, stop: int) -> Side:
        """Some of the lanes."""
        return replace(self, words=self.words[first * self.lane :], lanes=stop - first)

    def together(self, count: int) -> Side:
        """The same words, ``count`` lanes taken as one; their number must be a multiple."""
        word = (np.arange(count)[:, None] * self.lane + self.word).reshape(-1)
        return replace(
            self,
            container=programs.together(self.container, count),
            lanes=self.lanes // count,
            lane=self.lane * count,
            word=word,
            last=np.tile(self.last, count),
        )

    def table(self, tile_rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """For the loop: place, row of the tile and ``last`` of every word."""
        return np.stack([self.word, tile_rows, self.last], axis=1).astype(np.int64)


def rows(words: Array, container: Container, blocks: int) -> Side:
    """[R, lanes]: a block is some words of a column, one below the other; the last block may lack some."""
    height, lanes = words.shape
    each = container.words
    word = np.arange(each)
    last = word < height - (blocks - 1) * each
    memory, row = flat(words)
    return Side(memory, container, lanes, blocks, 1, each * row, word * row, last)


def columns(words: Array, container: Container, blocks: int) -> Side:
    """[lanes, W]: a block is some words of a row; the last block may lack some."""
    lanes, width = words.shape
    each = container.words
    word = np.arange(each)
    last = word < width - (blocks - 1) * each
    return Side(words.reshape(-1), container, lanes, blocks, width, each, word, last)


def planes(words: Array) -> Side:
    """[bits, lanes, blocks]; the blocks of a lane side by side."""
    bits, lanes, blocks = words.shape
    word, every = np.arange(bits) * lanes * blocks, np.ones(bits, np.bool_)
    return Side(words.reshape(-1), programs.plane_words(bits), lanes, blocks, blocks, 1, word, every)


def codes(values: Array, container: Container | None = None) -> Side:
    """[lanes, columns] bytes, the number of columns a multiple of four."""
    container = container or programs.stream(8)
    words = values.view(np.uint32)
    return columns(words, container, -(-words.shape[1] // container.words))


def run(source: Side, target: Side, tail: int = 0, threads: int = 1) -> None:
    """Fill the target. ``tail``: codes in the last block if it is not full; bits after them are cleared."""
    if not (source.lanes and source.blocks):
        return
    program = programs.program(source.container, target.container, tail)
    threads = min(threads, 1 + target.words.size // _WORTH)
    depth = _depth(source.blocks)
    width = min(_TILE // (max(program.rows, 8) * depth), -(-source.lanes // threads))
    width = -(-max(width, 1) // _GRAIN) * _GRAIN
    chunk = max(_CHUNK // (program.rows * depth) // 2 * 2, 2)
    this = source.words, source.lane, source.block, source.table(program.source)
    that = target.words, target.lane, target.block, target.table(program.target)

    def work(first: int, stop: int) -> None:
        tile = aligned(program.rows * width * depth // 2, np.uint64)
        words = tile.view(np.uint32)
        shuffle(*this, *that, program.steps, tile, words, words, chunk, width, depth, source.blocks, first, stop)

    each_share(work, source.lanes, width, threads)


def run_in_order(source: Side, target: Side, bits: int, order: npt.NDArray[np.uint32], threads: int = 1) -> None:
    """The same, but column j of the target is column ``order[j]`` of the source.

    In between are sheets that have a row for every column, a word of a row being the codes of 8 (or 4) lanes.
    """
    sheet = programs.sheet(bits)

    def work(first: int, stop: int) -> None:
        for lane in range(first, stop, _SHEET):
            end = min(lane + _SHEET, stop)
            middle = end - (end - lane) % sheet.columns
            if lane < middle:
                through(*(side.part(lane, middle).together(sheet.columns) for side in (source, target)))
            if middle < end:
                through(source.part(middle, end), target.part(middle, end))

    def through(this: Side, that: Side) -> None:
        taken = np.empty((order.size, this.lanes), np.uint32)
        run(this, rows(taken, sheet, this.blocks))
        ordered = np.take(taken, order, axis=0, mode="clip")  # every number is in range; "clip" only skips the test
        run(rows(ordered, sheet, this.blocks), that)

    each_share(work, source.lanes, _SHEET, threads)


def _depth(blocks: int) -> int:
    """Blocks of a tile, about as many in every one; whole cache lines where there are several tiles."""
    tiles = -(-blocks // _DEPTH)
    return blocks if tiles == 1 else -(-blocks // tiles // _GRAIN) * _GRAIN
