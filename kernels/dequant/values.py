"""The value of a code on the device: section 8 of the specification, operation by operation. Device functions."""

from __future__ import annotations

from typing import Any

from bcqfmt.kernels import ptx
from bcqfmt.kernels.device_functions.numbers import rounding
from bcqfmt.kernels.runtime.numba_cuda import inlined

FORMULAS = {"affine": 0, "float-zero": 1, "offset": 2, "bcq": 3, "table": 4}
PATCHES = {"add": 1, "replace": 2}


def code_value(formula: int, logical: int) -> Any:
    """A device function: the value of a code with a scale and a zero point (or offset), all binary64.

    Neither for bcq nor for tables.

    Section 8 of the specification, operation by operation; a float zero point is subtracted in the ``logical`` dtype.
    """

    rounded = rounding(logical if formula == 1 else None)

    def value(scale: Any, other: Any, code: Any) -> Any:
        if formula == 2:
            return ptx.add_f64(ptx.mul_f64(scale, ptx.f64(code)), other)
        return ptx.mul_f64(scale, rounded(ptx.sub_f64(ptx.f64(code), other)))

    return inlined(value)
