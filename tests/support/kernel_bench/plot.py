"""Figures of kernels as a drawing: time against bytes, both logarithmic, in SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .timing import Row

__all__ = ["plot"]

_WIDTH, _HEIGHT, _LEFT, _BOTTOM = 640, 400, 60, 45
_COLOURS = ("#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951", "#ff8ab7", "#a463f2", "#97bbf5")


def plot(rows: Sequence[Row]) -> str:
    """Points (bytes, microseconds), one colour per number of planes, and the line that memory alone would take.

    Points of weights that have no fast product are hollow.
    """
    if not rows:
        return f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{_HEIGHT}"/>\n'
    across = _axis([row.bytes / 1e6 for row in rows])
    up = _axis([row.microseconds for row in rows] + [row.floor for row in rows])

    def place(x: float, y: float) -> tuple[float, float]:
        return (
            _LEFT + (math.log10(x) - across[0]) / (across[1] - across[0]) * (_WIDTH - _LEFT - 20),
            _HEIGHT - _BOTTOM - (math.log10(y) - up[0]) / (up[1] - up[0]) * (_HEIGHT - _BOTTOM - 20),
        )

    size = f'width="{_WIDTH}" height="{_HEIGHT}"'
    drawn = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">',
        f'<rect {size} fill="white"/>',
    ]
    rate = rows[0].bytes / rows[0].floor
    ends = [place(10 ** across[0], 10 ** across[0] * 1e6 / rate), place(10 ** across[1], 10 ** across[1] * 1e6 / rate)]
    drawn.append(
        f'<path d="M{ends[0][0]:.1f} {ends[0][1]:.1f}L{ends[1][0]:.1f} {ends[1][1]:.1f}" stroke="#888" fill="none" '
        'stroke-dasharray="5 4"/>'
    )
    drawn += _grid(across, up, place)
    planes = sorted({row.bits for row in rows})
    for row in rows:
        x, y = place(row.bytes / 1e6, row.microseconds)
        colour = _COLOURS[planes.index(row.bits) % len(_COLOURS)]
        name = f"{row.kernel} {row.rows} x {row.columns} q={row.bits} g={row.group_size}: {row.microseconds:.2f} us"
        drawn.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" {_paint(row, colour)}><title>{name}</title></circle>')
    for i, bits in enumerate(planes):
        drawn.append(f'<circle cx="{_LEFT + 15}" cy="{30 + 17 * i}" r="4" fill="{_COLOURS[i % len(_COLOURS)]}"/>')
        drawn.append(f'<text x="{_LEFT + 25}" y="{34 + 17 * i}">q = {bits}</text>')
    if any(_slow(row) for row in rows):
        below = 34 + 17 * len(planes)
        drawn.append(f'<circle cx="{_LEFT + 15}" cy="{below - 4}" r="4" fill="white" stroke="#555"/>')
        drawn.append(f'<text x="{_LEFT + 25}" y="{below}">no fast product</text>')
    drawn.append(f'<text x="{_WIDTH // 2}" y="{_HEIGHT - 8}" text-anchor="middle">megabytes that have to move</text>')
    drawn.append(f'<text transform="translate(14 {_HEIGHT // 2}) rotate(-90)" text-anchor="middle">microseconds</text>')
    return "\n".join([*drawn, "</svg>"]) + "\n"


def _slow(row: Row) -> bool:
    return row.kernel.startswith(("look-up", "dequantize,"))


def _paint(row: Row, colour: str) -> str:
    return f'fill="white" stroke="{colour}" stroke-width="2"' if _slow(row) else f'fill="{colour}"'


def _axis(values: list[float]) -> tuple[float, float]:
    low, high = math.log10(min(values)) - 0.08, math.log10(max(values)) + 0.08
    return low, high


def _grid(across: tuple[float, float], up: tuple[float, float], place: object) -> list[str]:
    assert callable(place)
    found = []
    for exponent in range(-1, 5):
        for digit in (1, 2, 5):
            value = digit * 10.0**exponent
            if across[0] <= math.log10(value) <= across[1]:
                x, _ = place(value, 10 ** up[0])
                found.append(
                    f'<path d="M{x:.1f} 20V{_HEIGHT - _BOTTOM}" stroke="#ddd"/>'
                    f'<text x="{x:.1f}" y="{_HEIGHT - _BOTTOM + 16}" text-anchor="middle">{value:g}</text>'
                )
            if up[0] <= math.log10(value) <= up[1]:
                _, y = place(10 ** across[0], value)
                found.append(
                    f'<path d="M{_LEFT} {y:.1f}H{_WIDTH - 20}" stroke="#ddd"/>'
                    f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>'
                )
    return found
