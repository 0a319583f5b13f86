"""Binary-coding quantization (LUT-GEMM, nuQmm): a scale per plane and group, and a bias."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .assemble import bcq_weight
from .hessian import importance_of, stats_of
from .matrix import checked
from .parameters import GROUP_SIZE, ROW, as_dict, built, declared, setting
from .protocol import Job, Parameter, Quantized
from .solving import solve

__all__ = ["Bcq", "BcqSettings"]

_WHY = "weighting = activations multiplies squared errors with the layer's squared inputs"


@dataclass(frozen=True, slots=True, kw_only=True)
class BcqSettings:
    """What can be chosen."""

    bits: int = setting(3, "planes per weight", low=1, high=8)
    group_size: int = setting(128, GROUP_SIZE, low=8, words={"row": ROW})
    bias: bool = setting(True, "a number z per group beside the plane scales")
    rounds: int = setting(15, "turns of refinement at most, fewer when the error no longer falls", low=0, high=1000)
    scale_dtype: str = setting("F16", "type of plane scales and bias", choices=("F16", "BF16", "F32"))
    weighting: str = setting(
        "none", "`activations`: errors count by the mean squared input of their column", choices=("none", "activations")
    )


class Bcq:
    """``bcq``; how alpha and z are found is in ``bcq_kernels``.

    After rounding, no group has a larger squared error than greedy's (and, with a bias, than that of `rtn`'s grid in
    the same types), and with F16 or BF16 numbers and a bias no matrix has a larger one than `rtn` gives it. With
    weighting the same holds for the weighted errors, and not for the others.
    """

    name = "bcq"

    def __init__(self, settings: BcqSettings) -> None:
        self._settings = settings

    @classmethod
    def parameters(cls) -> tuple[Parameter, ...]:
        """All settings."""
        return declared(BcqSettings)

    @classmethod
    def build(cls, given: Mapping[str, Any]) -> Bcq:
        """The method with these settings."""
        return cls(built(BcqSettings, given, cls.name))

    def needs_stats(self) -> str | None:
        """Only for weighting."""
        return None if self._settings.weighting == "none" else f"bcq with {_WHY}."

    def settings(self) -> dict[str, Any]:
        """The settings in force."""
        return as_dict(self._settings)

    def quantize(self, job: Job) -> Quantized:
        """A bcq weight, plane 0 with the largest scale; notes: how many groups come from which start."""
        weight, s = checked(job), self._settings
        importance = None
        if s.weighting == "activations":
            importance = importance_of(stats_of(job, _WHY))
        solved = solve(
            job, weight, s.bits, s.group_size, bias=s.bias, rounds=s.rounds, dtype=s.scale_dtype, importance=importance
        )
        made = bcq_weight(
            solved.codes, solved.numbers.alpha, solved.numbers.z if s.bias else None,
            group_size=solved.group_size, dtype=job.dtype, threads=job.threads,
        )  # fmt: skip
        return Quantized(made, {"starts": solved.starts})
