"""GPTQ: uniform quantization whose rounding errors are compensated with the Hessian of the layer's inputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from bcqfmt.compiled.rounding import KINDS
from bcqfmt.compiled.threads import each_share

from .assemble import affine_weight
from .columns import is_identity, largest_first
from .gptq_loops import grids
from .gptq_rounding import FixedGrid, GroupRule, Rounded, compensated_codes
from .hessian import compensation, damped, dead_columns, hessian_of
from .matrix import checked, groups_of, refuse_overflow
from .parameters import GROUP_SIZE, ROW, as_dict, built, declared, setting
from .protocol import Job, Parameter, Quantized

__all__ = ["DAMPENING", "Gptq", "GptqSettings", "UniformRule"]

F64 = npt.NDArray[np.float64]
DAMPENING = "added to the Hessian's diagonal, as a share of its mean"
_WHY = "gptq rounds with the Hessian of the layer's inputs"


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
    scale_dtype: str = setting("F16", "type of the scales", choices=("F16", "BF16", "F32"))


@dataclass(frozen=True, slots=True)
class UniformRule:
    """The grid of round-to-nearest for a group, as :class:`GroupRule`: see ``rtn_kernels``."""

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


class Gptq:
    """``gptq``; with a Hessian that is diagonal it gives what ``rtn`` gives."""

    name = "gptq"

    def __init__(self, settings: GptqSettings) -> None:
        self._settings = settings

    @classmethod
    def parameters(cls) -> tuple[Parameter, ...]:
        """All settings."""
        return declared(GptqSettings)

    @classmethod
    def build(cls, given: Mapping[str, Any]) -> Gptq:
        """The method with these settings."""
        return cls(built(GptqSettings, given, cls.name))

    def needs_stats(self) -> str | None:
        """The Hessian."""
        return f"{_WHY}."

    def settings(self) -> dict[str, Any]:
        """The settings in force."""
        return as_dict(self._settings)

    def quantize(self, job: Job) -> Quantized:
        """An affine weight, with ``perm`` where act_order has moved the columns of groups."""
        weight, s = checked(job), self._settings
        hessian = hessian_of(job, _WHY)
        columns = weight.shape[1]
        size, count = groups_of(columns, s.group_size)
        order = largest_first(np.diagonal(hessian)) if s.act_order else np.arange(columns)
        factor = compensation(damped(hessian, s.dampening, order[::-1], job.name), job.threads, job.name)
        rule: GroupRule = UniformRule(s.bits, s.symmetric, s.clip == "search", KINDS[s.scale_dtype], job.threads)
        position = np.arange(columns) // size
        moved = order
        if s.static_groups:
            assert isinstance(rule, UniformRule)
            rule, position, moved = rule.fixed(weight, size), position[order], np.arange(columns)
        tops = np.full(count, 2**s.bits - 1)
        made = compensated_codes(weight, factor, order, position, tops, rule, threads=job.threads)
        refuse_overflow(job, made.scale, "scale", s.scale_dtype)
        quantized = affine_weight(
            _in_place(made, order) if s.static_groups else made.codes, made.scale, made.zero,
            bits=s.bits, group_size=size, stored=s.scale_dtype, dtype=job.dtype, threads=job.threads,
        )  # fmt: skip
        if not is_identity(moved):
            quantized = quantized.with_perm(moved)
        return Quantized(quantized, {"dead_columns": dead_columns(hessian)})


def _in_place(made: Rounded, order: npt.NDArray[np.intp]) -> npt.NDArray[np.uint8]:
    codes = np.empty_like(made.codes)
    codes[:, order] = made.codes
    return codes
