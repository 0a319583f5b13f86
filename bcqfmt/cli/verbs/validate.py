"""``bcqfmt validate``: every rule of the specification, every finding."""

from __future__ import annotations

from contextlib import ExitStack

import click

from bcqfmt.checkpoint.validation import Report, validate
from bcqfmt.cli import render
from bcqfmt.cli.command import json_option, verb
from bcqfmt.cli.expect import expect
from bcqfmt.cli.progress import folder_bar
from bcqfmt.errors import BcqError, escape


@verb("validate")
@click.argument("path")
@click.option("--deep", is_flag=True, help="Read all content: numbers, padding and digests.")
@click.option(
    "--max-findings", type=click.IntRange(min=0), default=50, show_default=True, help="Findings to print, at most."
)
@json_option
def command(path: str, deep: bool, max_findings: int, as_json: bool) -> int:
    """Check a checkpoint against the specification.

    PATH is a BCQ folder or file. Without --deep: headers, descriptions, shapes, sizes, the index, config.json and the
    manifest. With --deep every byte of the model is read, and in a folder no flipped bit of it goes unseen; files that
    no digest covers (model card, pictures, files added later) are listed in notes. The exit code is 0 when the input
    is valid, else that of the first finding, or of what lies there where it is no BCQ at all.

    \b
    Example:
      bcqfmt validate model/
      bcqfmt validate --deep model/
    """
    with ExitStack() as stack:
        report = validate(path, deep=deep, progress=folder_bar(stack, path, "hashing") if deep else None)
    other = None if report.valid else _something_else(path)
    exit_code = report.exit_code if other is None else other.exit_code
    if as_json:
        found = report.as_dict() | {"exit_code": exit_code}
        found["findings"] = found["findings"][:max_findings]
        render.emit_json(found)
    elif other is not None:  # what the rules of BCQ say of it is of no use
        render.echo(f"{escape(path)}: INVALID, no BCQ checkpoint but {other.finding.found} ({other.code})")
    else:
        render.echo(_text(report, max_findings))
    if other is not None:
        render.say(f"hint: {other.hint}")
    return exit_code


def _something_else(path: str) -> BcqError | None:
    """Where it is no BCQ at all: what it is, and the command that fits."""
    try:
        expect(path, "bcq", "bcq file", file=True)
    except BcqError as fault:
        return fault
    return None


def _text(report: Report, limit: int) -> list[str]:
    lines = render.findings(report.findings[:limit])
    left = len(report.findings) + report.more - min(limit, len(report.findings))
    if left > 0:
        lines.append(f"... and {render.count(left, 'more finding', 'more findings')} (--max-findings)")
    return [*lines, f"{escape(report.path)}: {_verdict(report)}"]


def _verdict(report: Report) -> str:
    seen = [
        render.count(report.files, "model file"),
        render.count(report.weights, "weight"),
        render.size(report.nbytes),
    ]
    depth = "all content and digests checked" if report.deep else "content not checked (--deep does)"
    if report.deep and not report.valid:
        depth = "content and digests checked as far as the errors let"
    if any(finding.code == "BCQ-E501" for finding in report.findings):
        depth = "content checked as far as it goes without digests" if report.deep else depth
    number = len(report.errors)
    remarks = [
        render.count(sum(finding.severity == kind for finding in report.findings), kind) for kind in ("warning", "note")
    ]
    remarks = [remark for remark in remarks if not remark.startswith("0 ")]
    verdict = (
        "valid" if report.valid else f"INVALID, {'at least ' if report.more else ''}{render.count(number, 'error')}"
    )
    return f"{', '.join([verdict, *remarks])}; {', '.join(seen)}; {depth}"
