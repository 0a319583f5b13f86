"""Every bad input given to ``bcqfmt validate --deep``, each in a process of its own: wall time and peak memory.

Run: ``python tests/benchmarks/bad_inputs.py [--json FILE] [--only PART-OF-NAME]``. The figures are those of the whole
process; what the interpreter, numpy and the command line need for a sound file is measured first and taken off for the
verdict (less than 1 s and less than 200 MB for each input). Exit code 1 when an input misses it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SECONDS = 1.0
BYTES = 200_000_000
TRIES = 3  # an input that takes too long is measured again: other programs run as well

REPOSITORY = Path(__file__).resolve().parents[2]
SUPPORT = REPOSITORY / "tests" / "support"
ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{REPOSITORY}{os.pathsep}{SUPPORT}", "PYTHONSAFEPATH": "1"}


def measure(command: list[str]) -> dict[str, Any]:
    """Exit code, wall time and peak memory of a command.

    A child starts with its parent's peak; this program therefore imports nothing large and has the inputs made by
    another process.
    """
    start = time.perf_counter()
    with tempfile.TemporaryFile() as output:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=ENVIRONMENT
        )
        _, status, usage = os.wait4(child.pid, 0)
        seconds = time.perf_counter() - start
        child.returncode = os.waitstatus_to_exitcode(status)
        output.seek(0)
        text = output.read(100_000).decode("utf-8", "replace")
    return {"exit": child.returncode, "seconds": seconds, "peak": usage.ru_maxrss * 1024, "output": text}


def measure_case(case: dict[str, Any], base: dict[str, float]) -> dict[str, Any]:
    """One input: the best of at most three runs, and the verdict."""
    start = [sys.executable, "-m", *(["bad_files.table", case["name"]] if case["disturb"] else ["bcqfmt"])]
    best: dict[str, Any] = {}
    for _ in range(1 if case["disturb"] else TRIES):
        run = measure([*start, "validate", "--deep", case["path"]])
        if not best or run["seconds"] < best["seconds"]:
            best = run
        if best["seconds"] - base["seconds"] < SECONDS:
            break
    right = best["exit"] == case["exit"] and case["code"] in best["output"] and "Traceback" not in best["output"]
    seconds, peak = best["seconds"] - base["seconds"], best["peak"] - base["peak"]
    return {
        "name": case["name"],
        "code": case["code"],
        "expected_exit": case["exit"],
        "exit": best["exit"],
        "right": right,
        "seconds": round(best["seconds"], 4),
        "peak_bytes": best["peak"],
        "net_seconds": round(seconds, 4),
        "net_peak_bytes": int(peak),
        "met": seconds < SECONDS and peak < BYTES,
    }


def measure_all(only: str) -> dict[str, Any]:
    """All inputs, and what a sound file needs."""
    with tempfile.TemporaryDirectory() as work:
        made = subprocess.run(
            [sys.executable, "-m", "bad_files.table", "--make", work], env=ENVIRONMENT, capture_output=True, check=True
        )
        cases = json.loads(made.stdout)
        sound = next(case["path"] for case in cases if case["name"] == "66-minor")
        command = [sys.executable, "-m", "bcqfmt", "validate", "--deep", sound]
        measure(command)  # the first one compiles
        runs = [measure(command) for _ in range(5)]
        base = {key: statistics.median(run[key] for run in runs) for key in ("seconds", "peak")}
        rows = [measure_case(case, base) for case in cases if only in case["name"]]
    return {
        "what": "validate --deep on bad inputs, each in its own process",
        "limits": {"seconds": SECONDS, "bytes": BYTES},
        "baseline": {"seconds": round(base["seconds"], 4), "peak_bytes": int(base["peak"])},
        "cases": rows,
        "slowest": max(rows, key=lambda row: row["seconds"])["name"],
        "largest": max(rows, key=lambda row: row["peak_bytes"])["name"],
        "met": all(row["met"] for row in rows),
        "right": all(row["right"] for row in rows),
    }


def show(result: dict[str, Any]) -> None:
    """The table, and the verdict."""
    base = result["baseline"]
    print(f"{'input':34} {'code':9} {'exit':>4} {'seconds':>8} {'MB':>7} {'net s':>7} {'net MB':>7}")
    print(f"{'(a sound file)':34} {'':9} {0:>4} {base['seconds']:8.3f} {base['peak_bytes'] / 1e6:7.1f}")
    for row in result["cases"]:
        verdict = "" if row["met"] else "  MISSED"
        verdict += "" if row["right"] else f"  WRONG, exit {row['expected_exit']} expected"
        print(
            f"{row['name']:34} {row['code']:9} {row['exit']:>4} {row['seconds']:8.3f} {row['peak_bytes'] / 1e6:7.1f}"
            f" {row['net_seconds']:7.3f} {row['net_peak_bytes'] / 1e6:7.1f}{verdict}"
        )
    missed = sum(not row["met"] for row in result["cases"])
    wrong = sum(not row["right"] for row in result["cases"])
    print(
        f"{len(result['cases'])} inputs; slowest {result['slowest']}, largest {result['largest']}; "
        f"{missed} beyond 1 s or 200 MB, {wrong} with another outcome than expected"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures to FILE")
    parser.add_argument("--only", default="", metavar="TEXT", help="only inputs whose name contains TEXT")
    arguments = parser.parse_args()
    result = measure_all(arguments.only)
    show(result)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")
    return 0 if result["met"] and result["right"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
