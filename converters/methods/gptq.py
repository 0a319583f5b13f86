"""GPTQ: uniform quantization whose rounding errors are compensated with the Hessian of the layer's inputs.

:func:`compensated_codes` rounds columns one after the other, and later columns compensate for the error. With
H^-1 = U^T U (U upper triangular) for the damped Hessian in rounding order: column i is rounded, and what is missed,
m_i = w_i - value_i, is taken back at every later column, w_j -= m_i U_ij / U_ii: the best that later columns can do for
the layer's output. Blocks take up all earlier errors at once (GPTQ's lazy updates).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from bcqfmt.compiled.rounding import KINDS
from bcqfmt.compiled.threads import each_share

from .assemble import affine_weight
from .columns import is_identity, largest_first
from .hessian import compensation, damped, dead_columns, hessian_of
from .loops.gptq import accumulate, grids, round_columns
from .matrix import checked, groups_of, refuse_overflow, scale_type, stored_size
from .parameters import GROUP_SIZE, ROW, SCALE_DTYPE, MethodBase, setting
from .protocol import Job, Quantized

__all__ = ["DAMPENING", "FixedGrid", "Gptq", "GptqSettings", "GroupRule", "Rounded", "UniformRule", "compensated_codes"]

F64 = npt.NDArray[np.float64]
Indices = npt.NDArray[np.intp]

DAMPENING = "added to the Hessian's diagonal, as a share of its mean"
_WHY = "gptq rounds with the Hessian of the layer's inputs"
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


@dataclass(frozen=True, slots=True, kw_only=True)
class GptqSettings:
    """What can be chosen."""

    bits: int = setting(4, "bits per weight", low=1, high=8)
    group_size: int = setting(128, GROUP_SIZE, low=8, words={"row": ROW})
    symmetric: bool = setting(False, "the same zero point, 2^(bits-1), for all groups")
    clip: str = setting(
        "none", "`search`: per group the shrunken range of least squared error", choices=("none", "search")
    )
    act_order: bool = setting(False, "round the channels of the largest activations first")
    static_groups: bool = setting(
        False, "scales from the weights as they were; with act_order groups stay runs of columns, and no perm is stored"
    )
    dampening: float = setting(0.01, DAMPENING, low=0.0, high=1.0)
    scale_dtype: str = setting("source", SCALE_DTYPE, choices=("source", "F16", "BF16", "F32"))


@dataclass(frozen=True, slots=True)
class UniformRule:
    """The grid of round-to-nearest for a group, as :class:`GroupRule`: see ``loops.rtn``."""

    bits: int
    symmetric: bool
    search: bool
    kind: int
    threads: int = 1

    def __call__(self, group: int, first_row: int, target: F64) -> tuple[F64, F64]:
        """Scale and zero point of every row."""
        scale, zero = np.empty(target.shape[0]), np.empty(target.shape[0])

        def share(first: int, stop: int) -> None:
            squares = np.empty(target.shape[1])
            grids(target, self.bits, self.symmetric, self.search, self.kind, scale, zero, squares, first, stop)

        each_share(share, target.shape[0], 8, self.threads)
        return scale, zero

    def fixed(self, weight: npt.NDArray[np.float32], size: int) -> FixedGrid:
        """The grids of all groups of ``size`` columns, from the weight as it is."""
        columns = weight.shape[1]
        pairs = [
            self(j, 0, np.ascontiguousarray(weight[:, start : start + size], np.float64))
            for j, start in enumerate(range(0, columns, size))
        ]
        return FixedGrid(*(np.ascontiguousarray(np.stack(part, axis=1)) for part in zip(*pairs, strict=True)))


class Gptq(MethodBase[GptqSettings]):
    """``gptq``; with a Hessian that is diagonal it gives what ``rtn`` gives."""

    name = "gptq"
    settings_type = GptqSettings

    def needs_stats(self) -> str | None:
        """The Hessian."""
        return f"{_WHY}."

    def quantize(self, job: Job) -> Quantized:
        """An affine weight, with ``perm`` where act_order has moved the columns of groups."""
        weight, s = checked(job), self._settings
        hessian = hessian_of(job, _WHY)
        columns = weight.shape[1]
        size, count = groups_of(columns, s.group_size)
        order = largest_first(np.diagonal(hessian)) if s.act_order else np.arange(columns)
        factor = compensation(damped(hessian, s.dampening, order[::-1], job.name), job.threads, job.name)
        stored = scale_type(s.scale_dtype, job)
        rule: GroupRule = UniformRule(s.bits, s.symmetric, s.clip == "search", KINDS[stored], job.threads)
        position = np.arange(columns) // size
        moved = order
        if s.static_groups:
            assert isinstance(rule, UniformRule)
            rule, position, moved = rule.fixed(weight, size), position[order], np.arange(columns)
        tops = np.full(count, 2**s.bits - 1)
        made = compensated_codes(weight, factor, order, position, tops, rule, threads=job.threads)
        refuse_overflow(job, made.scale, "scale", stored)
        quantized = affine_weight(
            _in_place(made, order) if s.static_groups else made.codes, made.scale, made.zero,
            bits=s.bits, group_size=stored_size(s.group_size, size), stored=stored, dtype=job.dtype,
            threads=job.threads,
        )  # fmt: skip
        if not is_identity(moved):
            quantized = quantized.with_perm(moved)
        return Quantized(quantized, {"dead_columns": dead_columns(hessian)})


def _in_place(made: Rounded, order: npt.NDArray[np.intp]) -> npt.NDArray[np.uint8]:
    codes = np.empty_like(made.codes)
    codes[:, order] = made.codes
    return codes


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
    have no error. ``rule`` is called with rows in multiples of ``row_step``.
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
