"""A weight laid out for the CPU: planes as they are stored, numbers in the order in which a kernel reads them.

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

from .machine import dot

LANES = 16  # rows of a tile of the table kernel
WORDS = 4  # words of a plane that the dot kernel takes at a time
Array = npt.NDArray[Any]


@dataclass(frozen=True, kw_only=True, eq=False)
class PlaneSegment:
    """A segment for a kernel that reads planes.

    ``planes`` (bits * rows * words) uint32, not copied; ``start`` and ``width`` in stored columns; ``pieces`` groups in
    a word, ``span`` words in a group (one of the two is 1); ``numbers`` float32, flat, in the order of `lut` or of
    `dot_loops`, which has ``per`` of a kind side by side (0: for `lut`). ``groups`` includes those that only have
    padding. ``table``: (16) what the codes stand for, (0) if they are numbers themselves.
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
    per: int
    table: npt.NDArray[np.int8]


def obstacle(operand: Operand) -> str:
    """Why no product can be made from the planes of a weight; empty when one can."""
    for k, segment in enumerate(operand.segments):
        g = segment.group_size
        if segment.formula == "table" and not (dot().looks_up_bytes and _table(segment)[0].size):
            return f"segment {k} has a table: its values are no sums over planes"
        if segment.groups > 1 and g % 32 and g not in (8, 16):
            return f"segment {k} has groups of {g} columns: neither 8, 16, whole words nor whole rows"
        with np.errstate(over="ignore", invalid="ignore"):
            numbers = *_around_middle(segment), *_linear(segment)
            if not all(np.isfinite(number.astype(np.float32)).all() for number in numbers):
                return f"segment {k} has numbers that are not finite in float32"
    try:
        assert operand.outliers is None or operand.outliers.added is not None
    except BcqError:
        return "outliers lie too far from what they replace"
    return ""


def plane_segment(segment: OperandSegment, rows: int) -> PlaneSegment:
    """A segment of a weight that has no :func:`obstacle`, for the table kernel or the dot kernel.

    A look-up takes one plane, a dot product all of them if they have one scale, but only one group.
    """
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
    by_plane, per = scale.ndim == 3, 0
    most = dot().lookup_planes
    by_lookups = most and segment.formula != "table" and (by_plane or pieces > 1 or segment.bits <= most)
    if by_lookups:
        numbers = _stacked(scale, z)
        padded = np.zeros((-(-rows // LANES) * LANES, groups, numbers.shape[2]), np.float32)
        padded[:rows, : segment.groups] = numbers
        ordered = padded.reshape(-1, LANES, groups, numbers.shape[2]).transpose(0, 2, 3, 1)
    else:
        places, tile = _places(words, pieces, span, groups), dot().tile
        numbers, per = _stacked(*_around_middle(segment)), places.shape[1]
        padded = np.zeros((-(-rows // tile) * tile, int(places.max()) + 1, numbers.shape[2]), np.float32)
        padded[:rows, : segment.groups] = numbers
        ordered = padded[:, places].reshape(-1, dot().rows, len(places), per, numbers.shape[2]).transpose(0, 2, 4, 1, 3)
    laid = aligned(ordered.size, np.float32)
    laid.reshape(ordered.shape)[...] = ordered
    return PlaneSegment(
        planes=segment.planes.reshape(-1),
        start=segment.start,
        width=segment.width,
        words=words,
        bits=segment.bits,
        pieces=pieces,
        span=span,
        groups=groups,
        by_plane=by_plane,
        numbers=laid,
        per=per,
        table=_table(segment)[0],
    )


def _table(segment: OperandSegment) -> tuple[npt.NDArray[np.int8], float]:
    """The table of a segment as sixteen bytes, and the power of two they are multiples of; none if there is no such."""
    levels = float64_of(segment.second) if segment.formula == "table" and 2 <= segment.bits <= 4 else np.empty(0)
    unit = 2.0 ** (int(np.frexp(levels)[1].max(initial=0)) - 7)
    found = np.pad(levels / unit, (0, -levels.size % 16))
    return (found if (found == np.rint(found)).all() else np.empty(0)).astype(np.int8), unit


def _places(words: int, pieces: int, span: int, groups: int) -> npt.NDArray[np.int64]:
    """(slots, per): the group of every number that the dot kernel reads."""
    if groups == 1 or span % WORDS == 0:
        return np.arange(groups)[:, None]
    chunks = -(-words // WORDS)
    if span == 2:
        return np.arange(chunks * 2).reshape(chunks, 2)
    word = np.arange(chunks * WORDS).reshape(chunks, 1, WORDS)
    return (word // span * pieces + np.arange(pieces)[:, None]).reshape(chunks * pieces, WORDS)


def _stacked(scale: Array, z: Array) -> Array:
    """(out, G, kinds): the scales, then z."""
    return np.concatenate([scale if scale.ndim == 3 else scale[None], z[None]]).transpose(1, 2, 0)


def _linear(segment: OperandSegment) -> tuple[Array, Array]:
    """Scale (out, G) of the sum ``2^(q-1) b_0 + ... + b_(q-1)`` of signs, or one per plane (q, out, G), and z (out, G).

    float64: a code is half that sum plus half of its largest value. float-zero is taken without the rounding inside it.
    Of a table the scale of its bytes, and zeros.
    """
    first, second = float64_of(segment.first), float64_of(segment.second)
    if segment.formula == "bcq":
        return first, second
    if segment.formula == "table":
        return first * _table(segment)[1], np.zeros_like(first)
    middle = (2.0**segment.bits - 1) / 2
    with np.errstate(over="ignore", invalid="ignore"):
        return first / 2, first * middle + second if segment.formula == "offset" else first * (middle - second)


def _around_middle(segment: OperandSegment) -> tuple[Array, Array]:
    """The same numbers for codes as `dots` has them: minus 2^(bits - 1), single bits as 0 and -1, or 1 without sign."""
    scale, z = _linear(segment)
    if segment.formula == "table":
        return scale, z
    if scale.ndim == 3 or segment.bits == 1:
        return (2 if dot().unsigned else -2) * scale, z - (scale.sum(0) if scale.ndim == 3 else scale)
    return 2 * scale, z + scale
