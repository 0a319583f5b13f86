"""Dense matrices that the tests of all methods quantize, and what they check on every result."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from bcqfmt.converters.methods.protocol import InputStats, Job, Quantized

F32 = npt.NDArray[np.float32]
DTYPES: dict[str, Any] = {"F16": np.float16, "BF16": ml_dtypes.bfloat16, "F32": np.float32}
STYLES = ("plain", "positive", "negative", "few", "constant", "zero", "one large", "half zero")
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


@st.composite
def matrices(draw: st.DrawFn) -> tuple[Any, str]:
    """Small matrices with rows and groups of every kind, degenerate ones included."""
    rows, columns = draw(st.integers(1, 3)), draw(st.integers(8, 70))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    dtype = draw(st.sampled_from(["F16", "BF16", "F32"]))
    values = rng.normal(size=(rows, columns)) * 10.0 ** draw(st.integers(-9, 1))
    style = draw(st.sampled_from(STYLES))
    if style == "positive":
        values = np.abs(values)
    elif style == "negative":
        values = -np.abs(values)
    elif style == "few":
        values = values[:, :1] * rng.integers(-2, 3, (rows, columns))
    elif style == "constant":
        values = np.repeat(values[:, :1], columns, axis=1)
    elif style == "zero":
        values[:] = 0
    elif style == "one large":
        values[0, -1] *= 1000
    elif style == "half zero":
        values[:, : columns // 2] = 0
    return as_dtype(values, dtype), dtype
