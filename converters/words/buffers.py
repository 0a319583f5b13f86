"""Large arrays whose memory is used again: fresh pages from the system cost as much as the work that is done on them.

Inside ``with reused():`` an array of :func:`new_array` gives its memory back to a common store when the last view of
it is gone, and the next one of about that size takes it from there. The store keeps no more than arrays have needed at
once, and nothing when the last ``with`` ends. Outside, an array is a plain new one.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from bcqfmt.container.dtypes import BITS, numpy_dtype
from bcqfmt.container.stored_tensor import StoredTensor

__all__ = ["Turns", "give_back", "new_array", "read_array", "reused", "wait_for_room"]

Array = npt.NDArray[Any]
Block = npt.NDArray[np.uint8]
_LARGE = 1 << 20  # bytes; smaller arrays are not worth the care
_LINE = 64  # of the cache, where arrays begin
_PATIENCE = 600  # tenths of a second
_WASTE = 4  # a block is at most this many times as large as what is asked for


class _Store:
    """Blocks that are free, and how many bytes are out."""

    def __init__(self) -> None:
        self.lock = threading.RLock()  # a lease may end at any allocation, in this very thread too
        self.returned = threading.Condition(self.lock)
        self.users = 0
        self.free: list[Block] = []
        self.out = 0
        self.most = 0

    def take(self, size: int) -> Block:
        """The smallest free block that fits, of several the one that was used last, else a new one."""
        with self.lock:
            self.most = max(self.most, self.out + size)
            fitting = [block for block in self.free if size <= block.size <= _WASTE * size]
            if fitting:
                chosen = min(reversed(fitting), key=lambda block: block.size)  # the last one given back is in the cache
                self.free = [block for block in self.free if block is not chosen]
            else:
                self._keep(self.most - self.out - size)
                chosen = np.empty(size, np.uint8)
            self.out += chosen.size
            return chosen

    def give(self, block: Block) -> None:
        """A block that nobody views any more."""
        with self.lock:
            self.out -= block.size
            if self.users:
                self.free.append(block)
            self.returned.notify_all()

    def enter(self) -> None:
        """One more user."""
        with self.lock:
            self.users += 1

    def leave(self) -> None:
        """The last user turns off the light."""
        with self.lock:
            self.users -= 1
            if not self.users:
                self.free, self.most = [], 0

    def _keep(self, room: int) -> None:
        """Let go of free blocks, the largest first, until they take at most ``room``."""
        self.free.sort(key=lambda block: block.size)
        while self.free and sum(block.size for block in self.free) > room:
            self.free.pop()


_store = _Store()


class _Lease:
    """Owner of a block while arrays view it."""

    def __init__(self, block: Block) -> None:
        self._block = block
        self.__array_interface__ = block.__array_interface__

    def __del__(self) -> None:
        _store.give(self._block)


@contextlib.contextmanager
def reused() -> Iterator[None]:
    """Keep the memory of large arrays for the next ones."""
    _store.enter()
    try:
        yield
    finally:
        _store.leave()


def give_back() -> None:
    """No memory is kept that nobody uses: there are few large arrays to come, or none."""
    with _store.lock:
        _store.free, _store.most = [], _store.out


def wait_for_room(size: int, limit: int, heed: Callable[[], None]) -> None:
    """Wait until the arrays that are alive leave ``size`` bytes below ``limit``, or none is alive.

    ``heed`` is called meanwhile and may raise to stop. When nothing is given back for long, memory is taken all the
    same: a slow disk is no reason to stand still.
    """
    waited = 0
    with _store.returned:
        while _store.out and _store.out + size > limit and waited < _PATIENCE:
            before = _store.out
            _store.returned.wait(0.1)
            waited = waited + 1 if _store.out == before else 0
            heed()


class Turns:
    """A lock that is given in the order in which it was asked for: a plain one can go to the same thread many times."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._next = self._now = 0

    def __enter__(self) -> None:
        with self._changed:
            mine = self._next
            self._next += 1
            self._changed.wait_for(lambda: self._now == mine)

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._now += 1
            self._changed.notify_all()


def new_array(shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
    """An array of any content, C order."""
    kind = np.dtype(dtype)
    size = math.prod(shape) * kind.itemsize
    if size < _LARGE or not _store.users:
        return np.empty(shape, kind)
    flat = np.asarray(_Lease(_store.take(size + _LINE)))
    start = -flat.ctypes.data % _LINE
    return flat[start : start + size].view(kind).reshape(shape)


def read_array(tensor: StoredTensor) -> Array:
    """The whole tensor in an array of :func:`new_array`; sub-byte types as `StoredTensor.array` gives them."""
    if BITS[tensor.dtype] < 8 or tensor.file is None:
        return tensor.array()
    array = new_array(tensor.shape, numpy_dtype(tensor.dtype))
    tensor.read_into(array.reshape(-1).view(np.uint8))
    return array
