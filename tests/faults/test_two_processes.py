"""Two processes on one target: one makes it, the other is told so, and the bytes are those of one alone."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
import subprocess
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from bcqfmt.converters.jobs import workspace
from bcqfmt.converters.jobs.workspace import Workspace
from bcqfmt.converters.quantize.calibration_work import CalibrationWork
from bcqfmt.errors import BcqError
from faults.fault_case import Case
from pages.soak_figures import record
from programs.verbs import command, environment
from sources.conversions import tree


def race(case: Case, folder: Path, *options: str) -> list[str]:
    """Two at the same time; how each ended: ``made``, or the code it was refused with."""
    words = command("convert", case.source, folder / "bcq", "--max-shard-size", str(case.size), *options)
    pair = [subprocess.Popen(words, env=environment(), stderr=subprocess.PIPE, text=True) for _ in range(2)]
    ends = []
    for running in pair:
        _, said = running.communicate(timeout=300)
        assert "Traceback" not in said
        assert running.returncode in (0, 7), said
        ends.append("made" if running.returncode == 0 else said[said.index("BCQ-") :][:8])
    case.check_names(folder / "bcq")
    return ends


def test_one_wins(twenty: Case, tmp_path: Path) -> None:
    ends = race(twenty, tmp_path)
    assert sorted(ends) in (["BCQ-E401", "made"], ["BCQ-E403", "made"]), ends
    assert tree(tmp_path / "bcq") == twenty.plain
    assert [path.name for path in tmp_path.iterdir()] == ["bcq"]


class Other:
    """Another run for the same output, in a thread: locks of files know no threads. It comes while ``name`` runs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, target: Path, **asked: Any) -> None:
        self.target, self.asked = target, {"resume": False, "overwrite": False, **asked}
        self.waits, self.end = threading.Event(), ""
        self.thread = threading.Thread(target=self.run)
        real, sleep = getattr(owner, name), time.sleep

        def with_the_other(*words: Any, **named: Any) -> Any:
            monkeypatch.setattr(owner, name, real)
            self.thread.start()
            assert self.waits.wait(60)
            return real(*words, **named)

        def waiting(seconds: float) -> None:
            if threading.current_thread() is self.thread:
                self.waits.set()
            sleep(seconds)

        monkeypatch.setattr(owner, name, with_the_other)
        monkeypatch.setattr(time, "sleep", waiting)

    def run(self) -> None:
        try:
            Workspace(self.target, **self.asked).discard_if_empty()
            self.end = "let in"
        except BcqError as fault:
            self.end = fault.code
        finally:
            self.waits.set()

    def ended(self) -> str:
        self.thread.join(60)
        return self.end


@pytest.mark.parametrize("name", ["_look", "_take_lock"])
def test_the_first_to_begin_has_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    other = Other(monkeypatch, Workspace, name, tmp_path / "bcq")
    space = Workspace(tmp_path / "bcq", resume=False, overwrite=False)
    assert other.ended() == "BCQ-E403"
    space.discard_if_empty()
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("asked", "end"),
    [({}, "BCQ-E401"), ({"resume": True}, "BCQ-E401"), ({"resume": True, "part": (1, 2)}, "BCQ-E401"),
     ({"overwrite": True}, "let in"), ({"overwrite": True, "resume": True}, "let in")],
)  # fmt: skip
def test_nobody_enters_a_folder_that_gets_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: dict[str, Any], end: str
) -> None:
    space = Workspace(tmp_path / "bcq", resume=False, overwrite=False)
    for name in ("model.safetensors", "bcq_manifest.json"):
        (space.folder / name).write_text("whole")
    other = Other(monkeypatch, workspace, "take_name", tmp_path / "bcq", **asked)
    space.publish()
    assert other.ended() == end
    assert {path.name: path.read_text() for path in (tmp_path / "bcq").iterdir()} == {
        "model.safetensors": "whole", "bcq_manifest.json": "whole",
    }  # fmt: skip
    assert [path.name for path in tmp_path.iterdir()] == ["bcq"]


def test_a_folder_that_another_program_keeps_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As ``flock FOLDER bcqfmt ...`` does: it is not waited for."""
    descriptor = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    monkeypatch.setattr(workspace, "_PATIENCE", 0.1)
    with pytest.raises(BcqError, match="another process is working on it"):
        [Workspace(tmp_path / "bcq", resume=True, overwrite=False) for _ in range(2)]
    with pytest.raises(BcqError, match="another process is working on it"):
        [CalibrationWork(tmp_path / "stats", {"rows": 1}) for _ in range(2)]
    os.close(descriptor)


def test_a_file_system_that_locks_no_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NFS, for one, wants a descriptor to write to, which no folder has."""
    real = fcntl.flock

    def files_only(descriptor: int, kind: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EBADF, "Bad file descriptor")
        real(descriptor, kind)

    monkeypatch.setattr(fcntl, "flock", files_only)
    with pytest.raises(BcqError, match="another process is working on it"):
        [Workspace(tmp_path / "bcq", resume=True, overwrite=False) for _ in range(2)]


@pytest.mark.parametrize("later", [False, True])
def test_the_lock_of_a_folder_that_has_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, later: bool) -> None:
    """The other one finishes, and takes the folder away, between our opening of the lock file and our locking it."""
    real = fcntl.flock

    def finished_meanwhile(descriptor: int, kind: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            return
        shutil.rmtree(tmp_path / "bcq.partial")
        if later:  # and a third one has begun anew
            (tmp_path / "bcq.partial" / ".bcq_work").mkdir(parents=True)
            (tmp_path / "bcq.partial" / ".bcq_work" / "lock").touch()
        real(descriptor, kind)

    monkeypatch.setattr(fcntl, "flock", finished_meanwhile)
    with pytest.raises(BcqError, match="another process is working on it") as caught:
        Workspace(tmp_path / "bcq", resume=True, overwrite=False)
    assert (caught.value.code, caught.value.exit_code) == ("BCQ-E403", 7)


@pytest.mark.soak
def test_many_races(twenty: Case, tmp_path: Path) -> None:
    """Also with --resume, --overwrite and after an interruption, where both may succeed, one after the other."""
    ends: Counter[str] = Counter()
    turns = 12
    for turn in range(turns):
        folder = tmp_path / str(turn)
        folder.mkdir()
        options = [(), ("--resume",), ("--overwrite",)][turn % 3]
        found = race(twenty, folder, *options)
        assert "made" in found, found
        assert set(found) <= {"made", "BCQ-E401", "BCQ-E403"}, found
        ends.update(found)
        assert tree(folder / "bcq") == twenty.plain
        shutil.rmtree(folder)
    record("two_processes", races=turns, ends=dict(ends), wrong_bytes=0, partial_files=0)
