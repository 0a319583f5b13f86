"""No way of saving a BCQ model, a model inside it or a copy leads to a folder that says bcq and is none."""

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import bcqfmt
from bcqfmt.errors import BcqError
from bcqfmt.integrations.torch import load_linears
from sources.tiny_models import load, logits, quiet


def refused(model: Any, folder: Path) -> BcqError:
    with pytest.raises(BcqError) as caught:
        model.save_pretrained(folder)
    assert caught.value.code == "BCQ-E305"
    assert caught.value.hint
    assert not folder.exists()
    return caught.value


def hidden(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        found: torch.Tensor = model(input_ids=torch.arange(24)[None]).last_hidden_state
    return found


WAYS = {
    "attribute": lambda model: model.model,
    "base_model": lambda model: model.base_model,
    "get_decoder": lambda model: model.get_decoder(),
    "copy of the whole": lambda model: copy.deepcopy(model).model,
    "copy of the part": lambda model: copy.deepcopy(model.model),
    "pickle of the part": lambda model: pickle.loads(pickle.dumps(model.model)),
}


@pytest.mark.parametrize("way", WAYS)
def test_the_model_without_its_head_is_saved_as_bcq(llama: Path, tmp_path: Path, way: str) -> None:
    part = WAYS[way](load(llama))
    part.save_pretrained(tmp_path / "b")
    assert bcqfmt.validate(tmp_path / "b", deep=True).valid
    assert json.loads((tmp_path / "b" / "config.json").read_text())["architectures"] == ["LlamaModel"]
    with quiet():
        again, info = transformers.AutoModel.from_pretrained(tmp_path / "b", output_loading_info=True)
    assert not any(info.values()), info
    assert torch.equal(hidden(again), hidden(part))
    with bcqfmt.open(tmp_path / "b") as checkpoint:
        assert {name.split(".")[0] for name in checkpoint} == {"embed_tokens", "layers", "norm"}


def test_a_model_loaded_without_its_head_is_saved_under_the_same_names(llama: Path, tmp_path: Path) -> None:
    with quiet():
        part = transformers.AutoModel.from_pretrained(llama)
    part.save_pretrained(tmp_path / "b")
    load(llama).model.save_pretrained(tmp_path / "c")
    with bcqfmt.open(tmp_path / "b") as first, bcqfmt.open(tmp_path / "c") as second:
        assert sorted(first) == sorted(second)


def test_saving_a_part_leaves_the_whole_as_it_was(llama: Path, tmp_path: Path) -> None:
    model = load(llama)
    model.model.save_pretrained(tmp_path / "part")
    model.save_pretrained(tmp_path / "whole")
    assert json.loads((tmp_path / "whole" / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    assert torch.equal(logits(load(tmp_path / "whole")), logits(model))


def test_the_class_s_own_method_writes_bcq_too(llama: Path, tmp_path: Path) -> None:
    model = load(llama)
    transformers.PreTrainedModel.save_pretrained(model, tmp_path / "m")
    assert bcqfmt.validate(tmp_path / "m", deep=True).valid


def test_a_model_somewhere_inside_is_refused(llama: Path, tmp_path: Path) -> None:
    model = load(llama)
    model.model.tower = transformers.LlamaModel(model.config)  # as vision towers and text models are held
    bcqfmt.integrations.transformers.save.remember(model, llama)
    assert "a piece of a BCQ model" in str(refused(model.model.tower, tmp_path / "m"))


def test_a_new_model_with_the_configuration_of_a_quantized_one_is_refused(llama: Path, tmp_path: Path) -> None:
    for config in (load(llama).config, transformers.AutoConfig.from_pretrained(llama)):
        model = transformers.AutoModelForCausalLM.from_config(config)
        assert "without BCQ layers" in str(refused(model, tmp_path / "m"))
        del model.config.quantization_config
        with quiet():
            model.save_pretrained(tmp_path / "dense")
        assert "quantization_config" not in json.loads((tmp_path / "dense" / "config.json").read_text())


def test_a_dense_model_that_got_bcq_layers_is_refused(llama: Path, tmp_path: Path) -> None:
    with quiet():
        model = transformers.AutoModelForCausalLM.from_pretrained(llama.parent / "dense")
    with bcqfmt.open(llama) as checkpoint:
        load_linears(model, checkpoint)
    assert "tensors_of" in refused(model, tmp_path / "m").hint


def test_after_dequantize_every_part_is_saved_as_dense(llama: Path, tmp_path: Path) -> None:
    model = load(llama)
    model.dequantize()
    with quiet():
        model.model.save_pretrained(tmp_path / "b")
        model.save_pretrained(tmp_path / "m")
    for name in ("b", "m"):
        assert "quantization_config" not in json.loads((tmp_path / name / "config.json").read_text())


def test_config_tells_the_type_of_the_float_parts(llama: Path, tmp_path: Path) -> None:
    model = load(llama)
    model.to(torch.bfloat16)
    model.save_pretrained(tmp_path / "m")
    assert json.loads((tmp_path / "m" / "config.json").read_text())["dtype"] == "bfloat16"
    again = load(tmp_path / "m")
    assert again.dtype == torch.bfloat16
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in model.state_dict().items())


def test_a_model_that_is_not_in_memory_is_refused(llama: Path, tmp_path: Path) -> None:
    model = load(llama)
    model.model.norm.to("meta")  # as accelerate leaves what it put on disk
    assert "1 tensors that are not in memory" in str(refused(model, tmp_path / "m"))
