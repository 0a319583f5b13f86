"""A checkpoint that lacks tensors of its model is refused; what transformers makes up for rightly is not."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import bcqfmt
from bcqfmt.errors import BcqError
from sources.tiny_models import bcq_model, dense_model, load, logits, quiet


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("qwen")
    return bcq_model(place / "bcq", dense_model(place / "dense", "qwen2"))


def without(folder: Path, source: Path, word: str = "nothing", **config: Any) -> Path:
    """A valid BCQ folder of another's tensors, those with a word in their names left out."""
    with bcqfmt.open(source) as checkpoint:
        tensors = {name: checkpoint[name] for name in checkpoint if word not in name}
        bcqfmt.save(folder, tensors, config={**json.loads((source / "config.json").read_text()), **config})
    assert bcqfmt.validate(folder, deep=True).valid
    return folder


def refused(folder: Path, *words: str) -> None:
    with pytest.raises(BcqError) as caught:
        load(folder)
    assert caught.value.code == "BCQ-E602"
    assert "config.json" in caught.value.hint
    for word in words:
        assert word in str(caught.value)


def test_a_layer_too_many_in_the_configuration(qwen: Path, tmp_path: Path) -> None:
    types = {"layer_types": ["full_attention"] * 3}
    folder = without(tmp_path / "m", qwen, num_hidden_layers=3, **types)
    refused(folder, "model.layers.2.", "12 tensors of the model are not in the files")


def test_biases_that_are_not_there(qwen: Path, tmp_path: Path) -> None:
    refused(without(tmp_path / "m", qwen, ".bias"), "6 tensors", "model.layers.0.self_attn.k_proj.bias")


@pytest.mark.parametrize("word", ["layers.1.mlp.up_proj.weight", "model.norm.weight", "embed_tokens", "lm_head"])
def test_any_one_tensor(qwen: Path, tmp_path: Path, word: str) -> None:
    refused(without(tmp_path / "m", qwen, word), "1 tensors", word)


def test_a_base_model_is_refused_for_lack_of_a_norm(qwen: Path, tmp_path: Path) -> None:
    folder = without(tmp_path / "m", qwen, "model.norm.weight")
    with pytest.raises(BcqError) as caught, quiet():
        transformers.AutoModel.from_pretrained(folder)
    assert caught.value.code == "BCQ-E602"


def test_tied_weights_are_not_missing(tmp_path: Path) -> None:
    bcq = bcq_model(tmp_path / "bcq", dense_model(tmp_path / "dense", "qwen2", tie_word_embeddings=True))
    with bcqfmt.open(bcq) as checkpoint:
        assert "lm_head.weight" not in checkpoint
    assert logits(load(bcq)).isfinite().all()


def test_what_a_model_says_may_be_missing_may_be(qwen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = without(tmp_path / "m", qwen, "model.norm.weight")
    monkeypatch.setattr(transformers.Qwen2ForCausalLM, "_keys_to_ignore_on_load_missing", [r"model\.norm"])
    assert torch.equal(load(folder).model.norm.weight, torch.ones(64, dtype=torch.float16))


def test_another_class_may_have_a_new_head_but_nothing_else(qwen: Path, tmp_path: Path) -> None:
    kind = transformers.AutoModelForSequenceClassification
    with quiet():
        model, info = kind.from_pretrained(qwen, num_labels=2, output_loading_info=True)
        assert info["missing_keys"] == {"score.weight"}
        assert model.score.weight.isfinite().all()
        with pytest.raises(BcqError) as caught:
            kind.from_pretrained(without(tmp_path / "m", qwen, ".bias"), num_labels=2)
    assert caught.value.code == "BCQ-E602"
    assert "score" not in str(caught.value)


def test_nothing_of_the_check_stays_in_the_model(qwen: Path) -> None:
    assert "_adjust_missing_and_unexpected_keys" not in vars(load(qwen))
