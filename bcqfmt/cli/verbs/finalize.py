"""``bcqfmt finalize``: close a conversion that was done in parts."""

from __future__ import annotations

from pathlib import Path

import click

from bcqfmt.cli import render
from bcqfmt.cli.command import FilePath, command_line, hub_options, json_option, verb
from bcqfmt.cli.next_steps import prove_it, run_it, step_lines
from bcqfmt.cli.sources import find_source, keep_apart
from bcqfmt.errors import BcqError, error, escape


@verb("finalize")
@click.argument("dst", type=FilePath())
@click.argument("src")
@click.option("--overwrite", is_flag=True, help="Replace DST if it is there.")
@hub_options
@json_option
def command(dst: Path, src: str, overwrite: bool, revision: str | None, offline: bool, as_json: bool) -> None:
    """Close a conversion that was done in parts.

    After `bcqfmt convert SRC DST --part i/N` has run for every i: checks that all shards are there and intact, writes
    the other files of the folder and gives it its name. The result has the same bytes as that of one plain run.

    \b
    Example:
      bcqfmt finalize model-bcq/ model-gptq/
    """
    from bcqfmt.checkpoint.folder import MANIFEST, SOURCE
    from bcqfmt.converters.convert.conversion import Conversion, ConvertOptions
    from bcqfmt.converters.jobs.workspace import partial_folder, read_plan
    from bcqfmt.inspect.kinds import look

    where = [*([] if revision is None else ["--revision", revision]), *["--offline"] * offline]
    try:
        options = read_plan(dst)["options"]
    except BcqError as fault:
        if (dst / MANIFEST).exists() and not partial_folder(dst).exists():
            fault.hint = f"prove it: {prove_it(src, dst, *where, provenance=(dst / SOURCE).is_dir())}"
        elif partial_folder(Path(src)).is_dir() or look(dst).kind in ("quantized", "gguf"):
            fault.hint = f"DST comes first: {command_line('bcqfmt', 'finalize', Path(src), dst)}"
        raise
    if options.get("layout") == "dense":
        found = "an unfinished run of bcqfmt quantize, which has no parts"
        raise error("BCQ-E404", str(dst), found=found, hint="go on with it: bcqfmt quantize ... --resume")
    source = find_source(src, revision, offline, gguf=True).checkpoint
    keep_apart(dst, *source.places)
    conversion = Conversion(source, ConvertOptions(**options, overwrite=overwrite))
    try:
        conversion.close(dst)
    except BcqError as fault:
        if fault.code == "BCQ-E401" and fault.finding.file == str(partial_folder(dst)):
            fault.hint = "name the source that the parts were made from; if it is another by now, make all parts anew"
        raise
    then = prove_it(src, dst, *where, provenance=conversion.options.provenance)
    number = len(conversion.plan.shards)
    if as_json:
        facts = {"target": str(dst), "shards": number, "weights": len(conversion.modules)}
        render.emit_json({**facts, "run": run_it(dst), "next": then})
    else:
        done = f"{render.count(number, 'shard')}, {render.count(len(conversion.modules), 'weight')}"
        render.echo([f"{escape(str(dst))}: {done}", *step_lines({**run_it(dst), "prove it": then})])
