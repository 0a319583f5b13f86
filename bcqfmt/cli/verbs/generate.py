"""``bcqfmt generate``: text from a BCQ folder, for a quick look."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click

from bcqfmt.cli import render
from bcqfmt.cli.command import json_option, verb
from bcqfmt.cli.options import model_options
from bcqfmt.cli.progress import announce_kernels, bar


@verb("generate")
@click.argument("bcq", type=click.Path(path_type=Path))
@click.option("--prompt", required=True, help="The text to go on with.")
@click.option("--max-new-tokens", type=click.IntRange(1, 1 << 20), default=64, show_default=True, help="Stop there.")
@model_options
@json_option
def command(bcq: Path, prompt: str, max_new_tokens: int, as_json: bool, **options: Any) -> None:
    """Generate text with a BCQ checkpoint.

    BCQ is a BCQ folder with its tokenizer. The likeliest token is taken every time, so the same command gives the same
    text. With --exact it is the text that the dense export gives. Needs torch and transformers:
    bcqfmt doctor has the command.

    \b
    Example:
      bcqfmt generate model-bcq/ --prompt "Once upon a time"
      bcqfmt generate model-bcq/ --prompt "Once upon a time" --max-new-tokens 200 --exact
      bcqfmt generate model-bcq/ --prompt "Once upon a time" --device cuda
    """
    from bcqfmt.checkpoint.reader import open as open_checkpoint
    from bcqfmt.integrations.transformers import run

    open_checkpoint(bcq).close()  # refuses what is no BCQ folder before anything heavy is loaded
    with ExitStack() as stack:
        announce_kernels(stack)
        loaded = run.load(bcq, **options)
        tick = bar(stack, total=max_new_tokens, unit="token")
        text, tokens, seconds = run.generate(loaded, prompt, most=max_new_tokens, tick=tick)
    rate = tokens / max(seconds, 1e-9)
    if as_json:
        facts = {"bcq": str(bcq), "prompt": prompt, "text": text, "tokens": tokens}
        render.emit_json({**facts, "seconds": round(seconds, 3), "tokens_per_second": round(rate, 2)})
        return
    render.echo((prompt + text).split("\n"))
    render.flush()
    render.say(f"{render.count(tokens, 'token')} in {seconds:.2f} s, {rate:.1f} tokens/s")
