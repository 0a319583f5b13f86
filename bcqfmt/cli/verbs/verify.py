"""``bcqfmt verify``: the proof that a BCQ folder holds all of its source."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from bcqfmt.cli import render
from bcqfmt.cli.command import FilePath, hub_options, json_option, verb
from bcqfmt.cli.expect import expected_bcq
from bcqfmt.cli.progress import Progress
from bcqfmt.cli.sources import find_source
from bcqfmt.errors import escape
from bcqfmt.system import return_large_blocks

if TYPE_CHECKING:
    from bcqfmt.converters.convert.verify import Certificate


@verb("verify")
@click.argument("src")
@click.argument("bcq", type=FilePath())
@click.option(
    "--values",
    type=click.Choice(["sample", "all"]),
    default="sample",
    show_default=True,
    help="Compute the values of 64 rows of each weight a second time, or of all rows.",
)
@hub_options
@json_option
def command(src: str, bcq: Path, values: str, revision: str | None, offline: bool, as_json: bool) -> None:
    """Prove that a BCQ folder holds all of its source.

    Every file of SRC is rebuilt from BCQ piece by piece and compared byte for byte; nothing is written. Then the values
    of the weights are compared, bit for bit, with the arithmetic of the tool that wrote SRC, by code that shares
    nothing with the converters. The exit code is 6 at the first difference.

    \b
    Example:
      bcqfmt verify model-gptq/ model-bcq/
      bcqfmt verify model-gptq/ model-bcq/ --values all --json
    """
    import bcqfmt
    from bcqfmt.converters.convert.verify import SAMPLE_ROWS, verify

    source = find_source(src, revision, offline, gguf=True).checkpoint
    rows = None if values == "all" else SAMPLE_ROWS
    total = sum(model.source.size for model in source.models.values())
    read = Progress("verifying", total, len(source.models))
    with expected_bcq(bcq), bcqfmt.open(bcq) as checkpoint, read as progress:
        return_large_blocks()
        found = verify(source, checkpoint, progress.tick, rows)
    facts = {"equal": True, "source": src, "target": str(bcq), "rows": values, **found.as_dict()}
    render.show(as_json, facts, _text(found, src, bcq, rows))


def _text(found: Certificate, src: str, bcq: Path, rows: int | None) -> list[str]:
    """The certificate."""
    from bcqfmt.converters.jobs.warnings import in_words

    each = "all rows" if rows is None else f"up to {rows} rows of each weight"
    values = f"{found.values:,} equal bit for bit with the source's own arithmetic ({each})" if found.values else ""
    if found.by_specification:
        stated = (
            f"of {render.count(found.by_specification, 'weight')} follow the BCQ specification, not a tool's kernel"
        )
        values = f"{values}; {stated}" if values else stated
    pairs = [
        ("files", f"{render.count(found.files)} rebuilt, {found.nbytes:,} bytes, every byte equal"),
        ("weights", render.count(found.weights)),
        ("codes", render.count(found.codes)),
        ("scales", render.count(found.scales)),
        ("zeros", render.count(found.zeros)),
        ("values", values),
        ("archived", f"{found.archived:,} bytes kept as they were, not rebuilt"),
    ]
    holds = f"all of {escape(src)}"
    if found.left_out:
        holds = f"{render.count(found.files, 'file')} of {escape(src)}, {in_words(found.left_out)}"
    lines = [f"verified: {escape(str(bcq))} holds {holds}", *render.fields(pairs)]
    return [*lines, *(f"  sha256  {digest}  {escape(path)}" for path, digest in sorted(found.digests.items()))]
