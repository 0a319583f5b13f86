"""What a quantization method is: it turns one dense matrix into one BCQ weight and says how far off it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from bcqfmt.weight.weight import BcqWeight

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class InputStats:
    """What calibration saw at the input of a linear layer; columns in original order.

    ``square_sum``: float64 ``[in]``, sum over tokens of x^2. ``hessian``: float64 or float32 ``[in, in]``, the sum
    over tokens of x x^T (not doubled, not damped). ``tokens``: how many were seen. ``shared``: names of all weights
    that read the same input (q, k and v), this one among them, sorted; they share a channel order.
    """

    square_sum: F64
    hessian: npt.NDArray[Any] | None
    tokens: int
    shared: tuple[str, ...] = ()


class Reading(NamedTuple):
    """What a precision of nested planes has for inputs when all layers are read at it, and what it should be then."""

    stats: InputStats
    weight: F32  # [out, in]


@dataclass(frozen=True, slots=True)
class Job:
    """One weight to quantize. ``weight`` is ``[out, in]`` float32, exact images of the source's numbers.

    ``dtype``: the source's and the result's logical dtype (``F16``, ``BF16``, ``F32``). ``threads``: how
    many a compiled loop may use. ``lower``: of every precision that a method's ``lower_precisions`` names, if inputs
    are known for each.
    """

    name: str
    weight: F32
    dtype: str
    stats: InputStats | None = None
    threads: int = 1
    lower: tuple[Reading, ...] = ()


class Quantized(NamedTuple):
    """The weight and what it took. ``notes``: what the method recorded about this weight (JSON values)."""

    weight: BcqWeight
    notes: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Parameter:
    """A setting of a method as users write it: ``--group-size 128``, or ``group_size = 128`` in a rule file."""

    name: str
    kind: type
    default: Any
    help: str
    choices: tuple[Any, ...] = field(default=())


class Method(Protocol):
    """One way to quantize. An instance holds parameters that were checked; methods are deterministic."""

    name: str

    @classmethod
    def parameters(cls) -> tuple[Parameter, ...]:
        """All settings with defaults, for the command line, rule files and their error messages."""

    @classmethod
    def build(cls, given: Mapping[str, Any]) -> Method:
        """The method with these settings; BCQ-E620 names a setting that is unknown or out of range."""

    def needs_stats(self) -> str | None:
        """None, or one sentence: what it needs calibration for, when it cannot do without."""

    def check_shape(self, name: str, shape: tuple[int, int]) -> None:
        """BCQ-E621 where no matrix of that shape ``(out, in)`` fits the method; asked before any work is done."""

    def settings(self) -> dict[str, Any]:
        """The settings in force, defaults included, as they are recorded in plan and report."""

    @property
    def lower_precisions(self) -> tuple[int, ...]:
        """Planes at which its weights are read besides all of them, if inputs of their own matter to it; else none."""

    def quantize(self, job: Job) -> Quantized:
        """The BCQ weight (name empty); BCQ-E62x where the matrix does not fit the method."""
