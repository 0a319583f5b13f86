"""GPTQ words of 2, 4 and 8 bits to planes, and back to compare: sixteen lanes by sixteen blocks, in registers.

What `words_shuffle` does for every layout by way of memory, for the one that most checkpoints have: neighbours are
lanes on one side and blocks on the other, and bits only change places. The program (`words_programs` explains it) is a
part of the loop here, so each width has its own, compiled when first needed. Only whole tiles can be done like this,
and only what begins with words: the way back alone, to words that are far apart, is no faster than with a tile.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]

from bcqfmt.compiled.loops import compiled, operation, repeated, types
from bcqfmt.compiled.threads import aligned

__all__ = ["SIDE", "WIDTHS", "tiles"]

SIDE = 16  # lanes, and blocks, of a tile
_STRIP = 4  # tiles side by side, whose planes are made in the cache and written all at once
# Which digit of the number of a word changes places with which of the number of a bit, and the words that planes end in
_PROGRAMS = {
    2: (((0, 4), (0, 3), (0, 2), (0, 1), (0, 0)), (1, 0)),
    4: (((0, 3), (0, 1), (1, 4), (1, 2), (1, 0)), (3, 1, 2, 0)),
    8: (((0, 2), (1, 3), (1, 0), (2, 4), (2, 1)), (7, 5, 3, 1, 6, 4, 2, 0)),
}
WIDTHS = tuple(_PROGRAMS)
Place = tuple[int, int, int]

_BIT, _BYTE, _WORD, _LONG = (ir.IntType(bits) for bits in (1, 8, 32, 64))
_LINE = ir.VectorType(_WORD, SIDE)
_ROW = 4 * SIDE  # bytes
_SHEET = SIDE * _ROW
_TURN = "bcqfmt_turn_16"


def _each_four(*order: int) -> list[int]:
    """A choice from two vectors, the same in every four words; from 4 on it is of the second."""
    return [first + i + 12 * (i >= 4) for first in range(0, SIDE, 4) for i in order]


def _fours(*order: int) -> list[int]:
    return [4 * i + j for i in order for j in range(4)]


_WORDS = _each_four(0, 4, 1, 5), _each_four(2, 6, 3, 7)
_PAIRS = _each_four(0, 1, 4, 5), _each_four(2, 3, 6, 7)
_FOURS = _fours(0, 2, 4, 6), _fours(1, 3, 5, 7)


def _turn(builder: Any, *arguments: Any) -> None:
    """A call of what :func:`_build_turn` makes: to have it only once saves a sixth of the time of compiling."""
    function = builder.module.globals.get(_TURN)
    if function is None:
        function = ir.Function(builder.module, ir.FunctionType(ir.VoidType(), [_LONG] * 4), _TURN)
        function.linkage = "internal"
        function.attributes.add("noinline")
        inside = ir.IRBuilder(function.append_basic_block())
        _build_turn(inside, *function.args)
        inside.ret_void()
    builder.call(function, arguments)


def _build_turn(builder: Any, to: Any, to_step: Any, at: Any, at_step: Any) -> None:
    """16 x 16 words: word j of row i becomes word i of row j; rows are ``step`` bytes apart."""
    r = [_load(builder, at, at_step, i) for i in range(SIDE)]
    r = [_pick(builder, r[i], r[i + 1], chosen) for i in range(0, SIDE, 2) for chosen in _WORDS]
    r = [_pick(builder, r[i], r[i + 2], chosen) for j in range(0, SIDE, 4) for i in (j, j + 1) for chosen in _PAIRS]
    for c in range(4):  # four rows by four words are turned; now the fours
        halves = [[_pick(builder, r[i], r[i + 4], chosen) for i in (c, c + 8)] for chosen in _FOURS]
        for i, half in enumerate(halves):
            for j, chosen in enumerate(_FOURS):
                _store(builder, _pick(builder, half[0], half[1], chosen), to, to_step, 4 * (i + 2 * j) + c)


def _steps(builder: Any, bits: int, rows: list[Any], back: bool) -> list[Any]:
    """Words of sixteen lanes to planes, or ``back``; a vector has a word of every lane."""
    exchanges, planes = _PROGRAMS[bits]
    found = list(rows)
    if back:
        found = [rows[planes.index(row)] for row in range(bits)]
    for high, low in reversed(exchanges) if back else exchanges:
        by = 1 << low
        mask = sum(1 << i for i in range(32) if not i & by)
        for x, y in ((row, row | 1 << high) for row in range(bits) if not row >> high & 1):
            a, b = found[x], found[y]
            found[x] = _either(builder, mask << by, builder.shl(b, _all(by)), a)
            found[y] = _either(builder, mask, builder.lshr(a, _all(by)), b)
    return found if back else [found[row] for row in planes]


def _build_tiles(bits: int) -> Callable[[Any, Any], None]:
    """All tiles; the only argument is the address of the numbers that :func:`tiles` lists."""

    def build(builder: Any, numbers: Any) -> None:
        given = (builder.load(_place(builder, numbers, _LONG(8), i, _LONG)) for i in range(14))
        words, word, block, planes, plane, lane, lanes, blocks, back, room, odd, strip, side, many = given
        # side and many are SIDE and bits; loops over constants would be unrolled, and take twice as long to compile
        row = builder.mul(blocks, _LONG(_ROW))  # bytes of a lane in the strip
        sheet = builder.mul(row, _LONG(_STRIP * SIDE))
        with _strips(builder, lanes) as (first, count):
            here = _far(builder, words, first, _LONG(_ROW))
            there = _far(builder, planes, first, builder.mul(lane, _LONG(SIDE)))
            with repeated(builder, blocks) as j, repeated(builder, count) as i:
                tile = _far(builder, _far(builder, here, i, _LONG(_ROW)), j, builder.mul(block, _LONG(SIDE)))
                made = _far(builder, _far(builder, strip, i, builder.mul(row, _LONG(SIDE))), j, _LONG(_ROW))
                with repeated(builder, side) as n:
                    at, to = _far(builder, tile, n, block), _far(builder, room, n, _LONG(_ROW))
                    _forth(builder, bits, to, at, word)
                with repeated(builder, many) as n:
                    at, to = _far(builder, room, n, _LONG(_SHEET)), _far(builder, made, n, sheet)
                    _turn(builder, to, row, at, _LONG(_ROW))
            with repeated(builder, many) as n:
                at, to = _far(builder, strip, n, sheet), _far(builder, there, n, plane)
                _put(builder, to, lane, at, row, builder.mul(count, _LONG(SIDE)))
            with repeated(builder, builder.mul(back, blocks)) as j, repeated(builder, count) as i:
                tile = _far(builder, _far(builder, here, i, _LONG(_ROW)), j, builder.mul(block, _LONG(SIDE)))
                made = _far(builder, _far(builder, there, i, builder.mul(lane, _LONG(SIDE))), j, _LONG(_ROW))
                with repeated(builder, many) as n:
                    at, to = _far(builder, made, n, plane), _far(builder, room, n, _LONG(_SHEET))
                    _turn(builder, to, _LONG(_ROW), at, lane)
                with repeated(builder, side) as n:
                    at, to = _far(builder, room, n, _LONG(_ROW)), _far(builder, tile, n, block)
                    _compare(builder, bits, to, word, at, odd)

    build.__name__ = f"_build_tiles_{bits}"
    return build


@contextlib.contextmanager
def _strips(builder: Any, lanes: Any) -> Iterator[tuple[Any, Any]]:
    """The first of every few tiles that are side by side, and how many there are."""
    with repeated(builder, builder.udiv(builder.add(lanes, _LONG(_STRIP - 1)), _LONG(_STRIP))) as strip:
        first = builder.mul(strip, _LONG(_STRIP))
        left = builder.sub(lanes, first)
        yield first, builder.select(builder.icmp_unsigned("<", left, _LONG(_STRIP)), left, _LONG(_STRIP))


def _put(builder: Any, to: Any, to_step: Any, at: Any, size: Any, rows: Any) -> None:
    """Rows of so many bytes, which lie one after the other; all at once where they shall lie so, too."""
    joined = builder.icmp_unsigned("==", to_step, size)
    count = builder.select(joined, _LONG(1), rows)
    each = builder.select(joined, builder.mul(rows, size), size)
    pointer = _BYTE.as_pointer()
    copy = builder.module.declare_intrinsic("llvm.memcpy", [pointer, pointer, _LONG])
    with repeated(builder, count) as n:
        places = (builder.inttoptr(_far(builder, x, n, step), pointer) for x, step in ((to, to_step), (at, size)))
        builder.call(copy, [*places, each, _BIT(0)])


def _forth(builder: Any, bits: int, to: Any, at: Any, word: Any) -> None:
    """A block of sixteen lanes to a row of each sheet; those of the next strip will be needed soon."""
    rows = [_load(builder, at, word, i) for i in range(bits)]
    for i, row in enumerate(_steps(builder, bits, rows, False)):
        _store(builder, row, to, _LONG(_SHEET), i)
        _fetch(builder, _place(builder, builder.add(at, _LONG(_STRIP * _ROW)), word, i, _BYTE))


def _compare(builder: Any, bits: int, to: Any, word: Any, at: Any, odd: Any) -> None:
    """A row of each sheet back to a block of sixteen lanes, and the bits in which those that are there differ."""
    rows = _steps(builder, bits, [_load(builder, at, _LONG(_SHEET), i) for i in range(bits)], True)
    found = _load(builder, odd, _LONG(0), 0)
    for i, row in enumerate(rows):
        found = builder.or_(found, builder.xor(row, _load(builder, to, word, i)))
    _store(builder, found, odd, _LONG(0), 0)


def _far(builder: Any, first: Any, count: Any, step: Any) -> Any:
    return builder.add(first, builder.mul(count, step))


def _place(builder: Any, first: Any, step: Any, i: int, kind: Any) -> Any:
    return builder.inttoptr(_far(builder, first, _LONG(i), step), kind.as_pointer())


def _load(builder: Any, first: Any, step: Any, i: int) -> Any:
    return builder.load(_place(builder, first, step, i, _LINE), align=4)


def _store(builder: Any, value: Any, first: Any, step: Any, i: int) -> None:
    builder.store(value, _place(builder, first, step, i, _LINE), align=4)


def _fetch(builder: Any, place: Any) -> None:
    kind, name = ir.FunctionType(ir.VoidType(), [place.type, _WORD, _WORD, _WORD]), "llvm.prefetch.p0i8"
    fetch = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
    builder.call(fetch, [place, _WORD(0), _WORD(2), _WORD(1)])  # to read; into the second cache; data


def _pick(builder: Any, x: Any, y: Any, order: list[int]) -> Any:
    return builder.shuffle_vector(x, y, ir.Constant(_LINE, order))


def _all(number: int) -> Any:
    return ir.Constant(_LINE, [number] * SIDE)


def _either(builder: Any, mask: int, x: Any, y: Any) -> Any:
    """The bits of x that are in the mask, the others of y."""
    return builder.or_(builder.and_(x, _all(mask)), builder.and_(y, _all(mask ^ 0xFFFFFFFF)))


_all_2, _all_4, _all_8 = (operation(_build_tiles(bits)) for bits in WIDTHS)


def _tiles_2(numbers: Any) -> None:
    _all_2(numbers)


def _tiles_4(numbers: Any) -> None:
    _all_4(numbers)


def _tiles_8(numbers: Any) -> None:
    _all_8(numbers)


@cache
def _loop(bits: int) -> Any:
    return compiled({2: _tiles_2, 4: _tiles_4, 8: _tiles_8}[bits], types.void, types.uint64)


def tiles(bits: int, words: Place, planes: Place, size: tuple[int, int], back: bool) -> bool:
    """Planes of whole tiles, so many by lanes and by blocks; whether all that was compared was equal.

    ``words``: the address of the first word, and the bytes from one to the next of a block, and from a block to the
    next; lanes are neighbours. ``planes``: the first word's, and from a plane and from a lane to the next; blocks are
    neighbours. ``back``: every strip, when it is written and still in the cache, goes back to be compared with words.
    """
    room = aligned((bits * SIDE + 1) * SIDE, np.uint32)
    odd = room[bits * SIDE * SIDE :]  # the bits that differ
    odd[:] = 0
    strip = aligned(bits * _STRIP * SIDE * size[1] * SIDE, np.uint32)
    places = room.ctypes.data, odd.ctypes.data, strip.ctypes.data
    numbers = np.array([*words, *planes, *size, back, *places, SIDE, bits], np.uint64)
    _loop(bits)(numbers.ctypes.data)
    return not odd.any()
