"""``bcqfmt quantize``: a dense checkpoint becomes a BCQ folder; what that costs in accuracy is measured and kept."""

from __future__ import annotations

import importlib.util
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from bcqfmt.cli import render
from bcqfmt.cli.command import (
    FilePath,
    command_line,
    html_option,
    hub_options,
    is_given,
    json_option,
    push_options,
    stoppable,
    usage_error,
    verb,
)
from bcqfmt.cli.next_steps import run_it, step_lines
from bcqfmt.cli.options import (
    REGEX,
    SIZE,
    Device,
    WithSettings,
    context_option,
    default_workers,
    fitting_context,
    given_settings,
)
from bcqfmt.cli.progress import Progress
from bcqfmt.cli.publish import check_push_options, publish
from bcqfmt.cli.reports import check_report_path, table, total_line, write_report
from bcqfmt.cli.sources import Source, check_target, find_source, keep_apart, keep_inputs, read_stats
from bcqfmt.errors import BcqError, Finding, error, escape
from bcqfmt.integrations.model_folder import longest_context
from bcqfmt.system import peak_memory, return_large_blocks
from bcqfmt.version import pip_install
from bcqfmt.weight.describe import spare_bits

if TYPE_CHECKING:
    from bcqfmt.checkpoint.reader import Checkpoint
    from bcqfmt.converters.quantize.calibration_work import TextOptions
    from bcqfmt.converters.quantize.quantization import Quantization
    from bcqfmt.converters.report import Report

_SPARE = 0.15  # share of the stored bits that is worth a warning
_OF_TEXT = {"--rows": "rows", "--context": "seq", "--device": "device", "--token-weights": "token_weights"}
_WORST = 10  # weights that the table on the screen shows


@verb("quantize", WithSettings)
@click.argument("src")
@click.argument("dst", type=FilePath())
@click.option("--method", metavar="METHOD", help="rtn, bcq, multi, mixed24, atom or gptq.")
@click.option("--preset", metavar="NAME", help="A method with settings, chosen by size: see below.")
@click.option("--set", "pairs", multiple=True, metavar="NAME=VALUE", help="A setting of the method, by its name.")
@click.option("--rules", type=FilePath(), metavar="FILE", help="Rule file (TOML): who gets what.")
@click.option("--stats", type=FilePath(), metavar="FILE", help="What `bcqfmt calibrate` wrote.")
@click.option("--text", type=FilePath(), metavar="FILE", help="Calibrate on it, layer by layer.")
@click.option("-n", "--rows", type=click.IntRange(1), default=128, show_default=True, help="Pieces of --text to run.")
@context_option("seq", "piece of --text")
@click.option("--device", type=Device("auto"), default="auto", metavar="auto|cpu|cuda[:N]", help="Where --text is run.")
@click.option(
    "--token-weights",
    type=click.Choice(["none", "tokens", "loss"]),
    default="tokens",
    show_default=True,
    help="What a token of --text counts: see `calibrate --weighting`.",
)
@click.option(
    "--train-scales",
    type=click.IntRange(0, 1000),
    default=0,
    show_default=True,
    metavar="PASSES",
    help="Passes over --text that train scales on the dense model's predictions: gptq, bcq, rtn.",
)
@click.option("--include", type=REGEX, multiple=True, metavar="REGEX", help="Quantize also these, a head for example.")
@click.option("--exclude", type=REGEX, multiple=True, metavar="REGEX", help="Leave these dense.")
@click.option("--max-shard-size", type=SIZE, default="5GB", show_default=True, help="Source bytes per output file.")
@click.option("--workers", type=click.IntRange(1, 256), help="Threads; by default one per core, at most four.")
@click.option("--resume", is_flag=True, help="Go on with an unfinished run.")
@click.option("--overwrite", is_flag=True, help="Replace DST and the report; without --resume, drop an unfinished run.")
@click.option("--dry-run", is_flag=True, help="Print the plan and write nothing; of a hub id only headers are read.")
@html_option
@hub_options
@push_options
@json_option
def command(
    src: str,
    dst: Path,
    pairs: tuple[str, ...],
    rules: Path | None,
    stats: Path | None,
    text: Path | None,
    html: Path | None,
    revision: str | None,
    offline: bool,
    push: str | None,
    private: bool,
    create_pr: bool,
    as_json: bool,
    **asked: Any,
) -> None:
    """Quantize a dense checkpoint (F16, BF16, F32) to BCQ.

    SRC is a folder or a model on the hub (owner/name); it is never written to. DST is the new folder. Weights of linear
    layers are quantized; embeddings, the head, norms, routers, convolutions and biases stay as they are. How far every
    weight is off is measured, shown and kept in DST. Nothing appears under DST before it is complete.

    \b
    Example:
      bcqfmt quantize model/ model-bcq/ --preset 4bit --text corpus.txt
      bcqfmt quantize model/ model-bcq/ --method rtn --bits 4 --group-size 128
      bcqfmt quantize model/ model-bcq/ --method bcq --bits 3 --rules rules.toml --html report.html
      bcqfmt quantize model/ model-bcq/ --method gptq --text corpus.txt
      bcqfmt quantize model/ model-bcq/ --method gptq --stats stats.safetensors
    """
    settings = given_settings(asked, pairs)
    if asked["method"] is not None and asked["preset"] is not None:
        raise usage_error("--preset names a method as well: leave --method out; settings such as --bits may be added.")
    if asked["method"] is None and asked["preset"] is None and rules is None:
        raise usage_error("Say how: --preset 4bit, --method rtn, bcq, multi, mixed24, atom or gptq, or --rules FILE.")
    settings = _preset(asked) | settings
    check_push_options(push, private, create_pr, whole=not asked["dry_run"])
    inputs = {"--rules": rules, "--stats": stats, "--text": text}
    if html is not None:
        check_report_path(html, dst, asked["overwrite"], {"SRC": src, **inputs})
    keep_inputs(dst, inputs)
    start = time.perf_counter()
    given = _text_options(text, stats, asked)
    quantization = _planned(src, dst, settings, rules, stats, given, revision, offline, asked)
    plan = _plan(quantization, dst)
    if asked["dry_run"]:
        render.show(as_json, plan, _plan_text(quantization, plan))
        if not as_json:
            render.say(render.findings(quantization.warnings))
        return
    render.say(_plan_text(quantization, plan))
    if quantization.is_complete(dst):
        render.say("it is complete already: nothing to do")
    else:
        _carry_out(quantization, dst)
    made, short = _report(dst)
    quantization.warnings += short
    used = {"seconds": round(time.perf_counter() - start, 3), "peak_rss_bytes": peak_memory()}
    written = [] if html is None else write_report(made, html, dst)
    if not as_json:
        render.echo(_text(quantization, made, dst, used, written))
    pushed = {} if push is None else {"pushed": publish(dst, push, private=private, create_pr=create_pr)["url"]}
    if as_json:
        warnings = [finding.as_dict() for finding in quantization.warnings]
        facts = {"source": src, "target": str(dst), **used, "unused_rules": quantization.choice.unused}
        render.emit_json({**facts, "reports": written, "warnings": warnings, **pushed, **made.as_dict()})
    elif pushed:
        render.echo(f"pushed: {pushed['pushed']}")


