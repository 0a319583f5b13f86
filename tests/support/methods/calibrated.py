"""Weights with statistics of made-up inputs, and error-compensated rounding as a textbook has it."""

from collections.abc import Callable
from typing import Any

import numpy as np

from bcqfmt.converters.methods.protocol import InputStats, Job, Method

Array = np.ndarray[Any, Any]


def inputs(columns: int, seed: int = 0, tokens: int | None = None) -> Array:
    """Correlated activations ``[columns, tokens]`` whose channels have very different sizes."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((columns, tokens or 3 * columns)) * np.exp(rng.standard_normal((columns, 1)))
    return x + 0.5 * x[::-1] + 0.3 * x[rng.permutation(columns)]


def stats_of(x: Array, *shared: str, dtype: Any = np.float64) -> InputStats:
    products = x @ x.T
    return InputStats(np.diagonal(products).copy(), products.astype(dtype), x.shape[1], shared)


def job(rows: int, columns: int, seed: int = 0, *, threads: int = 1, calibrated: bool = True, **more: Any) -> Job:
    """A Gaussian weight with a few large elements."""
    weight = np.random.default_rng(seed).standard_t(5, (rows, columns)).astype(np.float32) * np.float32(0.02)
    found = stats_of(inputs(columns, seed + 1)) if calibrated else None
    return Job("w", more.get("weight", weight), more.get("dtype", "F32"), more.get("stats", found), threads)


def output_error(given: Job, decoded: Array) -> float:
    """Relative error of the layer's output over the calibration."""
    assert given.stats is not None
    weight = given.weight.astype(np.float64)
    missed = weight - decoded
    hessian: Any = given.stats.hessian
    return float(np.sqrt(((missed @ hessian) * missed).sum() / ((weight @ hessian) * weight).sum()))


def textbook(
    weight: Array, hessian: Array, grid: Callable[[int, Array], tuple[Array, Array]], groups: Array, tops: Array,
    dampening: float = 0.01,
) -> tuple[Array, Array]:  # fmt: skip
    """Codes and values, one column after the other, each error spread over all later columns by the inverse Hessian.

    ``grid(group, columns)`` is asked when a group's first column is reached; weight and Hessian in rounding order.
    """
    n = weight.shape[1]
    left = weight.astype(np.float64)
    damped = 2 * hessian.astype(np.float64)
    damped[np.diag_indices(n)] += dampening * np.diagonal(damped).mean()
    upper = np.linalg.cholesky(np.linalg.inv(damped)).T
    codes, values = np.zeros(weight.shape, np.int64), np.zeros(weight.shape)
    known: dict[int, tuple[Array, Array]] = {}
    for i in range(n):
        group = int(groups[i])
        if group not in known:
            known[group] = grid(group, np.ascontiguousarray(left[:, groups == group]))
        scale, zero = known[group]
        codes[:, i] = np.clip(np.rint(left[:, i] / scale) + zero, 0, tops[group])
        values[:, i] = scale * (codes[:, i] - zero)
        left[:, i:] -= np.outer((left[:, i] - values[:, i]) / upper[i, i], upper[i, i:])
    return codes, values


def refusal(method: Method, given: Job) -> str:
    """The code with which a method refuses a job."""
    from bcqfmt.errors import BcqError

    try:
        method.quantize(given)
    except BcqError as fault:
        return fault.code
    raise AssertionError("it was not refused")
