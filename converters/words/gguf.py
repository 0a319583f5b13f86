"""Fields of GGUF blocks to planes ``uint32 [bits, N, K/32]`` and back; K is a multiple of a block's elements."""

from __future__ import annotations

import numpy as np

from . import bit_programs as programs
from . import runs
from .arrays import Array, Codes, Words
from .bit_programs import Container
from .buffers import new_array

__all__ = ["field_to_planes", "planes_to_field"]

_STREAMS = {"stream 1": 1, "stream 2": 2, "stream 8": 8}


def field_to_planes(field: Codes, order: str, planes: Words, threads: int = 1) -> None:
    """Fill ``planes`` from the bytes ``field`` [N, K*bits/8] of all blocks of a row, one after the other.

    ``order``: how codes lie in the bytes, one of `bit_programs.gguf` or ``stream 1``, ``stream 2``, ``stream 8``.
    """
    words = field if field.ctypes.data % 4 == 0 else field.copy()
    source, target = _sides(words, order, planes)
    runs.run(source, target, threads=threads)


def planes_to_field(planes: Array, order: str, threads: int = 1) -> Codes:
    """The inverse of `field_to_planes`."""
    bits, n, blocks = planes.shape
    field = new_array((n, 4 * bits * blocks), np.uint8)
    target, source = _sides(field, order, np.require(planes, requirements=["C", "A"]).view(np.uint32))
    runs.run(source, target, threads=threads)
    return field


def _sides(field: Codes, order: str, planes: Words) -> tuple[runs.Side, runs.Side]:
    container: Container = programs.stream(_STREAMS[order]) if order in _STREAMS else programs.gguf(order)
    count = container.columns
    words = field.view(np.uint32)
    return (
        runs.columns(words, container, words.shape[1] // container.words),
        runs.planes(planes).blocks_together(count) if count > 1 else runs.planes(planes),
    )
