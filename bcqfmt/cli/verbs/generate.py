"""``bcqfmt generate``: text from a BCQ or dense folder, shown as it is made."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click

from bcqfmt.cli import render
from bcqfmt.cli.command import FilePath, Number, is_given, json_option, usage_error, verb
from bcqfmt.cli.expect import expect
from bcqfmt.cli.options import check_model_options, model_options
from bcqfmt.cli.progress import announce_kernels, bar, waiting
from bcqfmt.errors import BcqError
from bcqfmt.integrations.model_folder import check_folder


@verb("generate")
@click.argument("model", type=FilePath())
@click.option("--prompt", required=True, help="The text to go on with; with --chat, what the user says.")
@click.option("--max-new-tokens", type=click.IntRange(1, 1 << 20), default=64, show_default=True, help="Stop there.")
@click.option("--chat", is_flag=True, help="Put the prompt into the model's chat template, and show the answer only.")
@click.option("--system", metavar="TEXT", help="With --chat: the system message.")
@click.option(
    "--temperature",
    type=Number(0, 100),
    default=0.0,
    show_default=True,
    help="Draw tokens; at 0 the likeliest one is taken.",
)
@click.option("--top-p", type=Number(0, 1, min_open=True), help="Draw from the likeliest, this share in all.")
@click.option("--top-k", type=click.IntRange(1), help="Draw from the K likeliest.")
@click.option("--seed", type=click.IntRange(0, 2**53 - 1), default=0, show_default=True, help="Of drawing.")
@model_options
@json_option
def command(
    model: Path, prompt: str, max_new_tokens: int, chat: bool, system: str | None, as_json: bool, **options: Any
) -> None:
    """Generate text with a BCQ or a dense checkpoint.

    MODEL is a BCQ folder, or a dense one, with its tokenizer. The likeliest token is taken every time, unless
    --temperature is given; either way the same command gives the same text. With --exact it is the text that the dense
    export gives. Needs torch and transformers: bcqfmt doctor has the command.

    \b
    Example:
      bcqfmt generate model-bcq/ --prompt "Once upon a time"
      bcqfmt generate model-bcq/ --prompt "What is gravity?" --chat --max-new-tokens 200
      bcqfmt generate model-bcq/ --prompt "Once upon a time" --temperature 0.8 --top-p 0.95 --seed 7
      bcqfmt generate model-bcq/ --prompt "Once upon a time" --device cuda
    """
    drawing = {name: options.pop(name) for name in ("temperature", "top_p", "top_k", "seed")}
    if not drawing["temperature"] and any(map(is_given, ("top_p", "top_k", "seed"))):
        raise usage_error("--top-p, --top-k and --seed are about drawing: give a --temperature above 0.")
    if system is not None and not chat:
        raise usage_error("--system goes with --chat.")
    for name, text in (("--prompt", prompt), ("--system", system or "")):
        if any("\ud800" <= letter <= "\udfff" for letter in text):  # how Python passes on bytes that are not UTF-8
            raise usage_error(f"{name} is not UTF-8.")
    dense = expect(model, "bcq", "dense").kind == "dense"
    check_model_options(dense, options)
    hint = "--max-new-tokens counts, and so does the prompt"
    check_folder(model, device=options["device"], tokens=max_new_tokens + 1, hint=hint)
    waiting("loading torch and transformers")
    from bcqfmt.integrations.transformers import generation, run

    sampling = generation.Sampling(**{name: value for name, value in drawing.items() if value is not None})
    with ExitStack() as stack:
        announce_kernels(stack, dense=dense)
        opened = run.open_folder(model, device=options["device"])
        ids = generation.prompt_tokens(opened, prompt, most=max_new_tokens, chat=chat, system=system)
        waiting(f"loading {model}")
        loaded = run.load(opened, **options)
        if loaded.note:
            render.say(loaded.note)
        written = "" if chat else prompt  # shown with the first token: messages may come before it

        begun = False

        def show(piece: str) -> None:
            nonlocal written, begun
            render.stream(written + piece)
            written, begun = "", True

        on_screen = (
            not as_json and sys.stdout is not None and sys.stdout.isatty()
        )  # the text itself shows how far it is
        tick = None if on_screen else bar(stack, total=max_new_tokens, unit="token")
        try:
            found = generation.generate(
                loaded, ids, most=max_new_tokens, sampling=sampling, show=None if as_json else show, tick=tick
            )
        except BcqError:
            if begun:
                render.echo("")  # the message has a line of its own
            raise
    rate = found.tokens / max(found.seconds, 1e-9)
    if as_json:
        facts = {"model": str(model), "prompt": prompt, "text": found.text, "tokens": found.tokens}
        speed = {"seconds": round(found.seconds, 3), "tokens_per_second": round(rate, 2)}
        render.emit_json({**facts, "dtype": str(loaded.model.dtype).removeprefix("torch."), **speed})
        return
    if written:  # not one token came
        render.stream(written)
    render.echo("")
    render.flush()
    render.say(f"{render.count(found.tokens, 'token')} in {found.seconds:.2f} s, {rate:.1f} tokens/s")
