"""``bcqfmt diff``: two checkpoints, tensor by tensor."""

from __future__ import annotations

from contextlib import ExitStack

import click

from bcqfmt.checkpoint.reader import open as open_checkpoint
from bcqfmt.cli import render
from bcqfmt.cli.command import json_option, verb
from bcqfmt.cli.expect import expected_bcq
from bcqfmt.errors import escape
from bcqfmt.inspect.compare import Comparison, Difference, ValueDifference, compare

DIFFERENT = 6


@verb("diff")
@click.argument("a")
@click.argument("b")
@click.option("--values", is_flag=True, help="Compare decoded values also where two descriptions differ.")
@click.option("--max-rows", type=click.IntRange(min=0), default=100, show_default=True, help="Lines to print, at most.")
@json_option
def command(a: str, b: str, values: bool, max_rows: int, as_json: bool) -> int:
    """Compare two checkpoints, tensor by tensor.

    A and B are BCQ folders or files. Two files for which both manifests state the same digest are equal
    (`bcqfmt validate --deep` tells whether a manifest is right); the content of all others is compared. Where it
    differs: which parts, how many decoded values, and by how much at most. Exit code 0 when nothing differs, 6 when
    something does.

    \b
    Example:
      bcqfmt diff model/ other/
      bcqfmt diff --values model-g128/ model-g64/
    """
    with ExitStack() as stack:
        for path in (a, b):
            stack.enter_context(expected_bcq(path, file=True))
        left, right = (stack.enter_context(open_checkpoint(path)) for path in (a, b))
        found = compare(left, right, values=values)
    render.show(as_json, {"a": a, "b": b, **found.as_dict()}, _text(a, b, found, max_rows))
    return 0 if found.equal else DIFFERENT


def _text(a: str, b: str, found: Comparison, limit: int) -> list[str]:
    lines = [f"only in A  {escape(name, 512)}" for name in found.only_a]
    lines += [f"only in B  {escape(name, 512)}" for name in found.only_b]
    lines += [_line(difference) for difference in found.differences]
    left = len(lines) - limit
    lines = lines[:limit]
    if left > 0:
        lines.append(f"... and {left:,} more (--max-rows)")
    counts = found.counts
    kinds = {
        "only_a": "only in A",
        "only_b": "only in B",
        "description": "described differently",
        "content": "with different content",
    }
    parts = [f"{counts[key]:,} {text}" for key, text in kinds.items() if counts[key]]
    equal = render.count(counts["equal"], "tensor")
    sides = f"A = {escape(a)}, B = {escape(b)}"
    result = f"equal: {equal}" if found.equal else f"different: {', '.join(parts)}; {counts['equal']:,} equal"
    if found.unread:  # a manifest may be wrong
        unread = "all" if found.unread == counts["equal"] else f"{found.unread:,}"
        result += f", {unread} by the digests in both manifests, not read"
    return [*lines, f"{result} ({sides})"]


def _line(difference: Difference) -> str:
    label = "described  " if difference.kind == "description" else "content    "
    said = [escape(detail, 400) for detail in difference.details]
    if difference.parts:
        said.append(f"parts {', '.join(difference.parts)}")
    if difference.values is not None:
        said.append(_values(difference.values))
    return f"{label}{escape(difference.name, 512)}: {'; '.join(said) or 'bytes'}"


def _values(values: ValueDifference) -> str:
    if not values.different:
        return f"all {values.elements:,} values equal"
    return f"{values.different:,} of {values.elements:,} values differ, by at most {values.largest:.6g}"
