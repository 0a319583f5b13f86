"""One stream and sixteen lanes through `digests_along_kernel`, from memory or from their files."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir  # type: ignore[import-untyped]

from bcqfmt.compiled.loops import compiled, operation, types
from bcqfmt.compiled.threads import aligned

from . import along_kernel as kernel
from .along import COMPANY, FIRST
from .constants import CONSTANTS, START
from .kernel import BLOCK, HERE, LANES, add, number, read

__all__ = ["Along"]

_HERE, _FIRST, _COMPANY = HERE, np.uint64(FIRST), np.uint64(COMPANY)
_0, _5, _8, _16, _17 = (np.uint64(i) for i in (0, 5, 8, 16, 17))
_LONG = ir.IntType(64)


def _build_put(builder: Any, place: Any, value: Any) -> None:
    """It becomes that."""
    builder.store(value, builder.inttoptr(place, _LONG.as_pointer()))


def _build_call(builder: Any, function: Any, numbers: Any) -> None:
    """A function that is somewhere else."""
    kind = ir.FunctionType(ir.VoidType(), [_LONG])
    builder.call(builder.inttoptr(function, kind.as_pointer()), [numbers])


_put, _call = operation(_build_put), operation(_build_call)


def _advance(files: Any, places: Any, data: Any, row: Any, table: Any, numbers: Any, loop: Any, times: Any) -> Any:
    """How many times it was, fewer when something cannot be read: that is noted at the end of the table.

    All arguments are addresses but the last and the bytes of a row. ``files`` and ``places`` are seventeen numbers, the
    last ones of the stream that is first; a place is an address where there is no file. ``table``: as many addresses.
    """
    done = _0
    while done < times:
        some = min(row // _COMPANY, times - done)
        for lane in range(_17):
            file = number(files + lane * _8)
            place = number(places + lane * _8)
            here = data + lane * row
            size = some * (_COMPANY if lane < _16 else _FIRST)
            have = size if file == _HERE else _0
            _put(table + lane * _8, place if file == _HERE else here)
            while have < size:
                came = read(file, here + have, size - have, place + have)
                if came == _0 or came > size - have:
                    _put(table + _17 * _8, lane)
                    return done
                have += came
        _put(numbers, some)
        _put(numbers + _5 * _8, number(table + _16 * _8))
        _call(loop, numbers)
        done += some
        for lane in range(_17):
            add(places + lane * _8, some * (_COMPANY if lane < _16 else _FIRST))
    return done


_advance_all = compiled(_advance, types.uint64, *(types.uint64,) * 8)


class Along:
    """Sixteen lanes and one stream that is first: where each is, and their ``states`` uint32 [8, 16] and [8].

    ``files`` and ``places``, each uint64 [17], the last ones of the stream that is first: a descriptor and a byte of
    it, or HERE and an address. The state of that is in the order of `digests_one_kernel`.
    """

    def __init__(self, room: int) -> None:
        """``room``: bytes of a lane that are read at once, a multiple of COMPANY."""
        self._row, self.most = room, LANES * room // COMPANY
        self._data = aligned((LANES + FIRST // COMPANY) * room // 4, np.uint32)
        self.states: npt.NDArray[np.uint32] = aligned(8 * LANES, np.uint32).reshape(8, LANES)
        self.first = np.zeros(8, np.uint32)
        self.files, self.places = np.zeros((2, LANES + 1), np.uint64)
        self._table, self._numbers = np.zeros(LANES + 2, np.uint64), np.zeros(7, np.uint64)
        self._room = aligned(kernel.ROOM // 4, np.uint32)
        self._room.view(np.uint8)[kernel.SWAP : kernel.SWAP + BLOCK] = np.arange(BLOCK) ^ 3
        self.start = START
        self.clear()

    def clear(self) -> None:
        """No files; lanes that are not used hash something, at most ``most`` times."""
        self.files[:], self.places[:] = HERE, self._data.ctypes.data

    def advance(self, times: int) -> tuple[int, int]:
        """Hash FIRST bytes of one stream and COMPANY of every lane, so many times.

        How many times it was, and which lane cannot be read: 16 is the stream that is first, 17 none.
        """
        table, numbers = self._table.ctypes.data, self._numbers.ctypes.data
        places = self.states.ctypes.data, table, CONSTANTS.ctypes.data, self.first.ctypes.data
        self._numbers[:] = 0, *places, 0, self._room.ctypes.data
        self._table[-1] = LANES + 1
        where = self.files.ctypes.data, self.places.ctypes.data, self._data.ctypes.data, self._row
        done = _advance_all(*where, table, numbers, kernel.loop_address(), times)
        return int(done), int(self._table[-1])
