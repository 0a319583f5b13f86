"""Training of scales: predictions get nearer to the dense model's, codes stay, and the result is like any other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from click.testing import CliRunner
from safetensors.numpy import load_file

import bcqfmt
from bcqfmt.cli.main import cli
from bcqfmt.converters.quantize.calibration_work import TextOptions, read_text
from bcqfmt.converters.quantize.quantization import Quantization, QuantizeOptions
from bcqfmt.converters.quantize.record import read_record
from bcqfmt.converters.quantize.training import train_scales
from bcqfmt.converters.source.checkpoint import open_source
from bcqfmt.errors import BcqError
from bcqfmt.weight.weight import BcqWeight

SEQ, ROWS = 16, 24
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "rtn": ("rtn", {"bits": 3, "group_size": "row"}),
    "bcq": ("bcq", {"bits": 2, "group_size": 32}),
    "bcq-no-bias": ("bcq", {"bits": 2, "group_size": 16, "bias": False, "scale_dtype": "F32"}),
}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Two threads take longer for matrices as small as these."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def options(text: Path, train: int, *, resume: bool = False, overwrite: bool = False, **more: Any) -> QuantizeOptions:
    given = TextOptions(read_text(text), ROWS, SEQ, "cpu", "none", train)
    settings = {"bits": 2, "group_size": 16, **more}
    return QuantizeOptions(method="gptq", settings=settings, text=given, resume=resume, overwrite=overwrite)


def tokens(text: Path) -> Any:
    words = [int(word[1:]) for word in text.read_text().split()][: ROWS * SEQ]
    return torch.tensor(words).reshape(ROWS, SEQ)


def divergence(model: Path, text: Path, weights: dict[str, BcqWeight]) -> float:
    """Of the predictions with these weights from those of the dense model."""
    whole: Any = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    ids = tokens(text)
    with torch.inference_mode():
        want = whole(input_ids=ids).logits.log_softmax(-1)
        for name, weight in weights.items():
            whole.get_parameter(name).copy_(torch.from_numpy(weight.dequantize("float32")))
        got = whole(input_ids=ids).logits.log_softmax(-1)
    return float((want.exp() * (want - got)).sum(-1).mean())


def parts_that_differ(old: dict[str, BcqWeight], new: dict[str, BcqWeight]) -> set[str]:
    assert {name: weight.spec for name, weight in old.items()} == {name: weight.spec for name, weight in new.items()}
    pairs = [(suffix, part, new[name].parts()[suffix]) for name in old for suffix, part in old[name].parts().items()]
    return {suffix for suffix, ours, theirs in pairs if ours.array().tobytes() != theirs.array().tobytes()}


@pytest.mark.parametrize("case", CASES)
def test_predictions_get_nearer_and_codes_stay(model: Path, text: Path, tmp_path: Path, case: str) -> None:
    method, settings = CASES[case]
    Quantization(open_source(model), QuantizeOptions(method=method, settings=settings)).run(tmp_path / "bcq")
    lines: list[str] = []
    with bcqfmt.open(tmp_path / "bcq") as checkpoint:
        before = dict(checkpoint.weights())
        given = TextOptions(read_text(text), ROWS, SEQ, "cpu", "none", 2)
        after = train_scales(open_source(model), given, before, lines.append)
        assert divergence(model, text, after) < 0.95 * divergence(model, text, before)
        changed = {"rtn": {"s0_scale"}, "bcq": {"s0_alpha", "s0_bias"}}.get(case, {"s0_alpha"})
        assert parts_that_differ(before, after) == changed
        for weight in after.values():
            weight.check()
    assert lines[-1].startswith("scales: pass 2 of 2, row 24 of 24, divergence ")


@pytest.mark.parametrize("settings", [{}, {"static_groups": False, "clip": "none"}], ids=["gptq", "with an order"])
def test_a_trained_folder_is_one_like_any_other(
    model: Path, text: Path, tmp_path: Path, settings: dict[str, Any]
) -> None:
    ours, theirs, exported = tmp_path / "before", tmp_path / "after", tmp_path / "gptq"
    Quantization(open_source(model), options(text, 0, **settings)).run(ours)
    Quantization(open_source(model), options(text, 3, **settings)).run(theirs)
    with bcqfmt.open(ours) as one, bcqfmt.open(theirs) as other:
        before, after = dict(one.weights()), dict(other.weights())
        assert parts_that_differ(before, after) == {"s0_scale"}
        assert divergence(model, text, after) < 0.95 * divergence(model, text, before)
        old, new = read_record(ours), read_record(theirs)
        assert old is not None
        assert new is not None
        assert new.text == {**(old.text or {}), "train_scales": 3}
        assert new.sums().noise != old.sums().noise
        assert "scales trained in 3 passes" in (theirs / "README.md").read_text()
        for words in (["validate", "--deep", theirs], ["export", theirs, exported, "--to", "gptq"]):
            made = CliRunner().invoke(cli, [str(word) for word in words])
            assert made.exit_code == 0, made.output
        stored = load_file(exported / "model.safetensors")
        for name, weight in after.items():
            scales = stored[f"{name.removesuffix('.weight')}.scales"]
            assert (weight.parts()["s0_scale"].array() == scales.T).all()


def test_an_interrupted_run_starts_training_again_and_gives_the_same_bytes(
    model: Path, text: Path, tmp_path: Path
) -> None:
    whole, out = tmp_path / "whole", tmp_path / "bcq"
    Quantization(open_source(model), options(text, 2)).run(whole)

    def interrupt(line: str) -> None:
        if line.startswith("scales: pass 2"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Quantization(open_source(model), options(text, 2)).run(out, say=interrupt)
    assert not out.exists()
    lines: list[str] = []
    again = Quantization(open_source(model), options(text, 2, resume=True))
    again.run(out, say=lines.append)
    assert [line.partition(",")[0] for line in lines] == ["scales: pass 1 of 2", "scales: pass 2 of 2"]
    for file in ("model.safetensors", "bcq_quantization.json", "README.md"):
        assert (out / file).read_bytes() == (whole / file).read_bytes()
    assert again.is_complete(out)


def test_numbers_follow_the_gradient_of_the_divergence(model: Path, text: Path, tmp_path: Path) -> None:
    """In one step of all rows Adam goes by the sign of the gradient; here it comes from float64 and plain autograd."""
    name = "model.layers.1.mlp.up_proj.weight"
    method, settings = CASES["bcq-no-bias"]
    Quantization(open_source(model), QuantizeOptions(method=method, settings=settings)).run(tmp_path / "bcq")
    with bcqfmt.open(tmp_path / "bcq") as checkpoint:
        old = checkpoint.weight(name)
        given = TextOptions(read_text(text), 4, SEQ, "cpu", "none", 1)
        new = train_scales(open_source(model), given, {name: old}, lambda line: None)[name]
        alpha, codes = old.parts()["s0_alpha"].array(), old.codes()
        moved = new.parts()["s0_alpha"].array() - alpha
    whole: Any = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64).eval()
    whole.requires_grad_(False)
    chosen = np.sort(np.random.default_rng(0).choice(400 // SEQ, 4, replace=False))
    words = [int(word[1:]) for word in text.read_text().split()]
    ids = torch.tensor(words).reshape(-1, SEQ)[chosen]
    signs = torch.from_numpy(np.stack([2.0 * (codes >> (1 - plane) & 1) - 1 for plane in range(2)]))
    numbers = torch.from_numpy(alpha.astype(np.float64)).requires_grad_()
    values = (signs * numbers.repeat_interleave(16, 2)).sum(0)
    want = whole(input_ids=ids).logits.log_softmax(-1)
    got = torch.func.functional_call(whole, {name: values}, kwargs={"input_ids": ids}).logits.log_softmax(-1)
    (want.exp() * (want - got)).sum().backward()
    assert numbers.grad is not None
    slope = numbers.grad.numpy()
    clear = np.abs(slope) > 1e-3 * np.abs(slope).max()
    assert (np.sign(moved[clear]) == -np.sign(slope[clear])).all()


def test_what_cannot_be_trained_is_refused_first(model: Path, text: Path, tmp_path: Path) -> None:
    given = TextOptions(read_text(text), ROWS, SEQ, "cpu", "none", 1)
    with pytest.raises(BcqError, match=r"BCQ-E302.*--train-scales with method multi"):
        Quantization(open_source(model), QuantizeOptions(method="multi", text=given))
    words = ["quantize", model, tmp_path / "bcq", "--method", "rtn", "--train-scales", 1]
    made = CliRunner().invoke(cli, [str(word) for word in words])
    assert (made.exit_code, "--text FILE" in made.output) == (2, True), made.output
    assert not list(tmp_path.iterdir())


def test_overwrite_drops_an_unfinished_run(model: Path, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "bcq"

    def interrupt(line: str) -> None:
        if line == "layer 2 of 3":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Quantization(open_source(model), options(text, 0)).run(out, say=interrupt)
    Quantization(open_source(model), options(text, 0, overwrite=True)).run(out)
    assert read_record(out) is not None
    assert not list(tmp_path.glob("*.partial"))
