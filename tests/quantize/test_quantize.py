"""A whole quantization: what the folder holds, whose numbers they are, and that no thread changes a byte."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

import bcqfmt
from bcqfmt.container.stored_tensor import StoredTensor
from bcqfmt.converters.convert.restore import restore
from bcqfmt.converters.convert.verify import verify
from bcqfmt.converters.jobs.pool import Gate, Stopped, run_all
from bcqfmt.converters.methods.protocol import Job
from bcqfmt.converters.methods.registry import METHODS, build_method, find_method, method_names
from bcqfmt.converters.quantize.quantization import Quantization, QuantizeOptions
from bcqfmt.converters.quantize.record import read_record
from bcqfmt.converters.source.checkpoint import open_source
from bcqfmt.errors import BcqError
from bcqfmt.weight.scheme_json import scheme_json
from bcqfmt.weight.weight import BcqWeight
from sources.conversions import tree
from sources.dense_samples import dense_folder, dense_tensors, quantize
from weights import oracle

STACK = "model.layers.0.mlp.experts.gate_up_proj"
SMALL = 12_000  # source bytes per shard: several shards


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return dense_folder(tmp_path_factory.mktemp("dense") / "model")


@pytest.fixture(scope="module")
def made(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("made") / "bcq"
    quantize(source, target, max_shard_size=SMALL)
    return target


def exact(weight: BcqWeight) -> np.ndarray[Any, Any]:
    """Every value by the oracle, which knows nothing of the package."""
    parts = {}
    for suffix, part in weight.parts().items():
        size = oracle.BYTES[part.dtype]
        raw = part.tobytes()
        words = [int.from_bytes(raw[i : i + size], "little") for i in range(0, len(raw), size)]
        parts[suffix] = (part.dtype, list(part.shape), words)
    plain = oracle.Plain(list(weight.shape), weight.dtype, scheme_json(weight.scheme), list(weight.spec.widths), parts)
    words = np.array(oracle.values(plain), np.uint16 if weight.dtype != "F32" else np.uint32)
    return words.view({"F16": np.float16, "F32": np.float32}[weight.dtype]).reshape(weight.shape)


# ---------------------------------------------------------------------------------------------------- the folder
def test_the_folder_is_valid_to_the_last_bit(made: Path) -> None:
    report = bcqfmt.validate(made, deep=True)
    assert report.valid, report.errors[0].text()
    assert len(list(made.glob("model-*.safetensors"))) > 3


def test_only_weights_change(source: Path, made: Path) -> None:
    before = safetensors.numpy.load_file(source / "model.safetensors")
    with bcqfmt.open(made) as checkpoint:
        weights, dense = dict(checkpoint.weights()), dict(checkpoint.dense())
        assert weights.keys() | dense.keys() == before.keys()
        assert {name for name in dense if "norm" not in name} == {
            "model.embed_tokens.weight", "lm_head.weight", "model.layers.0.mlp.gate.weight",
        }  # fmt: skip
        for name, tensor in dense.items():
            assert tensor.tobytes() == before[name].tobytes()
        for name, weight in weights.items():
            assert (weight.shape, weight.dtype) == (before[name].shape, "F16")


def test_values_are_the_methods_own(source: Path, made: Path) -> None:
    """The stored weight is what the method makes of the matrix; the decoder's values are the oracle's."""
    method = build_method("rtn", {"bits": 4, "group_size": 32})
    before = safetensors.numpy.load_file(source / "model.safetensors")
    with bcqfmt.open(made) as checkpoint:
        for name, weight in checkpoint.weights():
            if len(weight.shape) == 2:
                alone = method.quantize(Job(name, before[name].astype(np.float32), "F16")).weight
                assert weight.digest() == alone.digest()
            values = weight.dequantize()
            assert np.array_equal(values, exact(weight))


def test_a_stack_is_quantized_matrix_by_matrix(source: Path, made: Path) -> None:
    method = build_method("rtn", {"bits": 4, "group_size": 32})
    before = safetensors.numpy.load_file(source / "model.safetensors")[STACK]
    with bcqfmt.open(made) as checkpoint:
        values = checkpoint.weight(STACK).dequantize()
    for index in range(before.shape[0]):
        alone = method.quantize(Job("x", before[index].astype(np.float32), "F16")).weight
        assert np.array_equal(values[index], alone.dequantize())


def test_the_record_is_the_truth(source: Path, made: Path) -> None:
    """Errors computed again from the oracle's values, in exact sums."""
    before = safetensors.numpy.load_file(source / "model.safetensors")
    record = read_record(made)
    assert record is not None
    with bcqfmt.open(made) as checkpoint:
        weights = dict(checkpoint.weights())
        assert record.weights.keys() == weights.keys()
        assert record.dense.keys() == {name for name, _ in checkpoint.dense()}
    assert record.recipes == [{"method": "rtn", "settings": build_method("rtn", {"group_size": 32}).settings()}]
    for name, entry in record.weights.items():
        dense, decoded = before[name].astype(np.float64).ravel(), exact(weights[name]).astype(np.float64).ravel()
        noise = math.fsum((a - b) ** 2 for a, b in zip(dense, decoded, strict=True))
        power = math.fsum(a * a for a in dense)
        assert entry["mse"] == pytest.approx(noise / dense.size, rel=1e-9)
        assert entry["relative"] == pytest.approx(math.sqrt(noise / power), rel=1e-9)
        assert entry["sqnr_db"] == pytest.approx(10 * math.log10(power / noise), rel=1e-9)
        assert (entry["noise"], entry["power"]) == (pytest.approx(noise, rel=1e-9), pytest.approx(power, rel=1e-9))
        assert entry["bytes"] == weights[name].nbytes
        assert entry["bits_per_weight"] == weights[name].nbytes * 8 / dense.size
        assert entry["shape"] == list(before[name].shape)


