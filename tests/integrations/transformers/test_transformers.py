"""BCQ folders in transformers: loading, exactness, types, names, refusals."""

import copy
import io
import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import bcqfmt
from bcqfmt.errors import BcqError
from bcqfmt.integrations.torch.layers import BcqLinear, BcqModule
from bcqfmt.integrations.transformers import BcqConfig, set_mode
from programs.verbs import affine
from sources.tiny_models import as_dense, bcq_model, dense_model, load, logits

Q_PROJ = "model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def llama_dense(llama: Path) -> Path:
    return as_dense(llama.parent / "exact", llama)


def equal(a: torch.Tensor, b: torch.Tensor) -> None:
    assert a.dtype == b.dtype
    assert torch.isfinite(a).all()
    assert torch.equal(a, b)


def test_every_quantized_weight_is_a_layer_and_holds_the_bytes_of_the_file(llama: Path) -> None:
    model = load(llama)
    with bcqfmt.open(llama) as checkpoint:
        found = {f"{path}.weight" for path, module in model.named_modules() if isinstance(module, BcqModule)}
        assert found == {name for name, _ in checkpoint.weights()}
        for name, weight in checkpoint.weights():
            assert model.get_submodule(name.removesuffix(".weight")).to_weight(name).digest() == weight.digest()
        for name, tensor in checkpoint.dense():
            assert np.array_equal(model.state_dict()[name].numpy(), tensor.array())
    assert not any(parameter.numel() for name, parameter in model.named_parameters() if "_proj" in name)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_exact_logits_are_those_of_the_dense_export_bit_for_bit(llama: Path, llama_dense: Path, dtype: str) -> None:
    model = load(llama, dtype=dtype)
    set_mode(model, exact=True)
    equal(logits(model), logits(load(llama_dense, dtype=dtype)))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_kernels_agree_with_the_dense_export(llama: Path, llama_dense: Path, dtype: str) -> None:
    p = torch.log_softmax(logits(load(llama_dense, dtype=dtype)).double(), -1)
    for length, rows in ((24, 2), (3, 1)):  # many vectors, and few
        q = torch.log_softmax(logits(load(llama, dtype=dtype), length, rows).double(), -1)
        p = torch.log_softmax(logits(load(llama_dense, dtype=dtype), length, rows).double(), -1)
        assert float((p.exp() * (p - q)).sum(-1).mean()) <= 1e-4
        assert float((p - q).abs().max()) < 0.1


def test_it_generates_what_the_dense_export_generates(llama: Path, llama_dense: Path) -> None:
    ids = torch.tensor([[1, 5, 9]])
    found = []
    for model in (load(llama), load(llama_dense)):
        set_mode(model, exact=True)
        found.append(model.generate(ids, max_new_tokens=12, min_new_tokens=12, do_sample=False, pad_token_id=0))
    assert found[0].shape == (1, 15)
    assert torch.equal(*found)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_parts_keep_their_types_and_the_rest_takes_the_asked_one(llama: Path, dtype: str) -> None:
    model = load(llama, dtype=dtype)
    layer = model.get_submodule(Q_PROJ)
    with bcqfmt.open(llama) as checkpoint:
        stored = checkpoint.weight(f"{Q_PROJ}.weight").parts()
    kinds = {suffix: part.dtype for suffix, part in stored.items()}
    names = {torch.int32: "I32", torch.uint8: "U8", torch.uint16: "U16", torch.float16: "F16"}
    assert {name.removeprefix("bcq_"): names[part.dtype] for name, part in layer.named_buffers()} == kinds
    assert "F16" in kinds.values()
    assert model.model.norm.weight.dtype == model.dtype == getattr(torch, dtype)


def test_biases_of_the_model_are_loaded(tmp_path: Path) -> None:
    bcq = bcq_model(tmp_path / "bcq", dense_model(tmp_path / "dense", "qwen2", "bfloat16"))
    model = load(bcq)
    bias = model.get_submodule(Q_PROJ).bias
    assert bias.dtype == torch.bfloat16
    assert bool(bias.any())
    set_mode(model, exact=True)
    equal(logits(model), logits(load(as_dense(tmp_path / "exact", bcq))))


