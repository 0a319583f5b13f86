"""Bit planes in the order in which tensor cores take them: which tiles, which sets of numbers, and how many bytes.

The fast product (`binary_kernel`) cuts a segment into *tiles* of 16 rows and *chunks* of 256 columns. A chunk of one
plane is 512 bytes: lane l of a warp takes 16 of them, its fragment of a 16 x 256 bit matrix::

    planes   [tile][chunk][plane][lane][4]   words: rows l // 4 and + 8, columns 32 (l % 4), then the same + 128
    numbers  [tile][set][pass][number][place][8]   pairs of numbers: rows r and r + 8 for r = 0..7

A *set* is what 128 columns need (256 where groups are multiples of 256). With groups of 64 or 32 columns a set
has 2 or 4 *places*; groups of 16 or 8 take 2 or 4 *passes* over the same bits, and the bits of their words are
reordered (:func:`in_steps`). Planes and numbers are permutations of the canonical parts, padded with zeros; numbers
keep their type.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from bcqfmt.container.dtypes import round_to
from bcqfmt.kernels.operands import OperandSegment
from bcqfmt.kernels.runtime.limits import ROWS

Array = npt.NDArray[Any]
COLUMNS = 256
# passes -> for each, where `in_steps` puts the columns of its groups
STEP_MASKS = {
    1: (0xFFFFFFFF,),
    2: (0x66666666, 0x99999999),
    4: (0x22222222, 0x44444444, 0x88888888, 0x11111111),
}
_NUMBERS = {"bcq": "bcq", "affine": "affine", "float-zero": "affine", "offset": "offset"}


@dataclass(frozen=True, slots=True)
class BitLayout:
    """How one segment is laid out. ``formula``: "bcq", "affine" (scale, zero) or "offset" (scale, offset)."""

    bits: int
    width: int
    group_size: int
    formula: str
    number: str  # F16, BF16 or F32

    @property
    def wide(self) -> bool:
        """Whether a set serves 256 columns."""
        return self.group_size % COLUMNS == 0

    @property
    def chunks(self) -> int:
        """Chunks of a tile."""
        return -(-self.width // COLUMNS)

    @property
    def span(self) -> int:
        """Columns of a set."""
        return COLUMNS if self.wide else COLUMNS // 2

    @property
    def sharing(self) -> int:
        """Neighbouring sets that have the same numbers."""
        return max(1, self.group_size // self.span)

    @property
    def sets(self) -> int:
        """Sets of a tile."""
        return -(-self.chunks * (COLUMNS // self.span) // self.sharing)

    @property
    def places(self) -> int:
        """Groups side by side in one pass over a set: 1, 2 or 4."""
        return {64: 2, 32: 4, 16: 4, 8: 4}.get(self.group_size, 1)

    @property
    def passes(self) -> int:
        """Passes over the bits of a set: 1, 2 or 4."""
        return {16: 2, 8: 4}.get(self.group_size, 1)

    @property
    def numbers(self) -> int:
        """Numbers per group and row: q scales and a bias, or a scale and a zero."""
        return self.bits + 1 if self.formula == "bcq" else 2

    @property
    def pair_words(self) -> int:
        """Words of two numbers."""
        return 2 if self.number == "F32" else 1

    @property
    def set_bytes(self) -> int:
        """Bytes of a set."""
        return self.passes * self.numbers * self.places * 8 * 4 * self.pair_words


def group_for(width: int, group_size: int) -> int | None:
    """The group size of a layout: 8, 16, 32, 64, a multiple of 128, or the padded row; None for others."""
    g = group_size if group_size < width else -(-width // COLUMNS) * COLUMNS
    return g if g in (8, 16, 32, 64) or g % 128 == 0 else None


def layout_of(segment: OperandSegment) -> BitLayout | None:
    """The layout of a segment; None for tables, and where :func:`group_for` has no group size for it."""
    g = group_for(segment.width, segment.group_size)
    if g is None or segment.formula == "table":
        return None
    numbers = [segment.first, segment.second]
    return BitLayout(segment.bits, segment.width, g, _NUMBERS[segment.formula], _narrowest(numbers))


def _narrowest(arrays: list[Array]) -> str:
    """The first of F16, BF16 and F32 that holds all numbers exactly (F32 is the type of the linear reading)."""
    exact = [array.astype(np.float64) for array in arrays]
    for name in ("F16", "BF16"):
        rounded = [round_to(array, name).astype(np.float64) for array in exact]
        if all(np.array_equal(a, b, equal_nan=True) for a, b in zip(exact, rounded, strict=True)):
            return name
    return "F32"


def in_steps(words: Any) -> Any:
    """Column 8 s + 4 h + j of every word to bit 8 j + 4 h + s + 1, the last one to bit 0: the order of short groups.

    Words are uint32 of numpy or int32 of torch. Two swaps of bits of the index, and a rotation.
    """
    swapped = (words ^ (words >> 14)) & 0x0000CCCC
    words = words ^ swapped ^ (swapped << 14)
    swapped = (words ^ (words >> 7)) & 0x00AA00AA
    words = words ^ swapped ^ (swapped << 7)
    return (words << 1) | ((words >> 31) & 1)


def pack_planes(layout: BitLayout, planes: Any) -> Any:
    """Planes (q, out, words), a torch tensor of int32, as [tile][chunk][plane][lane][4], flat, on their device."""
    q, rows, words = planes.shape
    tiles = -(-rows // ROWS)
    full = planes.new_zeros(q, tiles * ROWS, layout.chunks * 8)
    full[:, :rows, :words] = planes
    if layout.passes > 1:
        for plane in full:  # one at a time: it takes memory for three
            plane.copy_(in_steps(plane))
    parts = full.reshape(q, tiles, 2, 8, layout.chunks, 2, 4)  # q, tile, +8, row, chunk, +128, word
    return parts.permute(1, 4, 0, 3, 6, 5, 2).reshape(-1)


def pack_numbers(layout: BitLayout, first: Any, second: Any) -> Any:
    """``first`` (out, G) or (q, out, G) and ``second`` (out, G) as [tile][set][pass][number][place][8] pairs.

    Torch tensors of numbers, which the type of the layout holds or F32 rounds, on their device; the result is int32.
    """
    torch = importlib.import_module("torch")
    kind = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}[layout.number]
    stacked = torch.cat([first.reshape(-1, *second.shape).to(kind), second[None].to(kind)])
    count, rows, groups = stacked.shape
    tiles = -(-rows // ROWS)
    full = stacked.new_zeros(count, tiles * ROWS, layout.sets * layout.places * layout.passes)
    full[:, :rows, :groups] = stacked[:, :, : full.shape[2]]
    parts = full.reshape(count, tiles, 2, 8, layout.sets, layout.places, layout.passes)
    return parts.permute(1, 4, 6, 0, 5, 3, 2).reshape(-1).view(torch.int32)
