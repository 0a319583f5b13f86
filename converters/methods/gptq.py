"""GPTQ: uniform quantization whose rounding errors are compensated with the Hessian of the layer's inputs.

Unlike the published method, by default scales are searched and fitted for the layer's output and columns keep their
groups whatever the order in which they are rounded, so no order has to be stored; a row never gets a larger output
error than `rtn` gives it. `clip = none, act_order = false, static_groups = false` is the published one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from bcqfmt.compiled.rounding import KINDS
from bcqfmt.compiled.threads import each_share
from bcqfmt.container.dtypes import round_to

from .assemble import affine_weight
from .compensated import Codes, FixedGrid, compensated_codes, fitted, replace_worse
from .hessian import compensation_in, damped, dead_columns, hessian_of
from .loops.gptq import grids
from .matrix import checked, groups_of, is_identity, largest_first, refuse_overflow, scale_type, stored_size
from .parameters import GROUP_SIZE, ROW, SCALE_DTYPE, MethodBase, setting
from .protocol import Job, Quantized

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]

WEIGHTING = "`activations`: errors count by the mean squared input of their column"
ROUNDING = "`gptq`: errors compensated with the Hessian of the inputs"
DAMPENING = "added to the Hessian's diagonal, as a share of its mean"
TURNS = "turns of fitting the numbers of groups to the layer's output and rounding again, at most"
_WHY = "gptq rounds with the Hessian of the layer's inputs"


@dataclass(frozen=True, slots=True, kw_only=True)
class GptqSettings:
    """What can be chosen."""

    bits: int = setting(4, "bits per weight", low=1, high=8)
    group_size: int = setting(128, GROUP_SIZE, low=8, words={"row": ROW})
    symmetric: bool = setting(False, "the same zero point, 2^(bits-1), for all groups")
    clip: str = setting(
        "search",
        "`search`: per group the shrunken range of least error in the layer's output",
        choices=("none", "search"),
    )
    act_order: bool = setting(True, "round the channels of the largest activations first")
    static_groups: bool = setting(
        True, "scales from the weights as they were; with act_order groups stay runs of columns, and no perm is stored"
    )
    turns: int = setting(1, f"{TURNS}; with static_groups", low=0, high=100)
    dampening: float = setting(0.01, DAMPENING, low=0.0, high=1.0)
    scale_dtype: str = setting("source", SCALE_DTYPE, choices=("source", "F16", "BF16", "F32"))


@dataclass(frozen=True, slots=True)
class UniformRule:
    """The grid of round-to-nearest for a group, as :class:`GroupRule`: see ``loops.rtn``.

    ``importance``: float64 ``[in]`` in rounding order, what squared errors count in the search; None: all the same.
    Groups are then runs of ``size`` positions.
    """

    bits: int
    symmetric: bool
    search: bool
    kind: int
    threads: int = 1
    importance: F64 | None = None
    size: int = 0

    def __call__(self, group: int, first_row: int, target: F64) -> tuple[F64, F64]:
        """Scale and zero point of every row."""
        scale, zero = np.empty(target.shape[0]), np.empty(target.shape[0])
        width = target.shape[1]
        start = group * self.size
        weights = np.ones(width) if self.importance is None else self.importance[start : start + width]

        def share(first: int, stop: int) -> None:
            grids(
                target, weights, self.bits, self.symmetric, self.search, self.kind, scale, zero, np.empty(width), first,
                stop,
            )  # fmt: skip

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


class UniformNumbers:
    """Scales and zero points ``[out, groups]`` of groups of ``size`` columns, as :class:`GroupNumbers`."""

    def __init__(self, scale: F64, zero: F64, size: int, dtype: str) -> None:
        """``dtype``: the type that scales are stored in."""
        self.scale, self.zero, self.size, self.dtype = scale, zero, size, dtype

    def rows(self, which: Any) -> Self:
        """A copy of some rows."""
        return type(self)(self.scale[which].copy(), self.zero[which].copy(), self.size, self.dtype)

    def take(self, which: Any, other: Self) -> None:
        """Replace some rows."""
        self.scale[which], self.zero[which] = other.scale, other.zero

    def rule(self) -> FixedGrid:
        """The grids."""
        return FixedGrid(self.scale, self.zero)

    def basis(self, codes: Codes, group: int) -> F64:
        """A value grows by code - zp with the scale, the only number."""
        return np.asarray(codes - self.zero[:, group, None])[None]

    def get(self, group: int) -> F64:
        """The scales of a group."""
        return self.scale[:, group, None]

    def put(self, group: int, numbers: F64) -> None:
        """Other scales."""
        self.scale[:, group] = numbers[:, 0]

    def stored(self, group: int, numbers: F64) -> F64:
        """Rounded; a scale keeps its sign and does not vanish."""
        old = self.get(group)
        made = round_to(numbers, self.dtype).astype(np.float64)
        return np.where(np.isfinite(made) & (made * old > 0.0), made, old)

    def nearest(self, weight: F32, bits: int) -> Codes:
        """The nearest codes."""
        which = np.arange(weight.shape[1]) // self.size
        steps = np.clip(np.rint(weight * (1.0 / self.scale[:, which])) + self.zero[:, which], 0, 2**bits - 1)
        return steps.astype(np.uint8)


class Gptq(MethodBase[GptqSettings]):
    """``gptq``; with a Hessian that is diagonal, no clipping and no turns it gives what ``rtn`` gives."""

    name = "gptq"
    settings_type = GptqSettings

    def needs_stats(self) -> str | None:
        """The Hessian."""
        return f"{_WHY}."

    def quantize(self, job: Job) -> Quantized:
        """An affine weight, with ``perm`` where act_order has moved the columns of groups."""
        weight, s = checked(job), self._settings
        hessian = hessian_of(job, _WHY)
        size, _ = groups_of(weight.shape[1], s.group_size)
        order = largest_first(np.diagonal(hessian)) if s.act_order else np.arange(weight.shape[1])
        full = damped(hessian, s.dampening, None, job.name)
        stored = scale_type(s.scale_dtype, job)
        factor, costs = compensation_in(full, order, job.threads, job.name)
        rule = UniformRule(s.bits, s.symmetric, s.clip == "search", KINDS[stored], job.threads, costs, size)
        notes: dict[str, Any] = {"dead_columns": dead_columns(hessian)}
        if s.static_groups:
            numbers = UniformNumbers(*rule.fixed(weight, size), size, stored)
            refuse_overflow(job, numbers.scale, "scale", stored)
            codes, errors = fitted(
                weight, full, factor, costs, order, numbers, 2**s.bits - 1, s.turns, threads=job.threads
            )
            plain = UniformNumbers(*replace(rule, search=False).fixed(weight, size), size, stored)
            notes["rows_of_rtn"] = replace_worse(
                weight, full, codes, errors, numbers, plain,
                lambda rows: plain.rows(rows).nearest(weight[rows], s.bits), job.threads,
            )  # fmt: skip
        else:
            codes, numbers = self._as_it_comes(weight, factor, order, rule, stored)
            refuse_overflow(job, numbers.scale, "scale", stored)
        quantized = affine_weight(
            codes, numbers.scale, numbers.zero, bits=s.bits, group_size=stored_size(s.group_size, size),
            stored=stored, dtype=job.dtype, threads=job.threads,
        )  # fmt: skip
        if not s.static_groups and not is_identity(order):
            quantized = quantized.with_perm(order)
        return Quantized(quantized, notes)

    def _as_it_comes(
        self, weight: F32, factor: F64, order: npt.NDArray[np.intp], rule: UniformRule, stored: str
    ) -> tuple[Codes, UniformNumbers]:
        """The scales of a group chosen when rounding reaches it, columns in rounding order."""
        assert rule.importance is not None
        ordered = replace(rule, importance=np.ascontiguousarray(rule.importance[order]))
        position = np.arange(order.size) // rule.size
        tops = np.full(int(position[-1]) + 1, 2**rule.bits - 1)
        made = compensated_codes(weight, factor, order, position, tops, ordered, threads=rule.threads)
        return made.codes, UniformNumbers(made.scale, made.zero, rule.size, stored)
