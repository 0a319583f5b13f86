"""Sparse outliers: which elements are kept apart, and their CSR form over original columns."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from bcqfmt.container.dtypes import round_to

F64 = npt.NDArray[np.float64]
_BLOCK = 1 << 22  # scores looked at together: of all of them no second copy is made


class Csr(NamedTuple):
    """indptr ``[out + 1]``, indices ``[nnz]`` rising in every row, values ``[nnz]`` float16."""

    indptr: npt.NDArray[np.int64]
    indices: npt.NDArray[np.int64]
    values: npt.NDArray[Any]


def largest_scores(scores: npt.NDArray[Any], count: int) -> npt.NDArray[np.bool_]:
    """A mask of the ``count`` largest scores ``[out, n]``; of equal ones the first, by rows. Zeros are never chosen."""
    flat = scores.reshape(-1)
    blocks = [slice(start, start + _BLOCK) for start in range(0, flat.size, _BLOCK)]
    count = min(count, sum(int(np.count_nonzero(flat[block] > 0)) for block in blocks))
    chosen = np.zeros(flat.size, np.bool_)
    if count:
        largest = np.concatenate([_largest(flat[block], count) for block in blocks])
        least = _largest(largest, count).min()
        rest = count - int(np.count_nonzero(largest > least))
        for block in blocks:
            chosen[block] = flat[block] > least
            equal = np.flatnonzero(flat[block] == least)[:rest]
            chosen[block][equal] = True
            rest -= equal.size
    return chosen.reshape(scores.shape)


def _largest(values: npt.NDArray[Any], count: int) -> npt.NDArray[Any]:
    """The ``count`` largest, all if there are no more, in any order."""
    return values if count >= values.size else np.partition(values, values.size - count)[values.size - count :]


def csr_of(mask: npt.NDArray[np.bool_], wanted: F64, dense: F64) -> Csr:
    """Outliers at ``mask`` ``[out, in]``, added to the dense values: v = RN16(wanted - dense), ``[nnz]`` row by row."""
    rows, columns = np.nonzero(mask)
    indptr = np.zeros(mask.shape[0] + 1, np.int64)
    np.cumsum(np.bincount(rows, minlength=mask.shape[0]), out=indptr[1:])
    return Csr(indptr, columns.astype(np.int64), round_to(wanted - dense, "F16"))
