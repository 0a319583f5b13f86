"""Codes in GGUF blocks to planes ``uint32 [bits, N, K/32]`` and back, straight from the blocks and into them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from bcqfmt.compiled.threads import each_share

from .arrays import Array, Codes, Words
from .straight import UNITS, container, straight

__all__ = ["Field", "field_to_planes", "planes_to_field"]

_GRAIN = 1 << 12  # units that are worth a thread


class Field(NamedTuple):
    """A field of ``size`` bytes from byte ``offset`` on of every block of ``block`` bytes.

    ``order``: how codes lie in its bytes, one of `straight.ORDERS`; ``flip``: the highest bit is stored inverted.
    """

    order: str
    offset: int
    size: int
    block: int
    flip: bool = False


def field_to_planes(rows: Codes, field: Field, planes: Words, threads: int = 1) -> None:
    """Fill ``planes`` from a field of all blocks of ``rows`` uint8 [N, row bytes]."""
    blocks = np.ascontiguousarray(rows).reshape(-1)
    _run(blocks, field, planes.reshape(len(planes), -1), True, threads)


def planes_to_field(planes: Array, field: Field, rows: Codes, threads: int = 1) -> None:
    """The inverse: fill the field of all blocks of ``rows``, contiguous."""
    words = np.require(planes, requirements=["C", "A"]).view(np.uint32)
    _run(rows.reshape(-1), field, words.reshape(len(words), -1), False, threads)


def _run(blocks: Codes, field: Field, planes: Words, to_planes: bool, threads: int) -> None:
    program = container(field.order)
    each = field.size // (4 * program.words)
    units = blocks.size // field.block * each
    if 0 < units < UNITS:
        _run_few(blocks, field, planes, to_planes)
        return
    loop = straight(field.order, field.flip, to_planes)
    about = planes.shape[1], field.offset, field.block, each.bit_length() - 1
    each_share(lambda first, stop: loop(blocks, planes.reshape(-1), *about, first, stop), units, _GRAIN, threads)


def _run_few(blocks: Codes, field: Field, planes: Words, to_planes: bool) -> None:
    """The same where there are fewer units than are worked on at once: with empty blocks behind them."""
    more = np.zeros(UNITS * field.block, np.uint8)
    wide = np.zeros((len(planes), planes.shape[1] * UNITS * field.block // blocks.size), np.uint32)
    more[: blocks.size], wide[:, : planes.shape[1]] = blocks, planes
    _run(more, field, wide, to_planes, 1)
    if to_planes:
        planes[...] = wide[:, : planes.shape[1]]
    else:
        blocks[...] = more[: blocks.size]
