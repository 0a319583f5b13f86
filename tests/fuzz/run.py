"""Fuzz every reader for a while: ``python tests/fuzz/run.py --time 560 --jobs 14 --out figures.json``.

Needs a C compiler and the package, no network. Each process goes through all targets, each for its share of the time;
the corpus of tests/fuzz/corpus and the test vectors are the first inputs. Findings are written into the figures with
their inputs; exit 1 when there are any. ``--distill`` makes the corpus anew from what a run has kept.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

# What imports the package is imported in functions: its blocks are watched from their first line.
CORPUS = Path(__file__).resolve().parent / "corpus"
MOST = 250_000  # bytes of one corpus, compressed
# target -> share of the time, folders of the package of which the blocks are watched, its corpus, what it is
TARGETS: dict[str, tuple[float, tuple[str, ...], str, str]] = {
    "c_fast": (0.5, (), "files", "the C reader; what it accepts, and 1 of 1000 others, through all four readers"),
    "c": (0.1, (), "files", "the same under sanitizers, guided by coverage"),
    "files": (0.1, ("container", "weight", "checkpoint"), "files", "files through validator, reader, decoder.py, C"),
    "folders": (0.08, (), "", "folders through validator, reader, decoder.py, C"),
    "gguf": (0.1, ("container.gguf", "converters.source"), "gguf", "GGUF files up to weights"),
    "sources": (0.12, ("converters.source", "converters.layouts"), "sources", "sources of all layouts up to weights"),
}
LAST = "last"  # the input that a process was working on, in its folder
BATCH = 200_000  # executions of the C reader without sanitizers, after which the other readers get theirs


def main() -> int:
    """Parse, run, write the figures; 1 when something was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--time", type=float, default=600, metavar="SECONDS", help="of the whole run")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes at a time; one per core by default")
    parser.add_argument("--out", type=Path, default=Path("fuzz.json"), help="where the figures go")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="another one by default in every run")
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--scratch", type=Path, help="a folder for inputs that reach new code; temporary by default")
    parser.add_argument("--distill", action="store_true", help="only: the corpus from itself and from --scratch")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child:
        _child(asked)
        return 0
    from fuzz.c_reader import build
    from programs import c_reader

    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as temporary:
        asked.scratch = asked.scratch or Path(temporary)
        asked.scratch.mkdir(parents=True, exist_ok=True)
        try:
            build(asked.scratch, sanitized="c" in asked.targets)
        except c_reader.NoCompilerError as fault:
            sys.stderr.write(f"{fault}\n")
            return 2
        if asked.distill:
            for target in asked.targets:
                if TARGETS[target][1]:
                    _start(asked, target, 0, 0, 0)
            return 0
        total = _all(asked)
    asked.out.write_text(json.dumps(total, indent=2) + "\n")
    return 1 if any(figures["findings"] for figures in total["targets"].values()) else 0