def test_the_manifest_covers_the_record_and_says_where_it_came_from(source: Path, made: Path) -> None:
    manifest = json.loads((made / "bcq_manifest.json").read_text())
    assert "bcq_quantization.json" in manifest["files"]
    assert manifest["source"]["format"] == "dense"
    assert {path: record["sha256"] for path, record in manifest["source"]["files"].items()} == tree(source)
    assert json.loads((made / "config.json").read_text())["quantization_config"] == {
        "quant_method": "bcq", "format_version": "1.0", "features": ["stack"],
    }  # fmt: skip
    assert (made / "tokenizer.json").exists()
    assert not (made / "bcq_source").exists()


def test_the_card_says_what_was_done(made: Path) -> None:
    card = (made / "README.md").read_text()
    for text in ("license: mit", "Quantized from a dense checkpoint", "| 9 | `rtn` | bits = 4, group_size = 32",
                 "cannot be restored"):  # fmt: skip
        assert text in card
    assert "without loss" not in card


def test_there_is_no_way_back(source: Path, made: Path, tmp_path: Path) -> None:
    attempts: list[Callable[[Any], Any]] = [
        lambda checkpoint: restore(checkpoint, tmp_path / "out"),
        lambda checkpoint: verify(open_source(source), checkpoint),
    ]
    for attempt in attempts:
        with bcqfmt.open(made) as checkpoint, pytest.raises(BcqError) as caught:
            attempt(checkpoint)
        assert (caught.value.code, caught.value.exit_code) == ("BCQ-E614", 5)
        assert "which rounds" in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("dtype", ["F16", "BF16", "F32"])
def test_logical_types_stay(tmp_path: Path, dtype: str) -> None:
    source = dense_folder(tmp_path / "model", dense_tensors(1, dtype))
    quantize(source, tmp_path / "bcq")
    with bcqfmt.open(tmp_path / "bcq") as checkpoint:
        assert {weight.dtype for _, weight in checkpoint.weights()} == {dtype}
        assert {tensor.dtype for _, tensor in checkpoint.dense()} == {dtype}
    assert bcqfmt.validate(tmp_path / "bcq", deep=True).valid


# -------------------------------------------------------------------------------------------------- determinism
@pytest.mark.parametrize("workers", [2, 7])
def test_threads_change_no_byte(source: Path, made: Path, tmp_path: Path, workers: int) -> None:
    quantize(source, tmp_path / "bcq", max_shard_size=SMALL, workers=workers)
    assert tree(tmp_path / "bcq") == tree(made)
    assert [path.name for path in tmp_path.iterdir()] == ["bcq"]


def test_plan_does_not_depend_on_how_it_is_carried_out(source: Path) -> None:
    def digest(**options: Any) -> str:
        return Quantization(open_source(source), QuantizeOptions(**{"method": "rtn", **options})).plan.digest

    one = digest()
    assert one == digest(workers=8, resume=True) == digest(settings={"bits": "4"})
    others = [
        digest(settings={"bits": 3}),
        digest(method="bcq"),
        digest(max_shard_size=SMALL),
        digest(include=("lm_head",)),
        digest(exclude=("q_proj",)),
    ]
    assert len({one, *others}) == 6


