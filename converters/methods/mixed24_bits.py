"""Average bits of 2/4-bit weights as the paper counts them, and the column groups that get four bits."""

from __future__ import annotations

import math
from typing import NamedTuple

__all__ = ["Split", "equation_6", "equation_10", "outlier_bits", "split"]


def equation_6(bits: int, group_size: int, scale_bits: int | None = None, rows: int = 16) -> float:
    """Bits per weight of a uniform group: codes, zero and a 16-bit scale, or a second-order scale of ``scale_bits``.

    ICCAD'24 equation 6: N + (N + 16) / g1, and N + (N + N_s) / g1 + (N_s + 16) / (g1 g2).
    """
    if scale_bits is None:
        return bits + (bits + 16) / group_size
    return bits + (bits + scale_bits) / group_size + (scale_bits + 16) / (group_size * rows)


def equation_10(four_bit_ratio: float, group_size: int = 16, rows: int = 16, scale_bits: int = 4) -> float:
    """Bits per weight of the 2/4-bit mix, ICCAD'24 equation 10: scales of the 4-bit part are not counted."""
    return (1 - four_bit_ratio) * equation_6(2, group_size, scale_bits, rows) + four_bit_ratio * 4


def outlier_bits(fraction: float, columns: int) -> float:
    """What CSR outliers add: 32 bits for each, and a 32-bit pointer a row; nothing when there are none."""
    return 32 * fraction + 32 / columns if fraction else 0.0


class Split(NamedTuple):
    """groups: whole groups of a row; four: how many of them get 4 bits; tail: columns after the last whole group."""

    groups: int
    four: int
    tail: int


def split(columns: int, group_size: int, ratio: float) -> Split:
    """How many groups get four bits: the nearest number to ``ratio``, at least one of each kind when 0 < ratio < 1.

    Columns that fill no group are always 4-bit: only the last group of the last segment may be short.
    """
    groups, tail = divmod(columns, group_size)
    four = math.floor(ratio * groups + 0.5)
    if 0 < ratio < 1 and groups > 1:
        four = min(max(four, 1), groups - 1)
    return Split(groups, four, tail)
