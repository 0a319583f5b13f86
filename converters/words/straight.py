"""Bit programs as straight code: for codes that lie in blocks among other fields, at any byte, and for GPTQ's words.

The loop of `loop` carries out any program step by step, in memory. Here a program is compiled as a whole: four units
(runs of codes that fill whole words) are loaded, all steps happen in registers, and the plane words are stored. One
function per program and direction, compiled when it is first needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any, Final

from bcqfmt.compiled import intrinsics
from bcqfmt.compiled.intrinsics import Emit, intrinsic, ir
from bcqfmt.compiled.loops import compiled, stamp_of, types

from . import bit_programs as programs
from .bit_programs import Container

UNITS: Final = 4  # that are worked on at once
ORDERS: Final = ("halves", "quarters", "nibbles", "far nibbles", "pairs", "bits", "stream 1", "stream 2", "stream 8")
_FOUR = ir.VectorType(Emit.i32, UNITS)
_STRIP: Final = 256  # units that are rebuilt from their planes while both are in the cache
_LANES: Final = 32  # lanes that take turns at a run of four blocks: whole cache lines of words


@cache
def container(order: str) -> Container:
    """The program of an order of codes, one of ``ORDERS``: exchanges only."""
    kind, _, bits = order.partition(" ")
    return programs.stream(int(bits)) if kind == "stream" else programs.gguf(order)


class _Words(Emit):
    """Words of four units as vectors, one vector for every word of a unit."""

    def plus(self, index: Any, offset: int) -> Any:
        return self.builder.add(index, index.type(offset))

    def columns(self, rows: list[Any]) -> list[Any]:
        """Four rows of 4 or 2 words to as many columns of four."""
        if rows[0].type.count == 2:
            a, b = (self.shuffle(rows[i], rows[i + 1], [0, 1, 2, 3]) for i in (0, 2))
            return [self.shuffle(a, b, chosen) for chosen in ([0, 2, 4, 6], [1, 3, 5, 7])]
        low = [self.shuffle(rows[i], rows[i + 1], [0, 4, 1, 5]) for i in (0, 2)]
        high = [self.shuffle(rows[i], rows[i + 1], [2, 6, 3, 7]) for i in (0, 2)]
        return [self.shuffle(a, b, chosen) for a, b in (low, high) for chosen in ([0, 1, 4, 5], [2, 3, 6, 7])]

    def rows(self, columns: list[Any]) -> list[Any]:
        """The inverse of ``columns``."""
        if len(columns) == 4:
            return self.columns(columns)
        pairs = [self.shuffle(columns[0], columns[1], chosen) for chosen in ([0, 4, 1, 5], [2, 6, 3, 7])]
        return [self.shuffle(pair, pair, chosen) for pair in pairs for chosen in ([0, 1], [2, 3])]

    def taken(self, array: int, places: list[Any], count: int, word: int) -> list[Any]:
        """``count`` words of each of four units that begin at ``places``; ``word``: array elements of a word."""
        if count == 1:
            found = ir.Constant(_FOUR, ir.Undefined)
            for i, place in enumerate(places):
                one = self.load(self.at(array, place, self.i32), 4 // word)
                found = self.builder.insert_element(found, one, self.i32(i))
            return [found]
        few = min(count, 4)
        kind, result = ir.VectorType(self.i32, few), []
        for w in range(0, count, few):
            loaded = [self.load(self.at(array, self.plus(place, w * word), kind), 4 // word) for place in places]
            result += self.columns(loaded)
        return result

    def put(self, vectors: list[Any], array: int, places: list[Any], word: int) -> None:
        """The inverse of ``taken``."""
        if len(vectors) == 1:
            for i, place in enumerate(places):
                one = self.builder.extract_element(vectors[0], self.i32(i))
                self.store(one, self.at(array, place, self.i32), 4 // word)
            return
        few = min(len(vectors), 4)
        for w in range(0, len(vectors), few):
            for row, place in zip(self.rows(vectors[w : w + few]), places, strict=True):
                self.store(row, self.at(array, self.plus(place, w * word), row.type), 4 // word)

    def steps(self, rows: list[Any], steps: Any) -> None:
        """Carry out exchanges."""
        for step in steps:
            x, y = rows[step.x], rows[step.y]
            if step.right in (8, 16):  # whole bytes or halves of words: a shuffle
                kind = ir.VectorType(ir.IntType(step.right), 32 * UNITS // step.right)
                a, b = (self.builder.bitcast(one, kind) for one in (x, y))
                for row, odd in ((step.x, 0), (step.y, 1)):
                    lanes = [i + odd + side for i in range(0, kind.count, 2) for side in (0, kind.count)]
                    rows[row] = self.builder.bitcast(self.shuffle(a, b, lanes), _FOUR)
                continue
            right = ir.Constant(_FOUR, [step.right] * UNITS)
            rows[step.y] = self.chosen(step.mask, self.builder.lshr(x, right), y)
            rows[step.x] = self.chosen(step.mask << step.right, self.builder.shl(y, right), x)

    def chosen(self, mask: int, a: Any, b: Any) -> Any:
        """Bits of ``a`` where ``mask`` has ones, of ``b`` elsewhere: one instruction of ARM."""
        ones, zeros = (ir.Constant(_FOUR, [number & 0xFFFFFFFF] * UNITS) for number in (mask, ~mask))
        return self.builder.or_(self.builder.and_(a, ones), self.builder.and_(b, zeros))

    def plane_places(self, at: Any, plane: Any, bits: int, columns: int) -> list[list[Any]]:
        """For each plane, the most significant first, where the words of the four units begin."""
        first = [self.steps_on(at, plane, i) for i in range(bits)]
        return [[self.plus(one, columns * i) for i in range(UNITS)] for one in first]

    def word_places(self, words: int) -> list[list[Any]]:
        """Of each of four blocks, where its words for four lanes are; the arguments are those of ``_rows_there``."""
        at, row = self.values[2:4]
        return [[self.steps_on(at, row, j * words + i) for i in range(words)] for j in range(UNITS)]

    def lane_places(self, bits: int) -> list[list[Any]]:
        """Of each plane, where the words of the four blocks begin, lane after lane."""
        to, plane, lane = self.values[5:8]
        return [[self.steps_on(self.steps_on(to, plane, i), lane, j) for j in range(UNITS)] for i in range(bits)]

    def rebuilt(self, program: Container) -> Iterator[tuple[Any, Any]]:
        """The words of four blocks of four lanes, made from their planes, with the place of each."""
        blocks: list[list[Any]] = [[None] * program.words for _ in range(UNITS)]
        for i, places in enumerate(self.lane_places(program.words)):
            found = self.columns([self.load(self.at(4, one, _FOUR)) for one in places])
            for block, vector in zip(blocks, found, strict=True):
                block[program.ends[0, program.words - 1 - i]] = vector
        for block, words in zip(blocks, self.word_places(program.words), strict=True):
            self.steps(block, reversed(program.steps))
            yield from ((vector, self.at(1, one, _FOUR)) for vector, one in zip(block, words, strict=True))

    def unit_words(self, program: Container, flip: int) -> list[Any]:
        """The words of four units, made from their planes; the arguments are those of ``_there``."""
        rows: list[Any] = [None] * program.words
        bits, columns = len(program.ends) // program.columns, program.columns
        for i, places in enumerate(self.plane_places(self.values[8], self.values[9], bits, columns)):
            found = self.taken(7, places, columns, 1) if columns > 1 else [self.load(self.at(7, places[0], _FOUR))]
            for column, vector in enumerate(found):
                rows[program.ends[column, bits - 1 - i]] = self.flipped(vector, flip and i == 0)
        self.steps(rows, reversed(program.steps))
        return rows

    def difference(self, pairs: Iterable[tuple[Any, Any]]) -> Any:
        """Not zero if the vectors of a pair differ."""
        found = ir.Constant(_FOUR, [0] * UNITS)
        for a, b in pairs:
            found = self.builder.or_(found, self.builder.xor(a, b))
        halves = self.builder.bitcast(found, ir.VectorType(self.i64, 2))
        return self.builder.or_(*(self.builder.extract_element(halves, self.i32(i)) for i in range(2)))

    def steps_on(self, index: Any, step: Any, count: int) -> Any:
        return self.builder.add(index, self.builder.mul(step, step.type(count)))

    def flipped(self, vector: Any, flip: int) -> Any:
        return self.builder.xor(vector, ir.Constant(_FOUR, [0xFFFFFFFF] * UNITS)) if flip else vector


def _there(order: Any, flip: Any, blocks: Any, a: Any, b: Any, c: Any, d: Any, planes: Any, at: Any, plane: Any) -> Any:
    """Four units that begin at the bytes a, b, c, d of ``blocks`` to the words from ``at`` on of all planes."""
    program = container(ORDERS[order.literal_value])
    bits = len(program.ends) // program.columns

    def write(emit: _Words) -> None:
        rows = emit.taken(2, emit.values[3:7], program.words, 4)
        emit.steps(rows, program.steps)
        for i, places in enumerate(emit.plane_places(emit.values[8], emit.values[9], bits, program.columns)):
            found = [rows[program.ends[column, bits - 1 - i]] for column in range(program.columns)]
            found = [emit.flipped(vector, flip.literal_value and i == 0) for vector in found]
            if len(found) == 1:
                emit.store(found[0], emit.at(7, places[0], _FOUR))
            else:
                emit.put(found, 7, places, 1)

    return None, write


def _back(order: Any, flip: Any, blocks: Any, a: Any, b: Any, c: Any, d: Any, planes: Any, at: Any, plane: Any) -> Any:
    """The inverse of ``_there``."""

    def write(emit: _Words) -> None:
        rows = emit.unit_words(container(ORDERS[order.literal_value]), flip.literal_value)
        emit.put(rows, 2, emit.values[3:7], 4)

    return None, write


def _differ(
    order: Any, flip: Any, blocks: Any, a: Any, b: Any, c: Any, d: Any, planes: Any, at: Any, plane: Any
) -> Any:
    """Not zero where the units are others than ``_back`` would store."""
    program = container(ORDERS[order.literal_value])

    def write(emit: _Words) -> Any:
        rebuilt = emit.unit_words(program, flip.literal_value)
        return emit.difference(zip(rebuilt, emit.taken(2, emit.values[3:7], program.words, 4), strict=True))

    return types.int64, write


def _rows_there(bits: Any, words: Any, at: Any, row: Any, planes: Any, to: Any, plane: Any, lane: Any) -> Any:
    """Four blocks of four lanes: words from ``at`` on, ``row`` apart, to the words of all planes from ``to`` on."""
    program = programs.stream(bits.literal_value)

    def write(emit: _Words) -> None:
        blocks = []
        for place in emit.word_places(program.words):
            blocks.append([emit.load(emit.at(1, one, _FOUR)) for one in place])
            emit.steps(blocks[-1], program.steps)
        for i, places in enumerate(emit.lane_places(program.words)):
            found = emit.columns([block[program.ends[0, program.words - 1 - i]] for block in blocks])
            for vector, one in zip(found, places, strict=True):
                emit.store(vector, emit.at(4, one, _FOUR))

    return None, write


def _rows_back(bits: Any, words: Any, at: Any, row: Any, planes: Any, to: Any, plane: Any, lane: Any) -> Any:
    """The inverse of ``_rows_there``."""

    def write(emit: _Words) -> None:
        for vector, place in emit.rebuilt(programs.stream(bits.literal_value)):
            emit.store(vector, place)

    return None, write


def _rows_differ(bits: Any, words: Any, at: Any, row: Any, planes: Any, to: Any, plane: Any, lane: Any) -> Any:
    """Not zero where the words are others than ``_rows_back`` would store."""

    def write(emit: _Words) -> Any:
        rebuilt = emit.rebuilt(programs.stream(bits.literal_value))
        return emit.difference((vector, emit.load(place)) for vector, place in rebuilt)

    return types.int64, write


there, back, differ, rows_there, rows_back, rows_differ = (
    intrinsic(function, _Words) for function in (_there, _back, _differ, _rows_there, _rows_back, _rows_differ)
)


@cache
def straight(order: str, flip: bool, to_planes: bool, proved: bool = False) -> Callable[..., int]:
    """The loop of an order; ``flip``: the highest plane is stored inverted; ``proved``: see `straight_rows`.

    Arguments: blocks uint8 and planes uint32, both flat; words of a plane; the byte of a block where the field begins;
    bytes of a block; log2 of the units of a field; units, at least four.
    """
    stamp = stamp_of(intrinsics, programs)
    number, inverted, columns = ORDERS.index(order), int(flip), container(order).columns
    size, passes = 4 * container(order).words, 2 if proved else 1

    def loop(blocks: Any, planes: Any, plane: Any, offset: Any, block: Any, shift: Any, units: Any) -> Any:
        wrong, inside = 0, (1 << shift) - 1
        for strip in range(0, units if stamp else 0, _STRIP):
            for again in range(passes):
                for begin in range(strip, min(strip + _STRIP, units), 4):
                    u = min(begin, units - 4)  # the last four overlap those before, and store the same words
                    a = (u >> shift) * block + offset + (u & inside) * size
                    b = (u + 1 >> shift) * block + offset + (u + 1 & inside) * size
                    c = (u + 2 >> shift) * block + offset + (u + 2 & inside) * size
                    d = (u + 3 >> shift) * block + offset + (u + 3 & inside) * size
                    if not to_planes:
                        back(number, inverted, blocks, a, b, c, d, planes, u * columns, plane)
                    elif again == 0:
                        there(number, inverted, blocks, a, b, c, d, planes, u * columns, plane)
                    else:
                        wrong |= differ(number, inverted, blocks, a, b, c, d, planes, u * columns, plane)
        return wrong

    read_only = types.uint8 if to_planes else types.uint32
    source = types.Array(read_only, 1, "C", readonly=True)
    arrays = (source, types.uint32[::1]) if to_planes else (types.uint8[::1], source)
    return compiled(loop, types.int64, *arrays, *(types.int64,) * 5)


@cache
def straight_rows(bits: int, to_planes: bool, proved: bool = False) -> Callable[..., int]:
    """The loop of LE(bits) words [blocks * bits, lanes]; 2, 4 or 8 bits, at least four lanes and blocks.

    Arguments: words and planes uint32, both flat; lanes; words from one plane to the next and from one lane to the
    next; blocks; the first lane and the one after the last. ``proved``: words are rebuilt from the stored planes while
    these are in the cache; the result is not zero if they differ.
    """
    stamp = stamp_of(intrinsics, programs)

    def loop(words: Any, planes: Any, row: Any, plane: Any, lane: Any, blocks: Any, first: Any, stop: Any) -> Any:
        wrong = 0
        for begin in range(first, stop if stamp else first, _LANES):
            for again in range(2 if proved else 1):
                for block in range(0, blocks, 4):
                    b = min(block, blocks - 4)  # the last four overlap those before, and store the same words
                    for one in range(begin, min(begin + _LANES, stop), 4):
                        n = min(one, stop - 4)
                        at, to = b * bits * row + n, n * lane + b
                        if not to_planes:
                            rows_back(bits, words, at, row, planes, to, plane, lane)
                        elif again == 0:
                            rows_there(bits, words, at, row, planes, to, plane, lane)
                        else:
                            wrong |= rows_differ(bits, words, at, row, planes, to, plane, lane)
        return wrong

    source, target = types.Array(types.uint32, 1, "C", readonly=True), types.uint32[::1]
    arrays = (source, target) if to_planes else (target, source)
    return compiled(loop, types.int64, *arrays, *(types.int64,) * 6)
