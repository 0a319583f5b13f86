"""Two processes on one target: one makes it, the other is told so, and the bytes are those of one alone."""

from __future__ import annotations

import fcntl
import shutil
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from bcqfmt.converters.jobs import workspace
from bcqfmt.converters.jobs.workspace import Workspace
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


@pytest.mark.parametrize("opened", [False, True])
def test_the_first_to_lock_a_new_folder_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opened: bool) -> None:
    """Another one comes when the folder is made, or its lock file opened, but not locked: one of them goes on."""
    others: list[Workspace] = []

    def other() -> None:
        monkeypatch.undo()
        others.append(Workspace(tmp_path / "bcq", resume=False, overwrite=False))

    module, name = (fcntl, "flock") if opened else (Workspace, "_take_lock")
    real = getattr(module, name)

    def after_the_other(*words: Any, **named: Any) -> None:
        other()
        real(*words, **named)

    monkeypatch.setattr(module, name, after_the_other)
    with pytest.raises(BcqError, match="another process is working on it") as caught:
        Workspace(tmp_path / "bcq", resume=False, overwrite=False)
    assert caught.value.code == "BCQ-E403"
    assert len(others) == 1
    others[0].discard_if_empty()
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("begun", [False, True])
def test_a_target_that_another_has_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begun: bool) -> None:
    """It is finished between our look at the target and our lock; the work folder may have been there a moment ago."""
    target, folder = tmp_path / "bcq", tmp_path / "bcq.partial"
    if begun:
        folder.mkdir()
    look = Workspace._look

    def finished_meanwhile(space: Workspace, allowed: bool) -> None:
        if begun:
            folder.rmdir()
        target.mkdir()
        (target / "bcq_manifest.json").touch()
        look(space, allowed)

    monkeypatch.setattr(Workspace, "_look", finished_meanwhile)
    with pytest.raises(BcqError, match="it is there already") as caught:
        Workspace(target, resume=False, overwrite=False)
    assert caught.value.code == "BCQ-E401"
    assert [path.name for path in tmp_path.iterdir()] == ["bcq"]


@pytest.mark.parametrize("later", [False, True])
def test_the_lock_of_a_folder_that_has_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, later: bool) -> None:
    """The other one finishes, and takes the folder away, between our opening of the lock file and our locking it."""
    real = fcntl.flock

    def finished_meanwhile(descriptor: int, kind: int) -> None:
        shutil.rmtree(tmp_path / "bcq.partial")
        if later:  # and a third one has begun anew
            (tmp_path / "bcq.partial" / ".bcq_work").mkdir(parents=True)
            (tmp_path / "bcq.partial" / ".bcq_work" / "lock").touch()
        real(descriptor, kind)

    monkeypatch.setattr(fcntl, "flock", finished_meanwhile)
    with pytest.raises(BcqError, match="another process is working on it") as caught:
        Workspace(tmp_path / "bcq", resume=True, overwrite=False)
    assert (caught.value.code, caught.value.exit_code) == ("BCQ-E403", 7)


@pytest.mark.parametrize(
    ("asked", "looked_before"),
    [({}, False), ({"resume": True}, True), ({"overwrite": True}, True), ({"resume": True, "part": (1, 2)}, True)],
)
def test_a_folder_that_gets_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: dict[str, Any], looked_before: bool
) -> None:
    """Whatever another one wants, it is refused; what it may have made there meanwhile does not come along."""
    options: dict[str, Any] = {"resume": False, "overwrite": False}
    space = Workspace(tmp_path / "bcq", **options)
    refuse, looks = Workspace._refuse_while_named, iter([not looked_before])
    monkeypatch.setattr(Workspace, "_refuse_while_named", lambda other: refuse(other) if next(looks, True) else None)
    for name in ("model.safetensors", "bcq_manifest.json"):
        (space.folder / name).write_text("whole")
    (tmp_path / "bcq.partial.lock").touch()  # of a process that was killed
    real = workspace.take_name

    def another_comes(*words: Any, **named: Any) -> None:
        with pytest.raises(BcqError, match="another process is working on it"):
            Workspace(tmp_path / "bcq", **{**options, **asked})
        assert (space.work / "lock").exists() == looked_before
        real(*words, **named)

    monkeypatch.setattr(workspace, "take_name", another_comes)
    space.publish()
    assert {path.name: path.read_text() for path in (tmp_path / "bcq").iterdir()} == {
        "model.safetensors": "whole", "bcq_manifest.json": "whole",
    }  # fmt: skip
    assert [path.name for path in tmp_path.iterdir()] == ["bcq"]


def test_a_name_with_no_room_for_the_lock(tmp_path: Path) -> None:
    with pytest.raises(BcqError, match="the name is too long"):
        Workspace(tmp_path / ("b" * 245), resume=False, overwrite=False)
    assert not any(tmp_path.iterdir())


def test_a_lock_that_a_killed_process_left(tmp_path: Path) -> None:
    """Killed while it gave the complete folder its name."""
    (tmp_path / "bcq.partial").mkdir()
    (tmp_path / "bcq.partial" / "bcq_manifest.json").touch()
    (tmp_path / "bcq.partial.lock").touch()
    with pytest.raises(BcqError, match="an unfinished conversion"):
        Workspace(tmp_path / "bcq", resume=False, overwrite=False)
    Workspace(tmp_path / "bcq", resume=True, overwrite=False).publish()
    assert [path.name for path in tmp_path.iterdir()] == ["bcq"]


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
