"""g_idx: which group a column belongs to, as a permutation of columns and back."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from bcqfmt.errors import error

Array = npt.NDArray[Any]


def permutation(g_idx: Array, columns: int, group_size: int, module: str) -> npt.NDArray[np.int32] | None:
    """The stable order that sorts columns by group, int32 (columns,); None when they are sorted already.

    Negative entries count from the last group, as the tools that write them read them. Groups must be full, the last
    one aside: anything else has no place in the format.
    """
    groups = -(-columns // group_size)
    if g_idx.shape != (columns,):
        raise error("BCQ-E606", tensor=f"{module}.g_idx", found=f"shape {list(g_idx.shape)}", expected=f"[{columns}]")
    if int(g_idx.min()) < -groups or int(g_idx.max()) >= groups:
        found = f"groups {int(g_idx.min())}..{int(g_idx.max())}"
        raise error("BCQ-E606", tensor=f"{module}.g_idx", found=found, expected=f"0..{groups - 1}")
    index = g_idx.astype(np.int64) % groups
    counts = np.bincount(index, minlength=groups)
    wanted = np.full(groups, group_size)
    wanted[-1] = columns - (groups - 1) * group_size
    if (counts != wanted).any():
        group = int(np.argmax(counts != wanted))
        found = f"group {group} has {int(counts[group])} columns"
        raise error("BCQ-E607", tensor=f"{module}.g_idx", found=found, expected=f"{int(wanted[group])}")
    perm = np.argsort(index, kind="stable").astype(np.int32)
    return None if (perm == np.arange(columns)).all() else perm


def group_index(perm: Array | None, columns: int, group_size: int) -> npt.NDArray[np.int32]:
    """The inverse: int32 (columns,), the group of every original column."""
    stored = (np.arange(columns) // group_size).astype(np.int32)
    if perm is None:
        return stored
    index = np.empty(columns, np.int32)
    index[perm] = stored
    return index
