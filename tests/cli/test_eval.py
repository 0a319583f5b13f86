"""`bcqfmt eval`: figures that a second computation agrees with."""

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from bcqfmt import BcqError
from bcqfmt.integrations.transformers import run as models
from programs.verbs import Run
from sources.tiny_models import bcq_model, dense_model


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog, and then again. " * 12)
    return path


def test_against_the_exact_dense_export(run: Run, model: Path, text: Path) -> None:
    options = [
        "--text",
        text,
        "--context",
        "32",
        "--max-tokens",
        "200",
        "--reference",
        model.parent / "dense",
        "--json",
    ]
    exact = json.loads(run("eval", model, *options, "--exact").stdout)
    assert exact["divergence"] == exact["largest_divergence"] == 0
    assert exact["top1"] == 1
    assert exact["perplexity"] == exact["reference_perplexity"]
    kernels = json.loads(run("eval", model, *options).stdout)
    assert 0 <= kernels["divergence"] <= 1e-4
    assert kernels["top1"] >= 0.995
    assert kernels["tokens"] == exact["tokens"]


def test_the_perplexity_goes_into_the_model_card(run: Run, model: Path, text: Path, tmp_path: Path) -> None:
    folder = tmp_path / "bcq"
    shutil.copytree(model, folder)
    before = (folder / "README.md").read_text()
    options = ("--text", text, "--max-tokens", "50", "--context", "32", "--card")
    found = json.loads(run("eval", folder, *options, "--json").stdout)
    row = f"| perplexity | {found['perplexity']:.4f} on text.txt ({found['tokens']} tokens, windows of 32) |\n"
    assert (folder / "README.md").read_text().replace(row, "") == before
    assert run("eval", folder, *options).exit_code == 0
    assert (folder / "README.md").read_text().count("| perplexity |") == 1
    (folder / "README.md").write_text("# my own card\n")
    refused = run("eval", folder, *options)
    assert (refused.exit_code, "--card" in refused.stderr) == (2, True)
    assert (folder / "README.md").read_text() == "# my own card\n"


def test_perplexity_is_what_numpy_computes(model: Path, text: Path) -> None:
    loaded = models.load(model, dtype="float32")
    ids = loaded.tokenizer(text.read_text(), add_special_tokens=False)["input_ids"][:50]
    losses, count = [0.0] * 3, 0
    for place, window in enumerate((ids[:20], ids[20:40], ids[40:])):
        with torch.inference_mode():
            logits = loaded.model(input_ids=torch.tensor([window])).logits[0].double().numpy()
        for row, token in zip(logits[:-1], window[1:], strict=True):
            losses[place] += math.log(np.exp(row - row.max()).sum()) + row.max() - row[token]
            count += 1
    found = models.evaluate(loaded, models.windows_of(loaded.opened, text.read_text(), 20, 50))
    assert found.tokens == count == 47
    assert found.losses == pytest.approx(losses, rel=1e-9)
    assert found.perplexity == pytest.approx(math.exp(sum(losses) / count), rel=1e-9)
    assert found.divergence is None


def test_divergence_is_what_numpy_computes(model: Path, text: Path) -> None:
    fine, coarse = (models.load(model, dtype="float32", exact=True, planes=p) for p in (None, 2))
    ids = torch.tensor([fine.tokenizer(text.read_text(), add_special_tokens=False)["input_ids"][:30]])
    with torch.inference_mode():
        p, q = (torch.softmax(m.model(input_ids=ids).logits[0, :-1].double(), -1).numpy() for m in (fine, coarse))
    apart = (p * np.log(p / q)).sum(-1)
    found = models.evaluate(coarse, models.windows_of(coarse.opened, text.read_text(), 30, 30), fine)
    assert found.divergence == pytest.approx(apart.mean(), rel=1e-6)
    assert found.largest_divergence == pytest.approx(apart.max(), rel=1e-6)
    assert found.top1 == (p.argmax(-1) == q.argmax(-1)).mean()
    assert found.divergence is not None
    assert found.divergence > 1e-6


