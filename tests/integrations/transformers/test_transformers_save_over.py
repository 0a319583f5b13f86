"""Saving into a folder that is there already: nobody's files are lost."""

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

import bcqfmt
from bcqfmt.errors import BcqError
from sources.peers import WITH_TOKENIZER
from sources.tiny_models import bcq_model, dense_model, load


@pytest.fixture(scope="module")
def model(llama: Path) -> Any:
    return load(llama)


def refused(model: Any, folder: Path, *names: str) -> None:
    before = _all(folder)
    with pytest.raises(BcqError) as caught:
        model.save_pretrained(folder)
    assert caught.value.code == "BCQ-E401"
    assert "new folder" in caught.value.hint
    for name in names:
        assert name in str(caught.value)
    assert _all(folder) == before
    assert [path.name for path in folder.parent.iterdir() if path.name.endswith((".partial", ".old"))] == []


def _all(folder: Path) -> dict[str, bytes]:
    """Hidden files too."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_dense_model_is_not_replaced(model: Any, tmp_path: Path) -> None:
    refused(model, dense_model(tmp_path / "m"), "config.json", "model.safetensors")


@pytest.mark.parametrize(
    "name", ["checkpoint-500/model.safetensors", "adapter_model.safetensors", ".git/HEAD", ".gitattributes"]
)
def test_what_cannot_be_kept_is_not_deleted(model: Any, tmp_path: Path, name: str) -> None:
    model.save_pretrained(tmp_path / "m")
    (tmp_path / "m" / name).parent.mkdir(exist_ok=True)
    (tmp_path / "m" / name).write_text("hours of work")
    refused(model, tmp_path / "m", name)


def test_links_are_not_followed(model: Any, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path / "m")
    (tmp_path / "far").mkdir()
    (tmp_path / "far" / "data.txt").write_text("a")
    (tmp_path / "m" / "data").symlink_to(tmp_path / "far")
    refused(model, tmp_path / "m", "data")


def test_model_tokenizer_and_again(model: Any, tmp_path: Path) -> None:
    folder = tmp_path / "m"
    tokenizer = AutoTokenizer.from_pretrained(WITH_TOKENIZER)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "training_args.bin").write_bytes(b"\x80\x02")
    (folder / "README.md").write_text("a card")
    beside = {name: data for name, data in _all(folder).items() if "tokenizer" in name} | {
        "training_args.bin": b"\x80\x02",
        "README.md": b"a card",
    }
    for _ in range(3):  # what was kept once is kept again
        model.save_pretrained(folder)
        assert beside.items() <= _all(folder).items()
        assert bcqfmt.validate(folder, deep=True).valid
    assert len(beside) > 3
    assert AutoTokenizer.from_pretrained(folder)("a b")["input_ids"] == tokenizer("a b")["input_ids"]


def test_what_the_user_changed_beside_the_model_wins_over_the_source(llama: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    load(llama).save_pretrained(source, tokenizer=AutoTokenizer.from_pretrained(WITH_TOKENIZER))
    model = load(source)
    model.save_pretrained(tmp_path / "m")
    (tmp_path / "m" / "tokenizer.json").write_text("{}")
    model.save_pretrained(tmp_path / "m")
    model.save_pretrained(tmp_path / "m")
    assert (tmp_path / "m" / "tokenizer.json").read_text() == "{}"
    assert bcqfmt.validate(tmp_path / "m", deep=True).valid


def test_another_model_s_folder_is_replaced_whole_or_not_at_all(model: Any, tmp_path: Path) -> None:
    other = load(bcq_model(tmp_path / "other", dense_model(tmp_path / "dense", "qwen2")))
    folder = tmp_path / "m"
    other.save_pretrained(folder, tokenizer=AutoTokenizer.from_pretrained(WITH_TOKENIZER))
    (folder / "notes.txt").write_text("about it")
    refused(model, folder, "notes.txt")
    (folder / "notes.txt").unlink()
    held = (folder / "tokenizer.json").read_bytes()
    (folder / "tokenizer.json").write_bytes(held + b"\n")
    refused(model, folder, "tokenizer.json")
    (folder / "tokenizer.json").write_bytes(held)
    model.save_pretrained(folder)  # nothing of the other one stays: its tokenizer would be wrong here
    assert not any("tokenizer" in name for name in _all(folder))
    assert bcqfmt.validate(folder, deep=True).valid


def test_a_folder_with_a_broken_manifest_is_nobody_s_to_replace(model: Any, tmp_path: Path) -> None:
    model.save_pretrained(tmp_path / "m")
    (tmp_path / "m" / "bcq_manifest.json").write_text("{}")
    refused(model, tmp_path / "m", "bcq_manifest.json", "model.safetensors")


def test_an_empty_folder_is_taken(model: Any, tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    model.save_pretrained(tmp_path / "m")
    assert bcqfmt.validate(tmp_path / "m", deep=True).valid
