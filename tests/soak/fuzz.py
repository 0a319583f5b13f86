"""Coverage-guided fuzzing of reader and validator: ``python tests/soak/fuzz.py --runs 2000000 --json figures.json``.

With atheris where it is installed (``--engine atheris``: libFuzzer, the package's bytecode instrumented), otherwise
with our own loop, which marks the blocks of the package as they run. One execution in fifty is of a whole folder.
The work is cut into slices, each a process of its own: memory is that of one slice, and figures survive an
interruption.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[2]
SUPPORT = ROOT / "tests" / "support"
FOLDER_SHARE = 50  # one execution in so many is of a whole folder


def main() -> int:
    """Parse, run all slices (or, as a child, one), print the figures; 1 when a promise was broken."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=2_000_000)
    parser.add_argument("--slice", type=int, default=50_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--engine", choices=("auto", "atheris", "own"), default="auto")
    parser.add_argument("--kind", choices=("file", "folder"), help=argparse.SUPPRESS)
    parser.add_argument("--scratch", type=Path, help="a folder for inputs and corpus; temporary by default")
    parser.add_argument("--go-on", action="store_true", help="add to the figures that are there, up to --runs in all")
    parser.add_argument("--json", type=Path, help="where the figures go")
    asked = parser.parse_args()
    if asked.engine == "auto":
        asked.engine = "atheris" if importlib.util.find_spec("atheris") else "own"
    if asked.kind:
        return _child(asked)
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as temporary:
        figures = _all_slices(asked, asked.scratch or Path(temporary))
    return 0 if not (figures["escaped"] or figures["peak_memory_mb"] >= 512) else 1


def _all_slices(asked: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    total: dict[str, Any] = {"engine": asked.engine, "seed": asked.seed, "runs": 0, "file_runs": 0, "folder_runs": 0}
    total |= {"accepted": 0, "escaped": Counter(), "slower_than_1_s": 0, "slowest_s": 0.0, "peak_memory_mb": 0}
    total |= {"corpus": 0, "blocks": 0, "codes_seen": [], "cpu_s": 0.0}
    total |= {"slices": 0, "wall_s": 0}
    if asked.go_on and asked.json is not None and asked.json.exists():
        before = json.loads(asked.json.read_text())
        total |= before | {"escaped": Counter(before["escaped"])}
    start = time.monotonic() - total["wall_s"]
    while total["runs"] < asked.runs:
        size = min(asked.slice, asked.runs - total["runs"])
        folders = max(1, size // FOLDER_SHARE)
        for kind, runs in (("file", size - folders), ("folder", folders)):
            _add(total, kind, _slice(asked, kind, max(1, runs), asked.seed + total["slices"], scratch))
        total["slices"] += 1
        total["wall_s"] = round(time.monotonic() - start)
        if asked.json:
            asked.json.write_text(json.dumps(total, indent=2) + "\n")
        line = f"{total['runs']:,} runs, {sum(total['escaped'].values())} escaped, slowest {total['slowest_s']} s, "
        line += f"{total['peak_memory_mb']} MB, corpus {total['corpus']}, {total['blocks']} blocks\n"
        sys.stdout.write(line)
        sys.stdout.flush()
    return total


def _slice(asked: argparse.Namespace, kind: str, runs: int, seed: int, scratch: Path) -> dict[str, Any]:
    """One slice in a process of its own."""
    engine = asked.engine if kind == "file" else "own"
    out = scratch / "slice.json"
    words = [sys.executable, "-P", __file__, "--kind", kind, "--runs", str(runs), "--seed", str(seed)]
    words += ["--engine", engine, "--scratch", str(scratch), "--json", str(out)]
    path = os.pathsep.join([str(ROOT), str(SUPPORT), os.environ.get("PYTHONPATH", "")])
    ran = subprocess.run(
        words, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False, timeout=7200
    )
    if ran.returncode != 0 or not out.exists():
        raise SystemExit(f"a slice ended with {ran.returncode}:\n{ran.stderr[-4000:]}")
    found: dict[str, Any] = json.loads(out.read_text())
    out.unlink()
    return found


def _add(total: dict[str, Any], kind: str, found: dict[str, Any]) -> None:
    total["runs"] += found["runs"]
    total[f"{kind}_runs"] += found["runs"]
    total["accepted"] += found["accepted"]
    total["escaped"].update(found["escaped"])
    total["slower_than_1_s"] += found["slower_than_1_s"]
    total["cpu_s"] = round(total["cpu_s"] + found["cpu_s"])
    for name in ("slowest_s", "peak_memory_mb", "corpus", "blocks"):
        total[name] = max(total[name], found[name])
    total["codes_seen"] = sorted({*total["codes_seen"], *found["codes_seen"]})


# ------------------------------------------------------------------------------------------------------- one slice
def _child(asked: argparse.Namespace) -> int:
    scratch = asked.scratch
    (scratch / "corpus").mkdir(parents=True, exist_ok=True)
    if asked.kind == "folder":
        _finish(asked, _folders(asked))
    elif asked.engine == "atheris":
        _atheris(asked)
    else:
        _finish(asked, _own(asked))
    return 0


def _finish(asked: argparse.Namespace, found: dict[str, Any]) -> None:
    asked.json.write_text(json.dumps({**found, "cpu_s": time.process_time()}))


def _own(asked: argparse.Namespace) -> dict[str, Any]:
    from guided import Guided, watch

    blocks = watch("bcqfmt")
    from fuzz_inputs import first_inputs, mutate
    from fuzz_target import Executions

    target = Executions(asked.scratch / "input.safetensors", asked.scratch / "crashes")
    loop = Guided(blocks, target.file, mutate, random.Random(asked.seed))
    for data in [*first_inputs(), *_kept(asked.scratch)]:
        loop.try_one(data)
    while target.runs < asked.runs:
        if loop.step():
            _keep(asked.scratch, loop.corpus[-1])
    return {**target.figures(), "corpus": len(loop.corpus), "blocks": loop.reached}


def _atheris(asked: argparse.Namespace) -> NoReturn:
    import atheris

    with atheris.instrument_imports(include=["bcqfmt"]):
        import bcqfmt.checkpoint.reader
        import bcqfmt.checkpoint.validation  # noqa: F401 - lazily loaded otherwise, and not instrumented
        from fuzz_target import Executions
    from fuzz_inputs import LONGEST, first_inputs, mutate

    corpus = asked.scratch / "atheris"
    if not corpus.exists():
        corpus.mkdir()
        for number, data in enumerate(first_inputs()):
            (corpus / f"vector-{number:04d}").write_bytes(data)
    target = Executions(asked.scratch / "input.safetensors", asked.scratch / "crashes")

    def one(data: bytes) -> None:
        target.file(data)
        if target.runs >= asked.runs:  # libFuzzer's own way out does not always come back from the interpreter's end
            _finish(asked, {**target.figures(), "corpus": len(list(corpus.iterdir())), "blocks": 0})
            os._exit(0)

    def change(data: bytes, longest: int, seed: int) -> bytes:  # must not raise: libFuzzer would end, and hang
        rng = random.Random(seed)
        if rng.random() < 0.25:
            return bytes(atheris.Mutate(data, longest))
        return mutate(data, rng)[:longest]

    words = ["fuzz", "-runs=-1", f"-seed={asked.seed}", f"-max_len={LONGEST}", "-timeout=3600"]
    words += ["-rss_limit_mb=0", "-print_final_stats=0", "-verbosity=0", "-detect_leaks=0", str(corpus)]
    atheris.Setup(words, one, custom_mutator=change)
    atheris.Fuzz()
    raise AssertionError("it ends in `one`")


def _folders(asked: argparse.Namespace) -> dict[str, Any]:
    """Folders: a file of a valid one changed, mostly signed again so that deeper rules are reached."""
    from folder_mutations import mutate_folder
    from fuzz_inputs import VECTORS
    from fuzz_target import Executions

    place = asked.scratch / "folder"
    place.mkdir(exist_ok=True)
    target = Executions(asked.scratch / "unused", asked.scratch / "crashes")
    rng = random.Random(asked.seed)
    folders = [path for path in sorted((VECTORS / "valid").iterdir()) if path.is_dir()]
    while target.runs < asked.runs:
        folder = place / "model"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(rng.choice(folders), folder)
        try:
            for _ in range(rng.choice((1, 1, 2))):
                mutate_folder(folder, rng)
        except (ArithmeticError, LookupError, OSError, RecursionError, TypeError, ValueError):
            continue  # the mutation itself made no sense a second time
        target.look(folder)
    return {**target.figures(), "corpus": 0, "blocks": 0}


def _kept(scratch: Path) -> list[bytes]:
    return [path.read_bytes() for path in sorted((scratch / "corpus").iterdir())]


def _keep(scratch: Path, data: bytes) -> None:
    import hashlib

    (scratch / "corpus" / hashlib.sha256(data).hexdigest()[:16]).write_bytes(data)


if __name__ == "__main__":
    sys.exit(main())
