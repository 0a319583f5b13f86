"""The one compiled loop under every word layout.

``shuffle`` copies 32-bit words from one array to another and rearranges their bits on the way. An array is lanes times
blocks times the words of a block; what happens to the bits is a program (`words_programs`) that a tile of many lanes
and blocks runs through at once. No layout is known here. The loop is compiled when this file is imported.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]

from bcqfmt.compiled.loops import compiled, inner, operation, types

__all__ = ["CLEAR", "MOVE", "SWAP", "TAIL", "copy_run", "shuffle", "turn"]

SWAP, MOVE, CLEAR, TAIL = range(4)

# Unsigned throughout: mixed with signed numbers they would become floats.
_0, _1, _4, _8, _16, _24, _32, _40, _64 = (np.uint64(i) for i in (0, 1, 4, 8, 16, 24, 32, 40, 64))
_ROW, _STEP = _24, np.uint64(48)  # bytes of a row of a table, and of the steps

_BIT, _BYTE, _WORD, _LONG = (ir.IntType(bits) for bits in (1, 8, 32, 64))
_EIGHT = ir.VectorType(_WORD, 8)
_LINE = ir.VectorType(_LONG, 8)
_UNPACK = ((0, 8, 1, 9, 4, 12, 5, 13), (2, 10, 3, 11, 6, 14, 7, 15))
_PAIRS = ((0, 1, 8, 9, 4, 5, 12, 13), (2, 3, 10, 11, 6, 7, 14, 15))
_HALVES = ((0, 1, 2, 3, 8, 9, 10, 11), (4, 5, 6, 7, 12, 13, 14, 15))


def _build_turn(builder: Any, to: Any, to_step: Any, at: Any, at_step: Any) -> None:
    """8 x 8 words: word j of row i becomes word i of row j; rows are ``step`` bytes apart."""

    def row(first: Any, step: Any, i: int) -> Any:
        return builder.add(first, builder.mul(step, _LONG(i)))

    r = [_load(builder, row(at, at_step, i), _EIGHT) for i in range(8)]
    r = [_pick(builder, r[i], r[i + 1], chosen) for i in (0, 2, 4, 6) for chosen in _UNPACK]
    r = [_pick(builder, r[i], r[i + 2], chosen) for i in (0, 1, 4, 5) for chosen in _PAIRS]
    r = [_pick(builder, r[i], r[i + 4], chosen) for chosen in _HALVES for i in range(4)]
    for i, value in enumerate(r):
        _store(builder, value, row(to, to_step, i))


def _build_copy_run(builder: Any, to: Any, at: Any, size: Any) -> None:
    """So many bytes."""
    pointer = _BYTE.as_pointer()
    copy = builder.module.declare_intrinsic("llvm.memcpy", [pointer, pointer, _LONG])
    builder.call(copy, [_at(builder, to, _BYTE), _at(builder, at, _BYTE), size, _BIT(0)])


def _build_copy_word(builder: Any, to: Any, at: Any) -> None:
    """One word."""
    _store(builder, _load(builder, at, _WORD), to)


def _build_mask_word(builder: Any, to: Any, mask: Any) -> None:
    """One word keeps the bits of the mask."""
    _store(builder, builder.and_(_load(builder, to, _WORD), builder.trunc(mask, _WORD)), to)


def _build_swap(builder: Any, x: Any, y: Any, right: Any, mask: Any) -> None:
    """64 bytes of two rows: ``mask << right`` of x changes places with ``mask`` of y."""
    a, b, by = _load(builder, x, _LINE), _load(builder, y, _LINE), _all(builder, right)
    odd = builder.and_(builder.xor(builder.lshr(a, by), b), _all(builder, mask))
    _store(builder, builder.xor(b, odd), y)
    _store(builder, builder.xor(a, builder.shl(odd, by)), x)


def _build_move(builder: Any, x: Any, y: Any, right: Any, left: Any, mask: Any) -> None:
    """64 bytes of x, shifted and masked, are added to y."""
    a = builder.shl(builder.lshr(_load(builder, x, _LINE), _all(builder, right)), _all(builder, left))
    _store(builder, builder.or_(_load(builder, y, _LINE), builder.and_(a, _all(builder, mask))), y)


def _build_clear(builder: Any, x: Any) -> None:
    """64 bytes become zero."""
    _store(builder, ir.Constant(_LINE, [0] * 8), x)


def _build_differ(builder: Any, x: Any, y: Any) -> Any:
    """The bits in which two times 64 bytes differ, all eight numbers together."""
    odd = builder.xor(_load(builder, x, _LINE), _load(builder, y, _LINE))
    for width in (4, 2, 1):
        lower, upper = (_pick(builder, odd, odd, range(first, first + width)) for first in (0, width))
        odd = builder.or_(lower, upper)
    return builder.extract_element(odd, _WORD(0))


def _at(builder: Any, place: Any, kind: Any) -> Any:
    return builder.inttoptr(place, kind.as_pointer())


def _load(builder: Any, place: Any, kind: Any) -> Any:
    return builder.load(_at(builder, place, kind), align=4)


def _store(builder: Any, value: Any, place: Any) -> None:
    builder.store(value, _at(builder, place, value.type), align=4)


def _pick(builder: Any, x: Any, y: Any, chosen: Any) -> Any:
    order = list(chosen)
    return builder.shuffle_vector(x, y, ir.Constant(ir.VectorType(_WORD, len(order)), order))


def _all(builder: Any, number: Any) -> Any:
    """Eight times the same number."""
    first = builder.insert_element(ir.Constant(_LINE, ir.Undefined), number, _WORD(0))
    return _pick(builder, first, first, [0] * 8)


def _build_number(builder: Any, place: Any) -> Any:
    """What stands there, 64 bits."""
    return builder.load(_at(builder, place, _LONG), align=8)


turn, copy_run = operation(_build_turn), operation(_build_copy_run)
_copy_word, _mask_word = operation(_build_copy_word), operation(_build_mask_word)
_swap, _move, _clear = operation(_build_swap), operation(_build_move), operation(_build_clear)
_differ, _number = operation(_build_differ, types.uint64), operation(_build_number, types.uint64)


@inner
def _words(
    to: Any, to_outer: Any, to_inner: Any, at: Any, at_outer: Any, at_inner: Any, outer: Any, inner: Any
) -> None:
    """outer x inner words from one pair of strides (in bytes) to another."""
    rows = _0
    columns = _0
    if (at_outer == _4 and to_inner == _4) or (to_outer == _4 and at_inner == _4):  # turned: eight by eight
        rows = outer - outer % _8
        columns = inner - inner % _8
        to_row = to_outer if to_inner == _4 else to_inner
        at_row = at_outer if at_inner == _4 else at_inner
        for j in range(_0, columns, _8):
            for i in range(_0, rows, _8):
                turn(to + i * to_outer + j * to_inner, to_row, at + i * at_outer + j * at_inner, at_row)
    straight = at_inner == _4 and to_inner == _4
    if straight and at_outer == inner * _4 and to_outer == at_outer:  # nothing between rows
        inner = outer * inner
        outer = _1
    for i in range(outer):
        x = at + i * at_outer
        y = to + i * to_outer
        if straight:
            copy_run(y, x, inner * _4)
        else:
            for j in range(columns if i < rows else _0, inner):
                _copy_word(y + j * to_inner, x + j * at_inner)


@inner
def _strip(
    get: Any, from_lane: Any, from_block: Any, from_words: Any, from_count: Any, put: Any, to_lane: Any,
    to_block: Any, to_words: Any, to_count: Any, steps: Any, step_count: Any, here: Any, chunk: Any, width: Any,
    depth: Any, blocks: Any, lane: Any, lanes: Any, spare: Any,
) -> Any:  # fmt: skip
    """All blocks of so many lanes from ``lane`` on, by way of a tile at ``here``; see :func:`shuffle`."""
    line = depth * _4
    size = width * line
    wrong = _0
    for block in range(_0, blocks, depth):
        count = min(depth, blocks - block)
        ends = block + count == blocks
        for w in range(from_count):
            entry = from_words + w * _ROW
            at = get + _number(entry) + lane * from_lane + block * from_block
            row = here + _number(entry + _8) * size
            some = count
            if ends and _number(entry + _16) == _0:
                some = count - _1
                for i in range(lanes):
                    _mask_word(row + i * line + some * _4, _0)
            _words(row, line, _4, at, from_lane, from_block, lanes, some)
        for start in range(_0, size, chunk):
            rest = min(chunk, size - start)
            for p in range(step_count):
                step = steps + p * _STEP
                kind = _number(step)
                x = here + _number(step + _8) * size + start
                y = here + _number(step + _16) * size + start
                right = _number(step + _24)
                left = _number(step + _32)
                mask = _number(step + _40)
                if kind == SWAP:
                    for i in range(_0, rest, _64):
                        _swap(x + i, y + i, right, mask)
                elif kind == MOVE:
                    for i in range(_0, rest, _64):
                        _move(x + i, y + i, right, left, mask)
                elif kind == CLEAR:
                    for i in range(_0, rest, _64):
                        _clear(x + i)
                elif ends:  # TAIL: the last block of every lane that is in this chunk
                    for i in range(count * _4 - _4, lanes * line, line):
                        if start <= i < start + rest:
                            _mask_word(x + i - start, mask)
        for w in range(to_count):
            entry = to_words + w * _ROW
            to = put + _number(entry) + lane * to_lane + block * to_block
            row = here + _number(entry + _8) * size
            some = count
            if ends and _number(entry + _16) == _0:
                some = count - _1
            if spare == _0:
                _words(to, to_lane, to_block, row, line, _4, lanes, some)
                continue
            other = here + spare * size
            if some < depth or lanes < width:  # the target has no words for the rest
                copy_run(other, row, size)
            _words(other, line, _4, to, to_lane, to_block, lanes, some)
            for i in range(_0, size, _64):
                wrong |= _differ(row + i, other + i)
    return wrong


def _shuffle(
    source: Any, source_lane: Any, source_block: Any, source_words: Any, source_count: Any, source_back: Any,
    source_back_count: Any, target: Any, target_lane: Any, target_block: Any, target_words: Any, target_count: Any,
    target_back: Any, target_back_count: Any, steps: Any, step_count: Any, steps_back: Any, step_back_count: Any,
    tile: Any, chunk: Any, chunk_back: Any, width: Any, depth: Any, blocks: Any, first: Any, stop: Any, spare: Any,
    ways: Any,
) -> Any:  # fmt: skip
    """What :func:`shuffle` does, with addresses and numbers of rows for arrays, which take long to compile."""
    wrong = _0
    for lane in range(first, stop, width):
        size = min(width, stop - lane)
        for way in range(ways):
            row = spare if way + _1 == ways else _0
            if way == _0:
                get, get_lane, get_block, table, rows = source, source_lane, source_block, source_words, source_count
                put, put_lane, put_block, other, others = target, target_lane, target_block, target_words, target_count
                program, length, some = steps, step_count, chunk
            else:
                get, get_lane, get_block, table, rows = (
                    target,
                    target_lane,
                    target_block,
                    target_back,
                    target_back_count,
                )
                put, put_lane, put_block, other, others = (
                    source, source_lane, source_block, source_back, source_back_count
                )  # fmt: skip
                program, length, some = steps_back, step_back_count, chunk_back
            wrong |= _strip(
                *(get, get_lane, get_block, table, rows, put, put_lane, put_block, other, others),
                *(program, length, tile, some, width, depth, blocks, lane, size, row),
            )
    return wrong


_shuffled = compiled(_shuffle, types.uint64, *(types.uint64,) * 28)


def shuffle(*arguments: Any) -> int:
    """Words of a source through steps to a target: (source, its distances and tables, target, its, steps, sizes).

    ``source``, lane, block, table, table of the way back; ``target``, the same; steps, steps of the way back, tile,
    chunk, chunk of the way back; width, depth, blocks, first, stop, spare, ways. Words and the tile are uint32, tables
    and steps uint64 with a row for each word or step; the rest are numbers.

    Lanes first..stop. Rows of the tables: offset, row of the tile, in the last block too? All distances are in bytes.
    The tile has rows of ``width`` lanes times ``depth`` blocks; word (lane, block) is item lane * depth + block. Steps
    take 64 bytes at a time as numbers of 64 bits: a shift shifts two words, and the masks remove what crosses between
    them. ``chunk`` bytes of every row, a multiple of 64, run through all steps.

    With a ``spare`` row (not 0) nothing is stored: the target's words are compared with what would be, by way of that
    row. What is given back is 0 if they are the same. With two ``ways`` all is stored, and every strip of ``width``
    lanes, while it is in the cache, goes back from there to be compared with the source; the tables, the steps and the
    chunk of the way back lead from the target to the source.
    """
    numbers: list[int] = []
    for given in arguments:
        if isinstance(given, np.ndarray):
            if not given.flags.c_contiguous:
                raise ValueError("an array with gaps")
            numbers += [given.ctypes.data] if given.dtype == np.uint32 else [given.ctypes.data, len(given)]
        else:
            numbers.append(given)
    return int(_shuffled(*numbers))
