"""``bcqfmt seal``: the manifest of a folder written anew, after a change that is meant."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack

import click

from bcqfmt.checkpoint.seal import Change, Sealing, seal
from bcqfmt.cli import render
from bcqfmt.cli.command import json_option, verb
from bcqfmt.cli.expect import expected_bcq
from bcqfmt.cli.progress import folder_bar
from bcqfmt.errors import escape

_RELEASED = "documentation, covered by no digest any more"


@verb("seal")
@click.argument("folder")
@click.option("--accept", is_flag=True, help="Take over changed model files and a changed bcq_source/ too.")
@click.option("--dry-run", is_flag=True, help="Show what has changed; write nothing.")
@json_option
def command(folder: str, accept: bool, dry_run: bool, as_json: bool) -> int:
    """Renew the manifest after files were changed on purpose.

    FOLDER is a BCQ folder whose owner has changed, added or removed files: the tokenizer, config.json, a chat
    template. All files are hashed, and what has changed is shown. The new manifest takes the place of the old one if
    the folder is then valid. Changed model files or a changed bcq_source/ look like damage and are refused (exit
    code 6) without --accept. Model card, licence and pictures are not in the manifest: edit them at any time.

    \b
    Example:
      bcqfmt seal --dry-run model-bcq/
      bcqfmt seal model-bcq/
    """
    with expected_bcq(folder), ExitStack() as stack:
        done = seal(folder, accept=accept, dry_run=dry_run, progress=folder_bar(stack, folder, "hashing"))
    render.show(as_json, {"dry_run": dry_run, **done.as_dict()}, _text(done))
    return done.exit_code


def _text(done: Sealing) -> list[str]:
    lines = [f"{change.kind:<8}  {escape(change.path)}: {_figures(change)}" for change in done.changes]
    counts = Counter(change.kind for change in done.changes)
    counted = ", ".join(f"{number:,} {kind}" for kind, number in sorted(counts.items()))
    if not done.changes:
        said = f"nothing has changed; the manifest stays as it is ({render.count(done.files, 'file')})"
    elif done.findings:
        said = f"NOT sealed: {counted}; the manifest stays as it is"
    elif done.written:
        said = f"sealed: {counted}; the manifest names {render.count(done.files, 'file')}"
    else:
        said = f"would be sealed: {counted}; nothing was written"
    return [*lines, *render.findings(done.findings), f"{escape(done.path)}: {said}"]


def _figures(change: Change) -> str:
    if change.kind == "released":
        return _RELEASED
    records = [record for record in (change.old, change.new) if record is not None]
    return " -> ".join(f"{record.size:,} bytes, sha256 {record.sha256[:12]}" for record in records)
