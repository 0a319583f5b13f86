"""Systems that lack what Linux has: each function of bcqfmt/system.py, and whole jobs with the names taken away."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bcqfmt import BcqError, system
from bcqfmt.converters.quantize.calibration_work import CalibrationWork

ROOT = Path(__file__).resolve().parents[2]
READS = ("preadv", "pread")
LINUX_ONLY = ("fdatasync", "posix_fallocate", "posix_fadvise", "preadv", "sched_getaffinity", "O_DIRECT")
POSIX_ONLY = (*LINUX_ONLY, "pread", "fork", "register_at_fork", "O_NONBLOCK", "O_NOCTTY", "O_CLOEXEC")


@pytest.mark.parametrize("missing", [(), READS[:1], READS], ids=["preadv", "pread", "neither"])
def test_reading_by_position(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: tuple[str, ...]) -> None:
    for name in missing:
        monkeypatch.delattr(os, name)
    path = tmp_path / "a"
    path.write_bytes(bytes(range(100)))
    descriptor, buffer = os.open(path, os.O_RDONLY), bytearray(10)
    try:
        assert system.read_at(descriptor, memoryview(buffer), 95) == 5
        assert buffer == bytes([95, 96, 97, 98, 99, 0, 0, 0, 0, 0])
        assert system.read_at(descriptor, memoryview(buffer), 20) == 10
        assert buffer == bytes(range(20, 30))
        assert system.read_at(descriptor, memoryview(buffer), 100) == 0
    finally:
        os.close(descriptor)


def test_without_fdatasync_the_whole_file_is_synced(monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.delattr(os, "fdatasync")
    monkeypatch.setattr(os, "fsync", synced.append)
    system.sync_data(7)
    assert synced == [7]


@pytest.mark.parametrize("known", [True, False])
def test_on_macos_a_sync_reaches_the_drive(monkeypatch: pytest.MonkeyPatch, known: bool) -> None:
    """F_FULLFSYNC first; fsync where the file system does not know it."""
    calls: list[Any] = []

    def control(descriptor: int, command: int) -> int:
        calls.append((descriptor, command))
        if not known:
            raise OSError(errno.ENOTSUP, "Operation not supported")
        return 0

    monkeypatch.setattr(system, "_fcntl", SimpleNamespace(F_FULLFSYNC=51, fcntl=control))
    monkeypatch.setattr(os, "fsync", calls.append)
    system.sync_file(7)
    assert calls == [(7, 51)] if known else [(7, 51), 7]


def test_space_is_reserved_where_that_is_possible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (tmp_path / "a").open("wb") as file:
        monkeypatch.delattr(os, "posix_fallocate")
        system.reserve(file.fileno(), 1 << 60)


def test_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    assert system.cores() >= 1
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 5)
    assert system.cores() == 5
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert system.cores() == 1


def test_peak_memory_is_in_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "_STATUS", tmp_path / "status")
    usage = SimpleNamespace(RUSAGE_SELF=0, getrusage=lambda who: SimpleNamespace(ru_maxrss=3_000_000))
    monkeypatch.setattr(system, "_resource", usage)
    for platform, peak in (("linux", 3_072_000_000), ("freebsd14", 3_072_000_000), ("darwin", 3_000_000)):
        monkeypatch.setattr(system.sys, "platform", platform)
        assert system.peak_memory() == peak
    monkeypatch.setattr(system, "_resource", None)
    assert system.peak_memory() is None
    (tmp_path / "status").write_text("VmPeak:\t  999 kB\nVmHWM:\t     123 kB\n")
    assert system.peak_memory() == 123 * 1024


@pytest.mark.skipif(sys.platform != "linux", reason="what Linux counts")
def test_peak_memory_is_not_that_of_the_parent() -> None:
    child = "from bcqfmt.system import peak_memory; print(peak_memory())"
    parent = (
        f"import subprocess, sys; held = bytearray(300 << 20); subprocess.run([sys.executable, '-P', '-c', '{child}'])"
    )
    done = subprocess.run([sys.executable, "-P", "-c", parent], check=True, capture_output=True, text=True)
    assert 1 << 20 < int(done.stdout) < 200 << 20


def test_locks_keep_other_processes_out(tmp_path: Path) -> None:
    """Two descriptors of one file are two owners, as two processes would be."""
    path = tmp_path / "lock"
    first, second = (os.open(path, os.O_RDWR | os.O_CREAT, 0o666) for _ in range(2))
    try:
        system.lock_file(first)
        with pytest.raises(BlockingIOError):
            system.lock_file(second, shared=True)
        system.lock_file(first, shared=True, wait=True)
        system.lock_file(second, shared=True)
        with pytest.raises(BlockingIOError):
            system.lock_file(first)
    finally:
        os.close(first)
        os.close(second)


def test_no_locks_no_resumable_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "_fcntl", None)
    with pytest.raises(BcqError, match="BCQ-E307") as caught:
        system.lock_file(0)
    assert caught.value.exit_code == 5
    assert "convert" in caught.value.finding.expected
    assert "WSL" in caught.value.hint


def test_a_big_endian_machine_is_refused() -> None:
    done = run("import sys; sys.byteorder = 'big'; import bcqfmt; bcqfmt.open")
    assert "BCQ-E307: not possible on this machine: a big-endian processor" in done.stderr
    assert "ImportError" not in done.stderr


def run(program: str) -> subprocess.CompletedProcess[str]:
    paths = [str(ROOT), str(ROOT / "tests" / "support")]
    surroundings = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    words = [sys.executable, "-c", textwrap.dedent(program)]
    return subprocess.run(words, env=surroundings, capture_output=True, text=True, check=False, timeout=300)


def test_every_job_runs_without_what_only_linux_has(tmp_path: Path) -> None:
    """Import, save, convert, validate, verify, restore and quantize, as on macOS."""
    done = run(f"""
        import os
        from pathlib import Path
        for name in {LINUX_ONLY!r}:
            if hasattr(os, name):
                delattr(os, name)
        from sources.conversions import convert, proved
        from sources.dense_samples import dense_folder, quantize
        import bcqfmt
        place = Path({str(tmp_path)!r})
        source = Path({str(ROOT / "bcqfmt" / "data" / "demo")!r})
        convert(source, place / "bcq")
        proved(source, place / "bcq", place)
        quantize(dense_folder(place / "dense"), place / "quantized")
        assert bcqfmt.validate(place / "quantized", deep=True).valid
        with bcqfmt.open(place / "quantized") as checkpoint:
            bcqfmt.save(place / "again", {{name: checkpoint[name] for name in checkpoint}})
        assert bcqfmt.validate(place / "again", deep=True).valid
    """)
    assert (done.returncode, done.stderr) == (0, "")


def test_without_posix_reading_and_writing_work_and_resumable_jobs_are_refused(tmp_path: Path) -> None:
    """As on Windows: no fcntl, no resource, no positioned reads, no fork."""
    done = run(f"""
        import os, sys
        from pathlib import Path
        for name in {POSIX_ONLY!r}:
            if hasattr(os, name):
                delattr(os, name)
        sys.modules["fcntl"] = sys.modules["resource"] = None
        import numpy as np
        import bcqfmt
        place = Path({str(tmp_path)!r})
        rng = np.random.default_rng(1)
        weight = bcqfmt.BcqWeight.from_affine(
            rng.integers(0, 16, (4, 64)), rng.random((4, 2)).astype(np.float16), 8, group_size=32
        )
        bcqfmt.save(place / "model", {{"a.weight": weight}})
        assert bcqfmt.validate(place / "model", deep=True).valid
        with bcqfmt.open(place / "model") as checkpoint:
            assert checkpoint.weight("a.weight").digest() == weight.digest()
        from sources.conversions import convert
        convert(Path({str(ROOT / "bcqfmt" / "data" / "demo")!r}), place / "bcq")
    """)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert "UnsupportedError: BCQ-E307: not possible on this machine: no file locks on" in last
    assert {path.name for path in tmp_path.iterdir()} == {"model"}, "refused before anything was made"


def test_without_locks_a_calibration_makes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "_fcntl", None)
    with pytest.raises(BcqError, match="BCQ-E307"):
        CalibrationWork(tmp_path / "stats.safetensors", {"rows": 1})
    assert list(tmp_path.iterdir()) == []
