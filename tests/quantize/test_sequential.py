"""Quantizing layer by layer: the first inputs are the dense model's, the result is nearer to it, a run can go on."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from click.testing import CliRunner

import bcqfmt
from bcqfmt.cli.main import cli
from bcqfmt.cli.verbs.quantize import command
from bcqfmt.converters.quantize import sequential
from bcqfmt.converters.quantize.calibration import calibrate
from bcqfmt.converters.quantize.calibration_work import TextOptions, read_text
from bcqfmt.converters.quantize.quantization import Quantization, QuantizeOptions
from bcqfmt.converters.quantize.record import read_record
from bcqfmt.converters.quantize.rules import read_rules
from bcqfmt.converters.source.checkpoint import open_source
from bcqfmt.errors import BcqError

SEQ, ROWS = 16, 24
SETTINGS = {"bits": 2, "group_size": 16}


def options(text: Path, weighting: str = "none", **more: Any) -> QuantizeOptions:
    given = TextOptions(read_text(text), ROWS, SEQ, "cpu", weighting)
    return QuantizeOptions(method="gptq", settings=SETTINGS, text=given, **more)


@pytest.fixture(scope="module")
def finished(model: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("made") / "bcq"
    Quantization(open_source(model), options(text)).run(out)
    return out


@pytest.fixture(scope="module")
def apart(model: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with statistics of the dense model."""
    folder = tmp_path_factory.mktemp("apart")
    given = {"rows": ROWS, "seq": SEQ, "device": "cpu"}
    stats = calibrate(open_source(model), read_text(text), folder / "stats.safetensors", **given)
    given = {"method": "gptq", "settings": SETTINGS, "stats": stats}
    Quantization(open_source(model), QuantizeOptions(**given)).run(folder / "bcq")
    return folder / "bcq"


def digests(folder: Path) -> dict[str, str]:
    with bcqfmt.open(folder) as checkpoint:
        return {name: weight.digest() for name, weight in checkpoint.weights()}


def logits(model: Path, text: Path, folder: Path | None) -> Any:
    """Of the calibration text, with the weights of a BCQ folder."""
    whole: Any = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    if folder is not None:
        with bcqfmt.open(folder) as checkpoint:
            for name, weight in checkpoint.weights():
                whole.get_parameter(name).data.copy_(torch.from_numpy(weight.dequantize("float32")))
    words = [int(word[1:]) for word in text.read_text().split()][: ROWS * SEQ]
    with torch.inference_mode():
        return whole(input_ids=torch.tensor(words).reshape(ROWS, SEQ)).logits


def test_the_first_inputs_are_those_of_the_dense_model(finished: Path, apart: Path) -> None:
    ours, theirs = digests(finished), digests(apart)
    first = {f"model.layers.0.self_attn.{name}_proj.weight" for name in "qkv"}
    same = {name for name in ours if ours[name] == theirs[name]}
    assert same == first


def test_the_model_is_nearer_than_with_dense_statistics(finished: Path, apart: Path, model: Path, text: Path) -> None:
    dense = logits(model, text, None)
    ours, theirs = (float((logits(model, text, folder) - dense).square().mean()) for folder in (finished, apart))
    assert ours < 0.9 * theirs


def test_the_record_names_text_and_weighting(finished: Path, text: Path) -> None:
    record = read_record(finished)
    assert record is not None
    expected = {"text": read_text(text).sha256, "rows": ROWS, "seq": SEQ, "weighting": "none", "train_scales": 0}
    assert record.text == expected
    assert "24 rows of 16 tokens, layer by layer" in (finished / "README.md").read_text()
    assert not list(finished.parent.glob("*.partial"))


@pytest.mark.parametrize("weighting", ["none", "loss"])
def test_an_interrupted_run_goes_on_and_gives_the_same(
    model: Path, text: Path, finished: Path, tmp_path: Path, weighting: str
) -> None:
    whole = finished
    if weighting != "none":
        whole = tmp_path / "whole"
        Quantization(open_source(model), options(text, weighting)).run(whole)
        assert digests(whole) != digests(finished)

    def interrupt(line: str) -> None:
        if line == "layer 2 of 3":
            raise KeyboardInterrupt

    out = tmp_path / "bcq"
    with pytest.raises(KeyboardInterrupt):
        Quantization(open_source(model), options(text, weighting)).run(out, say=interrupt)
    lines: list[str] = []
    again = Quantization(open_source(model), options(text, weighting, resume=True))
    again.run(out, say=lines.append)
    assert lines == ["layer 2 of 3", "layer 3 of 3"]
    for file in ("model.safetensors", "bcq_quantization.json"):
        assert (out / file).read_bytes() == (whole / file).read_bytes()
    assert again.is_complete(out)


def test_what_is_kept_of_a_layer_changes_nothing(
    model: Path, text: Path, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sequential, "_BUDGET", 0)
    Quantization(open_source(model), options(text)).run(tmp_path / "bcq")
    assert digests(tmp_path / "bcq") == digests(finished)


