"""How far a quantized weight is from the dense one, measured on the values that a reader gets."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from bcqfmt.weight.weight import BcqWeight

__all__ = ["figures", "square_sums"]

_BLOCK = 1 << 20  # elements compared at a time: a few times 8 MB, whatever the weight's size


def figures(weight: npt.NDArray[np.float32], quantized: BcqWeight, planes: int | None = None) -> dict[str, float]:
    """``mse``, ``relative`` (Frobenius norm of the error over that of the weight) and ``sqnr_db``.

    ``weight``: float32 ``([E,] out, in)``. The values compared are those of ``quantized.dequantize(planes=planes)``,
    rounded to the logical dtype, in float64. A weight of zeros has relative error 0 when it is reproduced and infinity
    when it is not; ``sqnr_db`` is infinity where there is no error. Both may be infinite, never NaN.
    """
    power, noise = square_sums(weight, quantized, planes)
    relative = math.sqrt(noise / power) if power else (math.inf if noise else 0.0)
    sqnr = 10 * math.log10(power / noise) if noise and power else (-math.inf if noise else math.inf)
    return {"mse": noise / weight.size, "relative": relative, "sqnr_db": sqnr}


def square_sums(
    weight: npt.NDArray[np.float32], quantized: BcqWeight, planes: int | None = None
) -> tuple[float, float]:
    """Sum of w^2 and sum of (w - decoded)^2 in float64, block by block of rows."""
    if weight.shape != quantized.shape:
        raise ValueError(f"a weight of shape {list(weight.shape)} beside one of {list(quantized.shape)}")
    power, noise = [], []
    step = max(1, _BLOCK // (quantized.spec.stack * quantized.spec.columns))
    for start in range(0, quantized.spec.out, step):
        rows = (start, min(start + step, quantized.spec.out))
        dense: npt.NDArray[Any] = weight[..., rows[0] : rows[1], :].astype(np.float64)
        decoded = quantized.dequantize(rows=rows, planes=planes).astype(np.float64)
        power.append(float(np.square(dense).sum()))
        decoded -= dense
        noise.append(float(np.square(decoded, out=decoded).sum()))
    return math.fsum(power), math.fsum(noise)
