"""Limits of a thread block, the GPU that work is divided for, and constants that several kernels share."""

from __future__ import annotations

LIMIT = 2**31 - 1  # elements of any argument, rows, columns: indices are 32-bit words
SHARED_LIMIT = 227 * 1024  # bytes of shared memory of a block on sm_90
SMALL_SHARED = 99 * 1024  # that every GPU since sm_80 has
SHARED_LIMITS = {  # where it is less than on sm_90
    (8, 0): 163 * 1024, (8, 6): SMALL_SHARED, (8, 7): 163 * 1024, (8, 9): SMALL_SHARED, (12, 0): SMALL_SHARED,
    (12, 1): SMALL_SHARED,
}  # fmt: skip
ROW_LIMIT = 96 * 1024  # bytes of a row that is reordered there: available to a block on every GPU since sm_80
PROCESSOR_SHARED = 228 * 1024  # of all blocks on a processor of sm_90, with 1024 for each
PROCESSORS = 132  # of an H200; work is divided for this number on every GPU
KINDS = {"F32": 0, "F16": 1, "BF16": 2}  # types of activations and results, as kernels number them
ROWS = 16  # of a tile: the M of a tensor-core instruction
