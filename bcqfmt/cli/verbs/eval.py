"""``bcqfmt eval``: how well a model predicts a text, how far it is from a reference, what it scores in tasks."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from bcqfmt.cli import render
from bcqfmt.cli.command import FilePath, json_option, usage_error, verb
from bcqfmt.cli.expect import expect
from bcqfmt.cli.options import check_model_options, context_option, fitting_context, model_options
from bcqfmt.cli.progress import announce_kernels, bar, waiting
from bcqfmt.cli.sources import read_text
from bcqfmt.errors import error, escape
from bcqfmt.integrations.model_folder import check_folder, require_harness

if TYPE_CHECKING:
    from bcqfmt.integrations.transformers.run import Figures, Loaded
    from bcqfmt.integrations.transformers.tasks import Score, Tasks

_FOLDER = FilePath()


@verb("eval")
@click.argument("model", type=_FOLDER)
@click.option("--text", "file", type=_FOLDER, metavar="FILE", help="UTF-8 text to predict.")
@click.option("--reference", type=_FOLDER, metavar="FOLDER", help="With --text: compare with this model.")
@context_option("asked", "window")
@click.option("--max-tokens", type=click.IntRange(2), metavar="N", help="Use the first N tokens of the text only.")
@click.option("--card", is_flag=True, help="Write the perplexity into the model card, README.md.")
@click.option("--tasks", metavar="NAMES", help="Tasks of the lm-evaluation-harness, separated by commas.")
@click.option("--task-folder", type=_FOLDER, metavar="DIR", help="With --tasks: tasks of your own (YAML files).")
@click.option("--num-fewshot", type=click.IntRange(0), metavar="N", help="With --tasks: examples before a question.")
@click.option("--limit", type=click.IntRange(1), metavar="N", help="With --tasks: the first N documents of each only.")
@model_options
@json_option
def command(
    model: Path,
    file: Path | None,
    reference: Path | None,
    asked: int | None,
    max_tokens: int | None,
    card: bool,
    tasks: str | None,
    task_folder: Path | None,
    num_fewshot: int | None,
    limit: int | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Measure a BCQ or a dense checkpoint: perplexity, tasks.

    MODEL is a BCQ folder, or a dense one, with its tokenizer. A --text is cut into windows that do not overlap; in
    each, every token but the first is predicted. With --reference, a dense or BCQ folder with the same tokenizer, the
    divergence of the predictions (KL, nats per token) and how often both find the same token likeliest are measured
    too. --tasks runs tasks of the lm-evaluation-harness, if that is installed. Needs torch and transformers:
    bcqfmt doctor has the commands.

    \b
    Example:
      bcqfmt eval model-bcq/ --text wiki.txt
      bcqfmt eval model-bcq/ --text wiki.txt --reference model/ --context 1024
      bcqfmt eval model-bcq/ --tasks arc_easy,hellaswag --limit 100
    """
    if file is None and tasks is None:
        raise usage_error("Say on what: --text FILE, or --tasks NAMES.")
    if file is None and (reference is not None or card):
        raise usage_error("--reference and --card go with --text.")
    if tasks is None and (task_folder is not None or num_fewshot is not None or limit is not None):
        raise usage_error("--task-folder, --num-fewshot and --limit go with --tasks.")
    dense = expect(model, "bcq", "dense").kind == "dense"
    check_model_options(dense, options)
    if reference is not None:
        expect(reference, "bcq", "dense")
    if tasks is not None:
        require_harness()
    lengths = {folder: check_folder(folder, device=options["device"]) for folder in filter(None, (model, reference))}
    context = 0 if file is None else fitting_context(asked, lengths, "window")
    if card:
        _write_card(model, "")  # a card without a place for it is found before the work, not after it
    text = None if file is None else read_text(file)
    waiting("loading torch and transformers")
    from bcqfmt.integrations.transformers import run

    chosen = None if tasks is None else _tasks(tasks, task_folder)
    found: dict[str, Any] = {"model": str(model), "reference": None if reference is None else str(reference)}
    lines: list[str] = [escape(str(model))]
    with ExitStack() as stack:
        announce_kernels(stack, dense=dense)
        opened = run.open_folder(model, device=options["device"])
        other = None if reference is None else run.open_folder(reference, device=options["device"])
        asked_for = (context, max_tokens, "" if file is None else file.name)
        windows = [] if text is None else run.windows_of(opened, text, *asked_for)
        if other is not None and text is not None and run.windows_of(other, text, *asked_for) != windows:
            expected, hint = "a reference with the same one", "name the model that this one was made from"
            raise error("BCQ-E302", other.folder.name, found="another tokenizer", expected=expected, hint=hint)
        waiting(f"loading {model}")
        loaded = run.load(opened, **options)
        if loaded.note:
            render.say(loaded.note)
        if windows:
            plain = {name: options[name] for name in ("dtype", "device")}
            against = None if other is None else run.load(other, **plain)
            tick = bar(stack, total=sum(map(len, windows)), unit="token")
            figures = run.evaluate(loaded, windows, against, tick=tick)
            rate = figures.tokens / max(figures.seconds, 1e-9)
            found |= {"context": context, **figures._asdict(), "tokens_per_second": round(rate, 2)}
            lines += render.fields(_figures(figures, context, rate, loaded))
            if card and file is not None:
                said = f"{figures.perplexity:.4f} on {file.name} ({figures.tokens:,} tokens, windows of {context})"
                _write_card(model, said)
        if chosen is not None:
            waiting(f"running {render.count(len(chosen.names), 'task')}")
            scores = chosen.run(loaded, limit=limit, shots=num_fewshot)
            found["tasks"] = [score._asdict() for score in scores]
            lines += render.table(("task", "metric", "value", "standard error"), [_row(s) for s in scores], left=(0, 1))
    found["dtype"] = str(loaded.model.dtype).removeprefix("torch.")
    render.show(as_json, render.json_numbers(found), lines)


