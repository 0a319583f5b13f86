"""Orders of input channels: which column is stored or rounded where. All of them are stable."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.intp]


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
