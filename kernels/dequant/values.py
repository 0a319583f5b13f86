"""The value of a code on the device: section 8 of the specification, operation by operation. Device functions."""

from __future__ import annotations

from typing import Any

from bcqfmt.kernels import ptx
from bcqfmt.kernels.runtime.numba_cuda import inlined

__all__ = ["FORMULAS", "PATCHES", "code_value", "rounding"]

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


def rounding(kind: int | None) -> Any:
    """A device function: a binary64 number rounded to a kind of number, as binary64; as it is for None."""

    def as_it_is(value: Any) -> Any:
        return value

    def single(value: Any) -> Any:
        return ptx.f64(ptx.f64_to_f32(value))

    def half(value: Any) -> Any:
        return ptx.f64(ptx.lo_f16(ptx.f64_to_f16(value)))

    def brain(value: Any) -> Any:
        return ptx.f64(ptx.lo_bf16(ptx.f64_to_bf16(value)))

    return inlined(as_it_is if kind is None else (single, half, brain)[kind])
