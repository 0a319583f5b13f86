"""``bcqfmt export``: a BCQ folder as a checkpoint that other tools read."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click

from bcqfmt.checkpoint.reader import open as open_checkpoint
from bcqfmt.cli import render
from bcqfmt.cli.command import FilePath, is_given, json_option, stoppable, usage_error, verb
from bcqfmt.cli.expect import expected_bcq
from bcqfmt.cli.next_steps import run_it, step_lines
from bcqfmt.cli.options import SIZE
from bcqfmt.cli.progress import bar
from bcqfmt.errors import escape

_TARGETS = ("gptq", "awq", "compressed-tensors", "dense", "gguf")  # a test compares them with the exporter's own


@verb("export")
@click.argument("bcq", type=FilePath())
@click.argument("out", type=FilePath())
@click.option("--to", "layout", type=click.Choice(_TARGETS), required=True, help="The layout to write.")
@click.option(
    "--dtype",
    type=click.Choice(["float16", "bfloat16", "float32"]),
    help="With --to dense: round to this type, once, instead of each weight's own.",
)
@click.option(
    "--like",
    type=FilePath(),
    metavar="DONOR.gguf",
    help="With --to gguf: take metadata and tokenizer from this file, a GGUF of the same model.",
)
@click.option(
    "--allow-rounding",
    is_flag=True,
    help="With --to gguf: write weights that no type holds exactly in the nearest one, and tell the error.",
)
@click.option("--overwrite", is_flag=True, help="Replace OUT if it is there.")
@click.option("--max-shard-size", type=SIZE, default="5GB", show_default=True, help="Size of one model file, at most.")
@json_option
def command(
    bcq: Path,
    out: Path,
    layout: str,
    dtype: str | None,
    like: Path | None,
    allow_rounding: bool,
    overwrite: bool,
    max_shard_size: int,
    as_json: bool,
) -> None:
    """Write a BCQ checkpoint in another layout, without loss.

    BCQ is a BCQ folder, OUT a new folder, for --to gguf a new file NAME.gguf. Codes, scales and zero points go over as
    they are: OUT holds the values of BCQ, bit for bit. What the layout cannot hold is refused with the reason (exit
    code 5) before anything is written; --to dense always works. Not every program that reads a layout takes all of it,
    and some round the scales: what concerns this model is printed, and docs/converting.md has the table (Exporting).

    \b
    Example:
      bcqfmt export model-bcq/ model-gptq/ --to gptq
      bcqfmt export model-bcq/ model-bf16/ --to dense --dtype bfloat16
      bcqfmt export model-bcq/ model.gguf --to gguf --like donor.gguf
    """
    if dtype is not None and layout != "dense":
        raise usage_error("--dtype goes with --to dense: other layouts keep the numbers that are stored")
    if layout != "gguf" and (like is not None or allow_rounding):
        raise usage_error("--like and --allow-rounding go with --to gguf")
    if layout == "gguf" and is_given("max_shard_size"):
        raise usage_error("--max-shard-size is for folders: --to gguf writes one file")
    with expected_bcq(bcq), stoppable(out, resumed=False), ExitStack() as stack:
        checkpoint = stack.enter_context(open_checkpoint(bcq))
        how: dict[str, Any] = {"overwrite": overwrite, "tick": bar(stack, unit="B", unit_scale=True, desc="writing")}
        if layout == "gguf":
            from bcqfmt.converters.export.gguf import export_gguf

            told = export_gguf(checkpoint, out, like=like, allow_rounding=allow_rounding, **how).as_dict()
        else:
            from bcqfmt.converters.export import export

            told = export(checkpoint, out, layout, dtype=dtype, max_shard_size=max_shard_size, **how).as_dict()
    if as_json:
        render.emit_json({"bcq": str(bcq), "out": str(out), **told})
        return
    counts = [render.count(told["weights"], "weight"), render.count(told["dense"], "other tensor")]
    if layout == "gguf":
        counts += [render.size(told["bytes"]), f"metadata from {escape(told['metadata'])}"]
    else:
        counts += [render.count(len(told["files"]), "model file"), render.size(told["bytes"])]
    exact = "" if layout != "gguf" else ", every value as in BCQ" if told["exact"] else ", ROUNDED"
    first = f"{escape(str(out))}: {told['format']}{exact}; {', '.join(counts)}"
    render.echo([first, *_types(told), *(f"  {note}" for note in told["notes"]), *step_lines(run_it(out))])


def _types(told: dict[str, Any]) -> list[str]:
    """Of a GGUF file: a line for every type, one for every weight that was rounded, and one for all of those."""
    if "tensors" not in told:
        return []
    lines = []
    exact = [entry for entry in told["tensors"] if entry["exact"]]
    for kind in dict.fromkeys(entry["type"] for entry in exact):
        same = [entry for entry in exact if entry["type"] == kind]
        lines.append(f"  {kind:<7} {render.count(len(same), 'weight')}, exact, {same[0]['bits']:g} bits")
    if told["exact"]:
        return lines
    rounded = [entry for entry in told["tensors"] if not entry["exact"]]
    lines += [f"  {one['type']:<7} {one['weight'][0]}: {_error(one['error'])}; {one['reason']}" for one in rounded]
    return [*lines, f"  rounded weights together: {_error(told['error'])}"]


def _error(found: dict[str, float]) -> str:
    return f"error {found['relative_rms']:.2g} (relative rms), {found['largest']:.2g} at most"
