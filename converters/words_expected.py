"""Words that are compared instead of written.

    with expecting(words) as comparison:
        rebuilt = planes_to_gptq(planes)
    comparison.equal

Inside, the functions of `words` that make an array of just that size take ``words`` for it, and the kernel compares
where it would store. ``rebuilt`` is then ``words`` itself, and right if and only if ``comparison.equal``; when it is
another array, nothing was compared. It holds for the thread that said so.

    with proving(words) as known:
        planes = gptq_to_planes(words, 4)

Inside, whatever is made of ``words`` is turned back and compared at once, a strip at a time while it is in the cache;
``known`` remembers how that went, and a comparison of just these arrays that comes later takes the answer from there.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from bcqfmt.converters.buffers import new_array

__all__ = ["Comparison", "Known", "comparison_of", "expecting", "known_here", "new_words", "proving"]

Array = npt.NDArray[Any]
Words = npt.NDArray[np.uint32]


class Comparison:
    """The words that should come out; ``equal`` until some do not."""

    def __init__(self, words: Array) -> None:
        self.words = words.view(np.uint32) if words.dtype.itemsize == 4 and words.flags.c_contiguous else words
        self.equal = True

    def took(self, array: Array) -> bool:
        """Whether ``array`` is the very memory that was compared."""
        same = array.ctypes.data == self.words.ctypes.data and array.nbytes == self.words.nbytes
        return same and array.flags.c_contiguous

    def fits(self, *shape: int) -> bool:
        """Whether words of this shape can be compared with it in place."""
        words = self.words
        usable = words.dtype == np.uint32 and words.flags.c_contiguous and words.flags.writeable  # as the kernel asks
        return usable and words.size == math.prod(shape)


_here = threading.local()


@contextlib.contextmanager
def expecting(words: Array) -> Iterator[Comparison]:
    """Compare with ``words``, which nothing is written to."""
    comparison = Comparison(words)
    _here.comparison = comparison
    try:
        yield comparison
    finally:
        _here.comparison = None


class Known:
    """Ways back that were compared: what is known of each, by its arrays and what is done with them."""

    def __init__(self, words: Array) -> None:
        self._words = words
        self.equal: dict[tuple[Any, ...], bool] = {}

    def wants(self, words: Words) -> bool:
        """Whether what is made of ``words`` shall be compared with them."""
        same = words.ctypes.data == self._words.ctypes.data and words.nbytes == self._words.nbytes
        return same and words.flags.writeable  # as the kernel asks


@contextlib.contextmanager
def proving(words: Array) -> Iterator[Known]:
    """Compare what is made of ``words`` with them; neither it nor they may change inside."""
    known = Known(words)
    _here.known = known
    try:
        yield known
    finally:
        _here.known = None


def known_here() -> Known | None:
    """What this thread has proved so far; None when it does not prove."""
    found: Known | None = getattr(_here, "known", None)
    return found


def new_words(*shape: int) -> Words:
    """Room for words, or the words that are expected to come there."""
    comparison: Comparison | None = getattr(_here, "comparison", None)
    if comparison is not None and comparison.fits(*shape):
        return comparison.words.reshape(shape)
    return new_array(shape, np.uint32)


def comparison_of(words: Words) -> Comparison | None:
    """The comparison that these words are of."""
    comparison: Comparison | None = getattr(_here, "comparison", None)
    return comparison if comparison is not None and comparison.took(words) else None
