"""``bcqfmt validate``: every rule of the specification, every finding."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from bcqfmt.checkpoint.validation import Report, validate
from bcqfmt.cli import render
from bcqfmt.cli.command import json_option, verb
from bcqfmt.errors import escape


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
    manifest. With --deep every byte is read and in a folder no flipped bit goes unseen. The exit code is 0 when the
    input is valid, else that of the first finding.

    \b
    Example:
      bcqfmt validate model/
      bcqfmt validate --deep model/
    """
    report = _with_progress(path) if deep and sys.stderr.isatty() else validate(path, deep=deep)
    if as_json:
        found = report.as_dict()
        found["findings_total"] = len(found["findings"])
        found["findings"] = found["findings"][:max_findings]
        render.emit_json(found)
    else:
        render.echo(_text(report, max_findings))
    return report.exit_code


def _with_progress(path: str) -> Report:
    """Deep validation of a large folder takes minutes: say how far it is."""
    from tqdm import tqdm

    total = sum(file.stat().st_size for file in Path(path).rglob("*") if file.is_file())
    with tqdm(total=total, unit="B", unit_scale=True, desc="hashing", leave=False) as bar:
        return validate(path, deep=True, progress=bar.update)


def _text(report: Report, limit: int) -> list[str]:
    lines = render.findings(report.findings[:limit])
    left = len(report.findings) - limit
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
    verdict = "valid" if report.valid else f"INVALID, {render.count(number, 'error')}"
    return f"{', '.join([verdict, *remarks])}; {', '.join(seen)}; {depth}"
