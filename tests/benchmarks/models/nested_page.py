"""nested.md from the figures of one run."""

from __future__ import annotations

import statistics
from collections import Counter
from typing import Any

__all__ = ["page"]

_VERDICTS = ("met", "out of reach", "missed")

_READING = """\
A cell is one kind of weight and one group size, with or without a bias. Its figure is the mean squared error of the
first 3 planes, or of all 4, of `multi --bits 4`, divided by that of `bcq` with as many planes, made for that precision
alone.

- **Met**: the figure is at most the goal.
- **Out of reach**: it is above the goal, and so is the least error that any planes and scales can have under the same
  first two planes, which have to be those of 2-bit `bcq`, bit for bit. Goal and first planes exclude each other.
- **Missed**: it is above the goal, and a better solution may exist.
"""

_DETAILS = """\
What stands out: groups of 32 of weights that come from Q4_1, which four planes and a bias can represent nearly exactly
when they are made for that alone ([What quantization costs](quality.md)) and nested planes cannot; and weights with
heavy tails, for which 2-bit `bcq` leaves less to the planes above it.
"""

_HOW = """\
**Weights.** Drawn numbers: 64 rows of 4096, rounded to F16. Models: 64 rows each of the first, middle and last layer of
every type of projection, 192 of the embedding. SmolLM2 is what `tests/benchmarks/models/smollm2_folder.py` makes: its
linear layers come from Q4_1 (4 bits, blocks of 32), its embedding from Q8_0. stories260K is small and was never
quantized; its rows have 64 or 172 numbers, and groups longer than a row are left out. Settings are the defaults, scales
are stored in F16.

**The bound.** Branch and bound over all planes and scales above the first two, for one precision at a time, proven to
0.1 % at 3 planes and to 2 % at 4 (`tests/support/methods/nested_bound.py`). It takes up to seconds per group, so it is
computed for some groups only, where the goal is exceeded: 16 to 32 of them, with a bias and 4 planes 4. The least error
of the cell is the figure times the share of the error on these groups that is proven to be needed; within a per cent of
the goal (some per cent with a bias and 4 planes) the verdict may differ for all groups. The bound does not round scales
and values to F16, and does not know that both precisions share the third plane, so a missed goal can be out of reach
too.
"""


def page(record: dict[str, Any]) -> str:
    """The page."""
    goals = {int(p): goal for p, goal in record["goals"].items()}
    software = ", ".join(f"{key} {value}" for key, value in record["with"].items())
    where = f"on {record['date']} in {record['minutes']:g} minutes on 2 cores with {software}"
    lines = [
        "# Nested planes",
        "",
        "How much larger the error of nested planes (`multi`: one file, read at 2, 3 or 4 bits) is than that of planes",
        "made for one precision (`bcq`), and where no solver could do better.",
        "",
        *_counts(record["cells"], goals),
        "",
        _READING,
        *("## By group size", "", "Median and largest figure over all kinds of weights:", ""),
        *_by_group(record["cells"], goals),
        *("", _DETAILS),
        *("## How it is measured", "", _HOW),
        *("## How to repeat it", "", "```console", f"$ {record['command']}", "```", ""),
        f"Measured {where}. All {len(record['cells'])} cells are in {{download}}`nested.json`.",
    ]
    return "\n".join(lines) + "\n"


def _counts(cells: list[dict[str, Any]], goals: dict[int, float]) -> list[str]:
    lines = [f"| planes | bias | goal | cells | {' | '.join(_VERDICTS)} |", "|---" * 7 + "|"]
    for p, goal in goals.items():
        for bias in (False, True):
            found = [_of(cell, p)["verdict"] for cell in cells if cell["bias"] is bias]
            count = Counter(found)
            shares = " | ".join(str(count[verdict]) for verdict in _VERDICTS)
            lines.append(f"| {p} | {_word(bias)} | <= {goal:g} | {len(found)} | {shares} |")
    return lines


def _by_group(cells: list[dict[str, Any]], goals: dict[int, float]) -> list[str]:
    kinds = [(p, bias) for p in goals for bias in (False, True)]
    heads = " | ".join(f"{p} planes, {_word(bias)} bias" for p, bias in kinds)
    lines = [f"| groups of | {heads} |", "|---" * (1 + len(kinds)) + "|"]
    for group in sorted({cell["group_size"] for cell in cells}):
        chosen = [cell for cell in cells if cell["group_size"] == group]
        shown = []
        for p, bias in kinds:
            found = sorted(_of(cell, p)["ratio"] for cell in chosen if cell["bias"] is bias)
            shown.append(f"{statistics.median(found):.2f}, {found[-1]:.2f}")
        lines.append(f"| {group} | {' | '.join(shown)} |")
    return lines


def _word(bias: bool) -> str:
    return "with" if bias else "without"


def _of(cell: dict[str, Any], p: int) -> dict[str, Any]:
    """What was found at p planes; JSON has text for keys."""
    planes: dict[Any, dict[str, Any]] = cell["planes"]
    return planes[p] if p in planes else planes[str(p)]
