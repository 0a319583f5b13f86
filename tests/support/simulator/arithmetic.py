"""What every instruction computes, in numpy and Python integers; words are plain integers below 2^32.

The simulator runs kernels on these, and `make test-gpu` compares each with the device. Functions of a whole warp take
the operands of its 32 lanes as arrays with 32 rows and give the results of all of them.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
MASK = 0xFFFFFFFF


def u32(x: Any) -> int:
    """Truncation to 32 bits, of floating-point numbers toward zero first."""
    return int(x) & MASK


def u64(x: Any) -> int:
    """Truncation to 64 bits."""
    return int(x) & 0xFFFFFFFFFFFFFFFF


def i32(x: Any) -> int:
    """The low 32 bits as a signed number."""
    return ((int(x) + 0x80000000) & MASK) - 0x80000000


def prmt(a: int, b: int, selector: int) -> int:
    """Four bytes chosen out of b:a by the nibbles of the selector; its bit 3 replicates the sign bit of the byte."""
    pool = (u32(b) << 32) | u32(a)
    result = 0
    for i in range(4):
        nibble = selector >> (4 * i) & 15
        byte = pool >> (8 * (nibble & 7)) & 255
        if nibble & 8:
            byte = 255 if byte & 128 else 0
        result |= byte << (8 * i)
    return result


def here(word: Any) -> int:
    """The same word."""
    return u32(word)


def lop3(a: int, b: int, c: int, table: int) -> int:
    """Any function of three bits, bit by bit: bit ``4a + 2b + c`` of the table."""
    result = 0
    for index in range(8):
        if table >> index & 1:
            x = a if index & 4 else ~a
            y = b if index & 2 else ~b
            z = c if index & 1 else ~c
            result |= x & y & z
    return result & MASK


def funnel_right(low: int, high: int, shift: int) -> int:
    """Bits ``shift .. shift + 31`` of high:low, the shift modulo 32."""
    return ((u32(high) << 32 | u32(low)) >> (shift & 31)) & MASK


def min_u32(a: int, b: int) -> int:
    """The smaller word."""
    return min(u32(a), u32(b))


def div_u32(a: int, b: int) -> int:
    """The quotient of two words."""
    return u32(a) // u32(b)


def rem_u32(a: int, b: int) -> int:
    """The remainder of two words."""
    return u32(a) % u32(b)


# -- numbers ----------------------------------------------------------------------------------------------------------


# One number and its pattern, in the same bytes: several times as fast as views of scalars.
_DOUBLE, _SINGLE, _HALF = np.zeros(1, np.float64), np.zeros(1, np.float32), np.zeros(1, np.float16)
_DOUBLE_BITS, _SINGLE_BITS, _HALF_BITS = _DOUBLE.view(np.uint64), _SINGLE.view(np.uint32), _HALF.view(np.uint16)
with np.errstate(invalid="ignore"):  # signalling NaNs
    _OF_HALF = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)
    _FLOAT_OF_HALF = _OF_HALF.astype(np.float64).tolist()  # Python computes with its own several times as fast


def f32_bits(x: Any) -> int:
    """The pattern of a binary32."""
    _SINGLE[0] = x
    return int(_SINGLE_BITS[0])


def bits_f32(word: int) -> np.float32:
    """The binary32 of a pattern."""
    _SINGLE_BITS[0] = int(word) & MASK
    found: np.float32 = _SINGLE[0]
    return found


def lo_f16(word: int) -> np.float32:
    """The F16 in the low half."""
    found: np.float32 = _OF_HALF[int(word) & 0xFFFF]
    return found


def hi_f16(word: int) -> np.float32:
    """The F16 in the high half."""
    return lo_f16(int(word) >> 16)


def lo_bf16(word: int) -> np.float32:
    """The BF16 in the low half."""
    return bits_f32(int(word) << 16)


def hi_bf16(word: int) -> np.float32:
    """The BF16 in the high half."""
    return bits_f32(int(word) & 0xFFFF0000)


f16_to_f32, bf16_to_f32 = lo_f16, lo_bf16


def f16_values(patterns: Array) -> Array:
    """The numbers of F16 patterns (uint16), in binary64."""
    return patterns.view(np.float16).astype(np.float64)


def bf16_values(patterns: Array) -> Array:
    """The numbers of BF16 patterns (uint16), in binary64."""
    return (patterns.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)


def f64_to_f16(x: Any) -> int:
    """Correctly rounded; a NaN gives 0x7fff."""
    if x != x:
        return 0x7FFF
    _HALF[0] = x
    return int(_HALF_BITS[0])


def f64_to_f32(x: Any) -> np.float32:
    """Correctly rounded."""
    return np.float32(x)


def f64_to_bf16(x: Any) -> int:
    """Correctly rounded; a NaN gives 0x7fff."""
    return f32_to_bf16(_odd_f32(np.float64(x)))


def f32_to_f16(x: Any) -> int:
    """Correctly rounded; a NaN gives 0x7fff."""
    return f64_to_f16(x)


def f32_to_bf16(x: Any) -> int:
    """Correctly rounded; a NaN gives 0x7fff."""
    if x != x:
        return 0x7FFF
    bits = f32_bits(x)
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16 & 0xFFFF


def pack_f16(low: Any, high: Any) -> int:
    """Two F16 in a word."""
    return f32_to_f16(high) << 16 | f32_to_f16(low)


def pack_bf16(low: Any, high: Any) -> int:
    """Two BF16 in a word."""
    return f32_to_bf16(high) << 16 | f32_to_bf16(low)


def _odd_f32(x: np.float64) -> np.float32:
    """Truncated to binary32, the last bit set where that loses something."""
    nearest = np.float32(x)
    if nearest == x or x != x:
        return nearest
    if abs(nearest) > abs(x):
        nearest = np.nextafter(nearest, np.float32(0))
    return bits_f32(f32_bits(nearest) | 1)


def _odd_sum(a: float, b: float) -> float:
    """a + b rounded to odd: rounding it again to at most 51 bits is the only rounding."""
    total = a + b
    if not math.isfinite(total):
        return total
    shadow = total - a
    lost = (a - (total - shadow)) + (b - shadow)
    if lost:
        _DOUBLE[0] = total
        if not int(_DOUBLE_BITS[0]) & 1:
            total = math.nextafter(total, math.inf if lost > 0 else -math.inf)
    return total


def _one_rounding(operation: Any, kind: Any) -> Any:
    """``f(a, b)`` in binary32 or binary64: one rounding, never fused."""
    return lambda a, b: operation(kind(a), kind(b))


add_f32, sub_f32, mul_f32 = (_one_rounding(op, np.float32) for op in (operator.add, operator.sub, operator.mul))
add_f64, sub_f64, mul_f64 = (_one_rounding(op, np.float64) for op in (operator.add, operator.sub, operator.mul))


def fma_f32(a: Any, b: Any, c: Any) -> np.float32:
    """a * b + c with one rounding."""
    return np.float32(_odd_sum(float(a) * float(b), float(c)))


def mad_i32(a: Any, b: Any, c: Any) -> Any:
    """The last 32 bits, signed."""
    return ((int(a) * int(b) + int(c) + 2**31) % 2**32) - 2**31


def rint_i32(x: Any) -> int:
    """Nearest, ties to even; a NaN is 0."""
    return 0 if x != x else int(np.clip(np.rint(np.float64(x)), -(2**31), 2**31 - 1))


def div_f32(a: Any, b: Any) -> Any:
    """Correctly rounded."""
    return np.float32(a) / np.float32(b)


def sqrt_f32(a: Any) -> Any:
    """Correctly rounded."""
    return np.sqrt(np.float32(a))


def max_f32(a: Any, b: Any) -> Any:
    """The larger; a NaN loses."""
    return np.fmax(np.float32(a), np.float32(b))


def min_f32(a: Any, b: Any) -> Any:
    """The smaller; a NaN loses."""
    return np.fmin(np.float32(a), np.float32(b))


def exp2(a: Any) -> Any:
    """2 to the power of a."""
    return np.exp2(np.float32(a))


def log2(a: Any) -> Any:
    """The binary logarithm."""
    return np.log2(np.float32(a))


def hfma2(a: int, b: int, c: int) -> int:
    """a * b + c of both halves as F16, one rounding each."""
    return _halves(lambda x, y, z: _odd_sum(x * y, z), a, b, c)


def hadd2(a: int, b: int) -> int:
    """Sums of both halves as F16."""
    return _halves(_odd_sum, a, b)


def bfma2(a: int, b: int, c: int) -> int:
    """a * b + c of both halves as BF16, one rounding each."""

    def half(convert: Any) -> int:
        x, y, z = (float(convert(w)) for w in (a, b, c))
        return f64_to_bf16(_odd_sum(x * y, z))

    return half(hi_bf16) << 16 | half(lo_bf16)


def hsub2(a: int, b: int) -> int:
    """Differences of both halves as F16."""
    return _halves(lambda x, y: _odd_sum(x, -y), a, b)


def hmul2(a: int, b: int) -> int:
    """Products of both halves as F16."""
    return _halves(lambda x, y: x * y, a, b)


def _halves(function: Any, *words: int) -> int:
    low = function(*[_FLOAT_OF_HALF[w & 0xFFFF] for w in words])
    high = function(*[_FLOAT_OF_HALF[w >> 16 & 0xFFFF] for w in words])
    return f64_to_f16(high) << 16 | f64_to_f16(low)


# -- a whole warp -----------------------------------------------------------------------------------------------------

_GROUP = np.arange(32) // 4
_MEMBER = np.arange(32) % 4


def mma_s8_warp(a: Array, b: Array, c: Array, kind: Any = np.int8) -> Array:
    """m16n8k32 of bytes, a's of that kind, b's signed: words a (32, 4), b (32, 2), c (32, 4) int32 -> (32, 4) int32."""
    left, right = _matrices(a, b, kind, np.int8)
    return (_accumulators(left @ right) + c).astype(np.int64).astype(np.int32)  # sums below 2^53: exact in binary64


def mma_f16_warp(a: Array, b: Array, c: Array, widen: Any = f16_values) -> Array:
    """m16n8k16 of F16 (or BF16) pairs: a (32, 4), b (32, 2) words, c (32, 4) float32 -> (32, 4) float32.

    The device adds in an order and a precision of its own: equal up to the last bits, not bit by bit.
    """
    left, right = (widen(half) for half in _matrices(a, b, np.uint16, np.uint16))
    return (_accumulators(left @ right) + c).astype(np.float32)


def _matrices(a: Array, b: Array, a_kind: Any, b_kind: Any) -> tuple[Array, Array]:
    """Row pieces and column pieces of a warp, elements of these kinds in words, as two matrices.

    Word r of lane 4g + m: row g + 8 (r mod 2), elements 4 (or 2) m and following of half r / 2; b has no second rows.
    """
    rows = np.ascontiguousarray(a, np.uint32).view(a_kind).reshape(8, 4, 2, 2, -1)
    columns = np.ascontiguousarray(b, np.uint32).view(b_kind).reshape(8, 4, 2, -1)
    left = rows.transpose(3, 0, 2, 1, 4).reshape(16, -1)
    right = columns.transpose(0, 2, 1, 3).reshape(8, -1)
    return (left, right.T) if a_kind is np.uint16 else (left.astype(np.float64), right.T.astype(np.float64))


def _accumulators(product: Array) -> Array:
    """A 16 x 8 matrix as the four accumulators of every lane."""
    return np.stack([product[_GROUP + 8 * (i >> 1), 2 * _MEMBER + (i & 1)] for i in range(4)], axis=1)
