"""`bcqfmt export`: what it says, and how it ends."""

import json
from pathlib import Path

import pytest

import bcqfmt
from bcqfmt.cli.verbs import export as verb
from bcqfmt.converters.export import TARGETS
from verbs import DOWN, NORM, UP, Run, affine, tensors


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    path = tmp_path / "plain"
    bcqfmt.save(path, {UP: affine(), NORM: tensors()[NORM]}, config={"model_type": "test"})
    return path


def test_the_verb_and_the_exporter_offer_the_same_layouts() -> None:
    assert verb._TARGETS == TARGETS


def test_it_says_what_it_wrote_and_why(run: Run, plain: Path, tmp_path: Path) -> None:
    result = run("export", plain, tmp_path / "out", "--to", "gptq")
    assert result.exit_code == 0
    first, *notes = result.stdout.splitlines()
    assert first.startswith(f"{tmp_path / 'out'}: gptq_v2; 1 weight, 1 other tensor, 1 model file, ")
    assert notes == ["  zero points: gptq_v2, because the weight is asymmetric, which GPTQModel refuses in gptq"]
    assert (tmp_path / "out" / "quantize_config.json").is_file()


def test_json(run: Run, plain: Path, tmp_path: Path) -> None:
    result = run("export", plain, tmp_path / "out", "--to", "compressed-tensors", "--json")
    assert result.exit_code == 0
    value = json.loads(result.stdout)
    assert (value["format"], value["weights"], value["dense"]) == ("compressed-tensors", 1, 1)
    assert value["files"] == ["model.safetensors"]
    assert value["bytes"] == (tmp_path / "out" / "model.safetensors").stat().st_size


def test_dense_works_for_everything(run: Run, folder: Path, tmp_path: Path) -> None:
    result = run("export", folder, tmp_path / "out", "--to", "dense", "--dtype", "bfloat16", "--max-shard-size", "1KB")
    assert result.exit_code == 0
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == 3


def test_a_refusal_names_the_weight_and_the_reason(run: Run, folder: Path, tmp_path: Path) -> None:
    result = run("export", folder, tmp_path / "out", "--to", "awq", "--json")
    assert result.exit_code == 5
    assert "error: BCQ-E616" in result.stderr
    assert "encoding bcq" in result.stderr
    assert "hint: export --to dense always works" in result.stderr
    assert json.loads(result.stdout)["error"]["tensor"] == DOWN
    assert not (tmp_path / "out").exists()


def test_a_folder_that_is_there_is_kept_unless_told_otherwise(run: Run, plain: Path, tmp_path: Path) -> None:
    assert run("export", plain, tmp_path / "out", "--to", "dense").exit_code == 0
    assert run("export", plain, tmp_path / "out", "--to", "awq").exit_code == 7
    assert run("export", plain, tmp_path / "out", "--to", "awq", "--overwrite").exit_code == 0


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--to", "gguf"],
        ["--to", "gptq", "--dtype", "float16"],
        ["--to", "dense", "--dtype", "int8"],
        ["--to", "dense", "--max-shard-size", "big"],
        ["--to", "dense", "--max-shard-size", "0"],
    ],
)
def test_usage(run: Run, plain: Path, tmp_path: Path, arguments: list[str]) -> None:
    result = run("export", plain, tmp_path / "out", *arguments)
    assert result.exit_code == 2
    assert "error:" in result.stderr
    assert not (tmp_path / "out").exists()


def test_what_is_no_checkpoint(run: Run, tmp_path: Path, gptq: Path) -> None:
    assert run("export", tmp_path / "none", tmp_path / "out", "--to", "dense").exit_code == 3
    assert run("export", gptq, tmp_path / "out", "--to", "dense").exit_code == 5
