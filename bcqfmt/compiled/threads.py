"""Threads that share one piece of work, and the memory that a thread works in.

Compiled loops release the GIL. A thread takes the next part of the work when it is done with one, so work is spread
evenly however late a thread starts; which thread did what never shows in the result.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt

from bcqfmt.errors import error
from bcqfmt.system import after_fork

_LINE = 64  # bytes of a cache line, and of a vector register
_HUGE = 1 << 21  # bytes of a huge page


class _State:
    """The pool of this process."""

    pool: ThreadPoolExecutor | None = None
    size = 0
    lock = threading.Lock()


def _after_fork() -> None:
    _State.pool, _State.size, _State.lock = None, 0, threading.Lock()  # a child has none of its parent's threads


after_fork(_after_fork)


def together(work: Callable[[int], None], threads: int) -> None:
    """``work(i)`` for i in 0..threads-1 at the same time; ``work(0)`` here.

    The calls share one supply of work, so that ``work(0)`` can do all of it; those not begun by then are dropped.
    """
    if threads < 1:
        raise error("BCQ-E552", found=f"{threads} threads", expected="at least 1")
    if threads == 1:
        work(0)
        return
    pool = _pool(threads - 1)
    others = [pool.submit(work, i) for i in range(1, threads)]
    try:
        work(0)
    finally:
        started = [other for other in others if not other.cancel()]
        for other in started:
            other.result()


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


def _pool(size: int) -> ThreadPoolExecutor:
    with _State.lock:
        if _State.pool is None or _State.size < size:
            _State.pool, _State.size = ThreadPoolExecutor(size, "bcqfmt"), size
        return _State.pool


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
    """An array that begins at a cache line, a large one at a huge page: its memory comes in few page faults; zeros."""
    kind = np.dtype(dtype)
    size = count * kind.itemsize
    unit = _LINE if size < 2 * _HUGE else _HUGE
    raw = np.zeros(size + unit, np.uint8)
    start = -raw.ctypes.data % unit
    return raw[start : start + size].view(kind)
