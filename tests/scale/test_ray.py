"""Conversions on a real Ray cluster of two nodes: processes, a node and the driver are killed (long: `make soak`).

Needs ray, in this environment or in that of BCQFMT_RAY_PYTHON, where this bcqfmt is installed as well.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest

from programs.verbs import ROOT, environment
from sources.conversions import convert, gptq_folder, tree

PYTHON = os.environ.get("BCQFMT_RAY_PYTHON", sys.executable)
LAYERS, N, K = 24, 4096, 4096  # one layer, 9 MB, a shard
SIZE = 9_600_000
NAME = b"ray::bcqfmt"  # what Ray calls a process while it carries out a task of ours
LIMIT = 300

pytestmark = pytest.mark.soak


class Cluster:
    """The program ``ray_cluster.py``."""

    def __init__(self) -> None:
        probe = subprocess.run([PYTHON, "-c", "import ray, bcqfmt"], capture_output=True, text=True, check=False)
        assert probe.returncode == 0, f"pip install 'bcqfmt[ray]', or set BCQFMT_RAY_PYTHON: {probe.stderr[-300:]}"
        script = ROOT / "tests" / "support" / "programs" / "ray_cluster.py"
        self.program = subprocess.Popen(
            [PYTHON, script], env=variables(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        self.address = self._answer()["address"]

    def tell(self, word: str) -> dict[str, Any]:
        _pipe(self.program.stdin).write(word.encode() + b"\n")
        _pipe(self.program.stdin).flush()
        return self._answer()

    def end(self) -> None:
        _pipe(self.program.stdin).close()
        self.program.wait(60)
        _pipe(self.program.stdout).close()

    def _answer(self) -> dict[str, Any]:
        for line in _pipe(self.program.stdout):
            if line.startswith(b"{"):
                found: dict[str, Any] = json.loads(line)
                return found
        raise AssertionError("the cluster is gone")


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None
    return pipe


def variables() -> dict[str, str]:
    kept = {key: value for key, value in environment().items() if not key.startswith("RAY_")}
    return {**kept, "PYTHONWARNINGS": "ignore", "RAY_USAGE_STATS_ENABLED": "0"}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    found = Cluster()
    yield found
    found.end()


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gptq_folder(tmp_path_factory.mktemp("source") / "model-gptq", layers=LAYERS, n=N, k=K, group_size=128)


@pytest.fixture(scope="module")
def plain(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What threads of one process make."""
    target = tmp_path_factory.mktemp("local") / "bcq"
    convert(source, target, max_shard_size=SIZE, workers=2)
    assert len(list(target.glob("model-*.safetensors"))) == LAYERS
    return tree(target)


def driver(source: Path, target: Path, address: str, *more: str, umask: int = -1) -> subprocess.Popen[bytes]:
    asked = ["convert", str(source), str(target), "--max-shard-size", str(SIZE), "--json"]
    asked += ["--executor", "ray", "--ray-address", address, *more]
    errors = (target.parent / "stderr").open("wb")
    with errors:
        return subprocess.Popen(
            [PYTHON, "-P", "-m", "bcqfmt", *asked], env=variables(), stdout=subprocess.PIPE, stderr=errors, umask=umask
        )


def said(target: Path) -> str:
    return (target.parent / "stderr").read_text()


def finished(running: subprocess.Popen[bytes], target: Path) -> dict[str, Any]:
    told, _ = running.communicate(timeout=LIMIT)
    assert running.returncode == 0, said(target)[-3000:]
    found: dict[str, Any] = json.loads(told)
    return found


