"""Sparse outliers: which elements are kept apart, and their CSR form over original columns."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from bcqfmt.dtypes import round_to

__all__ = ["Csr", "csr_of", "largest_scores"]

F64 = npt.NDArray[np.float64]


class Csr(NamedTuple):
    """indptr ``[out + 1]``, indices ``[nnz]`` rising in every row, values ``[nnz]`` float16."""

    indptr: npt.NDArray[np.int64]
    indices: npt.NDArray[np.int64]
    values: npt.NDArray[Any]


def largest_scores(scores: npt.NDArray[Any], count: int) -> npt.NDArray[np.bool_]:
    """A mask of the ``count`` largest scores ``[out, n]``; of equal ones the first, by rows. Zeros are never chosen."""
    flat = scores.reshape(-1)
    count = min(count, int(np.count_nonzero(flat > 0)))
    chosen = np.zeros(flat.size, np.bool_)
    if count:
        least = np.partition(flat, flat.size - count)[flat.size - count]
        above = flat > least
        chosen[above] = True
        chosen[np.flatnonzero(flat == least)[: count - int(np.count_nonzero(above))]] = True
    return chosen.reshape(scores.shape)


def csr_of(mask: npt.NDArray[np.bool_], wanted: F64, dense: F64) -> Csr:
    """Outliers at ``mask`` ``[out, in]``, added to the dense values: v = RN16(wanted - dense), ``[nnz]`` row by row."""
    rows, columns = np.nonzero(mask)
    indptr = np.zeros(mask.shape[0] + 1, np.int64)
    np.cumsum(np.bincount(rows, minlength=mask.shape[0]), out=indptr[1:])
    return Csr(indptr, columns.astype(np.int64), round_to(wanted - dense, "F16"))
