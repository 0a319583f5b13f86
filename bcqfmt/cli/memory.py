"""Peak memory of the long verbs, kept down where the C library allows it."""

from __future__ import annotations

import contextlib
import ctypes

__all__ = ["return_large_blocks"]

_M_MMAP_THRESHOLD = -3  # malloc.h of glibc
_LARGE = 1 << 20


def return_large_blocks() -> None:
    """Give arrays back to the system when they are freed: glibc would keep blocks of whole weights, per thread."""
    with contextlib.suppress(OSError, AttributeError):  # another C library: nothing to set
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _LARGE)
