"""Small matrices for the property tests of the methods."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

from method_samples import as_dtype

STYLES = ("plain", "positive", "negative", "few", "constant", "zero", "one large", "half zero")


@st.composite
def matrices(draw: st.DrawFn) -> tuple[Any, str]:
    """Small matrices with rows and groups of every kind, degenerate ones included."""
    rows, columns = draw(st.integers(1, 3)), draw(st.integers(8, 70))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    dtype = draw(st.sampled_from(["F16", "BF16", "F32"]))
    values = rng.normal(size=(rows, columns)) * 10.0 ** draw(st.integers(-9, 1))
    style = draw(
        st.sampled_from(["plain", "positive", "negative", "few", "constant", "zero", "one large", "half zero"])
    )
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
