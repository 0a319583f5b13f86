"""Atom: symmetric low-bit weights for low-bit activations; the channels of the largest activations kept at 8 bit.

`perm` moves those channels to the end, where they are one 8-bit group; the order follows from the layer's input alone,
so projections that read the same input have the same. What the kernel has to do to the activations is in the notes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from bcqfmt.compiled.rounding import KINDS
from bcqfmt.compiled.threads import each_share
from bcqfmt.errors import error
from bcqfmt.weight.weight import BcqWeight

from .assemble import affine_weight
from .compensated import compensated_codes
from .gptq import DAMPENING
from .hessian import compensation, damped, hessian_of, stats_of
from .loops.atom import symmetric_scales
from .matrix import checked, is_identity, refuse_overflow
from .parameters import MethodBase, setting
from .protocol import Job, Quantized

F64 = npt.NDArray[np.float64]
SEARCH = 0.0  # the clipping factor that stands for `search`
_OUTLIER_BITS = 8
_WHY = "atom orders channels by the square sums of the layer's inputs"
_WHY_HESSIAN = "rounding = gptq compensates errors with the Hessian of the layer's inputs"


@dataclass(frozen=True, slots=True, kw_only=True)
class AtomSettings:
    """What can be chosen."""

    bits: int = setting(4, "bits per weight", choices=(4, 3))
    group_size: int = setting(128, "columns that share a scale", low=8)
    outliers: int = setting(128, "channels of the largest square sums, kept at 8 bit", low=8)
    order: str = setting(
        "sorted", "`sorted`: all channels by rising square sum; `moved`: only the outliers leave their place",
        choices=("sorted", "moved"),
    )  # fmt: skip
    scale_rule: str = setting(
        "paper", "`paper`: 2 max / (2^n - 1); `code`, the authors' program: max / (2^(n-1) - 1)",
        choices=("paper", "code"),
    )  # fmt: skip
    clip: float = setting(0.85, "factor on the scales, 8-bit ones aside", low=0.1, high=1.0, words={"search": SEARCH})
    rounding: str = setting("nearest", "`gptq`: compensate rounding errors", choices=("nearest", "gptq"))
    dampening: float = setting(0.01, DAMPENING, low=0.0, high=1.0)
    activation_bits: int = setting(4, "bits of the activations", low=2, high=8)
    activation_clip: float = setting(0.9, "factor on the activations' scales, 8-bit ones aside", low=0.1, high=1.0)
    kv_bits: int = setting(4, "bits of keys and values in the cache", low=2, high=8)


class _Run(NamedTuple):
    """A segment: stored columns start..stop in groups of ``size``."""

    start: int
    stop: int
    size: int
    bits: int


class Atom(MethodBase[AtomSettings]):
    """``atom``."""

    name = "atom"
    settings_type = AtomSettings

    def needs_stats(self) -> str | None:
        """Square sums of the inputs, for rounding = gptq the Hessian too."""
        return f"{_WHY}{'; ' + _WHY_HESSIAN if self._settings.rounding == 'gptq' else ''}."

    def check_shape(self, name: str, shape: tuple[int, int]) -> None:
        """BCQ-E621 where too few channels are left besides the outliers."""
        _runs(name, shape[1], self._settings)

    def settings(self) -> dict[str, Any]:
        return {**super().settings(), "clip": self._settings.clip or "search"}

    def quantize(self, job: Job) -> Quantized:
        """Symmetric segments of `bits` bits and, last, the 8-bit group of outlier channels."""
        weight, s = checked(job), self._settings
        sums = stats_of(job, _WHY).square_sum
        runs = _runs(job.name, weight.shape[1], s)
        perm = np.argsort(np.asarray(sums, np.float64), kind="stable")
        if s.order == "moved":
            chosen = np.zeros(sums.size, np.bool_)
            chosen[perm[runs[-1].start :]] = True
            perm = np.argsort(chosen, kind="stable")  # others, then chosen ones, each in their old order
        rule = _Rule(s, runs, job.threads)
        groups = _groups(runs)
        if s.rounding == "gptq":
            hessian = hessian_of(job, _WHY_HESSIAN)
            factor = compensation(damped(hessian, s.dampening, perm[::-1], job.name), job.threads, job.name)
            made = compensated_codes(weight, factor, perm, groups, rule.tops, rule, threads=job.threads)
            codes, scale = made.codes, made.scale
        else:
            codes, scale = rule.nearest(np.take(weight, perm, axis=1), groups)
        refuse_overflow(job, scale, "scale", "F16")
        pieces, column = [], 0
        for run in runs:
            part = scale[:, column : column + -(-(run.stop - run.start) // run.size)]
            column += part.shape[1]
            pieces.append(
                affine_weight(
                    np.ascontiguousarray(codes[:, run.start : run.stop]), np.ascontiguousarray(part),
                    np.full(part.shape, 2.0 ** (run.bits - 1)), bits=run.bits, group_size=run.size, stored="F16",
                    dtype=job.dtype, threads=job.threads,
                )
            )  # fmt: skip
        made_weight = BcqWeight.from_segments(pieces, perm=None if is_identity(perm) else perm)
        return Quantized(made_weight, self._notes(runs))

    def _notes(self, runs: list[_Run]) -> dict[str, Any]:
        s = self._settings
        return {
            "scale_rule": s.scale_rule,
            "clip": s.clip or "search",
            "outlier_clip": 1.0,
            "outlier_channels": runs[-1].stop - runs[-1].start,
            "activations": {
                "dynamic": True,
                "per": "token and group",
                "symmetric": True,
                "scale_rule": s.scale_rule,
                "groups": [
                    {
                        "columns": run.stop - run.start,
                        "group_size": run.size,
                        "bits": s.activation_bits if run is not runs[-1] else _OUTLIER_BITS,
                        "clip": s.activation_clip if run is not runs[-1] else 1.0,
                    }
                    for run in runs
                ],
                "kv": {"bits": s.kv_bits, "symmetric": False, "per": "token and head"},
            },
        }


class _Rule:
    """Scales of the groups of all segments, as :class:`compensated.GroupRule`."""

    def __init__(self, s: AtomSettings, runs: list[_Run], threads: int) -> None:
        self._s, self._threads = s, threads
        self._runs = [run for run in runs for _ in range(run.start, run.stop, run.size)]
        self._last = len(self._runs) - 1
        self.tops = np.array([2**run.bits - 1 for run in self._runs])

    def __call__(self, group: int, first_row: int, target: F64) -> tuple[F64, F64]:
        """Scale of every row, and the zero point 2^(n-1)."""
        bits, kept = self._runs[group].bits, group == self._last
        step = 2.0 / (2**bits - 1) if self._s.scale_rule == "paper" else 1.0 / (2 ** (bits - 1) - 1)
        clip, search = (1.0, False) if kept else (self._s.clip, self._s.clip == SEARCH)
        scale = np.empty(target.shape[0])

        def share(first: int, stop: int) -> None:
            symmetric_scales(target, bits, step, clip, search, KINDS["F16"], scale, first, stop)

        each_share(share, target.shape[0], 8, self._threads)
        return scale, np.full(target.shape[0], 2.0 ** (bits - 1))

    def nearest(
        self, weight: npt.NDArray[np.float32], groups: npt.NDArray[np.intp]
    ) -> tuple[npt.NDArray[np.uint8], F64]:
        """Codes ``[out, in]`` and scales ``[out, groups]`` of a weight in stored order."""
        codes = np.empty(weight.shape, np.uint8)
        scales = np.empty((weight.shape[0], self.tops.size))
        for group, top in enumerate(self.tops):
            columns = slice(*np.searchsorted(groups, (group, group + 1)))
            values = np.ascontiguousarray(weight[:, columns], np.float64)
            scale, zero = self(group, 0, values)
            scales[:, group] = scale
            codes[:, columns] = np.clip(np.rint(values * (1.0 / scale[:, None])) + zero[:, None], 0, top)
        return codes, scales


def _runs(name: str, columns: int, s: AtomSettings) -> list[_Run]:
    """The segments; normal channels that fill no whole group are a segment of their own, as the format asks."""
    normal = columns - s.outliers
    size = min(s.group_size, normal)
    rest = normal % size if size > 0 else 0
    if normal < 8 or 0 < rest < 8:
        found = f"{columns} columns: {max(normal, 0)} besides {s.outliers} outlier channels"
        expected = f"at least 8, and in groups of {s.group_size} a last one of at least 8"
        raise error("BCQ-E621", tensor=name, found=found, expected=expected)
    runs = [_Run(0, normal - rest, size, s.bits)]
    if rest:
        runs.append(_Run(normal - rest, normal, rest, s.bits))
    return [*runs, _Run(normal, columns, s.outliers, _OUTLIER_BITS)]


def _groups(runs: list[_Run]) -> npt.NDArray[np.intp]:
    """The group of every stored column, counted over all segments."""
    found, base = [], 0
    for run in runs:
        found.append(base + np.arange(run.stop - run.start) // run.size)
        base = int(found[-1][-1]) + 1
    return np.concatenate(found)
