"""`bcqfmt generate`: text, the same every time, and clear words when something is missing."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from bcqfmt.cli import options
from bcqfmt.kernels.runtime import device
from programs.verbs import Run
from sources.peers import WITH_TOKENIZER

PROMPT = "abc"


def test_it_prints_the_prompt_and_what_follows(run: Run, model: Path) -> None:
    first = run("generate", model, "--prompt", PROMPT, "--max-new-tokens", "8", "--dtype", "float32")
    assert first.exit_code == 0, first.stderr
    assert first.stdout.startswith(PROMPT)
    assert "8 tokens in " in first.stderr
    again = run("generate", model, "--prompt", PROMPT, "--max-new-tokens", "8", "--dtype", "float32")
    assert again.stdout == first.stdout


def test_exact_text_is_the_text_of_the_dense_export(run: Run, model: Path) -> None:
    from bcqfmt.integrations.transformers import generation
    from bcqfmt.integrations.transformers import run as models

    result = run("generate", model, "--prompt", PROMPT, "--max-new-tokens", "12", "--exact", "--json")
    value = json.loads(result.stdout)
    assert result.exit_code == 0
    dense = models.load(model.parent / "dense")
    text, tokens, _ = generation.generate(dense, PROMPT, most=12)
    assert (value["text"], value["tokens"]) == (text, tokens)
    assert value["prompt"] == PROMPT


def test_what_it_is_not_given_or_cannot_do(run: Run, model: Path, tmp_path: Path) -> None:
    assert run("generate", model).exit_code == 2  # no prompt
    missing = run("generate", tmp_path / "nothing", "--prompt", "x")
    assert (missing.exit_code, "BCQ-E101" in missing.stderr) == (3, True)
    foreign = run("generate", WITH_TOKENIZER, "--prompt", "x")
    assert (foreign.exit_code, "BCQ-V201" in foreign.stderr) == (5, True)
    empty = run("generate", model, "--prompt", "")
    assert (empty.exit_code, "a prompt without tokens" in empty.stderr) == (2, True)
    long = run("generate", model, "--prompt", PROMPT, "--max-new-tokens", "4000")
    assert (long.exit_code, "expected at most 128" in long.stderr) == (2, True)


def test_a_folder_without_a_tokenizer_is_told_so(run: Run, model: Path, tmp_path: Path) -> None:
    shutil.copytree(model, tmp_path / "m")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "m" / name).unlink()
    result = run("generate", tmp_path / "m", "--prompt", PROMPT)
    assert result.exit_code == 3
    assert "BCQ-E102" in result.stderr
    assert "expected a tokenizer" in result.stderr
    assert "hint: copy the original model's tokenizer files" in result.stderr


@pytest.mark.parametrize("name", ["generate", "eval"])
def test_without_the_extra_it_says_what_to_install(
    run: Run, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    (tmp_path / "text.txt").write_text("abc")
    options = ["--prompt", "x"] if name == "generate" else ["--text", tmp_path / "text.txt", "--context", "8"]
    result = run(name, model, *options)
    assert result.exit_code == 2
    assert "BCQ-E306" in result.stderr
    assert "pip install 'torch>=2.4' 'transformers>=5.16'" in result.stderr


def test_without_torch_it_says_so_too(model: Path) -> None:
    code = "import sys; sys.modules['torch'] = None; from bcqfmt.cli.main import main; main()"
    command = [sys.executable, "-c", code, "generate", str(model), "--prompt", "x"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 2
    assert "BCQ-E306: package missing or not usable: torch is not installed" in done.stderr
    assert "pip install 'torch>=2.4' 'transformers>=5.16'" in done.stderr


@pytest.mark.parametrize("name", ["generate", "eval"])
def test_devices(run: Run, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    (tmp_path / "text.txt").write_text("abcabc")
    options: list[object] = ["--prompt", PROMPT, "--max-new-tokens", "2"]
    if name == "eval":
        options = ["--text", tmp_path / "text.txt", "--context", "8"]
    assert run(name, model, *options, "--device", "cpu").exit_code == 0
    for wrong in ("gpu", "cuda:", "cuda:one", "meta", "cpu:0"):
        refused = run(name, model, *options, "--device", wrong)
        assert (refused.exit_code, "cpu, cuda or cuda:N" in refused.stderr) == (2, True)
    monkeypatch.setattr(device, "_trouble", lambda: ("BCQ-E551", "no GPU here", None))
    none = run(name, model, *options, "--device", "cuda")
    assert (none.exit_code, "BCQ-E551" in none.stderr) == (5, True)
    monkeypatch.setattr(device, "_trouble", lambda: None)
    fewer = run(name, model, *options, "--device", "cuda:99")  # torch knows better than a glance at the machine
    assert (fewer.exit_code, "torch cannot use cuda:99" in fewer.stderr) == (5, True)


def test_types_are_those_of_torch() -> None:
    import torch

    assert all(isinstance(getattr(torch, name), torch.dtype) for name in options._DTYPES if name != "auto")


@pytest.mark.parametrize("name", ["generate", "eval"])
def test_it_says_that_a_kernel_is_compiled(
    run: Run, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Which takes a minute in which nothing else is to be seen; on stdout there is the text alone."""
    from bcqfmt.integrations.transformers import run as models
    from bcqfmt.kernels.runtime import cubins, launch

    monkeypatch.setenv("BCQFMT_CACHE", str(tmp_path / "kept"))
    monkeypatch.setattr(cubins, "_linked", lambda text, capability: b"code")
    monkeypatch.setattr(launch.Kernel, "compile", lambda kernel, capability: ".entry some(")
    real = models.load

    def load(*arguments: Any, **options: Any) -> Any:
        cubins.code_of(launch.kernel("u32* x", threads=32)(load), (9, 0))
        return real(*arguments, **options)

    monkeypatch.setattr(models, "load", load)
    (tmp_path / "text.txt").write_text("abc abc abc abc")
    text = ["--text", tmp_path / "text.txt", "--context", "8"]
    result = run(name, model, *(["--prompt", PROMPT, "--max-new-tokens", "2"] if name == "generate" else text))
    assert result.exit_code == 0, result.stderr
    assert f"compiling load for this GPU, once, up to a minute, to {tmp_path / 'kept'}" in result.stderr
    assert "compiling" not in result.stdout


