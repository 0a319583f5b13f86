"""Files that change while they are read: an error, never a crash and never mixed bytes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import bcqfmt
from bcqfmt import InputError
from weights import samples

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """
import os, shutil, sys
import bcqfmt
path, how = sys.argv[1:]
checkpoint = bcqfmt.open(path)
weight = checkpoint.weight("w.weight")
dense = checkpoint["dense"]
weight.dequantize(rows=(0, 1))
if how == "shrink":
    os.truncate(path, 2000)
elif how == "empty":
    os.truncate(path, 0)
elif how == "grow":
    with open(path, "ab") as file:
        file.write(b"more")
elif how == "replace":
    shutil.copy(path, path + ".new")
    os.replace(path + ".new", path)
    checkpoint.close()
elif how == "remove":
    os.unlink(path)
    checkpoint.close()
elif how == "rewrite":
    with open(path, "r+b") as file:
        file.seek(-1, 2)
        file.write(b"x")
    os.utime(path, ns=(1, 1))
actions = weight.dequantize, weight.planes, weight.digest, weight.check, dense.array, dense.tobytes
for action in actions:
    try:
        action()
    except bcqfmt.InputError as fault:
        print(fault.code)
    else:
        print("no error")
"""


@pytest.mark.parametrize("how", ["shrink", "empty", "grow", "replace", "remove", "rewrite"])
def test_a_file_that_changes_underneath(tmp_path: Path, how: str) -> None:
    """In a process of its own: a memory map would die of SIGBUS here."""
    tensors = {"w.weight": samples.affine(64, 256), "dense": samples.tensors()["model.norm.weight"]}
    bcqfmt.save(tmp_path / "a.safetensors", tensors)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": "1"}
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "a.safetensors"), how]
    ran = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr
    wanted = "BCQ-E101" if how == "remove" else "BCQ-E103"
    assert ran.stdout.split() == [wanted] * 6


def test_a_file_that_shrinks_between_header_and_data(tmp_path: Path) -> None:
    """The size was checked when the header was read; the read itself has to notice."""
    bcqfmt.save(tmp_path / "a.safetensors", {"w.weight": samples.affine(64, 256)})
    weight = bcqfmt.open(tmp_path / "a.safetensors").weight("w.weight")
    real = os.preadv

    def shrinking(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        os.truncate(tmp_path / "a.safetensors", 1200)
        return real(descriptor, buffers, offset)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "preadv", shrinking)
        with pytest.raises(InputError) as caught:
            weight.dequantize()
    assert caught.value.code == "BCQ-E103"


def test_a_file_that_changes_during_the_read(tmp_path: Path) -> None:
    """Same length, other content: the modification time tells."""
    bcqfmt.save(tmp_path / "a.safetensors", {"w.weight": samples.affine(64, 256)})
    weight = bcqfmt.open(tmp_path / "a.safetensors").weight("w.weight")
    real = os.preadv

    def changing(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        got = real(descriptor, buffers, offset)
        os.utime(tmp_path / "a.safetensors", ns=(5, 5))
        return got

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "preadv", changing)
        with pytest.raises(InputError) as caught:
            weight.dequantize()
    assert caught.value.code == "BCQ-E103"


def test_short_reads_are_continued(tmp_path: Path) -> None:
    weight = samples.affine(16, 128)
    bcqfmt.save(tmp_path / "a.safetensors", {"w.weight": weight})
    real = os.preadv
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "preadv", lambda fd, buffers, offset: real(fd, [buffers[0][:13]], offset))
        found = bcqfmt.open(tmp_path / "a.safetensors").weight("w.weight").dequantize()
    assert found.tobytes() == weight.dequantize().tobytes()


def test_an_error_of_the_disk(tmp_path: Path) -> None:
    bcqfmt.save(tmp_path / "a.safetensors", {"w.weight": samples.affine()})
    weight = bcqfmt.open(tmp_path / "a.safetensors").weight("w.weight")

    def broken(*_: object) -> int:
        raise OSError(5, "Input/output error")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "preadv", broken)
        with pytest.raises(InputError) as caught:
            weight.dequantize()
    assert caught.value.code == "BCQ-E102"


def test_validation_tells_a_change_and_goes_on(tmp_path: Path) -> None:
    """A shard that shrinks while a folder is validated: a finding, not a traceback."""
    bcqfmt.save(tmp_path / "m", samples.tensors(), max_shard_size=1500)
    shard = min((tmp_path / "m").glob("*.safetensors"))
    size = shard.stat().st_size
    real = os.preadv
    calls = [0]

    def shrinking(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        calls[0] += 1
        if calls[0] == 20:
            os.truncate(shard, size - 10)
        return real(descriptor, buffers, offset)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "preadv", shrinking)
        report = bcqfmt.validate(tmp_path / "m", deep=True)
    assert report.errors
    assert {finding.code for finding in report.errors} <= {
        "BCQ-E103",
        "BCQ-V103",
        "BCQ-V116",
        "BCQ-V605",
        "BCQ-V606",
        "BCQ-E204",
    }


def test_a_fork_while_a_thread_reads(tmp_path: Path) -> None:
    """The child has the lock as it was, and no thread that would give it back."""
    bcqfmt.save(tmp_path / "a.safetensors", {"w.weight": samples.affine(64, 256)})
    program = """
import os, signal, sys, threading
import bcqfmt
checkpoint = bcqfmt.open(sys.argv[1])
weight = checkpoint.weight("w.weight")
reading, forked, real = threading.Event(), threading.Event(), os.preadv
def slow(*arguments):
    if threading.current_thread() is not threading.main_thread():
        reading.set()
        forked.wait(60)
    return real(*arguments)
os.preadv = slow
def read():
    with checkpoint._lock:
        weight.dequantize()
thread = threading.Thread(target=read)
thread.start()
reading.wait(60)
child = os.fork()
if child == 0:
    signal.alarm(20)
    checkpoint.weight("w.weight").dequantize()
    bcqfmt.open(sys.argv[1]).weight("w.weight").dequantize()
    os._exit(0)
_, status = os.waitpid(child, 0)
forked.set()
thread.join()
print(os.waitstatus_to_exitcode(status))
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": "1"}
    command = [sys.executable, "-W", "ignore", "-c", program, str(tmp_path / "a.safetensors")]
    ran = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False)
    assert ran.stdout.split() == ["0"], ran.stderr
