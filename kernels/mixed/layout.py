"""2/4-bit weights in the order in which `kernel` takes them: tiles of 16 rows, units of one bulk copy.

A tile is its 2-bit units (256 columns, 1264 bytes) and then its 4-bit units (128 columns, 1072 bytes). Lane
l = 4 r + t of a warp holds rows r and r + 8; b counts the bytes of a word, m the MMAs of a 4-bit unit::

    2 bit  codes   [2][lane][4] words k, h = 0, 1; bits 8 b + 2 i: row r + 8 (i % 2), column 128 h + 64 (i // 2) + 16 k
                   + 4 t + b
           scales  [lane] words: bits 16 h + 4 j: scale code of row r + 8 h, group 4 j + t
           zeros   [lane] 16 bits: bits 4 j + 2 h: zero point of row r + 8 h, group 4 j + t
           units   [t][j] F16: second-order scale of group 4 j + t, one for the 16 rows
           zeros   [t][j] bytes: second-order zero of the same group
    4 bit  codes   [2][lane][4] words 2 m + i, m = 0..3: bits 8 b + 4 h: row r + 8 h, column 32 m + 16 i + 4 t + b
           scales  [r][2] F16: rows r and r + 8
           zeros   [r] bytes: low half row r, high half row r + 8; then 8 bytes of zeros

That is a permutation of the weight's own bits: 2.47 and 4.19 bits a weight, everything counted (the format has 2.45 and
4.16). Rows and columns are padded with zeros.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from bcqfmt.container.dtypes import round_to
from bcqfmt.errors import BcqError, error
from bcqfmt.kernels.runtime.limits import ROWS
from bcqfmt.weight import decode
from bcqfmt.weight.packing import unpack_codes
from bcqfmt.weight.scheme import SecondOrder
from bcqfmt.weight.weight import BcqWeight

TWO_COLUMNS, TWO_BYTES = 256, 1264
FOUR_COLUMNS, FOUR_BYTES = 128, 1072
_STEP = 64  # tiles packed at a time
Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]


class TwoBit(NamedTuple):
    """Codes (out, width) and, per group of 16 columns: scale codes and zero points (out, G) uint8, second-order scale
    float16 and zero uint8, (tiles, G).
    """

    codes: Array
    scale_codes: Array
    zeros: Array
    units: Array
    unit_zeros: Array


class FourBit(NamedTuple):
    """Codes (out, width) uint8 and, per 128 columns, scales float16 and zero points uint8, (out, G)."""

    codes: Array
    scales: Array
    zeros: Array


def segments_of(weight: BcqWeight) -> tuple[TwoBit | None, FourBit | None]:
    """The 2-bit and the 4-bit segment of a canonical weight; BCQ-E553 unless the kernel can take them."""
    kinds = [segment.bits for segment in weight.scheme.segments]
    if kinds not in ([2], [4], [2, 4]) or any(segment.encoding != "affine" for segment in weight.scheme.segments):
        shown = " + ".join(f"{segment.encoding} of {segment.bits} bits" for segment in weight.scheme.segments)
        raise _refused(weight, shown, "affine of 2 bits, of 4 bits, or both in this order")
    numbers = decode.load_rows(weight.spec, weight.parts(), 0, (0, weight.spec.out))
    two = _two_bit(weight, numbers) if kinds[0] == 2 else None
    four = _four_bit(weight, numbers, len(kinds) - 1) if kinds[-1] == 4 else None
    return two, four


def _refused(weight: BcqWeight, found: str, expected: str) -> BcqError:
    return error("BCQ-E553", tensor=weight.name, found=found, expected=expected)


def _two_bit(weight: BcqWeight, numbers: decode.Numbers) -> TwoBit:
    segment, rows = weight.scheme.segments[0], weight.spec.out
    order, groups = segment.scale, weight.spec.groups(0)
    if not isinstance(order, SecondOrder) or not isinstance(order.bits, int) or order.bits > 4:
        raise _refused(weight, "2-bit codes with other scales", "second-order scales with codes of at most 4 bits")
    if segment.group_size != 16:
        raise _refused(weight, f"2-bit groups of {segment.group_size} columns", "16; bit_gemv takes other sizes")
    if order.rows % ROWS and order.rows < rows:
        raise _refused(weight, f"second-order scales for {order.rows} rows", f"a multiple of {ROWS}")
    tile_group = np.arange(-(-rows // ROWS)) * ROWS // order.rows
    codes, scale, zero = decode.coded_numbers(numbers, 0)
    scale = _halves(weight, scale, "second-order scales")
    return TwoBit(
        codes=_codes(weight, numbers, 0),
        scale_codes=codes.astype(np.uint8),
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
    scales = _halves(weight, decode.scale_of(numbers, k), "scales of the 4-bit segment")
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


def pack_units(two: TwoBit | None, four: FourBit | None) -> npt.NDArray[np.uint32]:
    """Both segments (either may be missing) as [tile][unit], flat words."""
    first = two or four
    assert first is not None
    rows = first.codes.shape[0]
    tiles = -(-rows // ROWS)
    twos = -(-two.codes.shape[1] // TWO_COLUMNS) if two else 0
    fours = -(-four.codes.shape[1] // FOUR_COLUMNS) if four else 0
    made = np.zeros((tiles, twos * TWO_BYTES + fours * FOUR_BYTES), np.uint8)
    for start in range(0, tiles, _STEP):
        stop = min(start + _STEP, tiles)
        if two:
            part = made[start:stop, : twos * TWO_BYTES].reshape(stop - start, twos, TWO_BYTES)
            _two_units(two, start, stop, part)
            made[start:stop, : twos * TWO_BYTES] = part.reshape(stop - start, -1)
        if four:
            part = made[start:stop, twos * TWO_BYTES :].reshape(stop - start, fours, FOUR_BYTES)
            _four_units(four, start, stop, part)
            made[start:stop, twos * TWO_BYTES :] = part.reshape(stop - start, -1)
    return made.reshape(-1).view(np.uint32)


def _two_units(two: TwoBit, start: int, stop: int, out: Bytes) -> None:
    tiles, chunks = out.shape[:2]
    codes = _padded(two.codes, start, stop, chunks * TWO_COLUMNS).reshape(tiles, 2, 8, chunks, 2, 2, 4, 4, 4)
    codes = codes.transpose(0, 3, 4, 6, 2, 7, 8, 1, 5)  # tile, chunk, half, k, r, t, b, +8 rows, +64 columns
    whole = codes[..., 0, 0] | codes[..., 1, 0] << 2 | codes[..., 0, 1] << 4 | codes[..., 1, 1] << 6
    out[:, :, :1024] = _in_lanes(whole.reshape(tiles, chunks, 8, 32, 4))
    numbers = _padded(two.scale_codes, start, stop, chunks * 16).reshape(tiles, 2, 8, chunks, 4, 4)
    numbers = numbers.transpose(0, 3, 2, 5, 1, 4).astype(np.uint32)  # tile, chunk, r, t, +8 rows, j
    words = np.zeros((tiles, chunks, 8, 4), np.uint32)
    zeros = _padded(two.zeros, start, stop, chunks * 16).reshape(tiles, 2, 8, chunks, 4, 4)
    zeros = zeros.transpose(0, 3, 2, 5, 1, 4).astype(np.uint16)
    halves = np.zeros((tiles, chunks, 8, 4), np.uint16)
    for h in range(2):
        for j in range(4):
            words |= numbers[..., h, j] << np.uint32(16 * h + 4 * j)
            halves |= zeros[..., h, j] << np.uint16(4 * j + 2 * h)
    out[:, :, 1024:1152] = words.reshape(tiles, chunks, 32).view(np.uint8)
    out[:, :, 1152:1216] = halves.reshape(tiles, chunks, 32).view(np.uint8)
    out[:, :, 1216:1248] = _by_place(two.units[start:stop], chunks).view(np.uint8)
    out[:, :, 1248:1264] = _by_place(two.unit_zeros[start:stop], chunks)


def _four_units(four: FourBit, start: int, stop: int, out: Bytes) -> None:
    tiles, chunks = out.shape[:2]
    codes = _padded(four.codes, start, stop, chunks * FOUR_COLUMNS).reshape(tiles, 2, 8, chunks, 8, 4, 4)
    codes = codes.transpose(0, 3, 4, 2, 5, 6, 1)  # tile, chunk, word, r, t, b, +8 rows
    whole = codes[..., 0] | codes[..., 1] << 4
    out[:, :, :1024] = _in_lanes(whole.reshape(tiles, chunks, 8, 32, 4))
    scales = _padded(four.scales, start, stop, chunks).reshape(tiles, 2, 8, chunks).transpose(0, 3, 2, 1)
    out[:, :, 1024:1056] = np.ascontiguousarray(scales).reshape(tiles, chunks, 16).view(np.uint8)
    zeros = _padded(four.zeros, start, stop, chunks).reshape(tiles, 2, 8, chunks).transpose(0, 3, 2, 1)
    out[:, :, 1056:1064] = zeros[..., 0] | zeros[..., 1] << 4


def _padded(array: Array, start: int, stop: int, width: int) -> Array:
    """Rows of some tiles, with zeros beyond the matrix."""
    part = array[start * ROWS : stop * ROWS]
    full = np.zeros(((stop - start) * ROWS, width), part.dtype)
    full[: part.shape[0], : part.shape[1]] = part
    return full


def _in_lanes(whole: Array) -> Array:
    """(tiles, chunks, 8 words, lane, byte) as [half][lane][4 words] bytes."""
    tiles, chunks = whole.shape[:2]
    parts = whole.reshape(tiles, chunks, 2, 4, 32, 4).transpose(0, 1, 2, 4, 3, 5)
    return np.ascontiguousarray(parts).reshape(tiles, chunks, 1024)


def _by_place(numbers: Array, chunks: int) -> Array:
    """(tiles, G) as (tiles, chunks, 16) in the order [t][j]."""
    full = np.zeros((numbers.shape[0], chunks * 16), numbers.dtype)
    full[:, : numbers.shape[1]] = numbers
    parts = full.reshape(-1, chunks, 4, 4).transpose(0, 1, 3, 2)
    return np.ascontiguousarray(parts).reshape(-1, chunks, 16)
