"""What every method asks of a matrix before it looks at the numbers, and orders of its columns."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from bcqfmt.compiled.rounding import LARGEST
from bcqfmt.errors import error

from .parameters import ROW
from .protocol import Job

F32 = npt.NDArray[np.float32]
Indices = npt.NDArray[np.intp]

_SMALLEST = 8  # columns of a group, by the format
_BLOCK = 1 << 16


def checked(job: Job) -> F32:
    """The weight of a job in C order; BCQ-E621 for a shape that no group fits, BCQ-E622 for NaN and infinity."""
    weight = job.weight
    if weight.ndim != 2 or not weight.shape[0] or weight.shape[1] < _SMALLEST:
        expected = f"a matrix of at least 1 row and {_SMALLEST} columns"
        raise error("BCQ-E621", tensor=job.name, found=f"shape {list(weight.shape)}", expected=expected)
    if weight.dtype != np.float32:
        raise error("BCQ-E302", tensor=job.name, found=f"a weight of type {weight.dtype}", expected="float32")
    weight = np.ascontiguousarray(weight)
    flat = weight.reshape(-1)
    for start in range(0, flat.size, _BLOCK):
        block = flat[start : start + _BLOCK]
        if not np.isfinite(block).all():
            raise _not_finite(job.name, weight)
    return weight


def groups_of(columns: int, group_size: int) -> tuple[int, int]:
    """(group size, number of groups): the one asked for, or the whole row where that is shorter or ``ROW``."""
    size = columns if group_size == ROW else min(group_size, columns)
    return size, -(-columns // size)


def stored_size(asked: int, size: int) -> int | str:
    """The group size as the scheme states it: ``"row"`` where ``ROW`` was asked for, else the number."""
    return "row" if asked == ROW else size


def scale_type(asked: str, job: Job) -> str:
    """The type that scales are stored in; ``source``: that of the values, which other layouts ask for (``export``)."""
    return job.dtype if asked == "source" else asked


def refuse_overflow(job: Job, numbers: npt.NDArray[Any], what: str, dtype: str, first: int = 0) -> None:
    """BCQ-E621 where a number ``[rows, G]``, rows from ``first`` on, became infinite in being rounded to ``dtype``."""
    wrong = ~np.isfinite(numbers)
    if wrong.any():
        row, group = np.unravel_index(int(np.argmax(wrong)), numbers.shape)
        found = f"{what} of row {first + row}, group {group} above {LARGEST[dtype]:g}, the largest number of {dtype}"
        expected = "a type that holds it: scale_dtype F32 always does, and BF16 nearly"
        raise error("BCQ-E621", tensor=job.name, found=found, expected=expected)


def largest_first(values: npt.NDArray[Any]) -> Indices:
    """Columns by falling value; equal ones stay as they stand."""
    return np.argsort(-np.asarray(values, np.float64), kind="stable")


def group_columns(groups: npt.ArrayLike, size: int, columns: int) -> Indices:
    """The columns of some groups of ``size``, group after group; the last group of the matrix may be short."""
    starts = np.asarray(groups, np.intp) * size
    found = (starts[:, None] + np.arange(size)).reshape(-1)
    return found[found < columns]


def is_identity(order: Indices) -> bool:
    """Whether nothing is moved: then no `perm` is stored."""
    return bool((order == np.arange(order.size)).all())


def _not_finite(name: str, weight: F32) -> Exception:
    wrong = ~np.isfinite(weight)
    row, column = np.unravel_index(int(np.argmax(wrong)), weight.shape)
    count = int(np.count_nonzero(wrong))
    found = f"{count} infinities or NaNs, the first at {row}x{column}"
    return error("BCQ-E622", tensor=name, found=found, expected="finite numbers")
