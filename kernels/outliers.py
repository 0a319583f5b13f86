"""y += S x for CSR outliers, as a separate launch: faster than a fused product for many vectors, and for comparison.

A warp per row: its lanes take the entries of the row in turn, and shuffles add them up in a fixed order.
"""

from __future__ import annotations

import functools
from typing import Any

from bcqfmt.errors import error
from bcqfmt.kernels import ptx
from bcqfmt.kernels.device_functions.numbers import FROM_ARRAY, TO_ARRAY
from bcqfmt.kernels.operands.outliers import Entries
from bcqfmt.kernels.runtime import device
from bcqfmt.kernels.runtime.checks import check_array, check_same_device
from bcqfmt.kernels.runtime.launch import Kernel, kernel
from bcqfmt.kernels.runtime.limits import KINDS
from bcqfmt.kernels.runtime.numba_cuda import cuda, inlined
from bcqfmt.kernels.runtime.unroll import static, unrolled

_TYPES = ("f32", "u16", "u16")
_WARPS = 8


@functools.cache
def csr_outliers_kernel(kind: int, values_kind: int, out: int, packed: int = 0) -> Kernel:
    """``kind``, ``values_kind``, ``out``: types of x, of the values and of y; 0 float32, 1 float16, 2 bfloat16.

    ``packed``: bytes of an entry if columns and values are interleaved (`operands.outliers`), as one array that is both
    arguments; else 0.
    """
    widen_x, entry = FROM_ARRAY[kind], _entry(values_kind, packed)
    widen_y, narrow = FROM_ARRAY[out], TO_ARRAY[out]
    declared = (
        f"u32* indptr, u32* indices, {'u32' if packed else _TYPES[values_kind]}* values, {_TYPES[kind]}* x, "
        f"{_TYPES[out]}* y, "
        "u32 rows, u32 columns, u32 count, u32 vectors"
    )

    @kernel(declared, threads=32 * _WARPS, variant=repr((kind, values_kind, out, packed)))
    @unrolled
    def csr_outliers(
        indptr: Any, indices: Any, values: Any, x: Any, y: Any, rows: Any, columns: Any, count: Any, vectors: Any
    ) -> None:
        lane = ptx.u32(cuda.threadIdx.x & 31)
        row = ptx.u32(cuda.blockIdx.x * _WARPS + (cuda.threadIdx.x >> 5))
        if row < rows:
            begin = min(ptx.u32(indptr[row]), count)
            end = min(ptx.u32(indptr[ptx.u32(row + 1)]), count)
            for b in range(vectors):
                total = ptx.f32(0.0)
                k = ptx.u32(begin + lane)
                while k < end:
                    column, value = entry(indices, values, k)
                    found = widen_x(x[ptx.u32(b * columns + min(column, ptx.u32(columns - 1)))])
                    total = ptx.fma_f32(value, found, total)
                    k = ptx.u32(k + 32)
                for m in static(5):
                    total = ptx.f32(total + ptx.shfl_xor_f32(total, ptx.u32(16 >> m)))
                if lane == 0 and begin < end:
                    place = ptx.u32(b * rows + row)
                    y[place] = narrow(ptx.f32(widen_y(y[place]) + total))

    return csr_outliers


def _entry(values_kind: int, packed: int) -> Any:
    """A device function: column and float32 value of entry ``k``."""
    widen = FROM_ARRAY[values_kind]

    def apart(indices: Any, values: Any, k: Any) -> Any:
        return ptx.u32(indices[k]), widen(values[k])

    def short(indices: Any, values: Any, k: Any) -> Any:
        word = ptx.ldg32(indices, k)
        return ptx.u32(word & 0xFFFF), ptx.hi_f16(word)

    def long(indices: Any, values: Any, k: Any) -> Any:
        words = ptx.ldg64(indices, k)
        return words[0], ptx.bits_f32(words[1])

    return inlined({0: apart, 4: short, 8: long}[packed])


def csr_outliers(y: Any, indptr: Any, indices: Any, values: Any, x: Any) -> Any:
    """``y += S x``: y (batch, out), x (batch, in), S in CSR: indptr (out + 1) and indices int32, values; floats of any
    of the three types. The indices must be those of a checked weight. Same bits at every call; gives y.
    """
    device.require_cuda()
    seen = check_array("x", x, tuple(KINDS), (None, None), 2)
    batch, columns = seen.shape
    target = check_array("y", y, tuple(KINDS), (batch, None), 2)
    rows = target.shape[1]
    check_array("indptr", indptr, ("I32",), (rows + 1,))
    count = check_array("indices", indices, ("I32",), (None,)).size
    kind = check_array("values", values, tuple(KINDS), (count,), 2).dtype
    check_same_device(x=x, y=y, indptr=indptr, indices=indices, values=values)
    if columns < 1:
        raise error("BCQ-E552", found="x of no columns", expected="at least one")
    if count and batch:
        csr_outliers_kernel(KINDS[seen.dtype], KINDS[kind], KINDS[target.dtype]).launch(
            (-(-rows // _WARPS),), 32 * _WARPS, indptr, indices, values, x, y, rows, columns, count, batch
        )
    return y


def add_entries(y: Any, outliers: Entries, x: Any) -> None:
    """``y += S x`` for y (batch, out) and x (batch, in) that were checked, S packed as for fused products."""
    (batch, rows), columns = device.describe(y).shape, device.describe(x).shape[1]
    kind, out = KINDS[device.describe(x).dtype], KINDS[device.describe(y).dtype]
    csr_outliers_kernel(kind, 0, out, outliers.size).launch(
        (-(-rows // _WARPS),), 32 * _WARPS, outliers.indptr, outliers.entries, outliers.entries, x, y, rows, columns,
        outliers.count, batch,
    )  # fmt: skip
