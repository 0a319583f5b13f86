"""Codes in GGUF blocks to planes ``uint32 [bits, N, K/32]`` and back, straight from the blocks and into them."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import as_strided

from bcqfmt.compiled.loops import compiled

from .arrays import Array, Codes, Words
from .straight import UNITS, container, straight


class Field(NamedTuple):
    """A field of ``size`` bytes from byte ``offset`` on of every block of ``block`` bytes.

    ``order``: how codes lie in its bytes, one of `straight.ORDERS`; ``flip``: the highest bit is stored inverted.
    """

    order: str
    offset: int
    size: int
    block: int
    flip: bool = False


def field_to_planes(rows: Codes, field: Field, planes: Words, proof: list[bool] | None = None) -> None:
    """Fill ``planes`` from a field of all blocks of ``rows`` uint8 [N, row bytes]; each plane is contiguous.

    ``proof``: gets whether the planes give back the field.
    """
    wrong = _run(np.ascontiguousarray(rows).reshape(-1), field, planes, True, proof is not None)
    if proof is not None:
        proof.append(not wrong)


def planes_to_field(planes: Array, field: Field, rows: Codes) -> None:
    """The inverse: fill the field of all blocks of ``rows``, contiguous."""
    words = planes if planes[0].flags.c_contiguous else np.ascontiguousarray(planes)
    _run(rows.reshape(-1), field, np.require(words.view(np.uint32), requirements="A"), False)


def field_to_numbers(rows: Codes, field: Field, numbers: Array, flip: int = 0, proof: list[bool] | None = None) -> None:
    """Fill ``numbers``, contiguous, from a field of 1, 2 or 4 bytes, one for every block of ``rows``.

    ``flip``: bits that are stored inverted; ``proof``: see `field_to_planes`.
    """
    kind = np.dtype(f"u{field.size}")
    stored = np.ascontiguousarray(rows).view(kind)[:, field.offset // field.size :: field.block // field.size]
    good = _gather(stored, numbers.view(kind), kind.type(flip))
    if proof is not None:
        proof.append(good)


@compiled
def _gather(stored: Array, numbers: Array, flip: Any) -> Any:
    """Copy and flip; whether the numbers give back the stored ones."""
    good = True
    for r in range(len(numbers)):
        for i in range(numbers.shape[1]):
            numbers[r, i] = stored[r, i] ^ flip
        for i in range(numbers.shape[1]):
            good &= numbers[r, i] ^ flip == stored[r, i]
    return good


def _run(blocks: Codes, field: Field, planes: Words, to_planes: bool, proved: bool = False) -> int:
    program = container(field.order)
    each = field.size // (4 * program.words)
    units = blocks.size // field.block * each
    if 0 < units < UNITS:
        return _run_few(blocks, field, planes, to_planes, proved)
    plane = planes.strides[0] // 4  # words from one plane to the next: these may be some rows of larger ones
    flat = as_strided(planes, (plane * (len(planes) - 1) + planes[0].size,), (4,))
    about = plane, field.offset, field.block, each.bit_length() - 1
    return straight(field.order, field.flip, to_planes, proved)(blocks, flat, *about, units)


def _run_few(blocks: Codes, field: Field, planes: Words, to_planes: bool, proved: bool) -> int:
    """The same where there are fewer units than are worked on at once: with empty blocks behind them."""
    more = np.zeros(UNITS * field.block, np.uint8)
    wide = np.zeros((len(planes), 1, planes[0].size * UNITS * field.block // blocks.size), np.uint32)
    few = wide[:, 0, : planes[0].size]
    more[: blocks.size], few[...] = blocks, planes.reshape(few.shape)
    wrong = _run(more, field, wide, to_planes, proved)
    if to_planes:
        planes[...] = few.reshape(planes.shape)
    else:
        blocks[...] = more[: blocks.size]
    return wrong
