"""Columns of a dense matrix of 16-bit numbers from stored into original order, in place.

A reordered weight of one segment is decoded and put in order by one kernel (`dequant_rows`). Several segments have one
each, which decode them as they are stored; then a block takes some rows into shared memory and writes them back.
"""

from __future__ import annotations

import functools
from typing import Any

from bcqfmt.kernels import ptx
from bcqfmt.kernels.runtime.launch import Kernel, kernel
from bcqfmt.kernels.runtime.numba_cuda import cuda, types

from .rows import THREADS, gatherer

__all__ = ["compile_cases", "reorder_columns"]


def compile_cases() -> dict[str, list[tuple[Any, ...]]]:
    """What `tests/kernels/compile_check.py` compiles."""
    return {"reorder_columns": [()]}


@functools.cache
def reorder_columns() -> Kernel:
    """``dense`` (rows, columns) of 16 bits, columns a multiple of 8; ``stored``: where every original column is.

    ``together`` rows to a block, which has 2 * columns bytes of shared memory for each.
    """
    gather = gatherer(swizzled=False)

    @kernel("u32* dense, u32* stored, u32 rows, u32 columns, u32 together", threads=THREADS, blocks=4, variant="")
    def reorder(dense: Any, stored: Any, rows: Any, columns: Any, together: Any) -> None:
        base = ptx.shared_address(cuda.shared.array(0, types.uint32))
        front, eights = ptx.u32(cuda.blockIdx.x * together), ptx.u32(columns >> 3)
        here = ptx.min_u32(together, rows - front)
        begin, i = ptx.u64(front) * ptx.u64(eights), ptx.u32(cuda.threadIdx.x)
        while i < ptx.u32(here * eights):
            a, b, c, d = ptx.ldcg128(dense, begin + ptx.u64(i))
            ptx.sts128(ptx.u32(base + i * 16), ptx.u32(0), a, b, c, d)
            i = ptx.u32(i + cuda.blockDim.x)
        cuda.syncthreads()
        gather(dense, stored, base, ptx.u32(columns * 2), front, here, columns)

    return reorder
