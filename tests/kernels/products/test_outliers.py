"""Outliers as a launch of their own, in the simulator, and as packed entries."""

from __future__ import annotations

import numpy as np
import pytest

from bcqfmt.container.dtypes import numpy_dtype
from bcqfmt.kernels.operands.outliers import packed_entries
from simulated import sim_mixed
from simulated.cuda_sim import SimulationError, simulate


def sample(rows: int, columns: int, share: float, values: str) -> tuple[np.ndarray, ...]:
    """A dense matrix and its CSR; every fourth row is empty."""
    rng = np.random.default_rng((rows, columns))
    dense = rng.normal(size=(rows, columns)) * (rng.random((rows, columns)) < share)
    dense[::4] = 0
    dense = dense.astype(numpy_dtype(values))
    places = dense != 0
    indptr = np.concatenate([[0], np.cumsum(places.sum(1))]).astype(np.int32)
    return dense, indptr, np.nonzero(places)[1].astype(np.int32), dense[places]


@pytest.mark.parametrize(
    ("rows", "columns", "share", "batch", "values", "x", "y"),
    [(19, 100, 0.3, 1, "F16", "F16", "F32"), (9, 70, 0.9, 3, "F32", "BF16", "F32"),
     (8, 33, 0.0, 1, "F16", "F32", "F32"),
     (5, 64, 0.5, 2, "BF16", "F32", "F16")],
)  # fmt: skip
def test_sums(rows: int, columns: int, share: float, batch: int, values: str, x: str, y: str) -> None:
    dense, indptr, indices, numbers = sample(rows, columns, share, values)
    rng = np.random.default_rng(1)
    vectors = rng.normal(size=(batch, columns)).astype(numpy_dtype(x))
    before = rng.normal(size=(batch, rows)).astype(numpy_dtype(y))
    found = simulate(sim_mixed.outliers, before, indptr, indices, numbers, vectors)
    expected = before.astype(float) + vectors.astype(float) @ dense.astype(float).T
    bound = 1e-6 if y == "F32" else 1e-3
    assert np.linalg.norm(found.astype(float) - expected) <= bound * np.linalg.norm(expected)
    assert found[:, ::4].tobytes() == before[:, ::4].tobytes()


def test_arguments_that_do_not_fit() -> None:
    _, indptr, indices, numbers = sample(8, 32, 0.5, "F16")
    x, y = np.ones((1, 32), np.float16), np.ones((1, 8), np.float16)
    for bad in (
        (y, indptr[:-1], indices, numbers, x), (y, indptr, indices.astype(np.int64), numbers, x),
        (y, indptr, indices, numbers[:-1], x), (y[:, :7].copy(), indptr, indices, numbers, x),
    ):  # fmt: skip
        with pytest.raises(SimulationError) as caught:
            simulate(sim_mixed.outliers, *bad)
        assert caught.value.kind == "BCQ-E552"


def test_entries_are_packed_without_loss() -> None:
    columns = np.array([3, 65000, 7, 9, 11])
    words, size = packed_entries(columns, np.array([1.5, -2, 0.25, 0, 65504], np.float32), 65536)
    assert (size, words.size) == (4, 8)
    assert (words[:5] & 0xFFFF == columns).all()
    assert ((words[:5] >> 16).astype(np.uint16).view(np.float16) == [1.5, -2, 0.25, 0, 65504]).all()
    words, size = packed_entries(columns, np.array([1.5, -2, 1 / 3, 0, 1e6], np.float32), 65536)
    assert (size, words.size) == (8, 12)
    assert (words[:10:2] == columns).all()
    assert (words[1:10:2].view(np.float32) == np.array([1.5, -2, 1 / 3, 0, 1e6], np.float32)).all()
