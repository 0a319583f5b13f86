"""SHA-256 of files that are being written, along with sixteen streams, in one loop (`digests_along_kernel`).

Whoever writes a file says how far it is and goes on; nobody waits for digests until everything is written. A thread
takes what is there of one file, with a lane for each of sixteen streams: files of the source, and weights that were
written. All of it is in the page cache, so however much is left to do, it takes no memory. One such loop at a time is
enough as long as files are written: there are not streams enough for two. In the end everybody helps.
"""

from __future__ import annotations

import contextlib
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from . import LANES, ManyDigests, faster_here
from .stream import ROW, Stream
from .written import WrittenFile

if TYPE_CHECKING:
    from .along_loop import Along

__all__ = ["COMPANY", "FIRST", "DigestsAlong", "digests_for", "fits_here"]

FIRST, COMPANY = 1024, 128  # bytes of the stream that is first, and of a lane, each time
_TIMES = 6 << 10  # that are a step: its bytes are mapped, and count as memory of this process
_PIECE = 1 << 19  # bytes of a stream that is alone
_GOOD = 4  # lanes: with fewer a stream goes alone
_ENOUGH = 1 << 22  # bytes of a file that are worth a step
_SLACK = 1 << 30  # bytes that may be behind
_WORTH = 1 << 26  # bytes that are worth another compiled loop


def fits_here() -> bool:
    """Whether the processor has the instructions."""
    from . import along_kernel as digests_along_kernel

    return digests_along_kernel.fits_here()


def digests_for(size: int, workers: int) -> contextlib.AbstractContextManager[ManyDigests | None]:
    """Who hashes many streams at once, where so many bytes will be written; nobody where that is no gain."""
    if size < _WORTH or not faster_here():
        return contextlib.nullcontext()
    threads = max(1, workers // 4)
    many = DigestsAlong(threads, workers) if fits_here() else ManyDigests(threads)
    many.expect(size)
    return many


class DigestsAlong(ManyDigests):
    """The same, of files that grow as well. Every step has a stream that is first, and others that go along."""

    def __init__(self, threads: int = 1, most: int = 2) -> None:
        """``most``: steps at a time."""
        self._most, self._steps = most, 0
        self._written = False  # whether there was ever enough of a file
        super().__init__(threads)

    @property
    def ending(self) -> bool:
        """Nothing is ever left to whoever writes."""
        return False

    def follow(self, file: WrittenFile, size: int) -> Stream:
        """The digest of a file that will have so many bytes; none are there yet."""
        stream = Stream(file, 0, size)
        stream.grows, stream.reached = True, 0
        with self._changed:
            self._streams.append(stream)
        return stream

    def reach(self, stream: Stream, size: int) -> None:
        """So many bytes of the file are there."""
        with self._changed:
            stream.reached = size
            if stream.worth(_ENOUGH):
                self._written = True
                self._changed.notify_all()

    def keep_up(self, due: float) -> None:
        """Help a little, if the threads are far behind."""
        with self._changed:
            behind = sum(stream.there for stream in self._streams if stream.grows)
        if behind > _SLACK and (chosen := self._take()):
            self._go_on(chosen)

    def _take(self, least: int = 0) -> list[Stream]:
        """The stream that is first, and those that go along."""
        with self._changed:
            if self._closed or self._steps >= self._most:
                return []
            chosen = self._chosen()
            taken = set(chosen)
            self._streams = [stream for stream in self._streams if stream not in taken]
            self._busy += chosen
            self._steps += bool(chosen)
            return chosen

    def _chosen(self) -> list[Stream]:
        """A file and all lanes; before there is one, the source alone; in the end, a share of what is left."""
        files = [stream for stream in self._streams if stream.grows and stream.worth(_ENOUGH)]
        others = _in_order([stream for stream in self._streams if not stream.grows])
        if files:
            first = min(files, key=lambda stream: (stream.grows_on, -stream.there * stream.grows_on))
            if len(others) < _GOOD and self._busy and not self._waiting:
                return []  # they come back soon
        elif others and not self._written:
            first, *others = others
        elif others and self._waiting:
            others.sort(key=lambda stream: -stream.left)
            first, *others = others[: -(-len(others) // self._most)]
        else:
            return []
        return [first, *(others[:LANES] if len(others) >= _GOOD else [])]

    def _go_on(self, chosen: list[Stream]) -> None:
        try:
            super()._go_on(chosen)
        finally:
            with self._changed:
                self._steps -= 1
                self._changed.notify_all()

    def _lanes(self) -> Any:
        from .along_loop import Along

        return Along(ROW)

    def _step(self, lanes: Any, chosen: list[Stream]) -> None:
        first, *others = chosen
        others = [stream for stream in others if stream.left >= COMPANY]
        times = min(first.there // FIRST, _TIMES, lanes.most, *(stream.left // COMPANY for stream in others))
        if others and times:
            _advance(lanes, first, others, times)
        else:
            first.guarded(partial(_advance_alone, first))
        for stream in chosen:
            if stream.left < COMPANY and stream.there == stream.left and not stream.future.done():
                stream.guarded(stream.finish)


def _in_order(streams: list[Stream]) -> list[Stream]:
    """Lanes half and half for the source, whose files take longest, and for what was written; both as they came."""
    ours = [stream for stream in streams if isinstance(stream.source, WrittenFile)]
    source = [stream for stream in streams if not isinstance(stream.source, WrittenFile)]
    source.sort(key=lambda stream: (stream.state is None, -stream.left))  # few are open at a time
    return source[: LANES // 2] + ours + source[LANES // 2 :]


def _advance(lanes: Along, first: Stream, others: list[Stream], times: int) -> None:
    """So many times, of all of them; one that cannot be read stops the others until the next step."""
    from .one_kernel import natural, ordered

    streams = {**dict(enumerate(others)), LANES: first}

    def place(lane: int, stream: Stream) -> None:
        size = times * (COMPANY if lane < LANES else FIRST)
        if isinstance(stream.source, WrittenFile):
            lanes.places[lane] = windows.enter_context(stream.source.window(stream.at, size))
        else:
            lanes.places[lane], lanes.files[lane] = stream.at, stream.descriptor()

    lanes.clear()
    lanes.first[:] = ordered(first.state)
    with contextlib.ExitStack() as windows:
        for lane, stream in streams.items():
            if lane < LANES:
                lanes.states[:, lane] = lanes.start if stream.state is None else stream.state
            stream.guarded(partial(place, lane, stream))
        if any(stream.future.done() for stream in streams.values()):
            return  # the others try again
        done, wrong = lanes.advance(times)
    for lane, stream in streams.items():
        stream.state = lanes.states[:, lane].copy() if lane < LANES else natural(lanes.first)
        stream.go_on(done * (COMPANY if lane < LANES else FIRST))
    if wrong in streams:
        streams[wrong].guarded(streams[wrong].reread)


def _advance_alone(stream: Stream) -> None:
    """Whole blocks of one stream."""
    from .one_kernel import advance, natural, ordered

    state, room = ordered(stream.state), np.empty(_PIECE, np.uint8)
    end = stream.at + min(stream.there, FIRST * _TIMES) // 64 * 64
    while stream.at < end:
        size = min(end - stream.at, _PIECE)
        with contextlib.ExitStack() as windows:
            if isinstance(stream.source, WrittenFile):
                place = windows.enter_context(stream.source.window(stream.at, size))
            else:
                stream.source.read_into(stream.at, room[:size])
                place = room.ctypes.data
            advance(state, place, size // 64)
        stream.state = natural(state)
        stream.go_on(size)
