"""Words that are compared instead of written.

    with expecting(words) as comparison:
        rebuilt = planes_to_gptq(planes)
    comparison.equal

Inside, the functions of `words` that make an array of just that size take ``words`` for it, and the kernel compares
where it would store. ``rebuilt`` is then ``words`` itself, and right if and only if ``comparison.equal``; when it is
another array, nothing was compared. It holds for the thread that said so.
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

__all__ = ["Comparison", "comparison_of", "expecting", "new_words"]

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
