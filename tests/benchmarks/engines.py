"""The same conversion by threads of one process, as two parts at once, and as tasks on a Ray cluster of two nodes."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from conversion import gptq_folder
from measure import HERE, Result, rounded, spread

_RAY = os.environ.get("BCQFMT_RAY_PYTHON", sys.executable)
_LOCAL = [sys.executable, "-m", "bcqfmt"]


def engines(quick: bool, work: Path) -> list[Result]:
    """Whole commands, start-up and finalize included; every one makes the same bytes."""
    source, target = work / "source", work / "bcq"
    size = gptq_folder(source, 4 if quick else 44)
    asked = ["convert", str(source), str(target), "--max-shard-size", str(size // 7)]
    rounds = 1 if quick else 3

    def local() -> None:
        _run([*_LOCAL, *asked, "--workers", "2"])

    def parts() -> None:
        running = [_start([*_LOCAL, *asked, "--workers", "1", "--part", f"{i}/2"]) for i in (1, 2)]
        for one in running:
            assert one.wait() == 0
        _run([*_LOCAL, "finalize", str(target), str(source)])

    times, digest = _times({"local": local, "parts": parts}, target, rounds)
    with _cluster() as address:
        if address is not None:
            there = [_RAY, "-m", "bcqfmt", *asked, "--executor", "ray", "--ray-address", address]
            more, same = _times({"ray": lambda: _run(there)}, target, rounds)
            times |= more
            assert same == digest
    what = {
        "local": "two threads of one process",
        "parts": "`--part 1/2` and `--part 2/2` at the same time, one thread each, then `finalize`",
        "ray": "`--executor ray`, two nodes of one CPU on this machine",
    }
    results = []
    for name, text in what.items():
        measured = "not here: ray is not installed"
        if name in times:
            speed = size / 1e6 / statistics.median(times[name])
            measured = f"{speed:.0f} MB/s; {spread(times[name])} s"
        values = {"seconds": rounded(times.get(name, []))}
        results.append(Result(f"`convert` of {size / 1e9:.2f} GB in 8 shards: {text}", measured, values=values))
    return results


def _times(things: dict[str, Callable[[], None]], target: Path, rounds: int) -> tuple[dict[str, list[float]], set[str]]:
    """Seconds of each, in turn, after one round to warm up; and the manifests' digests, of which there must be one."""
    found: dict[str, list[float]] = {name: [] for name in things}
    digests: set[str] = set()
    for turn in range(rounds + 1):
        for name, thing in things.items():
            shutil.rmtree(target, ignore_errors=True)
            start = time.perf_counter()
            thing()
            if turn:
                found[name].append(time.perf_counter() - start)
            digests.add((target / "bcq_manifest.json").read_text())
    assert len(digests) == 1
    return found, digests


@contextmanager
def _cluster() -> Iterator[str | None]:
    """The address of a cluster, None where there is no Ray."""
    probe = subprocess.run([_RAY, "-c", "import ray, bcqfmt"], capture_output=True, check=False)
    if probe.returncode:
        yield None
        return
    script = HERE.parent / "support" / "programs" / "ray_cluster.py"
    program = subprocess.Popen(
        [_RAY, script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert program.stdin is not None
    assert program.stdout is not None
    try:
        yield next(json.loads(line)["address"] for line in program.stdout if line.startswith("{"))
    finally:
        program.stdin.close()
        program.wait(60)
        program.stdout.close()


def _start(command: list[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def _run(command: list[str]) -> None:
    subprocess.run(command, capture_output=True, check=True)
