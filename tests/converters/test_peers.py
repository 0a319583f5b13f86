"""Checkpoints that the real tools wrote: converted, validated, verified, restored, and their values compared."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bcqfmt
from bcqfmt.converters.convert.conversion import Conversion, ConvertOptions
from bcqfmt.converters.source.checkpoint import open_source
from bcqfmt.errors import BcqError
from programs.verbs import command, environment
from sources.conversions import GPTQ, convert, gptq_layer, proved, tree
from sources.peers import PEERS, made_up, references

EXPECTED: dict[str, dict[str, Any]] = json.loads((PEERS / "expected.json").read_text())
CONVERTED = [kind for kind, facts in EXPECTED.items() if facts["verdict"] == "converts"]
REFUSED = [kind for kind, facts in EXPECTED.items() if facts["verdict"] == "refused"]


def test_expectations_cover_every_kind() -> None:
    assert sorted(EXPECTED) == sorted(path.name for path in PEERS.iterdir() if path.is_dir())
    assert len(CONVERTED) + len(REFUSED) == len(EXPECTED) == 37
    assert all(facts["reason"] for facts in EXPECTED.values() if facts["raw_bytes"] or facts["verdict"] == "refused")


@pytest.mark.parametrize("kind", CONVERTED)
def test_there_and_back(kind: str, tmp_path: Path) -> None:
    facts, source = EXPECTED[kind], PEERS / kind / "source"
    before = tree(source)
    conversion = convert(source, tmp_path / "bcq")
    modules = conversion.modules.values()
    assert {module.layout for module in modules} == {facts["layout"]}
    assert {module.settings.get("zero_point") for module in modules} == {facts["zero_rule"]}
    certificate = proved(source, tmp_path / "bcq", tmp_path)
    assert certificate.weights == len(modules)
    assert certificate.values == certificate.codes
    assert certificate.archived == facts["raw_bytes"]
    assert (tmp_path / "bcq/bcq_source/raw.safetensors").exists() == (facts["raw_bytes"] > 0)
    assert tree(source) == before


@pytest.mark.parametrize("kind", [kind for kind in CONVERTED if EXPECTED[kind]["reference"]])
def test_values_are_those_of_the_tool(kind: str, tmp_path: Path) -> None:
    convert(PEERS / kind / "source", tmp_path / "bcq")
    sums, arrays = references(kind, EXPECTED[kind]["reference"])
    with bcqfmt.open(tmp_path / "bcq") as checkpoint:
        values = {name: weight.dequantize() for name, weight in checkpoint.weights()}
    assert {name: hashlib.sha256(array.tobytes()).hexdigest() for name, array in values.items()} == sums
    for name, array in arrays.items():
        assert values[name].dtype == array.dtype
        assert values[name].tobytes() == array.tobytes()


def test_gemv_fast_is_the_kernel_value_and_not_the_intended_one(tmp_path: Path) -> None:
    kind = "autoawq-gemv_fast-4b-g64-asym-rtn"
    convert(PEERS / kind / "source", tmp_path / "bcq")
    _, intended = references(kind, "intended")
    with bcqfmt.open(tmp_path / "bcq") as checkpoint:
        for name, array in intended.items():
            values = checkpoint.weight(name).dequantize()
            assert not np.array_equal(values, array)
            assert np.allclose(values.astype(np.float64), array.astype(np.float64), atol=1e-3)


@pytest.mark.parametrize("kind", REFUSED)
def test_refused_by_name(kind: str, tmp_path: Path) -> None:
    with pytest.raises(BcqError) as caught:
        convert(PEERS / kind / "source", tmp_path / "bcq")
    assert caught.value.code == EXPECTED[kind]["code"]
    assert caught.value.exit_code == EXPECTED[kind]["exit_code"]
    assert list(tmp_path.iterdir()) == []


def test_archiving_is_no_way_out_on_a_layer_of_real_size(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    layer = gptq_layer(rng, 4096, 4096, 128)
    tensors = {f"model.layers.0.self_attn.q_proj.{suffix}": array for suffix, array in layer.items()}
    source = tmp_path / "source"
    made_up(source, tensors, {**GPTQ, "group_size": 128})
    convert(source, tmp_path / "bcq")
    sizes = {path: path.stat().st_size for path in (tmp_path / "bcq").rglob("*") if path.is_file()}
    whole = sum(path.stat().st_size for path in source.iterdir())
    archive = sum(size for path, size in sizes.items() if "bcq_source" in path.parts)
    assert archive <= 0.01 * whole
    assert sum(sizes.values()) <= 1.02 * whole
    assert proved(source, tmp_path / "bcq", tmp_path, rows=64).archived == 0


def test_values_do_not_depend_on_the_archive(tmp_path: Path) -> None:
    """A g_idx with negative entries is rebuilt by no rule: it is archived, and nothing else needs it."""
    rng = np.random.default_rng(2)
    layer = gptq_layer(rng, 32, 64, 32)
    layer["g_idx"][:32] = -2
    made_up(tmp_path / "source", {f"layer.{suffix}": array for suffix, array in layer.items()}, GPTQ)
    convert(tmp_path / "source", tmp_path / "bcq")
    assert proved(tmp_path / "source", tmp_path / "bcq", tmp_path).archived == 256
    with bcqfmt.open(tmp_path / "bcq") as checkpoint:
        before = checkpoint.weight("layer.weight").dequantize().tobytes()
    (tmp_path / "bcq/bcq_source/raw.safetensors").unlink()
    with bcqfmt.open(tmp_path / "bcq") as checkpoint:
        assert checkpoint.weight("layer.weight").dequantize().tobytes() == before


# ------------------------------------------------------------------------------------------------ the same bytes
SHARDED = PEERS / "gptqmodel-gptq-4b-g32-sym-sharded" / "source"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What one worker makes of the sharded checkpoint, in small shards."""
    folder = tmp_path_factory.mktemp("plain")
    convert(SHARDED, folder / "bcq", max_shard_size=30_000)
    assert len(list((folder / "bcq").glob("model-*.safetensors"))) >= 6
    return tree(folder / "bcq")


