"""What a block of threads may have, and the GPU that work is shared out for."""

from __future__ import annotations

__all__ = ["PROCESSORS", "SHARED_LIMIT"]

SHARED_LIMIT = 227 * 1024  # bytes of shared memory of a block on sm_90
PROCESSORS = 132  # of an H200; how finely work is shared out is not left to the GPU at hand
