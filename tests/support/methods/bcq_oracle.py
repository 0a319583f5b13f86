"""Binary-coding quantization in numpy, all groups at once: greedy, and the published alternation from it."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import numpy.typing as npt

from bcqfmt.container.dtypes import round_to

F64 = npt.NDArray[np.float64]


def grouped(weight: Any, size: int) -> list[F64]:
    """Groups [n, size] of a matrix, and the short last ones of its rows apart."""
    whole = weight.shape[1] // size * size
    parts = [weight[:, :whole].reshape(-1, size), weight[:, whole:]]
    return [part.astype(np.float64) for part in parts if part.size]


def greedy(groups: F64, bits: int, around_mean: bool) -> tuple[F64, F64, F64]:
    """alpha [n, q], z [n], signs [n, g, q]."""
    z = groups.mean(axis=1) if around_mean else np.zeros(len(groups))
    rest = groups - z[:, None]
    alphas, planes = [], []
    for _ in range(bits):
        sign = np.where(rest >= 0, 1.0, -1.0)
        alpha = np.abs(rest).mean(axis=1)
        rest = rest - alpha[:, None] * sign
        alphas.append(alpha)
        planes.append(sign)
    return np.stack(alphas, 1), z, np.stack(planes, 2)


def value_errors(
    groups: F64, alpha: F64, z: F64, signs: F64, stored: str, dtype: str, z_stored: str | None = None
) -> F64:
    """Squared error of each group with alpha and z rounded to the types they are stored in and values to ``dtype``."""
    alpha, z = (
        round_to(numbers, kind).astype(np.float64) for numbers, kind in ((alpha, stored), (z, z_stored or stored))
    )
    values = np.repeat(z[:, None], groups.shape[1], axis=1)
    for i in range(alpha.shape[1]):
        values = values + signs[:, :, i] * alpha[:, i, None]
    return np.square(groups - round_to(values, dtype).astype(np.float64)).sum(axis=1)


def alternated(groups: F64, bits: int, bias: bool, rounds: int = 15) -> F64:
    """Squared error of each group: greedy, then least squares and nearest sums in turn; nothing is rounded."""
    alpha, z, signs = greedy(groups, bits, bias)
    patterns = np.array(list(itertools.product((-1.0, 1.0), repeat=bits)))
    ones = np.ones((*groups.shape, 1))
    for _ in range(rounds):
        columns = np.concatenate([signs, ones], axis=2) if bias else signs
        solution = (np.linalg.pinv(columns) @ groups[:, :, None])[:, :, 0]
        alpha, z = solution[:, :bits], solution[:, bits] if bias else z
        levels = alpha @ patterns.T + z[:, None]
        signs = patterns[np.abs(groups[:, :, None] - levels[:, None, :]).argmin(axis=2)]
    return np.square(groups - (signs @ alpha[:, :, None])[:, :, 0] - z[:, None]).sum(axis=1)


def levels(alpha: Any, z: float, dtype: str) -> F64:
    """Values of all codes, plane 0 the highest bit: added up in the order of the format, rounded once."""
    found = []
    for signs in itertools.product((-1, 1), repeat=len(alpha)):
        value = z
        for sign, one in zip(signs, alpha, strict=True):
            value = value + float(one) if sign > 0 else value - float(one)
        found.append(value)
    return round_to(np.array(found), dtype).astype(np.float64)
