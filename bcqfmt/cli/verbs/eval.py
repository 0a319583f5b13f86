"""``bcqfmt eval``: how well a BCQ folder predicts a text, and how far it is from a reference."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click

from bcqfmt.cli import render
from bcqfmt.cli.command import json_option, verb
from bcqfmt.cli.options import model_options
from bcqfmt.cli.progress import announce_kernels, bar
from bcqfmt.errors import error, escape


@verb("eval")
@click.argument("bcq", type=click.Path(path_type=Path))
@click.option("--text", "file", type=click.Path(path_type=Path), required=True, help="UTF-8 text to predict.")
@click.option("--reference", type=click.Path(path_type=Path), metavar="FOLDER", help="Compare with this model.")
@click.option("--context", type=click.IntRange(2, 1 << 20), default=512, show_default=True, help="Tokens per window.")
@click.option("--max-tokens", type=click.IntRange(2), metavar="N", help="Use the first N tokens of the text only.")
@click.option("--card", is_flag=True, help="Write the perplexity into the model card, README.md.")
@model_options
@json_option
def command(
    bcq: Path,
    file: Path,
    reference: Path | None,
    context: int,
    max_tokens: int | None,
    card: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Measure a BCQ checkpoint on a text: perplexity, speed.

    BCQ is a BCQ folder with its tokenizer. The text is cut into windows that do not overlap; in each, every token but
    the first is predicted. With --reference, a dense or BCQ folder with the same tokenizer, the divergence of the
    predictions (KL, nats per token) and how often both find the same token likeliest are measured too. Needs torch and
    transformers: bcqfmt doctor has the command.

    \b
    Example:
      bcqfmt eval model-bcq/ --text wiki.txt
      bcqfmt eval model-bcq/ --text wiki.txt --reference model/ --context 1024
    """
    from bcqfmt.checkpoint.reader import open as open_checkpoint
    from bcqfmt.integrations.transformers import run

    open_checkpoint(bcq).close()
    if card:
        _write_card(bcq, "")  # a card without a place for it is found before the work, not after it
    text = _read(file)
    with ExitStack() as stack:
        announce_kernels(stack)
        loaded = run.load(bcq, **options)
        plain = {name: options[name] for name in ("dtype", "device")}
        other = None if reference is None else run.load(reference, **plain)
        windows = run.windows_of(loaded, text, context, max_tokens)
        if other is not None and run.windows_of(other, text, context, max_tokens) != windows:
            raise error(
                "BCQ-E302", other.folder.name, found="another tokenizer", expected="a reference with the same one"
            )
        tick = bar(stack, total=sum(map(len, windows)), unit="token")
        found = run.evaluate(loaded, windows, other, tick=tick)
    rate = found.tokens / max(found.seconds, 1e-9)
    if card:
        _write_card(bcq, f"{found.perplexity:.4f} on {file.name} ({found.tokens:,} tokens, windows of {context})")
    if as_json:
        facts = {"bcq": str(bcq), "reference": None if reference is None else str(reference), "context": context}
        render.emit_json({**facts, **found._asdict(), "tokens_per_second": round(rate, 2)})
        return
    pairs = [("perplexity", f"{found.perplexity:.4f} over {found.tokens:,} tokens, windows of {context}")]
    if found.divergence is not None and found.top1 is not None:
        pairs += [
            ("reference", f"perplexity {found.reference_perplexity:.4f}"),
            ("KL", f"{found.divergence:.3e} nats per token, at most {found.largest_divergence:.3e}"),
            ("top-1", f"{100 * found.top1:.3f} % the same"),
        ]
    pairs.append(("speed", f"{rate:.1f} tokens/s"))
    render.echo([escape(str(bcq)), *render.fields(pairs)])


def _write_card(bcq: Path, text: str) -> None:
    """Put the perplexity into the card; BCQ-E302 where it has no table of ours. With no text it is only looked at."""
    from bcqfmt.container.durable import write_file
    from bcqfmt.converters.jobs.model_card import with_perplexity

    place = bcq / "README.md"
    now = _read(place) if place.exists() else ""
    made = with_perplexity(now, text)
    if made is None:
        found = "no model card with the table that convert and quantize write"
        hint = "leave --card out, and put the perplexity where it belongs by hand"
        raise error("BCQ-E302", str(place), found=found, expected="a line '| model files |'", hint=hint)
    if text:
        write_file(place, made.encode())


def _read(file: Path) -> str:
    wanted = "a UTF-8 text"
    try:
        return file.read_bytes().decode("utf-8")
    except IsADirectoryError as fault:
        raise error("BCQ-E302", str(file), found="a folder", expected=wanted, hint="name a file in it") from fault
    except OSError as fault:
        code = "BCQ-E101" if isinstance(fault, FileNotFoundError) else "BCQ-E102"
        raise error(code, str(file), found=fault.strerror or str(fault), expected=wanted) from fault
    except UnicodeDecodeError as fault:
        hint = "write it as UTF-8: iconv -f LATIN1 -t UTF-8, if that is what it is in"
        raise error(
            "BCQ-E102", str(file), found=f"byte {fault.start} is no UTF-8", expected=wanted, hint=hint
        ) from fault
