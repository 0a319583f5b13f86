"""2/4-bit mixed precision inside a weight (ICCAD'24): sensitive column groups get four bits, the others two.

Segment 0: 2-bit groups of 16 with second-order scales. Segment 1: 4-bit groups of 128 with F16 scales. ``perm`` brings
the columns there. A few elements of the 2-bit groups may be outliers: they leave the ranges and are added as CSR.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from bcqfmt.errors import error

from .gptq import DAMPENING
from .matrix import checked
from .mixed24_bits import equation_10, outlier_bits
from .mixed24_parts import Columns, assembled, choose_outliers, columns_of, round_all
from .mixed24_sensitivity import Sensitivity, by_hessian, by_range
from .parameters import as_dict, built, declared, setting
from .protocol import Job, Parameter, Quantized

__all__ = ["Mixed24", "Mixed24Settings"]

_LARGEST = 65504 / 2  # of F16, and a range is twice as wide


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixed24Settings:
    """What can be chosen."""

    four_bit_ratio: float = setting(0.25, "share of column groups that get 4 bits", low=0.0, high=1.0)
    group_size: int = setting(16, "columns of a 2-bit group", choices=(16, 8))
    scale_rows: int = setting(16, "rows that share a second-order scale", low=1, high=65536)
    four_bit_group_size: int = setting(128, "columns of a 4-bit group", low=8)
    sensitivity: str = setting(
        "auto", "`hessian` (equation 9), `range` without statistics; auto: whichever there is",
        choices=("auto", "hessian", "range"),
    )  # fmt: skip
    clip: str = setting(
        "search", "`search`: scales of least squared error; `none`: from ranges", choices=("search", "none")
    )
    outliers: float = setting(0.002, "share of elements kept apart in 16 bit; 0: none", low=0.0, high=0.1)
    outlier_choice: str = setting(
        "error", "`error`: largest quantization error times sensitivity; `magnitude`: largest size",
        choices=("error", "magnitude"),
    )  # fmt: skip
    rounding: str = setting("nearest", "`gptq`: compensate rounding errors", choices=("nearest", "gptq"))
    dampening: float = setting(0.01, DAMPENING, low=0.0, high=1.0)
    layout: str = setting(
        "canonical", "`aligned64`: tiles for GPUs, two of three groups with 3-bit scale codes",
        choices=("canonical", "aligned64"),
    )  # fmt: skip


class Mixed24:
    """``mixed24``."""

    name = "mixed24"

    def __init__(self, settings: Mixed24Settings) -> None:
        self._settings = settings

    @classmethod
    def parameters(cls) -> tuple[Parameter, ...]:
        """All settings."""
        return declared(Mixed24Settings)

    @classmethod
    def build(cls, given: Mapping[str, Any]) -> Mixed24:
        """The method with these settings; aligned64 has groups of 16 only."""
        settings = built(Mixed24Settings, given, cls.name)
        if settings.layout == "aligned64" and settings.group_size != 16:
            raise error("BCQ-E620", found="mixed24: layout = aligned64 with group_size = 8", expected="group_size = 16")
        return cls(settings)

    def needs_stats(self) -> str | None:
        """Only where the Hessian is asked for by name."""
        s = self._settings
        if s.rounding == "gptq":
            return "mixed24 with rounding = gptq compensates errors with the Hessian of the layer's inputs."
        if s.sensitivity == "hessian":
            return "mixed24 with sensitivity = hessian ranks column groups by the Hessian of the layer's inputs."
        return None

    def settings(self) -> dict[str, Any]:
        """The settings in force."""
        return as_dict(self._settings)

    def quantize(self, job: Job) -> Quantized:
        """Two segments, perm, outliers where asked for; one segment where all groups have the same bits."""
        weight, s = checked(job), self._settings
        largest = max(float(weight.max()), -float(weight.min()))
        if largest > _LARGEST:
            raise error(
                "BCQ-E621", tensor=job.name, found=f"weights up to {largest:g}", expected="F16 scales and outliers"
            )
        sensitivity = self._sensitivity(job)
        columns = columns_of(job, s, sensitivity.groups)
        mask = choose_outliers(job, s, weight, columns, sensitivity) if s.outliers else None
        made = round_all(job, s, weight, columns, mask)
        notes = self._notes(weight.shape[1], columns, sensitivity, mask)
        return Quantized(assembled(job, s, columns, made, mask), notes)

    def _sensitivity(self, job: Job) -> Sensitivity:
        s = self._settings
        known = job.stats is not None and job.stats.hessian is not None
        if s.sensitivity == "hessian" or (s.sensitivity == "auto" and known):
            return by_hessian(job, job.weight, s.group_size, s.dampening)
        return by_range(job.weight, s.group_size)

    def _notes(self, width: int, columns: Columns, sensitivity: Sensitivity, mask: Any) -> dict[str, Any]:
        s = self._settings
        ratio = columns.four.size / width
        count = 0 if mask is None else int(np.count_nonzero(mask))
        fraction = count / mask.size if count else 0.0
        return {
            "sensitivity": sensitivity.kind,
            "four_bit_columns": int(columns.four.size),
            "outliers": count,
            "equation_10_bits": equation_10(ratio, s.group_size, s.scale_rows) + outlier_bits(fraction, width),
        }
