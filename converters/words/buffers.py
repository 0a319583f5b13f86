"""Large arrays whose memory is reused: fresh pages from the system cost as much as the work that is done on them.

Inside ``with reused():`` the memory of an array from :func:`new_array` goes to a common store when its last view is
deleted, and the next array of about that size takes it from there. The store keeps no more than arrays have needed at
the same time, and nothing after the last ``with``. Outside, an array is a plain new one.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Block = npt.NDArray[np.uint8]
_LARGE = 1 << 20  # bytes; smaller arrays are plain ones
_LINE = 64  # bytes of a cache line, where arrays begin
_LONGEST_WAIT = 600  # tenths of a second
_OVERSIZE = 4  # a block is at most this many times as large as the array in it


class _Store:
    """Free blocks, and the bytes of those in use, now (``used``) and at most (``most``)."""

    def __init__(self) -> None:
        self.lock = threading.RLock()  # garbage collection may give a block back in a thread that holds the lock
        self.returned = threading.Condition(self.lock)
        self.users = 0
        self.free: list[Block] = []
        self.used = 0
        self.most = 0

    def take(self, size: int) -> Block:
        """The smallest free block that is large enough, of several the last one given back, else a new one."""
        with self.lock:
            self.most = max(self.most, self.used + size)
            fitting = [block for block in self.free if size <= block.size <= _OVERSIZE * size]
            if fitting:
                chosen = min(reversed(fitting), key=lambda block: block.size)  # the last one is in the cache
                self.free = [block for block in self.free if block is not chosen]
            else:
                self._shrink(self.most - self.used - size)
                chosen = np.empty(size, np.uint8)
            self.used += chosen.size
            return chosen

    def give(self, block: Block) -> None:
        """A block that has no views any more."""
        with self.lock:
            self.used -= block.size
            if self.users:
                self.free.append(block)
            self.returned.notify_all()

    def enter(self) -> None:
        """One more user."""
        with self.lock:
            self.users += 1

    def leave(self) -> None:
        """One user less; after the last one no block is kept."""
        with self.lock:
            self.users -= 1
            if not self.users:
                self.free, self.most = [], 0

    def _shrink(self, room: int) -> None:
        """Drop free blocks, the largest first, until they take at most ``room`` bytes."""
        self.free.sort(key=lambda block: block.size)
        while self.free and sum(block.size for block in self.free) > room:
            self.free.pop()


_store = _Store()


class _Owner:
    """Owns a block while arrays view it."""

    def __init__(self, block: Block) -> None:
        self._block = block
        self.__array_interface__ = block.__array_interface__

    def __del__(self) -> None:
        _store.give(self._block)


@contextlib.contextmanager
def reused() -> Iterator[None]:
    """Keep the memory of large arrays for the next ones, inside the ``with``."""
    _store.enter()
    try:
        yield
    finally:
        _store.leave()


def wait_for_room(size: int, limit: int, check_stop: Callable[[], None]) -> None:
    """Wait until ``size`` more bytes of arrays stay within ``limit``, or no array is in use.

    ``check_stop`` is called while waiting and may raise. When no memory is given back for a minute the wait ends: a
    slow disk delays the work, it does not stop it.
    """
    waited = 0
    with _store.returned:
        while _store.used and _store.used + size > limit and waited < _LONGEST_WAIT:
            before = _store.used
            _store.returned.wait(0.1)
            waited = waited + 1 if _store.used == before else 0
            check_stop()


def new_array(shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
    """An array with any content, C order; inside :func:`reused` a large one takes the memory of an earlier one."""
    kind = np.dtype(dtype)
    size = math.prod(shape) * kind.itemsize
    if size < _LARGE or not _store.users:
        return np.empty(shape, kind)
    flat = np.asarray(_Owner(_store.take(size + _LINE)))
    start = -flat.__array_interface__["data"][0] % _LINE
    return flat[start : start + size].view(kind).reshape(shape)
