"""Quantizations that are killed, interrupted, or fed with what they must refuse: what is left, and what goes on."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from bcqfmt.converters.methods.protocol import Job, Quantized
from bcqfmt.converters.methods.rtn import Rtn
from bcqfmt.converters.quantize.quantization import Quantization, QuantizeOptions
from bcqfmt.converters.source.checkpoint import open_source
from bcqfmt.errors import BcqError
from programs.verbs import ROOT, environment
from sources.conversions import tree
from sources.dense_samples import dense_folder, dense_tensors, quantize

SIZE = 25_000  # source bytes per shard
SCRIPT = ROOT / "tests" / "support" / "faults" / "interrupted.py"
ASKED = ["--method", "rtn", "--group-size", "32", "--max-shard-size", str(SIZE), "--workers", "2"]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return dense_folder(tmp_path_factory.mktemp("fault") / "model", dense_tensors(4))


@pytest.fixture(scope="module")
def plain(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What an uninterrupted run makes."""
    target = tmp_path_factory.mktemp("plain") / "bcq"
    quantize(source, target, max_shard_size=SIZE)
    assert len(list(target.glob("model-*.safetensors"))) == 7
    return tree(target)


@pytest.fixture(autouse=True)
def untouched(source: Path) -> Iterator[None]:
    """No fault may change the source."""
    before = tree(source)
    yield
    assert tree(source) == before


