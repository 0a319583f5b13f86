"""Model cards of converted and quantized checkpoints.

The page is TEMPLATE, with the snippets below it; edit them here. Foreign text goes through :func:`_words`, front
matter through `source.front_matter`: neither can become markup. Of the source's card the licence, language, base model,
tags and data sets are kept; its text is linked, because what it says about running the model is about another format.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from string import Template
from typing import Any, NamedTuple

from bcqfmt.checkpoint.model_file import ModelFile
from bcqfmt.converters.source.front_matter import front_lines, front_matter, is_repo_id
from bcqfmt.converters.source.quant_config import Settings
from bcqfmt.errors import escape
from bcqfmt.version import __version__

TEMPLATE = """\
---
$front
---

# $title

$summary

| | |
|---|---|
$rows

$more

## Use it

Install bcqfmt from a clone or wheel (`pip install '.[transformers]'`): its name is not on PyPI yet.

$snippets

## Check it

`bcqfmt validate --deep FOLDER` checks every rule of the format and every digest. $back
"""
# `push` writes the name of the repository into this line; until then it is the folder that the card lies in
NAME_LINE = 'name = "."  # a folder, or a name on the hub'
TRANSFORMERS = f"""\
With transformers:

```python
import bcqfmt.integrations.transformers  # registers the format
from transformers import AutoModelForCausalLM, AutoTokenizer

{NAME_LINE}
model = AutoModelForCausalLM.from_pretrained(name)
tokenizer = AutoTokenizer.from_pretrained(name)
inputs = tokenizer("Once upon a time", return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=40)[0]))
```

With vLLM (`pip install vllm`, and bcqfmt; run with vLLM 0.26 on a GPU, with 0.26 and 0.32 on CPUs):

```python
from vllm import LLM, SamplingParams

{NAME_LINE}
model = LLM(name)
print(model.generate("Once upon a time", SamplingParams(max_tokens=40))[0].outputs[0].text)
```

"""
TORCH = f"""\
With torch, one layer:

```python
import os

import bcqfmt
import torch
from bcqfmt.integrations.torch import BcqLinear
from huggingface_hub import snapshot_download

{NAME_LINE}
checkpoint = bcqfmt.open(name if os.path.isdir(name) else snapshot_download(name))
weight = next(weight for _, weight in checkpoint.weights() if len(weight.shape) == 2)
layer = BcqLinear.from_weight(weight)
print(weight.name, layer(torch.ones(1, weight.shape[1])).shape)
```"""
_NAME = re.compile(r'^name = "[^"\n]*"  # a folder, or a name on the hub$', re.MULTILINE)
_STATED = re.compile(r"(?:[\w-][\w.-]*/)?(?!tmp|checkpoint-\d)[\w-][\w.-]*")  # neither a path nor a folder of a run
_PERPLEXITY = "| perplexity |"
_SIZES = "| model files |"
_OTHERS = {  # tags that are about the source's format, or about tools that read it
    "gptq", "awq", "hqq", "compressed-tensors", "auto-round", "autoround", "auto-gptq", "gptqmodel", "llm-compressor",
    "anybcq", "text-generation-inference", "bcq", "quantized",
}  # fmt: skip


class Facts(NamedTuple):
    """What a card says of every folder. ``name``: owner/name on the hub, or a folder's; ``revision``: the commit."""

    name: str
    revision: str
    config: Mapping[str, Any]
    source_card: bytes | None
    side_files: Collection[str]
    files: Sequence[ModelFile]
    coverage: float
    source_bytes: int
    provenance: bool


class How(NamedTuple):
    """How a folder was made: how the first sentence begins, rows of the table, what follows it, how to restore."""

    summary: str
    rows: list[tuple[str, str]]
    more: str = ""
    back: str = ""


def model_card(facts: Facts, how: How) -> bytes:
    """A README.md with front matter."""
    weights = elements = nbytes = 0
    for file in facts.files:
        for weight, spec in file.specs.items():
            elements += spec.stack * spec.out * spec.columns
            nbytes += sum(part.nbytes for part in file.parts(weight).values())
            weights += 1
    bits = f"{nbytes * 8 / elements if elements else 0.0:.3f}"
    written = sum(file.source.size for file in facts.files)
    rows = [
        ("source", _source(facts)),
        *how.rows,
        ("bits per weight", f"{bits} on average; {100 * facts.coverage:.1f} % of the parameters are quantized"),
        ("model files", f"{_size(facts.source_bytes)} in the source, {_size(written)} here"),
    ]
    page = Template(TEMPLATE).substitute(
        front="\n".join(front_lines(_front(facts))),
        title=_words(_title(facts)),
        summary=f"{how.summary} {weights} weights, {bits} bits per weight on average.",
        rows="\n".join(f"| {label} | {text} |" for label, text in rows if text),
        more=how.more,
        snippets=(TRANSFORMERS if _generates(facts) else "") + TORCH,
        back=how.back,
    )
    return re.sub(r"\n{3,}", "\n\n", page).encode()


def converted(settings: Settings, provenance: bool) -> How:
    """Of a folder that was converted without loss."""
    method = _words(settings.method or "quantized")
    article = "an" if method[0] in "aeiou" else "a"
    summary = f"Converted without loss from {article} {method} checkpoint by bcqfmt {__version__}:"
    size = settings.group_size
    stated = [
        method,
        f"{settings.bits} bit" if settings.bits is not None else "",
        "" if size is None else f"groups of {size}" if size > 0 else "one group per row",
        "symmetric" if settings.sym is True else "asymmetric" if settings.sym is False else "",
        "act order" if settings.desc_act is True else "",
        f"by {settings.tool[0]} {'.'.join(map(str, settings.tool[1]))}".strip() if settings.tool is not None else "",
    ]
    dataset = settings.raw.get("dataset")
    text = _words(dataset) if isinstance(dataset, str) and len(dataset) <= 80 else "not recorded in the source"
    back = "It was converted without what restores the source."
    if provenance:
        back = "`bcqfmt restore FOLDER OUT` writes the source again, byte for byte"
        back += "; `bcqfmt verify SOURCE FOLDER` proves that nothing was lost."
    rows = [("method", f"{', '.join(filter(None, stated))}; kept bit for bit"), ("calibration", text)]
    return How(summary, rows, back=back)


