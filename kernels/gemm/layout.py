"""Codes in the order in which tensor cores take them as numbers, and the numbers that turn codes into values.

A segment is cut into *blocks* of 64 rows and 64 columns, the share of four warps: 32 codes a thread, eight for each of
four 16 x 16 matrices (rows 2 r and 2 r + 1, which the tensor cores call r and r + 8, so that a thread has neighbours
of y; columns 2 t, 2 t + 1 and the same + 8, for lane 4 r + t). A code is cut into
*fields* of 8, 4, 3, 2 or 1 bits, so that 5 bits take 5 bits of memory::

    codes    [row block][column block][warp][field][lane][words of the field]
    numbers  [row block][set][warp][place][row r of 8][number][2 r, 2 r + 1]

A word of a field holds pairs: code i of the lower half and of the upper half are neighbouring columns. Of 3 bits, three
words hold five pairs each, and the bits that are left, one of each half, are the last pair. Where values are looked up
(tables; bcq of 2 to 4 planes and groups of 64 and more), a word holds eight nibbles that choose a value: pairs 4 i and
4 i + 2, then 4 i + 1 and 4 i + 3. Of 4 bits the nibble has three; the top bit of number j of the first four is that of
byte j, of the other four the bit 4 below it, and for bcq a minus, with the other bits inverted. Of 3 bits the fourth
word's bits are the top bits of the nibbles of three; of 2 bits a word holds two in each nibble. A *set* is what
the columns of a block need: the numbers of their group, or of 2 or 4 *places* where groups have 32 or 16 columns.

Numbers are in the type of x, float16 or bfloat16. Every row is scaled by a power of two so that they fit; the product
is multiplied by it at the end (``row_scale``). A word holds a number of two rows:

- affine, float16: a code in the last bits of a word is a subnormal number, 2^-24 times the code. So a value is one
  multiplication with ``2^24 scale`` and one addition of ``-scale * zero``: one instruction for two values.
- affine, bfloat16, which has too few bits for that: ``scale`` and ``128 + zero``, an integer, which is taken off
  exactly; a third number is what is left of a zero that is no integer.
- bcq: the scales of the planes, then the bias. Where values are looked up, their sums instead, for every code of up to
  three bits, as low bytes and high bytes of each row; the bias is in them, but of 4 bits, whose first plane is a plus
  in the sums, it follows in a word for two rows.
- table: ``scale``, of bytes 2^24 times as large; the table is part of the kernel.

`pack` makes both.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bcqfmt.container.dtypes import float64_of, round_to
from bcqfmt.kernels.operands import Operand, OperandSegment

__all__ = ["BASE", "SIDE", "GemmLayout", "group_for", "layout_of", "obstacle"]

SIDE = 64  # rows and columns of a block
BASE, _BASE_BITS = 128, 7  # a bfloat16, and how many of its last bits can hold a code
_LARGEST = 2.0**14  # of a table whose values, times a scale below 1, float16 holds
_FIELDS = {1: (1,), 2: (2,), 3: (3,), 4: (4,), 5: (4, 1), 6: (4, 2), 7: (4, 2, 1), 8: (8,)}


@dataclass(frozen=True, slots=True)
class GemmLayout:
    """How one segment is laid out. ``formula``: "bcq", "affine" or "table"; ``rest``: zeros are no integers."""

    bits: int
    width: int
    group_size: int
    formula: str
    number: str  # F16 or BF16
    rest: bool = False
    table: tuple[float, ...] = ()

    @property
    def blocks(self) -> int:
        """Blocks of a row; an even number, so that two can be taken at a time."""
        return -(-self.width // (2 * SIDE)) * 2

    @property
    def fields(self) -> tuple[int, ...]:
        """Widths of the fields of a code, the most significant first."""
        if self.looked_up:
            return (self.bits,)
        return (1,) * self.bits if self.formula == "bcq" else _FIELDS[self.bits]

    @property
    def looked_up(self) -> bool:
        """Whether codes are stored as selectors of `look_up`; short groups would need too many tables."""
        return self.formula == "table" or (self.formula == "bcq" and 2 <= self.bits <= 4 and self.group_size >= SIDE)

    @property
    def tabled(self) -> bool:
        """Whether the numbers of a row and a group are a table of sums of its scales."""
        return self.looked_up and self.formula == "bcq"

    @property
    def in_bytes(self) -> bool:
        """Whether a table has integers of a byte, and float16 is what they become."""
        held = bool(self.table) and all(value in range(-128, 128) for value in self.table)
        return held and self.number == "F16"

    @property
    def places(self) -> int:
        """Groups side by side in a block."""
        return max(1, SIDE // self.group_size)

    @property
    def sharing(self) -> int:
        """Neighbouring blocks that have the same numbers."""
        return max(1, self.group_size // SIDE)

    @property
    def sets(self) -> int:
        """Sets of a row block."""
        return -(-self.blocks // self.sharing)

    @property
    def numbers(self) -> int:
        """Numbers of a row and a group."""
        return {"bcq": self.bits + 1, "table": 1, "affine": 3 if self.rest else 2}[self.formula]

    @property
    def code_bytes(self) -> int:
        """Bytes of the codes of a block."""
        return SIDE * SIDE // 8 * self.bits

    @property
    def place_bytes(self) -> int:
        """Bytes of the numbers of 16 rows and a group."""
        if self.tabled:
            return 2 * 16 * ((1 << min(self.bits, 3)) + (self.bits == 4))
        return 2 * 16 * self.numbers

    @property
    def set_bytes(self) -> int:
        """Bytes of a set."""
        return 4 * self.place_bytes * self.places


def group_for(width: int, group_size: int) -> int | None:
    """The group size of a layout: 16, 32, a multiple of 64, or the padded row; None for others."""
    g = group_size if group_size < width else -(-width // SIDE) * SIDE
    return g if g in (16, 32) or g % SIDE == 0 else None


def obstacle(operand: Operand, number: str) -> str:
    """Why an operand has no layout for x of type ``number``; empty where it has one."""
    if number not in ("F16", "BF16"):
        return f"x is {number}: `gemm` multiplies F16 and BF16"
    if operand.shape[1] % 8 or any(segment.start % 8 for segment in operand.segments):
        return "columns of the matrix, or of a segment, that are not a multiple of 8"
    for k, segment in enumerate(operand.segments):
        if group_for(segment.width, segment.group_size) is None:
            return f"segment {k} has groups of {segment.group_size} columns: not 16, 32, a multiple of 64 or whole rows"
        if segment.formula == "table" and segment.bits != 4:
            return f"segment {k} has a table of {1 << segment.bits} numbers: not of 16"
        for value in map(float, segment.second) if segment.formula == "table" else ():
            if abs(value) > _LARGEST or _rounded(value, number) != value:
                return f"segment {k} has a table with {value:.7g}: {number} numbers up to {_LARGEST:g} are looked up"
        if segment.formula not in ("bcq", "table") and number == "BF16" and segment.bits > _BASE_BITS:
            return f"segment {k} has codes of {segment.bits} bits: BF16 holds {_BASE_BITS}"
    replaced = operand.outliers is not None and operand.outliers.mode == "replace" and operand.outliers.count
    if replaced and any(segment.formula == "table" for segment in operand.segments):
        return "outliers that replace values of a table"
    return ""


def layout_of(segment: OperandSegment, number: str) -> GemmLayout:
    """The layout of a segment of an operand that has no :func:`obstacle`, for x of type ``number``."""
    g = group_for(segment.width, segment.group_size)
    assert g is not None
    if segment.formula == "table":
        table = tuple(map(float, segment.second))
        return GemmLayout(segment.bits, segment.width, g, "table", number, table=table)
    formula = "bcq" if segment.formula == "bcq" else "affine"
    rest = number == "BF16" and segment.formula not in ("bcq", "affine")
    return GemmLayout(segment.bits, segment.width, g, formula, number, rest)


def _rounded(value: float, number: str) -> float:
    """To float16 or bfloat16."""
    return float(float64_of(round_to(np.array([value]), number))[0])
