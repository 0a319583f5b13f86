"""Shards as tasks of an engine: what the driver asks for, what it does when tasks are lost, and the same bytes.

The engine here is a stand-in that runs tasks in this process; `test_ray.py` does it on a real cluster.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from click.testing import CliRunner, Result

from bcqfmt.cli.main import cli
from bcqfmt.converters.convert import tasks
from bcqfmt.converters.convert.conversion import Conversion, ConvertOptions
from bcqfmt.converters.convert.ray import RayExecutor
from bcqfmt.converters.convert.tasks import fault_of, run_task, tasks_of
from bcqfmt.converters.source.checkpoint import open_source
from bcqfmt.errors import BcqError
from programs.fake_ray import FakeRay, OutOfMemoryError
from sources.conversions import convert, gptq_folder, tree

SIZE = 15_000
SHARDS = [f"model-0000{i}-of-00004.safetensors" for i in range(1, 5)]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gptq_folder(tmp_path_factory.mktemp("scale") / "model-gptq", layers=8)


@pytest.fixture(scope="module")
def plain(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    target = tmp_path_factory.mktemp("plain") / "bcq"
    convert(source, target, max_shard_size=SIZE)
    return tree(target)


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    fake = FakeRay()
    monkeypatch.setitem(sys.modules, "ray", fake)
    monkeypatch.setitem(sys.modules, "ray.exceptions", fake.exceptions)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    tasks._planned_once.cache_clear()
    return fake


def conversion(source: Path, **options: object) -> Conversion:
    return Conversion(open_source(source), ConvertOptions(max_shard_size=SIZE, **options))  # type: ignore[arg-type]


def run(*args: str | Path) -> Result:
    return CliRunner().invoke(cli, [str(arg) for arg in args], prog_name="bcqfmt")


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# ---------------------------------------------------------------------------------------------------------- it works
def test_same_bytes_as_local(ray: FakeRay, source: Path, plain: dict[str, str], tmp_path: Path) -> None:
    seen: list[tuple[str, int]] = []
    bytes_seen: list[int] = []
    work = conversion(source)
    assert work.run(tmp_path / "bcq", bytes_seen.append, lambda *one: seen.append(one), RayExecutor("auto"))
    assert tree(tmp_path / "bcq") == plain
    assert left(tmp_path) == ["bcq"]
    assert dict(seen) == {name: (tmp_path / "bcq" / name).stat().st_size for name in SHARDS}
    assert sum(bytes_seen) == work.plan.nbytes
    assert [joined["address"] for joined in ray.joined] == ["auto"]
    assert not ray.is_initialized()


def test_tasks_ask_for_what_they_need(ray: FakeRay, source: Path, tmp_path: Path) -> None:
    work = conversion(source)
    work.run(tmp_path / "bcq", executor=RayExecutor(retries=7))
    largest = max(module.nbytes for module in work.modules.values())
    headers = sum(model.header.data_start for model in work.source.models.values())
    for name, asked in ray.asked.items():
        assert asked["memory"] == 450_000_000 + 16 * headers + 2 * largest
        assert (asked["num_cpus"], asked["max_retries"]) == (1, 7)
        assert name in asked["name"]
    assert sorted(ray.asked) == SHARDS


def test_the_verb(ray: FakeRay, source: Path, plain: dict[str, str], tmp_path: Path) -> None:
    asked = ("convert", source, tmp_path / "bcq", "--max-shard-size", str(SIZE), "--executor", "ray", "--workers", "2")
    result = run(*asked, "--json")
    assert result.exit_code == 0, result.stderr
    told = json.loads(result.stdout)["executor"]
    assert (told["name"], told["tasks"], told["nodes"]) == ("ray", 4, 2)
    assert told["peak_task_rss_bytes"] > 10**7
    assert "ray: 2 nodes with 2 CPUs; 4 tasks of 1 CPU and 45" in result.stderr
    assert "(4 of 4)" in result.stderr
    assert ray.most == 2  # --workers: tasks at a time
    assert tree(tmp_path / "bcq") == plain


def test_what_ray_prints_is_kept_off_stdout(ray: FakeRay, source: Path, tmp_path: Path) -> None:
    ray.before_wait = lambda: print("\x1b[33m(raylet)\x1b[0m A worker died\nor was", end="\n\n")  # noqa: T201
    asked = ("convert", source, tmp_path / "bcq", "--max-shard-size", str(SIZE), "--executor", "ray", "--json")
    result = run(*asked)
    assert json.loads(result.stdout)["complete"]
    assert result.stderr.count("ray: (raylet) A worker died\nray: or was\n") == 4
    assert "\x1b" not in result.stderr


def test_which_cluster(ray: FakeRay, monkeypatch: pytest.MonkeyPatch) -> None:
    assert RayExecutor().address == "auto"
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert RayExecutor().address == "10.0.0.1:6379"
    assert RayExecutor("10.0.0.2:6379").address == "10.0.0.2:6379"


def test_a_cluster_that_was_joined_before_stays_joined(ray: FakeRay, source: Path, tmp_path: Path) -> None:
    ray.init()
    conversion(source).run(tmp_path / "bcq", executor=RayExecutor())
    assert ray.is_initialized()
    assert len(ray.joined) == 1


def test_overwriting(ray: FakeRay, source: Path, plain: dict[str, str], tmp_path: Path) -> None:
    convert(source, tmp_path / "bcq")  # one shard
    conversion(source, overwrite=True).run(tmp_path / "bcq", executor=RayExecutor())
    assert tree(tmp_path / "bcq") == plain
    assert left(tmp_path) == ["bcq"]


# ----------------------------------------------------------------------------------------------------- tasks are lost
def test_lost_tasks_are_repeated(ray: FakeRay, source: Path, plain: dict[str, str], tmp_path: Path) -> None:
    ray.lose = {SHARDS[0]: 2, SHARDS[3]: 1}
    conversion(source).run(tmp_path / "bcq", executor=RayExecutor())
    assert ray.attempts == {SHARDS[0]: 3, SHARDS[1]: 1, SHARDS[2]: 1, SHARDS[3]: 2}
    assert tree(tmp_path / "bcq") == plain  # the halves that they left behind are gone, too


@pytest.mark.parametrize("later", ["local", "ray"])
def test_lost_too_often(ray: FakeRay, source: Path, plain: dict[str, str], tmp_path: Path, later: str) -> None:
    """What is done stays done, here as there."""
    ray.lose = {SHARDS[1]: 99}
    with pytest.raises(BcqError) as caught:
        conversion(source).run(tmp_path / "bcq", executor=RayExecutor(retries=2))
    assert (caught.value.code, caught.value.exit_code) == ("BCQ-E712", 8)
    assert "3 attempts ended with WorkerCrashedError" in str(caught.value)
    assert ray.attempts[SHARDS[1]] == 3
    assert left(tmp_path) == ["bcq.partial"]
    assert not ray.is_initialized()
    ray.lose.clear()
    conversion(source, resume=True).run(tmp_path / "bcq", executor=RayExecutor() if later == "ray" else None)
    assert tree(tmp_path / "bcq") == plain


def test_out_of_memory(ray: FakeRay, source: Path, tmp_path: Path) -> None:
    ray.lose, ray.death = {SHARDS[2]: 99}, OutOfMemoryError
    with pytest.raises(BcqError) as caught:
        conversion(source).run(tmp_path / "bcq", executor=RayExecutor(retries=0))
    assert (caught.value.code, caught.value.hint) == ("BCQ-E801", "run fewer tasks at a time: --workers N")


def test_an_interrupt_leaves_it_resumable(ray: FakeRay, source: Path, plain: dict[str, str], tmp_path: Path) -> None:
    calls: list[int] = []

    def interrupt() -> None:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt

    ray.before_wait = interrupt
    with pytest.raises(KeyboardInterrupt):
        conversion(source).run(tmp_path / "bcq", executor=RayExecutor())
    assert ray.cancelled == SHARDS[:2]  # two were done, two are told to stop
    assert not ray.is_initialized()
    ray.before_wait = lambda: None
    conversion(source, resume=True).run(tmp_path / "bcq", executor=RayExecutor())
    assert tree(tmp_path / "bcq") == plain


def test_no_other_process_works_there_meanwhile(ray: FakeRay, source: Path, tmp_path: Path) -> None:
    found: list[str] = []

    def meddle() -> None:
        for options in ({"resume": True}, {"overwrite": True}):
            with pytest.raises(BcqError) as caught:
                conversion(source, **options).run(tmp_path / "bcq")
            found.append(caught.value.code)

    ray.before_wait = meddle
    conversion(source).run(tmp_path / "bcq", executor=RayExecutor())
    assert set(found) == {"BCQ-E403"}


# ------------------------------------------------------------------------------------------------------ what it refuses
def test_a_fault_in_a_task_is_the_fault_that_it_is(ray: FakeRay, tmp_path: Path) -> None:
    source = gptq_folder(tmp_path / "model", layers=8)
    tensors = safetensors.numpy.load_file(source / "model.safetensors")
    tensors["model.layers.7.proj.scales"][0, 0] = np.float16("nan")
    safetensors.numpy.save_file(tensors, source / "model.safetensors")
    codes = []
    for name, executor in (("local", None), ("there", RayExecutor())):
        with pytest.raises(BcqError) as caught:
            conversion(source).run(tmp_path / name, executor=executor)
        codes.append((caught.value.code, caught.value.finding.tensor, caught.value.hint))
    assert codes[0] == codes[1]
    assert codes[0][0] == "BCQ-E609"


def test_unexpected_exceptions_come_without_a_traceback(ray: FakeRay, source: Path, tmp_path: Path) -> None:
    ray.fails = {SHARDS[0]: TypeError("boom\n\x1b[31m"), SHARDS[1]: ModuleNotFoundError("No module named 'bcqfmt'")}
    for name, code in ((SHARDS[1], "BCQ-E711"), (SHARDS[0], "BCQ-E712")):
        asked = ("convert", source, tmp_path / "bcq", "--max-shard-size", str(SIZE), "--executor", "ray", "--resume")
        result = run(*asked)
        assert result.exit_code == 8
        assert f"error: {code} {name}" in result.stderr
        assert "Traceback" not in result.stderr
        assert "\x1b" not in result.stderr
        del ray.fails[name]


def test_too_small_a_cluster(ray: FakeRay, source: Path, tmp_path: Path) -> None:
    ray.memory = 100_000_000
    with pytest.raises(BcqError) as caught:
        conversion(source).run(tmp_path / "bcq", executor=RayExecutor())
    assert (caught.value.code, caught.value.exit_code) == ("BCQ-E801", 9)
    assert "100,000,000" in caught.value.finding.found
    ray.count = 0
    with pytest.raises(BcqError) as caught:
        conversion(source).run(tmp_path / "bcq", executor=RayExecutor())
    assert caught.value.code == "BCQ-E710"
    assert left(tmp_path) == []


def test_no_cluster(ray: FakeRay, source: Path, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, not listening: nothing answers
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        asked = ("convert", source, tmp_path / "bcq", "--executor", "ray", "--ray-address", address)
        result = run(*asked)
    assert result.exit_code == 8
    assert f"error: BCQ-E710 {address}: Ray cluster cannot be reached" in result.stderr
    assert "hint: start one (ray start --head)" in result.stderr
    assert ray.joined == []
    assert left(tmp_path) == []


@pytest.mark.parametrize("address", ["ray://localhost:10001", "local", "localhost:many", "localhost:99999999"])
def test_addresses_that_are_none(ray: FakeRay, source: Path, tmp_path: Path, address: str) -> None:
    with pytest.raises(BcqError) as caught:
        conversion(source).run(tmp_path / "bcq", executor=RayExecutor(address))
    assert (caught.value.code, ray.joined, left(tmp_path)) == ("BCQ-E710", [], [])


def test_ray_itself_finds_no_cluster(
    ray: FakeRay, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def init(**_: object) -> None:
        raise ConnectionError("Could not find any running Ray instance.")

    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(BcqError) as caught:
        conversion(source).run(tmp_path / "bcq", executor=RayExecutor())
    assert caught.value.code == "BCQ-E710"
    assert "Could not find any running Ray instance" in caught.value.finding.found


def test_without_the_extra(monkeypatch: pytest.MonkeyPatch, source: Path, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    result = run("convert", source, tmp_path / "bcq", "--executor", "ray")
    assert result.exit_code == 2
    assert "BCQ-E306" in result.stderr
    assert "hint: pip install 'ray>=" in result.stderr
    assert left(tmp_path) == []


@pytest.mark.parametrize("more", [("--part", "1/2"), ("--executor", "local", "--ray-address", "x:1")])
def test_usage(source: Path, tmp_path: Path, more: tuple[str, ...]) -> None:
    assert run("convert", source, tmp_path / "bcq", "--executor", "ray", *more).exit_code == 2
    assert left(tmp_path) == []


# ------------------------------------------------------------------------------------------- the task, where it runs
def test_a_node_with_another_source(ray: FakeRay, source: Path, tmp_path: Path) -> None:
    copy = tmp_path / source.name
    shutil.copytree(source, copy)
    work = conversion(copy)
    (task, *_) = tasks_of(work, tmp_path / "bcq")
    changes: list[Callable[[], object]] = [
        lambda: (copy / "tokenizer.json").write_text("{ }"),
        lambda: (copy / "model.safetensors").unlink(),
        lambda: shutil.rmtree(copy),
    ]
    for change in changes:
        change()
        tasks._planned_once.cache_clear()
        fault = fault_of(run_task(task))
        assert fault is not None
        assert fault.code == "BCQ-E711"
        assert fault.finding.file == socket.gethostname()
    assert not (tmp_path / "bcq.partial").exists()


def test_a_node_with_another_version(source: Path, tmp_path: Path) -> None:
    (task, *_) = tasks_of(conversion(source), tmp_path / "bcq")
    fault = fault_of(run_task(replace(task, version="0.0.1")))
    assert fault is not None
    assert (fault.code, fault.finding.expected) == ("BCQ-E711", "bcqfmt 0.0.1")


def test_a_lock_left_behind_is_waited_for(
    source: Path, plain: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task that was taken for lost may still be running: its successor waits for the lock of the part."""
    work = conversion(source)
    planned = tasks_of(work, tmp_path / "bcq")
    folder = tmp_path / "bcq.partial" / ".bcq_work"
    folder.mkdir(parents=True)
    held = (folder / "part-1-of-4.lock").open("w")
    import fcntl

    fcntl.flock(held, fcntl.LOCK_EX)
    naps: list[float] = []

    def sleep(seconds: float) -> None:
        naps.append(seconds)
        held.close()

    monkeypatch.setattr(tasks.time, "sleep", sleep)
    assert all(fault_of(run_task(task)) is None for task in planned)
    assert naps == [1.0]
    conversion(source).close(tmp_path / "bcq")
    assert tree(tmp_path / "bcq") == plain


def test_modes_follow_the_umask_of_the_driver(source: Path, tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        (task, *_) = tasks_of(conversion(source), tmp_path / "bcq")
    finally:
        os.umask(before)
    assert fault_of(run_task(task)) is None
    shard = tmp_path / "bcq.partial" / task.file
    assert (shard.stat().st_mode & 0o777, shard.parent.stat().st_mode & 0o777) == (0o640, 0o750)
    assert os.umask(before) == before


def test_reports_are_plain_data(source: Path, tmp_path: Path) -> None:
    (task, *_) = tasks_of(conversion(source), tmp_path / "bcq")
    report = run_task(task)
    assert json.loads(json.dumps(report)) == report
    assert (report["node"], report["process"]) == (socket.gethostname(), os.getpid())
