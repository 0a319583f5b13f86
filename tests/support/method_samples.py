"""Dense matrices that the tests of all methods quantize, and what they check on every result."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from bcqfmt.converters.methods.protocol import InputStats, Job, Quantized

F32 = npt.NDArray[np.float32]
DTYPES: dict[str, Any] = {"F16": np.float16, "BF16": ml_dtypes.bfloat16, "F32": np.float32}
KINDS = ("gauss", "heavy", "shifted", "outliers")


def matrix(rows: int = 16, columns: int = 256, kind: str = "gauss", seed: int = 0, dtype: str = "F16") -> F32:
    """``[rows, columns]`` float32, every number exact in ``dtype``.

    ``gauss``: normal, rows of different size. ``heavy``: Student's t with 3 degrees of freedom. ``shifted``: normal
    around a mean. ``outliers``: normal, one value in 200 twenty times as large.
    """
    rng = np.random.default_rng(seed)
    if kind == "heavy":
        values = rng.standard_t(3, (rows, columns))
    else:
        values = rng.normal(size=(rows, columns))
    if kind == "shifted":
        values += rng.normal(size=(rows, 1)) * 3
    if kind == "outliers":
        values[rng.random((rows, columns)) < 1 / 200] *= 20
    values *= np.exp2(rng.integers(-7, -3, (rows, 1)))
    return as_dtype(values, dtype)


def as_dtype(values: Any, dtype: str = "F16") -> F32:
    """Rounded to ``dtype``, as float32."""
    return np.asarray(values).astype(DTYPES[dtype]).astype(np.float32)


def job(weight: F32, dtype: str = "F16", stats: InputStats | None = None, threads: int = 1) -> Job:
    """A job with a name that error messages must show."""
    return Job("model.layers.0.self_attn.q_proj.weight", weight, dtype, stats, threads)


def groups(weight: Any, group_size: int) -> Iterator[tuple[int, slice]]:
    """(row, columns) of every group, the short last one included."""
    for row in range(weight.shape[0]):
        for start in range(0, weight.shape[1], group_size):
            yield row, slice(start, min(start + group_size, weight.shape[1]))


def group_errors(weight: F32, decoded: Any, group_size: int) -> npt.NDArray[np.float64]:
    """Sum of squared errors of every group, float64 ``[out, G]``."""
    squares = np.square(weight.astype(np.float64) - decoded.astype(np.float64))
    starts = np.arange(0, weight.shape[1], group_size)
    return np.add.reduceat(squares, starts, axis=1)


def calibration(columns: int, tokens: int = 64, seed: int = 0, shared: tuple[str, ...] = ()) -> InputStats:
    """Statistics of random inputs whose channels differ in size."""
    rng = np.random.default_rng(seed)
    inputs = rng.normal(size=(tokens, columns)) * np.exp(rng.normal(size=columns))
    return InputStats(np.square(inputs).sum(axis=0), inputs.T @ inputs, tokens, shared)


def digest(result: Quantized) -> str:
    """Equal for equal parts."""
    return result.weight.digest()
