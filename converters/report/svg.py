"""Plots as SVG text: axes, points, lines, bars. No library, no script; colours follow the page's light or dark."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape as html_escape
from typing import NamedTuple

from bcqfmt.errors import escape

_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 16, 14, 44
_COLOURS = 8
_WIDTH = 760
# hues that stay apart for colour-blind readers, on white and on black
STYLE = """
.plot{--ink:#1b1f24;--soft:#6a737d;--grid:#e3e6ea;--front:#c2410c;font:12px system-ui,sans-serif}
.plot{max-width:100%;height:auto}
.plot text{fill:var(--ink)} .plot .soft{fill:var(--soft)} .plot .grid{stroke:var(--grid)}
.plot .axis{stroke:var(--soft)} .plot .front{stroke:var(--front);fill:none;stroke-width:2}
.plot .line{fill:none;stroke-width:1.2;opacity:.55}
.k0{fill:#0072b2;stroke:#0072b2}.k1{fill:#d55e00;stroke:#d55e00}.k2{fill:#009e73;stroke:#009e73}
.k3{fill:#cc79a7;stroke:#cc79a7}.k4{fill:#8f6b00;stroke:#8f6b00}.k5{fill:#b3202c;stroke:#b3202c}
.k6{fill:#6b4fbb;stroke:#6b4fbb}.k7{fill:#6a737d;stroke:#6a737d}
.plot circle,.plot rect{stroke:none} .plot path{fill:none}
@media (prefers-color-scheme:dark){.plot{--ink:#e6e9ed;--soft:#9aa4af;--grid:#30363d;--front:#fb923c}
.k0{fill:#56b4e9;stroke:#56b4e9}.k1{fill:#ff9d4d;stroke:#ff9d4d}.k2{fill:#3ddc97;stroke:#3ddc97}
.k3{fill:#e8a0c8;stroke:#e8a0c8}.k4{fill:#e6c34a;stroke:#e6c34a}.k5{fill:#ff7a85;stroke:#ff7a85}.k6{fill:#a990f0;stroke:#a990f0}
.k7{fill:#9aa4af;stroke:#9aa4af}}
"""


class Mark(NamedTuple):
    """A point and what it is."""

    x: float
    y: float
    title: str = ""


class Series(NamedTuple):
    """Points of one colour; ``joined`` by a line or not."""

    name: str
    marks: Sequence[Mark]
    joined: bool = False


class _Axis:
    """Numbers to places between ``low`` and ``high`` on the page."""

    def __init__(self, values: Sequence[float], low: float, high: float, log: bool) -> None:
        self.low, self.high = low, high
        self.log = log and all(value > 0 for value in values)
        self.whole = all(float(value).is_integer() for value in values)
        shown = [math.log10(value) if self.log else value for value in values] or [0.0]
        first, last = min(shown), max(shown)
        margin = (last - first) * 0.05 or abs(first) * 0.05 or 0.5
        self.first, self.last = first - margin, last + margin

    def at(self, value: float) -> float:
        shown = math.log10(value) if self.log else value
        return self.low + (shown - self.first) / (self.last - self.first) * (self.high - self.low)

    def ticks(self) -> list[float]:
        """Round numbers inside the range, four to nine of them."""
        if self.log and self.last - self.first > 1:
            bottom, top = max(-307, math.floor(self.first)), min(307, math.ceil(self.last))
            powers = range(bottom, top + 1, -(-(top - bottom) // 8))
            steps = [10.0**p * k for p in powers for k in ((1,) if len(powers) > 4 else (1, 2, 5))]
            return [step for step in steps if self.first <= math.log10(step) <= self.last]
        low, high = (10.0**self.first, 10.0**self.last) if self.log else (self.first, self.last)
        raw = (high - low) / 5
        size = 10.0 ** math.floor(math.log10(raw))
        step = next(size * k for k in (1, 2, 5, 10) if size * k >= raw)
        step = max(step, 1.0) if self.whole else step
        return [step * i for i in range(math.ceil(low / step), math.floor(high / step) + 1)]


def scatter(
    title: str,
    series: Sequence[Series],
    labels: tuple[str, str],
    *,
    front: Sequence[Mark] = (),
    log_y: bool = False,
    heading: bool = False,
) -> str:
    """Points of several series; ``front``: a line through the best of them; ``heading``: write the title over them."""
    width, height = _WIDTH, 340
    entries = [one.name for one in series] if len(series) > 1 or front else []
    above = 18 * -(-(len(entries) + bool(front)) // 5) + (24 if heading else 0)
    height += above
    marks = [mark for one in series for mark in one.marks]
    x = _Axis([mark.x for mark in marks], _LEFT, width - _RIGHT, False)
    y = _Axis([mark.y for mark in marks], height - _BOTTOM, _TOP + above, log_y)
    parts = [*_grid(x, y, labels, width, height)]
    if heading:
        parts.append(f'<text x="{_LEFT}" y="18" font-size="14" font-weight="600">{_text(title, 100)}</text>')
    for i, one in enumerate(series):
        colour = f"k{i % _COLOURS}"
        if one.joined and len(one.marks) > 1:
            parts.append(f'<path class="line {colour}" d="{_path(one.marks, x, y)}"/>')
        for mark in one.marks:
            tip = f"<title>{_text(mark.title)}</title>" if mark.title else ""
            parts.append(
                f'<circle class="{colour}" cx="{x.at(mark.x):.1f}" cy="{y.at(mark.y):.1f}" r="3">{tip}</circle>'
            )
    if len(front) > 1:
        parts.append(f'<path class="front" d="{_path(front, x, y)}"/>')
    parts += _legend(entries, bool(front), 38 if heading else 14)
    return _svg(title, width, height, parts)


def bars(title: str, rows: Sequence[tuple[str, float, str]]) -> str:
    """Horizontal bars: label, number, and the number as text."""
    height = 24 * len(rows) + 8
    largest = max((number for _, number, _ in rows), default=0) or 1
    parts = []
    for i, (label, number, shown) in enumerate(rows):
        top, length = 4 + 24 * i, 430 * number / largest
        parts.append(f'<text x="190" y="{top + 14}" text-anchor="end">{_text(label, 24)}</text>')
        parts.append(f'<rect class="k0" x="198" y="{top + 2}" width="{max(1.0, length):.1f}" height="16"/>')
        parts.append(f'<text class="soft" x="{206 + length:.1f}" y="{top + 14}">{_text(shown)}</text>')
    return _svg(title, _WIDTH, height, parts)


def standalone(svg: str) -> bytes:
    """A plot as a file of its own."""
    head, mark, rest = svg.partition(">")
    named = head.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
    paper = ".plot{background:#fff} @media (prefers-color-scheme:dark){.plot{background:#0d1117}}"
    return f"{named}{mark}<style>{STYLE}{paper}</style>{rest}\n".encode()


def _grid(x: _Axis, y: _Axis, labels: tuple[str, str], width: int, height: int) -> list[str]:
    floor = height - _BOTTOM
    places = [(x.at(tick), _number(tick)) for tick in x.ticks()]
    parts = [f'<text class="soft" x="{at:.1f}" y="{floor + 16}" text-anchor="middle">{n}</text>' for at, n in places]
    for tick in y.ticks():
        at = y.at(tick)
        parts.append(f'<path class="grid" d="M{_LEFT} {at:.1f}H{width - _RIGHT}"/>')
        parts.append(f'<text class="soft" x="{_LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{_number(tick)}</text>')
    parts.append(f'<path class="axis" d="M{_LEFT} {y.high:.1f}V{floor}H{width - _RIGHT}"/>')
    parts.append(f'<text x="{(_LEFT + width) / 2:.0f}" y="{height - 8}" text-anchor="middle">{_text(labels[0])}</text>')
    middle = (y.high + floor) / 2
    parts.append(
        f'<text transform="translate(14 {middle:.0f}) rotate(-90)" text-anchor="middle">{_text(labels[1])}</text>'
    )
    return parts


def _legend(names: Sequence[str], front: bool, first: int) -> list[str]:
    """Five entries a row, the first row at ``first``."""
    parts = []
    for i, name in enumerate([*names, *(["Pareto front"] if front else [])]):
        left, top = _LEFT + (i % 5) * 136, first + 18 * (i // 5)
        if i < len(names):
            parts.append(f'<circle class="k{i % _COLOURS}" cx="{left}" cy="{top - 4}" r="4"/>')
        else:
            parts.append(f'<path class="front" d="M{left - 6} {top - 4}h12"/>')
        parts.append(f'<text x="{left + 9}" y="{top}">{_text(name, 18)}</text>')
    return parts


def _path(marks: Sequence[Mark], x: _Axis, y: _Axis) -> str:
    return "M" + "L".join(f"{x.at(mark.x):.1f} {y.at(mark.y):.1f}" for mark in marks)


def _svg(title: str, width: int, height: int, parts: Sequence[str]) -> str:
    head = f'<svg class="plot" role="img" viewBox="0 0 {width} {height}" width="{width}" height="{height}">'
    return f"{head}<title>{_text(title)}</title>{''.join(parts)}</svg>"


def _number(value: float) -> str:
    return f"{value:.10g}" if 1e-3 <= abs(value) < 1e6 or value == 0 else f"{value:.2g}"


def _text(text: str, limit: int = 512) -> str:
    """Foreign text inside markup: one printable line, no markup of its own."""
    return html_escape(escape(text, limit))
