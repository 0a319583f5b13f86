"""What GGUF does to dense tensors (see `gguf_names`): rows of q and k in another order, 1 added, the byte order."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


def rows_put_back(rows: Array, heads: int) -> Array:
    """Rows in the order of Hugging Face, of an array whose first axis has them in GGUF's."""
    return _turned(rows, heads, (-1, 2)) if heads else rows


def rows_back(rows: Array, heads: int) -> Array:
    """The inverse of `rows_put_back`."""
    return _turned(rows, heads, (2, -1)) if heads else rows


def copied(array: Array, rule: dict[str, Any]) -> Array:
    """The bytes of a tensor in the file, from the dense tensor that it became."""
    rows = np.ascontiguousarray(rows_back(array, rule.get("heads", 0)))
    if "add" in rule:
        rows = rows + rows.dtype.type(rule["add"])
    return swapped(rows) if rule.get("byte_order") == "big" else rows


def heads_fit(heads: Any, rows: int) -> bool:
    """Whether so many rows can be those of ``heads`` heads, whatever a file says the number is."""
    return type(heads) is int and heads > 0 and rows % (2 * heads) == 0


def copy_fits(rule: dict[str, Any], dtype: str, shape: tuple[int, ...]) -> bool:
    """Whether a rule ``copy``, which may be anyone's, can be that of a dense tensor of this type and shape."""
    return (
        rule.keys() <= {"rule", "heads", "byte_order", "add"}
        and ("add" not in rule or (dtype == "F32" and rule["add"] == 1 and type(rule["add"]) is int))
        and ("heads" not in rule or (len(shape) > 0 and heads_fit(rule["heads"], shape[0])))
        and rule.get("byte_order", "big") == "big"
    )


def _turned(rows: Array, heads: int, pair: tuple[int, int]) -> Array:
    split = rows.reshape(heads, *pair, *rows.shape[1:])
    return np.ascontiguousarray(split.swapaxes(1, 2)).reshape(rows.shape)


def swapped(array: Array) -> Array:
    """The same numbers in the other byte order."""
    size = array.dtype.itemsize
    turned = np.ascontiguousarray(array.reshape(-1).view(np.uint8).reshape(-1, size)[:, ::-1])
    return turned.view(array.dtype).reshape(array.shape)
