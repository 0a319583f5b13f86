"""Which tensor goes into which file: the index, the order, weights that stay whole (spec section 9.1)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bcqfmt
from bcqfmt import limits
from bcqfmt.checkpoint import shards
from bcqfmt.checkpoint.shards import Unit, natural, plan_shards, shard_names
from weights import oracle, samples


def layout_of(folder: Path) -> dict[str, list[str]]:
    """File -> names of weights and dense tensors in it."""
    with bcqfmt.open(folder) as checkpoint:
        return {file.source.shown: sorted([*file.specs, *file.dense]) for file in checkpoint.files()}


def headers(folder: Path) -> dict[str, dict[str, Any]]:
    return {path.name: oracle.split(path.read_bytes())[0] for path in sorted(folder.glob("*.safetensors"))}


@pytest.mark.parametrize("size", [1, 100, 400, 700, 1500, 4000, 10**9])
def test_the_index_says_what_the_files_hold(tmp_path: Path, size: int) -> None:
    tensors = samples.tensors()
    bcqfmt.save(tmp_path / "m", tensors, max_shard_size=size)
    assert not bcqfmt.validate(tmp_path / "m", deep=True).findings
    found = headers(tmp_path / "m")
    if len(found) == 1:
        assert list(found) == ["model.safetensors"]
        assert not (tmp_path / "m" / "model.safetensors.index.json").exists()
        return
    assert list(found) == [f"model-{i + 1:05d}-of-{len(found):05d}.safetensors" for i in range(len(found))]
    index = json.loads((tmp_path / "m" / "model.safetensors.index.json").read_text())
    held = {name: file for file, header in found.items() for name in header if name != "__metadata__"}
    assert index["weight_map"] == held
    total = sum(
        entry["data_offsets"][1] - entry["data_offsets"][0]
        for h in found.values()
        for n, entry in h.items()
        if n != "__metadata__"
    )
    assert index["metadata"] == {"total_size": total}
    for header in found.values():
        described = json.loads(header["__metadata__"]["bcqfmt"])["weights"]
        for name in described:  # every part of every weight is where its descriptor is
            parts = [n for n in held if n.startswith(oracle.prefix(name))]
            assert parts
            assert all(n in header for n in parts)


@pytest.mark.parametrize("size", [100, 400, 700, 1500, 4000])
def test_no_shard_is_larger_than_asked_unless_it_holds_one_thing(tmp_path: Path, size: int) -> None:
    bcqfmt.save(tmp_path / "m", samples.tensors(), max_shard_size=size)
    with bcqfmt.open(tmp_path / "m") as checkpoint:
        for file in checkpoint.files():
            data = max((entry.end for entry in file.header.tensors.values()), default=0)
            assert data <= size or len(file.specs) + len(file.dense) == 1


def test_a_weight_larger_than_a_shard_is_alone(tmp_path: Path) -> None:
    tensors = {
        "a": np.zeros(10, np.float32),
        "b.weight": samples.affine(64, 256),
        "c": np.zeros(0, np.float32),
        "d": np.zeros(5),
    }
    bcqfmt.save(tmp_path / "m", tensors, max_shard_size=200)
    assert list(layout_of(tmp_path / "m").values()) == [["a"], ["b.weight"], ["c", "d"]]


def test_layers_come_in_natural_order(tmp_path: Path) -> None:
    tensors = {f"layers.{i}.x": np.zeros(4, np.float32) for i in (10, 9, 2, 1, 11, 100)}
    bcqfmt.save(tmp_path / "m", tensors, max_shard_size=32)
    wanted = [["layers.1.x", "layers.2.x"], ["layers.10.x", "layers.9.x"], ["layers.100.x", "layers.11.x"]]
    assert list(layout_of(tmp_path / "m").values()) == wanted


def test_any_names_have_one_order() -> None:
    names = ["1", "a", "a1", "a01", "1a", "", "a.b", "a10", "a9", "\u0661", "a\u00b2", "9" * 512, "a1b2", "a1b", "-1"]
    tensor = bcqfmt.StoredTensor.from_array("x", np.zeros(1))
    units = [Unit(name, {name: tensor}, False) for name in names]
    assert plan_shards(units, 8) == plan_shards(reversed(units), 8)
    assert sorted(["a10", "a9", "a1"], key=natural) == ["a1", "a9", "a10"]


def test_no_tensors_at_all(tmp_path: Path) -> None:
    bcqfmt.save(tmp_path / "m", {})
    assert layout_of(tmp_path / "m") == {"model.safetensors": []}
    assert not bcqfmt.validate(tmp_path / "m", deep=True).findings


def test_a_header_never_passes_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The estimate by which shards are closed is an upper bound of the header that is written."""
    monkeypatch.setattr(shards, "SHARD_HEADER_BYTES", 4000)
    tensors: dict[str, Any] = {f"layer.{i}.\u00e9\U0001f600.x": np.zeros(1, np.int8) for i in range(40)}
    tensors |= {f"very.long.name.of.a.weight.in.layer.{i}.{'n' * 90}.weight": samples.rich(seed=i) for i in range(12)}
    tensors |= {f"e{i}.weight": samples.planes(seed=i) for i in range(12)}
    bcqfmt.save(tmp_path / "m", tensors)
    sizes = [int.from_bytes(path.read_bytes()[:8], "little") for path in (tmp_path / "m").glob("*.safetensors")]
    assert len(sizes) > 5
    assert max(sizes) <= 4000 + 700  # one unit may be larger on its own; schemes come on top once a shard


@pytest.mark.parametrize("name", ["\U0001f600", "\u00e9", '\\"\n\x01'], ids=["pair", "accent", "escaped"])
def test_what_a_name_takes_in_the_header_is_counted(name: str, tmp_path: Path) -> None:
    tensors = {f"{100 * name}{i}": np.zeros(1, np.int8) for i in range(10)}
    units = [Unit.of_dense(bcqfmt.StoredTensor.from_array(n, array)) for n, array in tensors.items()]
    bcqfmt.save(tmp_path / "a.safetensors", tensors)
    size = int.from_bytes((tmp_path / "a.safetensors").read_bytes()[:8], "little")
    assert size <= sum(unit.header_bytes for unit in units) + 200  # of the metadata


def test_a_shard_holds_no_more_tensors_than_a_file_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "MAX_TENSORS", 10)
    tensor = bcqfmt.StoredTensor.from_array("x", np.zeros(1))
    units = [Unit(f"{i}", {f"{i}.{k}": tensor for k in range(3)}, False) for i in range(20)]
    counts = [sum(len(unit.tensors) for unit in shard) for shard in plan_shards(units, 10**9)]
    assert counts == [9, 9, 9, 9, 9, 9, 6]


def test_names_of_shards() -> None:
    assert shard_names(1) == ["model.safetensors"]
    assert shard_names(2) == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    assert shard_names(100_000)[-1] == "model-100000-of-100000.safetensors"
    assert limits.SHARD_HEADER_BYTES < limits.MAX_HEADER_BYTES


def test_a_file_of_too_many_tensors_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lone file has no shards to go to: refused, not written as something that no reader takes."""
    monkeypatch.setattr(limits, "MAX_TENSORS", 10)
    monkeypatch.setattr(limits, "MAX_HEADER_BYTES", 2000)
    many = {f"t{i}": np.zeros(1, np.int8) for i in range(11)}
    long = {"x" * 500 + str(i): np.zeros(1, np.int8) for i in range(5)}
    for tensors in (many, long):
        with pytest.raises(bcqfmt.BcqError):
            bcqfmt.save(tmp_path / "a.safetensors", tensors)
        assert list(tmp_path.iterdir()) == []
