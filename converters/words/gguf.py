"""Codes in GGUF blocks to planes ``uint32 [bits, N, K/32]`` and back, straight from the blocks and into them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import as_strided

from .arrays import Array, Codes, Words
from .straight import UNITS, container, straight

__all__ = ["Field", "field_to_planes", "planes_to_field"]


class Field(NamedTuple):
    """A field of ``size`` bytes from byte ``offset`` on of every block of ``block`` bytes.

    ``order``: how codes lie in its bytes, one of `straight.ORDERS`; ``flip``: the highest bit is stored inverted.
    """

    order: str
    offset: int
    size: int
    block: int
    flip: bool = False


def field_to_planes(rows: Codes, field: Field, planes: Words) -> None:
    """Fill ``planes`` from a field of all blocks of ``rows`` uint8 [N, row bytes]; each plane is contiguous."""
    _run(np.ascontiguousarray(rows).reshape(-1), field, planes, True)


def planes_to_field(planes: Array, field: Field, rows: Codes) -> None:
    """The inverse: fill the field of all blocks of ``rows``, contiguous."""
    words = planes if planes[0].flags.c_contiguous else np.ascontiguousarray(planes)
    _run(rows.reshape(-1), field, np.require(words.view(np.uint32), requirements="A"), False)


def _run(blocks: Codes, field: Field, planes: Words, to_planes: bool) -> None:
    program = container(field.order)
    each = field.size // (4 * program.words)
    units = blocks.size // field.block * each
    if 0 < units < UNITS:
        _run_few(blocks, field, planes, to_planes)
        return
    plane = planes.strides[0] // 4  # words from one plane to the next: these may be some rows of larger ones
    flat = as_strided(planes, (plane * (len(planes) - 1) + planes[0].size,), (4,))
    about = plane, field.offset, field.block, each.bit_length() - 1
    straight(field.order, field.flip, to_planes)(blocks, flat, *about, 0, units)


def _run_few(blocks: Codes, field: Field, planes: Words, to_planes: bool) -> None:
    """The same where there are fewer units than are worked on at once: with empty blocks behind them."""
    more = np.zeros(UNITS * field.block, np.uint8)
    wide = np.zeros((len(planes), 1, planes[0].size * UNITS * field.block // blocks.size), np.uint32)
    few = wide[:, 0, : planes[0].size]
    more[: blocks.size], few[...] = blocks, planes.reshape(few.shape)
    _run(more, field, wide, to_planes)
    if to_planes:
        planes[...] = few.reshape(planes.shape)
    else:
        blocks[...] = more[: blocks.size]
