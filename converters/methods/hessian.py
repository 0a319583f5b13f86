"""What calibration knows about a layer's inputs, as a matrix: damped, factored, inverted.

H = 2 X X^T + lambda I, lambda a share of the mean diagonal. Rounding errors are compensated with U, H^-1 = U^T U (U
upper triangular, in the order in which columns are rounded); sensitivities come from the diagonal of H^-1. Both are
computed in place, in float64, by loops of our own: the results do not depend on the threads of a BLAS.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from bcqfmt.compiled.threads import each_share
from bcqfmt.errors import error

from .loops.gptq import accumulate, factor_block, invert_block, solve_rows, solve_tile
from .protocol import InputStats, Job

F64 = npt.NDArray[np.float64]
Indices = npt.NDArray[np.intp]
_BLOCK = 128


def stats_of(job: Job, why: str) -> InputStats:
    """The statistics of a job; BCQ-E623 where there are none, BCQ-E624 where they cannot be of this weight."""
    if job.stats is None:
        raise error("BCQ-E623", tensor=job.name, found="no statistics for this weight", expected=why)
    sums = job.stats.square_sum
    if sums.shape != (job.weight.shape[1],):
        found = f"statistics of {sums.shape[0] if sums.ndim else 0} channels"
        expected = f"{job.weight.shape[1]}, the columns of the weight"
        raise error("BCQ-E624", tensor=job.name, found=found, expected=expected)
    if not np.isfinite(sums).all() or (sums < 0).any():
        raise error(
            "BCQ-E624", tensor=job.name, found="square sums below zero or not finite", expected="sums of squares"
        )
    return job.stats


def importance_of(stats: InputStats | None) -> F64 | None:
    """How much an error in a column matters to the layer's output: its mean squared input, damped; None if unknown."""
    if stats is None or not stats.square_sum.any():
        return None
    return np.asarray(stats.square_sum / stats.square_sum.mean() + 0.01)


def hessian_of(job: Job, why: str) -> npt.NDArray[Any]:
    """The sum of x x^T of a job's inputs, ``[in, in]``; BCQ-E623 where the statistics hold none."""
    matrix = stats_of(job, why).hessian
    columns = job.weight.shape[1]
    if matrix is None:
        raise error("BCQ-E623", tensor=job.name, found="statistics without a Hessian", expected=why)
    if matrix.shape != (columns, columns):
        found = f"a Hessian of shape {list(matrix.shape)}"
        raise error("BCQ-E624", tensor=job.name, found=found, expected=f"[{columns}, {columns}]")
    return matrix


def dead_columns(matrix: npt.NDArray[Any]) -> int:
    """How many input channels were zero in all of the calibration."""
    return int(np.count_nonzero(np.diagonal(matrix) == 0))


def damped(matrix: npt.NDArray[Any], dampening: float, order: Indices | None = None, name: str = "") -> F64:
    """2 X X^T + lambda I as a new float64 matrix; ``order[i]`` is the column at position i.

    lambda is ``dampening`` times the mean diagonal. A channel that calibration never saw has no influence on others
    and gets the mean diagonal itself, so that nothing is divided by zero where lambda is 0.
    """
    made: F64 = matrix.astype(np.float64) if order is None else matrix[np.ix_(order, order)].astype(np.float64)
    made *= 2.0
    diagonal = np.einsum("ii->i", made)  # a view
    if not np.isfinite(made).all() or (diagonal < 0).any():
        raise error("BCQ-E624", tensor=name, found="a Hessian below zero or not finite", expected="sums of x x^T")
    mean = float(diagonal.mean()) or 1.0
    dead = diagonal == 0
    diagonal[dead] = mean
    diagonal[~dead] += dampening * mean
    return made


