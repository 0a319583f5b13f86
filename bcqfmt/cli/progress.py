"""How far a long job is, on stderr: a bar on a terminal, one line per file elsewhere."""

from __future__ import annotations

import sys
import threading
from types import TracebackType
from typing import Any

from . import render

__all__ = ["Progress"]


class Progress:
    """``tick(bytes)`` and ``done(file, bytes)`` from any thread; use it as a context."""

    def __init__(self, doing: str, total: int, files: int) -> None:
        self.total, self.files, self.finished = total, files, 0
        self._lock = threading.Lock()
        self._bar: Any = None
        if sys.stderr is not None and sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=total, unit="B", unit_scale=True, desc=doing, leave=False)

    def tick(self, nbytes: int) -> None:
        """Bytes done since the last call."""
        if self._bar is not None:
            with self._lock:
                self._bar.total = max(self._bar.total, self._bar.n + nbytes)
                self._bar.update(nbytes)

    def done(self, file: str, nbytes: int) -> None:
        """A file is complete."""
        with self._lock:
            self.finished += 1
            if self._bar is None:
                render.say(f"{file}: {render.size(nbytes)} ({self.finished} of {self.files})")

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.close()
