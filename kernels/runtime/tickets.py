"""Tickets: counters of finished blocks, for products whose blocks add up parts of one sum.

Products that may run at the same time never share any, so one weight can be used on several streams and in several CUDA
graphs at once: see :func:`tickets`.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from . import device

TICKETS = 1 << 14  # of a weight, and of a stream: up to some hundred for a product of each captured graph
_LARGE = 1 << 23  # elements of a weight; smaller ones, of which a model may have thousands, get a quarter
_of_stream: dict[tuple[int, int], Any] = {}  # GPU, stream -> its tickets; torch has a fixed number of streams
_captured: dict[int, int] = {}  # address of a weight's tickets -> how many of them belong to captured products
_one_at_a_time = threading.Lock()


def new_tickets(target: Any = None, elements: int = _LARGE) -> Any:
    """Of a weight (:data:`TICKETS`, or a quarter), int32, zeros between launches: for graphs that it is captured in."""
    return device.upload(np.zeros(TICKETS if elements >= _LARGE else TICKETS // 4, np.int32), target)


def tickets(own: Any, count: int) -> Any:
    """``count`` zeros for one launch, which leaves zeros; no other that may run at the same time is given them.

    Launches on one stream come one after the other and share its tickets. A graph is replayed on any stream, at
    the same time as others: what is captured takes some of the weight's ``own`` for good, or, when these are used up,
    memory of the graph that every replay clears.
    """
    if device.simulated():
        return own
    if not device.capturing(own):
        key = device.place_of(own), device.stream_of(own)
        found = _of_stream.get(key)
        if found is None:
            found = _of_stream[key] = own.new_zeros(TICKETS)  # cleared on this stream
        return found
    with _one_at_a_time:
        first = _captured.get(own.data_ptr(), 0)
        if first + count <= own.shape[0]:
            _captured[own.data_ptr()] = first + count
            return own[first : first + count]
    return own.new_zeros(count)
