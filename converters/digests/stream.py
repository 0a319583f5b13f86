"""A stream: some bytes of a file, whose SHA-256 is made step by step."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from .constants import end_message

if TYPE_CHECKING:
    from .kernel import Lanes

__all__ = ["ROW", "Readable", "Stream"]

ROW = 1 << 16  # bytes of a lane that are read at once: all rows stay in the second cache
_CHUNK = 1 << 18  # bytes that hashlib gets at a time
_STEP = 1 << 22  # bytes of each of sixteen streams at a time


class Readable(Protocol):
    """A file, as far as it is needed here."""

    def duplicate(self) -> int:
        """A descriptor that is the caller's to close."""

    def read_into(self, offset: int, buffer: npt.NDArray[np.uint8]) -> None:
        """Fill ``buffer`` with the bytes from ``offset`` on."""


class Stream:
    """Bytes of a file that are being hashed."""

    def __init__(self, source: Readable, begin: int, size: int) -> None:
        self.source, self.at, self.left, self.size = source, begin, size, size
        self.reached, self.grows = begin + size, False  # how far it can be read by now
        self._descriptor = -1
        self.future: Future[str] = Future()
        self.state: npt.NDArray[np.uint32] | None = None

    def __del__(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)

    def descriptor(self) -> int:
        """One that is open as long as this object: whoever reads the source may lock it for long."""
        if self._descriptor < 0:
            self._descriptor = self.source.duplicate()
        return self._descriptor

    @property
    def there(self) -> int:
        """Bytes that can be read by now."""
        return self.reached - self.at

    @property
    def grows_on(self) -> bool:
        """Whether bytes are still to come; when they are all there, somebody may wait for the digest."""
        return self.there < self.left

    def worth(self, size: int) -> bool:
        """Whether so many bytes can be read, or the last ones."""
        return self.there >= min(size, self.left)

    def go_on(self, size: int) -> None:
        """So many bytes are hashed."""
        self.at, self.left = self.at + size, self.left - size

    def place(self, lanes: Lanes, lane: int) -> None:
        """Whole blocks of the next bytes into a lane; its file is to be closed afterwards."""
        if count := min(self.left, _STEP) // 64:
            lanes.files[lane], lanes.places[lane], lanes.counts[lane] = self.source.duplicate(), self.at, count

    def fill(self, lanes: Lanes, lane: int) -> None:
        """The last bytes, less than a block, and what SHA-256 puts after them, into a lane."""
        row, count = lanes.data[lane], self.left
        self.source.read_into(self.at, row[:count])
        lanes.counts[lane], self.left = end_message(row, count, self.size), 0

    def finish(self) -> None:
        """The last bytes, a few, alone."""
        from .one_kernel import advance, digest_of, ordered

        rest, state = np.empty(self.left, np.uint8), ordered(self.state)
        self.source.read_into(self.at, rest)
        if blocks := rest.size // 64:
            advance(state, rest.ctypes.data, blocks)
        self.left = 0
        self.future.set_result(digest_of(state, rest[64 * blocks :], self.size))

    def reread(self) -> None:
        """What could not be read, with whatever is wrong with it."""
        self.source.read_into(self.at, np.empty(min(ROW, self.left), np.uint8))

    def guarded(self, work: Callable[[], None]) -> None:
        """``work``, whose error is kept for whoever waits for this stream."""
        try:
            work()
        except BaseException as fault:  # noqa: BLE001 - raised where the digest is waited for
            self.left = 0
            self.future.set_exception(fault)

    def alone(self) -> None:
        """All of it at once, with hashlib."""
        state, room = hashlib.sha256(), np.empty(min(_CHUNK, self.size), np.uint8)
        for start in range(self.at, self.at + self.left, _CHUNK):
            chunk = room[: self.at + self.left - start]
            self.source.read_into(start, chunk)
            state.update(chunk.data)
        self.left = 0
        self.future.set_result(state.hexdigest())
