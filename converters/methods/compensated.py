"""Rounding whose errors later columns compensate, and numbers of groups fitted to the layer's output.

:func:`compensated_codes` rounds columns one after the other, and later columns compensate for the error. With
H^-1 = U^T U (U upper triangular) for the damped Hessian in rounding order: column i is rounded, and what is missed,
m_i = w_i - value_i, is taken back at every later column, w_j -= m_i U_ij / U_ii: the best that later columns can do for
the layer's output. Blocks take up all earlier errors at once (GPTQ's lazy updates).

:func:`fitted` does that for groups whose numbers (a scale; plane scales and a bias) were chosen beforehand, then turns
it round: with the codes fixed, the numbers of one group after the other get the values of least output error
tr(E H E^T), rounded to the types they are stored in, and the weight is rounded again. Every row keeps its best turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol, Self, TypeVar

import numpy as np
import numpy.typing as npt

from bcqfmt.compiled.threads import each_share

from .loops.gptq import accumulate, round_columns, round_to_levels

F64 = npt.NDArray[np.float64]
Floats = npt.NDArray[Any]  # float64, of nested planes float32
Codes = npt.NDArray[np.uint8]
Indices = npt.NDArray[np.intp]

_BLOCK = 128
_ELEMENTS = 1 << 22  # of a chunk of rows: 32 MB for each float64 copy of it
_GRAIN = 8
_ROWS = 256  # compared at a time
_RIDGE = 1e-9  # of the mean diagonal: numbers that the codes do not tell apart keep their sum


class GroupRule(Protocol):
    """Decides a group's scale and zero point when rounding reaches it."""

    def __call__(self, group: int, first_row: int, target: F64) -> tuple[Any, Any]:
        """Scale and zero point, each ``[rows]``; ``target``: ``[rows, width]``, the group as compensated so far."""


class FixedGrid(NamedTuple):
    """Scales and zero points known beforehand, float64 ``[out, groups]``; the groups need not be runs of columns."""

    scale: F64
    zero: F64

    def __call__(self, group: int, first_row: int, target: F64) -> tuple[Any, Any]:
        """The group's column."""
        rows = slice(first_row, first_row + target.shape[0])
        return self.scale[rows, group], self.zero[rows, group]


class FixedLevels(NamedTuple):
    """What codes are worth, known beforehand: float64 ``[out, groups, L]``, rising; labels: their codes, uint8."""

    levels: F64
    labels: Codes


class Rounded(NamedTuple):
    """codes uint8 ``[out, in]`` in rounding order; scale and zero float64 ``[out, groups]``.

    ``kept``: the values wanted where ``exact`` was set, float64, row by row in the original order of columns.
    ``errors``: e H e^T of every row, float64, where ``costs`` were given.
    """

    codes: npt.NDArray[np.uint8]
    scale: F64
    zero: F64
    kept: F64
    errors: F64


class _Piece(NamedTuple):
    """A run of rounding positions inside one group; ``whole``: positions of the group if it begins here."""

    group: int
    start: int
    stop: int
    whole: tuple[int, int] | None


