"""SHA-256 of many parts of files: sixteen at a time, where the processor makes that cheaper than one after the other.

A converted weight's digest is over the bytes of its parts, which are hashed with their file as well; and the source's
files are hashed too. Only the digest of a file that is being written needs its bytes one after the other. Everything
else is read again, from the page cache, when there are enough streams to fill the lanes of `digests_kernel`.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from bcqfmt.converters.digests_pair import Meeting

if TYPE_CHECKING:
    from bcqfmt.converters.digests_kernel import Lanes

__all__ = ["ManyDigests", "even", "faster_here", "worth_lanes"]

_LANES = 16
_FEW = 7  # streams: fewer are faster one after the other
_CHUNK = 1 << 18  # bytes that hashlib gets at a time
_STEP = 1 << 22  # bytes of each of sixteen streams at a time
_ROW = 1 << 16  # bytes of each that are read at once: all rows stay in the second cache
_SLACK = _LAST = 1 << 27  # bytes that may be behind; bytes that are the last ones


class Readable(Protocol):
    """A file, as far as it is needed here."""

    def duplicate(self) -> int:
        """A descriptor that is the caller's to close."""

    def read_into(self, offset: int, buffer: npt.NDArray[np.uint8]) -> None:
        """Fill ``buffer`` with the bytes from ``offset`` on."""


def faster_here() -> bool:
    """Whether this processor has the vectors that make it worth while."""
    from llvmlite import binding  # type: ignore[import-untyped]

    features = binding.get_host_cpu_features()
    return bool(features.get("avx512f") and features.get("avx512vl"))


def even(sizes: Collection[int]) -> bool:
    """Whether streams of these sizes keep lanes busy to the end: none is much longer than the others."""
    return sum(sizes) >= _FEW * max(sizes, default=1)


def worth_lanes(sizes: Mapping[str, int]) -> set[str]:
    """The streams, by name, that are not too long beside all of them."""
    return {name for name, size in sizes.items() if _FEW * size <= sum(sizes.values())}


class _Stream:
    """Bytes of a file that are being hashed."""

    def __init__(self, source: Readable, begin: int, size: int) -> None:
        self.source, self.at, self.left, self.size = source, begin, size, size
        self.future: Future[str] = Future()
        self.state: npt.NDArray[np.uint32] | None = None

    def place(self, lanes: Lanes, lane: int) -> None:
        """Whole blocks of the next bytes into a lane; its file is to be closed afterwards."""
        if count := min(self.left, _STEP) // 64:
            lanes.files[lane], lanes.places[lane], lanes.counts[lane] = self.source.duplicate(), self.at, count

    def fill(self, lanes: Lanes, lane: int) -> None:
        """The last bytes, less than a block, and what SHA-256 puts after them, into a lane."""
        row, count = lanes.data[lane], self.left
        self.source.read_into(self.at, row[:count])
        blocks = (count + 8) // 64 + 1
        row[count : 64 * blocks] = 0
        row[count] = 0x80
        row[64 * blocks - 8 : 64 * blocks] = np.frombuffer((8 * self.size).to_bytes(8, "big"), np.uint8)
        lanes.counts[lane], self.left = blocks, 0

    def reread(self) -> None:
        """What could not be read, with whatever is wrong with it."""
        self.source.read_into(self.at, np.empty(min(_ROW, self.left), np.uint8))

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


