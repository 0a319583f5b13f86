"""Mixtures of experts: matrices stored one by one or stacked, under the names that a checkpoint has."""

import copy
import pickle
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import bcqfmt
from bcqfmt.errors import BcqError
from bcqfmt.integrations.torch.layers import BcqModule
from bcqfmt.integrations.transformers import set_mode
from bcqfmt.integrations.transformers.experts import ExpertList, ExpertStack
from bcqfmt.weight.scheme import part_prefix
from sources.tiny_models import as_dense, bcq_model, dense_model, load, logits

CASES = [("mixtral", True), ("mixtral", False), ("qwen3_moe", True), ("qwen3_moe", False)]
Folders = dict[tuple[str, bool], Path]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    found = {}
    for kind, original in CASES:
        place = tmp_path_factory.mktemp("moe")
        dense = dense_model(place / "dense", kind, "bfloat16", original=original)
        found[kind, original] = bcq_model(place / "bcq", dense)
        as_dense(place / "exact", place / "bcq")
    return found


def names(folder: Path) -> dict[str, tuple[int, ...]]:
    with bcqfmt.open(folder) as checkpoint:
        return {name: weight.shape for name, weight in checkpoint.weights()}


def test_the_samples_are_what_they_are_meant_to_be(folders: Folders) -> None:
    assert "model.layers.0.block_sparse_moe.experts.3.w1.weight" in names(folders["mixtral", True])
    assert "model.layers.0.mlp.experts.3.gate_proj.weight" in names(folders["qwen3_moe", True])
    for kind in ("mixtral", "qwen3_moe"):
        stacks = [shape for shape in names(folders[kind, False]).values() if len(shape) == 3]
        assert len(stacks) == 4  # two in each of two layers


@pytest.mark.parametrize(("kind", "original"), CASES)
def test_experts_stay_quantized_and_every_name_finds_its_place(folders: Folders, kind: str, original: bool) -> None:
    model, info = load(folders[kind, original], output_loading_info=True)
    assert not any(info.values()), info
    held = [module for module in model.modules() if isinstance(module, BcqModule)]
    assert sorted(module.weight_name for module in held) == sorted(names(folders[kind, original]))
    wanted = ExpertList if original else ExpertStack
    for layer in model.model.layers:
        assert isinstance(layer.mlp.experts.gate_up_proj, wanted)
        assert isinstance(layer.mlp.experts.down_proj, wanted)
    assert not [name for name, _ in model.named_parameters() if "experts" in name]


def test_no_conversion_of_transformers_takes_a_part_for_a_tensor_of_its_own() -> None:
    from transformers import conversion_mapping
    from transformers.core_model_loading import WeightConverter

    seen = 0
    for entries in conversion_mapping._build_checkpoint_conversion_mapping().values():
        for entry in entries:
            for pattern in entry._original_source_patterns if isinstance(entry, WeightConverter) else ():
                name = "model.layers.0" + ("" if pattern.startswith(".") else ".") + pattern.replace("*", "3")
                if re.fullmatch(r"[\w.]+\.weight", name) and entry.rename_source_key(name)[1] is not None:
                    seen += 1
                    part = part_prefix(name) + "s0_planes"
                    assert entry.rename_source_key(part) == (part, None)
    assert seen > 40


