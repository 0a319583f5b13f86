"""Where the words of a layout lie, as numbers for the kernel, and the calls of the kernel.

A layout is a `Side`: an array of words and the container they form. A *lane* is what is independent of its neighbours
(an output row; in AWQ words eight of them), a *block* is a run of codes along it that fills whole words.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from bcqfmt.compiled.threads import aligned, each_share

from . import bit_programs as programs
from . import tiles
from .bit_programs import Container, Program
from .expected import Comparison, comparison_of, proofs
from .loop import shuffle

__all__ = ["Side", "codes", "columns", "planes", "rows", "run", "run_in_order"]

Array = npt.NDArray[Any]
Place = tuple[Any, ...]

_TILE = 1 << 17  # words of a tile: it stays in the second cache
_CHUNK = 1 << 13  # words that a program runs through at once: they stay in the first cache
_DEPTH = 64  # blocks of a tile: 256 bytes of a plane, so that stores fill cache lines
_TILE_BOTH, _DEPTH_BOTH = 1 << 16, 128  # there and back: the words of both sides stay there as well
_GRAIN = 16  # lanes: a cache line of words
_WORTH = 1 << 16  # words that are worth a thread
_TILED = frozenset(programs.stream(bits) for bits in tiles.WIDTHS)
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
    comparison: Comparison | None = None  # as a target: its words are compared, not written

    @property
    def place(self) -> Place:
        """Everything but what the words are: equal only for the same memory."""
        numbers = (self.words.ctypes.data, self.words.size, self.lanes, self.blocks, self.lane, self.block)
        return self.container, numbers, self.word.tobytes(), self.last.tobytes()

    def part(self, first: int, stop: int) -> Side:
        """Some of the lanes."""
        return replace(self, words=self.words[first * self.lane :], lanes=stop - first)

    def after(self, block: int) -> Side:
        """Without the first blocks."""
        return replace(self, words=self.words[block * self.block :], blocks=self.blocks - block)

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


@dataclass(frozen=True, eq=False)
class _Way:
    """From some words to others; equal for the same way between the same memory."""

    source: Side
    target: Side
    tail: int

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Way) and self._places() == other._places()

    def __hash__(self) -> int:
        return hash(self._places())

    def _places(self) -> tuple[Place, Place, int]:
        return self.source.place, self.target.place, self.tail


def rows(words: Array, container: Container, blocks: int) -> Side:
    """[R, lanes]: a block is some words of a column, one below the other; the last block may lack some."""
    height, lanes = words.shape
    each = container.words
    word = np.arange(each)
    last = word < height - (blocks - 1) * each
    comparison = comparison_of(words)
    return Side(words.reshape(-1), container, lanes, blocks, 1, each * lanes, word * lanes, last, comparison)


def columns(words: Array, container: Container, blocks: int) -> Side:
    """[lanes, W]: a block is some words of a row; the last block may lack some."""
    lanes, width = words.shape
    each = container.words
    word = np.arange(each)
    last = word < width - (blocks - 1) * each
    return Side(words.reshape(-1), container, lanes, blocks, width, each, word, last, comparison_of(words))


def planes(words: Array) -> Side:
    """[bits, lanes, blocks]."""
    bits, lanes, blocks = words.shape
    word = np.arange(bits) * (lanes * blocks)
    container = programs.plane_words(bits)
    return Side(words.reshape(-1), container, lanes, blocks, blocks, 1, word, np.ones(bits, np.bool_))


def codes(values: Array, container: Container | None = None) -> Side:
    """[lanes, columns] bytes, the number of columns a multiple of four."""
    container = container or programs.stream(8)
    words = values.view(np.uint32)
    return columns(words, container, -(-words.shape[1] // container.words))


def run(source: Side, target: Side, tail: int = 0, threads: int = 1) -> None:
    """Fill or compare the target. ``tail``: codes in the last block if it is not full; bits after them are cleared.

    Where a proof is wanted, the way back is gone with it; where there is one, nothing is left to do.
    """
    proved, comparison = proofs(), target.comparison
    if proved is None:
        _go(source, target, tail, threads)
    elif comparison is None:
        back = _Way(target, source, tail) if proved.wants(source.words) else None
        equal = _go(source, target, tail, threads, back is not None)
        if back is not None:
            proved.add(back, equal)
    else:
        known = proved.of(_Way(source, target, tail))
        if known is None:
            _go(source, target, tail, threads)
        else:
            comparison.equal = comparison.equal and known


def _go(source: Side, target: Side, tail: int = 0, threads: int = 1, back: bool = False) -> bool:
    """Fill or compare, or fill and go ``back`` to compare the source; whether all that was compared was equal."""
    lanes, blocks = _whole_tiles(source, target, tail)
    if not (lanes and blocks):
        return _shuffled(source, target, tail, threads, back)
    equal = [_tiled(source.part(0, lanes), target.part(0, lanes), blocks, threads, back)]
    if blocks < source.blocks:
        below = source.part(0, lanes).after(blocks), target.part(0, lanes).after(blocks)
        equal.append(_shuffled(*below, tail, threads, back))
    if lanes < source.lanes:
        beside = source.part(lanes, source.lanes), target.part(lanes, source.lanes)
        equal.append(_shuffled(*beside, tail, threads, back))
    return all(equal)


def _whole_tiles(source: Side, target: Side, tail: int) -> tuple[int, int]:
    """The lanes and blocks, from the first ones on, that `words_tiles` can do."""
    known = source.container in _TILED and target.container is programs.plane_words(source.container.words)
    if not (known and source.lane == target.block == 1 and target.comparison is None):
        return 0, 0
    full = source.blocks - bool(tail or not source.last.all())
    return source.lanes // tiles.SIDE * tiles.SIDE, full // tiles.SIDE * tiles.SIDE


def _tiled(source: Side, target: Side, blocks: int, threads: int, back: bool) -> bool:
    """The first blocks, whole tiles of them, of all lanes."""
    equal: list[bool] = []

    def work(first: int, stop: int) -> None:
        this, that = source.part(first, stop), target.part(first, stop)
        size = (stop - first) // tiles.SIDE, blocks // tiles.SIDE
        ours = this.words.ctypes.data, 4 * int(this.word[1]), 4 * this.block
        theirs = that.words.ctypes.data, 4 * int(that.word[1]), 4 * that.lane
        equal.append(tiles.tiles(this.container.words, ours, theirs, size, back))

    each_share(work, source.lanes, tiles.SIDE, min(threads, 1 + target.words.size // _WORTH))
    return all(equal)


def _shuffled(source: Side, target: Side, tail: int, threads: int, back: bool) -> bool:
    """The same as :func:`_go`, for any layout and size."""
    if not (source.lanes and source.blocks):
        return True
    forth = _program(source.container, target.container, tail)
    other = _program(target.container, source.container, tail)
    most = max(forth.rows, other.rows) if back else forth.rows
    spare = most if back or target.comparison is not None else 0
    threads = min(threads, 1 + target.words.size // _WORTH)
    depth = _depth(source.blocks, _DEPTH_BOTH if back else _DEPTH)
    width = min((_TILE_BOTH if back else _TILE) // (max(most, 8) * depth), -(-source.lanes // threads))
    width = -(-max(width, 1) // _GRAIN) * _GRAIN
    wrong: list[int] = []

    def work(first: int, stop: int) -> None:
        tile = aligned((most + (spare > 0)) * width * depth, np.uint32)
        this = 4 * source.lane, 4 * source.block, _table(source, forth.source), _table(source, other.target)
        that = 4 * target.lane, 4 * target.block, _table(target, forth.target), _table(target, other.source)
        steps = forth.steps, other.steps, tile, _chunk(forth), _chunk(other)
        size = width, depth, source.blocks, first, stop, spare, 1 + back
        wrong.append(shuffle(source.words, *this, target.words, *that, *steps, *size))

    each_share(work, source.lanes, width, threads)
    equal = not any(wrong)
    if target.comparison is not None and not equal:
        target.comparison.equal = False
    return equal


def run_in_order(source: Side, target: Side, bits: int, order: npt.NDArray[np.uint32], threads: int = 1) -> None:
    """The same, but column j of the target is column ``order[j]`` of the source.

    In between are sheets that have a row for every column, a word of a row being the codes of 8 (or 4) lanes.
    """

    def work(first: int, stop: int) -> None:
        for lane in range(first, stop, _SHEET):
            end = min(lane + _SHEET, stop)
            many = programs.sheet(bits).columns
            middle = end - (end - lane) % many
            if lane < middle:
                through(source.part(lane, middle).together(many), target.part(lane, middle).together(many))
            if middle < end:
                through(source.part(middle, end), target.part(middle, end))

    def through(this: Side, that: Side) -> None:
        taken = np.empty((order.size, this.lanes), np.uint32)
        _go(this, rows(taken, programs.sheet(bits), this.blocks))
        ordered = np.take(taken, order, axis=0, mode="clip")  # every number is in range; "clip" only skips the test
        _go(rows(ordered, programs.sheet(bits), this.blocks), that)

    each_share(work, source.lanes, _SHEET, threads)


def _chunk(program: Program) -> int:
    """Bytes of a row that run through a program at once."""
    return _CHUNK // program.rows // 16 * 64


@cache
def _program(source: Container, target: Container, tail: int) -> Program:
    return programs.program(source, target, tail)


def _depth(blocks: int, most: int) -> int:
    """Blocks of a tile, about as many in every one; whole cache lines where there are several tiles."""
    tiles = -(-blocks // most)
    return blocks if tiles == 1 else -(-blocks // tiles // _GRAIN) * _GRAIN


def _table(side: Side, rows_: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    return np.stack([4 * side.word, rows_, side.last], axis=1).astype(np.uint64)
