"""``bcqfmt generate``: text from a BCQ folder, for a quick look."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import click

from bcqfmt.cli import render
from bcqfmt.cli.main import json_option, verb
from bcqfmt.cli.params import ParamType
from bcqfmt.errors import escape

DTYPES = ("auto", "float32", "bfloat16", "float16")


class _Device(ParamType[str]):
    """``cpu``, ``cuda`` or ``cuda:1``."""

    name = "device"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """As it is, if torch could mean a device by it."""
        if not re.fullmatch(r"cpu|cuda(:\d{1,3})?", value):
            self.fail(f"{value!r} is not cpu, cuda or cuda:N.", param, ctx)
        return value


device_option = click.option(
    "--device", type=_Device(), default="cpu", show_default=True, metavar="cpu|cuda[:N]", help="Where it is run."
)


@verb("generate")
@click.argument("bcq", type=click.Path(path_type=Path))
@click.option("--prompt", required=True, help="The text to go on with.")
@click.option("--max-new-tokens", type=click.IntRange(1, 1 << 20), default=64, show_default=True, help="Stop there.")
@click.option("--dtype", type=click.Choice(DTYPES), default="auto", show_default=True, help="Type of the activations.")
@click.option("--exact", is_flag=True, help="Multiply with the exact dense matrices instead of using the kernels.")
@click.option("--planes", type=click.IntRange(1, 8), help="Use only the first planes of every weight.")
@device_option
@json_option
def command(
    bcq: Path, prompt: str, max_new_tokens: int, dtype: str, exact: bool, planes: int | None, device: str,
    as_json: bool,
) -> None:  # fmt: skip
    """Generate text with a BCQ checkpoint.

    BCQ is a BCQ folder with its tokenizer. The likeliest token is taken every time, so the same command gives the same
    text. With --exact it is the text that the dense export gives. Needs torch and transformers:
    pip install 'bcqfmt[transformers]'.

    \b
    Example:
      bcqfmt generate model-bcq/ --prompt "Once upon a time"
      bcqfmt generate model-bcq/ --prompt "Once upon a time" --max-new-tokens 200 --exact
      bcqfmt generate model-bcq/ --prompt "Once upon a time" --device cuda
    """
    from bcqfmt.checkpoint.reader import open as open_checkpoint
    from bcqfmt.integrations.transformers import run

    open_checkpoint(bcq).close()  # what is no BCQ folder is told so before anything heavy is loaded
    with ExitStack() as stack:
        tell_of_kernels(stack)
        loaded = run.load(bcq, dtype=dtype, exact=exact, planes=planes, device=device)
        text, tokens, seconds = run.generate(loaded, prompt, most=max_new_tokens, tick=bar(stack, max_new_tokens))
    rate = tokens / max(seconds, 1e-9)
    if as_json:
        facts = {"bcq": str(bcq), "prompt": prompt, "text": text, "tokens": tokens}
        render.emit_json({**facts, "seconds": round(seconds, 3), "tokens_per_second": round(rate, 2)})
        return
    render.echo((prompt + text).split("\n"))
    render.flush()
    render.say(f"{render.count(tokens, 'token')} in {seconds:.2f} s, {rate:.1f} tokens/s")


def tell_of_kernels(stack: ExitStack) -> None:
    """A line on stderr for every CUDA kernel that is compiled until the stack is left: it can take a minute."""
    from tqdm import tqdm

    from bcqfmt.kernels.runtime.cubins import telling

    def tell(name: str, folder: Path) -> None:
        with tqdm.external_write_mode(file=sys.stderr):  # a bar makes way for it
            render.say(f"compiling {name} for this GPU, once, up to a minute, to {escape(str(folder))}")

    stack.enter_context(telling(tell))


def bar(stack: ExitStack, total: int) -> Callable[[int], None] | None:
    """A counter of tokens on a terminal."""
    if sys.stderr is None or not sys.stderr.isatty():
        return None
    from tqdm import tqdm

    shown = stack.enter_context(tqdm(total=total, unit="token", leave=False))

    def tick(done: int) -> None:
        shown.update(done)

    return tick