def factored(matrix: F64, threads: int = 1, name: str = "") -> F64:
    """The Cholesky factor L, ``matrix = L L^T``, in the lower triangle of ``matrix`` itself; above is left undefined.

    BCQ-E621 when the matrix is not positive definite: more dampening is needed.
    """
    n = matrix.shape[0]
    panel = np.empty((_BLOCK, n))
    for start in range(0, n, _BLOCK):
        stop = min(start + _BLOCK, n)
        if not factor_block(matrix, start, stop):
            found = "a Hessian that is not positive definite"
            raise error("BCQ-E621", tensor=name, found=found, expected="more dampening, or more calibration text")
        block = np.ascontiguousarray(matrix[start:stop, start:stop].T)

        def solve(first: int, last: int, start: int = start, stop: int = stop, block: F64 = block) -> None:
            solve_rows(matrix, start, stop, block, panel, stop + first, stop + last)

        def subtract(first: int, last: int, start: int = start, stop: int = stop) -> None:
            for row in range(stop + first, stop + last, _BLOCK):
                end = min(row + _BLOCK, stop + last)
                count, depth, width = end - row, stop - start, end - stop
                accumulate(matrix, row, stop, matrix, row, start, panel, 0, stop, count, depth, width, -1.0)

        each_share(solve, n - stop, _BLOCK, threads)
        each_share(subtract, n - stop, _BLOCK, threads)
    return matrix


def inverse_factor(matrix: F64, threads: int = 1, name: str = "") -> F64:
    """L^-1 for ``matrix = L L^T``, lower triangular with zeros above, in ``matrix``; the inverse is L^-T L^-1."""
    n = matrix.shape[0]
    lower = factored(matrix, threads, name)
    left, block = np.empty((_BLOCK, n)), np.empty((_BLOCK, _BLOCK))
    for start in range(0, n, _BLOCK):
        stop = min(start + _BLOCK, n)
        left[: stop - start, :start] = lower[start:stop, :start]
        invert_block(lower, start, stop, block)
        lower[start:stop, :start] = 0.0
        lower[start:stop, stop:] = 0.0

        def row_block(first: int, last: int, start: int = start, stop: int = stop) -> None:
            for column in range(first, last, _BLOCK):  # rows above this column's block have zeros there
                accumulate(
                    lower, start, column, left, 0, column, lower, column, column,
                    stop - start, start - column, _BLOCK, -1.0,
                )  # fmt: skip
                solve_tile(lower, start, stop, block, column, column + _BLOCK)

        each_share(row_block, start, _BLOCK, threads)
    return lower


def inverse_diagonal(matrix: F64, threads: int = 1, name: str = "") -> F64:
    """The diagonal of the inverse of a positive definite matrix, which is overwritten."""
    factor = inverse_factor(matrix, threads, name)
    return np.asarray(np.einsum("rc,rc->c", factor, factor))


def compensation(matrix: F64, threads: int = 1, name: str = "") -> F64:
    """How a rounding error at column i is taken back at column j < i: ``[i, j]`` of a lower triangle of unit diagonal.

    ``matrix`` (overwritten) is the damped Hessian with its columns in the *reverse* of the rounding order: rounding
    then runs from the last column to the first, and what it reads is contiguous.
    """
    factor = inverse_factor(matrix, threads, name)
    factor /= np.diagonal(factor).copy()[:, None]
    return factor


def compensation_in(matrix: F64, order: Indices, threads: int = 1, name: str = "") -> tuple[F64, F64]:
    """:func:`compensation` for columns of ``matrix`` rounded in ``order``, and what a squared error costs, ``[in]``.

    The cost of an error at a column is what is left of it in the layer's output when all later columns have
    compensated for it: 1 / U_ii^2.
    """
    back = order[::-1]
    factor = inverse_factor(matrix[np.ix_(back, back)], threads, name)
    diagonal = np.diagonal(factor).copy()
    factor /= diagonal[:, None]
    costs = np.empty(order.size)
    costs[back] = 1.0 / np.square(diagonal)
    return factor, costs
