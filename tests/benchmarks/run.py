"""`make bench`: measure the figures of docs/benchmarks/format.md. ``--write`` writes the page and its JSON."""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))  # PYTHONSAFEPATH keeps a script's own folder off the path

from benches import BENCHES, Options
from measure import Result, machine
from page import page

DOCS = Path(__file__).resolve().parents[2] / "docs" / "benchmarks"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small inputs, few rounds")
    parser.add_argument("--only", choices=BENCHES, action="append", help="this benchmark alone (may be repeated)")
    parser.add_argument("--write", action="store_true", help="write docs/benchmarks/format.md and format.json")
    options = parser.parse_args()
    if options.write and (options.quick or options.only):
        parser.error("--write needs a full run: one page, one run")
    results: list[Result] = []
    with tempfile.TemporaryDirectory(prefix="bcqfmt-bench-") as work:
        # children find byte code as an installed package has it, whatever this environment says
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        os.environ["PYTHONPYCACHEPREFIX"] = str(Path(work) / "pycache")
        for name in options.only or BENCHES:
            folder = Path(work) / name
            folder.mkdir()
            for result in BENCHES[name](Options(options.quick), folder):
                results.append(result)
                print(f"{result.verdict:12}{result.what}\n{'':12}{result.measured}", end="")
                print(f"   (goal: {result.goal})" if result.goal else "", flush=True)
            shutil.rmtree(folder)
    if options.write:
        write(results)
    missed = sum(result.met is False for result in results)
    print(f"{len(results)} figures, {missed} goals missed")
    return 1 if missed else 0


def write(results: list[Result]) -> None:
    record: dict[str, Any] = {
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
        "machine": machine(),
        "command": "make bench BENCH_ARGS=--write",
        "results": [result.as_dict() for result in results],
    }
    DOCS.mkdir(parents=True, exist_ok=True)
    (DOCS / "format.json").write_text(json.dumps(record, indent=2) + "\n")
    (DOCS / "format.md").write_text(page(record))


if __name__ == "__main__":
    sys.exit(main())
