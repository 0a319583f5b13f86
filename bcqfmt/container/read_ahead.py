"""An iterator that runs ahead of its consumer, in a thread: the next item is made while this one is used."""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterable
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")
_DEPTH = 4
_END: Any = object()


def read_ahead(items: Iterable[T]) -> Generator[T, None, None]:
    """The items in order, at most a few of them waiting; an error of the producer is raised here.

    Close the generator to stop the producer early.
    """
    waiting: SimpleQueue[Any] = SimpleQueue()
    room: SimpleQueue[None] = SimpleQueue()  # an entry for every item that may be made
    for _ in range(_DEPTH):
        room.put(None)
    stopped = threading.Event()

    def produce() -> None:
        try:
            for item in items:
                waiting.put((item, None))
                del item  # the next one may need its memory
                room.get()
                if stopped.is_set():
                    return
        except BaseException as fault:  # noqa: BLE001 - handed over, raised by the consumer
            waiting.put((_END, fault))
        else:
            waiting.put((_END, None))

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
            room.put(None)
    finally:
        stopped.set()
        room.put(None)
        thread.join()
