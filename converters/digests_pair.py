"""SHA-256 of files that are written at the same time, two of them in one loop where both have something to hash.

Whoever writes a file hands its bytes over and goes on; one of the writers finds that another file has bytes as well and
hashes both. A file that has no other beside it, or has waited long enough, is hashed alone.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["Meeting", "PairedDigest", "has_instructions"]

_ENOUGH, _MOST = 4, 12  # chunks: worth a look for others; too many to go on with
_PATIENCE = 0.02  # seconds that one with so many waits for another

Bytes = npt.NDArray[np.uint8]


def has_instructions() -> bool:
    """Whether this processor has instructions for SHA-256."""
    from llvmlite import binding  # type: ignore[import-untyped]

    return bool(binding.get_host_cpu_features().get("sha"))


class Meeting:
    """Where files that are written at the same time find each other."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.open: list[PairedDigest] = []


class PairedDigest:
    """The digest of a file, like hashlib's; its bytes must not change until they are hashed."""

    def __init__(self, meeting: Meeting, head: bytes) -> None:
        from bcqfmt.converters.digests_pair_kernel import fresh_state

        self.state = fresh_state()
        self._rest, self._have, self._size = np.empty(128, np.uint8), 0, 0
        self._waiting: list[Bytes] = [np.frombuffer(head, np.uint8)]
        self._busy = False
        self._meeting = meeting
        with meeting.changed:
            meeting.open.append(self)

    def update(self, chunk: Bytes) -> None:
        """The next bytes."""
        with self._meeting.changed:
            self._waiting.append(chunk)
            if len(self._waiting) < _ENOUGH:
                return
            self._meeting.changed.notify_all()
            chosen = self._choose()
        self._hash(chosen)

    def hexdigest(self) -> str:
        """The digest of all bytes; nothing can be added after this."""
        self.close(self._all)
        size, rest, blocks = self._size, self._rest, (self._have + 8) // 64 + 1
        rest[self._have :] = 0
        rest[self._have] = 0x80
        rest[64 * blocks - 8 : 64 * blocks] = np.frombuffer((8 * size).to_bytes(8, "big"), np.uint8)
        from bcqfmt.converters.digests_pair_kernel import ORDER, advance

        advance(self.state, rest.ctypes.data, blocks)
        words = np.empty(8, ">u4")
        words[ORDER] = self.state
        return words.tobytes().hex()

    def close(self, last: Any = None) -> None:
        """No other file meets this one any more; its chunks are let go, or hashed if ``last`` says so."""
        with self._meeting.changed:
            self._meeting.changed.wait_for(lambda: not self._busy)
            if self in self._meeting.open:
                self._meeting.open.remove(self)
            chosen = last() if last is not None else []
            self._waiting.clear()
            self._meeting.changed.notify_all()
        self._hash(chosen)

    def _choose(self) -> list[tuple[PairedDigest, list[Bytes]]]:
        """What to hash now: chunks of two files, or of this one, or nothing yet."""
        end = time.monotonic() + _PATIENCE
        while True:
            others = [other for other in self._meeting.open if other is not self]
            ready = [other for other in others if len(other._waiting) >= _ENOUGH and not other._busy]
            left = end - time.monotonic()
            if not self._busy and ready:
                other = max(ready, key=lambda other: len(other._waiting))
                count = min(len(self._waiting), len(other._waiting))
                return [self._taken(count), other._taken(count)]
            if not self._busy and (not others or (len(self._waiting) >= _MOST and left <= 0)):
                return self._all()
            if len(self._waiting) < _MOST:
                return []
            self._meeting.changed.wait(None if self._busy else max(left, 0))

    def _all(self) -> list[tuple[PairedDigest, list[Bytes]]]:
        return [self._taken(len(self._waiting))]

    def _taken(self, count: int) -> tuple[PairedDigest, list[Bytes]]:
        """The first chunks; nobody else hashes this file meanwhile."""
        chunks, self._waiting = self._waiting[:count], self._waiting[count:]
        self._busy = True
        return self, chunks

    def _hash(self, chosen: list[tuple[PairedDigest, list[Bytes]]]) -> None:
        try:
            _advance([(digest.state, digest._runs(chunks)) for digest, chunks in chosen])
        finally:
            with self._meeting.changed:
                for digest, _ in chosen:
                    digest._busy = False
                if chosen:
                    self._meeting.changed.notify_all()

    def _runs(self, chunks: list[Bytes]) -> Iterator[tuple[int, int]]:
        """(address, blocks) of whole blocks; bytes between chunks are put together, what is left over is kept."""
        for chunk in chunks:
            self._size += chunk.size
            at = min(-self._have % 64, chunk.size)
            self._rest[self._have : self._have + at] = chunk[:at]
            self._have += at
            if self._have == 64:
                yield self._rest.ctypes.data, 1
                self._have = 0
            blocks = (chunk.size - at) // 64
            if blocks:
                yield chunk.ctypes.data + at, blocks
            left = chunk[at + 64 * blocks :]
            self._rest[self._have : self._have + left.size] = left
            self._have += left.size


def _advance(streams: list[tuple[Any, Iterator[tuple[int, int]]]]) -> None:
    """All runs of one stream or of two: together as long as both have some."""
    from bcqfmt.converters.digests_pair_kernel import advance, advance_two

    runs = [next(stream, (0, 0)) for _, stream in streams]
    while any(blocks for _, blocks in runs):
        live = [i for i, (_, blocks) in enumerate(runs) if blocks]
        count = min(runs[i][1] for i in live)
        places = [(streams[i][0], runs[i][0]) for i in live]
        if len(live) == 2:
            advance_two(*places[0], *places[1], count)
        else:
            advance(*places[0], count)
        for i in live:
            place, blocks = runs[i]
            runs[i] = (place + 64 * count, blocks - count) if blocks > count else next(streams[i][1], (0, 0))
