"""Numba's compiler in less time: what it makes is the same, to the last letter of the PTX.

Device functions are written into a kernel one after the other, dozens of them. For each of them Numba copies its code
twice, block by block, and with every block all variables of the function anew: a third of the time. That code was made
for this very place, so its copies can share their variables. (Numba keeps code for a second use only of overloaded
functions, which the kernels of this room have none of; nobody else compiles meanwhile, Numba's own lock is held.) The
garbage collector looks through all of it again and again, and finds nothing.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import threading
from collections.abc import Iterator
from typing import Any

__all__ = ["hurried"]

_OBJECTS = 50_000  # new ones, after which the collector looks
_lock = threading.RLock()


@contextlib.contextmanager
def hurried() -> Iterator[None]:
    """For as long as a kernel is compiled, one at a time. Where Numba is built in another way, it takes its time."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(_of_numba("compiler_lock", "global_compiler_lock") or _lock)
        before = gc.get_threshold()
        gc.set_threshold(max(before[0], _OBJECTS) if before[0] else 0, *before[1:])
        stack.callback(gc.set_threshold, *before)
        kind = _of_numba("ir", "Scope")
        if kind is not None and "__deepcopy__" not in vars(kind):
            kind.__deepcopy__ = _itself
            stack.callback(delattr, kind, "__deepcopy__")
        yield


def _of_numba(module: str, name: str) -> Any:
    """What a module of Numba's compiler has under this name; None where there is none."""
    try:
        return getattr(importlib.import_module(f"numba.cuda.core.{module}"), name, None)
    except ImportError:
        return None


def _itself(scope: Any, memo: dict[int, Any]) -> Any:
    return scope
