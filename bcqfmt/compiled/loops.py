"""How functions are compiled for the CPU: without the GIL, cached on disk, with IEEE arithmetic.

Nothing is reassociated or contracted, so a result depends neither on the number of threads nor on the machine's vector
length. Numba keeps its cache in NUMBA_CACHE_DIR if that is set, else in `__pycache__` next to the source file, else in
the user's cache folder; where none of them can be written, functions are compiled again in every process. A cached
function is compiled again when its own file changes, not when a function that it calls changes in another file: after
editing one of those, `make clean`, unless the function has a :func:`stamp_of` of that file.
"""

from __future__ import annotations

import functools
import importlib
import zlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from types import FunctionType
from typing import Any, TypeVar, cast

import numba
import numpy as np
from numba import types
from numba.core.cpu import CPUTargetOptions
from numba.extending import register_jitable

__all__ = ["compiled", "inner", "stamp_of", "types"]

event: Any = importlib.import_module("numba.core.event")  # by name, because these have no type hints
registry: Any = importlib.import_module("numba.core.registry")

F = TypeVar("F", bound=Callable[..., Any])

_SAME = {np.int64: int, np.float64: float, np.bool_: bool}  # numba has one type for both
_OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
if hasattr(CPUTargetOptions, "_nrt"):  # no reference counts of arrays: halves the time of loops over small slices
    _OPTIONS["_nrt"] = False


def compiled(function: F, result: Any = None, *arguments: Any) -> F:
    """A function that Python calls, compiled together with all that it calls.

    With the types of its result and arguments it is compiled now, for these alone; without (``@compiled``) when it is
    first called with arguments of some types. A division by zero gives infinity or NaN, as in numpy. The function makes
    no arrays: it works in those that it is given.
    """
    if result is None:
        return _compiled_by_kinds(function)
    return _compiled_apart(function, result(*arguments))


def _compiled_by_kinds(function: F) -> F:
    """Compiled at the first call with each combination of kinds of arguments."""
    made: dict[tuple[Any, ...], Any] = {}

    @functools.wraps(function)
    def call(*arguments: Any) -> Any:
        kinds = tuple(map(_kind, arguments))
        loop = made.get(kinds)
        if loop is None:
            loop = made.setdefault(kinds, _compiled_apart(function, None, kinds))
        return loop(*arguments)

    return cast(F, call)


def _kind(value: Any) -> Any:
    """What numba's type of an argument depends on."""
    if not isinstance(value, np.ndarray):
        return _SAME.get(type(value), type(value))
    flags = value.flags
    layout = "C" if flags.c_contiguous else "F" if flags.f_contiguous else "A"
    return value.dtype, value.ndim, layout, flags.writeable, flags.aligned


def _compiled_apart(function: F, signature: Any, kinds: tuple[Any, ...] = ()) -> F:
    """Compiled under a name that tells its file, closure, types of arguments and processor.

    Functions of one name share an index in numba's cache. Two processes that add to an index at the same time can give
    the same number to two functions, and one is loaded as the other from then on.
    """
    around = [_constant(cell.cell_contents) for cell in function.__closure__ or ()]
    processor = registry.cpu_target.target_context.codegen().magic_tuple()
    differs = repr((around, signature, kinds, processor)).encode()
    variant = zlib.crc32(differs, _file_stamp(function.__code__.co_filename))
    apart: Any = FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    apart.__qualname__ = f"{function.__qualname__}.{variant:08x}"
    try:
        made: F = numba.njit(signature, cache=True, **_OPTIONS)(apart)
    except RuntimeError:  # numba finds no folder that it could write a cache to
        made = numba.njit(signature, **_OPTIONS)(apart)
    return made


def _constant(value: Any) -> Any:
    """The value, or its name where it is not the same in every process."""
    if isinstance(value, tuple):
        return tuple(map(_constant, value))
    if isinstance(value, (int, float, str, bytes, np.generic)):
        return value
    return getattr(value, "__qualname__", type(value).__qualname__)


@functools.cache
def _file_stamp(path: str) -> int:
    try:
        return zlib.crc32(Path(path).read_bytes())
    except OSError:  # numba's cache wants the file too
        return 0


def inner(function: F) -> F:
    """A function that compiled ones call, inlined there; called from Python it is plain Python.

    Passing a dozen scratch arrays in a real call would cost more than most of these functions do.
    """
    made: F = register_jitable(forceinline=True, error_model="numpy")(function)
    return made


def stamp_of(*modules: Any) -> int:
    """A checksum of these files, not zero: numba's cache looks only at a function's own file.

    A loop that refers to it is compiled again when they change, because the cache identifies a loop by its code and the
    values of its closure. Only numbers can stand there: functions of numba have another identity in every process.
    """
    return zlib.crc32(b"".join(Path(module.__file__).read_bytes() for module in modules)) | 1


class _First(event.Listener):  # type: ignore[misc]
    """Tells of the first function that is compiled; what comes from the cache on disk is not."""

    def __init__(self, tell: Callable[[], None]) -> None:
        self.tell, self.told = tell, False

    def on_start(self, event: Any) -> None:
        if not self.told:
            self.told = True
            self.tell()

    def on_end(self, event: Any) -> None:
        """It is compiled."""


def before_first_compilation(tell: Callable[[], None]) -> AbstractContextManager[Any]:
    """A context in which ``tell`` is called once, before numba compiles a function for the CPU."""
    found: AbstractContextManager[Any] = event.install_listener("numba:compile", _First(tell))
    return found
