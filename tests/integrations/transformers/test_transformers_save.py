"""``save_pretrained`` of a BCQ model: a complete BCQ folder or nothing."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

import bcqfmt
from bcqfmt.errors import BcqError
from bcqfmt.integrations.transformers import save as transformers_save
from sources.conversions import convert, tree
from sources.peers import WITH_TOKENIZER
from sources.tiny_models import load, logits


def test_a_converted_checkpoint_of_another_tool_comes_back_with_the_same_weights(tmp_path: Path) -> None:
    convert(WITH_TOKENIZER, tmp_path / "bcq")
    model = load(tmp_path / "bcq")
    model.save_pretrained(tmp_path / "again")
    assert bcqfmt.validate(tmp_path / "again", deep=True).valid
    with bcqfmt.open(tmp_path / "bcq") as first, bcqfmt.open(tmp_path / "again") as second:
        assert {n: weight.digest() for n, weight in first.weights()} == {
            n: weight.digest() for n, weight in second.weights()
        }
        assert first.features == second.features
    before, after = tree(tmp_path / "bcq"), tree(tmp_path / "again")
    assert before["tokenizer.json"] == after["tokenizer.json"]
    assert not any(name.startswith("bcq_source") for name in after)  # a saved model proves nothing about a source
    assert torch.equal(logits(load(tmp_path / "again"), rows=1), logits(model, rows=1))


def test_saving_twice_gives_the_same_bytes(llama: Path, tmp_path: Path) -> None:
    model = load(llama)
    model.save_pretrained(tmp_path / "one")
    first = tree(tmp_path / "one")
    model.save_pretrained(str(tmp_path / "one"))  # over itself
    assert tree(tmp_path / "one") == first
    load(tmp_path / "one").save_pretrained(tmp_path / "two")
    assert tree(tmp_path / "two") == first


def test_config_says_what_it_is(llama: Path, tmp_path: Path) -> None:
    load(llama).save_pretrained(tmp_path / "m")
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "bcq"
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["dtype"] == "float16"


def test_a_tokenizer_can_be_given(llama: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(WITH_TOKENIZER)
    load(llama).save_pretrained(tmp_path / "m", tokenizer=tokenizer)
    assert bcqfmt.validate(tmp_path / "m", deep=True).valid
    assert AutoTokenizer.from_pretrained(tmp_path / "m")("a b")["input_ids"] == tokenizer("a b")["input_ids"]


def test_nothing_is_left_when_writing_fails(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(llama)

    def fails(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("bcqfmt.checkpoint.writer.write_file", fails)
    with pytest.raises(OSError, match="No space left"):
        model.save_pretrained(tmp_path / "m")
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_no_checkpoint_is_not_replaced(llama: Path, tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "thesis.txt").write_text("years of work")
    with pytest.raises(BcqError) as caught:
        load(llama).save_pretrained(tmp_path / "m")
    assert caught.value.code == "BCQ-E401"
    assert (tmp_path / "m" / "thesis.txt").read_text() == "years of work"


@pytest.mark.parametrize("options", [{"push_to_hub": True}, {"state_dict": {}}, {"variant": "x"}])
def test_what_it_cannot_do_is_refused(llama: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(BcqError) as caught:
        load(llama).save_pretrained(tmp_path / "m", **options)
    assert caught.value.code == "BCQ-E302"
    assert next(iter(options)) in str(caught.value)
    assert not (tmp_path / "m").exists()


def test_only_the_main_process_writes(llama: Path, tmp_path: Path) -> None:
    load(llama).save_pretrained(tmp_path / "m", is_main_process=False)
    assert not (tmp_path / "m").exists()


@pytest.mark.parametrize(
    ("text", "value"), [(7, 7), ("7", 7), ("7B", 7), ("2KB", 2000), ("1 MiB", 1 << 20), ("5gb", 5 * 10**9)]
)
def test_sizes(text: int | str, value: int) -> None:
    assert transformers_save._bytes(text) == value


@pytest.mark.parametrize("text", ["", "GB", "-1", "5XB", "1.5GB"])
def test_wrong_sizes(text: str) -> None:
    with pytest.raises(BcqError):
        transformers_save._bytes(text)
