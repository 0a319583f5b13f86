"""The door to numba: how the converters' loops are compiled, and shared among threads.

Loops release the GIL and are cached by numba: in NUMBA_CACHE_DIR if that is set, else beside their file, else in the
user's cache folder, else (nothing writable) not at all. numba renews a cached loop when its own file changes, so what a
loop is made of stands in that file too.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
from llvmlite import binding  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, register_jitable

__all__ = ["address_of", "aligned", "compiled", "each_share", "for_this_processor", "inner", "operation", "repeated"]
__all__ += ["types"]

_kept: list[Any] = []  # functions of which others know the address only


def compiled(function: Callable[..., Any], result: Any, *arguments: Any) -> Callable[..., Any]:
    """A function compiled for these types, now."""
    signature = result(*arguments)
    try:
        kernel: Callable[..., Any] = numba.njit(signature, nogil=True, cache=True)(function)
    except RuntimeError:  # numba finds no folder that it could write a cache to
        kernel = numba.njit(signature, nogil=True)(function)
    return kernel


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


def inner(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that compiled ones call."""
    made: Callable[..., Any] = register_jitable(function)
    return made


def operation(build: Callable[..., Any], result: Any = types.void) -> Any:
    """A function of 64-bit numbers, addresses among them, whose instructions ``build(builder, *arguments)`` writes.

    Vectors said to LLVM like this fit any processor, and need no vectorizer, which takes most of the time of compiling.
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
    """What is built inside happens so many times; for an :func:`operation`, whose loops compile faster than others."""
    with cgutils.for_range(builder, count) as loop:
        yield loop.index


def aligned(words: int) -> npt.NDArray[np.uint32]:
    """Room for words, from a cache line's first byte on."""
    room = np.empty(words + 16, np.uint32)
    start = -room.ctypes.data % 64 // 4
    return room[start : start + words]


def each_share(work: Callable[[int, int], None], count: int, grain: int, threads: int) -> None:
    """``work(first, stop)`` over 0..count in at most ``threads`` shares that begin at multiples of ``grain``."""
    share = -(-count // (grain * max(threads, 1))) * grain
    if share >= count:
        work(0, count)
        return
    starts = range(share, count, share)
    with ThreadPoolExecutor(len(starts)) as pool:
        others = [pool.submit(work, first, min(first + share, count)) for first in starts]
        work(0, share)
        for other in others:
            other.result()
