"""The model card of a converted checkpoint: the source's licence and language kept, the rest said plainly."""

from __future__ import annotations

import re

from bcqfmt.converters.settings import Settings
from bcqfmt.errors import escape
from bcqfmt.modelfile import ModelFile
from bcqfmt.version import __version__

__all__ = ["model_card"]

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
    front = _front_matter(source_card)
    front += [
        f"base_model: {_yaml(name)}",
        "base_model_relation: quantized",
        "library_name: bcqfmt",
        "tags:",
        "- bcq",
        "- quantized",
    ]
    shown = escape(name)
    summary = (
        f"Converted without loss from a {escape(settings.method or 'quantized')} checkpoint by bcqfmt {__version__}:"
        f" {weights} weights, {bits:.3f} bits per weight on average."
    )
    lines = [
        "---",
        *front,
        "---",
        "",
        f"# {shown} in BCQ",
        "",
        summary,
        "",
        "```python",
        "import bcqfmt",
        "",
        'checkpoint = bcqfmt.open("this/folder")',
        "for name, weight in checkpoint.weights():",
        "    values = weight.dequantize()   # the source's own values, bit for bit",
        "```",
        "",
        "Check it: `bcqfmt validate --deep FOLDER`. Get the source back, byte for byte: `bcqfmt restore FOLDER OUT`.",
        "",
    ]
    return "\n".join(lines).encode()


def _front_matter(card: bytes | None) -> list[str]:
    """Lines of the source's front matter, without the keys that we set ourselves."""
    if card is None:
        return []
    match = re.match(r"---\r?\n(.*?)\r?\n---", card.decode("utf-8", "replace"), re.DOTALL)
    if match is None:
        return []
    kept: list[str] = []
    keep = True
    for line in match[1].splitlines():
        key = re.match(r"([A-Za-z0-9_-]+)\s*:", line)
        if key is not None:
            keep = key[1] not in _OURS
        if keep:
            kept.append(line)
    return kept


def _yaml(text: str) -> str:
    return '"' + escape(text).replace("\\", "\\\\").replace('"', '\\"') + '"'
