"""`bcqfmt generate` and `bcqfmt eval` on what they cannot use: the fault is named, and what to do about it."""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest

import bcqfmt
from programs.verbs import Run
from sources.tiny_models import bcq_model, dense_model, edit_config


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog")
    return path


def test_a_file_instead_of_its_folder(run: Run, model: Path) -> None:
    result = run("generate", model / "model.safetensors", "--prompt", "x")
    assert result.exit_code == 5
    assert "a BCQ file; expected a BCQ folder or a dense model's folder" in result.stderr
    words = f"bcqfmt generate {model} --prompt x"
    assert f"hint: it is part of a BCQ folder, name that: {words}\n" in result.stderr


@pytest.mark.parametrize("option", [["--seed", "3"], ["--seed", "0"], ["--top-k", "5"], ["--top-p", "0.9"]])
def test_what_is_about_drawing_needs_a_temperature(run: Run, model: Path, option: list[str]) -> None:
    for more in ([], ["--temperature", "0"]):
        result = run("generate", model, "--prompt", "x", *option, *more)
        assert (result.exit_code, "are about drawing: give a --temperature above 0" in result.stderr) == (2, True)


@pytest.mark.parametrize("content", ["{", "[]", '{"model_type": "nothing"}'])
def test_a_broken_configuration_is_not_taken_for_a_missing_tokenizer(
    run: Run, model: Path, text: Path, tmp_path: Path, content: str
) -> None:
    shutil.copytree(model.parent / "dense", tmp_path / "m")
    (tmp_path / "m" / "config.json").write_text(content)
    result = run("eval", model, "--text", text, "--context", "32", "--reference", tmp_path / "m")
    assert result.exit_code == 3
    assert "expected a config.json" in result.stderr
    assert "tokenizer" not in result.stderr


@pytest.mark.parametrize("words", [["generate", "--prompt", "x"], ["eval", "--tasks", "x"]])
def test_what_is_missing_is_found_before_torch_is_imported(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    bare = bcq_model(tmp_path / "bare", dense_model(tmp_path / "dense"))
    if words[0] == "eval":
        (bare / "tokenizer.json").touch()
        monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.setattr(f"bcqfmt.cli.verbs.{words[0]}.waiting", lambda doing: pytest.fail(doing))
    result = run(words[0], bare, *words[1:])
    missing = "no tokenizer files" if words[0] == "generate" else "lm_eval is not installed"
    assert (result.exit_code in (2, 3), missing in result.stderr) == (True, True)


@pytest.mark.parametrize("kind", ["llama", "qwen2"])  # of nothing transformers makes an empty tokenizer for qwen2
def test_a_reference_without_a_tokenizer(run: Run, model: Path, text: Path, tmp_path: Path, kind: str) -> None:
    bare = bcq_model(tmp_path / "bare", dense_model(tmp_path / "dense", kind))
    result = run("eval", model, "--text", text, "--reference", bare, "--context", "32")
    assert result.exit_code == 3
    assert "expected a tokenizer" in result.stderr
    assert "hint: copy the original model's tokenizer files" in result.stderr


def test_a_text_without_words(run: Run, model: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    result = run("eval", model, "--text", tmp_path / "empty.txt", "--context", "8")
    assert result.exit_code == 2
    assert "BCQ-E302 empty.txt: argument out of range: a text of 0 tokens; expected at least 2\n" in result.stderr
    assert "hint: give a longer text\n" in result.stderr


def test_texts_that_are_none(run: Run, model: Path, tmp_path: Path) -> None:
    folder = run("eval", model, "--text", tmp_path, "--context", "8")
    assert (folder.exit_code, "a folder; expected a UTF-8 text" in folder.stderr) == (2, True)
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    latin = run("eval", model, "--text", tmp_path / "latin.txt", "--context", "8")
    assert latin.exit_code == 3
    assert "hint: write it as UTF-8" in latin.stderr


@pytest.mark.parametrize("options", [["generate", "--prompt", "x"], ["eval", "--context", "8"]])
def test_more_planes_than_there_are(run: Run, model: Path, text: Path, options: list[str]) -> None:
    more = ["--text", text] if options[0] == "eval" else ["--max-new-tokens", "2"]
    verb, *rest = options
    result = run(verb, model, *rest, *more, "--planes", "5")
    assert result.exit_code == 2
    assert f"BCQ-E302 {model.name}: " in result.stderr
    assert "5 planes; expected at most 4" in result.stderr
    assert "hint: ask for up to 4 planes" in result.stderr
    assert run(verb, model, *rest, *more, "--planes", "4").exit_code == 0


def test_a_layer_too_many_is_no_random_text(run: Run, model: Path, text: Path, tmp_path: Path) -> None:
    with bcqfmt.open(model) as checkpoint:
        config = json.loads((model / "config.json").read_text())
        layers = config["num_hidden_layers"]
        config["num_hidden_layers"] = layers + 1
        files = {name: (model / name).read_bytes() for name in ("tokenizer.json", "tokenizer_config.json")}
        bcqfmt.save(tmp_path / "m", {n: checkpoint[n] for n in checkpoint}, config=config, files=files)
    result = run("generate", tmp_path / "m", "--prompt", "x", "--max-new-tokens", "2")
    assert result.exit_code == 4
    assert "BCQ-E602" in result.stderr
    assert f"model.layers.{layers}." in result.stderr
    assert result.stdout == ""
    shutil.copytree(model.parent / "dense", tmp_path / "dense")  # a reference that is not BCQ
    edit_config(tmp_path / "dense", num_hidden_layers=layers + 1)
    result = run("eval", model, "--text", text, "--context", "8", "--reference", tmp_path / "dense")
    assert (result.exit_code, f"model.layers.{layers}." in result.stderr) == (4, True)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "generation_config.json"])
def test_a_pipe_is_not_waited_for(run: Run, model: Path, text: Path, tmp_path: Path, name: str) -> None:
    folder = shutil.copytree(model.parent / "dense", tmp_path / "m")
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    for words in (["generate", folder, "--prompt", "x"], ["eval", folder, "--text", text]):
        made = run(*words)
        assert (made.exit_code, "BCQ-V508" in made.stderr) == (3, True), made.stderr


def test_a_configuration_that_is_nested_too_deeply(run: Run, model: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(model.parent / "dense", tmp_path / "m")
    (folder / "config.json").write_text("[" * 200_000)
    made = run("generate", folder, "--prompt", "x")
    assert (made.exit_code, "expected a config.json" in made.stderr) == (3, True), made.stderr
