"""SHA-256 of files and of every tensor in them, in one pass over the bytes.

A file's digest and its tensors' digests are two hashes over the same data: each runs in a thread of its own
(hashlib releases the interpreter lock), so a pass costs about as much as one of them.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from .durable import OutputFile
from .files import ByteSource
from .header import Header

__all__ = ["Digests", "MakeDigests", "StreamDigests", "hash_file", "hash_tensors", "stream_digests"]

_CHUNK = 1 << 22
_PIECE = 1 << 19
_WINDOW = 4  # chunks in flight
_SMALL = 1 << 16
Bytes = npt.NDArray[np.uint8]
Progress = Callable[[int], object] | None


def hash_file(source: ByteSource, progress: Progress = None) -> str:
    """SHA-256 of a whole file; ``progress`` is told the bytes done since the last call."""
    state = hashlib.sha256()
    room = np.empty(min(_PIECE, source.size), np.uint8)  # read and hashed while it is in the cache
    for start in range(0, source.size, _PIECE):
        chunk = room[: source.size - start]
        source.read_into(start, chunk)
        state.update(chunk.data)
        if progress is not None:
            progress(chunk.size)
    return state.hexdigest()


def hash_tensors(
    source: ByteSource, header: Header, names: Collection[str], progress: Progress = None
) -> tuple[str, dict[str, str]]:
    """SHA-256 of a whole file, and of the bytes of each tensor in ``names``."""
    whole = hashlib.sha256()
    tensors = _TensorDigests(header, names)
    with ThreadPoolExecutor(1) as left, ThreadPoolExecutor(1) as right:
        pending: list[tuple[Any, Any]] = []
        at = 0
        for chunk in _chunks(source, progress):
            pending.append((left.submit(whole.update, chunk.data), right.submit(tensors.update, at, chunk)))
            at += chunk.size
            if len(pending) >= _WINDOW:
                for job in pending.pop(0):
                    job.result()
        for pair in pending:
            for job in pair:
                job.result()
    return whole.hexdigest(), tensors.result()


class Digests(Protocol):
    """The digests of a file that is being written: of the whole, and of tensors in it."""

    def update(self, chunk: Bytes) -> None:
        """The next bytes; they must not change any more."""

    def end_of_tensor(self, name: str) -> None:
        """The bytes of a tensor are complete."""

    def result(self) -> tuple[str, dict[str, str]]:
        """Digest of everything, and of each tensor."""


# (first bytes of the file, the file, sizes of its tensors in order) -> digests
MakeDigests = Callable[[bytes, OutputFile, Mapping[str, int]], AbstractContextManager[Digests]]


def stream_digests(head: bytes, output: OutputFile, sizes: Mapping[str, int]) -> AbstractContextManager[Digests]:
    """Every digest, computed by hashlib."""
    del output, sizes
    return StreamDigests(head)


class StreamDigests:
    """The digests of a file that is being written: of the whole, and of every tensor in it.

    Both run in threads of their own while the caller goes on; at most a few chunks wait.
    """

    def __init__(self, head: bytes) -> None:
        self._whole, self._single = hashlib.sha256(head), hashlib.sha256()
        self._tensors: dict[str, Any] = {}
        self._left, self._right = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
        self._pending: deque[Any] = deque()

    def __enter__(self) -> StreamDigests:
        return self

    def __exit__(self, *_: object) -> None:
        self._left.shutdown()
        self._right.shutdown()

    def update(self, chunk: Bytes) -> None:
        """The next bytes; they must not change any more."""
        if chunk.size < _SMALL:  # not worth a thread
            self._wait(0)
            self._whole.update(chunk.data)
            self._single.update(chunk.data)
            return
        self._pending.append(self._left.submit(self._whole.update, chunk.data))
        self._pending.append(self._right.submit(self._single.update, chunk.data))
        self._wait(2 * _WINDOW)

    def end_of_tensor(self, name: str) -> None:
        """The bytes of a tensor are complete."""
        self._tensors[name] = self._single
        self._single = hashlib.sha256()

    def result(self) -> tuple[str, dict[str, str]]:
        """Digest of everything, and of each tensor."""
        self._wait(0)
        return self._whole.hexdigest(), {name: state.hexdigest() for name, state in self._tensors.items()}

    def _wait(self, most: int) -> None:
        while len(self._pending) > most:
            self._pending.popleft().result()


class _TensorDigests:
    """Cuts a stream of bytes at the tensors' borders and hashes each piece."""

    def __init__(self, header: Header, names: Collection[str]) -> None:
        start = header.data_start
        entries = [(header.tensors[name], name) for name in names]
        spans = sorted((entry.begin + start, entry.end + start, name) for entry, name in entries)
        self._digests = {name: hashlib.sha256().hexdigest() for begin, end, name in spans if begin == end}
        self._spans: Iterator[tuple[int, int, str]] = iter([span for span in spans if span[0] < span[1]])
        self._current = next(self._spans, None)
        self._state = hashlib.sha256()

    def update(self, at: int, chunk: Bytes) -> None:
        """The next bytes of the file, ``chunk`` beginning at ``at``."""
        stop = at + chunk.size
        while self._current is not None and self._current[0] < stop:
            begin, end, name = self._current
            self._state.update(chunk[max(begin, at) - at : min(end, stop) - at].data)
            if end > stop:
                return
            self._digests[name] = self._state.hexdigest()
            self._state = hashlib.sha256()
            self._current = next(self._spans, None)

    def result(self) -> dict[str, str]:
        """Name -> digest."""
        return self._digests


def _chunks(source: ByteSource, progress: Progress) -> Iterator[Bytes]:
    for start in range(0, source.size, _CHUNK):
        chunk = source.read(start, min(_CHUNK, source.size - start))
        yield chunk
        if progress is not None:
            progress(chunk.size)