# ----------------------------------------------------------------------------------------------------- the pieces
def test_batches_hold_runs_of_weights(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Quantization(open_source(source), QuantizeOptions(method="rtn"))
    (shard,) = made.plan.shards
    assert [len(names) for names in made._batches(shard).values()] == [9]
    for size in (1, 9000, 20_000):
        monkeypatch.setattr("bcqfmt.converters.quantize.quantization._BATCH", size)
        batches = list(made._batches(shard).values())
        assert [name for names in batches for name in names] == list(shard.weights)
        for names in batches:
            assert len(names) == 1 or sum(made.modules[name].nbytes for name in names) <= size


def test_the_gate_bounds_what_is_held_at_once() -> None:
    held, most, lock = [0], [0], threading.Lock()

    def heed() -> None:
        pass

    gate = Gate(10, heed)

    def job(size: int) -> None:
        with gate.hold(size):
            with lock:
                held[0] += size
                most[0] = max(most[0], held[0])
            threading.Event().wait(0.001)
            with lock:
                held[0] -= size

    sizes = [10, 3, 3, 4, 6, 1, 9, 10, 2, 2, 2, 2] * 3
    run_all([lambda size=size: job(size) for size in sizes], 6, threading.Event())  # type: ignore[misc]
    assert most[0] == 10
    assert [gate.share(size, 4) for size in (10, 6, 5, 3, 2, 1)] == [4, 4, 2, 1, 1, 1]


def test_the_first_real_failure_is_raised() -> None:
    stop, done = threading.Event(), []

    def fail() -> None:
        raise ValueError("this one")

    def late() -> None:
        stop.wait(10)
        raise Stopped

    with pytest.raises(ValueError, match="this one"):
        run_all([late, fail, *[lambda: done.append(1)] * 50], 2, stop)
    assert stop.is_set()
    assert done == []


def test_an_interrupt_while_threads_start(monkeypatch: pytest.MonkeyPatch) -> None:
    stop, done = threading.Event(), []
    begin, started = threading.Thread.start, []

    def start(thread: threading.Thread) -> None:
        if started:
            raise KeyboardInterrupt
        started.append(thread)
        begin(thread)

    def job() -> None:
        stop.wait(60)
        done.append(stop.is_set())

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(KeyboardInterrupt):
        run_all([job] * 4, 2, stop, patience=None)
    assert done == [True]
    assert not started[0].is_alive()


def test_methods_are_found_by_name() -> None:
    assert method_names()[: len(METHODS)] == ["rtn", "bcq", "multi", "mixed24", "atom", "gptq"]
    for name in METHODS:
        assert find_method(name).name == name
        assert all(parameter.help for parameter in find_method(name).parameters())
    with pytest.raises(BcqError, match=r"BCQ-E620.*no method 'gtpq'; expected gptq, perhaps"):
        find_method("gtpq")
    with pytest.raises(BcqError, match=r"expected one of rtn, bcq"):
        find_method("\x1b[2J")


@pytest.mark.parametrize("content", ["", "[]", '{"version": "2.0"}', '{"version": "1.0", "recipes": 3}', "{", "\xff"])
def test_malformed_records(made: Path, tmp_path: Path, content: str) -> None:
    (tmp_path / "bcq_quantization.json").write_text(content, encoding="latin-1")
    with pytest.raises(BcqError) as caught:
        read_record(tmp_path)
    assert caught.value.code == "BCQ-E628"


@pytest.mark.parametrize(
    "change",
    [
        {"recipe": 1}, {"recipe": True}, {"recipe": -1}, {"shape": "x"}, {"shape": [0]}, {"bytes": None}, {"mse": "x"},
        {"notes": []}, {"power": True}, {"noise": 10**400},
    ],
)  # fmt: skip
def test_malformed_entries(made: Path, tmp_path: Path, change: dict[str, Any]) -> None:
    value = json.loads((made / "bcq_quantization.json").read_text())
    next(iter(value["weights"].values())).update(change)
    (tmp_path / "bcq_quantization.json").write_text(json.dumps(value))
    with pytest.raises(BcqError, match=r"BCQ-E628"):
        read_record(tmp_path)


def test_a_weight_without_error_has_no_infinite_figures(tmp_path: Path) -> None:
    """JSON knows no infinity: an exact weight has null decibels."""
    source = dense_folder(tmp_path / "model", {"a.weight": np.zeros((4, 32), np.float16)})
    quantize(source, tmp_path / "bcq")
    record = read_record(tmp_path / "bcq")
    assert record is not None
    assert {key: record.weights["a.weight"][key] for key in ("mse", "relative", "sqnr_db")} == {
        "mse": 0.0, "relative": 0.0, "sqnr_db": None,
    }  # fmt: skip


def test_a_weight_of_one_row_and_odd_columns(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    tensors = {f"a.{n}.weight": rng.normal(size=(1, n)).astype(np.float16) for n in (8, 31, 33, 100)}
    source = dense_folder(tmp_path / "model", tensors)
    quantize(source, tmp_path / "bcq")
    with bcqfmt.open(tmp_path / "bcq") as checkpoint:
        for name, array in tensors.items():
            values = checkpoint.weight(name).dequantize()
            assert np.abs(values - array).max() < 0.5
    assert bcqfmt.validate(tmp_path / "bcq", deep=True).valid


def test_stored_tensors_can_be_quantized_without_a_file() -> None:
    from bcqfmt.converters.quantize.weight import quantize_tensor

    values = np.random.default_rng(0).normal(size=(8, 64)).astype(np.float32)
    made = quantize_tensor(StoredTensor.from_array("a.weight", values), build_method("rtn", {"group_size": 32}))
    assert made.weight.name == "a.weight"
    assert made.sums.size == 512
