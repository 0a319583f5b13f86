"""Files appear whole or not at all, whatever goes wrong while they are written; memory stays bounded."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bcqfmt
from bcqfmt import BcqError, OutputError
from bcqfmt.container.durable import folder_in_progress
from weights import oracle, samples

ROOT = Path(__file__).resolve().parents[2]
TARGETS = ["model", "model.safetensors"]


@contextlib.contextmanager
def failing(name: str, at: int, fault: BaseException) -> Iterator[list[int]]:
    """`os.name` raises at its `at`-th call; yields the number of calls."""
    real = getattr(os, name)
    calls = [0]

    def wrapped(*arguments: Any, **options: Any) -> Any:
        calls[0] += 1
        if calls[0] == at:
            raise fault
        return real(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, name, wrapped)
        yield calls


def save(target: Path, **options: Any) -> None:
    tensors = samples.tensors()
    if target.suffix:
        bcqfmt.save(target, tensors, **options)
    else:
        bcqfmt.save(target, tensors, config=samples.CONFIG, files=samples.SIDE, max_shard_size=1500, **options)


def count(name: str, folder: Path, target: str) -> int:
    folder.mkdir()
    with failing(name, -1, OSError()) as calls:
        save(folder / target)
    return calls[0]


FAULTS: dict[str, tuple[str, type[BaseException], Any]] = {
    "disk full": ("write", OSError, errno.ENOSPC),
    "quota": ("write", OSError, errno.EDQUOT),
    "interrupted by the user": ("write", KeyboardInterrupt, None),
    "disk full at once": ("posix_fallocate", OSError, errno.ENOSPC),
    "rename": ("replace", OSError, errno.EACCES),
    "no more files": ("open", OSError, errno.EMFILE),
}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("case", FAULTS)
def test_a_failed_write_leaves_nothing(tmp_path: Path, case: str, target: str) -> None:
    """At every call at which it can fail, not only at the first."""
    name, kind, number = FAULTS[case]
    total = count(name, tmp_path / "count", target)
    assert total
    for at in sorted({*range(1, min(total, 12) + 1), total // 2, total - 1, total} - {0}):
        folder = tmp_path / f"at{at}"
        folder.mkdir()
        fault = kind(number, os.strerror(number)) if number else kind()
        with failing(name, at, fault) as calls, pytest.raises((BcqError, KeyboardInterrupt)) as caught:
            save(folder / target)
        assert calls[0] >= at
        if number and case != "no more files":  # which is one for reading back what was written, too
            assert isinstance(caught.value, OutputError)
            assert caught.value.code == "BCQ-E402"
            assert caught.value.exit_code == 7
        if case == "no more files" and at == total:
            continue  # the folder is opened to be synced after the rename: what is there is whole
        assert list(folder.iterdir()) == [], at


@pytest.mark.parametrize("target", TARGETS)
def test_a_failed_sync_is_told_and_leaves_no_trace(tmp_path: Path, target: str) -> None:
    """fsync of a file: nothing is there. fsync of the folder after the rename: the whole is there, or nothing."""
    total = count("fsync", tmp_path / "count", target)
    for at in range(1, total + 1):
        folder = tmp_path / f"at{at}"
        folder.mkdir()
        with failing("fsync", at, OSError(errno.EIO, "Input/output error")), pytest.raises(OutputError) as caught:
            save(folder / target)
        assert caught.value.code == "BCQ-E402"
        left = [path.name for path in folder.iterdir()]
        if at < total:
            assert left == []
        else:
            assert left in ([], [target])
            if left:
                assert not bcqfmt.validate(folder / target, deep=True).errors


def outcome(action: Callable[[], None]) -> OutputError | None:
    try:
        action()
    except OutputError as fault:
        return fault
    return None


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("name", "number"), [("write", errno.ENOSPC), ("fsync", errno.EIO), ("replace", errno.EIO), ("rename", errno.EIO)]
)
def test_a_failed_overwrite_keeps_the_old_one(tmp_path: Path, target: str, name: str, number: int) -> None:
    old = {"x": np.arange(4)}
    bcqfmt.save(tmp_path / target, old)
    before = samples.tree(tmp_path)
    total = count(name, tmp_path / "count", target)
    (tmp_path / "count").rename(tmp_path.parent / f"{tmp_path.name}-count")
    for at in range(1, max(total, 3 if name == "rename" else 0) + 1):
        with failing(name, at, OSError(number, os.strerror(number))) as calls:
            fault = outcome(lambda: save(tmp_path / target, overwrite=True))
            if fault is not None:
                assert fault.code == "BCQ-E402"
                whole = samples.tree(tmp_path) == before or not bcqfmt.validate(tmp_path / target, deep=True).errors
                assert whole, at
                assert [path.name for path in tmp_path.iterdir()] == [target], at
            else:
                assert calls[0] < at
        if samples.tree(tmp_path) != before:
            bcqfmt.save(tmp_path / target, old, overwrite=True)


@pytest.mark.parametrize("number", [errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS])
@pytest.mark.parametrize("target", TARGETS)
def test_a_file_system_that_cannot_reserve_space_will_do(tmp_path: Path, target: str, number: int) -> None:
    """posix_fallocate is optional: file systems and C libraries that lack it are written to all the same."""

    def refuse(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "posix_fallocate", refuse)
        save(tmp_path / target)
    assert not bcqfmt.validate(tmp_path / target, deep=True).errors


def test_short_writes_are_continued(tmp_path: Path) -> None:
    save(tmp_path / "a.safetensors")
    real = os.write
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "write", lambda descriptor, data: real(descriptor, bytes(data)[:7]))
        save(tmp_path / "b.safetensors")
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()


# -- what is there already -------------------------------------------------------------------------------------


def test_a_folder_with_something_in_it_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "precious.txt").write_text("x")
    with pytest.raises(OutputError) as caught:
        save(tmp_path / "model")
    assert caught.value.code == "BCQ-E401"
    with pytest.raises(OutputError, match="no checkpoint"):
        save(tmp_path / "model", overwrite=True)
    assert samples.tree(tmp_path) == {"model/precious.txt": b"x"}
    (tmp_path / "model" / "bcq_manifest.json").write_text("{}")
    save(tmp_path / "model", overwrite=True)
    assert not bcqfmt.validate(tmp_path / "model", deep=True).errors
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_an_empty_folder_is_taken(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    save(tmp_path / "model")
    assert not bcqfmt.validate(tmp_path / "model", deep=True).errors


@pytest.mark.parametrize("mode", [0o700, 0o750, 0o777])
def test_a_folder_that_is_replaced_gives_its_mode(tmp_path: Path, mode: int) -> None:
    """Who made it private keeps it so, whatever the umask says of new ones."""
    folder = tmp_path / "model"
    folder.mkdir()
    folder.chmod(mode)
    save(folder)
    assert folder.stat().st_mode & 0o777 == mode
    folder.chmod(mode & 0o770)
    save(folder, overwrite=True)
    assert folder.stat().st_mode & 0o777 == mode & 0o770


def test_an_existing_file_is_not_touched(tmp_path: Path) -> None:
    for name in ("model", "model.safetensors"):
        (tmp_path / name).write_bytes(b"precious")
        with pytest.raises(OutputError) as caught:
            save(tmp_path / name)
        assert caught.value.code == "BCQ-E401"
        assert (tmp_path / name).read_bytes() == b"precious"
    with pytest.raises(OutputError, match="no checkpoint"):
        save(tmp_path / "model", overwrite=True)
    save(tmp_path / "model.safetensors", overwrite=True)
    assert not bcqfmt.validate(tmp_path / "model.safetensors", deep=True).errors
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "model.safetensors"]


def test_what_appears_meanwhile_is_kept(tmp_path: Path) -> None:
    """Also where it could be replaced: nobody asked for that."""

    def write() -> None:
        with folder_in_progress(tmp_path / "out", overwrite=False, like="*.safetensors") as work:
            (work / "model.safetensors").write_bytes(b"ours")
            (tmp_path / "out").mkdir()
            (tmp_path / "out" / "model.safetensors").write_bytes(b"precious")

    with pytest.raises(OutputError, match="appeared meanwhile"):
        write()
    assert samples.tree(tmp_path).keys() == {"out/model.safetensors"}
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == b"precious"


def test_a_read_only_folder_is_refused_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "model")
    before = samples.tree(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda *_: False)  # for root, who may be running this, every folder can be written
        with pytest.raises(OutputError, match="read-only") as caught:
            save(tmp_path / "model", overwrite=True)
    assert f"chmod u+w {tmp_path / 'model'}" in caught.value.hint
    assert samples.tree(tmp_path) == before


@pytest.mark.parametrize("kind", ["file", "symbolic link", "folder"])
def test_what_cannot_be_replaced_is_not_said_to_be(tmp_path: Path, kind: str) -> None:
    save(tmp_path / "real")
    if kind == "symbolic link":
        (tmp_path / "model").symlink_to(tmp_path / "real")
    elif kind == "file":
        (tmp_path / "model").touch()
    else:
        (tmp_path / "model" / "inside").mkdir(parents=True)
    for overwrite in (False, True):
        with pytest.raises(OutputError, match=f"it is a {kind}" if kind != "folder" else "it has no bcq_") as caught:
            save(tmp_path / "model", overwrite=overwrite)
        assert "overwrite" not in caught.value.hint


def test_overwriting_what_is_being_read(tmp_path: Path) -> None:
    """A checkpoint opened from the target itself: its bytes come out right, the old file stays until the end."""
    for name in TARGETS:
        save(tmp_path / name)
        before = samples.tree(tmp_path)
        checkpoint = bcqfmt.open(tmp_path / name)
        tensors = {entry: checkpoint[entry] for entry in checkpoint}
        bcqfmt.save(
            tmp_path / name,
            tensors,
            overwrite=True,
            **({} if "." in name else {"config": samples.CONFIG, "files": samples.SIDE, "max_shard_size": 1500}),
        )
        assert samples.tree(tmp_path) == before


@pytest.mark.parametrize("target", TARGETS)
def test_a_folder_that_cannot_be_written(tmp_path: Path, target: str) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(OutputError) as caught:
        save(tmp_path / "file" / target)
    assert caught.value.code == "BCQ-E402"
    assert caught.value.exit_code == 7


def test_a_source_that_vanishes_leaves_nothing(tmp_path: Path) -> None:
    save(tmp_path / "a.safetensors")
    checkpoint = bcqfmt.open(tmp_path / "a.safetensors")
    tensors = {entry: checkpoint[entry] for entry in checkpoint}
    os.truncate(tmp_path / "a.safetensors", 1000)
    for name in ("model", "b.safetensors"):
        with pytest.raises(bcqfmt.InputError) as caught:
            bcqfmt.save(tmp_path / name, tensors)
        assert caught.value.code == "BCQ-E103"
    assert [path.name for path in tmp_path.iterdir()] == ["a.safetensors"]


# -- memory ----------------------------------------------------------------------------------------------------

MEASURE = """
import sys, bcqfmt
from bcqfmt.system import peak_memory
checkpoint = bcqfmt.open(sys.argv[1])
bcqfmt.save(sys.argv[2], {name: checkpoint[name] for name in checkpoint})
print(peak_memory())
"""


def sparse_file(path: Path, mebibytes: int) -> None:
    """A file of dense tensors that takes no room on the disk: one large tensor and eight small ones."""
    size = mebibytes << 17
    header: dict[str, Any] = {"__metadata__": {"format": "pt", "bcqfmt": oracle.canonical(oracle.descriptor({}))}}
    at = 0
    for name, share in [("a", size * 4), *((f"b{i}", size // 2) for i in range(8))]:
        header[name] = {"dtype": "F16", "shape": [share // 2], "data_offsets": [at, at + share]}
        at += share
    head = oracle.framed(oracle.canonical(header).encode(), b"")
    path.write_bytes(head)
    os.truncate(path, len(head) + at)


def test_memory_does_not_grow_with_the_shard(tmp_path: Path) -> None:
    peaks = []
    for size in (48, 240):
        sparse_file(tmp_path / "in.safetensors", size)
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": "1"}
        command = [sys.executable, "-c", MEASURE, str(tmp_path / "in.safetensors"), str(tmp_path / "out.safetensors")]
        ran = subprocess.run(command, check=True, capture_output=True, text=True, env=environment, timeout=300)
        peaks.append(int(ran.stdout) >> 20)
        assert (tmp_path / "out.safetensors").stat().st_size >= size << 20
        (tmp_path / "out.safetensors").unlink()
    assert abs(peaks[1] - peaks[0]) < 32, peaks


def test_the_manifest_is_written_last(tmp_path: Path) -> None:
    """A folder in progress has no manifest until everything else is complete."""
    order: list[str] = []
    real = os.replace

    def seen(source: Any, target: Any) -> None:
        order.append(Path(target).name)
        real(source, target)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "replace", seen)
        save(tmp_path / "model")
    assert order[-1] == "bcq_manifest.json"
    assert set(json.loads((tmp_path / "model" / "bcq_manifest.json").read_text())["files"]) == set(
        samples.tree(tmp_path / "model")
    ) - {"bcq_manifest.json", "docs/card.md"}


@pytest.mark.parametrize("place", [".", "", "/"])
def test_an_output_without_a_name(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OutputError, match="BCQ-E402"):
        bcqfmt.save(place, {})


@pytest.mark.parametrize(
    "files",
    [
        ("config.json",),
        ("config.json", "package.json", "src/main.py"),
        ("config.json", "model.safetensors"),
        (".git/HEAD", "bcq_manifest.json", "config.json"),
    ],
)
def test_only_a_checkpoint_is_replaced(tmp_path: Path, files: tuple[str, ...]) -> None:
    """A folder with a configuration may be anything; what is under version control is more than a checkpoint."""
    for name in files:
        path = tmp_path / "model" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("precious")
    before = samples.tree(tmp_path)
    with pytest.raises(OutputError, match="no checkpoint") as caught:
        save(tmp_path / "model", overwrite=True)
    assert caught.value.code == "BCQ-E401"
    assert samples.tree(tmp_path) == before


def test_what_appears_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    save(tmp_path / "model")

    def replace() -> None:
        with folder_in_progress(tmp_path / "model", overwrite=True, like="bcq_manifest.json"):
            shutil.rmtree(tmp_path / "model")
            (tmp_path / "model").mkdir()
            (tmp_path / "model" / "precious").write_text("")

    with pytest.raises(OutputError, match="no checkpoint"):
        replace()
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert (tmp_path / "model" / "precious").exists()
