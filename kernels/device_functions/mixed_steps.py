"""Numbers of x as 16-bit integers, for the product with 2/4-bit weights: a device function."""

from __future__ import annotations

from typing import Any

from bcqfmt.kernels import ptx
from bcqfmt.kernels.runtime.numba_cuda import inlined

from .numbers import MAGIC, PATTERN

__all__ = ["PRECISION", "block_integers"]

PRECISION = 14  # bits of an integer after the leading one of the largest of its 16 neighbours


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
        total = ptx.u32(n0 + n1 + n2 + n3 - 4 * PATTERN)  # the pattern's last 16 bits are zeros: bytes need not know
        l0, l1 = ptx.fma_f32(ptx.f32(MAGIC - f0), unit, v0), ptx.fma_f32(ptx.f32(MAGIC - f1), unit, v1)
        l2, l3 = ptx.fma_f32(ptx.f32(MAGIC - f2), unit, v2), ptx.fma_f32(ptx.f32(MAGIC - f3), unit, v3)
        return unit, total, high, low, l0, l1, l2, l3

    return inlined(integers)
