"""SHA-256 of files, by hashlib, which uses the processor's SHA instructions."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import numpy as np

from .files import ByteSource

_PIECE = 1 << 21  # bytes read and hashed while they are in the cache


def hash_file(
    source: ByteSource,
    progress: Callable[[int], object] | None = None,
    each: Callable[[memoryview], object] | None = None,
) -> str:
    """SHA-256 of a whole file; ``progress`` gets the bytes done since the last call and may raise to stop.

    ``each`` gets the content, a piece at a time, to copy it.
    """
    state = hashlib.sha256()
    buffer = np.empty(min(_PIECE, source.size), np.uint8)
    for start in range(0, source.size, _PIECE):
        piece = buffer[: source.size - start]
        source.read_into(start, piece)
        state.update(piece.data)
        if each is not None:
            each(piece.data)
        if progress is not None:
            progress(piece.size)
    return state.hexdigest()
