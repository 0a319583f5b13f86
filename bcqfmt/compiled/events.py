"""When numba compiles: a command that is waiting for it can say so."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

event: Any = importlib.import_module("numba.core.event")  # by name, because it has no type hints


class _First(event.Listener):  # type: ignore[misc]
    """Tells of the first function that is compiled; what comes from the cache on disk is not."""

    def __init__(self, tell: Callable[[], None]) -> None:
        self.tell, self.told = tell, False

    def on_start(self, event: Any) -> None:
        """A function is about to be compiled."""
        if not self.told:
            self.told = True
            self.tell()

    def on_end(self, event: Any) -> None:
        """It is compiled."""


def before_first_compilation(tell: Callable[[], None]) -> AbstractContextManager[Any]:
    """A context in which ``tell`` is called once, before numba compiles a function for the CPU."""
    found: AbstractContextManager[Any] = event.install_listener("numba:compile", _First(tell))
    return found
