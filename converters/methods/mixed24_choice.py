"""What of a weight gets four bits, by the sensitivity of column groups; which elements are kept apart as outliers."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from bcqfmt.container.dtypes import round_to

from .hessian import damped, hessian_of, inverse_diagonal
from .protocol import Job

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
_BLOCK = 1 << 22  # scores looked at together: of all of them no second copy is made
_WHY = "sensitivities come from the Hessian of the layer's inputs"


class Sensitivity(NamedTuple):
    """``kind``: ``hessian`` or ``range``; ``groups`` ``[G]`` of the whole groups; ``columns`` ``[in]``.

    ``columns`` is 1 / [H^-1]_cc^2, by which squared numbers of a column are multiplied; 1 for ``range``.
    """

    kind: str
    groups: F64
    columns: F64


def by_hessian(job: Job, weight: F32, group_size: int, dampening: float) -> Sensitivity:
    """ICCAD'24 equation 9: the sum over a group's columns and all rows of w^2 / [H^-1]_cc^2."""
    diagonal = inverse_diagonal(damped(hessian_of(job, _WHY), dampening, name=job.name), job.threads, job.name)
    columns = 1.0 / np.square(diagonal)
    squares = _column_squares(weight)
    return Sensitivity("hessian", _group_sums(squares * columns, group_size), columns)


def by_range(weight: F32, group_size: int) -> Sensitivity:
    """Without statistics: the sum over all rows of the squared range (largest minus smallest) of the group."""
    groups = weight.shape[1] // group_size
    parts = weight[:, : groups * group_size].reshape(weight.shape[0], groups, group_size)
    ranges = parts.max(axis=2).astype(np.float64) - parts.min(axis=2)
    return Sensitivity("range", np.square(ranges).sum(axis=0), np.ones(weight.shape[1]))


def _column_squares(weight: F32) -> F64:
    """Sum of w^2 over rows, ``[in]``, a few rows at a time."""
    total = np.zeros(weight.shape[1])
    step = max(1, (1 << 20) // weight.shape[1])
    for start in range(0, weight.shape[0], step):
        total += np.square(weight[start : start + step], dtype=np.float64).sum(axis=0)
    return total


def _group_sums(values: F64, group_size: int) -> Any:
    groups = values.size // group_size
    return values[: groups * group_size].reshape(groups, group_size).sum(axis=1)


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
