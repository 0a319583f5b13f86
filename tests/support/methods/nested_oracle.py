"""The best plane that can be put under given ones, by trying every choice of bits that could be the best."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import numpy.typing as npt

F64 = npt.NDArray[np.float64]


def best_plane_error(values: Any, codes: Any, planes: int, bias: bool) -> float:
    """Least squared error of a group [g] with ``planes`` + 1 planes whose first ones are ``codes`` [g], any scales.

    A new plane's best bits cut the sorted numbers of every code in two, the upper ones set: so all cuts are tried, and
    for each the scales by least squares. What the old planes (and the bias) explain is taken out of the new plane and
    of the numbers first; then the rest is one division per choice.
    """
    order = np.lexsort((values, codes))
    numbers, code = np.asarray(values, np.float64)[order], np.asarray(codes)[order]
    columns = [np.where(code >> i & 1, 1.0, -1.0) for i in range(planes)] + [np.ones(len(code))] * bias
    basis, sizes, _ = np.linalg.svd(np.stack(columns, axis=1), full_matrices=False)
    kept = basis[:, sizes > 1e-9 * sizes[0]]
    rest = numbers - kept @ (kept.T @ numbers)
    runs = [np.flatnonzero(code == one) for one in np.unique(code)]
    along, inside = np.zeros(1), np.zeros((1, kept.shape[1]))
    for run in runs:
        signs = np.where(np.arange(len(run)) < np.arange(len(run) + 1)[:, None], -1.0, 1.0)  # [cuts, run]
        along = (along[:, None] + signs @ rest[run]).reshape(-1)
        inside = (inside[:, None] + signs @ kept[run]).reshape(-1, kept.shape[1])
    left = len(code) - np.square(inside).sum(axis=1)
    gains = np.divide(np.square(along), left, out=np.zeros_like(along), where=left > 1e-9 * len(code))
    return float(np.square(rest).sum() - gains.max())


def best_plane_error_by_bits(values: Any, codes: Any, planes: int, bias: bool) -> float:
    """The same by all 2^g choices of bits, for tests of the one above."""
    numbers = np.asarray(values, np.float64)
    columns = [np.where(np.asarray(codes) >> i & 1, 1.0, -1.0) for i in range(planes)] + [np.ones(len(codes))] * bias
    least = np.inf
    for bits in itertools.product((-1.0, 1.0), repeat=len(codes)):
        design = np.stack([*columns, np.array(bits)], axis=1)
        solution, *_ = np.linalg.lstsq(design, numbers, rcond=None)
        least = min(least, float(np.square(numbers - design @ solution).sum()))
    return least
