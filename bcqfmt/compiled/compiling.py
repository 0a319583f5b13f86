"""How the loops of the methods are compiled: without the GIL, cached by numba, with IEEE arithmetic.

Nothing is reassociated or contracted, so a result depends neither on the threads nor on the machine's vector length.
numba renews a cached loop when its own file changes, not when a file does whose functions it calls: after editing one
of those, `make clean`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numba
from numba.core.cpu import CPUTargetOptions
from numba.extending import register_jitable

__all__ = ["compiled", "inner", "lean"]

F = TypeVar("F", bound=Callable[..., Any])

_OPTIONS: dict[str, Any] = {
    "nogil": True,
    "error_model": "numpy",
}  # division by zero gives infinity or NaN, as in numpy
# numba counts the owners of every array that a loop touches, which in loops over small slices costs more than all else
_UNCOUNTED: dict[str, Any] = {"_nrt": False} if hasattr(CPUTargetOptions, "_nrt") else {}


def compiled(function: F) -> F:
    """A loop that Python calls: compiled when first called, then cached together with all that it calls."""
    return _compiled(function, _OPTIONS)


def lean(function: F) -> F:
    """The same for a loop that makes no arrays: it works on those of its caller without counting their owners."""
    return _compiled(function, {**_OPTIONS, **_UNCOUNTED})


def inner(function: F) -> F:
    """A function that compiled loops call, itself plain Python: no time goes into making it callable from there.

    It becomes part of its caller: to pass a dozen scratch arrays would cost more than most of these functions do.
    """
    made: F = register_jitable(forceinline=True, **_OPTIONS)(function)
    return made


def _compiled(function: F, options: dict[str, Any]) -> F:
    try:
        made: F = numba.njit(cache=True, **options)(function)
    except RuntimeError:  # numba finds no folder that it could write a cache to
        made = numba.njit(**options)(function)
    return made
