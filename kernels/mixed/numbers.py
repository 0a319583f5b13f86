"""What `mixed_gemv` needs of a weight: codes, first- and second-order numbers as they are stored, or why it cannot."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from bcqfmt.container.dtypes import float64_of, round_to
from bcqfmt.errors import BcqError, error
from bcqfmt.kernels.runtime.limits import ROWS
from bcqfmt.weight import decode
from bcqfmt.weight.packing import unpack, unpack_codes
from bcqfmt.weight.scheme import SecondOrder
from bcqfmt.weight.weight import BcqWeight

from .layout import FOUR_COLUMNS, FourBit, TwoBit

__all__ = ["segments_of"]

Array = npt.NDArray[Any]


def segments_of(weight: BcqWeight, index: int) -> tuple[TwoBit | None, FourBit | None]:
    """The 2-bit and the 4-bit segment of a canonical weight; BCQ-E553 unless the kernel can take them."""
    kinds = [segment.bits for segment in weight.scheme.segments]
    if kinds not in ([2], [4], [2, 4]) or any(segment.encoding != "affine" for segment in weight.scheme.segments):
        shown = " + ".join(f"{segment.encoding} of {segment.bits} bits" for segment in weight.scheme.segments)
        raise _refused(weight, shown, "affine of 2 bits, of 4 bits, or both in this order")
    numbers = decode.load_rows(weight.spec, weight.parts(), index, (0, weight.spec.out))
    two = _two_bit(weight, numbers) if kinds[0] == 2 else None
    four = _four_bit(weight, numbers, len(kinds) - 1) if kinds[-1] == 4 else None
    return two, four


def _refused(weight: BcqWeight, found: str, expected: str) -> BcqError:
    return error("BCQ-E553", tensor=weight.name, found=found, expected=expected)


def _two_bit(weight: BcqWeight, numbers: decode.Numbers) -> TwoBit:
    segment, rows = weight.scheme.segments[0], weight.spec.out
    order, groups = segment.scale, weight.spec.groups(0)
    if not isinstance(order, SecondOrder) or order.bits > 4:
        raise _refused(weight, "2-bit codes with other scales", "second-order scales with codes of at most 4 bits")
    if segment.group_size != 16:
        raise _refused(weight, f"2-bit groups of {segment.group_size} columns", "16; bit_gemv takes other sizes")
    if order.rows % ROWS and order.rows < rows:
        raise _refused(weight, f"second-order scales for {order.rows} rows", f"a multiple of {ROWS}")
    arrays = numbers.arrays
    tile_group = np.arange(-(-rows // ROWS)) * ROWS // order.rows
    stored = arrays["s0_scale_zero"]
    zero = float64_of(unpack(stored, order.bits, groups) if order.zero == "packed" else stored)
    scale = _halves(weight, float64_of(arrays["s0_scale_scale"]), "second-order scales")
    return TwoBit(
        codes=_codes(weight, numbers, 0),
        scale_codes=unpack(arrays["s0_scale_codes"], order.bits, groups).astype(np.uint8),
        zeros=_small(weight, decode.zero_of(numbers, 0), (rows, groups), 3, "zero points of the 2-bit segment"),
        units=scale[tile_group],
        unit_zeros=_small(weight, zero, zero.shape, 255, "second-order zeros")[tile_group],
    )


def _four_bit(weight: BcqWeight, numbers: decode.Numbers, k: int) -> FourBit:
    segment, rows, width = weight.scheme.segments[k], weight.spec.out, weight.spec.widths[k]
    groups = weight.spec.groups(k)
    if isinstance(segment.scale, SecondOrder):
        raise _refused(weight, "4-bit codes with second-order scales", "F16 scales")
    if segment.group_size % FOUR_COLUMNS and segment.group_size < width:
        raise _refused(weight, f"4-bit groups of {segment.group_size} columns", "a multiple of 128, or all columns")
    scales = _halves(weight, float64_of(numbers.arrays[f"s{k}_scale"]), "scales of the 4-bit segment")
    zeros = _small(weight, decode.zero_of(numbers, k), (rows, groups), 15, "zero points of the 4-bit segment")
    group = np.arange(-(-width // FOUR_COLUMNS)) * FOUR_COLUMNS // segment.group_size
    return FourBit(_codes(weight, numbers, k), scales[:, group], zeros[:, group])


def _codes(weight: BcqWeight, numbers: decode.Numbers, k: int) -> Array:
    planes = np.ascontiguousarray(numbers.arrays[f"s{k}_planes"])
    return unpack_codes(planes, weight.spec.widths[k])


def _halves(weight: BcqWeight, exact: Array, what: str) -> Array:
    with np.errstate(over="ignore"):
        short = round_to(exact, "F16")
    if not np.array_equal(short.astype(np.float64), exact, equal_nan=True):
        raise _refused(weight, f"{what} that F16 cannot hold", "F16 numbers")
    return short


def _small(weight: BcqWeight, found: Any, shape: tuple[int, ...], most: int, what: str) -> Array:
    """Integers of 0 .. most as bytes."""
    full = np.broadcast_to(np.asarray(found, np.float64), shape)
    if not ((full >= 0) & (full <= most) & (full == np.floor(full))).all():
        raise _refused(weight, f"other {what}", f"integers 0..{most}")
    return full.astype(np.uint8)
