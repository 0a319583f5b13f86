"""Error-compensated rounding: columns are rounded one after the other, and those still to come make up for the error.

With H^-1 = U^T U (U upper triangular) for the damped Hessian in rounding order: column i is rounded, and what is
missed, m_i = w_i - value_i, is taken back at every later column, w_j -= m_i U_ij / U_ii. That is the best that the
columns still to come can do for the layer's output. Blocks take up all earlier errors at once (GPTQ's lazy updates).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from bcqfmt.compiled.threads import each_share

from .gptq_loops import accumulate, round_columns

__all__ = ["FixedGrid", "GroupRule", "Rounded", "compensated_codes"]

F64 = npt.NDArray[np.float64]
Indices = npt.NDArray[np.intp]
_BLOCK = 128
_ELEMENTS = 1 << 22  # of a chunk of rows: 32 MB for each float64 copy of it
_GRAIN = 8


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


class Rounded(NamedTuple):
    """codes uint8 ``[out, in]`` in rounding order; scale and zero float64 ``[out, groups]``.

    ``kept``: the values wanted where ``exact`` was set, float64, row by row in the original order of columns.
    """

    codes: npt.NDArray[np.uint8]
    scale: F64
    zero: F64
    kept: F64


class _Piece(NamedTuple):
    """A run of rounding positions inside one group; ``whole``: positions of the group if it begins here."""

    group: int
    start: int
    stop: int
    whole: tuple[int, int] | None


def compensated_codes(
    weight: npt.NDArray[np.float32], factor: F64, order: Indices, groups: Indices, tops: npt.ArrayLike,
    rule: GroupRule, *, exact: npt.NDArray[np.bool_] | None = None, row_step: int = 1, threads: int = 1,
) -> Rounded:  # fmt: skip
    """Round a weight ``[out, in]`` to the grids that ``rule`` gives, compensating as far as ``factor`` says.

    order: the original column at every rounding position. factor: :func:`hessian.compensation` of the damped Hessian
    in the order ``order[::-1]``. groups: group of every position, a run each unless ``rule`` is a :class:`FixedGrid`.
    tops: largest code of every group. exact: elements ``[out, in]``, original columns, that are stored elsewhere and
    have no error. ``rule`` is asked for rows in multiples of ``row_step``.
    """
    out, n = weight.shape
    largest = np.asarray(tops, np.float64)
    scale, zero = np.zeros((out, largest.size)), np.zeros((out, largest.size))
    made = Rounded(np.empty((out, n), np.uint8), scale, zero, np.empty(0))
    blocks = list(_blocks(groups, isinstance(rule, FixedGrid)))
    step = row_step * max(1, max(_ELEMENTS // n, 64) // row_step)
    kept = []
    for first in range(0, out, step):
        chunk = _Chunk(weight, factor, order, groups, largest, made, first, min(first + step, out), exact)
        if isinstance(rule, FixedGrid):
            made.scale[chunk.rows], made.zero[chunk.rows] = rule.scale[chunk.rows], rule.zero[chunk.rows]
        for block in blocks:
            chunk.round_block(block, None if isinstance(rule, FixedGrid) else rule, threads)
        made.codes[chunk.rows] = chunk.codes[:, ::-1]
        if exact is not None:
            kept.append(chunk.wanted(order)[exact[chunk.rows]])
    return made._replace(kept=np.concatenate(kept)) if kept else made


class _Chunk:
    """Some rows on their way; columns in the reverse of the rounding order, as the factor has them.

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

    def round_block(self, block: list[_Piece], rule: GroupRule | None, threads: int) -> None:
        """All pieces of a block; the block first takes up what the columns before it missed."""
        low, high = self.n - block[-1].stop, self.n - block[0].start
        target = self.target(low, high, high, threads)
        for piece in block:
            first, last = self.n - piece.stop, self.n - piece.start
            if rule is not None and piece.whole is not None:
                self._ask(rule, piece, target, low, threads)

            def share(row: int, stop: int, first: int = first, last: int = last) -> None:
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
