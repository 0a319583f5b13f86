"""Shards that are written and whose digests are not there yet: their records come later, and nobody waits for them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

from bcqfmt.converters.words.buffers import give_back

__all__ = ["LateRecords"]


class LateRecords:
    """What is left to do for each file, when its digests are there."""

    def __init__(self) -> None:
        self._left: dict[str, tuple[Callable[[], None], Callable[[], bool]]] = {}

    def add(self, name: str, finish: Callable[[], None], is_late: Callable[[], bool]) -> None:
        """A file that is written; it, and others, are finished if their digests are there."""
        self._left[name] = finish, is_late
        for other, (_, waits) in list(self._left.items()):
            if not waits():
                self._finish(other)

    def close(self, name: str, writing: Future[None]) -> None:
        """Finish a file when it is written, and wait for its digests, unless somebody has finished it."""
        writing.result()
        give_back()  # this thread packs nothing any more; what it hashes is mapped
        self._finish(name)

    def _finish(self, name: str) -> None:
        if (found := self._left.pop(name, None)) is not None:
            found[0]()
