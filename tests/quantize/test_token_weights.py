"""Weighted tokens in calibration: against gradients of the whole model, resumed, recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file

from bcqfmt.container.stored_tensor import StoredTensor
from bcqfmt.converters.quantize.calibration import calibrate
from bcqfmt.converters.quantize.calibration_work import choose_rows, read_text
from bcqfmt.converters.quantize.stats import open_stats, write_stats
from bcqfmt.converters.source.checkpoint import open_source
from bcqfmt.errors import BcqError
from sources.word_models import save_model, save_text

Array = np.ndarray[Any, Any]
SEQ, ROWS, MOST = 12, 5, 50.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_text(tmp_path_factory.mktemp("texts") / "text.txt", 200)


def run(model: Path, text: Path, out: Path, weighting: str, **more: Any) -> Any:
    options = {"rows": ROWS, "seq": SEQ, "device": "cpu", "weighting": weighting, **more}
    return calibrate(open_source(model), read_text(text), out, **options)


def whole_run(folder: Path, text: Path) -> tuple[dict[str, Array], dict[str, Array]]:
    """Inputs ``[rows, seq, in]`` and mean squared gradients at the outputs ``[rows, seq]`` of every linear layer."""
    whole: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    words = [int(word[1:]) for word in text.read_text().split()]
    tokens = torch.from_numpy(choose_rows(read_text(text), lambda _: words, ROWS, SEQ, 0))
    inputs: dict[str, Array] = {}
    outputs: dict[str, Any] = {}
    for name, module in whole.named_modules():
        if isinstance(module, torch.nn.Linear):

            def look(module: Any, given: Any, made: Any, name: str = f"{name}.weight") -> None:
                made.retain_grad()
                inputs[name], outputs[name] = given[0].detach().double().numpy(), made

            module.register_forward_hook(look)
    logits = whole(input_ids=tokens).logits[:, :-1].flatten(0, 1)
    torch.nn.functional.cross_entropy(logits, tokens[:, 1:].flatten(), reduction="sum").backward()
    return inputs, {name: made.grad.double().square().mean(-1).numpy() for name, made in outputs.items()}


def weighted_hessian(x: Array, counts: Array) -> Array:
    counts = counts / counts.mean()
    size = counts * (x**2).sum(-1)
    counts = counts * np.minimum(1, MOST * size.mean(axis=1, keepdims=True) / np.maximum(size, 1e-30))
    return np.asarray(np.einsum("rt,rti,rtj->ij", counts, x, x))


def test_loss_weights_are_the_gradients_of_the_whole_model(model: Path, text: Path, tmp_path: Path) -> None:
    stats = run(model, text, tmp_path / "stats.safetensors", "loss")
    plain = run(model, text, tmp_path / "plain.safetensors", "none")
    inputs, gradients = whole_run(model, text)
    assert set(stats.inputs) == set(inputs)
    for name, x in inputs.items():
        found = stats.of(name)
        expected = weighted_hessian(x, gradients[name])
        np.testing.assert_allclose(found.hessian, expected, rtol=1e-3, atol=2e-4 * np.abs(expected).max())
        assert np.array_equal(found.square_sum, plain.of(name).square_sum)
        assert found.shared == plain.of(name).shared
    keys, values = (stats.of(f"model.layers.1.self_attn.{kind}_proj.weight").hessian for kind in "kv")
    assert not np.allclose(keys, values, rtol=0.1)
    assert stats.record["weighting"] == "loss"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plain.safetensors", "stats.safetensors"]


def test_tokens_of_one_size(model: Path, text: Path, tmp_path: Path) -> None:
    stats = run(model, text, tmp_path / "stats.safetensors", "tokens")
    inputs, _ = whole_run(model, text)
    for name, x in inputs.items():
        size = (x**2).sum(-1)
        expected = np.einsum("rt,rti,rtj->ij", size.mean(axis=1, keepdims=True) / size, x, x)
        np.testing.assert_allclose(stats.of(name).hessian, expected, rtol=1e-3, atol=1e-4 * np.abs(expected).max())
    assert stats.record["weighting"] == "tokens"


@pytest.mark.parametrize("stop", ["forwards", "layer 2 of 3, backwards", "layer 1 of 3"])
def test_an_interrupted_run_goes_on_and_gives_the_same(model: Path, text: Path, tmp_path: Path, stop: str) -> None:
    whole = tmp_path / "whole.safetensors"
    run(model, text, whole, "loss")
    out = tmp_path / "stats.safetensors"

    def interrupt(line: str) -> None:
        if line.endswith(stop) and ("tokens" in line) == (stop != "layer 1 of 3"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(model, text, out, "loss", say=interrupt)
    lines: list[str] = []
    run(model, text, out, "loss", say=lines.append)
    assert out.read_bytes() == whole.read_bytes()
    assert len(lines) == {"forwards": 11, "layer 2 of 3, backwards": 6, "layer 1 of 3": 4}[stop]


def test_an_unfinished_run_with_other_weights_is_not_mixed_up(model: Path, text: Path, tmp_path: Path) -> None:
    def interrupt(line: str) -> None:
        if line == "layer 2 of 3":
            raise KeyboardInterrupt

    out = tmp_path / "stats.safetensors"
    with pytest.raises(KeyboardInterrupt):
        run(model, text, out, "none", say=interrupt)
    with pytest.raises(BcqError, match="other options"):
        run(model, text, out, "tokens")
    assert (tmp_path / "stats.safetensors.partial").is_dir()


def test_a_hessian_of_another_shape_is_refused(model: Path, text: Path, tmp_path: Path) -> None:
    stats = run(model, text, tmp_path / "stats.safetensors", "loss")
    name = "model.layers.0.self_attn.v_proj.weight"
    arrays = load_file(tmp_path / "stats.safetensors")
    arrays[f"{name}.hessian"] = arrays[f"{name}.hessian"][:-1]
    tensors = {key: StoredTensor.from_array(key, np.ascontiguousarray(array)) for key, array in arrays.items()}
    record = {key: value for key, value in stats.record.items() if key != "version"}
    write_stats(tmp_path / "broken.safetensors", tensors, record)
    with pytest.raises(BcqError, match=r"BCQ-E629.*Hessian of"):
        open_stats(tmp_path / "broken.safetensors")
