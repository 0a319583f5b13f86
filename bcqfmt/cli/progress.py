"""Long jobs: how far they are, and which kernels they compile."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bcqfmt.errors import escape

from . import render


class Progress:
    """``tick(bytes)`` and ``done(file, bytes)`` from any thread, shown on stderr; use it as a context.

    A bar on a terminal, one line per file elsewhere.
    """

    def __init__(self, doing: str, total: int, files: int) -> None:
        self.files, self.finished = files, 0
        self._lock = threading.Lock()
        self._bar = _tqdm(total=total, unit="B", unit_scale=True, desc=doing)

    def tick(self, nbytes: int) -> None:
        """Bytes done since the last call."""
        if self._bar is not None:
            with self._lock:
                self._bar.total = max(self._bar.total, self._bar.n + nbytes)
                self._bar.update(nbytes)

    def done(self, file: str, nbytes: int) -> None:
        with self._lock:
            self.finished += 1
            if self._bar is None:
                render.say(f"{file}: {render.size(nbytes)} ({self.finished} of {self.files})")

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()


def bar(stack: ExitStack, **options: Any) -> Callable[[int], None] | None:
    """A bar on a terminal until the stack is left: takes what was done since the last call. None elsewhere.

    ``options``: those of tqdm.
    """
    shown = _tqdm(**options)
    if shown is None:
        return None
    stack.enter_context(shown)

    def tick(done: int) -> None:
        shown.update(done)

    return tick


def folder_bar(stack: ExitStack, folder: str | Path, doing: str) -> Callable[[int], None] | None:
    """A bar for reading all files of a folder."""
    total = sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file())
    return bar(stack, total=total, unit="B", unit_scale=True, desc=doing)


def _tqdm(**options: Any) -> Any:
    if sys.stderr is None or not sys.stderr.isatty():
        return None
    from tqdm import tqdm

    return tqdm(**options, leave=False)


def waiting(doing: str) -> None:
    """On a terminal a line on stderr: what the user waits for now."""
    if sys.stderr is not None and sys.stderr.isatty():
        render.say(f"{doing} ...")


def announce_kernels(stack: ExitStack, *, dense: bool = False) -> None:
    """A line on stderr for every CUDA kernel that is compiled until the stack is left: it can take a minute.

    On a terminal also one before the first loop for the CPU is compiled. Nothing for a ``dense`` model.
    """
    if dense:
        return
    from tqdm import tqdm

    from bcqfmt.compiled.loops import before_first_compilation
    from bcqfmt.kernels.runtime.cubins import compile_listener

    def tell(name: str, folder: Path) -> None:
        with tqdm.external_write_mode(file=sys.stderr):  # clears a progress bar while the line is printed
            render.say(f"compiling {name} for this GPU, once, up to a minute, to {escape(str(folder))}")

    stack.enter_context(compile_listener(tell))
    stack.enter_context(before_first_compilation(lambda: waiting("compiling for this processor, once, up to a minute")))
