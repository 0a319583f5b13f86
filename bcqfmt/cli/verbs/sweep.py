"""``bcqfmt sweep``: bits and group sizes tried on a model; size against error, and which combinations nothing beats."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from bcqfmt.cli import render
from bcqfmt.cli.command import FilePath, hub_options, json_option, usage_error, verb
from bcqfmt.cli.expect import fitting
from bcqfmt.cli.options import REGEX, Items, context_option, default_workers, fitting_context, given_settings
from bcqfmt.cli.progress import bar
from bcqfmt.cli.reports import check_output
from bcqfmt.cli.sources import find_source, read_stats, read_text
from bcqfmt.container.durable import write_file
from bcqfmt.errors import BcqError, error, escape
from bcqfmt.integrations.model_folder import longest_context
from bcqfmt.system import return_large_blocks

if TYPE_CHECKING:
    from bcqfmt.converters.report.sweep import Point, Sweep
    from bcqfmt.integrations.transformers.run import TextModel


@verb("sweep")
@click.argument("model")
@click.option("--bits", type=Items(r"[1-8]", "number of bits from 1 to 8"), default="2,3,4", show_default=True)
@click.option(
    "--group-size", "groups", type=Items(r"[0-9]{1,9}|row", "group size"), default="32,64,128,row", show_default=True
)
@click.option("--method", "methods", type=Items(r".+", "method"), default="rtn", show_default=True, help="One or more.")
@click.option("--set", "pairs", multiple=True, metavar="NAME=VALUE", help="A setting, for the methods that have it.")
@click.option("--stats", type=FilePath(), metavar="FILE", help="What `bcqfmt calibrate` wrote.")
@click.option("--include", type=REGEX, multiple=True, metavar="REGEX", help="Quantize also these, a head for example.")
@click.option("--exclude", type=REGEX, multiple=True, metavar="REGEX", help="Leave these dense.")
@click.option("--text", type=FilePath(), metavar="FILE", help="Also measure perplexity on this text.")
@context_option("context", "window")
@click.option("--max-tokens", type=click.IntRange(2), metavar="N", help="Use the first N tokens of the text only.")
@click.option("--out", type=FilePath(), metavar="FILE.json", help="Write all numbers.")
@click.option("--plot", type=FilePath(), metavar="FILE.svg", help="Draw them, with the Pareto front.")
@click.option("--overwrite", is_flag=True, help="Replace these files.")
@click.option("--workers", type=click.IntRange(1, 256), help="Threads; by default one per core, at most four.")
@hub_options
@json_option
def command(
    model: str,
    pairs: tuple[str, ...],
    stats: Path | None,
    text: Path | None,
    context: int | None,
    max_tokens: int | None,
    out: Path | None,
    plot: Path | None,
    overwrite: bool,
    revision: str | None,
    offline: bool,
    as_json: bool,
    **asked: Any,
) -> None:
    """Try bits and group sizes on a model: size against error.

    MODEL is a dense folder or a model on the hub. Every combination of --method, --bits and --group-size is quantized
    in memory and measured; nothing is kept. With --text (and torch and transformers) perplexity is measured too. A star
    marks the combinations that no smaller one beats.

    \b
    Example:
      bcqfmt sweep model/ --bits 2,3,4 --group-size 32,64,128,row
      bcqfmt sweep model/ --method rtn,bcq --text wiki.txt --out sweep.json --plot sweep.svg
    """
    for path, suffix in ((out, ".json"), (plot, ".svg")):
        if path is not None and path.suffix.lower() != suffix:
            raise usage_error(f"'{path}' should end in {suffix}.")
        if path is not None:
            check_output(path, overwrite, {"MODEL": model, "--stats": stats, "--text": text})
    for option, value in (("--context", context), ("--max-tokens", max_tokens)):
        if text is None and value is not None:
            raise usage_error(f"{option} says how --text FILE is read: add --text, or leave it out.")
    source = find_source(model, revision, offline)
    if text is not None:
        longest = longest_context(source.checkpoint.config)
        context = fitting_context(context, {source.checkpoint.folder: longest}, "window")
    try:
        sweep = _planned(source.checkpoint, given_settings({}, pairs), stats, asked)
    except BcqError as fault:
        if fault.code == "BCQ-E627":
            fault.hint = fitting(model) or fault.hint
        raise
    judge = None if text is None else _text_model(source.checkpoint.folder, text, context, max_tokens, sweep)
    return_large_blocks()
    points, dense = _run(sweep, judge)
    result: dict[str, Any] = {
        "model": source.name,
        "weights": len(sweep.weights),
        "dense_bytes": sweep.dense_bytes,
        "dense_perplexity": dense,
        "text": None if text is None else {"file": text.name, "context": context, "tokens": max_tokens},
        "points": [point.as_dict() for point in points],
    }
    if out is not None:
        write_file(out, (json.dumps(result, indent=1, ensure_ascii=True, allow_nan=False) + "\n").encode("ascii"))
    if plot is not None:
        from bcqfmt.converters.report.sweep import plot as draw

        write_file(plot, draw(source.name, points, dense))
    if as_json:
        render.emit_json(result)
        return
    written = [f"written: {escape(str(path))}" for path in (out, plot) if path is not None]
    render.echo([*_table(points, dense), *written])


def _planned(source: Any, settings: dict[str, Any], stats: Path | None, asked: dict[str, Any]) -> Sweep:
    from bcqfmt.converters.report.sweep import Combination, Sweep

    combinations = [
        Combination(method, int(bits), group)
        for method in asked["methods"]
        for bits in asked["bits"]
        for group in asked["groups"]
    ]
    return Sweep(
        source,
        combinations,
        settings,
        stats=None if stats is None else read_stats(stats),
        include=asked["include"],
        exclude=asked["exclude"],
        threads=asked["workers"] or default_workers(),
    )


def _text_model(folder: Path, text: Path, context: int | None, tokens: int | None, sweep: Sweep) -> TextModel:
    from bcqfmt.integrations.transformers.run import TextModel

    assert context is not None
    model = TextModel(folder, read_text(text), context=context, most_tokens=tokens, shown=text.name)
    missing = [name for name in sweep.weights if name not in model.names]
    if missing:
        raise error("BCQ-E301", folder.name, missing[0], "not in the model as transformers loads it", "the same names")
    return model


def _run(sweep: Sweep, judge: TextModel | None) -> tuple[list[Point], float | None]:
    """Every combination, with a bar on a terminal and a line each elsewhere."""
    from bcqfmt.converters.report.sweep import Tensors, mark_front

    def evaluate(tensors: Tensors) -> float:
        assert judge is not None
        judge.swap(tensors)
        return judge.figures().perplexity

    size = sum(sweep.source.tensors[name].nbytes for name in sweep.weights) * sweep.tries
    dense = None if judge is None else judge.figures().perplexity
    points = []
    with ExitStack() as stack:
        tick = bar(stack, total=size, unit="B", unit_scale=True, desc="quantizing")
        for point in sweep.run(None if judge is None else evaluate, tick):
            points.append(point)
            if tick is None:
                render.say(f"{point.method} q={point.bits} g={point.group_size} ({len(points)} of {sweep.tries})")
    mark_front(points)
    return points, dense


def _table(points: list[Point], dense: float | None) -> list[str]:
    header = ["", "method", "q", "g", "bits", "weights", "model", "MSE", "relative error", "SQNR"]
    header += ["perplexity"] if dense is not None else []
    rows = []
    for point in sorted(points, key=lambda point: (point.weight_bytes, point.loss)):
        figures = (point.mse, point.relative, point.sqnr_db)
        mse, relative, sqnr = ("-" if value is None else value for value in figures)
        cells = ["*" if point.front else "", point.method, str(point.bits), point.group_size]
        cells += [f"{point.bits_per_weight:.3f}", render.size(point.weight_bytes), render.size(point.model_bytes)]
        cells.append(mse if isinstance(mse, str) else f"{mse:.3g}")
        cells.append(relative if isinstance(relative, str) else f"{100 * relative:.3g} %")
        cells.append(sqnr if isinstance(sqnr, str) else f"{sqnr:.2f} dB")
        rows.append(cells + ([] if point.perplexity is None else [f"{point.perplexity:.4g}"]))
    lines = render.table(header, rows, left=(0, 1))
    note = "* nothing smaller is as good"
    return [*lines, "", note if dense is None else f"{note}; perplexity of the dense model: {dense:.4g}"]