def interrupted(source: Path, target: Path, number: int, at: int, *more: str) -> subprocess.CompletedProcess[str]:
    asked = ["quantize", str(source), str(target), *ASKED, *more]
    return subprocess.run(
        [sys.executable, "-P", str(SCRIPT), str(int(number)), str(at), *asked],
        env={**environment(), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def resumed(source: Path, target: Path, plain: dict[str, str]) -> None:
    """Go on, unless it was complete already; the same bytes and nothing beside them."""
    if not target.exists():
        quantize(source, target, max_shard_size=SIZE, resume=True)
    assert tree(target) == plain
    assert [path.name for path in target.parent.iterdir()] == [target.name]


@pytest.fixture(scope="module")
def calls(source: Path, tmp_path_factory: pytest.TempPathFactory) -> int:
    """How many times a whole run changes the disk."""
    done = interrupted(source, tmp_path_factory.mktemp("count") / "bcq", signal.SIGKILL, 0)
    assert done.returncode == 0, done.stderr
    return int(done.stderr.rpartition("calls ")[2])


def killed(source: Path, folder: Path, plain: dict[str, str], at: int) -> None:
    target = folder / "bcq"
    done = interrupted(source, target, signal.SIGKILL, at)
    assert done.returncode in (-signal.SIGKILL, 0)
    if target.exists():  # complete, or not there
        assert tree(target) == plain
    for shard in folder.glob("bcq.partial/model-*.safetensors"):
        assert plain[shard.name] == tree(shard.parent)[shard.name]
    resumed(source, target, plain)


@pytest.mark.parametrize("third", range(3))
def test_killed_at_any_moment_then_resumed(
    source: Path, plain: dict[str, str], calls: int, tmp_path: Path, third: int
) -> None:
    killed(source, tmp_path, plain, random.Random(third).randint(1 + calls * third // 3, calls * (third + 1) // 3))


@pytest.mark.soak
def test_killed_a_hundred_times(source: Path, plain: dict[str, str], calls: int, tmp_path: Path) -> None:
    for turn in range(100):
        folder = tmp_path / str(turn)
        folder.mkdir()
        killed(source, folder, plain, random.Random(turn).randint(1, calls))


def test_interrupted_then_resumed(source: Path, plain: dict[str, str], calls: int, tmp_path: Path) -> None:
    """By SIGTERM; tests/faults/test_signals.py has the keyboard."""
    done = interrupted(source, tmp_path / "bcq", signal.SIGTERM, calls // 2)
    assert done.returncode == 143, done.stderr
    assert "BCQ-E901" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "bcq").exists()
    with pytest.raises(BcqError, match=r"BCQ-E401.*an unfinished conversion; expected --resume"):
        quantize(source, tmp_path / "bcq", max_shard_size=SIZE)
    resumed(source, tmp_path / "bcq", plain)


def test_an_interrupt_does_not_wait_for_a_method(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A method may take minutes for a weight; whoever presses Ctrl-C is not made to wait for it."""
    begun, release = threading.Event(), threading.Event()

    def slow(self: Rtn, job: Job) -> Quantized:
        begun.set()
        release.wait(30)
        raise AssertionError("nobody waits for this")

    def interrupt(*_: Any) -> bool:
        assert begun.wait(30)
        raise KeyboardInterrupt

    monkeypatch.setattr(Rtn, "quantize", slow)
    made = Quantization(open_source(source), QuantizeOptions(method="rtn", settings={"group_size": 32}))
    real, seen = threading.Semaphore, []

    def semaphore(value: int = 1) -> Any:
        """The second pool, that of the weights, is interrupted while it waits."""
        seen.append(real(value))
        if len(seen) == 2:
            seen[1].acquire = interrupt
        return seen[-1]

    monkeypatch.setattr("bcqfmt.converters.jobs.pool.threading.Semaphore", semaphore)
    with pytest.raises(KeyboardInterrupt):
        made.run(tmp_path / "bcq")
    release.set()
    assert (tmp_path / "bcq.partial").is_dir()
    assert not (tmp_path / "bcq").exists()


def test_a_finished_batch_is_not_done_again(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that were quantized before a failure are taken from the spool; damaged spool files are not."""
    quantize(source, tmp_path / "plain")
    monkeypatch.setattr("bcqfmt.converters.quantize.quantization._BATCH", 1)
    real, count, fails = Rtn.quantize, [0], [6]

    def failing(self: Rtn, job: Job) -> Quantized:
        count[0] += 1
        if count[0] == fails[0]:
            raise OSError(28, "No space left on device")
        return real(self, job)

    monkeypatch.setattr(Rtn, "quantize", failing)
    with pytest.raises(OSError, match="No space"):
        quantize(source, tmp_path / "bcq")
    spool = sorted((tmp_path / "bcq.partial" / ".bcq_work").glob("batch-*.safetensors"))
    assert len(spool) == 3  # five matrices, three of them one stack
    spool[0].write_bytes(spool[0].read_bytes()[:-1] + b"\x55")
    state = tmp_path / "bcq.partial" / ".bcq_work" / "source.json"
    kept = state.read_bytes()
    for damaged in (kept[:20], b"", b"[" * 100_000):
        state.write_bytes(damaged)
        with pytest.raises(BcqError, match="BCQ-E103"):
            quantize(source, tmp_path / "bcq", resume=True)
    state.write_bytes(kept)
    count[0], fails[0] = 0, 0
    matrices = len(quantize(source, tmp_path / "bcq", resume=True).modules) + 2
    assert count[0] == matrices - 4
    assert tree(tmp_path / "bcq") == tree(tmp_path / "plain")


def test_another_plan_is_not_resumed(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(self: Rtn, job: Job) -> Quantized:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(Rtn, "quantize", failing)
        with pytest.raises(OSError, match="Input/output"):
            quantize(source, tmp_path / "bcq")
    with pytest.raises(BcqError, match=r"BCQ-E401.*with other options"):
        quantize(source, tmp_path / "bcq", settings={"bits": 3}, resume=True)
    quantize(source, tmp_path / "bcq", resume=True)


def test_a_refused_plan_changes_nothing(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where nothing was done yet."""

    def interrupted(*given: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("bcqfmt.converters.quantize.quantization.check_source", interrupted)
        with pytest.raises(KeyboardInterrupt):
            quantize(source, tmp_path / "bcq")
    before = tree(tmp_path / "bcq.partial")
    with pytest.raises(BcqError, match=r"BCQ-E401.*with other options"):
        quantize(source, tmp_path / "bcq", settings={"bits": 3}, resume=True)
    assert tree(tmp_path / "bcq.partial") == before
    assert ".bcq_work/plan.json" in before


# ------------------------------------------------------------------------------------------------------- refusals
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["F16", "BF16"])
def test_numbers_that_mean_nothing(tmp_path: Path, value: float, dtype: str) -> None:
    tensors = dense_tensors(2, dtype)
    name = "model.layers.1.mlp.down_proj.weight"
    tensors[name] = tensors[name].copy()
    tensors[name][5, 7] = value
    source = dense_folder(tmp_path / "model", tensors)
    with pytest.raises(BcqError) as caught:
        quantize(source, tmp_path / "bcq", max_shard_size=SIZE)
    assert (caught.value.code, caught.value.exit_code) == ("BCQ-E622", 4)
    assert caught.value.finding.tensor == name
    assert "row 5, column 7" in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    quantize(source, tmp_path / "bcq", exclude=("layers.1.mlp.down",))  # whoever leaves it dense may go on


def test_nan_in_what_stays_dense_is_not_our_concern(tmp_path: Path) -> None:
    tensors = dense_tensors(1)
    tensors["model.embed_tokens.weight"][0, 0] = np.nan
    quantize(dense_folder(tmp_path / "model", tensors), tmp_path / "bcq")


def test_what_can_never_succeed_leaves_nothing(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A matrix that does not fit is found late; the same plan would fail again, so its work is dropped."""
    monkeypatch.setattr("bcqfmt.converters.quantize.quantization._BATCH", 1)
    real, count = Rtn.quantize, [0]

    def failing(self: Rtn, job: Job) -> Quantized:
        from bcqfmt.errors import error

        count[0] += 1
        if count[0] == 5:
            raise error("BCQ-E621", "", job.name, "no fit", "a fit")
        return real(self, job)

    monkeypatch.setattr(Rtn, "quantize", failing)
    with pytest.raises(BcqError, match=r"BCQ-E621.*'model\.layers"):
        quantize(source, tmp_path / "bcq", max_shard_size=SIZE)
    assert list(tmp_path.iterdir()) == []


def test_values_that_the_type_cannot_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scales may be finite and a decoded value not: refused, not recorded as an infinite error."""
    from bcqfmt import BcqWeight

    def bad(self: Rtn, job: Job) -> Quantized:
        codes = np.full(job.weight.shape, 15, np.uint8)
        scale = np.full((job.weight.shape[0], 1), 60000, np.float16)
        return Quantized(BcqWeight.from_affine(codes, scale, 0, group_size=job.weight.shape[1], bits=4), {})

    monkeypatch.setattr(Rtn, "quantize", bad)
    source = dense_folder(tmp_path / "model", {"a.weight": np.ones((4, 32), np.float16)})
    with pytest.raises(BcqError, match=r"BCQ-E621.*F16 cannot hold"):
        quantize(source, tmp_path / "bcq")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_statistics_are_missing(source: Path, tmp_path: Path) -> None:
    with pytest.raises(BcqError) as caught:
        quantize(source, tmp_path / "bcq", "gptq")
    assert (caught.value.code, caught.value.exit_code) == ("BCQ-E623", 2)
    assert "Hessian" in str(caught.value)
    assert "bcqfmt calibrate" in caught.value.hint
    assert list(tmp_path.iterdir()) == []


def test_a_source_that_changes(source: Path, tmp_path: Path) -> None:
    copy = dense_folder(tmp_path / "model", dense_tensors(2))
    made = Quantization(open_source(copy), QuantizeOptions(method="rtn", settings={"group_size": 32}))
    (copy / "tokenizer.json").write_text('{"a": 1}')
    with pytest.raises(BcqError, match="BCQ-E103"):
        made.run(tmp_path / "bcq")


def test_the_target_stays_until_the_end(source: Path, tmp_path: Path) -> None:
    quantize(source, tmp_path / "bcq")
    before = tree(tmp_path / "bcq")
    with pytest.raises(BcqError, match="BCQ-E401"):
        quantize(source, tmp_path / "bcq", settings={"bits": 2})
    assert tree(tmp_path / "bcq") == before
    quantize(source, tmp_path / "bcq", settings={"bits": 2, "group_size": 32}, overwrite=True)
    assert json.loads((tmp_path / "bcq" / "bcq_quantization.json").read_text())["recipes"][0]["settings"]["bits"] == 2


def test_constant_and_empty_groups_have_defined_results(tmp_path: Path) -> None:
    values = np.zeros((4, 64), ml_dtypes.bfloat16)
    values[1] = 0.25
    values[2, 32:] = -3
    quantize(dense_folder(tmp_path / "model", {"a.weight": values}), tmp_path / "bcq")
    import bcqfmt

    with bcqfmt.open(tmp_path / "bcq") as checkpoint:
        assert np.array_equal(checkpoint.weight("a.weight").dequantize(), values)
