"""nested.md from the figures of one run."""

from __future__ import annotations

from collections import Counter
from typing import Any

__all__ = ["page"]

_READING = """## How to read it

*multi* is the mean squared error of the first 3 planes, and of all 4, of `multi --bits 4`, over that of `bcq` with so
many planes, groups and bias of its own; everything else at its defaults, numbers stored in F16. *least* is what no
solver can be below with the same first two planes, which have to be those of 2-bit `bcq`, bit for bit: found by branch
and bound over all planes and scales above them, for that precision alone. It is there where *multi* is above the goal.
**Out of reach** says that *least* is above the goal too: the goal and the first two planes exclude each other.
**Missed** says that it is not. Both precisions share the third plane, so that both goals together can be out of reach
where each alone is not; the bound does not show that.

The bound is proven group by group, to 0.1 % at 3 planes and to 2 % at 4, and takes up to seconds a group; so it is
computed for some groups, and *least* is *multi* times the share of its error on these that is proven to be needed. How
many groups, and how they compare with all others, is in `nested.json`: 16 to 32, but with a bias and 4 planes only 4.
So a *least* within a percent of its goal, there within some percents, is on that side of it for the groups that were
looked at, and perhaps not for all. Errors by `multi` are those of stored values, rounded to F16; the bound is that of
scales and values that are not rounded.

What stands out: groups of 32 of weights that were in Q4_1, which four planes and a bias of their own can hold nearly
exactly (see [What quantization costs](quality.md)) and nested ones cannot; and numbers with heavy tails, for which
2-bit `bcq` leaves less to the planes above.
"""

_WEIGHTS = """## What is measured

Drawn numbers: 64 rows of 4096, rounded to F16. Models: 64 rows each of the first, middle and last layer for every type
of projection, 192 of the embedding. SmolLM2 is what `smollm2_folder.py` makes: its linear layers were in Q4_1 (4 bit,
blocks of 32), its embedding in Q8_0. stories260K is small and was never quantized; its rows have 64 or 172 numbers,
and groups longer than a row are left out.
"""


def page(record: dict[str, Any]) -> str:
    """The page."""
    goals = {int(p): goal for p, goal in record["goals"].items()}
    cells = record["cells"]
    lines = [
        "# Nested planes and planes of their own",
        "",
        f"Measured on {record['date']} in {record['minutes']:g} minutes on 2 cores with",
        "",
        *("```console", f"$ {record['command']}", "```", ""),
        "and " + ", ".join(f"{key} {value}" for key, value in record["with"].items()) + ".",
        "",
        *_counts(cells, goals),
        "",
    ]
    for bias in (False, True):
        chosen = [cell for cell in cells if cell["bias"] is bias]
        lines += [f"## {'With' if bias else 'Without'} a bias", "", *_table(chosen, goals), ""]
    return "\n".join([*lines, _READING, _WEIGHTS])


def _counts(cells: list[dict[str, Any]], goals: dict[int, float]) -> list[str]:
    lines = ["| planes | bias | goal | cells | met | out of reach | missed |", "|---|---|---|---|---|---|---|"]
    for p, goal in goals.items():
        for bias in (False, True):
            found = [_of(cell, p)["verdict"] for cell in cells if cell["bias"] is bias]
            count = Counter(found)
            shares = " | ".join(str(count[verdict]) for verdict in ("met", "out of reach", "missed"))
            lines.append(f"| {p} | {'with' if bias else 'without'} | <= {goal:g} | {len(found)} | {shares} |")
    return lines


def _table(cells: list[dict[str, Any]], goals: dict[int, float]) -> list[str]:
    heads = [f"{p} planes: multi | least | <= {goal:g}" for p, goal in goals.items()]
    lines = [f"| weights | groups of | {' | '.join(heads)} |", "|---" * (2 + 3 * len(goals)) + "|"]
    for cell in cells:
        shown = []
        for p in goals:
            found = _of(cell, p)
            least = f"{found['least']:.3f}" if "least" in found else ""
            verdict = found["verdict"] if found["verdict"] == "met" else f"**{found['verdict']}**"
            shown.append(f"{found['ratio']:.3f} | {least} | {verdict}")
        lines.append(f"| {cell['weights']} | {cell['group_size']} | {' | '.join(shown)} |")
    return lines


def _of(cell: dict[str, Any], p: int) -> dict[str, Any]:
    """What was found at p planes; JSON has text for keys."""
    planes: dict[Any, dict[str, Any]] = cell["planes"]
    return planes[p] if p in planes else planes[str(p)]
