"""Numba's compiler in less time: what it makes is the same, to the last letter of the PTX.

Device functions are written into a kernel one after the other, dozens of them. For each of them Numba copies its code
twice, block by block, and with every block all variables of the function anew: a third of the time. The copies are made
of code that was made for this very place and is used nowhere else, so that the variables can be shared. The garbage
collector looks through all of it again and again, and finds nothing.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import threading
from collections.abc import Iterator
from typing import Any

__all__ = ["hurried"]

_lock = threading.RLock()  # one at a time, as in Numba's compiler itself
_OBJECTS = 50_000  # new ones, after which the collector looks


@contextlib.contextmanager
def hurried() -> Iterator[None]:
    """For as long as a kernel is compiled. Where Numba is built in another way, it takes its time."""
    with _lock, contextlib.ExitStack() as stack:
        before = gc.get_threshold()
        gc.set_threshold(max(before[0], _OBJECTS) if before[0] else 0, *before[1:])
        stack.callback(gc.set_threshold, *before)
        with contextlib.suppress(ImportError, AttributeError):
            kind: Any = importlib.import_module("numba.cuda.core.ir").Scope
            if "__deepcopy__" not in vars(kind):
                kind.__deepcopy__ = _itself
                stack.callback(delattr, kind, "__deepcopy__")
        yield


def _itself(scope: Any, memo: dict[int, Any]) -> Any:
    return scope