@pytest.mark.parametrize(
    "settings",
    [{"num_beams": 4}, {"repetition_penalty": 1.5}, {"no_repeat_ngram_size": 1}, {"return_dict_in_generate": True}],
)
def test_settings_of_the_model_change_nothing(run: Run, model: Path, tmp_path: Path, settings: dict[str, Any]) -> None:
    other = tmp_path / "model"
    shutil.copytree(model, other)
    (other / "generation_config.json").write_text(json.dumps(settings))
    options = ("--prompt", PROMPT, "--max-new-tokens", "24", "--dtype", "float32")
    found, expected = run("generate", other, *options), run("generate", model, *options)
    assert (found.exit_code, found.stdout) == (0, expected.stdout), found.stderr


@pytest.mark.parametrize("drawn", [[], ["--temperature", "0.8"]])
@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_a_model_that_gives_no_numbers(run: Run, model: Path, tmp_path: Path, wrong: float, drawn: list[str]) -> None:
    shutil.copytree(model.parent / "dense", tmp_path / "model")
    (file,) = (tmp_path / "model").glob("*.safetensors")
    tensors = load_file(file)
    tensors["model.norm.weight"][3] = wrong
    save_file(tensors, file, {"format": "pt"})
    result = run("generate", tmp_path / "model", "--prompt", PROMPT, *drawn)
    assert result.exit_code == 4
    assert f"BCQ-E632 model: model gives NaN or infinity: {wrong} among the scores of token 1\nhint: i" in result.stderr
    half = run("generate", tmp_path / "model", "--prompt", PROMPT, *drawn, "--dtype", "float16")
    assert "hint: float16 ends at 65504: try --dtype bfloat16 or float32" in half.stderr


def test_no_more_numbers_after_some_tokens(run: Run, model: Path, tmp_path: Path) -> None:
    """The message has a line of its own, under what was written; the model is named where its path is a point."""
    words = ("--prompt", PROMPT, "--max-new-tokens", "8", "--dtype", "float32")
    shutil.copytree(model.parent / "dense", tmp_path / "model")
    (file,) = (tmp_path / "model").glob("*.safetensors")
    from bcqfmt.integrations.transformers import run as models

    text = run("generate", tmp_path / "model", *words).stdout.removeprefix(PROMPT)
    ids = models.open_folder(tmp_path / "model").tokenizer(text)["input_ids"]
    tensors = load_file(file)
    embedding = tensors["model.embed_tokens.weight"]
    tensors.setdefault("lm_head.weight", embedding.clone())
    embedding[ids[2]] = float("nan")
    save_file(tensors, file, {"format": "pt"})
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    result = run("generate", tmp_path / "model" / ".." / "model" / ".", *words)
    assert result.exit_code == 4
    assert "BCQ-E632 model: model gives NaN or infinity: nan among the scores of token " in result.stderr
    assert result.stdout.startswith(PROMPT)
    assert result.stdout.endswith("\n")
    assert (PROMPT + text).startswith(result.stdout.rstrip("\n"))
    asked = run("generate", tmp_path / "model", *words, "--json")
    assert (asked.exit_code, json.loads(asked.stdout)["error"]["code"]) == (4, "BCQ-E632")


@pytest.mark.parametrize("option", ["--prompt", "--system"])
def test_bytes_that_are_no_text(run: Run, model: Path, option: str) -> None:
    result = run("generate", model, "--prompt", PROMPT, "--chat", option, "caf\udce9")
    assert (result.exit_code, f"{option} is not UTF-8" in result.stderr) == (2, True)


@pytest.mark.parametrize("option", ["--temperature", "--top-p"])
def test_nan_is_no_number(run: Run, model: Path, option: str) -> None:
    result = run("generate", model, "--prompt", PROMPT, option, "nan")
    assert (result.exit_code, "nan is not a number" in result.stderr) == (2, True)
