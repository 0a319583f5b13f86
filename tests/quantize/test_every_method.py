"""Every method through a whole run, with statistics where they are needed, and the ways in which these can be wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

import bcqfmt
from bcqfmt.converters.export import export
from bcqfmt.converters.methods.registry import METHODS
from bcqfmt.converters.quantize.record import read_record
from bcqfmt.converters.quantize.stats import StatsFile, fingerprint, open_stats, stats_tensors, write_stats
from bcqfmt.converters.source.checkpoint import open_source
from bcqfmt.errors import BcqError
from sources.conversions import tree
from sources.dense_samples import Array, dense_folder, quantize

SETTINGS: dict[str, dict[str, Any]] = {
    "rtn": {"bits": 4, "group_size": 32},
    "bcq": {"bits": 3, "group_size": 32, "rounds": 3},
    "multi": {"bits": 4, "group_size": 32, "rounds": 3, "starts": 1},
    "mixed24": {"four_bit_group_size": 32, "sensitivity": "hessian"},
    "atom": {"group_size": 16, "outliers": 16},
    "gptq": {"bits": 4, "group_size": 32, "static_groups": False},
}
NAMES = {"self_attn.q_proj": (64, 96), "self_attn.k_proj": (32, 96), "self_attn.v_proj": (32, 96),
         "self_attn.o_proj": (96, 64), "mlp.up_proj": (128, 96), "mlp.down_proj": (96, 128)}  # fmt: skip
SHARED = [["self_attn.k_proj", "self_attn.q_proj", "self_attn.v_proj"], ["self_attn.o_proj"], ["mlp.up_proj"],
          ["mlp.down_proj"]]  # fmt: skip


def weight_name(layer: int, module: str) -> str:
    return f"model.layers.{layer}.{module}.weight"


def tensors(seed: int = 0) -> dict[str, Array]:
    rng = np.random.default_rng(seed)
    found = {}
    for layer in range(2):
        for module, shape in NAMES.items():
            found[weight_name(layer, module)] = (rng.normal(size=shape) * 0.05).astype(np.float16)
    return {**found, "model.norm.weight": np.ones(96, np.float16)}


def stats_of(source: Path, path: Path, *, layers: int = 2, narrow: bool = False) -> StatsFile:
    """Statistics of random inputs whose channels differ; q, k and v read the same."""
    rng = np.random.default_rng(1)
    arrays: dict[str, Any] = {}
    inputs = {}
    for layer in range(layers):
        for group in SHARED:
            width = NAMES[group[0]][1] - narrow
            seen = rng.normal(size=(200, width)) * np.exp(rng.normal(size=width))
            weights = [weight_name(layer, module) for module in group]
            inputs[weights[0]] = weights
            arrays |= stats_tensors(weights[0], (seen**2).sum(0), (seen.T @ seen).astype(np.float32))
    record = {
        "model": fingerprint(open_source(source)),
        "inputs": inputs,
        "rows": 1,
        "seq": 200,
        "tokens": 200,
        "seed": 0,
    }
    write_stats(path, arrays, record)
    return open_stats(path)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return dense_folder(tmp_path_factory.mktemp("every") / "model", tensors())


@pytest.fixture(scope="module")
def stats(source: Path, tmp_path_factory: pytest.TempPathFactory) -> StatsFile:
    return stats_of(source, tmp_path_factory.mktemp("stats") / "stats.safetensors")


def test_no_method_is_forgotten() -> None:
    assert SETTINGS.keys() == METHODS.keys()


@pytest.mark.parametrize("method", SETTINGS)
def test_a_whole_run(source: Path, stats: StatsFile, tmp_path: Path, method: str) -> None:
    quantize(source, tmp_path / "bcq", method, settings=SETTINGS[method], stats=stats)
    report = bcqfmt.validate(tmp_path / "bcq", deep=True)
    assert report.valid, report.errors[0].text()
    record = read_record(tmp_path / "bcq")
    assert record is not None
    assert len(record.weights) == 12
    assert record.stats is not None
    assert record.recipes[0]["method"] == method
    before = safetensors.numpy.load_file(source / "model.safetensors")
    with bcqfmt.open(tmp_path / "bcq") as checkpoint:
        for name, weight in checkpoint.weights():
            off = np.linalg.norm(weight.dequantize("float64") - before[name]) / np.linalg.norm(
                before[name].astype(float)
            )
            assert off == pytest.approx(record.weights[name]["relative"], rel=0.05)  # rounded to F16 there
            assert off < 0.6  # gptq gives up some of it for the outputs
        export(checkpoint, tmp_path / "dense", "dense")
    after = safetensors.numpy.load_file(tmp_path / "dense" / "model.safetensors")
    assert {name: array.shape for name, array in after.items()} == {name: array.shape for name, array in before.items()}
    quantize(source, tmp_path / "again", method, settings=SETTINGS[method], stats=stats, workers=3)
    assert tree(tmp_path / "again") == tree(tmp_path / "bcq")


def test_atom_keeps_one_order_for_a_shared_input(source: Path, stats: StatsFile, tmp_path: Path) -> None:
    quantize(source, tmp_path / "bcq", "atom", settings=SETTINGS["atom"], stats=stats)
    record = read_record(tmp_path / "bcq")
    assert record is not None
    with bcqfmt.open(tmp_path / "bcq") as checkpoint:
        for layer in range(2):
            orders = [
                checkpoint.weight(weight_name(layer, f"self_attn.{n}_proj")).parts()["perm"].tobytes() for n in "qkv"
            ]
            assert len(set(orders)) == 1
    assert all("activations" in entry["notes"] for entry in record.weights.values())


def test_methods_by_rule(source: Path, stats: StatsFile, tmp_path: Path) -> None:
    from bcqfmt.converters.quantize.rules import read_rules

    rules = tmp_path / "rules.toml"
    text = "".join(
        f"[[rule]]\nmatch = '{module}'\nmethod = '{method}'\n"
        + "".join(
            f"{key} = {str(value).lower() if isinstance(value, bool) else repr(value)}\n"
            for key, value in given.items()
        )
        for module, (method, given) in zip(NAMES, SETTINGS.items(), strict=True)
    )
    rules.write_text(text)
    quantize(source, tmp_path / "bcq", None, settings={}, rules=read_rules(rules), stats=stats)
    assert bcqfmt.validate(tmp_path / "bcq", deep=True).valid
    record = read_record(tmp_path / "bcq")
    assert record is not None
    assert {recipe["method"] for recipe in record.recipes} == set(METHODS)


def test_hessians_are_read_by_those_who_ask(source: Path, stats: StatsFile, tmp_path: Path) -> None:
    """They are larger than many a weight: rtn and atom never see one, gptq sees each once."""

    def read(method: str) -> int:
        tensors = stats.tensors.values()
        before = sum(tensor._source.bytes_read for tensor in tensors if tensor._source is not None) // len(tensors)
        quantize(source, tmp_path / method, method, settings=SETTINGS[method], stats=stats)
        after = sum(tensor._source.bytes_read for tensor in tensors if tensor._source is not None) // len(tensors)
        return after - before

    hessians = sum(tensor.nbytes for name, tensor in stats.tensors.items() if name.endswith(".hessian"))
    assert read("rtn") < hessians // 8
    assert read("atom") < hessians // 8
    assert read("gptq") > hessians


def test_statistics_of_another_model(source: Path, tmp_path: Path) -> None:
    other = dense_folder(tmp_path / "other", tensors(seed=5))
    stats = stats_of(other, tmp_path / "stats.safetensors")
    with pytest.raises(BcqError) as caught:
        quantize(source, tmp_path / "bcq", "gptq", stats=stats)
    assert (caught.value.code, caught.value.exit_code) == ("BCQ-E624", 4)
    assert not (tmp_path / "bcq.partial").exists()


def test_statistics_of_other_shapes(source: Path, tmp_path: Path) -> None:
    stats = stats_of(source, tmp_path / "stats.safetensors", narrow=True)
    with pytest.raises(BcqError, match=r"BCQ-E624.*statistics of 95 channels; expected 96|BCQ-E624.*of 127.*128"):
        quantize(source, tmp_path / "bcq", "gptq", stats=stats)


def test_statistics_that_lack_a_weight(source: Path, tmp_path: Path) -> None:
    stats = stats_of(source, tmp_path / "stats.safetensors", layers=1)
    with pytest.raises(BcqError, match=r"BCQ-E623.*layers\.1.*nothing on this weight"):
        quantize(source, tmp_path / "bcq", "gptq", settings=SETTINGS["gptq"], stats=stats)
    quantize(source, tmp_path / "bcq", "gptq", settings=SETTINGS["gptq"], stats=stats, exclude=("layers.1",))


def test_other_statistics_are_another_plan(source: Path, stats: StatsFile, tmp_path: Path) -> None:
    from bcqfmt.converters.quantize.quantization import Quantization, QuantizeOptions

    def digest(given: StatsFile | None) -> str:
        return Quantization(open_source(source), QuantizeOptions(method="mixed24", stats=given)).plan.digest

    assert len({digest(stats), digest(None), digest(stats_of(source, tmp_path / "s.safetensors", layers=1))}) == 3


@pytest.mark.parametrize("ratio", ["0.3", "0.01"])
def test_a_split_that_cannot_be_aligned(source: Path, tmp_path: Path, ratio: str) -> None:
    """aligned64 has a quarter of 4 bit in every 64 columns and nothing else: refused, and nothing is left."""
    settings = {"four_bit_ratio": ratio, "layout": "aligned64"}
    with pytest.raises(BcqError) as caught:
        quantize(source, tmp_path / "bcq", "mixed24", settings=settings)
    assert caught.value.code in ("BCQ-E620", "BCQ-E621")
    assert list(tmp_path.iterdir()) == []
