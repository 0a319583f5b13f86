"""The thread pool of all long jobs, and a gate that bounds how much they hold in memory."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

T = TypeVar("T")
WORKERS = min(4, os.cpu_count() or 1)  # files at a time; the heavy work releases the interpreter lock
Tick = Callable[[int], None]  # bytes done since the last call
ShardDone = Callable[[str, int], None]  # name and size of a finished shard


class Stopped(Exception):
    """Another job failed, or the user interrupted."""


class Stop(threading.Event):
    """Set when a job has failed or the user interrupts; long jobs call :meth:`check` often."""

    def check(self, *_: object) -> None:
        """Raise :class:`Stopped` once it is set; arguments are ignored, so that it can serve as a progress callback."""
        if self.is_set():
            raise Stopped

    def progress(self, tick: Tick | None) -> Tick:
        """A progress callback: it checks, then calls ``tick``."""

        def report(done: int) -> None:
            self.check()
            if tick is not None:
                tick(done)

        return report


class Gate:
    """Admits jobs while their sizes add up to at most ``capacity``, the largest one; first come, first served."""

    def __init__(self, capacity: int, check_stop: Callable[[], None]) -> None:
        """``check_stop`` is called while a job waits, and raises to end the wait."""
        self.capacity = max(1, capacity)
        self._check_stop = check_stop
        self._held = 0
        self._turn = threading.Lock()
        self._freed = threading.Condition()

    @contextmanager
    def hold(self, size: int) -> Iterator[None]:
        """Wait until there is room for ``size``, and take it up."""
        size = min(size, self.capacity)
        with self._turn, self._freed:
            while self._held + size > self.capacity:
                self._check_stop()
                self._freed.wait(0.1)
            self._held += size
        try:
            yield
        finally:
            with self._freed:
                self._held -= size
                self._freed.notify()

    def share(self, size: int, workers: int) -> int:
        """Threads for a job of this size: all of them when no other job fits next to it, one when many fit."""
        return max(1, workers // max(1, min(workers, self.capacity // max(1, size))))


def run_all(
    jobs: Sequence[Callable[[], None]], workers: int, stop: threading.Event, patience: float | None = 5.0
) -> None:
    """Run the jobs in order, ``workers`` at a time; the first real failure is raised here and stops the others.

    ``stop`` is set by a failure and by an interrupt. The threads are daemons: ``patience`` is how many seconds an
    interrupt waits for them (None: until they end), because compiled code cannot be stopped.
    """
    waiting: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
    for job in jobs:
        waiting.put(job)
    faults: list[BaseException] = []
    ended = threading.Semaphore(0)

    def work() -> None:
        try:
            while not stop.is_set():
                try:
                    job = waiting.get_nowait()
                except queue.Empty:
                    return
                job()
        except BaseException as fault:  # noqa: BLE001 - handed over, raised by the caller
            faults.append(fault)
            stop.set()
        finally:
            ended.release()

    threads = [threading.Thread(target=work, daemon=True) for _ in range(max(1, min(workers, len(jobs))))]
    try:
        for thread in threads:
            thread.start()
        for _ in threads:
            ended.acquire()
    except BaseException:  # an interrupt, which may come while they start
        stop.set()
        for thread in threads:
            if thread.is_alive():
                thread.join(None if patience is None else patience / len(threads))
        raise
    real = [fault for fault in faults if not isinstance(fault, Stopped)]
    if faults:
        raise (real or faults)[0]


def run_each(job: Callable[[str], T], names: Iterable[str], workers: int, stop: threading.Event) -> dict[str, T]:
    """``job(name)`` for every name, ``workers`` at a time: name -> result, in the order of the names."""
    found: dict[str, T] = {}
    ordered = list(names)

    def one(name: str) -> None:
        found[name] = job(name)

    run_all([partial(one, name) for name in ordered], workers, stop, patience=None)
    return {name: found[name] for name in ordered}
