"""Planes of any weight to dense numbers on the device, exactly as `kernel` says: what its fast kernels refuse.

A thread has a column of some rows, or, with ``patch``, an outlier.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from bcqfmt.kernels import ptx
from bcqfmt.kernels.device_functions.numbers import rounding
from bcqfmt.kernels.runtime.launch import Kernel, kernel
from bcqfmt.kernels.runtime.numba_cuda import cuda, inlined
from bcqfmt.kernels.runtime.unroll import static, unrolled

from .rows import THREADS
from .values import code_value

_WORD = {0: "u32*", 1: "u16*", 2: "u16*"}


class Elements(NamedTuple):
    """What a kernel is compiled for: one segment of any weight.

    ``numbers``: "f32" or "f64", the type of the scales; ``logical`` and ``result``: kinds of the logical dtype and of
    the result; ``patch``: 0 for all elements, else one of `values.PATCHES`, for the outliers alone; ``twice``: rounded
    to the logical dtype first.
    """

    q: int
    formula: int
    numbers: str
    logical: int
    result: int
    reordered: bool
    patch: int = 0
    twice: bool = False


def elements(case: Elements) -> Kernel:
    """The kernel. Its argument ``perm`` has the stored column of every original one; block (i, j) has the rows j,
    j + gridDim.y, ...
    """
    return _outliers(case) if case.patch else _columns(case)


def _declared(case: Elements) -> Callable[[Any], Kernel]:
    numbers = case.numbers
    return kernel(
        f"u32* planes, {numbers}* first, {numbers}* second, i32* perm, i32* indptr, i32* indices, f32* values, "
        f"{_WORD[case.result]} dense, u32 rows, u32 columns, u32 start, u32 width, u32 group_size, u32 count",
        threads=THREADS,
        blocks=4,
        variant=repr(case),
    )


@functools.cache
def _columns(case: Elements) -> Kernel:
    """All elements; each thread has one column of the block's rows, so that addresses are computed once.

    Neighbouring threads write neighbouring elements: for a reordered weight a thread has an original column and looks
    up the stored one.
    """
    reordered = case.reordered
    exact_of, rounded, put = _parts(case)

    @_declared(case)
    def dequantize_columns(
        planes: Any, first: Any, second: Any, perm: Any, indptr: Any, indices: Any, values: Any, dense: Any,
        rows: Any, columns: Any, start: Any, width: Any, group_size: Any, count: Any,
    ) -> None:  # fmt: skip
        words = ptx.u32((width + 31) >> 5)
        groups = ptx.div_u32(width + group_size - 1, group_size)
        c = ptx.u32(cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x)
        if not reordered:
            c = ptx.u32(start + c)
        if c < columns:
            j = ptx.u32((ptx.u32(perm[c]) if reordered else c) - start)
            if j < width:
                group, row, step = ptx.div_u32(j, group_size), ptx.u32(cuda.blockIdx.y), ptx.u32(cuda.gridDim.y)
                while row < rows:
                    exact = exact_of(planes, first, second, row, rows, words, groups, j, group)
                    put(dense, ptx.u64(row) * ptx.u64(columns) + ptx.u64(c), rounded(exact))
                    row = ptx.u32(row + step)

    return dequantize_columns


@functools.cache
def _outliers(case: Elements) -> Kernel:
    """Only the elements with outliers, one per thread."""
    reordered, patch = case.reordered, case.patch
    exact_of, rounded, put = _parts(case)

    @_declared(case)
    def dequantize_outliers(
        planes: Any, first: Any, second: Any, perm: Any, indptr: Any, indices: Any, values: Any, dense: Any,
        rows: Any, columns: Any, start: Any, width: Any, group_size: Any, count: Any,
    ) -> None:  # fmt: skip
        words = ptx.u32((width + 31) >> 5)
        groups = ptx.div_u32(width + group_size - 1, group_size)
        thread = ptx.u32(cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x)
        threads = ptx.u32(cuda.gridDim.x * cuda.blockDim.x)
        for row in range(cuda.blockIdx.y, rows, cuda.gridDim.y):
            begin = ptx.u32(max(indptr[row], 0))
            end = ptx.min_u32(ptx.u32(max(indptr[row + 1], 0)), count)
            for item in range(ptx.u32(begin + thread), end, threads):
                # -- which element: stored column j of the segment, original column c
                c = ptx.u32(indices[item])
                j = c
                if reordered and c < columns:
                    j = ptx.u32(perm[c])
                j = ptx.u32(j - start)
                if j < width and c < columns:
                    if patch == 1:
                        group = ptx.div_u32(j, group_size)
                        exact = exact_of(planes, first, second, ptx.u32(row), rows, words, groups, j, group)
                        exact = ptx.add_f64(exact, ptx.f64(values[item]))
                    else:
                        exact = ptx.f64(values[item])
                    put(dense, ptx.u64(row) * ptx.u64(columns) + ptx.u64(c), rounded(exact))

    return dequantize_outliers


def _parts(case: Elements) -> tuple[Any, Any, Any]:
    """Device functions: the exact value of an element, its rounding to the logical dtype if asked for, its store."""
    rounded = rounding(case.logical if case.twice else None)
    return _exact(case.q, case.formula, case.logical), rounded, _writer(case.result)


def _exact(q: int, formula: int, logical: int) -> Any:
    """A device function: E of stored column ``j``, in ``group``, of a row of a segment."""
    value_of = code_value(formula, logical)

    def exact_of(
        planes: Any, first: Any, second: Any, row: Any, rows: Any, words: Any, groups: Any, j: Any, group: Any
    ) -> Any:
        word, shift = ptx.u32(j >> 5), ptx.u32(j & 31)
        at = ptx.u32(row * groups + group)
        if formula == 3:
            exact = ptx.f64(second[at])
            for i in static(q):
                alpha = ptx.f64(first[ptx.u32((i * rows + row) * groups + group)])
                if ptx.u32(planes[ptx.u32((i * rows + row) * words + word)] >> shift & 1) != 0:
                    exact = ptx.add_f64(exact, alpha)
                else:
                    exact = ptx.sub_f64(exact, alpha)
            return exact
        code = ptx.u32(0)
        for i in static(q):
            bit = ptx.u32(planes[ptx.u32((i * rows + row) * words + word)] >> shift & 1)
            code = ptx.u32(code * 2 + bit)
        if formula == 4:
            return ptx.mul_f64(ptx.f64(first[at]), ptx.f64(second[code]))
        return value_of(ptx.f64(first[at]), ptx.f64(second[at]), code)

    return inlined(unrolled(exact_of))


def _writer(result: int) -> Any:
    """A device function: a binary64 number in the type of the result; a NaN is the canonical one."""
    narrow = (ptx.f64_to_f32, ptx.f64_to_f16, ptx.f64_to_bf16)[result]
    nan = (0x7FC00000, 0x7E00, 0x7FC0)[result]

    def put(dense: Any, place: Any, exact: Any) -> None:
        if result == 0:
            dense[place] = ptx.f32_bits(narrow(exact)) if exact == exact else ptx.u32(nan)
        else:
            dense[place] = narrow(exact) if exact == exact else ptx.u32(nan)

    return inlined(put)
