"""Words that are compared instead of written.

    with expecting(words) as comparison:
        rebuilt = planes_to_gptq(planes)
    comparison.equal

Inside, the functions of `words` that make an array of just that size take ``words`` for it, and the kernel compares
where it would store. ``rebuilt`` is then ``words`` itself, and right if and only if ``comparison.equal``; when it is
another array, nothing was compared. It holds for the thread that said so.

    with proving(words):
        planes = gptq_to_planes(words)
        with expecting(words) as comparison: ...

Inside, the kernel goes back from every strip that it has just made of ``words``, while it is in the cache, and compares
it with where it came from. A comparison that asks for the very same way back then need not go it once more.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from .buffers import new_array

__all__ = ["Comparison", "Proofs", "comparison_of", "expecting", "new_words", "proofs", "proving"]

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


class Proofs:
    """Ways back to ``words`` that were gone already: what identifies each, and whether it led there.

    What identifies it holds the arrays: as long as it is here, no other has their address.
    """

    def __init__(self, words: Array) -> None:
        self._words = words
        self._known: list[tuple[object, bool]] = []

    def wants(self, words: Words) -> bool:
        """Whether these are the words, all of them."""
        return words.ctypes.data == self._words.ctypes.data and words.nbytes == self._words.nbytes

    def add(self, way: object, equal: bool) -> None:
        """A way back; equal to others that are the same."""
        self._known.append((way, equal))

    def of(self, way: object) -> bool | None:
        """Where this very way led to; None if it was not gone."""
        return next((equal for known, equal in self._known if known == way), None)


_here = threading.local()


@contextlib.contextmanager
def proving(words: Array) -> Iterator[None]:
    """Go back at once from what is made of ``words``, in this thread. Nobody may write to either while it lasts."""
    _here.proofs = Proofs(words)
    try:
        yield
    finally:
        _here.proofs = None


def proofs() -> Proofs | None:
    """Where ways back are noted; None where nobody asks for them."""
    found: Proofs | None = getattr(_here, "proofs", None)
    return found


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