def test_tied_embeddings_stay_tied(tmp_path: Path) -> None:
    bcq = bcq_model(tmp_path / "bcq", dense_model(tmp_path / "dense", tie_word_embeddings=True))
    model = load(bcq)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    set_mode(model, exact=True)
    equal(logits(model), logits(load(as_dense(tmp_path / "exact", bcq))))
    model.save_pretrained(tmp_path / "again")
    with bcqfmt.open(tmp_path / "again") as checkpoint:
        assert "lm_head.weight" not in checkpoint
        assert "model.embed_tokens.weight" in checkpoint


@pytest.mark.parametrize("tied", [False, True])
def test_a_quantized_head(tmp_path: Path, tied: bool) -> None:
    bcq = bcq_model(tmp_path / "bcq", dense_model(tmp_path / "dense"), include=("lm_head",))
    if tied:  # the configuration claims it, the checkpoint has a head of its own: the checkpoint counts
        with bcqfmt.open(bcq) as checkpoint:
            config = json.loads((bcq / "config.json").read_text()) | {"tie_word_embeddings": True}
            bcqfmt.save(tmp_path / "tied", {name: checkpoint[name] for name in checkpoint}, config=config)
    model = load(tmp_path / "tied" if tied else bcq)
    assert isinstance(model.lm_head, BcqLinear)
    set_mode(model, exact=True)
    equal(logits(model), logits(load(as_dense(tmp_path / "exact", bcq))))


def test_sharded_files(tmp_path: Path, llama: Path) -> None:
    whole = load(llama)
    whole.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    assert len(list((tmp_path / "shards").glob("model-*-of-*.safetensors"))) > 3
    assert bcqfmt.validate(tmp_path / "shards", deep=True).valid
    equal(logits(load(tmp_path / "shards")), logits(whole))


def test_few_planes(llama: Path) -> None:
    model = load(llama, dtype="float32")
    full = logits(model)
    for planes in (0, -2, 5, 9):  # its weights have four
        with pytest.raises(BcqError) as caught:
            set_mode(model, planes=planes)
        assert caught.value.code == "BCQ-E302"
        assert f"{planes} planes" in str(caught.value)
    for planes in ("2", 2.5):
        with pytest.raises(BcqError, match=r"BCQ-E302 'planes'"):
            set_mode(model, planes=planes)
    equal(logits(model), full)
    set_mode(model, exact=True, planes=2)
    coarse = logits(model)
    with bcqfmt.open(llama) as checkpoint:
        for name, weight in checkpoint.weights():
            layer = model.get_submodule(name.removesuffix(".weight"))
            assert np.array_equal(layer.values().numpy(), weight.dequantize(planes=2))
    assert not torch.allclose(coarse, full)
    set_mode(model, exact=False, planes=None)
    equal(logits(model), full)


def test_few_planes_of_a_model_without_bcq_layers(llama: Path) -> None:
    model = load(llama)
    model.dequantize()
    with pytest.raises(BcqError) as caught:
        set_mode(model, planes=2)
    assert caught.value.code == "BCQ-E302"
    assert "from_pretrained" in caught.value.hint
    set_mode(model, exact=True, planes=None)  # what such a model does anyway


def test_copies_and_pickles_compute_the_same_and_save_as_bcq(llama: Path, tmp_path: Path) -> None:
    model = load(llama)
    file = io.BytesIO()
    pickle.dump(model, file)
    file.seek(0)
    for number, other in enumerate((copy.deepcopy(model), pickle.load(file))):
        equal(logits(other), logits(model))
        other.save_pretrained(tmp_path / str(number))
        assert bcqfmt.validate(tmp_path / str(number), deep=True).valid


def test_dequantize_gives_the_dense_model(llama: Path, llama_dense: Path, tmp_path: Path) -> None:
    model = load(llama)
    model.dequantize()
    assert not any(isinstance(module, BcqModule) for module in model.modules())
    dense = load(llama_dense)
    assert model.state_dict().keys() == dense.state_dict().keys()
    for name, tensor in dense.state_dict().items():
        equal(model.state_dict()[name], tensor)
    equal(logits(model), logits(dense))
    model.save_pretrained(tmp_path / "dense")
    assert "quantization_config" not in json.loads((tmp_path / "dense" / "config.json").read_text())
    equal(logits(load(tmp_path / "dense")), logits(dense))


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_dequantize_to_another_type(tmp_path: Path, kind: str) -> None:
    bcq = bcq_model(tmp_path / "bcq", dense_model(tmp_path / "dense", kind))
    exact = as_dense(tmp_path / "exact", bcq)
    for dtype in (torch.float32, torch.bfloat16):
        model = load(bcq).dequantize(dtype)
        assert {parameter.dtype for parameter in model.parameters()} == {dtype}
        equal(logits(model), logits(load(exact, dtype=dtype)))
    model = load(bcq, dtype=torch.float32)
    model.to(torch.bfloat16)
    model.dequantize()  # to the type that it has, not the one that it was loaded in
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_gradients_pass_through(llama: Path) -> None:
    model = load(llama, dtype="float32")
    embedded = torch.randn(1, 5, 64, requires_grad=True)
    model(inputs_embeds=embedded).logits.square().sum().backward()
    assert embedded.grad is not None
    assert bool(embedded.grad.any())


