"""The operating system fails at any call of a conversion: told in our words, nothing partial, resumed to the same."""

from __future__ import annotations

import contextlib
import shlex
import shutil
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from bcqfmt.cli.main import cli
from bcqfmt.errors import BcqError
from faults.fault_case import Case
from faults.os_faults import FAULTS, OsFaults, count
from pages.soak_figures import record
from sources.conversions import tree


def disturbed(case: Case, folder: Path, name: str, at: int) -> tuple[str, BaseException | None]:
    """Run with the fault at its ``at``-th call; (the kind of call that was hit, what came of it)."""
    kinds, action = FAULTS[name]
    faults = OsFaults((folder, case.source), kinds, at, action)
    fault: BaseException | None = None
    with faults.installed():
        try:
            case.run(folder / "bcq")
        except Exception as caught:  # noqa: BLE001 - judged by the caller
            fault = caught
    return faults.hit, fault


def calls(case: Case, folder: Path, name: str) -> int:
    total = count((folder, case.source), FAULTS[name][0], lambda: case.run(folder / "bcq"))
    shutil.rmtree(folder / "bcq")
    return total


def sweep(case: Case, scratch: Path, name: str, step: int) -> Counter[str]:
    """The fault at every ``step``-th call; how often what was hit."""
    (scratch / "count").mkdir()
    total = calls(case, scratch / "count", name)
    assert total > 5
    hits: Counter[str] = Counter()
    for at in range(1 + len(name) % step, total + 1, step):
        folder = scratch / str(at)
        folder.mkdir()
        hit, fault = disturbed(case, folder, name, at)
        if hit:
            hits[hit] += 1
            hits["refused" if fault else "went on"] += 1
        case.check_after(folder / "bcq", fault)
        shutil.rmtree(folder)
    return hits


@pytest.mark.parametrize("name", FAULTS)
def test_now_and_then(small: Case, tmp_path: Path, name: str) -> None:
    hits = sweep(small, tmp_path, name, step=61)
    assert hits


@pytest.mark.parametrize("name", ["EIO while reading", "EIO while writing", "ENOSPC"])
def test_quantizing_now_and_then(dense: Case, tmp_path: Path, name: str) -> None:
    assert sweep(dense, tmp_path, name, step=97)


@pytest.mark.parametrize("name", ["short read", "short write"])
def test_every_read_or_write_is_short(small: Case, tmp_path: Path, name: str) -> None:
    hit, fault = disturbed(small, tmp_path, name, 0)
    assert hit
    assert fault is None
    small.check_after(tmp_path / "bcq", None)


@pytest.mark.parametrize("name", ["failing fsync", "ENOSPC"])
def test_it_never_works(small: Case, tmp_path: Path, name: str) -> None:
    """A disk that is full, or that fails, from the first call on."""
    _, fault = disturbed(small, tmp_path, name, 0)
    assert isinstance(fault, BcqError)
    assert (fault.code, fault.exit_code) == ("BCQ-E402", 7)
    small.check_after(tmp_path / "bcq", fault)


@pytest.mark.parametrize(("verb", "more"), [("convert", []), ("quantize", ["--method", "rtn", "--group-size", "32"])])
def test_a_disk_that_fills_up_half_way(verb: str, more: list[str], small: Case, dense: Case, tmp_path: Path) -> None:
    """The message says what is kept and which command goes on; obeyed, it gives the same bytes."""
    case, out = {"convert": small, "quantize": dense}[verb], tmp_path / "bcq"
    words = [verb, str(case.source), str(out), "--max-shard-size", str(case.size), *more]

    def run(*args: str) -> Result:
        return CliRunner().invoke(cli, args)

    kinds, action = FAULTS["ENOSPC"]
    calls = count((tmp_path,), kinds, lambda: run(*words))
    plain = tree(out)
    shutil.rmtree(out)
    with OsFaults((tmp_path,), kinds, calls // 2, action).installed():
        stopped = run(*words)
    assert (stopped.exit_code, "BCQ-E402" in stopped.stderr) == (7, True)
    told, _, command = stopped.stderr.rpartition("then go on with what is in bcq.partial: bcqfmt ")
    assert "the free space" in told
    assert run(*shlex.split(command)).exit_code == 0
    assert tree(out) == plain


@contextlib.contextmanager
def signals(every: float) -> Iterator[list[int]]:
    """A signal again and again: real system calls are interrupted, and come back with EINTR."""
    seen = [0]

    def handler(*_: object) -> None:
        seen[0] += 1

    old = signal.signal(signal.SIGALRM, handler)
    signal.siginterrupt(signal.SIGALRM, True)
    signal.setitimer(signal.ITIMER_REAL, every, every)
    try:
        yield seen
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)


def test_signals_all_the_time(small: Case, tmp_path: Path) -> None:
    with signals(0.0005) as seen:
        small.run(tmp_path / "bcq")
    assert seen[0] > 3
    small.check_after(tmp_path / "bcq", None)


@pytest.mark.soak
def test_every_fault_at_every_call(small: Case, dense: Case, tmp_path: Path) -> None:
    found: dict[str, int] = {}
    refused = 0
    for case in (small, dense):
        for name in FAULTS:
            folder = tmp_path / case.verb / name
            folder.mkdir(parents=True)
            hits = sweep(case, folder, name, step=1)
            refused += hits.pop("refused", 0)
            hits.pop("went on", 0)
            found[f"{case.verb}, {name}"] = sum(hits.values())
    record("os_faults", injected=found, refused=refused, wrong_bytes=0, partial_files=0, resumed_to_same_bytes="all")
