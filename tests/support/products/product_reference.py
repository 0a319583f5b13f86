"""The product every kernel is measured against: the normative decoder, then float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from bcqfmt.errors import error
from bcqfmt.weight.weight import BcqWeight

__all__ = ["product", "relative_error"]

_ELEMENTS = 1 << 24  # decoded at a time


def product(
    weight: BcqWeight, x: Any, *, planes: int | None = None, index: int | None = None, rounded: bool = False
) -> npt.NDArray[np.float64]:
    """``x W^T`` for x (in) or (batch, in) of any float type: float64 (out) or (batch, out).

    W holds the exact E of section 8, or with ``rounded`` the values in the logical dtype, which is what a product
    with the dequantized matrix sees. ``planes``: the first ones only. ``index``: which matrix of a stack.
    """
    vectors = np.asarray(x).astype(np.float64)
    if vectors.ndim not in (1, 2) or vectors.shape[-1] != weight.spec.columns:
        raise error("BCQ-E552", found=f"x of shape {list(vectors.shape)}", expected=f"[batch, {weight.spec.columns}]")
    if (index is None) == (len(weight.shape) == 3) or not 0 <= (index or 0) < weight.spec.stack:
        raise error(
            "BCQ-E552", found=f"matrix {index} of a weight of shape {list(weight.shape)}", expected="index= for a stack"
        )
    rows = weight.spec.out
    step = max(1, _ELEMENTS // (weight.spec.columns * weight.spec.stack))
    pieces = []
    for start in range(0, rows, step):
        span = (start, min(start + step, rows))
        values = weight.dequantize(None if rounded else "float64", rows=span, planes=planes)
        matrix = (values if index is None else values[index]).astype(np.float64)
        with np.errstate(invalid="ignore", over="ignore"):
            pieces.append(vectors @ matrix.T)
    return np.concatenate(pieces, axis=-1)


def relative_error(found: Any, expected: npt.NDArray[np.float64]) -> float:
    """The L2 distance over the L2 norm of ``expected``; the distance itself where that is zero."""
    distance = float(np.linalg.norm(np.asarray(found).astype(np.float64) - expected))
    norm = float(np.linalg.norm(expected))
    return distance / norm if norm else distance
