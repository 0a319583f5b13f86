"""``bcqfmt export``: a BCQ folder as a checkpoint that other tools read."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import click

from bcqfmt.checkpoint.reader import open as open_checkpoint
from bcqfmt.cli import render
from bcqfmt.cli.command import json_option, stoppable, usage_error, verb
from bcqfmt.cli.expect import expected_bcq
from bcqfmt.cli.next_steps import run_it, step_lines
from bcqfmt.cli.options import SIZE
from bcqfmt.cli.progress import bar
from bcqfmt.errors import escape

_TARGETS = ("gptq", "awq", "compressed-tensors", "dense")  # a test compares them with the exporter's own


@verb("export")
@click.argument("bcq", type=click.Path(path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--to", "layout", type=click.Choice(_TARGETS), required=True, help="The layout to write.")
@click.option(
    "--dtype",
    type=click.Choice(["float16", "bfloat16", "float32"]),
    help="With --to dense: round to this type, once, instead of each weight's own.",
)
@click.option("--overwrite", is_flag=True, help="Replace OUT if it is there.")
@click.option("--max-shard-size", type=SIZE, default="5GB", show_default=True, help="Size of one model file, at most.")
@json_option
def command(
    bcq: Path, out: Path, layout: str, dtype: str | None, overwrite: bool, max_shard_size: int, as_json: bool
) -> None:
    """Write a BCQ checkpoint in another layout, without loss.

    BCQ is a BCQ folder, OUT a new folder. Codes, scales and zero points go over as they are, so every reader of OUT
    gets the values that BCQ has, bit for bit. What the layout cannot hold is refused with the reason (exit code 5)
    before anything is written; --to dense always works.

    \b
    Example:
      bcqfmt export model-bcq/ model-gptq/ --to gptq
      bcqfmt export model-bcq/ model-bf16/ --to dense --dtype bfloat16
    """
    if dtype is not None and layout != "dense":
        raise usage_error("--dtype goes with --to dense: other layouts keep the numbers that are stored")
    from bcqfmt.converters.export import export

    with expected_bcq(bcq), stoppable(out, resumed=False), ExitStack() as stack:
        checkpoint = stack.enter_context(open_checkpoint(bcq))
        done = export(
            checkpoint,
            out,
            layout,
            dtype=dtype,
            max_shard_size=max_shard_size,
            overwrite=overwrite,
            tick=bar(stack, unit="B", unit_scale=True, desc="writing"),
        )
    if as_json:
        render.emit_json({"bcq": str(bcq), "out": str(out), **done.as_dict()})
        return
    counts = [
        render.count(done.weights, "weight"),
        render.count(done.dense, "other tensor"),
        render.count(len(done.files), "model file"),
        render.size(done.nbytes),
    ]
    render.echo([f"{escape(str(out))}: {done.format}; {', '.join(counts)}", *(f"  {note}" for note in done.notes)])
    render.echo(step_lines(run_it(out)))
