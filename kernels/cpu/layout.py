"""A weight laid out for the CPU: planes as they are stored, numbers in the order in which the table kernel reads them.

Planes are used where they are. Only the numbers of groups are rearranged, to float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from bcqfmt.compiled.threads import aligned
from bcqfmt.container.dtypes import float64_of
from bcqfmt.errors import BcqError
from bcqfmt.kernels.operands import Operand, OperandSegment
from bcqfmt.weight.packing import words_for

__all__ = ["LANES", "TableSegment", "obstacle", "table_segments"]

LANES = 16  # rows of a tile
Array = npt.NDArray[Any]


@dataclass(frozen=True, kw_only=True, eq=False)
class TableSegment:
    """A segment for the table kernel.

    ``planes`` (bits * rows * words) uint32, not copied; ``start`` and ``width`` in stored columns; ``pieces`` groups in
    a word, ``span`` words in a group (one of the two is 1); ``numbers`` float32, flat, in the order of `lut`;
    ``groups`` includes those that only have padding.
    """

    planes: npt.NDArray[np.uint32]
    start: int
    width: int
    words: int
    bits: int
    pieces: int
    span: int
    groups: int
    by_plane: bool
    numbers: npt.NDArray[np.float32]


def obstacle(operand: Operand) -> str:
    """Why the table kernel cannot take a weight; empty when it can."""
    for k, segment in enumerate(operand.segments):
        g = segment.group_size
        if segment.formula == "table":
            return f"segment {k} has a table: its values are no sums over planes"
        if segment.groups > 1 and g % 32 and g not in (8, 16):
            return f"segment {k} has groups of {g} columns: neither 8, 16, whole words nor whole rows"
        scale, z = _linear(segment)
        with np.errstate(over="ignore", invalid="ignore"):
            if not (np.isfinite(scale.astype(np.float32)).all() and np.isfinite(z.astype(np.float32)).all()):
                return f"segment {k} has numbers that are not finite in float32"
    try:
        assert operand.outliers is None or operand.outliers.added is not None
    except BcqError:
        return "outliers lie too far from what they replace"
    return ""


def table_segments(operand: Operand) -> tuple[TableSegment, ...]:
    """The segments of a weight that has no :func:`obstacle`."""
    return tuple(_segment(segment, operand.rows) for segment in operand.segments)


def _segment(segment: OperandSegment, rows: int) -> TableSegment:
    words = words_for(segment.width, 1)
    pieces = span = 1
    if segment.groups == 1:
        span, groups = words, 1
    elif segment.group_size % 32:
        pieces = 32 // segment.group_size
        groups = words * pieces
    else:
        span, groups = segment.group_size // 32, segment.groups
    scale, z = _linear(segment)
    numbers = np.concatenate([scale if scale.ndim == 3 else scale[None], z[None]])
    tiles = -(-rows // LANES)
    padded = np.zeros((tiles * LANES, groups, numbers.shape[0]), np.float32)
    padded[:rows, : segment.groups] = numbers.transpose(1, 2, 0)
    laid = aligned(padded.size, np.float32)
    laid.reshape(tiles, groups, numbers.shape[0], LANES)[...] = padded.reshape(
        tiles, LANES, groups, numbers.shape[0]
    ).transpose(0, 2, 3, 1)
    return TableSegment(
        planes=segment.planes.reshape(-1),
        start=segment.start,
        width=segment.width,
        words=words,
        bits=segment.bits,
        pieces=pieces,
        span=span,
        groups=groups,
        by_plane=scale.ndim == 3,
        numbers=laid,
    )


def _linear(segment: OperandSegment) -> tuple[Array, Array]:
    """Scale (out, G) of the sum ``2^(q-1) b_0 + ... + b_(q-1)`` of signs, or one per plane (q, out, G), and z (out, G).

    float64: a code is half that sum plus half of its largest value. float-zero is taken without the rounding inside it.
    """
    first, second = float64_of(segment.first), float64_of(segment.second)
    if segment.formula == "bcq":
        return first, second
    middle = (2.0**segment.bits - 1) / 2
    with np.errstate(over="ignore", invalid="ignore"):
        return first / 2, first * middle + second if segment.formula == "offset" else first * (middle - second)