def _refused(folder: Path, tensors: dict[str, Any], source: Path) -> BcqError:
    config = json.loads((source / "config.json").read_text())
    bcqfmt.save(folder, tensors, config=config)
    with pytest.raises(BcqError) as caught:
        load(folder)
    return caught.value


def test_weights_without_a_place_are_refused_by_name(llama: Path, tmp_path: Path) -> None:
    with bcqfmt.open(llama) as checkpoint:
        held: dict[str, Any] = {name: checkpoint[name] for name in checkpoint}
        cases = {
            "stray": ({**held, "model.layers.0.other.weight": affine()}, "no such tensor"),
            "shape": ({**held, f"{Q_PROJ}.weight": affine(rows=8)}, "shape [8, 64]; expected [64, 64]"),
        }  # fmt: skip
        for name, (tensors, words) in cases.items():
            fault = _refused(tmp_path / name, tensors, llama)
            assert fault.code == "BCQ-E305"
            assert words in str(fault)
            assert fault.hint


def test_an_unfinished_folder_is_refused(llama: Path, tmp_path: Path) -> None:
    load(llama).save_pretrained(tmp_path / "m")
    (tmp_path / "m" / "bcq_manifest.json").unlink()
    with pytest.raises(BcqError) as caught:
        load(tmp_path / "m")
    assert caught.value.code == "BCQ-V601"


def test_content_is_checked_before_it_is_used(llama: Path, tmp_path: Path) -> None:
    with bcqfmt.open(llama) as checkpoint:
        held: dict[str, Any] = {name: checkpoint[name] for name in checkpoint}
        perm = held[f"{Q_PROJ}.weight"].with_perm(np.arange(64)[::-1].copy())
        name, offset = "model.safetensors", 0
        bcqfmt.save(
            tmp_path / "m", {**held, f"{Q_PROJ}.weight": perm}, config=json.loads((llama / "config.json").read_text())
        )
    with bcqfmt.open(tmp_path / "m") as checkpoint:
        offset = checkpoint.weight(f"{Q_PROJ}.weight").parts()["perm"].offset
    assert logits(load(tmp_path / "m")).isfinite().all()
    with (tmp_path / "m" / name).open("r+b") as file:
        file.seek(offset)
        file.write((1 << 20).to_bytes(4, "little"))
    with pytest.raises(BcqError) as caught:
        load(tmp_path / "m")
    assert caught.value.code.startswith("BCQ-V40")
    assert caught.value.finding.tensor == f"{Q_PROJ}.bcq_perm"


def test_a_model_in_the_cache_of_the_hub_needs_no_manifest(llama: Path, tmp_path: Path) -> None:
    entry = tmp_path / "models--me--bcq"
    snapshot = entry / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (entry / "blobs").mkdir()
    for number, name in enumerate(("config.json", "model.safetensors")):  # all that transformers fetches
        shutil.copy(llama / name, entry / "blobs" / str(number))
        (snapshot / name).symlink_to(Path("..") / ".." / "blobs" / str(number))
    equal(logits(load(snapshot)), logits(load(llama)))


def test_every_name_of_the_files_finds_its_place(llama: Path) -> None:
    _, info = load(llama, output_loading_info=True)
    assert not any(info.values()), info


def test_a_dense_model_is_not_quantized_while_it_is_loaded(llama_dense: Path) -> None:
    with pytest.raises(ValueError, match="pre-quantized"):
        load(llama_dense, quantization_config=BcqConfig())


def test_device_map(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # transformers wants accelerate for any device map, but uses it only for maps of several devices
    monkeypatch.setattr("transformers.integrations.accelerate.is_accelerate_available", lambda: True)
    model = load(llama, device_map="cpu")
    assert {part.device.type for part in model.state_dict().values()} == {"cpu"}
    equal(logits(model), logits(load(llama)))
