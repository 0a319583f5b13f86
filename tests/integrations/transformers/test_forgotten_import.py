"""Without our import transformers does not know the method: it must stop, not go on with random weights."""

import json
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM
from transformers.quantizers import auto

import bcqfmt.integrations.transformers as bridge
from sources.tiny_models import bcq_model, dense_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("models")
    return bcq_model(place / "bcq", dense_model(place / "dense"))


def test_it_stops_with_what_to_import(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(auto.AUTO_QUANTIZATION_CONFIG_MAPPING, "bcq")  # as without the import
    with pytest.raises(ValueError, match=r"import bcqfmt\.integrations\.transformers before from_pretrained"):
        AutoModelForCausalLM.from_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    del config["transformers_weights"]
    (folder / "config.json").write_text(json.dumps(config))
    model = AutoModelForCausalLM.from_pretrained(folder)  # what it did before: random weights and a warning
    assert not hasattr(model, "hf_quantizer")
    assert bridge.BcqQuantizer.update_tp_plan is bridge.BcqQuantizer.update_attn_implementation


def test_with_the_import_the_entry_is_taken_off_and_comes_back(folder: Path, tmp_path: Path) -> None:
    again = bcq_model(tmp_path / "bcq", dense_model(tmp_path / "dense"))
    model = AutoModelForCausalLM.from_pretrained(again)
    assert not hasattr(model.config, "transformers_weights")
    model.save_pretrained(tmp_path / "saved")
    assert "bcqfmt" in json.loads((tmp_path / "saved" / "config.json").read_text())["transformers_weights"]
