"""nested.md from the figures of one run."""

from __future__ import annotations

import statistics
from typing import Any

__all__ = ["page"]

_READING = """\
A cell is one kind of weight and one group size, with or without a bias. Its figure is the mean squared error of the
first 2, 3 or all 4 planes of `multi --bits 4`, divided by that of `bcq` with as many planes, made for that precision
alone. The joint search has more starts than `bcq`, so a figure can be below 1.

With `--nested seed`, the default, the first two planes are those of 2-bit `bcq`, bit for bit. That limits what three
planes can have at best, and 1.1 is out of reach for most weights: the least error that any third plane and scales can
reach is known by branch and bound.
"""

_DETAILS = """\
What stands out: groups of 32 of weights that come from Q4_1, which four planes and a bias can represent nearly exactly
([What quantization costs](quality.md)). With `--nested seed` they have several times the error of `bcq`, with
`--nested joint` not. All linear layers of both models meet the goals of `--nested joint` in groups of every size.
Laplace numbers in groups of 128 and 512, Student's in groups of 512 and SmolLM2's embedding in groups of 512 do not.
Perplexities are in [decision 22](../decisions/0022-nested-planes.md).
"""

_HOW = """\
**Weights.** Drawn numbers: 64 rows of 4096, rounded to F16. Models: 64 rows each of the first, middle and last layer of
every type of projection, 192 of the embedding. SmolLM2 is what `tests/benchmarks/models/smollm2_folder.py` makes: its
linear layers come from Q4_1 (4 bits, blocks of 32), its embedding from Q8_0. stories260K is small and was never
quantized; its rows have 64 or 172 numbers, and groups longer than a row are left out. Settings are the defaults, scales
are stored in F16.

**The bound.** Branch and bound over all third planes and scales under the first two, proven to 0.1 %
(`tests/support/methods/nested_bound.py`), on 24 groups of a cell. It does not round scales and values to F16.
"""


def page(record: dict[str, Any]) -> str:
    """The page."""
    goals, cells = {int(p): goal for p, goal in record["goals"].items()}, record["cells"]
    software = ", ".join(f"{key} {value}" for key, value in record["with"].items())
    where = f"on {record['date']} in {record['minutes']:g} minutes on 2 cores with {software}"
    bounds = [cell["over_bound"] for cell in cells]
    near = sum(one <= record["near"] for one in bounds)
    lines = [
        "# Nested planes",
        "",
        "How much larger the error of nested planes (`multi`: one file, read at 2, 3 or 4 bits) is than that of planes",
        "made for one precision (`bcq`).",
        "",
        *_joint(cells, goals),
        "",
        f"With `--nested seed`, three planes have at most {record['near']:g} times the least possible error in {near}",
        f"of {len(bounds)} cells; median {statistics.median(bounds):.3f}, largest {max(bounds):.3f}.",
        "",
        _READING,
        *("## By group size", "", "Median and largest figure over all kinds of weights:", ""),
        *_by_group(cells, goals),
        *("", _DETAILS),
        *("## How it is measured", "", _HOW),
        *("## How to repeat it", "", "```console", f"$ {record['command']}", "```", ""),
        f"Measured {where}. All {len(cells)} cells are in {{download}}`nested.json`.",
    ]
    return "\n".join(lines) + "\n"


def _joint(cells: list[dict[str, Any]], goals: dict[int, float]) -> list[str]:
    lines = ["| `--nested joint`, planes | goal | median | largest | cells within the goal |", "|---" * 5 + "|"]
    for p, goal in goals.items():
        found = [_of(cell, "joint", p) for cell in cells]
        met = sum(one <= goal for one in found)
        lines.append(
            f"| {p} | <= {goal:g} | {statistics.median(found):.3f} | {max(found):.3f} | {met} of {len(found)} |"
        )
    return lines


def _by_group(cells: list[dict[str, Any]], goals: dict[int, float]) -> list[str]:
    kinds = [(nesting, p) for nesting in ("joint", "seed") for p in goals if (nesting, p) != ("seed", min(goals))]
    heads = " | ".join(f"{nesting}, {p} planes" for nesting, p in kinds)
    lines = [f"| groups of | bias | {heads} |", "|---" * (2 + len(kinds)) + "|"]
    for group in sorted({cell["group_size"] for cell in cells}):
        for bias in (False, True):
            chosen = [cell for cell in cells if (cell["group_size"], cell["bias"]) == (group, bias)]
            shown = []
            for nesting, p in kinds:
                found = [_of(cell, nesting, p) for cell in chosen]
                shown.append(f"{statistics.median(found):.2f}, {max(found):.2f}")
            lines.append(f"| {group} | {'with' if bias else 'without'} | {' | '.join(shown)} |")
    return lines


def _of(cell: dict[str, Any], nesting: str, p: int) -> float:
    """The figure of p planes; JSON has text for keys."""
    planes: dict[Any, float] = cell[nesting]
    return planes[p] if p in planes else planes[str(p)]
