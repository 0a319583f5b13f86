"""One unit of 2/4-bit weights times x: device functions.

Lanes 8 k .. 8 k + 7 give the bytes of group k (of four) to the tensor cores, all others zeros. Of the two instructions
for 64 columns the first is for groups 0 and 1: half of the lanes give zeros. Their registers are zero from the start,
and every lane loads only what its half needs. The compiler must not see that ``lower`` and ``upper`` exclude each
other.
"""

from __future__ import annotations

from typing import Any

from bcqfmt.kernels import ptx
from bcqfmt.kernels.runtime.numba_cuda import inlined


def code_words() -> Any:
    """A device function: this lane's eight words of codes of a unit, at ``place``, to ``a``."""

    def load(a: Any, place: Any) -> None:
        a[0], a[1], a[2], a[3] = ptx.lds128(place, ptx.u32(0))
        a[4], a[5], a[6], a[7] = ptx.lds128(place, ptx.u32(512))

    return inlined(load)


def two_words() -> Any:
    """A device function: words of x of a 2-bit unit to ``given``, and ``info`` of this lane's four groups.

    ``xa`` and ``xb``: its first and second 128 columns.
    """

    def load(given: Any, info: Any, xa: Any, xb: Any, ia: Any, lower: Any, upper: Any) -> None:
        if lower:
            given[0], given[1], given[2], given[3] = ptx.lds128(xa, ptx.u32(0))
            given[4], given[5], given[6], given[7] = ptx.lds128(xb, ptx.u32(0))
        if upper:
            given[8], given[9], given[10], given[11] = ptx.lds128(xa, ptx.u32(0))
            given[12], given[13], given[14], given[15] = ptx.lds128(xb, ptx.u32(0))
        info[0], info[1], info[2], info[3] = ptx.lds128(ia, ptx.u32(0))
        info[4], info[5], info[6], info[7] = ptx.lds128(ia, ptx.u32(16))

    return inlined(load)


def four_words() -> Any:
    """The same for a 4-bit unit: two groups."""

    def load(given: Any, info: Any, xa: Any, ia: Any, lower: Any, upper: Any) -> None:
        if lower:
            given[0], given[1], given[2], given[3] = ptx.lds128(xa, ptx.u32(0))
        if upper:
            given[8], given[9], given[10], given[11] = ptx.lds128(xa, ptx.u32(0))
        info[0], info[1], info[2], info[3] = ptx.lds128(ia, ptx.u32(0))

    return inlined(load)


def two_bit_group() -> Any:
    """A device function: sums of codes and bytes of x over 64 columns, (high, low) of a lane's group for both its rows.

    ``w0`` .. ``w3``: codes of 16 columns each, in the low (``odd``: high) half of each byte; ``b0`` .. ``b3``: bytes of
    x of four groups. Codes stay where they are in their bytes, so a row's sums are 1 or 4 (``odd``: 16 or 64) times too
    large.
    """

    def sums(w0: Any, w1: Any, w2: Any, w3: Any, b0: Any, b1: Any, b2: Any, b3: Any, odd: Any) -> Any:
        mask, mask8 = (0x30303030, 0xC0C0C0C0) if odd else (0x03030303, 0x0C0C0C0C)
        d = ptx.mma_u8(
            ptx.u32(w0 & mask), ptx.u32(w0 & mask8), ptx.u32(w1 & mask), ptx.u32(w1 & mask8),
            b0, b1, ptx.i32(0), ptx.i32(0), ptx.i32(0), ptx.i32(0),
        )  # fmt: skip
        return ptx.mma_u8(
            ptx.u32(w2 & mask), ptx.u32(w2 & mask8), ptx.u32(w3 & mask), ptx.u32(w3 & mask8),
            b2, b3, d[0], d[1], d[2], d[3],
        )  # fmt: skip

    return inlined(sums)


def four_bit_group() -> Any:
    """The same for 4-bit codes: ``w0``, ``w1`` of the first 32 columns, ``w2``, ``w3`` of the next.

    Sums of the lane's second row are 16 times too large.
    """

    def sums(w0: Any, w1: Any, w2: Any, w3: Any, b0: Any, b1: Any, b2: Any, b3: Any) -> Any:
        d = ptx.mma_u8(
            ptx.u32(w0 & 0x0F0F0F0F), ptx.u32(w0 & 0xF0F0F0F0), ptx.u32(w1 & 0x0F0F0F0F), ptx.u32(w1 & 0xF0F0F0F0),
            b0, b1, ptx.i32(0), ptx.i32(0), ptx.i32(0), ptx.i32(0),
        )  # fmt: skip
        return ptx.mma_u8(
            ptx.u32(w2 & 0x0F0F0F0F), ptx.u32(w2 & 0xF0F0F0F0), ptx.u32(w3 & 0x0F0F0F0F), ptx.u32(w3 & 0xF0F0F0F0),
            b2, b3, d[0], d[1], d[2], d[3],
        )  # fmt: skip

    return inlined(sums)