def at_work() -> list[int]:
    """Processes that carry out a task of ours at this moment."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                named = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if named.startswith(NAME):
                found.append(int(entry.name))
    return found


def wait_for_shards(target: Path, running: subprocess.Popen[bytes], count: int) -> None:
    """Wait until that number of shards is reported while the driver is still at work."""
    end = time.monotonic() + LIMIT
    while f"({count} of {LAYERS})" not in said(target):
        assert running.poll() is None, said(target)[-3000:]
        assert time.monotonic() < end, said(target)[-3000:]
        time.sleep(0.02)


def kill_one(running: subprocess.Popen[bytes]) -> int:
    end = time.monotonic() + LIMIT
    while not (found := at_work()):
        assert running.poll() is None, "it was over before anything could be killed"
        assert time.monotonic() < end
    process = random.choice(found)
    os.kill(process, signal.SIGKILL)
    return process


def test_same_bytes(cluster: Cluster, source: Path, plain: dict[str, str], tmp_path: Path) -> None:
    target = tmp_path / "bcq"
    told = finished(driver(source, target, cluster.address, umask=0o077), target)
    assert tree(target) == plain
    assert {path.stat().st_mode & 0o777 for path in target.rglob("*") if path.is_file()} == {0o600}
    assert (told["complete"], told["executor"]["tasks"], told["executor"]["nodes"]) == (True, LAYERS, 2)
    assert told["executor"]["peak_task_rss_bytes"] <= told["executor"]["task_memory_bytes"] < 500_000_000
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bcq", "stderr"]
    assert f"ray: 2 nodes with 2 CPUs; {LAYERS} tasks" in said(target)


def test_workers_killed_mid_run(cluster: Cluster, source: Path, plain: dict[str, str], tmp_path: Path) -> None:
    target = tmp_path / "bcq"
    running = driver(source, target, cluster.address)
    killed = set()
    for after in (1, 4, 8, 12):
        wait_for_shards(target, running, after)
        killed.add(kill_one(running))
    finished(running, target)
    assert len(killed) == 4
    assert tree(target) == plain
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bcq", "stderr"]


@pytest.mark.parametrize("later", ["ray", "local"])
def test_driver_killed_then_resumed(
    cluster: Cluster, source: Path, plain: dict[str, str], tmp_path: Path, later: str
) -> None:
    target = tmp_path / "bcq"
    running = driver(source, target, cluster.address)
    wait_for_shards(target, running, 5)
    running.kill()
    running.communicate()
    assert not target.exists()
    done = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "bcq.partial").glob("model-*.safetensors")}
    assert len(done) >= 5
    end = time.monotonic() + 60
    while at_work():  # Ray ends the tasks of a driver that is gone; until then they hold the lock
        assert time.monotonic() < end
        time.sleep(0.1)
    if later == "ray":
        finished(driver(source, target, cluster.address, "--resume"), target)
    else:
        convert(source, target, max_shard_size=SIZE, resume=True)
    assert tree(target) == plain
    kept = [name for name, time_ns in done.items() if (target / name).stat().st_mtime_ns == time_ns]
    assert sorted(kept) == sorted(done)  # what was done is not done again


def test_terminated_then_resumed(cluster: Cluster, source: Path, plain: dict[str, str], tmp_path: Path) -> None:
    target = tmp_path / "bcq"
    running = driver(source, target, cluster.address)
    wait_for_shards(target, running, 3)
    running.terminate()
    running.communicate(timeout=60)
    assert running.returncode == 143
    assert "BCQ-E901" in said(target)
    finished(driver(source, target, cluster.address, "--resume"), target)
    assert tree(target) == plain


def test_a_node_lost_mid_run(cluster: Cluster, source: Path, plain: dict[str, str], tmp_path: Path) -> None:
    target = tmp_path / "bcq"
    running = driver(source, target, cluster.address)
    wait_for_shards(target, running, 6)
    assert cluster.tell("lose")["nodes"] == 1
    finished(running, target)
    assert tree(target) == plain
    assert cluster.tell("join")["nodes"] == 2


def test_no_cluster_there(cluster: Cluster, source: Path, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        running = driver(source, tmp_path / "bcq", f"127.0.0.1:{taken.getsockname()[1]}")
        running.communicate(timeout=60)
    assert running.returncode == 8
    assert "BCQ-E710" in said(tmp_path / "bcq")
    assert [path.name for path in tmp_path.iterdir()] == ["stderr"]
