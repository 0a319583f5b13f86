"""The product with a sparse matrix, for outliers."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from bcqfmt.compiled import intrinsics
from bcqfmt.compiled.loops import compiled, stamp_of

from . import lanes
from .lanes import claim, types

_1, _64 = np.uint64(1), np.uint64(64)
_ROWS, _ROWS_IN = types.float32[:, ::1], types.Array(types.float32, 2, "C", readonly=True)


@functools.cache
def sparse_kernel() -> Any:
    """``(counter, indptr, indices, values, x, y)``: add the product with a CSR matrix; int32, float32, (batch, ...)."""
    stamp = stamp_of(intrinsics, lanes)

    def add(counter: Any, indptr: Any, indices: Any, values: Any, x: Any, y: Any) -> None:
        rows = np.uint64(indptr.size) - _1
        while stamp:
            top = claim(counter) * _64
            if top >= rows:
                break
            for r in range(top, min(top + _64, rows)):
                for b in range(np.uint64(x.shape[0])):
                    total = np.float32(0)
                    for k in range(np.uint64(indptr[r]), np.uint64(indptr[r + _1])):
                        total += values[k] * x[b, np.uint64(indices[k])]
                    y[b, r] += total

    places = types.Array(types.int32, 1, "C", readonly=True)
    numbers = types.Array(types.float32, 1, "C", readonly=True)
    return compiled(add, types.void, types.uint64[::1], places, places, numbers, _ROWS_IN, _ROWS)