def test_workers_do_not_show(plain: dict[str, str], tmp_path: Path) -> None:
    convert(SHARDED, tmp_path / "bcq", max_shard_size=30_000, workers=2)
    assert tree(tmp_path / "bcq") == plain
    proved(SHARDED, tmp_path / "bcq", tmp_path)


@pytest.mark.parametrize(("seed", "locale"), [("0", "C"), ("12345", "tr_TR.UTF-8")])
def test_hash_seed_locale_and_zone_do_not_show(plain: dict[str, str], tmp_path: Path, seed: str, locale: str) -> None:
    surroundings = {**environment(), "PYTHONHASHSEED": seed, "LC_ALL": locale, "TZ": "Asia/Kathmandu"}
    asked = command("convert", SHARDED, tmp_path / "bcq", "--max-shard-size", "30000", "--workers", "2")
    subprocess.run(asked, env=surroundings, check=True, capture_output=True, timeout=120)
    assert tree(tmp_path / "bcq") == plain


def test_one_shard_holds_the_same_weights(plain: dict[str, str], tmp_path: Path) -> None:
    convert(SHARDED, tmp_path / "bcq")
    assert (tmp_path / "bcq/model.safetensors").exists()
    convert(SHARDED, tmp_path / "small", max_shard_size=30_000)
    folders = (bcqfmt.open(tmp_path / "bcq"), bcqfmt.open(tmp_path / "small"))
    digests = [{name: weight.digest() for name, weight in folder.weights()} for folder in folders]
    assert digests[0] == digests[1]


def test_parts_give_the_bytes_of_a_plain_run(plain: dict[str, str], tmp_path: Path) -> None:
    for index in (2, 1):
        conversion = Conversion(open_source(SHARDED), ConvertOptions(max_shard_size=30_000, part=(index, 2)))
        assert conversion.run(tmp_path / "bcq") is False
        assert not (tmp_path / "bcq").exists()
        closing = Conversion(open_source(SHARDED), ConvertOptions(max_shard_size=30_000))
        if index == 2:
            with pytest.raises(BcqError, match="BCQ-E404"):
                closing.close(tmp_path / "bcq")
    closing.close(tmp_path / "bcq")
    assert tree(tmp_path / "bcq") == plain
    assert os.listdir(tmp_path) == ["bcq"]  # noqa: PTH208 - names are what counts


def test_parts_run_at_the_same_time(plain: dict[str, str], tmp_path: Path) -> None:
    size = ("--max-shard-size", "30kB")
    runs = [
        subprocess.Popen(
            command("convert", SHARDED, tmp_path / "bcq", *size, "--part", f"{i}/3"),
            env=environment(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        for i in (1, 2, 3)
    ]
    for run in runs:
        _, said = run.communicate(timeout=120)
        assert run.returncode == 0, said
    Conversion(open_source(SHARDED), ConvertOptions(max_shard_size=30_000)).close(tmp_path / "bcq")
    assert tree(tmp_path / "bcq") == plain
