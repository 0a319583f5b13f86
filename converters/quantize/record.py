"""``bcq_quantization.json``: how a folder was quantized and how far each weight is from the dense one.

    {"version": "1.0",
     "recipes": [{"method": "rtn", "settings": {...}}, ...],
     "stats": null or the SHA-256 of the calibration statistics,
     "text": null or, quantized layer by layer, {"text": SHA-256, "rows": n, "seq": n, "weighting": "none",
              "train_scales": passes of training},
     "weights": {name: {"recipe": 0, "shape": [...], "bytes": n, "bits_per_weight": b, "mse": x, "relative": x,
                        "sqnr_db": x, "power": x, "noise": x, "notes": {...}}},
     "dense": {name: reason}}

``power`` and ``noise`` are the sums of w^2 and of the squared error, so that figures of several weights can be put
together. A figure is null where it is infinite (no error at all). ``notes`` is what the method recorded for readers of
the weight: the quantization of the activations, for example. The manifest covers the file like any other.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from bcqfmt import limits
from bcqfmt.container.files import inside, read_small
from bcqfmt.container.strict_json import JsonFault, parse
from bcqfmt.converters.jobs.model_card import How, quantized
from bcqfmt.converters.jobs.paths import QUANTIZATION
from bcqfmt.converters.jobs.plan import Plan
from bcqfmt.converters.methods.errors import Sums
from bcqfmt.errors import BcqError, error, escape

from .choice import Choice
from .stats import StatsFile

RECORD = QUANTIZATION
_DEPTH = 32  # of the whole record; a method's notes may nest
_NUMBERS = ("bytes", "bits_per_weight", "power", "noise")
_COUNTED = {"none": "", "tokens": ", all of one size", "loss": ", weighted by the gradient of the loss"}
_FIGURES = ("mse", "relative", "sqnr_db")


class QuantizationRecord(NamedTuple):
    """The record of a folder, its form checked."""

    recipes: list[dict[str, Any]]
    weights: dict[str, dict[str, Any]]
    dense: dict[str, str]
    stats: str | None = None
    text: dict[str, Any] | None = None

    def sums(self) -> Sums:
        """Over all weights."""
        total = Sums(0.0, 0.0, 0)
        for entry in self.weights.values():
            total += Sums(entry["power"], entry["noise"], math.prod(entry["shape"]))
        return total


def closing_files(
    plan: Plan, choice: Choice, records: Mapping[str, Mapping[str, Any]], stats: StatsFile | None
) -> tuple[dict[str, bytes], How]:
    """The record of a finished quantization as a file, and what the model card says of it."""
    weights = {name: {"recipe": choice.weights[name], **records[name]} for name in sorted(records)}
    recipes = choice.recipes()
    made = QuantizationRecord(
        recipes, weights, dict(sorted(choice.dense.items())), plan.options["stats"], plan.options["text"]
    )
    value = {"version": "1.0", **made._asdict()}
    text = json.dumps(value, indent=1, sort_keys=True, ensure_ascii=True, allow_nan=False) + "\n"
    used = [(recipe, sum(entry["recipe"] == i for entry in weights.values())) for i, recipe in enumerate(recipes)]
    seen = "none"
    if stats is not None:
        rows, length = stats.record["rows"], stats.record["seq"]
        tokens = f"{length} tokens{_COUNTED[stats.record['weighting']]}"
        seen = f"{rows} rows of {tokens}; SHA-256 of the statistics `{plan.options['stats']}`"
    elif made.text is not None:
        tokens = f"{made.text['seq']} tokens{_COUNTED[made.text['weighting']]}"
        trained = f", scales trained in {made.text['train_scales']} passes" if made.text["train_scales"] else ""
        digest = f"SHA-256 of the text `{made.text['text']}`"
        seen = f"{made.text['rows']} rows of {tokens}, layer by layer{trained}; {digest}"
    return {RECORD: text.encode("ascii")}, quantized(used, made.sums().figures()["relative"], seen)


def read_record(folder: Path) -> QuantizationRecord | None:
    """The record of a BCQ folder, None when it has none; BCQ-E628 when it is malformed."""
    if not (folder / RECORD).exists():
        return None
    try:
        raw = read_small(inside(folder, RECORD), limits.MAX_JSON_FILE_BYTES, RECORD, "BCQ-E628")
        value = parse(raw, integers_only=False, deepest=_DEPTH)
    except JsonFault as fault:
        raise _malformed(escape(fault.detail)) from None
    if not isinstance(value, dict) or value.get("version") != "1.0":
        raise _malformed("no object of version 1.0")
    recipes, weights, dense, stats = (value.get(key) for key in ("recipes", "weights", "dense", "stats"))
    text = value.get("text")
    if not isinstance(recipes, list) or not all(_is_recipe(recipe) for recipe in recipes):
        raise _malformed("recipes")
    if not isinstance(weights, dict) or not all(_is_entry(entry, len(recipes)) for entry in weights.values()):
        raise _malformed("weights")
    if not isinstance(dense, dict) or not all(isinstance(reason, str) for reason in dense.values()):
        raise _malformed("dense")
    return QuantizationRecord(
        recipes, weights, dense, stats if isinstance(stats, str) else None, text if isinstance(text, dict) else None
    )


def same_record(folder: Path, plan: Plan, choice: Choice) -> bool:
    """Whether a folder's record says that everything got what it is to get, with the same statistics."""
    try:
        record = read_record(folder)
    except BcqError:
        return False
    return (
        record is not None
        and record.recipes == json.loads(json.dumps(choice.recipes()))
        and {name: entry["recipe"] for name, entry in record.weights.items()} == choice.weights
        and record.dense == choice.dense
        and record.stats == plan.options["stats"]
        and record.text == plan.options["text"]
    )


def _is_recipe(recipe: Any) -> bool:
    return (
        isinstance(recipe, dict)
        and isinstance(recipe.get("method"), str)
        and isinstance(recipe.get("settings"), dict)
        and all(value is None or isinstance(value, bool | int | float | str) for value in recipe["settings"].values())
    )


def _is_entry(entry: Any, recipes: int) -> bool:
    if not isinstance(entry, dict) or type(entry.get("recipe")) is not int or not 0 <= entry["recipe"] < recipes:
        return False
    shape = entry.get("shape")
    return (
        isinstance(shape, list)
        and all(type(dim) is int and 0 < dim <= limits.MAX_DIM for dim in shape)
        and all(_is_number(entry.get(key)) for key in _NUMBERS)
        and all(entry.get(key) is None or _is_number(entry[key]) for key in _FIGURES)
        and isinstance(entry.get("notes", {}), dict)
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and -1e300 < value < 1e300


def _malformed(found: str) -> BcqError:
    return error("BCQ-E628", RECORD, found=found, expected="what bcqfmt quantize writes")