@pytest.mark.parametrize(("kind", "original"), CASES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_exact_logits_are_those_of_the_dense_export(folders: Folders, kind: str, original: bool, dtype: str) -> None:
    folder = folders[kind, original]
    model, dense = load(folder, dtype=dtype), load(folder.parent / "exact", dtype=dtype)
    assert dense.config._experts_implementation == model.config._experts_implementation == "grouped_mm"
    set_mode(model, exact=True)
    assert torch.equal(logits(model), logits(dense))
    assert torch.equal(logits(model, 1, 1), logits(dense, 1, 1))


@pytest.mark.parametrize(("kind", "original", "way"), [
    pytest.param(*case, way, marks=[pytest.mark.soak] if way == "eager" and not case[1] else [])
    for way in ("eager", "batched_mm", "grouped_mm") for case in CASES
])  # fmt: skip
def test_exact_logits_follow_the_implementation_of_experts(
    folders: Folders, kind: str, original: bool, way: str
) -> None:
    folder = folders[kind, original]
    asked, dense = (load(place, experts_implementation=way) for place in (folder, folder.parent / "exact"))
    later = load(folder)
    near = logits(later)
    later.set_experts_implementation(way)
    assert torch.equal(logits(later), near)  # the kernels take one expert after the other, whatever is set
    copies = [copy.deepcopy(later), pickle.loads(pickle.dumps(later))] if (kind, original) == CASES[0] else []
    for model in (asked, later, *copies):
        set_mode(model, exact=True)
        assert torch.equal(logits(model), logits(dense))


def test_the_implementations_of_experts_do_differ(folders: Folders) -> None:
    # else the tests above could not fail
    folder = folders["mixtral", True].parent / "exact"
    assert not torch.equal(logits(load(folder)), logits(load(folder, experts_implementation="eager")))


@pytest.mark.parametrize(("kind", "original"), CASES)
def test_kernels_agree_with_the_exact_values(folders: Folders, kind: str, original: bool, tmp_path: Path) -> None:
    # kernels multiply with E itself, which the logical dtype rounds; float32 holds it nearly
    dense = load(as_dense(tmp_path / "exact", folders[kind, original], dtype="float32"), dtype="float32")
    p, q = (torch.log_softmax(logits(m).double(), -1) for m in (dense, load(folders[kind, original], dtype="float32")))
    assert float((p.exp() * (p - q)).sum(-1).max()) <= 1e-6
    assert float((p - q).abs().max()) < 1e-3


@pytest.mark.parametrize(("kind", "original"), CASES)
def test_saving_keeps_names_and_bytes(folders: Folders, kind: str, original: bool, tmp_path: Path) -> None:
    model = load(folders[kind, original])
    model.save_pretrained(tmp_path / "again")
    assert bcqfmt.validate(tmp_path / "again", deep=True).valid
    with bcqfmt.open(folders[kind, original]) as first, bcqfmt.open(tmp_path / "again") as second:
        assert sorted(first) == sorted(second)
        for name, weight in first.weights():
            assert second.weight(name).digest() == weight.digest()
        for name, tensor in first.dense():
            other = second[name]
            assert isinstance(other, bcqfmt.StoredTensor)
            assert (other.dtype, other.array().tobytes()) == (tensor.dtype, tensor.array().tobytes())
    assert torch.equal(logits(load(tmp_path / "again")), logits(model))


@pytest.mark.parametrize(("kind", "original"), CASES)
def test_dequantize(folders: Folders, kind: str, original: bool) -> None:
    model, dense = load(folders[kind, original]), load(folders[kind, original].parent / "exact")
    again = copy.deepcopy(model)
    model.dequantize()
    assert model.state_dict().keys() == dense.state_dict().keys()
    for name, tensor in dense.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name
    assert torch.equal(logits(model), logits(dense))
    set_mode(again, exact=True)  # a copy is its own
    assert torch.equal(logits(again), logits(dense))


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_dequantize_to_another_type(folders: Folders, dtype: str) -> None:
    kind = getattr(torch, dtype)
    for original in (True, False):
        folder = folders["qwen3_moe", original]
        model, dense = load(folder).dequantize(kind), load(folder.parent / "exact", dtype=kind)
        assert torch.equal(logits(model), logits(dense))
        wanted = {name: (p.dtype, p.requires_grad) for name, p in dense.named_parameters()}
        assert {name: (p.dtype, p.requires_grad) for name, p in model.named_parameters()} == wanted
        assert model.dtype == model.config.dtype == kind


@pytest.mark.parametrize(("kind", "original"), CASES)
def test_generate(folders: Folders, kind: str, original: bool) -> None:
    ids = torch.tensor([[1, 5, 9]])
    found = load(folders[kind, original]).generate(ids, max_new_tokens=3, min_new_tokens=3, pad_token_id=0)
    assert found.shape == (1, 6)


def test_some_experts_quantized_and_others_not_is_refused(tmp_path: Path) -> None:
    dense = dense_model(tmp_path / "dense", "mixtral")
    bcq = bcq_model(tmp_path / "bcq", dense, exclude=(re.escape("layers.1.block_sparse_moe.experts.2.w3"),))
    with pytest.raises(BcqError) as caught:
        load(bcq)
    assert caught.value.code == "BCQ-E305"
    assert "7 matrices for 'model.layers.1.mlp.experts.gate_up_proj'; expected 8" in str(caught.value)


def test_torch_functions_other_than_linear_get_the_values(folders: Folders) -> None:
    stack = load(folders["mixtral", False]).model.layers[0].mlp.experts.down_proj
    x = torch.randn(3, 96)
    dense = stack.values(index=2)
    assert torch.equal(stack[torch.tensor(2)].dense(), dense)
    assert torch.equal(torch.matmul(stack[2], x.T), torch.matmul(dense.to(x.dtype), x.T))
    bias = torch.randn(64)
    near = nn.functional.linear(x, stack[2], bias)
    assert torch.allclose(near, nn.functional.linear(x, stack.values(x.dtype, 2), bias), atol=1e-4)
    stack.exact = True
    assert torch.equal(nn.functional.linear(x, stack[-2], bias), nn.functional.linear(x, dense.to(x.dtype), bias))
    with pytest.raises(BcqError, match="several experts"):
        stack[torch.tensor([0, 1])]
    with pytest.raises(IndexError):
        stack[4]