def test_the_screen(run: Run, model: Path, text: Path) -> None:
    result = run("eval", model, "--text", text, "--context", "32", "--max-tokens", "64")
    assert result.exit_code == 0
    first, *rest = result.stdout.splitlines()
    assert first == str(model)
    assert [line.split()[0] for line in rest] == ["perplexity", "speed"]
    assert "over 62 tokens, windows of 32" in rest[0]


def test_bad_input(run: Run, model: Path, tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    (tmp_path / "short.txt").write_text("")
    for file, code, words in (
        (tmp_path / "none.txt", 3, "BCQ-E101"),
        (tmp_path / "latin.txt", 3, "byte 3 is no UTF-8"),
        (tmp_path / "short.txt", 2, "a text of 0 tokens"),
    ):
        result = run("eval", model, "--text", file, "--context", "32")
        assert result.exit_code == code
        assert words in result.stderr
    long = run("eval", model, "--text", tmp_path / "latin.txt", "--context", "1")
    assert long.exit_code == 2


def test_a_context_beyond_the_model_is_refused(run: Run, model: Path, text: Path) -> None:
    result = run("eval", model, "--text", text, "--context", "129")
    assert result.exit_code == 2
    assert "expected at most 128" in result.stderr
    assert "hint: --context" in result.stderr


def test_windows_are_no_longer_than_the_model_allows(run: Run, model: Path, text: Path) -> None:
    result = run("eval", model, "--text", text, "--max-tokens", "256", "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["context"] == 128
    assert f"windows of 128 tokens: {model} has positions for no more" in result.stderr


def test_a_reference_that_is_not_there(run: Run, model: Path, text: Path, tmp_path: Path) -> None:
    result = run("eval", model, "--text", text, "--reference", tmp_path / "nothing", "--context", "32")
    assert (result.exit_code, "BCQ-E101" in result.stderr) == (3, True)


def test_a_reference_without_a_tokenizer_is_refused(run: Run, model: Path, text: Path, tmp_path: Path) -> None:
    bare = bcq_model(tmp_path / "bare", dense_model(tmp_path / "dense"))
    result = run("eval", model, "--text", text, "--reference", bare, "--context", "32")
    assert result.exit_code == 3
    assert "BCQ-E102" in result.stderr


def test_a_cpu_gets_float32_unless_another_type_is_asked_for(model: Path) -> None:
    """Products of 16 bits can be many times slower even on a processor that torch says has instructions for them."""
    stored = json.loads((model / "config.json").read_text())["dtype"]
    assert stored in ("float16", "bfloat16")
    for folder in (model, model.parent / "dense"):
        assert models.load(folder).model.dtype == torch.float32
    assert models.load(model, dtype=stored).model.dtype == getattr(torch, stored)  # what is asked for is what is used


@pytest.mark.filterwarnings("error")
def test_bfloat16_says_nothing_but_the_figures(run: Run, model: Path, text: Path) -> None:
    """On ARM processors without bfloat16 torch would print a C++ trace."""
    result = run("eval", model, "--text", text, "--max-tokens", "64", "--context", "64", "--dtype", "bfloat16")
    assert result.exit_code == 0
    assert result.stderr == ""
    assert "perplexity" in result.stdout


def test_figures_that_json_has_no_number_for(
    run: Run, model: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = models.Figures(math.inf, 9, 1.0, [math.inf], 2.0, math.nan, math.nan, 0.5)
    monkeypatch.setattr(models, "evaluate", lambda *_args, **_options: figures)
    result = run("eval", model, "--text", text, "--context", "32", "--max-tokens", "10", "--json")
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert (found["perplexity"], found["losses"], found["reference_perplexity"]) == (None, [None], 2.0)
    assert found["divergence"] is found["largest_divergence"] is None


def test_a_model_and_a_reference_that_give_no_numbers(model: Path, text: Path) -> None:
    fine, broken = (models.load(model, dtype="float32") for _ in range(2))
    with torch.no_grad():
        next(broken.model.parameters()).fill_(math.nan)
    windows = models.windows_of(fine.opened, text.read_text(), 20, 50)
    for loaded, reference in ((broken, None), (fine, broken), (broken, fine)):
        with pytest.raises(BcqError, match=r"BCQ-E632 bcq: .*NaN in window 1"):
            models.evaluate(loaded, windows, reference)
