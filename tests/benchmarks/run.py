"""`make bench`: measure the figures of docs/benchmarks. ``--write`` writes the pages and their JSON."""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))  # PYTHONSAFEPATH keeps a script's own folder off the path

import conversion
import engines as scaling
import planning
import quantizing
from benches import BENCHES as CORE
from benches import Options
from measure import Result, machine
from packers import compilation
from packers import packers as pack_layers
from page import TITLES, page

DOCS = Path(__file__).resolve().parents[2] / "docs" / "benchmarks"


def packers(options: Options, work: Path) -> list[Result]:
    """The compiled word packers."""
    return compilation() + pack_layers(options.quick)


def convert(options: Options, work: Path) -> list[Result]:
    """Whole folders."""
    return conversion.convert(options.quick, work)


def gguf_files(options: Options, work: Path) -> Iterable[Result]:
    """Whole GGUF files, and their values."""
    import gguf_speed  # imports gguf, which the other benchmarks do without

    return [*gguf_speed.whole_files(options.quick, work), *gguf_speed.decoding(options.quick, work)]


def engines(options: Options, work: Path) -> list[Result]:
    """One conversion, three ways of sharing it out."""
    return scaling.engines(options.quick, work)


def plan(options: Options, work: Path) -> list[Result]:
    """A model of hundreds of gigabytes, planned."""
    return planning.plan(options.quick, work)


def quantize(options: Options, work: Path) -> list[Result]:
    """The methods for dense weights."""
    return quantizing.quantizing(options.quick)


def cpu_products(options: Options, work: Path) -> Iterable[Result]:
    """Products on the CPU compared with torch's."""
    import cpu_kernels  # imports torch, which the other benchmarks do without

    return cpu_kernels.both(options.quick)


BENCHES = {
    **CORE,
    "packers": packers,
    "convert": convert,
    "gguf": gguf_files,
    "plan": plan,
    "engines": engines,
    "quantize": quantize,
    "cpu": cpu_products,
}
PAGES = {
    "format": list(CORE),
    "conversion": ["packers", "convert"],
    "gguf": ["gguf"],
    "scaling": ["plan", "engines"],
    "quantizing": ["quantize"],
    "cpu_kernels": ["cpu"],
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small inputs, few rounds")
    parser.add_argument("--only", choices=BENCHES, action="append", help="this benchmark alone (may be repeated)")
    parser.add_argument("--page", choices=PAGES, help="the benchmarks of this page alone")
    parser.add_argument("--write", action="store_true", help="write the pages under docs/benchmarks")
    options = parser.parse_args()
    if options.write and (options.quick or options.only):
        parser.error("--write needs a full run: one page, one run")
    results: list[Result] = []
    of: dict[str, list[Result]] = {}
    chosen = options.only or (PAGES[options.page] if options.page else BENCHES)
    with tempfile.TemporaryDirectory(prefix="bcqfmt-bench-") as work:
        # children find byte code as an installed package has it, whatever this environment says
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        os.environ["PYTHONPYCACHEPREFIX"] = str(Path(work) / "pycache")
        for name in chosen:
            folder = Path(work) / name
            folder.mkdir()
            for result in BENCHES[name](Options(options.quick), folder):
                results.append(result)
                of.setdefault(name, []).append(result)
                print(f"{result.verdict:12}{result.what}\n{'':12}{result.measured}", end="")
                print(f"   (goal: {result.goal})" if result.goal else "", flush=True)
            shutil.rmtree(folder)
    if options.write:
        for title in [options.page] if options.page else PAGES:
            write(title, [result for name in PAGES[title] for result in of[name]])
    missed = sum(result.met is False for result in results)
    print(f"{len(results)} figures, {missed} goals missed")
    return 1 if missed else 0


def write(title: str, results: list[Result]) -> None:
    """One page and its JSON."""
    record: dict[str, Any] = {
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
        "machine": machine(),
        "command": f"make bench BENCH_ARGS='--page {title} --write'",
        "title": TITLES[title],
        "name": title,
        "results": [result.as_dict() for result in results],
    }
    DOCS.mkdir(parents=True, exist_ok=True)
    (DOCS / f"{title}.json").write_text(json.dumps(record, indent=2) + "\n")
    (DOCS / f"{title}.md").write_text(page(record))


if __name__ == "__main__":
    sys.exit(main())
