"""Planes and numbers of a weight in the order of `layout`, made with torch on the device where they are."""

from __future__ import annotations

import importlib
from typing import Any

from .layout import BASE, SIDE, GemmLayout

__all__ = ["pack_codes", "pack_numbers"]

torch: Any = importlib.import_module("torch")  # found at run time: kernels name no torch
Tensor = Any

_KINDS = {"F16": torch.float16, "BF16": torch.bfloat16}
_ZEROS = (-64, 127)  # zeros that are exact next to the base
_ROWS = 16 * SIDE  # rows that are made at a time


def pack_codes(layout: GemmLayout, planes: Tensor) -> Tensor:
    """Words, flat int32, of ``planes`` (p, out, words) int32, plane 0 the most significant; padded with zeros."""
    parts, plane = [], 0
    pack = _selectors if layout.looked_up else _words
    for field in layout.fields:
        own = planes[plane : plane + field]
        parts.append(torch.cat([pack(layout, own[:, at : at + _ROWS]) for at in range(0, planes.shape[1], _ROWS)]))
        plane += field
    return torch.cat(parts, 3).reshape(-1)


def _codes(layout: GemmLayout, planes: Tensor) -> Tensor:
    """(row blocks, blocks, 128 threads, 16 pairs, 2) int32, codes of some planes."""
    field, rows, words = planes.shape
    tiles, blocks = -(-rows // SIDE), layout.blocks
    full = planes.new_zeros(field, tiles * SIDE, 2 * blocks)
    full[:, :rows, :words] = planes
    places = torch.arange(32, dtype=torch.int32, device=planes.device)
    codes = planes.new_zeros(tiles * SIDE, 2 * blocks, 32)
    for plane in full:
        codes = codes * 2 + (plane[:, :, None] >> places & 1)
    # rows: tile, warp, r, first or second; columns: block, matrix, t or t + 8, t, neighbour
    parts = codes.reshape(tiles, 4, 8, 2, blocks, 4, 2, 4, 2).permute(0, 4, 1, 2, 7, 5, 6, 3, 8)
    return parts.reshape(tiles, blocks, 128, 16, 2)


def _words(layout: GemmLayout, planes: Tensor) -> Tensor:
    """(row blocks, blocks, 4 warps, words) int32 of the planes of one field."""
    parts, field = _codes(layout, planes), len(planes)
    tiles, blocks = parts.shape[:2]
    per = 16 // field
    made = parts.new_zeros(tiles, blocks, 128, field)
    for pair in range(field * per):
        for half in range(2):
            made[..., pair // per] |= parts[..., pair, half] << (16 * half + field * (pair % per))
    if field == 3:  # the last pair, a bit in each word
        for bit in range(3):
            for half in range(2):
                made[..., bit] |= (parts[..., 15, half] >> bit & 1) << (16 * half + 15)
    if field == 8:  # 16 bytes of every lane, then the other 16
        made = made.reshape(tiles, blocks, 4, 32, 2, 4).transpose(3, 4)
    return made.reshape(tiles, blocks, 4, -1)


def _selectors(layout: GemmLayout, planes: Tensor) -> Tensor:
    """The same for codes that choose a value."""
    parts, q = _codes(layout, planes), layout.bits
    tiles, blocks = parts.shape[:2]
    # words of eight: row 2 r or 2 r + 1, columns t or t + 8, neighbour
    codes = parts.reshape(tiles, blocks, 128, 4, 2, 2, 2).transpose(4, 5).reshape(tiles, blocks, 128, 4, 8)
    top = codes >> 3 & 1
    if layout.formula == "bcq" and q == 4:
        codes, top = torch.where(top == 1, codes, ~codes), 1 - top  # 1 is a minus
    made = parts.new_zeros(tiles, blocks, 128, q)
    for n in range(8):
        code = codes[..., n] & 2 ** min(q, 3) - 1
        for word in range(4):
            own = code[..., word]
            if q == 2:
                made[..., word // 2] |= own << (4 * n + 2 * (word % 2))
            elif word < q:
                made[..., word] |= own << 4 * n
            else:  # the fourth of 3 bits
                for bit in range(3):
                    made[..., bit] |= (own >> bit & 1) << (4 * n + 3)
            if q == 4:
                made[..., word] |= top[..., word, n] << (8 * n + 7 if n < 4 else 8 * (n - 4) + 3)
    return made.reshape(tiles, blocks, 4, -1)


def pack_numbers(layout: GemmLayout, first: Tensor, second: Tensor, *, offset: bool = False) -> tuple[Tensor, Tensor]:
    """Words, flat int32, and ``row_scale`` (row blocks x 64) float32, of numbers as `operands.OperandSegment` has them.

    The scales are not finite where any number is not.
    ``offset``: ``second`` is added to the product of scale and code, not subtracted from the code.
    """
    first, second = first.double(), torch.zeros_like(first) if layout.formula == "table" else second
    second = second.double()
    largest = first.abs().reshape(-1, *second.shape).amax((0, 2))
    # the largest scale of a row becomes 2^-10 .. 2^-9, for bfloat16 2^-4 .. 2^-3, for tables of 16-bit numbers 1/2 .. 1
    above = 0 if layout.table and not layout.in_bytes else 9 if layout.number == "F16" else 3
    unit = torch.ldexp(torch.ones_like(largest), torch.frexp(largest)[1] + above)[:, None]
    first = first / unit
    rows, groups = second.shape
    if layout.tabled:
        numbers = _sums(first, second / unit)
    elif layout.formula == "bcq":
        numbers = [*first, second / unit]
    elif layout.formula == "table":
        numbers = [first * 2.0**24 if layout.in_bytes else first]
    elif layout.number == "F16":
        numbers = [first * 2.0**24, second / unit if offset else -first * second]
    else:
        used = torch.where(first == 0, 1.0, first)
        zero = -second / unit / used if offset else second
        whole = torch.where(first == 0, 0.0, zero.round().clip(*_ZEROS))
        rest = second / unit + first * whole if offset else first * (whole - zero)
        numbers = [first, whole + BASE, *([rest] if layout.rest else [])]
    tiles = -(-rows // SIDE)
    full = second.new_zeros(len(numbers), tiles * SIDE, layout.sets * layout.places)
    full[:, :rows, :groups] = torch.stack(numbers)[:, :, : full.shape[2]]
    pairs = full.to(_KINDS[layout.number]).reshape(-1, tiles, 4, 8, 2, layout.sets, layout.places)
    scale = unit.new_full((tiles * SIDE,), 0.0 if bool(pairs.isfinite().all()) else float("nan"))
    scale[:rows] += unit[:, 0]
    scale = scale.float()
    if not layout.tabled:
        return pairs.permute(1, 5, 2, 6, 3, 0, 4).reshape(-1).view(torch.int32), scale
    entries = 2 ** min(layout.bits, 3)
    split = pairs.view(torch.uint8).reshape(-1, tiles, 4, 8, 2, layout.sets, 2)  # the last: low or high byte
    tables, biases = split[:entries].permute(1, 5, 2, 3, 4, 6, 0), split[entries:].permute(1, 5, 2, 0, 3, 4, 6)
    parts = [part.reshape(tiles, layout.sets, 4, -1) for part in (tables, biases)]
    return torch.cat(parts, 3).reshape(-1).view(torch.int32), scale


def _sums(scales: Tensor, bias: Tensor) -> list[Tensor]:
    """The values of 2 or 3 planes for every code; of 4, those of codes from 8 on less the bias, then the bias."""
    four = len(scales) == 4
    sums = [scales[0] if four else bias]
    for scale in scales[1:] if four else scales:
        sums = [part + sign * scale for part in sums for sign in (-1, 1)]
    return [*sums, bias] if four else sums