def _preset(asked: dict[str, Any]) -> dict[str, Any]:
    """The settings of the preset asked for, whose method goes to ``asked``; what is given explicitly wins over them."""
    from bcqfmt.converters.quantize.presets import find_preset

    name = asked.pop("preset")
    if name is None:
        return {}
    preset = find_preset(name)
    asked["method"] = preset.method
    return dict(preset.settings)


def _text_options(text: Path | None, stats: Path | None, asked: dict[str, Any]) -> TextOptions | None:
    """What --text and its options say; they leave ``asked``, but for ``seq``, which depends on the model."""
    keys = ("rows", "device", "token_weights", "train_scales")
    rows, device, weighting, train = (asked.pop(key) for key in keys)
    if text is None:
        if train:
            raise usage_error("--train-scales needs a text to train on: --text FILE.")
        for option, key in _OF_TEXT.items():
            if is_given(key):
                raise usage_error(f"{option} says how --text FILE is run: add --text, or leave it out.")
        return None
    if stats is not None:
        raise usage_error("--stats are of the dense model, --text makes them layer by layer: choose one.")
    from bcqfmt.converters.quantize.calibration_work import TextOptions, read_text

    for name in ("torch", "transformers"):  # refused before anything is downloaded or planned
        if importlib.util.find_spec(name) is None:
            raise error("BCQ-E306", found=f"{name} is not installed", hint=pip_install("transformers"))
    return TextOptions(read_text(text), rows, device=device, weighting=weighting, train=train)


def _planned(
    src: str,
    dst: Path,
    settings: dict[str, Any],
    rules: Path | None,
    stats: Path | None,
    given: TextOptions | None,
    revision: str | None,
    offline: bool,
    asked: dict[str, Any],
) -> Quantization:
    from bcqfmt.converters.methods.registry import build_method
    from bcqfmt.converters.quantize.quantization import Quantization, QuantizeOptions
    from bcqfmt.converters.quantize.rules import read_rules

    if asked["method"] is not None:
        build_method(asked["method"], settings)  # refuses a wrong setting before anything is downloaded
    read = None if rules is None else read_rules(rules)
    seen = None if stats is None else read_stats(stats)
    check_target(src, dst, overwrite=asked["overwrite"] or asked["resume"])
    source: Source = find_source(src, revision, offline, headers_only=asked["dry_run"])
    if source.remote is None:
        keep_apart(dst, *source.checkpoint.places)
    seq = asked.pop("seq")
    if given is not None:
        longest = longest_context(source.checkpoint.config)
        given = given._replace(seq=fitting_context(seq, {source.checkpoint.folder: longest}, "piece"))
    asked["workers"] = asked["workers"] or default_workers()
    options = QuantizeOptions(
        settings=settings,
        rules=read,
        stats=seen,
        text=given,
        name=source.name,
        revision=source.revision,
        headers_only=source.remote is not None,
        **asked,
    )
    try:
        return Quantization(source.checkpoint, options)
    except BcqError as fault:
        if fault.code == "BCQ-E627":
            fault.hint = f"convert it, without loss: {command_line('bcqfmt', 'convert', src, dst)}"
        raise


