"""quality.json and quality.md from the measured rows."""

from __future__ import annotations

import datetime as dt
import json
import re
from pathlib import Path
from typing import Any

from smollm2_rows import ROWS, Row, Verdict, judged
from smollm2_text import HOW, ORIGIN, OTHERS, READING, SINK

__all__ = ["write_page"]

PAPER = {  # Atom, table 4: Llama-7B, perplexity on WikiText-2
    "fp16": 5.68,
    "atom-rtn": 2382.73,
    "atom-fp16": 11.37,
    "atom-int8": 11.39,
    "atom-g128": 6.22,
    "atom-clip": 6.13,
    "atom-gptq": 6.04,
    "atom-kv": 6.16,
}
COMMAND = "python tests/benchmarks/models/smollm2.py --work work --text test.txt --calibration valid.txt"


def write_page(target: Path, results: dict[str, dict[str, Any]], conditions: dict[str, Any]) -> None:
    """Both files, into the folder ``target``."""
    verdicts = judged(results)
    record = {
        "date": dt.datetime.now(tz=dt.UTC).date().isoformat(),
        "command": _command(conditions),
        "machine": next(iter(results.values()))["machine"] if results else {},
        "conditions": conditions,
        "window_tokens": next(iter(results.values()))["window_tokens"] if results else [],
        "rows": [_row(row, results[row.name]) for row in ROWS if row.name in results],
        "not_run": [row.name for row in ROWS if row.name not in results],
        "orderings": [_as_dict(verdict) for verdict in verdicts],
    }
    text = re.sub(
        r"\[\s+([-\d.,\s]+?)\s+\]", lambda found: f"[{' '.join(found[1].split())}]", json.dumps(record, indent=1)
    )
    (target / "quality.json").write_text(text + "\n", encoding="utf-8")
    (target / "quality.md").write_text(_page(record, results, verdicts), encoding="utf-8")


def _row(row: Row, found: dict[str, Any]) -> dict[str, Any]:
    """A row without what all have in common; losses to a thousandth of a nat."""
    kept = {key: value for key, value in found.items() if key not in ("conditions", "machine", "window_tokens")}
    return {**kept, "text": row.text, "losses": [round(loss, 3) for loss in found["losses"]]}


def _command(conditions: dict[str, Any]) -> str:
    """What a reader would type to measure the same."""
    device = "" if conditions["device"] == "cpu" else f" --device {conditions['device']}"
    return COMMAND + device + (f" --windows {conditions['windows']}" if conditions["windows"] else "") + " --write"


def _as_dict(verdict: Verdict) -> dict[str, Any]:
    one = verdict.ordering
    return {
        "claim": one.claim,
        "papers": one.papers,
        "low": one.low,
        "high": one.high,
        "holds": verdict.holds,
        "difference_nats": round(verdict.difference, 5),
        "standard_error": round(verdict.error, 5),
    }


def _page(record: dict[str, Any], results: dict[str, dict[str, Any]], verdicts: list[Verdict]) -> str:
    conditions = record["conditions"]
    windows = conditions["windows"]
    part = f"the first {windows} windows" if windows else "all windows"
    tokens = max((row["tokens"] for row in record["rows"]), default=0)
    what = f"{part} of {conditions['context']} tokens, {tokens:,} predicted tokens"
    lines = [
        "# What quantization costs",
        "",
        f"SmolLM2-135M-Instruct on the test set of WikiText-2: {what}. Measured on {record['date']} with",
        "",
        *("```console", f"$ {record['command']}", "```", ""),
        "and " + ", ".join(f"{key} {value}" for key, value in record["machine"].items()) + ".",
        "The figures, the loss of every window among them, are in `quality.json` beside this page.",
        "",
        *("## Weights", "", *_weights(results, aside=False), ""),
        READING,
        *("## Weights and activations: Atom", "", *_ladder(results), ""),
        *_not_run(record["not_run"]),
        *("## What the papers lead one to expect", "", *_orderings([one for one in verdicts if one.ordering.papers])),
        *("", SINK, *_weights(results, aside=True), ""),
        *("## More comparisons", "", OTHERS, *_orderings([one for one in verdicts if not one.ordering.papers]), ""),
        *("## The source is 4 bit already", "", ORIGIN),
        *("## How it is measured", "", HOW),
    ]
    return "\n".join(lines)


def _weights(results: dict[str, dict[str, Any]], aside: bool) -> list[str]:
    lines = [
        "| method | bits per weight | linear layers | model files | SQNR | perplexity | of FP16 |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in ROWS:
        if row.name in results and not row.atom and row.aside == aside:
            found = results[row.name]
            sqnr = found.get("sqnr_db")
            noise = "-" if sqnr is None else f"{sqnr:.1f} dB"
            lines.append(f"| {row.text} | {_size(found)} | {noise} | {_perplexity(row, results)} |")
    return lines


def _ladder(results: dict[str, dict[str, Any]]) -> list[str]:
    lines = [
        "| W4A4 | bits per weight | linear layers | model files | perplexity | of FP16 | Llama-7B, paper |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in ROWS:
        if row.name in results and row.name in PAPER:
            sizes = _size(results[row.name])
            lines.append(f"| {row.text} | {sizes} | {_perplexity(row, results)} | {PAPER[row.name]:.2f} |")
    return lines


def _size(found: dict[str, Any]) -> str:
    return f"{found['bits']:.2f} | {found['linear_bytes'] / 1e6:.1f} MB | {found['bytes'] / 1e6:.1f} MB"


def _perplexity(row: Row, results: dict[str, dict[str, Any]]) -> str:
    value = results[row.name]["perplexity"]
    base = results.get("fp16")
    share = "-" if base is None else f"{value / base['perplexity']:.3f}"
    return f"{value:.2f} | {share}" if value < 1e5 else f"{value:.2e} | {float(share):.2e}"


def _not_run(names: list[str]) -> list[str]:
    if not names:
        return []
    return ["Not run: " + ", ".join(row.text for row in ROWS if row.name in names) + ".", ""]


def _orderings(verdicts: list[Verdict]) -> list[str]:
    holding = sum(verdict.holds for verdict in verdicts)
    lines = [
        f"{holding} of {len(verdicts)} hold. The gain is the difference of the mean log-likelihoods per token, with",
        "its standard error over windows, pair by pair; 0.01 is one per cent of perplexity.",
        "",
        "| expected | better | worse | holds | gain, nats |",
        "|---|---|---|---|---|",
    ]
    texts = {row.name: row.text for row in ROWS}
    for verdict in verdicts:
        one = verdict.ordering
        word = "yes" if verdict.holds else "**no**"
        gain = f"{verdict.difference:+.4f} ± {verdict.error:.4f}"
        lines.append(f"| {one.claim} | {texts[one.low]} | {texts[one.high]} | {word} | {gain} |")
    return lines
