"""Model cards of converted and quantized checkpoints; the source's licence and language are kept."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from bcqfmt.checkpoint.model_file import ModelFile
from bcqfmt.converters.source.quant_config import Settings
from bcqfmt.errors import escape
from bcqfmt.version import __version__

__all__ = ["model_card", "quantized_card"]

_OURS = ("base_model", "base_model_relation", "library_name", "tags", "quantized_by")


def model_card(source_card: bytes | None, name: str, files: list[ModelFile], settings: Settings) -> bytes:
    """A README.md with front matter."""
    elements = nbytes = weights = 0
    for file in files:
        for weight, spec in file.specs.items():
            elements += spec.stack * spec.out * spec.columns
            nbytes += sum(part.nbytes for part in file.parts(weight).values())
            weights += 1
    bits = nbytes * 8 / elements if elements else 0.0
    method = _words(settings.method or "quantized")
    article = "an" if method[0] in "aeiou" else "a"
    summary = (
        f"Converted without loss from {article} {method} checkpoint by bcqfmt {__version__}:"
        f" {weights} weights, {bits:.3f} bits per weight on average."
    )
    values = "the source's own values, bit for bit"
    return _page(
        source_card, name, [summary], values, "Get the source back, byte for byte: `bcqfmt restore FOLDER OUT`."
    )


def quantized_card(
    source_card: bytes | None,
    name: str,
    recipes: Sequence[tuple[Mapping[str, Any], int]],
    nbytes: int,
    elements: int,
    figures: Mapping[str, float | None],
) -> bytes:
    """A README.md for a model that was quantized here. ``recipes``: method and settings, and for how many weights."""
    weights = sum(count for _, count in recipes)
    made = f"Quantized from a dense checkpoint by bcqfmt {__version__}: {weights} weights,"
    error = figures["relative"]
    off = "" if error is None else f" The relative error of the weights is {100 * error:.3g} % (Frobenius norm)."
    text = [
        f"{made} {nbytes * 8 / elements:.3f} bits per weight on average.{off}",
        "",
        "| weights | method | settings |",
        "|---|---|---|",
        *(f"| {count} | `{_cell(recipe['method'])}` | {_settings(recipe['settings'])} |" for recipe, count in recipes),
        "",
        "`bcq_quantization.json` has every weight's method and error; `bcqfmt report FOLDER` shows them.",
    ]
    values = "the quantized values, rounded once to the model's own type"
    return _page(source_card, name, text, values, "Quantizing rounds: the source cannot be restored from this folder.")


def _page(source_card: bytes | None, name: str, text: list[str], values: str, source: str) -> bytes:
    """Front matter, title, ``text``, an example whose comment says what the ``values`` are, and how to check."""
    lines = [
        "---",
        *_front(source_card, name),
        "---",
        "",
        f"# {_words(name)} in BCQ",
        "",
        *text,
        "",
        "```python",
        "import bcqfmt",
        "",
        'checkpoint = bcqfmt.open("this/folder")',
        "for name, weight in checkpoint.weights():",
        f"    values = weight.dequantize()   # {values}",
        "```",
        "",
        f"Check it: `bcqfmt validate --deep FOLDER`. {source}",
        "",
    ]
    return "\n".join(lines).encode()


def _settings(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{_cell(key)} = {_cell(value)}" for key, value in settings.items())


def _cell(value: Any) -> str:
    """Text that is safe in a table of a Markdown page."""
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return re.sub(r"([\\`|<>*_\[\]])", r"\\\1", escape(text)) if not text.replace("_", "").isalnum() else text


def _words(text: str) -> str:
    """Foreign text inside a Markdown page: no link, no picture, no HTML, no code."""
    return re.sub(r"([\\`<>\[\]|*])", r"\\\1", escape(text))


def _front(source_card: bytes | None, name: str) -> list[str]:
    """The lines of the front matter. The base model is what the hub calls ``name``, else the source's own, if any."""
    base = [f"base_model: {_yaml(name)}"] if "/" in name else _base(source_card)
    return [
        *_front_matter(source_card),
        *base,
        *(["base_model_relation: quantized"] if base else []),
        "library_name: bcqfmt",
        "tags:",
        "- bcq",
        "- quantized",
    ]


def _base(card: bytes | None) -> list[str]:
    """The lines that name the source's base model, unless it is a local path."""
    lines = _front_matter(card, {"base_model"})
    names = [line.removeprefix("base_model:").strip().removeprefix("- ").strip("\"' ") for line in lines]
    return lines if all(re.fullmatch(r"[\w.-]+/[\w.-]+", name) for name in names if name) else []


def _front_matter(card: bytes | None, wanted: Collection[str] | None = None) -> list[str]:
    """Lines of the source's front matter: those of the ``wanted`` keys, or of all that we do not set ourselves."""
    if card is None:
        return []
    match = re.match(r"---\r?\n(.*?)\r?\n---", card.decode("utf-8", "replace"), re.DOTALL)
    if match is None:
        return []
    kept: list[str] = []
    keep = wanted is None
    for line in match[1].splitlines():
        key = re.match(r"([A-Za-z0-9_-]+)\s*:", line)
        if key is not None:
            keep = key[1] not in _OURS if wanted is None else key[1] in wanted
        if keep:
            kept.append(line if line.isprintable() else escape(line, 4096))
    return kept


def _yaml(text: str) -> str:
    return '"' + escape(text).replace("\\", "\\\\").replace('"', '\\"') + '"'