def _tasks(names: str, folder: Path | None) -> Tasks:
    from bcqfmt.integrations.transformers.tasks import find_tasks

    asked = [name.strip() for name in names.split(",") if name.strip()]
    if not asked:
        raise usage_error("--tasks takes names of tasks, separated by commas.")
    return find_tasks(asked, folder)


def _figures(found: Figures, context: int, rate: float, loaded: Loaded) -> list[tuple[str, str]]:
    pairs = [("perplexity", f"{found.perplexity:.4f} over {found.tokens:,} tokens, windows of {context}")]
    if found.divergence is not None and found.top1 is not None:
        pairs += [
            ("reference", f"perplexity {found.reference_perplexity:.4f}"),
            ("KL", f"{found.divergence:.3e} nats per token, at most {found.largest_divergence:.3e}"),
            ("top-1", f"{100 * found.top1:.3f} % the same"),
        ]
        if found.top1 < 1 and loaded.model.dtype.itemsize < 4:
            pairs.append(("", "rounding in 16 bits decides near ties: --dtype float32 tells whether these are some"))
    return [*pairs, ("speed", f"{rate:.1f} tokens/s")]


def _row(score: Score) -> tuple[str, ...]:
    spread = "" if score.deviation is None else f"{score.deviation:.4f}"
    return escape(score.task), escape(score.metric), f"{score.value:.4f}", spread


def _write_card(bcq: Path, text: str) -> None:
    """Put the perplexity into the card; BCQ-E302 where it has no table of ours. With no text it is only looked at."""
    from bcqfmt.container.durable import write_file
    from bcqfmt.converters.jobs.model_card import with_perplexity

    place = bcq / "README.md"
    now = read_text(place) if place.exists() else ""
    made = with_perplexity(now, text)
    if made is None:
        found = "no model card with the table that convert and quantize write"
        hint = "leave --card out, and put the perplexity where it belongs by hand"
        raise error("BCQ-E302", str(place), found=found, expected="a line '| model files |'", hint=hint)
    if text:
        write_file(place, made.encode())
