"""An iterator that runs ahead of its consumer, in a thread: the next item is made while this one is used."""

from __future__ import annotations

import queue
import threading
from collections.abc import Generator, Iterable
from typing import Any, TypeVar

T = TypeVar("T")
_DEPTH = 4
_END: Any = object()


def read_ahead(items: Iterable[T]) -> Generator[T, None, None]:
    """The items in order, at most a few of them waiting; an error of the producer is raised here.

    Close the generator to stop the producer early.
    """
    waiting: queue.Queue[Any] = queue.Queue(_DEPTH)
    stop = threading.Event()

    def put(item: Any) -> bool:
        while not stop.is_set():
            try:
                waiting.put(item, timeout=0.1)
            except queue.Full:
                continue
            return True
        return False

    def produce() -> None:
        try:
            for item in items:
                if not put((item, None)):
                    return
                del item  # the next one may need its memory
        except BaseException as fault:  # noqa: BLE001 - handed over, raised by the consumer
            put((_END, fault))
        else:
            put((_END, None))

    thread = threading.Thread(target=produce, daemon=True)
    thread.start()
    try:
        while True:
            item, fault = waiting.get()
            if fault is not None:
                raise fault
            if item is _END:
                return
            yield item
            del item
    finally:
        stop.set()
        thread.join()