def compensated_codes(
    weight: npt.NDArray[np.float32], factor: F64, order: Indices, groups: Indices, tops: npt.ArrayLike,
    rule: GroupRule | FixedLevels, *, exact: npt.NDArray[np.bool_] | None = None, row_step: int = 1, threads: int = 1,
    costs: F64 | None = None,
) -> Rounded:  # fmt: skip
    """Round a weight ``[out, in]`` to the grids that ``rule`` gives, compensating as far as ``factor`` says.

    order: the original column at every rounding position. factor: :func:`hessian.compensation` of the damped Hessian
    in the order ``order[::-1]``. groups: group of every position, a run each unless ``rule`` is known beforehand
    (:class:`FixedGrid`, :class:`FixedLevels`).
    tops: largest code of every group. exact: elements ``[out, in]``, original columns, that are stored elsewhere and
    have no error. ``rule`` is called with rows in multiples of ``row_step``. costs: of :func:`hessian.compensation_in`,
    for what a column misses when it is rounded, squared.
    """
    out, n = weight.shape
    largest = np.asarray(tops, np.float64)
    scale, zero = np.zeros((out, largest.size)), np.zeros((out, largest.size))
    made = Rounded(np.empty((out, n), np.uint8), scale, zero, np.empty(0), np.empty(out))
    fixed = isinstance(rule, FixedGrid | FixedLevels)
    blocks = list(_blocks(groups, fixed))
    step = row_step * max(1, max(_ELEMENTS // n, 64) // row_step)
    kept = []
    for first in range(0, out, step):
        chunk = _Chunk(weight, factor, order, groups, largest, made, first, min(first + step, out), exact)
        if isinstance(rule, FixedGrid):
            made.scale[chunk.rows], made.zero[chunk.rows] = rule.scale[chunk.rows], rule.zero[chunk.rows]
        elif isinstance(rule, FixedLevels):
            chunk.levels = FixedLevels(rule.levels[chunk.rows], rule.labels[chunk.rows])
        for block in blocks:
            chunk.round_block(block, None if fixed else rule, threads)  # type: ignore[arg-type]
        made.codes[chunk.rows] = chunk.codes[:, ::-1]
        if costs is not None:
            made.errors[chunk.rows] = (np.square(chunk.missed) * costs[order[::-1]]).sum(axis=1)
        if exact is not None:
            kept.append(chunk.wanted(order)[exact[chunk.rows]])
    return made._replace(kept=np.concatenate(kept)) if kept else made


class _Chunk:
    """Some rows while they are rounded; columns in the reverse of the rounding order, as the factor has them.

    ``weight`` holds the weights as given, and as compensated once a column is rounded; ``missed`` what it then lacks.
    """

    def __init__(
        self, weight: npt.NDArray[np.float32], factor: F64, order: Indices, groups: Indices, tops: F64,
        made: Rounded, first: int, stop: int, exact: npt.NDArray[np.bool_] | None,
    ) -> None:  # fmt: skip
        self.first, self.rows, self.factor, self.tops = first, slice(first, stop), factor, tops
        back = order[::-1]
        self.weight = np.take(weight[self.rows], back, axis=1).astype(np.float64)
        self.count, self.n = self.weight.shape
        self.exact = np.zeros(self.weight.shape, np.bool_) if exact is None else np.take(exact[self.rows], back, axis=1)
        self.which = np.ascontiguousarray(groups[::-1], np.int64)
        self.scale, self.zero = made.scale[self.rows], made.zero[self.rows]
        self.missed = np.zeros_like(self.weight)
        self.codes = np.empty(self.weight.shape, np.uint8)
        self.levels: FixedLevels | None = None

    def round_block(self, block: list[_Piece], rule: GroupRule | None, threads: int) -> None:
        """All pieces of a block; the block first takes up what the columns before it missed."""
        low, high = self.n - block[-1].stop, self.n - block[0].start
        target = self.target(low, high, high, threads)
        for piece in block:
            first, last = self.n - piece.stop, self.n - piece.start
            if rule is not None and piece.whole is not None:
                self._ask(rule, piece, target, low, threads)

            def share(row: int, stop: int, first: int = first, last: int = last) -> None:
                if self.levels is not None:
                    round_to_levels(
                        target, low, first, last, self.factor, *self.levels, self.which, self.codes, self.missed, row,
                        stop,
                    )  # fmt: skip
                    return
                round_columns(
                    target, low, first, last, self.factor, self.scale, self.zero, self.which, self.tops, self.exact,
                    self.codes, self.weight, self.missed, row, stop,
                )  # fmt: skip

            each_share(share, self.count, _GRAIN, threads)

    def target(self, low: int, high: int, done: int, threads: int) -> F64:
        """Columns low..high with the errors of the columns from ``done`` on taken back, ``[rows, high - low]``."""
        made = np.ascontiguousarray(self.weight[:, low:high])

        def share(row: int, stop: int) -> None:
            depth, width = self.n - done, high - low
            accumulate(made, row, 0, self.missed, row, done, self.factor, done, low, stop - row, depth, width, -1.0)

        each_share(share, self.count, _GRAIN, threads)
        return made

    def wanted(self, order: Indices) -> F64:
        """The weights as compensated, when all is rounded; in the original order of columns."""
        values = np.empty_like(self.weight)
        values[:, order[::-1]] = self.weight
        return values

    def _ask(self, rule: GroupRule, piece: _Piece, target: F64, low: int, threads: int) -> None:
        assert piece.whole is not None
        start, stop = self.n - piece.whole[1], self.n - piece.whole[0]
        seen = target[:, start - low : stop - low] if start >= low else self.target(start, stop, stop, threads)
        numbers = rule(piece.group, self.first, np.ascontiguousarray(seen[:, ::-1]))
        self.scale[:, piece.group], self.zero[:, piece.group] = numbers


def _blocks(groups: Indices, fixed: bool) -> Iterator[list[_Piece]]:
    """Rounding positions cut into blocks: whole groups together while they fit, long ones in pieces."""
    n = groups.size
    cuts = [0] if fixed else [0, *(np.flatnonzero(np.diff(groups)) + 1).tolist()]
    block: list[_Piece] = []
    for start, stop in zip(cuts, [*cuts[1:], n], strict=True):
        if block and stop - block[0].start > _BLOCK:
            yield block
            block = []
        for first in range(start, stop, _BLOCK):
            last = min(first + _BLOCK, stop)
            block.append(_Piece(int(groups[start]), first, last, (start, stop) if first == start else None))
            if stop - start > _BLOCK:
                yield block
                block = []
    if block:
        yield block


class GroupNumbers(Protocol):
    """The numbers of all groups of a weight, k of each row and group; a code's value is a sum of them.

    Groups are runs of ``size`` columns. An instance belongs to some rows.
    """

    size: int

    def rows(self, which: Any) -> Self:
        """Those of some rows: a slice, or a mask."""

    def take(self, which: Any, other: Self) -> None:
        """Replace the numbers of some rows: a slice, or a mask."""

    def rule(self) -> FixedGrid | FixedLevels:
        """What codes are worth, for :func:`compensated_codes`."""

    def basis(self, codes: Codes, group: int) -> F64:
        """By how much a value grows with every number: ``[k, rows, width]`` for codes ``[rows, width]``."""

    def get(self, group: int) -> F64:
        """``[rows, k]``."""

    def put(self, group: int, numbers: F64) -> None:
        """Replace the numbers of a group by numbers from :meth:`stored`."""

    def stored(self, group: int, numbers: F64) -> F64:
        """Numbers as they would be stored; those of a row stay what they are where they cannot be."""


Numbers = TypeVar("Numbers", bound=GroupNumbers)


def fitted(
    weight: npt.NDArray[np.float32], hessian: F64, factor: F64, costs: F64, order: Indices, numbers: GroupNumbers,
    top: int, turns: int, *, threads: int = 1,
) -> tuple[Codes, F64]:  # fmt: skip
    """Codes ``[out, in]`` in the original order of columns, and e H e^T of every row; ``numbers`` gets what belongs.

    hessian: damped, original order. factor, costs, order: see :func:`compensated_codes`. turns: fits at most.
    """
    out, n = weight.shape
    made, total = np.empty((out, n), np.uint8), np.empty(out)
    groups = (np.arange(n) // numbers.size)[order]
    tops = np.full(-(-n // numbers.size), top)
    for rows in rows_at_a_time(out, n):
        part, own = weight[rows], numbers.rows(rows)

        def rounded(trial: GroupNumbers, part: npt.NDArray[np.float32] = part) -> tuple[Codes, F64]:
            found = compensated_codes(part, factor, order, groups, tops, trial.rule(), threads=threads, costs=costs)
            codes = np.empty_like(found.codes)
            codes[:, order] = found.codes
            return codes, found.errors

        codes, least = rounded(own)
        trial, seen = own.rows(slice(None)), codes
        for _ in range(turns):
            fit_numbers(hessian, trial, seen, product(missed(part, trial, seen), hessian, threads), threads)
            seen, errors = rounded(trial)
            better = errors < least
            if not better.any():
                break
            codes[better], least[better] = seen[better], errors[better]
            own.take(better, trial.rows(better))
        made[rows], total[rows] = codes, least
        numbers.take(rows, own)
    return made, total


def rows_at_a_time(
    out: int, columns: int, threads: int = 1, first: int = 0, stop: int | None = None
) -> Iterator[slice]:
    """Rows, all or from ``first`` to ``stop``, in chunks of about 32 MB for each float64 copy of all threads."""
    step, end = max(_ELEMENTS // columns // threads, 64), out if stop is None else stop
    for begin in range(first, end, step):
        yield slice(begin, min(begin + step, end))


def replace_worse(
    weight: npt.NDArray[np.float32], hessian: F64, codes: Codes, errors: F64, numbers: Numbers, other: Numbers,
    other_codes: Callable[[slice], Codes], threads: int = 1,
) -> int:  # fmt: skip
    """Rows of larger output error than ``other`` with its codes get those, in place; how many.

    ``other_codes``: codes ``[rows, in]`` of some rows.
    """
    count = 0
    for start in range(0, weight.shape[0], _ROWS):
        rows = slice(start, start + _ROWS)
        own, simple = other.rows(rows), other_codes(rows)
        worse = output_errors(missed(weight[rows], own, simple), hessian, threads) < errors[rows]
        codes[rows][worse] = simple[worse]
        which = start + np.flatnonzero(worse)
        numbers.take(which, own.rows(worse))
        count += which.size
    return count


def output_errors(error: F64, hessian: F64, threads: int = 1) -> F64:
    """e H e^T of every row of ``error`` ``[rows, in]``: of the symmetric H, blocks below the diagonal count twice."""
    rows, n = error.shape
    total = np.zeros(rows)
    for start in range(0, n, _BLOCK):
        width = min(_BLOCK, n - start)
        made = np.zeros((rows, start + width))

        def share(row: int, stop: int, start: int = start, width: int = width, made: F64 = made) -> None:
            accumulate(made, row, 0, error, row, start, hessian, start, 0, stop - row, width, start + width, 1.0)

        each_share(share, rows, _GRAIN, threads)
        made *= error[:, : start + width]
        total += 2.0 * made[:, :start].sum(axis=1) + made[:, start:].sum(axis=1)
    return total


def missed(weight: npt.NDArray[np.float32], numbers: GroupNumbers, codes: Codes) -> F64:
    """The weight less the values of its codes, ``[rows, in]``."""
    left = weight.astype(np.float64)
    for group, start in enumerate(range(0, weight.shape[1], numbers.size)):
        run = slice(start, start + numbers.size)
        basis = numbers.basis(codes[:, run], group)
        left[:, run] -= np.einsum("krc,rk->rc", basis, numbers.get(group))
    return left


def fit_numbers(
    hessian: Floats, numbers: GroupNumbers, codes: Codes, pull: Floats, threads: int, *, in_turn: bool = False
) -> None:
    """The numbers of every group, those of the others fixed; where rounding undoes the gain, none change.

    ``pull``: e H of every row ``[rows, in]``, in the type of hessian. in_turn: a group sees the new numbers of those
    before it, and pull is kept up to date; else all see the old ones, which does where the weight is rounded again.
    """
    rows, n = codes.shape
    for group, start in enumerate(range(0, n, numbers.size)):
        run = slice(start, start + numbers.size)
        basis = numbers.basis(codes[:, run], group).astype(hessian.dtype, copy=False)
        inner = np.ascontiguousarray(hessian[run, run])
        turned = [product(np.ascontiguousarray(one), inner, threads) for one in basis]
        k = len(turned)
        matrix = np.empty((rows, k, k))
        for i in range(k):
            for j in range(i, k):
                matrix[:, i, j] = matrix[:, j, i] = (basis[i] * turned[j]).sum(axis=1)
        wanted = np.stack([(one * pull[:, run]).sum(axis=1) for one in basis], axis=1)
        ridge = _RIDGE * np.trace(matrix, axis1=1, axis2=2) / k + np.finfo(np.float64).tiny
        damped = matrix + ridge[:, None, None] * np.eye(k)
        old = numbers.get(group).copy()
        new = numbers.stored(group, old + np.linalg.solve(damped, wanted[:, :, None])[:, :, 0])
        step = new - old
        gain = 2.0 * (step * wanted).sum(axis=1) - np.einsum("ri,rij,rj->r", step, matrix, step)
        new = np.where((gain > 0.0)[:, None], new, old)
        numbers.put(group, new)
        if in_turn:
            change = np.einsum("krc,rk->rc", basis, (new - old).astype(hessian.dtype))
            pull -= product(change, hessian[run], threads)


def product(left: Floats, right: Floats, threads: int) -> Floats:
    """left right, both float64 or both float32, in an order of additions that threads do not change."""
    made, one = np.zeros((left.shape[0], right.shape[1]), left.dtype), left.dtype.type(1.0)

    def share(row: int, stop: int) -> None:
        accumulate(made, row, 0, left, row, 0, right, 0, 0, stop - row, right.shape[0], right.shape[1], one)

    each_share(share, left.shape[0], _GRAIN, threads)
    return made
