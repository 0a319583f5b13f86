"""Numbers and bits in the forms that tensor cores take: device functions that are inlined into a kernel."""

from __future__ import annotations

from typing import Any

import numpy as np

from bcqfmt.kernels import ptx
from bcqfmt.kernels.runtime.numba_cuda import inlined

MAGIC = np.float32(12582912.0)  # 1.5 * 2^23: its last 22 bits can hold a signed integer
PATTERN = 0x4B400000
PRECISION = 14  # bits of an integer after the leading one of the largest of its 16 neighbours
ONES = 0xFFFFFFFF
# between float32 and a word with a number of a kind: 0 float32, 1 float16, 2 bfloat16
WIDEN = {0: ptx.bits_f32, 1: ptx.f16_to_f32, 2: ptx.bf16_to_f32}
NARROW = {0: ptx.f32_bits, 1: ptx.f32_to_f16, 2: ptx.f32_to_bf16}
# the same for what arrays hold: words of 16 bits, and float32 as it is
FROM_ARRAY, TO_ARRAY = {**WIDEN, 0: ptx.f32}, {**NARROW, 0: ptx.f32}


def number_pairs(number: str) -> Any:
    """A device function: the numbers of rows r and r + 8 at a shared address."""
    low, high = (ptx.lo_bf16, ptx.hi_bf16) if number == "BF16" else (ptx.lo_f16, ptx.hi_f16)

    def pair(address: Any, offset: Any) -> Any:
        word = ptx.lds32(address, ptx.u32(offset))
        return low(word), high(word)

    def full_pair(address: Any, offset: Any) -> Any:
        words = ptx.lds64(address, ptx.u32(offset))
        return ptx.bits_f32(words[0]), ptx.bits_f32(words[1])

    return inlined(full_pair if number == "F32" else pair)


def sums_as_floats(converted: bool) -> Any:
    """A device function: an integer sum as float32."""

    def read(count: Any) -> Any:
        return ptx.f32(ptx.bits_f32(ptx.u32(count)) - MAGIC)

    return ptx.f32 if converted else inlined(read)


def bit_turner() -> Any:
    """A device function: byte ``e`` of eight integers as 8 x 8 bits, transposed.

    ``pick`` is ``e | (e + 4) << 4``. Bit k of byte j of the result is bit j of byte e of integer k; bytes 0..3 in the
    first word, 4..7 in the second.
    """

    def turn(n0: Any, n1: Any, n2: Any, n3: Any, n4: Any, n5: Any, n6: Any, n7: Any, pick: Any) -> Any:
        low = ptx.prmt(ptx.prmt(n0, n1, pick), ptx.prmt(n2, n3, pick), ptx.u32(0x5410))
        high = ptx.prmt(ptx.prmt(n4, n5, pick), ptx.prmt(n6, n7, pick), ptx.u32(0x5410))
        d = ptx.u32((low ^ (low >> 7)) & 0x00AA00AA)  # 8 x 8 bits, transposed
        low = ptx.u32(low ^ d ^ (d << 7))
        d = ptx.u32((high ^ (high >> 7)) & 0x00AA00AA)
        high = ptx.u32(high ^ d ^ (d << 7))
        d = ptx.u32((low ^ (low >> 14)) & 0x0000CCCC)
        low = ptx.u32(low ^ d ^ (d << 14))
        d = ptx.u32((high ^ (high >> 14)) & 0x0000CCCC)
        high = ptx.u32(high ^ d ^ (d << 14))
        turned = ptx.u32((low & 0x0F0F0F0F) | ((high << 4) & 0xF0F0F0F0))
        rest = ptx.u32(((low >> 4) & 0x0F0F0F0F) | (high & 0xF0F0F0F0))
        return turned, rest

    return inlined(turn)


def step_turner() -> Any:
    """A device function: `bits.layout.in_steps` of one word."""

    def turn(word: Any) -> Any:
        d = ptx.u32((word ^ (word >> 14)) & 0x0000CCCC)
        word = ptx.u32(word ^ d ^ (d << 14))
        d = ptx.u32((word ^ (word >> 7)) & 0x00AA00AA)
        word = ptx.u32(word ^ d ^ (d << 7))
        return ptx.u32((word << 1) | (word >> 31))

    return inlined(turn)


def block_integers() -> Any:
    """A device function: four numbers as 16-bit integers in units of 2^(exponent - 127 - lower).

    Gives the unit, the sum of the integers, the words of their high and low bytes (integer = 256 high + low, both
    signed), and what is left over of the numbers.
    """

    def integers(v0: Any, v1: Any, v2: Any, v3: Any, exponent: Any, lower: Any) -> Any:
        unit = ptx.bits_f32(ptx.u32((exponent - lower) << 23))
        inverse = ptx.bits_f32(ptx.u32((254 + lower - exponent) << 23))
        f0, f1 = ptx.fma_f32(v0, inverse, MAGIC), ptx.fma_f32(v1, inverse, MAGIC)
        f2, f3 = ptx.fma_f32(v2, inverse, MAGIC), ptx.fma_f32(v3, inverse, MAGIC)
        n0, n1, n2, n3 = ptx.f32_bits(f0), ptx.f32_bits(f1), ptx.f32_bits(f2), ptx.f32_bits(f3)
        first, second = ptx.prmt(n0, n1, ptx.u32(0x40)), ptx.prmt(n2, n3, ptx.u32(0x40))
        low = ptx.prmt(first, second, ptx.u32(0x5410))
        first = ptx.prmt(ptx.u32(n0 + 128), ptx.u32(n1 + 128), ptx.u32(0x51))
        second = ptx.prmt(ptx.u32(n2 + 128), ptx.u32(n3 + 128), ptx.u32(0x51))
        high = ptx.prmt(first, second, ptx.u32(0x5410))
        total = ptx.u32(n0 + n1 + n2 + n3 - 4 * PATTERN)  # the pattern's low 16 bits are zeros
        l0, l1 = ptx.fma_f32(ptx.f32(MAGIC - f0), unit, v0), ptx.fma_f32(ptx.f32(MAGIC - f1), unit, v1)
        l2, l3 = ptx.fma_f32(ptx.f32(MAGIC - f2), unit, v2), ptx.fma_f32(ptx.f32(MAGIC - f3), unit, v3)
        return unit, total, high, low, l0, l1, l2, l3

    return inlined(integers)


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
