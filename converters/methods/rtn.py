"""Round-to-nearest: uniform quantization, one scale and one zero point per group."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bcqfmt.compiled.rounding import KINDS
from bcqfmt.compiled.threads import each_share

from .assemble import affine_weight
from .loops.rtn import quantize_rows
from .matrix import checked, groups_of, refuse_overflow, scale_type, stored_size
from .parameters import GROUP_SIZE, ROW, SCALE_DTYPE, MethodBase, setting
from .protocol import Job, Quantized


@dataclass(frozen=True, slots=True, kw_only=True)
class RtnSettings:
    """What can be chosen."""

    bits: int = setting(4, "bits per weight", low=1, high=8)
    group_size: int = setting(128, GROUP_SIZE, low=8, words={"row": ROW})
    symmetric: bool = setting(False, "the same zero point, 2^(bits-1), for all groups")
    clip: str = setting(
        "none", "`search`: per group the shrunken range of least squared error", choices=("none", "search")
    )
    scale_dtype: str = setting("source", SCALE_DTYPE, choices=("source", "F16", "BF16", "F32"))


class Rtn(MethodBase[RtnSettings]):
    """``rtn``; the rules for scales and zero points are in ``loops.rtn``."""

    name = "rtn"
    settings_type = RtnSettings

    def quantize(self, job: Job) -> Quantized:
        """An affine weight; groups of zeros and groups of one value have the results that ``loops.rtn`` names."""
        weight, s = checked(job), self._settings
        rows, columns = weight.shape
        size, count = groups_of(columns, s.group_size)
        codes = np.empty(weight.shape, np.uint8)
        scale, zero = np.empty((rows, count), np.float32), np.empty((rows, count), np.uint8)
        stored = scale_type(s.scale_dtype, job)
        kind, search = KINDS[stored], s.clip == "search"

        def work(first: int, stop: int) -> None:
            quantize_rows(
                weight, size, s.bits, s.symmetric, search, kind, codes, scale, zero, np.ones(size), np.empty(size),
                first, stop,
            )  # fmt: skip

        each_share(work, rows, 1, job.threads)
        refuse_overflow(job, scale, "scale", stored)
        made = affine_weight(
            codes, scale, zero, bits=s.bits, group_size=stored_size(s.group_size, size), stored=stored,
            dtype=job.dtype, threads=job.threads,
        )  # fmt: skip
        return Quantized(made, {})
