"""Threads for jobs that may take long and cannot be interrupted, and a gate that bounds what they hold in memory."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

__all__ = ["Gate", "Stopped", "run_all"]

_PATIENCE = 1.0  # seconds that an interrupted run waits for its threads; what they leave behind is resumable


class Stopped(Exception):
    """Another job failed, or the user interrupted."""


class Gate:
    """Lets jobs in as long as their sizes add up to no more than the largest one; first come, first served."""

    def __init__(self, capacity: int, heed: Callable[[], None]) -> None:
        self.capacity = max(1, capacity)
        self._heed = heed
        self._held = 0
        self._turn = threading.Lock()
        self._freed = threading.Condition()

    @contextmanager
    def hold(self, size: int) -> Iterator[None]:
        """Wait until there is room for ``size``, and take it up."""
        size = min(size, self.capacity)
        with self._turn, self._freed:
            while self._held + size > self.capacity:
                self._heed()
                self._freed.wait(0.1)
            self._held += size
        try:
            yield
        finally:
            with self._freed:
                self._held -= size
                self._freed.notify()

    def share(self, size: int, workers: int) -> int:
        """Threads for a job of this size: all of them when it is alone in here, one when many fit."""
        return max(1, workers // max(1, min(workers, self.capacity // max(1, size))))


def run_all(jobs: Sequence[Callable[[], None]], workers: int, stop: threading.Event) -> None:
    """Run the jobs in order, ``workers`` at a time; the first real failure is raised here and stops the others.

    ``stop`` is set by a failure and by an interrupt. The threads are daemons: an interrupt does not wait for compiled
    code to come back.
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
    for thread in threads:
        thread.start()
    try:
        for _ in threads:
            ended.acquire()
    except BaseException:  # an interrupt: whoever heeds gets a moment to clean up
        stop.set()
        for thread in threads:
            thread.join(_PATIENCE / len(threads))
        raise
    real = [fault for fault in faults if not isinstance(fault, Stopped)]
    if faults:
        raise (real or faults)[0]
