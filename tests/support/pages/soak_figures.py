"""The figures of the long runs: each run writes its own into docs/reliability.json, and the page's table follows.

``python tests/soak/table.py`` renders the table again from the figures.
"""

from __future__ import annotations

import datetime as dt
import fcntl
import json
import os
import platform
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
FIGURES = Path(os.environ.get("BCQ_FIGURES", ROOT / "docs" / "reliability.json"))
BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"
FUZZING = ("<!-- fuzzing: begin -->", "<!-- fuzzing: end -->")

# name of the run -> (what was done, what must be true); the order of the table
RUNS = {
    "sigkill": ("SIGKILL at random moments of a conversion into 20 shards, then resumed", "all byte-identical"),
    "sigkill_others": ("SIGKILL at random moments of quantize, restore and export", "all byte-identical afterwards"),
    "sigkill_gguf": (
        "SIGKILL at random moments of convert, restore and export of GGUF",
        "all byte-identical afterwards",
    ),
    "signals": ("SIGINT and SIGTERM at random moments, then resumed", "exit 130 or 143, ended within 2 s"),
    "enospc": ("disk full: a tmpfs of growing size, a page at a time", "exit 7 or 9, or complete"),
    "os_faults": ("EIO, ENOSPC, EDQUOT, short reads and writes, EINTR, failing fsync: at every call", "0 wrong bytes"),
    "power_loss": ("power lost after every operation, what was not synced dropped", "0 partial files, same result"),
    "two_processes": ("two processes on one target at the same time", "one wins, one is refused"),
    "source_changes": ("source truncated, replaced, growing, rewritten, removed at every read", "refused, or right"),
    "malformed": ("sources of every layout with one tensor or one value wrong", "refused with a code, or right"),
    "fuzzing": ("fuzzing of all readers, side by side", "no other exception, no disagreement, < 512 MB, < 1 s each"),
    "differential": ("header readers compared: ours, safetensors', huggingface_hub's", "0 disagreements"),
    "bit_flips": ("single bits of finished folders flipped, documentation apart", "every one found by validate --deep"),
    "truncation": ("files cut at every byte of their header, and anywhere in their data", "every one refused"),
    "mutants": ("decoders with one mistake each, against the test vectors", "told by a vector, or listed with reason"),
}


def record(name: str, **figures: Any) -> None:
    """Write down what a run found, with date and machine; the table is rendered again."""
    assert name in RUNS
    entry = {"date": dt.datetime.now(dt.UTC).date().isoformat(), "machine": machine(), **figures}
    FIGURES.parent.mkdir(parents=True, exist_ok=True)
    with FIGURES.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        text = file.read()
        known = json.loads(text) if text else {}
        known[name] = entry
        ordered = {key: known[key] for key in RUNS if key in known}
        file.seek(0)
        file.truncate()
        file.write(json.dumps(ordered, indent=2) + "\n")
    page = FIGURES.with_suffix(".md")
    if page.exists():
        page.write_text(rendered(page.read_text(), ordered))


def rendered(page: str, figures: dict[str, dict[str, Any]]) -> str:
    """The page with its tables made anew from the figures."""
    for begin, end, text in ((BEGIN, END, table(figures)), (*FUZZING, fuzz_table(figures.get("fuzzing", {})))):
        before, _, rest = page.partition(begin)
        _, _, after = rest.partition(end)
        page = f"{before}{begin}\n{text}{end}{after}"
    return page


def table(figures: dict[str, dict[str, Any]]) -> str:
    """One line for each run: what, promise, figures, date, command."""
    lines = ["| what is done | promise | figures | date |", "|---|---|---|---|"]
    for name, (what, promise) in RUNS.items():
        entry = figures.get(name)
        shown = "not run yet" if entry is None else _shown(entry)
        lines.append(f"| {what} | {promise} | {shown} | {entry['date'] if entry else ''} |")
    return "\n".join(lines) + "\n"


def fuzz_table(entry: dict[str, Any]) -> str:
    """One line for each target of a run of tests/fuzz/run.py."""
    lines = ["| target | executions | per second and core | accepted | findings |", "|---|---:|---:|---:|---:|"]
    for found in entry.get("targets", {}).values():
        numbers = [found["executions"], found["per_second_and_core"], found["accepted"], found["findings"]]
        lines.append(f"| {found['what']} | " + " | ".join(f"{number:,}" for number in numbers) + " |")
    return "\n".join(lines) + "\n"


def fuzz_runs(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Several runs as one: what they did is added up, of what they reached the most is taken."""
    targets: dict[str, dict[str, Any]] = {}
    for run in runs:
        for name, figures in run["targets"].items():
            total = targets.setdefault(name, {})
            for key, value in figures.items():
                if key in ("executions", "accepted", "compared", "cpu_s"):
                    total[key] = total.get(key, 0) + value
                elif key in ("findings", "codes_seen"):
                    total[key] = _joined(total.get(key), value)
                elif key in total and isinstance(value, int | float):
                    total[key] = max(total[key], value)
                else:
                    total[key] = value
            total["per_second_and_core"] = round(total["executions"] / max(1, total["cpu_s"]))
    added = {key: sum(run[key] for run in runs) for key in ("seconds", "executions")}
    return {"runs": len(runs), "jobs": max(run["jobs"] for run in runs), **added, "targets": targets}


def _joined(one: Any, other: Any) -> Any:
    """Findings are counted together, codes are taken once."""
    if isinstance(other, dict):
        return dict(Counter(one or {}) + Counter(other))
    return sorted({*(one or ()), *other})


def fuzz_figures(found: dict[str, Any]) -> dict[str, Any]:
    """What is kept of the figures of such a run: no inputs, of codes and findings their numbers."""
    targets = {}
    for name, figures in found["targets"].items():
        kept = {key: value for key, value in figures.items() if key not in ("inputs", "cpu_s")}
        targets[name] = kept | {"findings": sum(kept["findings"].values())}
        if "codes_seen" in kept:
            targets[name]["codes_seen"] = len(kept["codes_seen"])
    return {**found, "findings": sum(kept["findings"] for kept in targets.values()), "targets": targets}


def machine() -> str:
    """System, architecture and Python: no name of a host."""
    return f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"


def _shown(entry: dict[str, Any]) -> str:
    parts = []
    for key, value in entry.items():
        if key in ("date", "machine"):
            continue
        if isinstance(value, list):
            value = len(value)
        if isinstance(value, dict):
            value = len(value) if key == "targets" else sum(value.values())
        text = f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
        parts.append(f"{key.replace('_', ' ')} {text}")
    return ", ".join(parts)
