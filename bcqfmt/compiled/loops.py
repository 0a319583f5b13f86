"""How functions are compiled for the CPU: without the GIL, cached on disk, with IEEE arithmetic.

Nothing is reassociated or contracted, so a result depends neither on the number of threads nor on the machine's vector
length. Numba keeps its cache in NUMBA_CACHE_DIR if that is set, else in `__pycache__` next to the source file, else in
the user's cache folder; where none of them can be written, functions are compiled anew in every process. A cached
function is compiled again when its own file changes, not when a function that it calls changes in another file:
after editing one of those, `make clean`.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numba
from llvmlite import binding  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils
from numba.core.cpu import CPUTargetOptions
from numba.extending import intrinsic, register_jitable

__all__ = ["address_of", "compiled", "for_this_processor", "inner", "operation", "repeated", "types"]

F = TypeVar("F", bound=Callable[..., Any])

_OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
if hasattr(CPUTargetOptions, "_nrt"):  # owners of arrays are not counted: half the time in loops over small slices
    _OPTIONS["_nrt"] = False

_kept: list[Any] = []  # functions of which others know the address only


def compiled(function: F, result: Any = None, *arguments: Any) -> F:
    """A function that Python calls, compiled together with all that it calls.

    With the types of its result and arguments it is compiled now, for these alone; without (``@compiled``) when it is
    first called with arguments of some types. A division by zero gives infinity or NaN, as in numpy. The function makes
    no arrays: it works in those that it is given.
    """
    signature: Any = None if result is None else result(*arguments)
    try:
        made: F = numba.njit(signature, cache=True, **_OPTIONS)(function)
    except RuntimeError:  # numba finds no folder that it could write a cache to
        made = numba.njit(signature, **_OPTIONS)(function)
    return made


def inner(function: F) -> F:
    """A function that compiled ones call, inlined there; called from Python it is plain Python.

    Passing a dozen scratch arrays in a real call would cost more than most of these functions do.
    """
    made: F = register_jitable(forceinline=True, error_model="numpy")(function)
    return made


def operation(build: Callable[..., Any], result: Any = types.void) -> Any:
    """A function of 64-bit numbers, addresses among them, whose instructions ``build(builder, *arguments)`` writes.

    LLVM's vectors fit any processor, and need no vectorizer, which takes most of the time of compiling.
    """

    def typed(_: Any, *arguments: Any) -> Any:
        def generate(context: Any, builder: Any, __: Any, values: Any) -> Any:
            made = build(builder, *values)
            return context.get_dummy_value() if result is types.void else made

        return result(*(types.uint64,) * len(arguments)), generate

    typed.__name__ = build.__name__
    vars(typed)["__signature__"] = inspect.signature(build)  # numba wants names; the builder stands for the context
    return intrinsic(typed)


@contextlib.contextmanager
def repeated(builder: Any, count: Any) -> Iterator[Any]:
    """A loop inside an :func:`operation`: what is built in it runs ``count`` times; gives the index."""
    with cgutils.for_range(builder, count) as loop:
        yield loop.index


def address_of(function: Callable[..., Any], result: Any, *arguments: Any) -> int:
    """Where a function that other compiled ones can call is; it is compiled for these types, now."""
    signature = result(*arguments)
    binding.initialize_native_asmparser()  # for those that have instructions of their own
    try:
        kernel: Any = numba.cfunc(signature, cache=True)(function)
    except RuntimeError:  # as above
        kernel = numba.cfunc(signature)(function)
    _kept.append(kernel)
    return int(kernel.address)


def for_this_processor() -> bool:
    """Whether numba compiles for the processor that it runs on, as it does unless told otherwise."""
    return not (numba.config.CPU_NAME or numba.config.CPU_FEATURES)  # type: ignore[attr-defined]