def _carry_out(quantization: Quantization, dst: Path) -> None:
    plan = quantization.plan
    with stoppable(dst, resumed=True), Progress("quantizing", plan.nbytes, len(plan.shards)) as progress:
        # running a model on a text frees many blocks of 1 to 4 MB: giving those back took an eighth of its time
        return_large_blocks(1 << 20 if quantization.options.text is None else 1 << 22)
        quantization.run(dst, progress.tick, progress.done, render.say)


def _report(dst: Path) -> tuple[Report, list[Finding]]:
    import bcqfmt
    from bcqfmt.converters.report import make_report

    with bcqfmt.open(dst) as checkpoint:
        return make_report(checkpoint), _short_rows(checkpoint)


def _short_rows(checkpoint: Checkpoint) -> list[Finding]:
    """BCQ-E658 where much of the weights is no number of them: a scheme of many parts on rows of few columns."""
    weights = list(checkpoint.weights())
    stored = sum(8 * weight.nbytes for _, weight in weights)
    spare = sum(spare_bits(weight.spec) for _, weight in weights)
    if spare < _SPARE * stored:
        return []
    name, worst = max(weights, key=lambda pair: spare_bits(pair[1].spec) / pair[1].nbytes)
    numbers = sum(weight.size for _, weight in weights)
    found = (
        f"{stored / numbers:.2f} bits per weight, of which {spare / numbers:.2f} are ends of packed words, column "
        f"order and row pointers; rows of {worst.shape[-1]} columns here"
    )
    return [Finding("BCQ-E658", checkpoint.path.name, name, found, "rows of some thousand columns")]


def _plan(quantization: Quantization, dst: Path) -> dict[str, Any]:
    """The figures of the plan."""
    choice, plan, tensors = quantization.choice, quantization.plan, quantization.source.tensors
    recipes = []
    for i, recipe in enumerate(choice.recipes()):
        names = [name for name, number in choice.weights.items() if number == i]
        recipes.append({**recipe, "weights": len(names), "bytes": sum(tensors[n].nbytes for n in names)})
    reasons: dict[str, dict[str, int]] = {}
    for name, reason in choice.dense.items():
        row = reasons.setdefault(reason, {"tensors": 0, "bytes": 0})
        row["tensors"] += 1
        row["bytes"] += tensors[name].nbytes
    return {
        "source": str(quantization.source.folder),
        "target": str(dst),
        "recipes": recipes,
        "dense": reasons,
        "coverage": round(100 * plan.coverage, 4),
        "input_bytes": plan.nbytes,
        "shards": [{"file": shard.file, "source_bytes": shard.nbytes} for shard in plan.shards],
        "workers": quantization.options.workers,
        "weights": {name: choice.weights[name] for name in sorted(choice.weights)},
        "unused_rules": choice.unused,
        "warnings": [finding.as_dict() for finding in quantization.warnings],
    }


def _plan_text(quantization: Quantization, plan: dict[str, Any]) -> list[str]:
    pairs = []
    for recipe in plan["recipes"]:
        settings = ", ".join(f"{key} = {_shown(value)}" for key, value in recipe["settings"].items())
        counted = f"{render.count(recipe['weights'], 'weight')}; {render.size(recipe['bytes'])}"
        pairs.append(("quantized", f"{recipe['method']} ({settings}): {counted}"))
    for reason, row in sorted(plan["dense"].items()):
        pairs.append(
            ("dense", f"{escape(reason)}: {render.count(row['tensors'], 'tensor')}; {render.size(row['bytes'])}")
        )
    pairs += [("unused", line) for line in plan["unused_rules"]]
    covered = render.percent(100 * quantization.plan.coverage)
    share = f"{covered} of {quantization.plan.parameters:,} parameters are quantized"
    pairs += [
        ("coverage", share),
        ("input", f"{render.size(plan['input_bytes'])}, {render.count(len(plan['shards']), 'output file')}"),
        ("workers", str(plan["workers"])),
    ]
    return [f"plan: {escape(quantization.plan.options['name'])} -> {escape(plan['target'])}", *render.fields(pairs)]


def _text(quantization: Quantization, made: Report, dst: Path, used: dict[str, Any], written: list[str]) -> list[str]:
    lines = [f"warning: {finding.text()}" for finding in quantization.warnings]
    lines += [*table(made, _WORST), "", f"{escape(str(dst))}: {total_line(made)}"]
    lines += [f"report: {escape(path)}" for path in written]
    rate = render.size(int(quantization.plan.nbytes / max(used["seconds"], 1e-3)))
    lines.append(f"{rate}/s, {used['seconds']:.1f} s, peak memory {render.size(used['peak_rss_bytes'])}")
    steps = run_it(dst)
    if len(made.weights) > _WORST:
        steps["all weights"] = command_line("bcqfmt", "report", dst)
    return [*lines, *step_lines({**steps, "prove it": command_line("bcqfmt", "validate", "--deep", dst)})]


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else escape(str(value))
