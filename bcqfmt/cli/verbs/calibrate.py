"""``bcqfmt calibrate``: statistics of a model's linear layers on a text, for the methods that need them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from bcqfmt.cli import render
from bcqfmt.cli.command import FilePath, command_line, hub_options, json_option, stoppable, verb
from bcqfmt.cli.options import Device, context_option, fitting_context
from bcqfmt.cli.progress import waiting
from bcqfmt.cli.sources import find_source, keep_apart, keep_inputs
from bcqfmt.integrations.model_folder import longest_context

if TYPE_CHECKING:
    from bcqfmt.converters.quantize.stats import StatsFile


@verb("calibrate")
@click.argument("model")
@click.option("--text", required=True, type=FilePath(), help="A text file, UTF-8.")
@click.option("-n", "--rows", type=click.IntRange(1), default=128, show_default=True, help="Pieces of text to run.")
@context_option("seq", "piece")
@click.option("--out", type=FilePath(), default=Path("stats.safetensors"), show_default=True, help="The new file.")
@click.option("--seed", type=click.IntRange(0, 2**53 - 1), default=0, show_default=True, help="Which pieces are drawn.")
@click.option("--device", type=Device("auto"), default="auto", metavar="auto|cpu|cuda[:N]", help="Where it is run.")
@click.option(
    "--weighting",
    type=click.Choice(["none", "tokens", "loss"]),
    default="tokens",
    show_default=True,
    help="What a token counts in x x^T: the same; 1/|x|^2; by the gradient of the loss.",
)
@click.option("--resume", is_flag=True, help="Go on with an unfinished calibration, also with --overwrite.")
@click.option("--overwrite", is_flag=True, help="Replace the file; without --resume, drop an unfinished calibration.")
@hub_options
@json_option
def command(
    model: str, text: Path, out: Path, revision: str | None, offline: bool, as_json: bool, **asked: Any
) -> None:
    """Run a model on text and keep statistics of its inputs.

    MODEL is a dense model: a folder or a name on the hub. For every linear layer the file holds the sums of x^2 and of
    x x^T over all tokens, as gptq, mixed24 and atom need them. An interrupted run goes on where it stopped with the
    same command, or with --resume where that has --overwrite. Needs torch and transformers.

    \b
    Example:
      bcqfmt calibrate model/ --text corpus.txt -n 128 --context 512
      bcqfmt quantize model/ model-bcq/ --method gptq --stats stats.safetensors
    """
    start = time.perf_counter()
    from bcqfmt.converters.quantize.calibration_work import check_target, read_text

    keep_inputs(out, {"--text": text})
    check_target(out, overwrite=asked["overwrite"])
    given = read_text(text)
    source = find_source(model, revision, offline)
    keep_apart(out, *source.checkpoint.places)
    longest = longest_context(source.checkpoint.config)
    asked["seq"] = fitting_context(asked["seq"], {source.checkpoint.folder: longest}, "piece")
    waiting("loading torch and transformers")
    from bcqfmt.converters.quantize.calibration import calibrate

    with stoppable(out, resumed=True):
        made = calibrate(source.checkpoint, given, out, say=render.say, **asked)
    summary = _summary(made, model, out, time.perf_counter() - start)
    render.show(as_json, summary, _text(summary))


def _summary(made: StatsFile, model: str, out: Path, seconds: float) -> dict[str, Any]:
    return {
        "model": model,
        "stats": str(out),
        "bytes": out.stat().st_size,
        "inputs": len(made.record["inputs"]),
        "weights": len(made.inputs),
        "rows": made.record["rows"],
        "tokens": made.record["tokens"],
        "seconds": round(seconds, 3),
        "next": command_line("bcqfmt", "quantize", model, "DST", "--method", "gptq", "--stats", out),
    }


def _text(summary: dict[str, Any]) -> list[str]:
    done = [
        render.count(summary["weights"], "weight"),
        render.count(summary["inputs"], "input"),
        render.count(summary["tokens"], "token"),
        render.size(summary["bytes"]),
    ]
    return [f"{summary['stats']}: {', '.join(done)}, {summary['seconds']:.1f} s", f"use it: {summary['next']}"]