def test_each_precision_of_nested_planes_has_inputs_of_its_own(model: Path, text: Path, tmp_path: Path) -> None:
    """The first planes of a seed are those of `bcq`, made with what layers of two planes give, in every layer."""
    given, common = options(text), {"rounding": "gptq", "group_size": 16}
    for method, more in {"bcq": {"bits": 2}, "multi": {"bits": 3}, "joint": {"bits": 3, "nested": "joint"}}.items():
        asked = replace(given, method=method.replace("joint", "multi"), settings={**common, **more})
        Quantization(open_source(model), asked).run(tmp_path / method)
    read = {
        method: {
            name: weight.dequantize(planes=2).tobytes() for name, weight in bcqfmt.open(tmp_path / method).weights()
        }
        for method in ("bcq", "multi", "joint")
    }
    assert read["bcq"] == read["multi"]
    assert all(read["bcq"][name] != read["joint"][name] for name in read["bcq"])


def test_what_is_in_no_layer_is_refused_or_needs_no_statistics(model: Path, text: Path, tmp_path: Path) -> None:
    with pytest.raises(BcqError, match=r"BCQ-E623.*no linear layer of a decoder layer") as caught:
        Quantization(open_source(model), options(text, include=("lm_head",))).run(tmp_path / "bcq")
    assert "--exclude lm_head.weight;" in caught.value.hint
    assert "--text" not in caught.value.hint
    with pytest.raises(BcqError, match="BCQ-E623"):
        Quantization(open_source(model), options(text, include=("lm_head",), dry_run=True))
    assert not list(tmp_path.iterdir())


def test_a_config_with_fewer_layers_than_the_files(model: Path, text: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(model, tmp_path / "m")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 2}))
    with pytest.raises(BcqError, match=r"BCQ-E623.*layers\.2\..*num_hidden_layers = 2") as caught:
        Quantization(open_source(folder), options(text)).run(tmp_path / "bcq")
    assert "correct num_hidden_layers" in caught.value.hint
    Quantization(open_source(folder), options(text, exclude=("layers.2.",), dry_run=True))


def test_a_rule_for_a_shape_that_does_not_fit(model: Path, text: Path, tmp_path: Path) -> None:
    """Found before any layer is run, with the file."""
    rules = tmp_path / "rules.toml"
    rules.write_text("[[rule]]\nmatch='layers.2.self_attn.q'\nmethod='atom'\n")
    for dry_run in (True, False):
        with pytest.raises(BcqError, match=r"BCQ-E621 model\.safetensors: 'model\.layers\.2\.self_attn\.q_proj"):
            Quantization(open_source(model), options(text, rules=read_rules(rules), dry_run=dry_run))


def test_a_gpu_that_is_not_there(model: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    given = TextOptions(read_text(text), ROWS, SEQ, "cuda")
    with pytest.raises(BcqError, match="BCQ-E551"):
        Quantization(open_source(model), QuantizeOptions(method="gptq", text=given, dry_run=True))


def test_the_verb(model: Path, text: Path, finished: Path, tmp_path: Path) -> None:
    words = ["quantize", model, tmp_path / "bcq", "--method", "gptq", "--bits", 2, "--group-size", 16, "--text", text]
    words += ["--rows", ROWS, "--context", SEQ, "--token-weights", "none", "--device", "cpu"]
    made = CliRunner().invoke(cli, [str(word) for word in words])
    assert made.exit_code == 0, made.output
    assert digests(tmp_path / "bcq") == digests(finished)
    assert next(one for one in command.params if one.name == "token_weights").default == "tokens"
    refused = CliRunner().invoke(cli, [str(word) for word in [*words, "--stats", text]])
    assert refused.exit_code == 2
    assert "choose one" in refused.output
    for device, code, said in (("tpu", 2, "none of auto, cpu, cuda or cuda:N"), ("cuda:7", 5, "BCQ-E551")):
        wrong = [*words[:2], tmp_path / "other", *words[3:-1], device]
        refused = CliRunner().invoke(cli, [str(word) for word in wrong])
        assert (refused.exit_code, said in refused.output) == (code, True), refused.output
        assert not (tmp_path / "other").exists()


def test_a_flipped_bit_in_an_unfinished_run_is_noticed(model: Path, text: Path, tmp_path: Path) -> None:
    def interrupt(line: str) -> None:
        if line == "layer 2 of 3":
            raise KeyboardInterrupt

    out = tmp_path / "bcq"
    with pytest.raises(KeyboardInterrupt):
        Quantization(open_source(model), options(text, "loss")).run(out, say=interrupt)
    for kind in ("hidden", "quantized", "weights"):
        (file,) = tmp_path.rglob(f"{kind}-00001.*")
        raw = file.read_bytes()
        file.write_bytes(raw[:-200] + bytes([raw[-200] ^ 1]) + raw[-199:])
        with pytest.raises(BcqError, match=rf"BCQ-E401.*{file.name} changed since it was written") as caught:
            Quantization(open_source(model), options(text, "loss", resume=True)).run(out)
        assert "--overwrite" in caught.value.hint
        assert not out.exists()
        file.write_bytes(raw)
    with pytest.raises(KeyboardInterrupt):  # what the hint says: the old run goes
        Quantization(open_source(model), options(text, "loss", overwrite=True)).run(out, say=interrupt)
