"""SHA-256 of many parts of files: sixteen at a time, where the processor makes that cheaper than one after the other.

A converted weight's digest is over the bytes of its parts, which are hashed with their file as well; and the source's
files are hashed too. Only the digest of a file that is being written needs its bytes one after the other. Everything
else is read again, from the page cache, when there are enough streams to fill the lanes of `digests_kernel`. Where the
processor can do it, files that are being written go along with the lanes (`digests_along`).
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING

from .stream import ROW, Readable, Stream

if TYPE_CHECKING:
    from .kernel import Lanes

__all__ = ["LANES", "ManyDigests", "even", "faster_here", "worth_lanes"]

LANES = 16
_FEW = 7  # streams: fewer are faster one after the other
_SLACK = _LAST = 1 << 27  # bytes that may be behind; bytes that are the last ones


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


class ManyDigests:
    """Takes parts of files and hashes them in threads of its own, when there are many or somebody waits."""

    def __init__(self, threads: int = 1) -> None:
        """``threads``: that do nothing else."""
        self._streams: list[Stream] = []
        self._busy: list[Stream] = []
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
        with self._changed:
            self._changed.wait_for(lambda: not self._busy)  # somebody may be helping
        for stream in self._streams:
            stream.future.cancel()

    def submit(self, source: Readable, begin: int, size: int) -> Future[str]:
        """The digest of ``size`` bytes from ``begin`` on."""
        stream = Stream(source, begin, size)
        with self._changed:
            self._streams.append(stream)
            self._begun = self._begun or len(self._streams) + len(self._busy) >= LANES
            self._changed.notify_all()
        return stream.future

    def results(self, futures: Iterable[Future[str]]) -> list[str]:
        """The digests; they are computed now, with the help of this thread."""
        wanted = list(futures)
        with self._changed:
            self._waiting += 1
            self._changed.notify_all()
        try:
            while not all(future.done() for future in wanted) and (chosen := self._next(1)):
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
        while chosen := self._next():
            self._go_on(chosen)

    def _next(self, least: int | None = None) -> list[Stream]:
        """The streams to go on with, waited for; none when it is over, or somebody else is at work on all there are."""
        with self._changed:
            while not self._closed:
                if chosen := self._take(self._enough if least is None else least):
                    return chosen
                if least is not None and not self._busy:
                    break
                self._changed.wait()
            return []

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
        return 1 if self._waiting else max(1, _FEW) if starting or self.ending else LANES

    def _take(self, least: int = LANES) -> list[Stream]:
        """The streams to go on with; none when there are fewer than ``least``."""
        with self._changed:
            if len(self._streams) < least or self._closed:
                return []
            self._streams.sort(key=lambda stream: -stream.left)  # long ones first, so that none is left alone
            chosen = self._streams[:LANES]
            fresh = [stream for stream in self._streams if stream.state is None]
            if self.ending and self._waiting and len(fresh) < len(self._streams) and not self._busy:
                chosen = [stream for stream in self._streams if stream.state is not None][:LANES]
            elif fresh and (len(chosen) < _FEW or (self.ending and self._waiting)):
                chosen = fresh[:1]
            self._streams = [stream for stream in self._streams if stream not in chosen]
            self._busy += chosen
            return chosen

    def _go_on(self, chosen: list[Stream]) -> None:
        if not hasattr(self._local, "lanes"):
            self._local.lanes = self._lanes()
        before = sum(stream.left for stream in chosen)
        self._step(self._local.lanes, chosen)
        with self._changed:
            self._behind -= before - sum(stream.left for stream in chosen)
            done = set(chosen)
            self._busy = [stream for stream in self._busy if stream not in done]
            self._streams = [stream for stream in chosen if not stream.future.done()] + self._streams
            self._changed.notify_all()

    def _lanes(self) -> Lanes:
        from .kernel import Lanes

        return Lanes(ROW)

    def _step(self, lanes: Lanes, chosen: list[Stream]) -> None:
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


def _read(lanes: Lanes, chosen: list[Stream]) -> None:
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
