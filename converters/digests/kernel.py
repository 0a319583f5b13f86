"""SHA-256 (FIPS 180-4) of sixteen streams in one compiled loop, which reads them from their files as well.

The rounds of one stream wait for each other; those of sixteen do not. On a processor with 512-bit vectors a byte costs
half of what hashlib takes with the processor's own SHA instructions; on others it is no gain. A vector has a word of
every stream. One more stream can go along, with the SHA instructions, where the processor has them too
(`digests_along_kernel`); then a lane's bytes cost less still.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir  # type: ignore[import-untyped]

from bcqfmt.compiled.loops import compiled, operation, types
from bcqfmt.compiled.threads import aligned
from bcqfmt.converters.words.loop import copy_run, turn

from .constants import CONSTANTS, START

__all__ = ["BLOCK", "HERE", "LANES", "Lanes", "add", "number", "read"]

LANES, BLOCK = 16, 64  # streams; bytes of a block
HERE = _HERE = np.uint64(2**64 - 1)  # no file
_WORD, _LONG = ir.IntType(32), ir.IntType(64)
_BYTES = ir.IntType(8).as_pointer()
_LINE = ir.VectorType(_WORD, LANES)
_SIZE = 4 * LANES
_0, _4, _8, _16, _48, _64 = (np.uint64(i) for i in (0, 4, 8, 16, 48, 64))


def _build_turn_bytes(builder: Any, x: Any) -> None:
    """Most significant byte first, as SHA-256 reads them."""
    kind = ir.FunctionType(_LINE, [_LINE])
    swap = builder.module.globals.get("llvm.bswap.v16i32") or ir.Function(builder.module, kind, "llvm.bswap.v16i32")
    _store(builder, builder.call(swap, [_load(builder, x, 0)]), x, 0)


def _build_rounds(last: bool) -> Any:
    """Sixteen rounds; unless they are the ``last``, the sixteen words become those of the next rounds."""

    def build(builder: Any, state: Any, words: Any, constants: Any) -> None:
        a, b, c, d, e, f, g, h = (_load(builder, state, i) for i in range(8))
        w = [_load(builder, words, t) for t in range(16)]
        for t in range(16):
            constant = builder.load(_at(builder, builder.add(constants, _LONG(4 * t)), _WORD), align=4)
            known = builder.add(w[t], _splat(builder, constant))
            large1 = _xor(builder, _turned(builder, e, 6), _turned(builder, e, 11), _turned(builder, e, 25))
            choice = builder.xor(builder.and_(e, builder.xor(f, g)), g)
            first = builder.add(builder.add(h, known), builder.add(large1, choice))
            large0 = _xor(builder, _turned(builder, a, 2), _turned(builder, a, 13), _turned(builder, a, 22))
            majority = builder.or_(builder.and_(a, b), builder.and_(c, builder.or_(a, b)))
            a, b, c, d, e, f, g, h = (
                *(builder.add(first, builder.add(large0, majority)), a, b, c),
                *(builder.add(d, first), e, f, g),
            )
            if not last:
                w[t] = _scheduled(builder, w[t], w[(t + 1) % 16], w[(t + 9) % 16], w[(t + 14) % 16])
        for i, value in enumerate((a, b, c, d, e, f, g, h)):
            _store(builder, value, state, i)
        for t in range(0 if last else 16):
            _store(builder, w[t], words, t)

    build.__name__ = f"_build_rounds_{last}"
    return build


def _scheduled(builder: Any, oldest: Any, far: Any, middle: Any, near: Any) -> Any:
    """A word of the message schedule from those 16, 15, 7 and 2 places before it."""
    small1 = _xor(builder, _turned(builder, near, 17), _turned(builder, near, 19), builder.lshr(near, _all(10)))
    small0 = _xor(builder, _turned(builder, far, 7), _turned(builder, far, 18), builder.lshr(far, _all(3)))
    return builder.add(builder.add(oldest, middle), builder.add(small0, small1))


def _build_number(builder: Any, place: Any) -> Any:
    """What stands there."""
    return builder.load(_at(builder, place, _LONG))


def _build_add(builder: Any, place: Any, number: Any) -> None:
    """It becomes so much more."""
    pointer = _at(builder, place, _LONG)
    builder.store(builder.add(builder.load(pointer), number), pointer)


def _build_put_word(builder: Any, place: Any, number: Any) -> None:
    """A word."""
    builder.store(builder.trunc(number, _WORD), _at(builder, place, _WORD))


def _build_read(builder: Any, file: Any, to: Any, size: Any, offset: Any) -> Any:
    """How many bytes of a file came; none, or more than asked for, is a failure."""
    kind = ir.FunctionType(_LONG, [_WORD, _BYTES, _LONG, _LONG])
    read = builder.module.globals.get("pread") or ir.Function(builder.module, kind, "pread")
    return builder.call(read, [builder.trunc(file, _WORD), builder.inttoptr(to, _BYTES), size, offset])


def _build_finish(builder: Any, state: Any, after: Any, counts: Any, block: Any) -> None:
    """The state of every stream that has such a block becomes the sum of what it was and what it is ``after`` it."""
    number = _splat(builder, builder.trunc(block, _WORD))
    live = builder.icmp_unsigned("<", number, _load(builder, counts, 0))
    for i in range(8):
        old = _load(builder, state, i)
        _store(builder, builder.select(live, builder.add(old, _load(builder, after, i)), old), state, i)


def _at(builder: Any, place: Any, kind: Any) -> Any:
    return builder.inttoptr(place, kind.as_pointer())


def _load(builder: Any, first: Any, i: int) -> Any:
    return builder.load(_at(builder, builder.add(first, _LONG(_SIZE * i)), _LINE), align=4)


def _store(builder: Any, value: Any, first: Any, i: int) -> None:
    builder.store(value, _at(builder, builder.add(first, _LONG(_SIZE * i)), _LINE), align=4)


def _all(number: int) -> Any:
    return ir.Constant(_LINE, [number] * LANES)


def _splat(builder: Any, number: Any) -> Any:
    first = builder.insert_element(ir.Constant(_LINE, ir.Undefined), number, _WORD(0))
    return builder.shuffle_vector(first, first, _all(0))


def _turned(builder: Any, x: Any, by: int) -> Any:
    """Rotated right; LLVM knows the pattern."""
    return builder.or_(builder.lshr(x, _all(by)), builder.shl(x, _all(32 - by)))


def _xor(builder: Any, x: Any, y: Any, z: Any) -> Any:
    return builder.xor(builder.xor(x, y), z)


_bytes, _finish = operation(_build_turn_bytes), operation(_build_finish)
read, number = operation(_build_read, types.uint64), operation(_build_number, types.uint64)
add, _put_word = operation(_build_add), operation(_build_put_word)
_rounds, _last_rounds = operation(_build_rounds(False)), operation(_build_rounds(True))


def _advance(state: Any, lanes: Any, constants: Any, data: Any, row: Any, room: Any) -> Any:
    """The first lane that cannot be read, or 16. All arguments are addresses but the bytes of a row.

    ``lanes``: three times sixteen numbers, which are files, places and counts; what is done goes from counts to places.
    The room is for the words of a block, the states after it, and the blocks of each lane.
    """
    places = lanes + _16 * _8
    counts = places + _16 * _8
    after = room + _16 * _64
    some = after + _8 * _64
    while True:
        most = _0
        for lane in range(_16):
            count = min(number(counts + lane * _8), row // _64)
            _put_word(some + lane * _4, count)
            most = max(most, count)
            file = number(lanes + lane * _8)
            done = _0
            while file != _HERE and done < count * _64:
                size = count * _64 - done
                came = read(file, data + lane * row + done, size, number(places + lane * _8) + done)
                if came == _0 or came > size:
                    return lane
                done += came
        if most == _0:
            return _16
        for lane in range(_16):
            count = min(number(counts + lane * _8), row // _64)
            add(counts + lane * _8, _0 - count)
            add(places + lane * _8, count * _64)
        for block in range(most):
            at = data + block * _64
            for i in range(_0, _16, _8):
                for j in range(_0, _16, _8):
                    turn(room + j * _64 + i * _4, _64, at + i * row + j * _4, row)
            for t in range(_16):
                _bytes(room + t * _64)
            copy_run(after, state, _8 * _64)
            for t in range(_0, _48, _16):
                _rounds(after, room, constants + t * _4)
            _last_rounds(after, room, constants + _48 * _4)
            _finish(state, after, some, block)


@cache
def _loop() -> Any:
    """Compiled when first needed: not everybody does, and it takes long; with arrays for numbers longer still."""
    return compiled(_advance, types.uint64, *(types.uint64,) * 6)


class Lanes:
    """Sixteen streams: what to hash of each, and their ``states`` uint32 [8, 16].

    ``counts`` blocks from the byte ``places`` on of the file with the descriptor ``files``, each uint64 [16]; or, where
    that is HERE, the first blocks of a row of ``data`` uint8 [16, room], which is overwritten otherwise.
    """

    def __init__(self, room: int) -> None:
        """``room``: bytes of a stream at once, a multiple of 64."""
        self.data: npt.NDArray[np.uint8] = aligned(LANES * room // 4, np.uint32).view(np.uint8).reshape(LANES, room)
        self.states: npt.NDArray[np.uint32] = aligned(8 * LANES, np.uint32).reshape(8, LANES)
        self._numbers = np.zeros((3, LANES), np.uint64)
        self.files, self.places, self.counts = self._numbers
        self.start = START
        self._room = aligned((16 + 8 + 1) * LANES, np.uint32)

    def clear(self) -> None:
        """Nothing to hash, no files."""
        self.files[:], self.places[:], self.counts[:] = HERE, 0, 0

    def has_file(self, lane: int) -> bool:
        """Whether a lane's bytes come from a file."""
        return bool(self.files[lane] != HERE)

    def close(self) -> None:
        """Close the files; there are none any more."""
        for file in self.files[self.files != HERE]:
            os.close(int(file))
        self.files[:] = HERE

    def advance(self) -> int:
        """Hash all of it; the first lane that cannot be read, or 16 if there is none.

        What is done goes from ``counts`` to ``places``, so that one can go on after a failure.
        """
        if int(self.counts[self.files == HERE].max(initial=0)) * BLOCK > self.data.shape[1]:
            raise ValueError("more blocks than there is room for")
        states, constants, data = self.states.ctypes.data, CONSTANTS.ctypes.data, self.data.ctypes.data
        room, row = self._room.ctypes.data, self.data.shape[1]
        return int(_loop()(states, self._numbers.ctypes.data, constants, data, row, room))
