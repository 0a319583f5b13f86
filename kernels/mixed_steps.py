"""Steps of the product with 2/4-bit weights, as device functions that are written into the kernel."""

from __future__ import annotations

from typing import Any

from bcqfmt.kernels import ptx
from bcqfmt.kernels.bit_steps import MAGIC, PATTERN
from bcqfmt.kernels.mixed_layout import FOUR_BYTES, TWO_BYTES
from bcqfmt.kernels.mixed_ptx import mma_u8
from bcqfmt.kernels.ptx_bits import bulk_copy, bulk_expect
from bcqfmt.kernels.ptx_numba import inlined

__all__ = ["PRECISION", "block_integers", "four_bit_sums", "two_bit_sums", "unit_fetcher"]

PRECISION = 14  # bits of an integer after the leading one of the largest of its 16 neighbours


def unit_fetcher(deep: int) -> Any:
    """A device function: one lane starts copy ``c``, ``deep`` units each, of the tile that begins at ``begin``."""
    two, four = deep * TWO_BYTES, deep * FOUR_BYTES

    def fetch(units: Any, begin: Any, c: Any, twos: Any, slot: Any, bar: Any) -> None:
        at, size = ptx.u32(begin + c * (two // 16)), ptx.u32(two)
        if c >= twos:
            at = ptx.u32(at - (c - twos) * ((two - four) // 16))
            size = ptx.u32(four)
        bulk_expect(bar, size)
        bulk_copy(units, at, slot, size, bar)

    return inlined(fetch)


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
        n0, n1 = ptx.u32(ptx.f32_bits(f0) - PATTERN), ptx.u32(ptx.f32_bits(f1) - PATTERN)
        n2, n3 = ptx.u32(ptx.f32_bits(f2) - PATTERN), ptx.u32(ptx.f32_bits(f3) - PATTERN)
        first, second = ptx.prmt(n0, n1, ptx.u32(0x40)), ptx.prmt(n2, n3, ptx.u32(0x40))
        low = ptx.prmt(first, second, ptx.u32(0x5410))
        first = ptx.prmt(ptx.u32(n0 + 128), ptx.u32(n1 + 128), ptx.u32(0x51))
        second = ptx.prmt(ptx.u32(n2 + 128), ptx.u32(n3 + 128), ptx.u32(0x51))
        high = ptx.prmt(first, second, ptx.u32(0x5410))
        total = ptx.u32(n0 + n1 + n2 + n3)
        l0, l1 = ptx.fma_f32(ptx.f32(MAGIC - f0), unit, v0), ptx.fma_f32(ptx.f32(MAGIC - f1), unit, v1)
        l2, l3 = ptx.fma_f32(ptx.f32(MAGIC - f2), unit, v2), ptx.fma_f32(ptx.f32(MAGIC - f3), unit, v3)
        return unit, total, high, low, l0, l1, l2, l3

    return inlined(integers)


def two_bit_sums() -> Any:
    """A device function: sums of codes and bytes of x over 64 columns, (high, low) of a lane's group for both its rows.

    ``w0``, ``w1``: codes of 32 columns each; ``word``: bytes of x of the group and plane that this lane gives; of
    ``k0`` .. ``k3`` the one of that group is 1, the others are 0. Codes stay where they are in their bytes, so a row's
    sums are 1 or 4 times (odd groups: 16 or 64 times) too large. Masks of x are products: multipliers are idle here,
    logic is not.
    """

    def sums(w0: Any, w1: Any, word: Any, k0: Any, k1: Any, k2: Any, k3: Any) -> Any:
        d = mma_u8(
            ptx.u32(w0 & 0x03030303), ptx.u32(w0 & 0x0C0C0C0C), ptx.u32(w0 & 0x30303030), ptx.u32(w0 & 0xC0C0C0C0),
            ptx.u32(word * k0), ptx.u32(word * k1), ptx.i32(0), ptx.i32(0), ptx.i32(0), ptx.i32(0),
        )  # fmt: skip
        return mma_u8(
            ptx.u32(w1 & 0x03030303), ptx.u32(w1 & 0x0C0C0C0C), ptx.u32(w1 & 0x30303030), ptx.u32(w1 & 0xC0C0C0C0),
            ptx.u32(word * k2), ptx.u32(word * k3), d[0], d[1], d[2], d[3],
        )  # fmt: skip

    return inlined(sums)


def four_bit_sums() -> Any:
    """The same for 4-bit codes: ``w0``, ``w1`` of the first 32 columns, ``w2``, ``w3`` of the next.

    Sums of the lane's second row are 16 times too large.
    """

    def sums(w0: Any, w1: Any, w2: Any, w3: Any, word: Any, k0: Any, k1: Any, k2: Any, k3: Any) -> Any:
        d = mma_u8(
            ptx.u32(w0 & 0x0F0F0F0F), ptx.u32(w0 & 0xF0F0F0F0), ptx.u32(w1 & 0x0F0F0F0F), ptx.u32(w1 & 0xF0F0F0F0),
            ptx.u32(word * k0), ptx.u32(word * k1), ptx.i32(0), ptx.i32(0), ptx.i32(0), ptx.i32(0),
        )  # fmt: skip
        return mma_u8(
            ptx.u32(w2 & 0x0F0F0F0F), ptx.u32(w2 & 0xF0F0F0F0), ptx.u32(w3 & 0x0F0F0F0F), ptx.u32(w3 & 0xF0F0F0F0),
            ptx.u32(word * k2), ptx.u32(word * k3), d[0], d[1], d[2], d[3],
        )  # fmt: skip

    return inlined(sums)