def quantized(recipes: Sequence[tuple[Mapping[str, Any], int]], relative: float | None, calibration: str) -> How:
    """Of a model that was quantized here. ``recipes``: method and settings, and for how many weights."""
    summary = f"Quantized from a dense checkpoint by bcqfmt {__version__}:"
    lines = [
        "| weights | method | settings |",
        "|---|---|---|",
        *(f"| {count} | `{_cell(recipe['method'])}` | {_settings(recipe['settings'])} |" for recipe, count in recipes),
        "",
        "`bcq_quantization.json` has every weight's method and error; `bcqfmt report FOLDER` shows them.",
    ]
    rows = [
        ("method", ", ".join(dict.fromkeys(_cell(recipe["method"]) for recipe, _ in recipes))),
        ("calibration", calibration),
        ("relative error of the weights", "" if relative is None else f"{100 * relative:.3g} % (Frobenius norm)"),
    ]
    back = "Quantizing rounds: the source cannot be restored from this folder."
    return How(summary, rows, "\n".join(lines), back)


def with_name(card: str, repo_id: str) -> str:
    """The card with ``repo_id`` in its snippets, so that they run as they stand; other cards stay as they are."""
    return _NAME.sub(NAME_LINE.replace('"."', f'"{repo_id}"'), card)


def with_perplexity(card: str, text: str) -> str | None:
    """The card with this perplexity in its table; None where there is no table of ours."""
    row = f"{_PERPLEXITY} {_words(text)} |"
    lines = [line for line in card.split("\n") if not line.startswith(_PERPLEXITY)]
    place = next((i for i, line in enumerate(lines) if line.startswith(_SIZES)), None)
    return None if place is None else "\n".join([*lines[: place + 1], row, *lines[place + 1 :]])


def perplexity_in(card: str) -> str:
    """What :func:`with_perplexity` has put into the card; empty where there is none."""
    rows = [line for line in card.split("\n") if line.startswith(_PERPLEXITY)]
    return rows[0].removeprefix(_PERPLEXITY).strip(" |") if rows else ""


def _title(facts: Facts) -> str:
    """The model's name: of its repository, else what config.json calls it, else the source folder's."""
    stated = facts.config.get("_name_or_path")
    if "/" not in facts.name and isinstance(stated, str) and _STATED.fullmatch(stated):
        return stated.rpartition("/")[2]
    return facts.name.rpartition("/")[2] or facts.name


def _source(facts: Facts) -> str:
    if not is_repo_id(facts.name):
        card = " ([its card](bcq_source/files/README.md))" if facts.provenance and facts.source_card else ""
        return f"{_words(facts.name)}{card}; sizes and SHA-256 of its files are in `bcq_manifest.json`"
    page = f"https://huggingface.co/{facts.name}"
    if not re.fullmatch(r"[0-9a-f]{40}", facts.revision):
        return f"[{facts.name}]({page})"
    return f"[{facts.name}]({page}/tree/{facts.revision}), commit `{facts.revision}`"


def _front(facts: Facts) -> dict[str, str | list[str]]:
    """The base model is the source's name on the hub, else the source's own base model, if that is on the hub."""
    kept = front_matter(facts.source_card)
    stated = kept.pop("base_model", [])
    base = [facts.name] if is_repo_id(facts.name) else [stated] if isinstance(stated, str) else stated
    tags = kept.pop("tags", [])
    found = {key: value for key, value in kept.items() if key not in ("base_model_relation", "library_name")}
    if base and all(is_repo_id(name) for name in base):
        found |= {"base_model": base[0] if len(base) == 1 else base, "base_model_relation": "quantized"}
    own = [tag for tag in ([tags] if isinstance(tags, str) else tags) if tag.lower() not in _OTHERS]
    return {**found, "library_name": "bcqfmt", "tags": ["bcq", "quantized", *own]}


def _generates(facts: Facts) -> bool:
    """Whether the model writes text, and its tokenizer is there: what the first two snippets need."""
    names = facts.config.get("architectures")
    causal = isinstance(names, list) and any(isinstance(name, str) and name.endswith("ForCausalLM") for name in names)
    return causal and any(name in facts.side_files for name in ("tokenizer.json", "tokenizer.model", "vocab.json"))


def _settings(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{_cell(key)} = {_cell(value)}" for key, value in settings.items())


def _cell(value: Any) -> str:
    """Text that is safe in a table of a Markdown page."""
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return re.sub(r"([\\`|<>*_\[\]])", r"\\\1", escape(text)) if not text.replace("_", "").isalnum() else text


def _words(text: str) -> str:
    """Foreign text inside a Markdown page: no link, no picture, no HTML, no code."""
    return re.sub(r"([\\`<>\[\]|*]|:(?=//)|(?<=www)\.)", r"\\\1", escape(text))


def _size(nbytes: int) -> str:
    power = min(max(len(str(nbytes)) - 1, 0) // 3, 4)
    return f"{nbytes / 1000**power:.{2 if power else 0}f} {('B', 'kB', 'MB', 'GB', 'TB')[power]}"
