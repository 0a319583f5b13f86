"""What a block of threads may have, the GPU that work is shared out for, and numbers that several kernels agree on."""

from __future__ import annotations

__all__ = ["KINDS", "LIMIT", "PROCESSORS", "ROWS", "ROW_LIMIT", "SHARED_LIMIT"]

LIMIT = 2**31 - 1  # elements of any argument, rows, columns: indices are 32-bit words
SHARED_LIMIT = 227 * 1024  # bytes of shared memory of a block on sm_90
ROW_LIMIT = 96 * 1024  # bytes of a row that is put in order there: what a block has on every GPU since sm_80
PROCESSORS = 132  # of an H200; how finely work is shared out is not left to the GPU at hand
KINDS = {"F32": 0, "F16": 1, "BF16": 2}  # types of activations and results, as kernels know them
ROWS = 16  # of a tile, which is what a tensor core takes
