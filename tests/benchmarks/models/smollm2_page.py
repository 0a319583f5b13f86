"""quality.json and quality.md from the measured rows."""

from __future__ import annotations

import datetime as dt
import json
import re
from pathlib import Path
from typing import Any

from smollm2_rows import BITS, ROWS, Row, Verdict, judged
from smollm2_text import BESTS, HOW, ORDERINGS, ORIGIN, READING, REASON

__all__ = ["page", "write_page"]

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
# a line of the first table: its rows at 4, 3 and 2 bits
BEST = {
    "AutoRound": "autoround-4-g128-peer autoround-3-g128-peer autoround-2-g64-peer",
    "GPTQModel": "gptqmodel-4-g64-peer gptqmodel-3-g64-peer gptqmodel-2-g64-peer",
    "llm-compressor, GPTQ": "gptq-4-g64-peer gptq-3-g64-peer gptq-2-g64-peer",
    "llm-compressor, AWQ": "awq-4-g64-peer awq-3-g64-peer awq-2-g64-peer",
    "AutoRound, 2 bits g128": "- - autoround-2-g128-peer",
    "AutoRound, g32": "autoround-4-g32-peer - -",
    "GPTQModel, g32": "gptqmodel-4-g32-peer - -",
    "llm-compressor, GPTQ, g32": "gptq-4-g32-peer - -",
    "llm-compressor, AWQ, g32": "awq-4-g32-peer - -",
    "rtn": "rtn-4-g128 rtn-3-g128 rtn-2-g128",
    "rtn, by loss": "rtn-4-g128-seq-loss rtn-3-g128-seq-loss -",
    "rtn, by loss, trained": "rtn-4-g128-seq-loss-trained rtn-3-g128-seq-loss-trained -",
    "gptq, layer by layer": "gptq-4-g128-seq-tokens gptq-3-g128-seq-tokens gptq-2-g64-seq-tokens",
    "gptq, by loss, g32": "gptq-4-g32-seq-loss gptq-3-g32-seq-loss gptq-2-g32-seq-loss",
    "gptq, by loss, trained": "gptq-4-g128-seq-loss-trained gptq-3-g128-seq-loss-trained gptq-2-g64-seq-loss-trained",
    "gptq, by loss, trained, 2 bits g128": "- - gptq-2-g128-seq-loss-trained",
    "bcq, gptq, layer by layer": (
        "bcq-4-g128-gptq-seq-tokens bcq-3-g128-gptq-seq-tokens bcq-2-g128-gptq-nobias-seq-tokens"
    ),
    "bcq, gptq, by loss, trained": "- - bcq-2-g128-gptq-nobias-seq-loss-trained",
    "multi, nested": "nested-4-tokens nested-3-tokens nested-2-tokens",
}
# a line of the second table: name of its rows, with the bits in the place of {}
LINES = {
    "rtn, g32": "rtn-{}-g32",
    "gptq as published": "gptq-{}-g128",
    "gptq as published, act order": "gptq-{}-g128-order",
    "bcq": "bcq-{}-g128",
    "bcq, weighted": "bcq-{}-g128-weighted",
    "bcq, g32": "bcq-{}-g32",
    "bcq, g32, weighted": "bcq-{}-g32-weighted",
}
COMMAND = "python tests/benchmarks/models/smollm2.py --work work --text test.txt --calibration valid.txt"


def write_page(target: Path, results: dict[str, dict[str, Any]], conditions: dict[str, Any]) -> None:
    """Both files, into the folder ``target``; figures of the draft stay what they are."""
    before = json.loads((target / "quality.json").read_text(encoding="utf-8"))
    record = {
        "date": dt.datetime.now(tz=dt.UTC).date().isoformat(),
        "command": _command(conditions),
        "machine": next(iter(results.values()))["machine"] if results else {},
        "conditions": conditions,
        "window_tokens": next(iter(results.values()))["window_tokens"] if results else [],
        "rows": [_row(row, results[row.name]) for row in ROWS if row.name in results],
        "not_run": [row.name for row in ROWS if row.name not in results],
        "orderings": [_as_dict(verdict) for verdict in judged(results)],
        "draft": before.get("draft", []),
    }
    text = re.sub(
        r"\[\s+([-\d.,\s]+?)\s+\]", lambda found: f"[{' '.join(found[1].split())}]", json.dumps(record, indent=1)
    )
    (target / "quality.json").write_text(text + "\n", encoding="utf-8")
    (target / "quality.md").write_text(page(record), encoding="utf-8")


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


