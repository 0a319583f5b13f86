"""The rows of the table, and the orderings that the papers lead one to expect; all fixed before the first run."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, replace
from typing import Any

__all__ = ["CALIBRATION", "CONTEXT", "ORDERINGS", "ROWS", "Ordering", "Row", "Verdict", "judged"]

CONTEXT = 512
CALIBRATION = {"rows": 128, "seq": 512, "seed": 0}


@dataclass(frozen=True, slots=True)
class Row:
    """``options``: of `bcqfmt quantize`, or of a peer (`smollm2_peers.py`); empty: nothing is quantized."""

    name: str
    text: str
    options: tuple[str, ...] = ()
    atom: str = ""  # what happens in the forward pass: rows, outliers, all, kv, see smollm2_atom
    folder: str = ""  # a folder that rows share
    layers: bool = False  # layer by layer: quantize --text
    weighting: str = "none"  # what tokens count, of statistics or of --text
    train: int = 0  # passes that train scales, with layers
    peer: str = ""  # gptq, awq, autoround or gptqmodel: a tool of smollm2_peers
    planes: int = 0  # of nested planes, those that are read; 0: all

    @property
    def aside(self) -> bool:
        """Whether it only explains others; these come last."""
        return self.name.endswith(("-no-v", "-clip"))

    @property
    def stats(self) -> bool:
        """Whether the method reads calibration statistics."""
        return any(word in self.options for word in ("gptq", "atom", "mixed24", "activations", "multi"))


def _options(method: str, **given: object) -> tuple[str, ...]:
    """Words of the command line; a flag has no value."""
    pairs = [(f"--{key.replace('_', '-')}", str(value)) for key, value in given.items()]
    return ("--method", method, *(word for pair in pairs for word in pair if word))


def _uniform(method: str, bits: int, group: int, mark: str = "", words: str = "", **given: object) -> Row:
    text = f"{method}, {bits} bit, groups of {group}{words and ', ' + words}"
    if (method, bits, group, mark) == ("rtn", 3, 128, ""):
        text += " (uniform 3 bit)"
    return Row(f"{method}-{bits}-g{group}{mark}", text, _options(method, bits=bits, group_size=group, **given))


def _by_layer(method: str, bits: int, group: int, weighting: str = "loss", mark: str = "", **given: object) -> Row:
    words = "layer by layer" + (", by loss" if weighting == "loss" else "")
    row = _uniform(method, bits, group, f"{mark}-seq-{weighting}", words, **given)
    return replace(row, layers=True, weighting=weighting)


def _counted(row: Row, weighting: str) -> Row:
    """The same with statistics in which tokens count differently."""
    return replace(row, name=f"{row.name}-{weighting}", text=f"{row.text}, tokens by {weighting}", weighting=weighting)


def _trained(row: Row) -> Row:
    """The same with trained scales."""
    return replace(row, name=f"{row.name}-trained", text=f"{row.text}, scales trained", train=2)


def _peer(tool: str, bits: int, group: int, *words: str, mark: str = "") -> Row:
    options = ("--bits", str(bits), "--group-size", str(group), *words)
    text = f"{TOOLS[tool]}, {bits} bit, groups of {group}"
    return Row(f"{tool}-{bits}-g{group}{mark}-peer", text, options, peer=tool)


def _nested(planes: int, weighting: str) -> Row:
    """One file, read at several precisions."""
    row = _by_layer("multi", 4, 128, weighting, nested="joint", rounding="gptq")
    text = f"{row.text}, {planes} planes"
    return replace(row, name=f"nested-{planes}-{weighting}", text=text, folder=row.name, planes=planes)


def _without_values(method: str, bits: int, **given: object) -> Row:
    """The projections of the values stay FP16."""
    return _uniform(method, bits, 128, "-no-v", "values in FP16", exclude="v_proj", **given)


def _atom(name: str, text: str, kind: str, folder: str, **given: object) -> Row:
    return Row(name, text, _options("atom", **given) if given else (), kind, folder)


_WHOLE = {"group_size": 2048, "clip": 1, "activation_clip": 1}  # more than any layer is wide: one group
_GROUPS = {"group_size": 128, "clip": 1, "activation_clip": 1}
_CLIPPED = {"group_size": 128, "clip": 0.85, "activation_clip": 0.9}
_ROUNDED = {**_CLIPPED, "rounding": "gptq"}

_PUBLISHED = {"clip": "none", "no_static_groups": ""}  # gptq as the paper has it

TOOLS = {
    "gptq": "llm-compressor, GPTQ", "awq": "llm-compressor, AWQ", "autoround": "AutoRound", "gptqmodel": "GPTQModel",
}  # fmt: skip
BITS = (4, 3, 2)
BEST = ((4, 128), (3, 128), (2, 64))  # bits and group size at which tools are compared
_COMPENSATED = (
    *(_by_layer("bcq", bits, 128, mark="-gptq", rounding="gptq") for bits in BITS),
    _by_layer("bcq", 2, 64, mark="-gptq", rounding="gptq"),
    _by_layer("bcq", 2, 128, mark="-gptq-nobias", rounding="gptq", no_bias=""),
)
ROWS: tuple[Row, ...] = (
    Row("fp16", "FP16"),
    *(_uniform("rtn", bits, 128) for bits in BITS),
    *(_uniform("gptq", bits, 128, **_PUBLISHED, no_act_order="") for bits in BITS),
    *(_uniform("gptq", bits, 128, "-order", "act_order", **_PUBLISHED) for bits in BITS),
    *(_by_layer("gptq", bits, group, "tokens") for bits, group in BEST),
    _trained(_by_layer("gptq", 3, 128, "tokens")),
    _by_layer("rtn", 4, 128, "tokens"),
    *(_by_layer("bcq", bits, 128, "tokens", mark="-gptq", rounding="gptq") for bits in BITS),
    _by_layer("bcq", 2, 128, "tokens", mark="-gptq-nobias", rounding="gptq", no_bias=""),
    *(_by_layer("gptq", bits, group) for bits, group in BEST),
    *(_by_layer("gptq", bits, 32) for bits in BITS),
    *(_trained(_by_layer("gptq", bits, group)) for bits, group in (*BEST, (2, 128))),
    *(_trained(_by_layer("gptq", bits, 32)) for bits in BITS),
    *(_by_layer("rtn", bits, 128) for bits in (4, 3)),
    *(_trained(_by_layer("rtn", bits, 128)) for bits in (4, 3)),
    *_COMPENSATED,
    *(_trained(row) for row in _COMPENSATED),
    Row(
        "mixed24-gptq-seq-loss",
        "mixed24, 0.2 % outliers, gptq, by loss",
        _options("mixed24", outliers=0.002, rounding="gptq"),
        layers=True,
        weighting="loss",
    ),
    _counted(_uniform("bcq", 2, 128, "-gptq", "gptq", rounding="gptq"), "tokens"),
    *(_nested(planes, weighting) for weighting in ("tokens", "loss") for planes in BITS),
    *(_peer("gptq", bits, 64) for bits in BITS),
    *(_peer("gptqmodel", bits, 64) for bits in BITS),
    *(_peer("awq", bits, 64) for bits in BITS),
    *(_peer("autoround", bits, group) for bits, group in (*BEST, (2, 128))),
    *(_peer(tool, 4, 32) for tool in TOOLS),
    *(_peer("autoround", bits, group, "--light", mark="-light") for bits, group in BEST),
    *(_uniform("bcq", bits, 128) for bits in BITS),
    *(_uniform("bcq", bits, 32) for bits in BITS),
    *(_uniform("bcq", bits, 128, "-weighted", "weighted", weighting="activations") for bits in BITS),
    *(_uniform("bcq", bits, 32, "-weighted", "weighted", weighting="activations") for bits in BITS),
    Row("mixed24", "mixed24, no outliers", _options("mixed24", outliers=0)),
    Row("mixed24-outliers", "mixed24, 0.2 % outliers", _options("mixed24", outliers=0.002)),
    Row("mixed24-gptq", "mixed24, no outliers, gptq", _options("mixed24", outliers=0, rounding="gptq")),
    Row("mixed24-gptq-outliers", "mixed24, 0.2 % outliers, gptq", _options("mixed24", outliers=0.002, rounding="gptq")),
    *(_uniform("rtn", bits, 32) for bits in BITS),
    *(_uniform("rtn", bits, 128, "-clip", "clipping search", clip="search") for bits in BITS),
    *(_without_values(method, bits) for method in ("rtn", "bcq") for bits in BITS),
    *(_without_values("gptq", bits, **_PUBLISHED, no_act_order="") for bits in BITS),
    _atom("atom-rtn", "W4A4: RTN, rows and tokens", "rows", ""),
    _atom("atom-fp16", "+ 128 outlier channels in FP16", "outliers", "atom-int8", **_WHOLE),
    _atom("atom-int8", "+ outliers in INT8", "all", "atom-int8", **_WHOLE),
    _atom("atom-g128", "+ groups of 128", "all", "atom-g128", **_GROUPS),
    _atom("atom-clip", "+ clipping", "all", "atom-clip", **_CLIPPED),
    _atom("atom-gptq", "+ GPTQ", "all", "atom-gptq", **_ROUNDED),
    _atom("atom-kv", "+ KV cache in INT4", "kv", "atom-gptq", **_ROUNDED),
)


@dataclass(frozen=True, slots=True)
class Ordering:
    """The perplexity of ``low`` is expected to be at most that of ``high``; ``papers``: by the papers."""

    claim: str
    low: str
    high: str
    papers: bool = True


def _pairs(claim: str, low: str, high: str, papers: bool = True) -> list[Ordering]:
    return [Ordering(claim, low.format(bits), high.format(bits), papers) for bits in BITS]


def _orderings() -> list[Ordering]:
    twos = ("rtn-2-g128", "rtn-2-g128-clip", "rtn-2-g32", "gptq-2-g128", "gptq-2-g128-order", "bcq-2-g128")
    twos += ("bcq-2-g128-weighted", "bcq-2-g32", "bcq-2-g32-weighted")
    made = _pairs("bcq <= rtn at equal bits", "bcq-{}-g128", "rtn-{}-g128")
    made += _pairs("gptq <= rtn", "gptq-{}-g128", "rtn-{}-g128")
    for low in ("mixed24", "mixed24-outliers"):
        made.append(Ordering("mixed24 better than 3-bit rtn", low, "rtn-3-g128"))
        made += [Ordering("mixed24 better than 2-bit anything", low, high) for high in twos]
    made.append(Ordering("outliers help", "mixed24-outliers", "mixed24"))
    made += _pairs("smaller groups help", "rtn-{}-g32", "rtn-{}-g128")
    made += _pairs("smaller groups help", "bcq-{}-g32", "bcq-{}-g128")
    made += [
        Ordering("Atom, table 4: outliers in FP16 help", "atom-fp16", "atom-rtn"),
        Ordering("Atom, table 4: FP16 outliers are better than INT8", "atom-fp16", "atom-int8"),
        Ordering("Atom, table 4: groups help", "atom-g128", "atom-int8"),
        Ordering("Atom, table 4: clipping helps", "atom-clip", "atom-g128"),
        Ordering("Atom, table 4: GPTQ helps", "atom-gptq", "atom-clip"),
        Ordering("Atom, table 4: INT4 in the KV cache costs", "atom-gptq", "atom-kv"),
    ]
    return made + _own()


def _own() -> list[Ordering]:
    """What the papers do not say."""
    made = _pairs("bcq, weighted <= rtn at equal bits", "bcq-{}-g128-weighted", "rtn-{}-g128", False)
    made += _pairs("bcq, weighted <= rtn at equal bytes", "bcq-{}-g128-weighted", "rtn-{}-g32", False)
    made += _pairs("bcq <= rtn at equal bytes", "bcq-{}-g128", "rtn-{}-g32", False)
    made += _pairs("gptq, act_order <= rtn", "gptq-{}-g128-order", "rtn-{}-g128", False)
    for bits, group in BEST:
        ours = f"gptq-{bits}-g{group}-seq"
        for tool, name in TOOLS.items():
            theirs = f"{tool}-{bits}-g{group if tool == 'autoround' else 64}-peer"
            made.append(Ordering(f"gptq, layer by layer <= {name}", f"{ours}-tokens", theirs, False))
            made.append(Ordering(f"gptq, trained <= {name}", f"{ours}-loss-trained", theirs, False))
        made.append(Ordering("trained scales help", f"{ours}-loss-trained", f"{ours}-loss", False))
        made.append(Ordering("gptq, tokens by size <= by loss", f"{ours}-tokens", f"{ours}-loss", False))
    low, high = "gptq-2-g128-seq-loss-trained", "autoround-2-g128-peer"
    made.append(Ordering("gptq, trained <= AutoRound, groups of 128", low, high, False))
    for end, word in (("", "layer by layer"), ("-trained", "trained")):
        for size, pairs in (
            ("bits", ("2-g64-gptq 2-g64", "3-g128-gptq 3-g128")),
            ("bytes", ("2-g128-gptq-nobias 2-g64", "3-g128-gptq 3-g32")),
        ):
            for low, high in map(str.split, pairs):
                low, high = f"bcq-{low}-seq-loss{end}", f"gptq-{high}-seq-loss{end}"
                made.append(Ordering(f"bcq <= gptq at equal {size}, {word}", low, high, False))
    for by in ("tokens", "loss"):
        claim, low, high = f"planes of their own <= nested, {by}", "bcq-{}-g128-gptq-seq-" + by, "nested-{}-" + by
        made += _pairs(claim, low, high, False)
    made += [
        Ordering("gptq, layer by layer <= rtn", f"gptq-{n}-g128-seq-tokens", f"rtn-{n}-g128", False) for n in (4, 3)
    ]
    made += [
        Ordering(
            "gptq <= rtn, both layer by layer", f"gptq-{n}-g128-seq-loss{end}", f"rtn-{n}-g128-seq-loss{end}", False
        )
        for n in (4, 3)
        for end in ("", "-trained")
    ]
    made.append(Ordering("gptq helps mixed24", "mixed24-gptq", "mixed24", False))
    made.append(Ordering("outliers help with gptq rounding", "mixed24-gptq-outliers", "mixed24-gptq", False))
    made += _pairs("smaller groups help bcq, weighted", "bcq-{}-g32-weighted", "bcq-{}-g128-weighted", False)
    made += _pairs("clipping search helps rtn", "rtn-{}-g128-clip", "rtn-{}-g128", False)
    made += _pairs("values in FP16: bcq <= rtn", "bcq-{}-g128-no-v", "rtn-{}-g128-no-v", False)
    made += _pairs("values in FP16: gptq <= rtn", "gptq-{}-g128-no-v", "rtn-{}-g128-no-v", False)
    return made


ORDERINGS: tuple[Ordering, ...] = tuple(_orderings())


@dataclass(frozen=True, slots=True)
class Verdict:
    """``difference``: mean log-likelihood that ``low`` gains per token, in nats, with its standard error."""

    ordering: Ordering
    holds: bool
    difference: float
    error: float


def judged(results: dict[str, dict[str, Any]]) -> list[Verdict]:
    """The orderings whose rows were both measured; windows are compared pair by pair."""
    made = []
    for ordering in ORDERINGS:
        if ordering.low in results and ordering.high in results:
            low, high = results[ordering.low], results[ordering.high]
            gains = [(b - a) / n for a, b, n in zip(low["losses"], high["losses"], low["window_tokens"], strict=True)]
            error = statistics.stdev(gains) / math.sqrt(len(gains)) if len(gains) > 1 else math.nan
            holds = low["perplexity"] <= high["perplexity"]
            made.append(Verdict(ordering, holds, math.log(high["perplexity"] / low["perplexity"]), error))
    return made
