"""The power fails after any operation: no partial file under a final name, and the same bytes when it goes on."""

# ruff: noqa: PTH104 - the careless writer uses the os layer itself
from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

import bcqfmt
from bcqfmt.converters.convert.restore import restore
from faults.fault_case import Case
from faults.power_loss import HOW, Disk, Operation, Recorder
from pages.soak_figures import record
from sources.conversions import tree
from weights import samples


@dataclass(frozen=True)
class Scenario:
    """Something that writes below a folder: ``run`` at first, ``again`` after the power is back."""

    run: Callable[[Path], object]
    again: Callable[[Path], object]
    before: Path | None = None  # what the folder holds at first
    stays: str = ""  # the name in it that is there at first, whole


def converting(case: Case) -> Scenario:
    return Scenario(lambda folder: case.run(folder / "bcq"), lambda folder: case.run(folder / "bcq", resume=True))


def overwriting(case: Case, scratch: Path) -> Scenario:
    """The conversion replaces an older one."""
    bcqfmt.save(scratch / "before" / "bcq", samples.tensors(), config=samples.CONFIG)
    return Scenario(
        lambda folder: case.run(folder / "bcq", overwrite=True),
        lambda folder: case.run(folder / "bcq", overwrite=True, resume=True),
        scratch / "before",
        "bcq",
    )


def saving() -> Scenario:
    files = {"extra/deep/notes.txt": b"two folders down"}

    def save(folder: Path) -> None:
        bcqfmt.save(
            folder / "bcq",
            samples.tensors(),
            config=samples.CONFIG,
            files=files,
            max_shard_size=1500,
            overwrite=True,
        )

    return Scenario(save, save)


def restoring(case: Case) -> Scenario:
    def run(folder: Path) -> None:
        with bcqfmt.open(case.source.parent / "plain") as checkpoint:
            restore(checkpoint, folder / "bcq", overwrite=True)

    return Scenario(run, run)


def recorded(scenario: Scenario, folder: Path) -> tuple[list[Operation], dict[str, str]]:
    """The log of an undisturbed run, and what it leaves; replaying the log leaves the same."""
    if scenario.before is not None:
        shutil.copytree(scenario.before, folder)
    folder.mkdir(exist_ok=True)
    recorder = Recorder(folder)
    with recorder.installed():
        scenario.run(folder)
    whole = Disk(scenario.before)
    for operation in recorder.log:
        whole.apply(operation)
    after = folder.with_name("replayed")
    whole.leave(after, "all", random.Random(0))
    assert tree(after) == tree(folder)
    survived = folder.with_name("survived")
    whole.leave(survived, "nothing", random.Random(0))
    assert tree(survived / "bcq") == tree(folder / "bcq"), "the program has ended, and something was not synced"
    return recorder.log, tree(folder / "bcq")


def lose_power(scenario: Scenario, scratch: Path, step: int, how: list[str]) -> int:
    """Power lost after every ``step``-th operation, in each way; the number of different disks."""
    log, wanted = recorded(scenario, scratch / "plain")
    first = tree(scenario.before / scenario.stays) if scenario.before is not None else None
    disk, rng, seen = Disk(scenario.before), random.Random(0), set[str]()
    for number, operation in enumerate(log, start=1):
        disk.apply(operation)
        if number % step and number != len(log):
            continue
        for way in how:
            folder = scratch / "after" / "disk"
            shutil.rmtree(folder.parent, ignore_errors=True)
            folder.parent.mkdir()
            disk.leave(folder, way, rng)
            state = str(sorted(tree(folder).items())) + str(sorted(folder.rglob("*")))
            if state in seen:  # many operations leave the disk as it was, as far as it is safe
                continue
            seen.add(state)
            told = f"after operation {number} of {len(log)}, {operation[:2]}, left: {HOW[way]}"
            check(folder, wanted, first, told)
            scenario.again(folder)
            assert tree(folder / "bcq") == wanted, told
    return len(seen)


def check(folder: Path, wanted: dict[str, str], first: dict[str, str] | None, told: str) -> None:
    """What has its final name is whole: the new folder, or the old one."""
    if (folder / "bcq").exists():
        assert tree(folder / "bcq") in (wanted, first), told
    for path in folder.glob("bcq.partial/model-*.safetensors"):
        assert tree(path.parent)[path.name] == wanted[path.name], told


def scenario_of(name: str, small: Case, scratch: Path) -> Scenario:
    made = {
        "convert": lambda: converting(small),
        "overwrite": lambda: overwriting(small, scratch),
        "save": saving,
        "restore": lambda: restoring(small),
    }
    return made[name]()


NAMES = ("convert", "overwrite", "save", "restore")


@pytest.mark.parametrize("name", NAMES)
def test_now_and_then(small: Case, tmp_path: Path, name: str) -> None:
    scenario = scenario_of(name, small, tmp_path)
    assert lose_power(scenario, tmp_path, 31, ["nothing", "zeros"]) >= 3


@pytest.mark.soak
def test_after_every_operation(small: Case, tmp_path: Path) -> None:
    disks = {}
    for name in NAMES:
        (tmp_path / name).mkdir()
        disks[name] = lose_power(scenario_of(name, small, tmp_path / name), tmp_path / name, 1, [*HOW, "some", "some"])
    record("power_loss", disks=disks, partial_files=0, wrong_bytes=0, resumed_to_same_bytes="all")


def test_the_model_loses_what_is_not_synced(tmp_path: Path) -> None:
    """A writer that renames without syncing is caught: with its name, without its content."""

    def careless(folder: Path) -> None:
        import os

        descriptor = os.open(folder / "temporary", os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        os.write(descriptor, b"content")
        os.close(descriptor)
        os.rename(folder / "temporary", folder / "final")

    folder = tmp_path / "disk"
    folder.mkdir()
    recorder = Recorder(folder)
    with recorder.installed():
        careless(folder)
    disk = Disk()
    for operation in recorder.log:
        disk.apply(operation)
    left = {}
    for way in HOW:
        disk.leave(tmp_path / way, way, random.Random(1))
        left[way] = {path.name: path.read_bytes() for path in (tmp_path / way).iterdir()}
    assert left["nothing"] == {}
    assert left["names"] == {"final": b""}
    assert left["zeros"] == {"final": bytes(7)}
    assert left["all"] == {"final": b"content"}
