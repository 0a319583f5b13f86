"""Threads that share one piece of work, and the memory that a thread works in.

Compiled loops release the GIL. A thread takes the next part of the work when it is done with one, so work is spread
evenly however late a thread starts; which thread did what never shows in the result.
"""

from __future__ import annotations

import math
import queue
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from bcqfmt.errors import error
from bcqfmt.system import after_fork

__all__ = ["aligned", "each_share", "scratch", "together"]

_LINE = 64  # bytes of a cache line, and of a vector register


class _State:
    """The threads of this process: how many there are, and where they find work."""

    shares: queue.SimpleQueue[_Share] = queue.SimpleQueue()
    size = 0
    lock = threading.Lock()


class _Share:
    """A call for another thread: two locks instead of a future, which takes 50 us longer (ARM, 4096 x 4096)."""

    def __init__(self, work: Callable[[int], None], index: int) -> None:
        self.work, self.index = work, index
        self.taken, self.done = threading.Lock(), threading.Lock()
        self.done.acquire()
        self.fault: BaseException | None = None

    def take(self) -> None:
        """Do it, unless it was dropped."""
        if self.taken.acquire(blocking=False):
            try:
                self.work(self.index)
            except BaseException as fault:  # noqa: BLE001  # raised again by the thread that waits
                self.fault = fault
            self.done.release()

    def drop_or_wait(self) -> None:
        """Drop it, or wait for its end if it has begun."""
        if not self.taken.acquire(blocking=False):
            self.done.acquire()


def _serve(shares: queue.SimpleQueue[_Share]) -> None:
    while True:
        shares.get().take()


def _after_fork() -> None:  # a child has none of its parent's threads
    _State.shares, _State.size, _State.lock = queue.SimpleQueue(), 0, threading.Lock()


after_fork(_after_fork)


def together(work: Callable[[int], None], threads: int) -> None:
    """``work(i)`` for i in 0..threads-1 at the same time; ``work(0)`` here.

    The calls share one supply of work, so that ``work(0)`` can do all of it; those not begun by then are dropped.
    """
    if threads < 1:
        raise error("BCQ-E552", found=f"{threads} threads", expected="at least 1")
    if _State.size < threads - 1:
        _start(threads - 1)
    shares = [_Share(work, i) for i in range(1, threads)]
    for share in shares:
        _State.shares.put(share)
    try:
        work(0)
    finally:
        for share in shares:
            share.drop_or_wait()
    for share in shares:
        if share.fault is not None:
            raise share.fault


def _start(size: int) -> None:
    """More threads, until there are so many."""
    with _State.lock:
        while _State.size < size:
            threading.Thread(target=_serve, args=(_State.shares,), name="bcqfmt", daemon=True).start()
            _State.size += 1


def each_share(work: Callable[[int, int], None], count: int, grain: int, threads: int) -> None:
    """``work(first, stop)`` over 0..count in at most ``threads`` shares that begin at multiples of ``grain``."""
    share = -(-count // (grain * max(threads, 1))) * grain
    if share >= count:
        work(0, count)
        return
    starts = iter(range(0, count, share))

    def take(_: int) -> None:
        for first in starts:
            work(first, min(first + share, count))

    together(take, -(-count // share))


class _Memory(threading.local):
    """What a thread keeps: the memory of every name, and the views of it that were asked for."""

    def __init__(self) -> None:
        self.held: dict[str, npt.NDArray[Any]] = {}
        self.views: dict[tuple[str, tuple[int, ...]], npt.NDArray[Any]] = {}


_memory = _Memory()


def scratch(name: str, shape: tuple[int, ...], dtype: Any) -> npt.NDArray[Any]:
    """An array of the calling thread's own, the same memory at every call with that name, with its last content."""
    found = _memory.views.get((name, shape))
    if found is None:
        count = math.prod(shape)
        if name not in _memory.held or _memory.held[name].size < count:
            _memory.held[name] = aligned(count, dtype)
            _memory.views.clear()
        found = _memory.views[name, shape] = _memory.held[name][:count].reshape(shape)
    return found


def aligned(count: int, dtype: Any) -> npt.NDArray[Any]:
    """An array that begins at a cache line; zeros."""
    kind = np.dtype(dtype)
    raw = np.zeros(count * kind.itemsize + _LINE, np.uint8)
    start = -raw.ctypes.data % _LINE
    return raw[start : start + count * kind.itemsize].view(kind)
