"""``bcqfmt report``: sizes, bits and errors of a BCQ checkpoint, as a table, as JSON, as a web page."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from bcqfmt.cli import render
from bcqfmt.cli.command import FilePath, html_option, json_option, verb
from bcqfmt.cli.expect import expected_bcq
from bcqfmt.cli.options import default_workers
from bcqfmt.cli.progress import Progress
from bcqfmt.cli.reports import check_report_path, table, total_line, write_report
from bcqfmt.cli.sources import find_source
from bcqfmt.errors import escape

if TYPE_CHECKING:
    from bcqfmt.checkpoint.reader import Checkpoint
    from bcqfmt.converters.report import Report


@verb("report")
@click.argument("bcq", type=FilePath())
@html_option
@click.option("--against", metavar="MODEL", help="Measure errors against this dense model, a folder or a hub id.")
@click.option("--overwrite", is_flag=True, help="Replace these files.")
@click.option("--top", type=click.IntRange(1), metavar="N", help="Show only the N weights that are furthest off.")
@json_option
def command(bcq: Path, html: Path | None, against: str | None, overwrite: bool, top: int | None, as_json: bool) -> None:
    """Sum up a BCQ checkpoint as a table or a web page.

    BCQ is a folder or a file. Sizes and bits of every weight, and where it came from; errors too, worst first, if
    `bcqfmt quantize` wrote it or if --against names the dense model that was quantized. The page needs no network and
    no script; a JSON file of the same name has the same numbers.

    \b
    Example:
      bcqfmt report model-bcq/
      bcqfmt report model-bcq/ --html report.html
      bcqfmt report model-bcq/ --against model-dense/ --top 10
    """
    import bcqfmt
    from bcqfmt.converters.report import make_report

    if html is not None:
        check_report_path(html, bcq, overwrite, {"--against": against})
    with expected_bcq(bcq, file=True), bcqfmt.open(bcq) as checkpoint:
        made = make_report(checkpoint) if against is None else _measured(checkpoint, against)
    written = [] if html is None else write_report(made, html)
    if as_json:
        render.emit_json({"reports": written, **made.as_dict()})
        return
    lines = [f"report: {escape(path)}" for path in written]
    shown = [] if written and top is None else [*table(made, top), ""]
    render.echo([*shown, f"{escape(str(bcq))}: {total_line(made)}", *lines])


def _measured(checkpoint: Checkpoint, against: str) -> Report:
    """The report with errors against a dense model; weights without a counterpart there are named on stderr."""
    from bcqfmt.converters.report import make_report
    from bcqfmt.converters.report.measure import measure

    dense = find_source(against, None, offline=False)
    weights = dict(checkpoint.weights())
    with Progress("measuring", sum(weight.nbytes for weight in weights.values()), len(weights)) as progress:
        found = measure(checkpoint, dense.checkpoint, default_workers(), progress.tick)
    left = [name for name in weights if name not in found]
    if left:
        render.say(f"not in {escape(against)}: {render.count(len(left), 'weight')}, {escape(left[0])} for one")
    return make_report(checkpoint, found, dense.name)
