"""The element types of the container, and the one correct rounding from binary64 (spec section 8)."""

from __future__ import annotations

import functools
import sys
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from bcqfmt.errors import error

Array = npt.NDArray[Any]

BITS: Final[dict[str, int]] = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32,
    "I64": 64, "U64": 64, "F64": 64, "C64": 64,
    "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4,
}  # fmt: skip
FLOATS: Final = ("F16", "BF16", "F32")
# the unsigned type of the same size, and the exponent bits: all ones in infinities and NaNs
EXPONENT: Final[dict[str, tuple[Any, int]]] = {
    "F16": (np.uint16, 0x7C00), "BF16": (np.uint16, 0x7F80), "F32": (np.uint32, 0x7F800000),
}  # fmt: skip

_NUMPY: Final[dict[str, str]] = {
    "BOOL": "?", "U8": "u1", "I8": "i1", "I16": "<i2", "U16": "<u2", "F16": "<f2", "I32": "<i4", "U32": "<u4",
    "F32": "<f4", "I64": "<i8", "U64": "<u8", "F64": "<f8", "C64": "<c8",
}  # fmt: skip
_ML_DTYPES: Final[dict[str, str]] = {
    "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz",
}  # fmt: skip
_LOGICAL: Final[dict[str, str]] = {
    "float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64",
    "F16": "F16", "BF16": "BF16", "F32": "F32", "F64": "F64",
}  # fmt: skip
_NAN: Final[dict[str, int]] = {"F16": 0x7E00, "BF16": 0x7FC0, "F32": 0x7FC00000}


def element_bytes(dtype: str) -> int:
    """Bytes of one element; types below 8 bits count as 1 (alignment)."""
    return max(1, BITS[dtype] // 8)


def nbytes_of(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor, in Python integers so that nothing wraps."""
    count = 1
    for dim in shape:
        count *= dim
    return -(-count * BITS[dtype] // 8)


@functools.cache
def numpy_dtype(dtype: str) -> np.dtype[Any]:
    """The little-endian numpy type; ml_dtypes is imported only for the types numpy does not know.

    Sub-byte types have no numpy type of their own and come as bytes (``uint8``).
    """
    if dtype in _NUMPY:
        return np.dtype(_NUMPY[dtype])
    if dtype in _ML_DTYPES:
        import ml_dtypes

        extended: np.dtype[Any] = np.dtype(getattr(ml_dtypes, _ML_DTYPES[dtype]))
        return extended
    return np.dtype("u1")


def logical_name(dtype: Any) -> str:
    """``F16``, ``BF16``, ``F32`` or ``F64`` for a name, a numpy dtype or a torch dtype."""
    name = str(dtype).removeprefix("torch.")
    if name not in _LOGICAL:
        try:
            name = np.dtype(dtype).name
        except TypeError:
            name = "?"
    if name not in _LOGICAL:
        raise error("BCQ-E302", found=f"dtype {dtype!r}", expected="float16, bfloat16, float32 or float64")
    return _LOGICAL[name]


def name_of(array: Array) -> str:
    """The container's name for a numpy array's type (byte order aside)."""
    kind = array.dtype.newbyteorder("=")
    for name, code in _NUMPY.items():
        if np.dtype(code).newbyteorder("=") == kind:
            return name
    for name, code in _ML_DTYPES.items():
        if kind.name == code:
            return name
    raise error("BCQ-E302", found=f"array of type {array.dtype}", expected="a type that safetensors can hold")


def float64_of(array: Array) -> npt.NDArray[np.float64]:
    """Floating-point numbers of any supported type as binary64; exact."""
    with np.errstate(invalid="ignore"):  # a signalling NaN is a legal bit pattern
        return array.astype(np.float64)


def round_to(values: npt.NDArray[np.float64], dtype: str) -> Array:
    """RN_dtype: one rounding from binary64, ties to even, NaN made canonical. F64 passes through."""
    if dtype == "F64":
        return values
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        if dtype == "BF16":
            rounded = _bfloat16_bits(values).view(numpy_dtype("BF16"))
        else:
            rounded = values.astype(numpy_dtype(dtype))
    nan = np.isnan(values)
    if nan.any():
        bits = rounded.view(np.uint32 if dtype == "F32" else np.uint16)
        bits[nan] = _NAN[dtype]
    return rounded


def _bfloat16_bits(values: npt.NDArray[np.float64]) -> npt.NDArray[np.uint16]:
    """Correctly rounded bfloat16 bits.

    A cast through binary32 rounds twice. Rounding to *odd* on the first step keeps a sticky bit in the last place,
    after which rounding 24 bits to 8 is exact.
    """
    single = values.astype(np.float32)
    bits = single.view(np.uint32)
    error_term = values - single.astype(np.float64)
    fix = (error_term != 0) & ((bits & 1) == 0) & np.isfinite(error_term)
    if fix.any():
        away = (error_term > 0) == (values > 0)
        step = np.where(away, np.uint32(1), np.uint32(0xFFFFFFFF))
        bits = np.where(fix, bits + step, bits)
    return ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)


if sys.byteorder != "little":  # the words of the format are used in place
    raise error("BCQ-E307", found="a big-endian processor", expected="a little-endian one")