class ManyDigests:
    """Takes parts of files and hashes them in threads of its own, when there are many or somebody waits."""

    def __init__(self, threads: int = 1, meeting: Meeting | None = None) -> None:
        """``meeting``: where files find each other whose own digests can be made two at a time."""
        self.meeting = meeting
        self._streams: list[_Stream] = []
        self._busy: list[_Stream] = []
        self._changed = threading.Condition()  # over an RLock: it is taken within itself
        self._waiting = 0
        self._closed = False
        self._behind = 0.0
        self.beside = 0.0  # bytes of files that should be hashed for every byte that is written
        self._to_come = 1 << 62  # bytes of files that will be written and have not begun
        self._begun = False  # whether lanes were full once
        self._local = threading.local()
        self._threads = [threading.Thread(target=self._work, daemon=True) for _ in range(threads)]
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> ManyDigests:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """No file is read after this; what is not done is cancelled."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        for stream in self._streams:
            stream.future.cancel()

    def submit(self, source: Readable, begin: int, size: int) -> Future[str]:
        """The digest of ``size`` bytes from ``begin`` on."""
        stream = _Stream(source, begin, size)
        with self._changed:
            self._streams.append(stream)
            self._begun = self._begun or len(self._streams) + len(self._busy) >= _LANES
            self._changed.notify_all()
        return stream.future

    def results(self, futures: Iterable[Future[str]]) -> list[str]:
        """The digests; they are computed now, with the help of this thread."""
        wanted = list(futures)
        with self._changed:
            self._waiting += 1
            self._changed.notify_all()
        try:
            while not all(future.done() for future in wanted) and (chosen := self._take(1)):
                self._go_on(chosen)
            return [future.result() for future in wanted]
        finally:
            with self._changed:
                self._waiting -= 1

    def result(self, future: Future[str]) -> str:
        """One digest, computed now."""
        return self.results([future])[0]

    def forget(self, futures: Collection[Future[str]]) -> None:
        """Nobody wants them any more: after this their file can be closed."""
        with self._changed:
            self._changed.wait_for(lambda: not any(stream.future in futures for stream in self._busy))
            self._streams = [stream for stream in self._streams if stream.future not in futures]
        for future in futures:
            future.cancel()

    def keep_up(self, due: float) -> None:
        """``due`` more bytes should be hashed by now: help a little, if the threads are behind and lanes would be full.

        Otherwise all of it would be left to them when everything else is done. One step only: all who call should help.
        """
        with self._changed:
            self._behind += due
        if self._behind > _SLACK and (chosen := self._take()):
            self._go_on(chosen)

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or len(self._streams) >= self._enough)
                if self._closed:
                    return
                chosen = self._take(self._enough)
            self._go_on(chosen)

    @property
    def ending(self) -> bool:
        """Whether so little is still to come that what is submitted now would be left when all else is done."""
        return self._to_come < _LAST

    def expect(self, size: int) -> None:
        """So many bytes will be written."""
        self._to_come = size

    def begin(self, size: int) -> None:
        """So many of them are being written now, or need not be."""
        with self._changed:
            self._to_come -= size
            if self.ending:
                self._changed.notify_all()

    @property
    def _enough(self) -> int:
        """Streams that are worth a step: all lanes; any when somebody waits; fewer as long as processors are idle."""
        starting = self.beside > 0 and not self._begun  # there are files to hash, and nothing is written yet
        return 1 if self._waiting else max(1, _FEW) if starting or self.ending else _LANES

    def _take(self, least: int = _LANES) -> list[_Stream]:
        """The streams to go on with; none when there are fewer than ``least``."""
        with self._changed:
            if len(self._streams) < least or self._closed:
                return []
            self._streams.sort(key=lambda stream: -stream.left)  # long ones first, so that none is left alone
            chosen = self._streams[:_LANES]
            fresh = [stream for stream in self._streams if stream.state is None]
            if self.ending and self._waiting and len(fresh) < len(self._streams) and not self._busy:
                chosen = [stream for stream in self._streams if stream.state is not None][:_LANES]
            elif fresh and (len(chosen) < _FEW or (self.ending and self._waiting)):
                chosen = fresh[:1]
            self._streams = [stream for stream in self._streams if stream not in chosen]
            self._busy += chosen
            return chosen

    def _go_on(self, chosen: list[_Stream]) -> None:
        if not hasattr(self._local, "lanes"):
            from bcqfmt.converters.digests_kernel import Lanes

            self._local.lanes = Lanes(_ROW)
        before = sum(stream.left for stream in chosen)
        _step(self._local.lanes, chosen)
        with self._changed:
            self._behind -= before - sum(stream.left for stream in chosen)
            self._busy = [stream for stream in self._busy if stream not in chosen]
            self._streams = [stream for stream in chosen if not stream.future.done()] + self._streams
            self._changed.notify_all()


def _step(lanes: Lanes, chosen: list[_Stream]) -> None:
    """Some bytes of every stream, or all of one that is alone and has not begun."""
    if len(chosen) == 1 and chosen[0].state is None:
        chosen[0].guarded(chosen[0].alone)
        return
    for lane, stream in enumerate(chosen):
        lanes.states[:, lane] = lanes.start if stream.state is None else stream.state
    _read(lanes, chosen)
    lanes.clear()
    last = [lane for lane, stream in enumerate(chosen) if stream.left < 64 and not stream.future.done()]
    for lane in last:
        chosen[lane].guarded(partial(chosen[lane].fill, lanes, lane))
    lanes.advance()
    for lane, stream in enumerate(chosen):
        stream.state = lanes.states[:, lane].copy()
        if lane in last and not stream.future.done():
            stream.future.set_result(stream.state.astype(">u4").tobytes().hex())


def _read(lanes: Lanes, chosen: list[_Stream]) -> None:
    """Whole blocks of every stream, from its file; one that cannot be read stops the others until the next step."""
    lanes.clear()
    try:
        for lane, stream in enumerate(chosen):
            stream.guarded(partial(stream.place, lanes, lane))
        wrong = lanes.advance()
        for lane, stream in enumerate(chosen):
            done = int(lanes.places[lane]) - stream.at if lanes.has_file(lane) else 0
            stream.at, stream.left = stream.at + done, stream.left - done
    finally:
        lanes.close()
    if wrong < len(chosen):
        chosen[wrong].guarded(chosen[wrong].reread)
