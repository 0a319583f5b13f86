"""A conversion into twenty shards is killed or interrupted at any moment, and resumed to the same bytes."""

from __future__ import annotations

import json
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from faults.fault_case import Case
from pages.soak_figures import record
from programs.verbs import ROOT, command, environment
from sources.conversions import gptq_folder, tree

SCRIPT = ROOT / "tests" / "support" / "faults" / "interrupted.py"
SIGNALS = [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]


def at_import(number: int, at: int, *args: str | Path) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-P", SCRIPT.with_name("stopped_import.py"), str(int(number)), str(at), *args]
    return subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=300, check=False)


def test_signals_while_the_program_is_loaded(small: Case) -> None:
    """Within its first second: the message, not a traceback of imports."""
    done = at_import(signal.SIGINT, 0, "inspect", small.source)
    assert done.returncode == 0, done.stderr
    imports = int(done.stderr.rpartition("imports ")[2])
    assert imports > 50
    for turn, at in enumerate(range(1, imports, imports // 3)):
        number, code = SIGNALS[turn % 3]
        done = at_import(number, at, "inspect", small.source)
        assert (done.returncode, done.stdout) == (code, ""), (at, done.stderr)
        told = done.stderr.lstrip("\n")  # click ends the line in which a terminal shows ^C
        assert told.startswith("error: BCQ-E901: interrupted: stopped "), (at, done.stderr)
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("verb", "number", "more"),
    [
        ("convert", signal.SIGTERM, ["--max-shard-size", "1500"]),
        ("quantize", signal.SIGINT, ["--method", "rtn", "--group-size", "32", "--max-shard-size", "25000"]),
        ("restore", signal.SIGTERM, []),
        ("restore", signal.SIGHUP, []),
        ("export", signal.SIGINT, ["--to", "dense", "--max-shard-size", "5000"]),
    ],
)
def test_what_is_left_and_how_to_go_on(
    verb: str, number: int, more: list[str], small: Case, dense: Case, tmp_path: Path
) -> None:
    """Half-way through: a code, what is left, the next step; nothing under the final name."""
    converted = small.source.parent / "plain"
    source = {"convert": small.source, "quantize": dense.source}.get(verb, converted)
    out = tmp_path / "place" / "out"
    out.parent.mkdir()

    def run(at: int) -> subprocess.CompletedProcess[str]:
        words = [sys.executable, "-P", SCRIPT, str(int(number)), str(at), verb, source, out, *more]
        return subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=300, check=False)

    calls = int(run(0).stderr.rpartition("calls ")[2])
    shutil.rmtree(out)
    done = run(calls // 2)
    assert "Traceback" not in done.stderr
    assert done.returncode == dict(SIGNALS)[number], done.stderr
    by = "from the keyboard" if number == signal.SIGINT else f"by {signal.Signals(number).name}"
    resumed = verb in ("convert", "quantize")
    left = "what is done is in out.partial" if resumed else "nothing is left of it"
    assert f"error: BCQ-E901 {out}: interrupted: stopped {by}; {left}" in done.stderr
    words = shlex.join(["bcqfmt", verb, str(source), str(out), *more])
    assert done.stderr.endswith(
        f"hint: go on with: {words} --resume\n" if resumed else f"hint: start again with: {words}\n"
    )
    assert [path.name for path in out.parent.iterdir()] == (["out.partial"] if resumed else [])


def test_going_on_with_a_run_that_replaces_a_folder(small: Case, tmp_path: Path) -> None:
    """The command that is told, as it stands, keeps the finished shards and replaces the folder at the end."""
    out, sizes = tmp_path / "out", ["--max-shard-size", "1500"]
    words = ["convert", str(small.source), str(out)]
    assert subprocess.run(command(*words), env=environment(), capture_output=True, check=False).returncode == 0
    before = tree(out)
    started = [sys.executable, "-P", SCRIPT, str(int(signal.SIGINT)), "60", *words, "--overwrite", *sizes]
    done = subprocess.run(started, env=environment(), capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, tree(out)) == (130, before), done.stderr
    told = shlex.split(done.stderr.rpartition("hint: go on with: ")[2])
    assert told == ["bcqfmt", *words, "--overwrite", *sizes, "--resume"]
    done = subprocess.run(command(*told[1:]), env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert tree(out) == small.plain
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def interrupted(case: Case, target: Path, number: int, at: int) -> tuple[subprocess.CompletedProcess[str], float]:
    """Run the program with a signal at its ``at``-th change of the disk; (what came of it, when it had ended)."""
    asked = ["convert", str(case.source), str(target), "--max-shard-size", str(case.size), "--workers", "2"]
    done = subprocess.run(
        [sys.executable, "-P", str(SCRIPT), str(int(number)), str(at), *asked],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    return done, time.monotonic()


@pytest.fixture(scope="module")
def calls(twenty: Case, tmp_path_factory: pytest.TempPathFactory) -> int:
    """How many times a whole run changes the disk."""
    done, _ = interrupted(twenty, tmp_path_factory.mktemp("count") / "bcq", signal.SIGKILL, 0)
    assert done.returncode == 0, done.stderr
    return int(done.stderr.rpartition("calls ")[2])


@pytest.mark.soak
def test_killed_two_hundred_times(twenty: Case, calls: int) -> None:
    """Each in a process of its own, forked from one that has loaded everything: what is killed is the program."""
    words = [sys.executable, "-P", str(SCRIPT.with_name("killed_many.py")), str(twenty.source)]
    words += [str(twenty.source.parent / "plain"), str(twenty.size), str(calls), "200", "convert"]
    words += ["--max-shard-size", str(twenty.size), "--workers", "2"]
    found = killed_many(words)
    assert found["left_unfinished"] > 150
    record("sigkill", shards=20, **found, byte_identical=200, partial_files=0)


@pytest.mark.soak
def test_other_verbs_killed_two_hundred_times_each(small: Case, dense: Case, tmp_path: Path) -> None:
    """What was killed is resumed (quantize) or done again (restore, export)."""
    converted = small.source.parent / "plain"
    asked: dict[str, tuple[Path, list[str]]] = {
        "quantize": (dense.source, ["--method", "rtn", "--group-size", "32", "--max-shard-size", str(dense.size)]),
        "restore": (converted, []),
        "export": (converted, ["--to", "dense", "--max-shard-size", "5000"]),
    }
    unfinished = {}
    for verb, (source, options) in asked.items():
        words = [sys.executable, "-P", str(SCRIPT), "9", "0", verb, str(source), str(tmp_path / verb), *options]
        done = subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=300, check=True)
        calls = done.stderr.rpartition("calls ")[2].strip()
        words = [sys.executable, "-P", str(SCRIPT.with_name("killed_many.py")), str(source), str(tmp_path / verb)]
        found = killed_many([*words, str(dense.size), calls, "200", verb, *options])
        assert found["left_unfinished"] > 100
        unfinished[verb] = found["left_unfinished"]
    record("sigkill_others", verbs=list(unfinished), kills_each=200, left_unfinished=unfinished, byte_identical="all")


def killed_many(words: list[str]) -> dict[str, int]:
    """The figures of tests/support/faults/killed_many.py."""
    path = os.pathsep.join((str(ROOT), str(SCRIPT.parents[1])))
    settings = {**environment(), "PYTHONPATH": path}
    done = subprocess.run(words, env=settings, capture_output=True, text=True, timeout=3600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    assert found["kills"] == 200
    return found


@pytest.mark.soak
def test_signals_at_the_calls_of_twenty_shards(twenty: Case, calls: int, tmp_path: Path) -> None:
    """SIGINT and SIGTERM: told, ended within two seconds, resumed to the same bytes."""
    rng, slowest, turns, late = random.Random(1), 0.0, 20, 0
    for turn in range(turns):
        number, code = [(signal.SIGINT, 130), (signal.SIGTERM, 143)][turn % 2]
        folder = tmp_path / str(turn)
        folder.mkdir()
        done, ended = interrupted(twenty, folder / "bcq", number, rng.randint(1, calls))
        assert "Traceback" not in done.stderr
        if (folder / "bcq").exists():  # it came after the last rename
            assert tree(folder / "bcq") == twenty.plain
            late += 1
        else:
            assert (done.returncode, "BCQ-E901" in done.stderr) == (code, True), done.stderr
            slowest = max(slowest, ended - float(done.stderr.partition("signalled ")[2].split()[0]))
        twenty.check_names(folder / "bcq")
        twenty.finish(folder / "bcq")
    assert slowest < 2
    large, slowest_large = large_ones(tmp_path, 8)
    record(
        "signals",
        signals=turns + large,
        of_which_on_large_shards=large,
        slowest_end_s=round(max(slowest, slowest_large), 2),
        byte_identical=turns + large,
        partial_files=0,
    )


def large_ones(folder: Path, turns: int) -> tuple[int, float]:
    """The same with twenty weights of 4096 x 4096, by the clock: what runs is compiled code on large arrays."""
    source = gptq_folder(folder / "large", layers=20, n=4096, k=4096, group_size=128)
    asked = [source, folder / "large-plain", "--max-shard-size", "9MB", "--workers", "2"]
    start = time.monotonic()
    subprocess.run(command("convert", *map(str, asked)), env=environment(), capture_output=True, check=True)
    whole = time.monotonic() - start
    plain = tree(folder / "large-plain")
    assert len([name for name in plain if name.startswith("model-")]) >= 20
    rng, slowest, hit = random.Random(2), 0.0, 0
    while hit < turns:
        number, code = [(signal.SIGINT, 130), (signal.SIGTERM, 143)][hit % 2]
        target = folder / "large-bcq"
        words = command("convert", str(source), str(target), *map(str, asked[2:]))
        with subprocess.Popen(words, env=environment(), stderr=subprocess.PIPE, text=True) as running:
            time.sleep(rng.uniform(0.3, 1) * whole)
            sent = time.monotonic()
            running.send_signal(number)
            _, said = running.communicate(timeout=60)
            spent = time.monotonic() - sent
        assert "Traceback" not in said
        if running.returncode == code and (folder / "large-bcq.partial").exists():
            hit += 1
            slowest = max(slowest, spent)
            assert not target.exists()
            words.append("--resume")
            subprocess.run(words, env=environment(), capture_output=True, check=True)
        elif running.returncode in (code, -number) and not target.exists():  # before anything was begun
            continue
        else:  # as it ended, or afterwards
            assert running.returncode in (0, code, -number), said
        assert tree(target) == plain
        shutil.rmtree(target)
    assert slowest < 2
    return hit, slowest
