"""The rows of the table, and the orderings that the papers lead one to expect; all fixed before the first run."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import Any

__all__ = ["CALIBRATION", "CONTEXT", "ORDERINGS", "ROWS", "WINDOWS", "Ordering", "Row", "Verdict", "judged"]

CONTEXT = 512
WINDOWS = 8
CALIBRATION = {"rows": 32, "seq": 512, "seed": 0}


@dataclass(frozen=True, slots=True)
class Row:
    """``options``: of `bcqfmt quantize`; empty: nothing is quantized. ``atom``: what happens in the forward pass."""

    name: str
    text: str
    options: tuple[str, ...] = ()
    atom: str = ""  # rows, outliers, all, kv: see smollm2_atom
    folder: str = ""  # a folder that rows share

    @property
    def stats(self) -> bool:
        """Whether the method reads calibration statistics."""
        return any(word in self.options for word in ("gptq", "atom", "mixed24"))


def _options(method: str, **given: object) -> tuple[str, ...]:
    pairs = [(f"--{key.replace('_', '-')}", str(value)) for key, value in given.items()]
    return ("--method", method, *(word for pair in pairs for word in pair))


def _uniform(method: str, bits: int, group: int) -> Row:
    text = f"{method}, {bits} bit, groups of {group}"
    if method == "rtn" and bits == 3:
        text += " (uniform 3 bit)"
    return Row(f"{method}-{bits}-g{group}", text, _options(method, bits=bits, group_size=group))


def _atom(name: str, text: str, kind: str, folder: str, **given: object) -> Row:
    return Row(name, text, _options("atom", **given) if given else (), kind, folder)


_WHOLE = {"group_size": 2048, "clip": 1, "activation_clip": 1}  # more than any layer is wide: one group
_GROUPS = {"group_size": 128, "clip": 1, "activation_clip": 1}
_CLIPPED = {"group_size": 128, "clip": 0.85, "activation_clip": 0.9}
_ROUNDED = {**_CLIPPED, "rounding": "gptq"}

ROWS: tuple[Row, ...] = (
    Row("fp16", "FP16"),
    *(_uniform("rtn", bits, 128) for bits in (4, 3, 2)),
    *(_uniform("gptq", bits, 128) for bits in (4, 3, 2)),
    *(_uniform("bcq", bits, 128) for bits in (4, 3, 2)),
    Row("mixed24", "mixed24, no outliers", _options("mixed24", outliers=0)),
    Row("mixed24-outliers", "mixed24, 0.2 % outliers", _options("mixed24", outliers=0.002)),
    *(_uniform("bcq", bits, 32) for bits in (4, 3, 2)),
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
    """The perplexity of ``low`` is expected to be at most that of ``high``."""

    claim: str
    low: str
    high: str


def _orderings() -> list[Ordering]:
    made = [Ordering("bcq <= rtn at equal bits", f"bcq-{bits}-g128", f"rtn-{bits}-g128") for bits in (4, 3, 2)]
    made += [Ordering("gptq <= rtn", f"gptq-{bits}-g128", f"rtn-{bits}-g128") for bits in (4, 3, 2)]
    for low in ("mixed24", "mixed24-outliers"):
        made.append(Ordering("mixed24 better than 3-bit rtn", low, "rtn-3-g128"))
        made += [
            Ordering("mixed24 better than 2-bit anything", low, high)
            for high in ("rtn-2-g128", "gptq-2-g128", "bcq-2-g128", "bcq-2-g32")
        ]
    made.append(Ordering("outliers help", "mixed24-outliers", "mixed24"))
    made += [Ordering("smaller groups help", f"bcq-{bits}-g32", f"bcq-{bits}-g128") for bits in (4, 3, 2)]
    made += [
        Ordering("Atom, table 4: outliers in FP16 help", "atom-fp16", "atom-rtn"),
        Ordering("Atom, table 4: FP16 outliers are better than INT8", "atom-fp16", "atom-int8"),
        Ordering("Atom, table 4: groups help", "atom-g128", "atom-int8"),
        Ordering("Atom, table 4: clipping helps", "atom-clip", "atom-g128"),
        Ordering("Atom, table 4: GPTQ helps", "atom-gptq", "atom-clip"),
        Ordering("Atom, table 4: INT4 in the KV cache costs", "atom-gptq", "atom-kv"),
    ]
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