def page(record: dict[str, Any]) -> str:
    """quality.md from what quality.json holds."""
    rows = {row["row"]: row for row in record["rows"]}
    conditions = record["conditions"]
    part = f"the first {conditions['windows']} windows" if conditions["windows"] else "all windows"
    tokens = max((row["tokens"] for row in record["rows"]), default=0)
    machine = ", ".join(f"{key} {value}" for key, value in record["machine"].items())
    lines = [
        "# What quantization costs",
        "",
        "Perplexity of SmolLM2-135M-Instruct on the test set of WikiText-2, bits per weight in brackets:",
        f"{part} of {conditions['context']} tokens, {tokens:,} predicted tokens.",
        "",
        *(*_best(rows), "", BESTS),
        *("## Other methods", "", *_weights(rows), "", READING),
        *("## 4-bit activations: Atom", "", *_ladder(rows), ""),
        *_not_run(record["not_run"]),
        *("## What was expected", "", *_orderings(record["orderings"]), "", REASON),
        *("## The source is 4 bit already", "", ORIGIN),
        *("## How it is measured", "", HOW),
        *("## How to repeat it", "", "```console", f"$ {record['command']}", "```", ""),
        f"Last measured on {record['date']}, with {machine}.",
        "All rows, with the loss of every window, are in {download}`quality.json`.",
    ]
    return "\n".join(lines) + "\n"


def _table(rows: dict[str, Any], lines: dict[str, str]) -> list[str]:
    head = " | ".join(f"{bits} bits" for bits in BITS)
    made = [f"| method | {head} |", "|---" * (len(BITS) + 1) + "|"]
    for text, names in lines.items():
        if not rows.keys() & set(names.split()):
            continue
        cells = " | ".join(_cell(rows[name]) if name in rows else "-" for name in names.split())
        made.append(f"| {text} | {cells} |")
    return made


def _best(rows: dict[str, Any]) -> list[str]:
    """Tools next to each other."""
    made = _table(rows, BEST)
    if "fp16" in rows:
        made.insert(2, f"| FP16 | {_cell(rows['fp16'])} | | |")
    return made


def _weights(rows: dict[str, Any]) -> list[str]:
    lines = _table(rows, {text: " ".join(name.format(bits) for bits in BITS) for text, name in LINES.items()})
    lines += [f"| {row['text']} | | {_cell(row)} | |" for name, row in rows.items() if name.startswith("mixed24")]
    return lines


def _cell(row: dict[str, Any]) -> str:
    return f"{_number(row['perplexity'])} ({row['bits']:.2f})"


def _number(perplexity: float) -> str:
    return f"{perplexity:.2f}" if perplexity < 1e4 else f"{perplexity:.1e}"


def _ladder(rows: dict[str, Any]) -> list[str]:
    lines = ["| W4A4 | bits per weight | perplexity | Llama-7B, paper |", "|---|---|---|---|"]
    for name, paper in PAPER.items():
        if name in rows:
            row = rows[name]
            lines.append(f"| {row['text']} | {row['bits']:.2f} | {_number(row['perplexity'])} | {paper:.2f} |")
    return lines


def _not_run(names: list[str]) -> list[str]:
    if not names:
        return []
    return [f"Not measured: {len(names)} rows, `not_run` in the JSON.", ""]


def _orderings(orderings: list[dict[str, Any]]) -> list[str]:
    """How many hold, and those that do not."""

    def holding(papers: bool) -> str:
        chosen = [one["holds"] for one in orderings if one["papers"] is papers]
        return f"{sum(chosen)} of {len(chosen)}"

    lines = [
        f"{holding(True)} orderings that the papers lead one to expect hold, and {holding(False)} further ones.",
        ORDERINGS,
        "| better <= worse | " + " | ".join(f"{bits} bits" for bits in BITS) + " |",
        "|---" * (len(BITS) + 1) + "|",
    ]
    for claim in dict.fromkeys(one["claim"] for one in orderings if not one["holds"]):
        gains = {one["low"].split("-")[1]: _gain(one) for one in orderings if one["claim"] == claim}
        lines.append(f"| {claim} | " + " | ".join(gains.get(str(bits), "-") for bits in BITS) + " |")
    return lines


def _gain(one: dict[str, Any]) -> str:
    return f"{one['difference_nats']:+.3f}±{one['standard_error']:.3f}"
