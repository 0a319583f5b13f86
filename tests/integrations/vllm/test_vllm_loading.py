"""The plugin for vLLM while a model is loaded: embeddings, heads, dense pieces, shard ids, devices, warming up."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import bcqfmt
from bcqfmt import BcqError, BcqWeight
from bcqfmt.integrations import vllm as plugin
from bcqfmt.integrations.torch import BcqEmbedding, BcqLinear, linear_op
from bcqfmt.integrations.torch.gpu_weight import gpu_weight
from bcqfmt.kernels.gemm import parts_of
from bcqfmt.kernels.gemm.layout import GemmLayout
from bcqfmt.kernels.gemm.shape import gemm_shape
from bcqfmt.system import lock_file
from products import kernel_samples as ks
from simulated import sim_bcq_linear, sim_torch
from simulated.cuda_sim import simulate
from vllm_plugin.stand_in import Rank, fill, finish, installed, load

PACKED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "in_proj_qkvz": ["in_proj_qkv", "in_proj_z"]}


@pytest.fixture(scope="module", autouse=True)
def world() -> Iterator[SimpleNamespace]:
    with installed() as found:
        plugin.register()
        yield found


@pytest.fixture
def config(world: SimpleNamespace) -> Any:
    made = world.registered["bcq"].from_config({"quant_method": "bcq"})
    made.packed_modules_mapping = PACKED
    return made


def sample(rows: int, seed: int = 0) -> BcqWeight:
    return ks.weight("affine", 4, rows, 128, 32, seed=seed)


def inputs(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def values(weight: BcqWeight) -> torch.Tensor:
    return torch.from_numpy(weight.dequantize()).float()


# -- embeddings and heads ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 4])
def test_a_quantized_embedding_and_the_head_that_is_tied_to_it(config: Any, world: SimpleNamespace, ranks: int) -> None:
    table, x = sample(70), inputs(2, 128)
    config.specs, config.tied = {"model.embed_tokens": table.spec}, True
    found, ids = [], torch.tensor([[0, 5], [17, 3]])
    for number in range(ranks):  # 128 rows of 4 ranks: 32, 32, 6, none
        rank = Rank(world.modules, number, ranks)
        layer = rank.head(config, "model.embed_tokens", 70, 128, "VocabParallelEmbedding")
        head = rank.head(config, "lm_head", 70, 128)
        assert head.quant_method.tie_weights(head, layer) is head
        fill(layer, [table.to_torch()])
        held = values(table)[number * 32 :][: 128 // ranks]
        rows = layer.quant_method.embedding(layer, ids % max(1, len(held)))
        assert torch.equal(rows, held[ids % len(held)] if len(held) else torch.zeros(2, 2, 128))
        found.append(head.quant_method.apply(head, x))
        assert head.weight.shape == layer.weight.shape == (0, 128)  # EAGLE compares widths
    whole = torch.cat(found, -1)
    assert torch.equal(whole[:, :70], BcqLinear.from_weight(table)(x))
    assert whole.shape == (2, 128)


def test_a_dense_head_beside_a_quantized_embedding_is_left_to_vllm(config: Any, world: SimpleNamespace) -> None:
    config.specs = {"model.embed_tokens": sample(70).spec}
    rank = Rank(world.modules)
    assert rank.head(config, "model.embed_tokens", 70, 128, "VocabParallelEmbedding").quant_method.tied is False
    assert rank.head(config, "lm_head", 70, 128).quant_method is None


def test_an_embedding_without_a_name_is_found_by_its_size(config: Any, world: SimpleNamespace) -> None:
    """Llama in vLLM does not say which one it makes."""
    rank, kind = Rank(world.modules), "VocabParallelEmbedding"
    config.specs = {"model.embed_tokens": sample(70).spec, "lm_head": sample(70).spec, "a.o_proj": sample(70).spec}
    made = rank.head(config, "", 70, 128, kind)
    assert [name for name, _ in made.quant_method.weights] == ["model.embed_tokens"]
    assert rank.head(config, "", 71, 128, kind).quant_method is None
    config.specs["model.more_embeddings"] = sample(70).spec
    with pytest.raises(BcqError, match=r"BCQ-E305 'model.embed_tokens'.*2 weights of shape \[70, 128\]"):
        rank.head(config, "", 70, 128, kind)


def test_models_that_draft_for_another(config: Any, world: SimpleNamespace, tmp_path: Path) -> None:
    bcqfmt.save(tmp_path / "m", {f"model.layers.0.self_attn.{one}_proj.weight": sample(16) for one in "qkv"})
    with pytest.raises(BcqError, match=r"BCQ-E305 .*m: .*draft model of EAGLE.*export DRAFT NEW --to dense"):
        config.maybe_update_config(str(tmp_path / "m"), SimpleNamespace(model_type="eagle"))
    config.maybe_update_config(str(tmp_path / "m"), SimpleNamespace(model_type="llama"))
    layer = Rank(world.modules).qkv(config, "draft_model.model.layers.0.self_attn.qkv_proj", 4, 4, 4, 128)
    assert layer.quant_method.weights[0][0] == "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize("nested", [False, True])
def test_a_head_of_its_own_is_not_tied(config: Any, tmp_path: Path, nested: bool) -> None:
    """vLLM 0.26 does not load the tensors of a head that config.json calls tied."""
    text = SimpleNamespace(tie_word_embeddings=True)
    whole = SimpleNamespace(tie_word_embeddings=True, get_text_config=lambda: text if nested else whole)
    bcqfmt.save(tmp_path / "m", {"model.embed_tokens.weight": sample(8)})
    config.maybe_update_config(str(tmp_path / "m"), whole)
    assert config.tied
    assert whole.tie_word_embeddings
    bcqfmt.save(tmp_path / "h", {"lm_head.weight": sample(8)})
    config.maybe_update_config(str(tmp_path / "h"), whole)
    assert not config.tied
    assert not whole.tie_word_embeddings
    assert not text.tie_word_embeddings or not nested


def test_the_manifest_is_that_of_the_revision(config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM 0.26 does not say which one was asked for; config.json was read from a commit."""
    bcqfmt.save(tmp_path / "m", {"a.weight": sample(8)})
    asked: list[Any] = []
    raw = (tmp_path / "m" / "bcq_manifest.json").read_bytes()
    module = __import__("sys").modules[type(config).__module__]
    monkeypatch.setattr(module, "get_hf_file_bytes", lambda name, model, revision: asked.append(revision) or raw)
    config.maybe_update_config("owner/name", hf_config=SimpleNamespace(_commit_hash="0af1"))
    config.maybe_update_config("owner/name", SimpleNamespace(_commit_hash="0af1"), "v2")
    config.maybe_update_config("owner/name")
    assert asked == ["0af1", "v2", None]