def _all(asked: argparse.Namespace) -> dict[str, Any]:
    start = time.monotonic()
    targets: dict[str, dict[str, Any]] = {name: {"what": TARGETS[name][3]} for name in asked.targets}
    lock = threading.Lock()
    shares = sum(TARGETS[name][0] for name in asked.targets)

    def work(job: int) -> None:
        """All targets, one after the other; each job begins with another one."""
        at = job % len(asked.targets)
        for name in asked.targets[at:] + asked.targets[:at]:
            left = start + asked.time - time.monotonic()
            found = _start(asked, name, job, min(asked.time * TARGETS[name][0] / shares, left), asked.seed * 1000 + job)
            with lock:
                _add(targets[name], found)

    threads = [threading.Thread(target=work, args=(job,)) for job in range(asked.jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for name, figures in targets.items():
        figures["per_second_and_core"] = round(figures["executions"] / max(1, figures["cpu_s"]))
        if not figures["executions"]:
            figures["findings"]["nothing was executed"] = 1
        line = f"{name}: {figures['executions']:,} executions, {figures['per_second_and_core']:,} a second and core, "
        sys.stdout.write(line + f"{figures['accepted']:,} accepted, {sum(figures['findings'].values())} findings\n")
        for what, count in figures["findings"].items():
            sys.stdout.write(f"    {count:,}: {what}\n")
    executions = sum(figures["executions"] for figures in targets.values())
    from pages.soak_figures import machine

    total = {
        "machine": machine(),
        "seed": asked.seed,
        "jobs": asked.jobs,
        "seconds": round(time.monotonic() - start),
        "executions": executions,
    }
    sys.stdout.write(f"{executions:,} executions in {total['seconds']} s\n")
    return {**total, "targets": targets}


def _add(total: dict[str, Any], found: dict[str, Any]) -> None:
    for key in ("executions", "accepted", "compared", "cpu_s"):
        if key in found or key != "compared":
            total[key] = round(total.get(key, 0) + found.get(key, 0))
    for key in ("slowest_s", "peak_memory_mb", "blocks", "rules", "kept"):
        if key in found:
            total[key] = max(total.get(key, 0), found[key])
    if "codes_seen" in found:
        total["codes_seen"] = sorted({*total.get("codes_seen", ()), *found["codes_seen"]})
    total["findings"] = dict(Counter(total.get("findings", {})) + Counter(found.get("findings", {})))
    total["inputs"] = {**found.get("inputs", {}), **total.get("inputs", {})}


def _start(asked: argparse.Namespace, target: str, job: int, seconds: float, seed: int) -> dict[str, Any]:
    """One target in a process of its own: what it crashes with is a finding too."""
    place = asked.scratch / f"{target}-{job}"
    place.mkdir(exist_ok=True)
    out = place / "figures.json"
    out.unlink(missing_ok=True)
    words = [sys.executable, __file__, "--child", target, "--time", str(max(1, seconds)), "--seed", str(seed)]
    words += ["--scratch", str(asked.scratch), "--out", str(out)] + ["--distill"] * asked.distill
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=seconds + 600)
        ended = f"exit {done.returncode}: {done.stderr[-300:]}"
    except subprocess.TimeoutExpired:
        ended = "it does not end"
    if not out.exists():
        ended = f"{target}, seed {seed}, {ended}"  # --child {target} --seed {seed} --scratch ... does the same again
        last = place / LAST
        inputs = {ended: _as_text(last.read_bytes())} if last.exists() else {}
        return {"findings": {ended: 1}, "inputs": inputs}
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def _as_text(data: bytes) -> str:
    from fuzz.target import as_text

    return as_text(data)


# ------------------------------------------------------------------------------------------------- one target
def _child(asked: argparse.Namespace) -> None:
    place = asked.out.parent
    if asked.child in ("c", "c_fast"):
        figures = _c(asked, place)
    elif asked.child == "folders":
        figures = _folders(asked, place)
    else:
        figures = _guided(asked, place)
    times = os.times()
    asked.out.write_text(json.dumps({**figures, "cpu_s": sum(times[:4])}))


def _c(asked: argparse.Namespace, place: Path) -> dict[str, Any]:
    from fuzz.c_reader import Library, handed_on, run
    from fuzz.files import SideBySide
    from fuzz.inputs import VECTORS
    from fuzz.target import Executions

    seeds = place / "seeds"
    seeds.mkdir(exist_ok=True)
    for number, data in enumerate(corpus("files")):
        (seeds / f"{number:05d}").write_bytes(data)
    valid = sorted((VECTORS / "valid").glob("*.safetensors"))
    files = [*valid, *sorted((VECTORS / "invalid").glob("*.safetensors")), *sorted(seeds.iterdir())]
    fast, end = asked.child == "c_fast", time.monotonic() + asked.time
    program = asked.scratch / ("fuzz_fast" if fast else "fuzz")
    compare = Executions(SideBySide(Library(asked.scratch / "libbcq.so"), place).file, place / LAST)
    total: dict[str, Any] = {}
    seen: set[int] = set()
    batch = 0
    while not batch or (fast and time.monotonic() < end and not total["findings"]):
        runs, left = BATCH if fast else 10**12, end - time.monotonic()
        figures = run(program, runs, left, asked.seed + batch * 10**9, place, files)
        figures["inputs"] = {what: _as_text(data) for what, data in figures["inputs"].items()}
        _add(total, figures)
        batch += 1
        for data in handed_on(place):
            if hash(data) not in seen:
                seen.add(hash(data))
                compare(data)
    own = compare.figures()
    _add(total, {key: own[key] for key in ("findings", "inputs", "slowest_s", "peak_memory_mb", "codes_seen")})
    return {**total, "compared": compare.runs}


def _folders(asked: argparse.Namespace, place: Path) -> dict[str, Any]:
    from fuzz.c_reader import Library
    from fuzz.files import SideBySide
    from fuzz.target import Executions, limit_memory

    limit_memory()
    rng, end = random.Random(asked.seed), time.monotonic() + asked.time
    execute = Executions(SideBySide(Library(asked.scratch / "libbcq.so"), place).folder, place / LAST)
    while time.monotonic() < end:
        execute(rng.randbytes(8))
    return execute.figures()


def _guided(asked: argparse.Namespace, place: Path) -> dict[str, Any]:
    """A loop that is guided by the blocks of the package that run; what reached new ones is left in ``place``."""
    from fuzz.guided import Guided, watch

    _, folders, name, _ = TARGETS[asked.child]
    blocks = watch("bcqfmt", folders)
    from fuzz.target import Executions, limit_memory

    if asked.child == "files":
        from fuzz.c_reader import Library
        from fuzz.files import SideBySide
        from fuzz.inputs import first_inputs as seeds
        from fuzz.inputs import mutate

        run = SideBySide(Library(asked.scratch / "libbcq.so"), place).file
    else:
        from fuzz import sources as fuzz_sources

        run = fuzz_sources.converted
        gguf = asked.child == "gguf"
        seeds = fuzz_sources.gguf_seeds if gguf else fuzz_sources.source_seeds if asked.distill else list
        mutate = fuzz_sources.mutate_gguf if gguf else fuzz_sources.mutate_source
    limit_memory()
    execute = Executions(run, place / LAST)
    loop = Guided(blocks, execute, mutate, random.Random(asked.seed))
    end = time.monotonic() + asked.time
    if asked.distill:
        _distill(loop, seeds(), asked.scratch, name)
        return {}
    for data in [*seeds(), *corpus(name)]:
        loop.try_one(data)
    first = len(loop.corpus)
    while time.monotonic() < end:
        loop.step()
    for number, data in enumerate(loop.corpus[first:]):
        (place / f"kept-{number:08d}").write_bytes(data)
    return {**execute.figures(), "blocks": loop.reached, "kept": len(loop.corpus) - first}


# ------------------------------------------------------------------------------------------------- the corpus
def corpus(name: str) -> list[bytes]:
    """The inputs of a corpus."""
    path = CORPUS / f"{name}.zip"
    if not path.exists():
        return []
    with zipfile.ZipFile(path) as archive:
        return [archive.read(member) for member in sorted(archive.namelist())]


def _distill(loop: Any, seeds: list[bytes], scratch: Path, name: str) -> None:
    """Of the corpus and of all that was kept: the short inputs that reach what none before reaches."""
    chosen = [data for data in seeds if loop.try_one(data) and name == "sources"]  # the others are at hand in a run
    folders = [path for target, of in TARGETS.items() if of[2] == name for path in scratch.glob(f"{target}-*")]
    new = [path.read_bytes() for folder in folders for path in sorted(folder.glob("kept-*"))]
    chosen += [data for data in sorted({*corpus(name), *new}, key=lambda data: (len(data), data)) if loop.try_one(data)]
    CORPUS.mkdir(exist_ok=True)
    with zipfile.ZipFile(CORPUS / f"{name}.zip", "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for number, data in enumerate(chosen):
            if archive.fp is not None and archive.fp.tell() < MOST:  # the shortest come first
                archive.writestr(zipfile.ZipInfo(f"{number:05d}"), data, zipfile.ZIP_DEFLATED, 9)


if __name__ == "__main__":
    sys.exit(main())