# -- pieces -----------------------------------------------------------------------------------------------------


def output(x: torch.Tensor, weight: BcqWeight, dense: bool) -> torch.Tensor:
    return x @ values(weight).T if dense else BcqLinear.from_weight(weight)(x)


@pytest.mark.parametrize(("dense", "ranks"), [("q", 1), ("k", 2), ("qv", 2)])
def test_dense_pieces_beside_quantized_ones(config: Any, world: SimpleNamespace, dense: str, ranks: int) -> None:
    weights = {one: sample(32 if one == "q" else 16, seed=seed) for seed, one in enumerate("qkv")}
    config.specs = {f"a.{one}_proj": weight.spec for one, weight in weights.items() if one not in dense}
    tensors = [{"weight": values(w)} if one in dense else w.to_torch() for one, w in weights.items()]
    x, bias = inputs(3, 128), inputs(64 // ranks)
    for rank in range(ranks):
        layer = fill(Rank(world.modules, rank, ranks).qkv(config, "a.qkv_proj", 4, 2, 8, 128), tensors, "qkv")
        wanted = [output(x, w, one in dense).chunk(ranks, -1)[rank] for one, w in weights.items()]
        found = layer.quant_method.apply(layer, x, bias)
        torch.testing.assert_close(found, torch.cat(wanted, -1) + bias, rtol=1e-5, atol=1e-4)
        rows = torch.cat([values(w).chunk(ranks)[rank] for w in weights.values()])
        assert torch.equal(layer.quant_method.dequantize_weight(layer).float(), rows)


@pytest.mark.parametrize(("dense", "ranks"), [(False, 1), (False, 2), (True, 2)])
def test_weights_of_several_pieces(config: Any, world: SimpleNamespace, ranks: int, dense: bool) -> None:
    """Qwen3.5: four pieces in two weights, sent as (0, 1, 2) and 3; one of them may be dense."""
    both = {"a.in_proj_qkv": sample(64), "a.in_proj_z": sample(32, seed=1)}
    config.specs = {name: w.spec for name, w in both.items() if not (dense and name.endswith("z"))}
    tensors = [w.to_torch() if name in config.specs else {"weight": values(w)} for name, w in both.items()]
    x = inputs(2, 128)
    whole = torch.cat([output(x, w, name not in config.specs) for name, w in both.items()], -1)
    for rank in range(ranks):
        layer = Rank(world.modules, rank, ranks).merged(config, "a.in_proj_qkvz", [16, 16, 32, 32], 128)
        fill(layer, tensors, [(0, 1, 2), 3])
        wanted = torch.cat([piece.chunk(ranks, -1)[rank] for piece in whole.split([16, 16, 32, 32], -1)], -1)
        torch.testing.assert_close(layer.quant_method.apply(layer, x), wanted, rtol=1e-5, atol=1e-4)


def test_rows_that_fit_no_pieces_are_refused(config: Any, world: SimpleNamespace) -> None:
    rank = Rank(world.modules)
    config.specs = {"a.in_proj_qkv": sample(56).spec, "a.in_proj_z": sample(40).spec}
    with pytest.raises(BcqError, match=r"BCQ-E305.*56, 40 rows; expected pieces of 16, 16, 32, 32"):
        rank.merged(config, "a.in_proj_qkvz", [16, 16, 32, 32], 128)
    config.specs = {"a.in_proj_qkv": sample(64).spec, "a.in_proj_z": sample(32).spec}
    layer = rank.merged(config, "a.in_proj_qkvz", [16, 16, 32, 32], 128)
    for shard in (None, (2, 3)):
        with pytest.raises(BcqError, match=r"BCQ-E305.*in_proj_qkv.*piece"):
            load(layer, sample(64).to_torch(), shard)


def test_a_dense_piece_that_does_not_come_is_missed(config: Any, world: SimpleNamespace) -> None:
    config.specs = {"a.q_proj": sample(32).spec, "a.k_proj": sample(16).spec}
    layer = Rank(world.modules).qkv(config, "a.qkv_proj", 4, 2, 8, 128)
    load(layer, sample(32).to_torch(), "q")
    load(layer, sample(16).to_torch(), "k")
    with pytest.raises(BcqError, match=r"BCQ-E301.*a\.v_proj.*no weight"):
        finish(layer)


def test_offloaded_inlets_do_not_take_the_pieces_with_them(config: Any, world: SimpleNamespace) -> None:
    config.specs = {"up": sample(32).spec}
    layer = Rank(world.modules).column(config, "up", 32, 128)
    for name, inlet in list(layer.named_parameters()):  # what --cpu-offload-gb does before anything is loaded
        moved = torch.nn.Parameter(inlet.data.to("meta"), requires_grad=False)
        moved.weight_loader = inlet.weight_loader  # type: ignore[attr-defined]
        layer._parameters[name] = moved
    fill(layer, [sample(32).to_torch()])
    assert {tensor.device.type for tensor in [*layer.bcq.buffers(), layer.weight]} == {"cpu"}
    assert layer.quant_method.apply(layer, inputs(1, 128)).shape == (1, 32)


# -- before the first request -----------------------------------------------------------------------------------


def test_every_product_has_run_before_the_first_request(
    config: Any, world: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[int] = []
    product = BcqLinear.product
    monkeypatch.setattr(BcqLinear, "product", lambda self, x, *more: ran.append(len(x)) or product(self, x, *more))
    weight = ks.weight("affine", 4, 8, 128, 64, seed=3)  # like no other here
    config.specs = {"up": weight.spec}
    fill(Rank(world.modules).column(config, "up", 8, 128), [weight.to_torch()])
    assert ran == [1, 2, 3, 4, 128]  # vLLM's largest batch, and the unit matrix that MLA multiplies with
    ran.clear()
    fill(Rank(world.modules).column(config, "up", 8, 128), [weight.to_torch()])
    assert ran == [1, 2, 4, 128]  # a layer of the same kind: layouts only


def test_a_layer_without_a_fast_kernel_is_told_once(
    config: Any, world: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    for weight in (ks.weight("bcq", 3, 8, 128, 12), ks.weight("bcq", 3, 8, 128, 32)):
        config.specs = {"up": weight.spec}
        for _ in range(2):
            fill(Rank(world.modules).column(config, "up", 8, 128), [weight.to_torch()])
    (told,) = caplog.messages
    assert told.startswith("BcqLinear(in_features=128, out_features=8, bcq q=3 g=12")
    assert "products of 1 vectors decode the whole matrix, which is slow: segment 0" in told
    assert "groups of 12 columns" in told


def test_numbers_of_vectors_stand_for_all_of_them(world: SimpleNamespace) -> None:
    counts = __import__("bcqfmt.integrations.vllm.warm_up", fromlist=["x"]).vector_counts
    large, small = (11008, 4096), (4096, 4096)
    assert counts(1, large) == [1]
    assert counts(64, large) == list(range(1, 65))
    assert counts(100, large)[64:] == [80, 96, 100]
    assert counts(8192, large) == [*range(1, 65), *range(80, 2047, 16), 2047]
    assert counts(8192, small) == [*range(1, 65), *range(80, 3071, 16), 3071]


def test_each_kernel_of_many_vectors_is_among_them(world: SimpleNamespace) -> None:
    counts = __import__("bcqfmt.integrations.vllm.warm_up", fromlist=["x"]).vector_counts
    for rows in (604, 2048, 4096, 4864, 7168, 8960, 11008, 25547, 28672):
        for columns in (2048, 4096, 14336):
            shape = partial(gemm_shape, GemmLayout(4, columns, 128, "affine", "F16"), rows=rows, kind=1, out=1)
            known = {shape(count, engine="wgmma") for count in counts(8192, (rows, columns))}
            parts = {end - begin for count in range(1, 8192, 7) for begin, end in parts_of(count, (rows, columns))}
            assert known == {shape(count, engine="wgmma") for count in {*range(1, 2048), *parts}}


def test_one_process_at_a_time_compiles(world: SimpleNamespace, tmp_path: Path, monkeypatch: Any) -> None:
    alone = __import__("bcqfmt.integrations.vllm.warm_up", fromlist=["x"])._alone
    monkeypatch.setenv("BCQFMT_CACHE", str(tmp_path / "cache"))
    with alone(), (tmp_path / "cache" / "warm-up.lock").open() as other, pytest.raises(BlockingIOError):
        lock_file(other.fileno())
    with (tmp_path / "cache" / "warm-up.lock").open() as other:
        lock_file(other.fileno())
    (tmp_path / "file").touch()
    monkeypatch.setenv("BCQFMT_CACHE", str(tmp_path / "file"))
    with alone():
        pass  # nowhere to write: everyone compiles


@pytest.mark.parametrize(
    ("weight", "capability", "batches", "all_freed"),
    [
        (ks.weight("affine", 4, 17, 320, 64), (9, 0), [1, 300], True),  # decoded from the codes of gemm
        (ks.weight("bcq", 3, 5, 72, 32), (8, 0), [1, 300], True),
        (ks.weight("affine", 4, 5, 64, 8), (9, 0), [300], False),  # gemm does not take short groups
        (ks.weight("affine", 4, 5, 64, 32, perm=True), (8, 0), [300], True),  # prepared on the host, with its copies
    ],
    ids=["affine", "bcq, sm_80", "short groups", "host"],
)
def test_parts_that_no_product_reads_are_freed(
    weight: BcqWeight, capability: tuple[int, int], batches: list[int], all_freed: bool
) -> None:
    freed, (before, after), dense = simulate(sim_bcq_linear.released, weight, capability, batches)
    assert freed == [all_freed] * len(freed)
    assert [y.tobytes() for y in before] == [y.tobytes() for y in after]
    assert np.array_equal(dense, weight.dequantize().astype(np.float32))


def test_pieces_that_became_one_are_freed(config: Any, world: SimpleNamespace, monkeypatch: Any) -> None:
    """Even where vLLM keeps the parameters that a checkpoint was loaded into."""
    weights = {one: ks.weight("bcq", 3, 32 if one == "q" else 16, 128, 32, seed=2 * n) for n, one in enumerate("qkv")}
    config.specs = {f"a.{one}_proj": weight.spec for one, weight in weights.items()}
    layer = Rank(world.modules).qkv(config, "a.qkv_proj", 4, 2, 8, 128)
    inlets, made = list(layer.parameters()), []
    whole = BcqLinear.from_weight

    def watched(weight: BcqWeight) -> BcqLinear:
        piece = whole(weight)
        made.append(weakref.ref(piece))
        return piece

    monkeypatch.setattr(BcqLinear, "from_weight", watched)
    fill(layer, [weight.to_torch() for weight in weights.values()], "qkv")
    assert len(layer.bcq) == 1
    assert [piece() for piece in made] == [None] * 3
    assert inlets


def test_one_layout_takes_every_number_of_vectors() -> None:
    weight = ks.weight("affine", 4, 17, 320, 64)
    freed, made, products, expected = simulate(sim_bcq_linear.in_one_layout, weight, [1, 300])
    assert all(freed)
    assert made == ["gemm"]
    for found, wanted in zip(products, expected, strict=True):
        assert np.abs(found - wanted).max() < 2e-3 * np.abs(wanted).max()


def test_planes_that_are_gone_are_not_decoded() -> None:
    made, _parts = gpu_weight(sample(16).spec, parts := sample(16).to_torch()), parts
    assert made is not None
    made._gemm["F32"] = "as if it were not multiplied"
    assert not made.let_go({"bits", "dequantize"}, "F32")
    assert made.let_go({"gemm", "dequantize"}, "F16")
    with pytest.raises(BcqError, match=r"BCQ-E305.*freed"):
        made.exact  # noqa: B018


def test_the_table_of_an_embedding_is_never_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_op, "_on_gpu", lambda *given: SimpleNamespace(let_go=lambda *given: True))
    monkeypatch.setattr(linear_op.matmul, "path_of", lambda *given: linear_op.matmul.Path("gemm"))
    table, linear = BcqEmbedding.from_weight(sample(16)), BcqLinear.from_weight(sample(16))
    for layer in (table, linear):
        layer.release(torch.float16, [1])
    assert all(part.numel() > 1 for part in table.parts())
    assert all(part.numel() == 1 for part in linear.parts())


@pytest.mark.parametrize("kind", ["affine", "bcq", "table"])
def test_rows_of_an_embedding_on_a_gpu(kind: str) -> None:
    weight = ks.weight(kind, 4 if kind != "bcq" else 3, 9, 64, 32)
    ids = [3, 8, 0, 3]
    assert simulate(sim_torch.embedding_rows, weight, ids).tobytes() == weight.dequantize()[ids].tobytes()
