"""The plugin for vLLM: its config and its layers, in a stand-in made of vLLM's signatures."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import bcqfmt
from bcqfmt import BcqError, BcqWeight
from bcqfmt.integrations import vllm as plugin
from bcqfmt.integrations.torch import BcqLinear
from products import kernel_samples as ks
from vllm_plugin import stand_in
from vllm_plugin.stand_in import Rank, finish, installed, load

PACKED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
LINEAR = "vllm.model_executor.layers.linear"


@pytest.fixture(scope="module", autouse=True)
def world() -> Iterator[SimpleNamespace]:
    with installed() as found:
        plugin.register()
        plugin.register()  # every process of vLLM calls it, some more than once
        yield found


@pytest.fixture
def config(world: SimpleNamespace) -> Any:
    made = world.registered["bcq"].from_config({"quant_method": "bcq", "format_version": "1.0"})
    made.packed_modules_mapping = PACKED
    return made


def plain(rows: int, columns: int = 128, seed: int = 0) -> BcqWeight:
    return ks.weight("affine", 4, rows, columns, 32, seed=seed)


def rich(rows: int, columns: int = 128, seed: int = 0) -> BcqWeight:
    """Reordered, with outliers; groups of 64."""
    return ks.weight("bcq", 3, rows, columns, 64, seed=seed, perm=True, outliers="add")


def inputs(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def fill(config: Any, layer: Any, weights: dict[str, BcqWeight], shards: Any = (None,)) -> Any:
    return stand_in.fill(layer, [weight.to_torch() for weight in weights.values()], shards)


def tell(config: Any, weights: dict[str, BcqWeight]) -> None:
    config.specs.update({path: weight.spec for path, weight in weights.items()})


# -- the config -------------------------------------------------------------------------------------------------


def test_without_vllm_there_is_a_clear_error() -> None:
    source = (
        "import sys; sys.modules['vllm'] = None\n"
        "from bcqfmt.integrations.vllm import register\n"
        "assert 'torch' not in sys.modules\n"
        "from bcqfmt import BcqError\n"
        "try: register()\n"
        "except BcqError as fault: assert fault.finding.code == 'BCQ-E306' and 'vllm' in str(fault)\n"
        "else: raise SystemExit('no error')\n"
    )
    subprocess.run([sys.executable, "-c", source], check=True)


def test_a_folder_tells_which_layers_are_quantized(config: Any, world: SimpleNamespace, tmp_path: Path) -> None:
    weights = {f"model.layers.0.self_attn.{n}_proj.weight": plain(16) for n in "qkv"}
    bcqfmt.save(tmp_path / "m", {**weights, "model.layers.0.mlp.experts.0.up_proj.weight": plain(16)})
    config.maybe_update_config(str(tmp_path / "m"), hf_config=None, revision=None)
    again = pickle.loads(pickle.dumps(config))
    assert again.specs == config.specs
    rank = Rank(world.modules)
    assert type(rank.qkv(again, "model.layers.0.self_attn.qkv_proj", 2, 2, 8, 128).quant_method).__name__ == (
        "BcqLinearMethod"
    )
    dense = getattr(world.modules[LINEAR], "UnquantizedLinearMethod")  # noqa: B009
    layer = rank.other(LINEAR, "ColumnParallelLinear")
    assert isinstance(config.get_quant_method(layer, "model.layers.1.self_attn.qkv_proj"), dense)
    moe = rank.other("vllm.model_executor.layers.fused_moe.routed_experts", "RoutedExperts")
    assert config.get_quant_method(moe, "model.layers.1.mlp.experts") is None
    told = r"BCQ-E305.*experts\.0\.up_proj.*RoutedExperts.*export MODEL NEW --to dense"
    with pytest.raises(BcqError, match=told):
        config.get_quant_method(moe, "model.layers.0.mlp.experts")
    table = rank.other("vllm.model_executor.layers.vocab_parallel_embedding", "VocabParallelEmbedding")
    assert config.get_quant_method(table, "model.embed_tokens") is None
    assert rank.head(config, "lm_head", 100, 128).quant_method is None


def test_a_model_that_calls_its_modules_otherwise(config: Any) -> None:
    tell(config, {"model.layers.0.mlp.up_proj": plain(16)})
    mapper = SimpleNamespace(apply_dict=lambda names: {f"language_model.{name}": s for name, s in names.items()})
    config.apply_vllm_mapper(mapper)
    assert list(config.specs) == ["language_model.model.layers.0.mlp.up_proj"]


def test_refusals(config: Any, world: SimpleNamespace, tmp_path: Path) -> None:
    with pytest.raises(BcqError, match="BCQ-V205"):
        type(config).from_config({"format_version": "2.0"})
    with pytest.raises(BcqError, match="BCQ-V601"):
        config.maybe_update_config(str(tmp_path))
    tell(config, {"a.o_proj": plain(16, 96)})
    with pytest.raises(BcqError, match=r"BCQ-E305.*\[16, 96\]"):
        Rank(world.modules).row(config, "a.o_proj", 16, 128)


# -- layers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [plain, rich])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_of_a_column_parallel_layer_make_up_the_whole(
    config: Any, world: SimpleNamespace, ranks: int, make: Any
) -> None:
    weights, x, bias = {"up": make(64)}, inputs(3, 128), inputs(64)
    tell(config, weights)
    found = []
    for rank in range(ranks):
        layer = fill(config, Rank(world.modules, rank, ranks).column(config, "up", 64, 128), weights)
        own = bias[rank * 64 // ranks : (rank + 1) * 64 // ranks]
        found.append(layer.quant_method.apply(layer, x, own))
        assert [(name, tuple(p.shape)) for name, p in layer.named_parameters()] == [("weight", (0, 128))]
        assert layer.quant_method.dequantize_weight(layer).shape == (64 // ranks, 128)
    assert torch.equal(torch.cat(found, -1), BcqLinear.from_weight(weights["up"], bias)(x))


@pytest.mark.parametrize("make", [plain, rich])
@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_of_a_row_parallel_layer_add_up_to_the_whole(
    config: Any, world: SimpleNamespace, ranks: int, make: Any
) -> None:
    weights, x = {"down": make(48)}, inputs(2, 128)
    tell(config, weights)
    whole, total = BcqLinear.from_weight(weights["down"]), torch.zeros(2, 48)
    for rank in range(ranks):
        layer = fill(config, Rank(world.modules, rank, ranks).row(config, "down", 48, 128), weights)
        own = slice(rank * 128 // ranks, (rank + 1) * 128 // ranks)
        cut = weights["down"].columns(own.start, own.stop) if ranks > 1 else weights["down"]
        y = layer.quant_method.apply(layer, x[:, own])
        assert torch.equal(y, BcqLinear.from_weight(cut)(x[:, own]))
        assert torch.equal(layer.quant_method.dequantize_weight(layer), whole.values()[:, own])
        total += y
    torch.testing.assert_close(total, whole(x), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(("ranks", "few"), [(1, 2), (2, 2), (4, 2), (4, 1), (2, 4)])
def test_queries_keys_and_values(config: Any, world: SimpleNamespace, ranks: int, few: int) -> None:
    """Heads of 8 rows; with fewer of them than ranks, neighbours hold the same keys. Pieces may differ in kind."""
    q, k, v = plain(32), rich(few * 8, seed=2), plain(few * 8, seed=3)
    weights, x = {"a.q_proj": q, "a.k_proj": k, "a.v_proj": v}, inputs(2, 128)
    tell(config, weights)
    for rank in range(ranks):
        layer = Rank(world.modules, rank, ranks).qkv(config, "a.qkv_proj", 4, few, 8, 128)
        fill(config, layer, weights, "qkv")
        own, share = 32 // ranks, max(1, ranks // few)
        keys = few * 8 // ranks * share
        first = rank // share * keys
        expected = torch.cat(
            [
                BcqLinear.from_weight(q)(x)[:, rank * own : (rank + 1) * own],
                BcqLinear.from_weight(k)(x)[:, first : first + keys],
                BcqLinear.from_weight(v)(x)[:, first : first + keys],
            ],
            -1,
        )
        assert torch.equal(layer.quant_method.apply(layer, x), expected)


@pytest.mark.parametrize("ranks", [1, 2])
def test_pieces_that_are_alike_are_one_product(config: Any, world: SimpleNamespace, ranks: int) -> None:
    x, bias = inputs(2, 128), inputs(64 // ranks)

    def signs(rows: int, seed: int = 0) -> BcqWeight:
        return ks.weight("bcq", 3, rows, 128, 32, seed=seed)

    for number, (q, k, v) in {
        1: (signs(32), signs(16, 2), signs(16, 4)),
        2: (plain(32), signs(16, 2), signs(16, 4)),
        3: (rich(32), rich(16, seed=2), plain(16, seed=3)),  # reordered columns stay apart
    }.items():
        weights = {"a.q_proj": q, "a.k_proj": k, "a.v_proj": v}
        tell(config, weights)
        for rank in range(ranks):
            layer = Rank(world.modules, rank, ranks).qkv(config, "a.qkv_proj", 4, 2, 8, 128)
            fill(config, layer, weights, "qkv")
            assert len(layer.bcq) == number
            dense = [
                torch.from_numpy(w.dequantize("F16")).float()[rank * n : (rank + 1) * n]
                for w, n in ((q, 32 // ranks), (k, 16 // ranks), (v, 16 // ranks))
            ]
            assert torch.equal(layer.quant_method.dequantize_weight(layer).float(), torch.cat(dense))
            wanted = torch.nn.functional.linear(x, torch.cat(dense), bias)
            assert (layer.quant_method.apply(layer, x, bias) - wanted).abs().max() < 2e-3 * wanted.abs().max()


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("fused", [False, True, (0, 1)])
def test_gate_and_up(config: Any, world: SimpleNamespace, ranks: int, fused: Any) -> None:
    """Apart in the file, or one weight there (shard None, or a tuple)."""
    both, x, bias = rich(96), inputs(2, 128), inputs(96 // ranks)
    parts = {"m.gate_proj": both.rows(0, 64), "m.up_proj": both.rows(64, 96)}
    weights = {"m.gate_up_proj": both} if fused else parts
    shards = (0, 1) if not fused else (None,) if fused is True else (fused,)
    tell(config, weights)
    whole = BcqLinear.from_weight(both)(x)
    for rank in range(ranks):
        layer = Rank(world.modules, rank, ranks).merged(config, "m.gate_up_proj", [64, 32], 128)
        fill(config, layer, weights, shards)
        a, b = 64 // ranks, 32 // ranks
        wanted = torch.cat([whole[:, rank * a : (rank + 1) * a], whole[:, 64 + rank * b : 64 + (rank + 1) * b]], -1)
        assert torch.equal(layer.quant_method.apply(layer, x, bias), wanted + bias)


def test_queries_keys_and_values_fused_in_the_file(config: Any, world: SimpleNamespace) -> None:
    both, x = plain(32 + 16 + 16), inputs(1, 128)
    tell(config, {"a.qkv_proj": both})
    whole = BcqLinear.from_weight(both)(x)
    for rank in range(4):  # two heads of keys on four ranks
        layer = Rank(world.modules, rank, 4).qkv(config, "a.qkv_proj", 4, 2, 8, 128)
        fill(config, layer, {"a.qkv_proj": both})
        key = rank // 2 * 8
        rows = [*range(rank * 8, rank * 8 + 8), *range(32 + key, 40 + key), *range(48 + key, 56 + key)]
        assert torch.equal(layer.quant_method.apply(layer, x), whole[:, rows])


def test_a_replicated_layer_is_whole_on_every_rank(config: Any, world: SimpleNamespace) -> None:
    weights, x = {"r": plain(24)}, inputs(1, 128)
    tell(config, weights)
    layer = fill(config, Rank(world.modules, 1, 2).replicated(config, "r", 24, 128), weights)
    assert torch.equal(layer.quant_method.apply(layer, x, None), BcqLinear.from_weight(weights["r"])(x))


def test_a_head_has_zeros_for_tokens_that_are_padding(config: Any, world: SimpleNamespace) -> None:
    weights, x = {"lm_head": plain(70)}, inputs(2, 128)
    tell(config, weights)
    found = []
    for rank in range(4):  # 128 rows of 4 ranks: 32, 32, 6, none
        layer = fill(config, Rank(world.modules, rank, 4).head(config, "lm_head", 70, 128), weights)
        assert layer.quant_method.tie_weights(layer, None) is layer
        found.append(layer.quant_method.apply(layer, x))
    whole = torch.cat(found, -1)
    assert torch.equal(whole[:, :70], BcqLinear.from_weight(weights["lm_head"])(x))
    assert whole.shape == (2, 128)
    assert not whole[:, 70:].any()


def test_tensors_that_do_not_fit_are_refused(config: Any, world: SimpleNamespace) -> None:
    rank = Rank(world.modules)
    tell(config, {"x.gate_proj": plain(32), "x.up_proj": plain(32), "y": plain(32)})
    layer = rank.merged(config, "x.gate_up_proj", [32, 32], 128)
    parts = plain(32).to_torch()
    load(layer, parts, 0)
    with pytest.raises(BcqError, match=r"BCQ-E301.*x\.up_proj"):
        finish(layer)
    layer = rank.merged(config, "x.gate_up_proj", [32, 32], 128)
    with pytest.raises(BcqError, match=r"BCQ-E305.*piece 2"):
        load(layer, parts, 2)
    load(layer, parts, 0)
    with pytest.raises(BcqError, match=r"BCQ-E305.*second time"):
        load(layer, parts, 0)
    with pytest.raises(BcqError, match=r"BCQ-E305.*32 rows"):
        load(rank.column(config, "y", 64, 128), parts)
    with pytest.raises(BcqError, match="BCQ-V3"):
        load(rank.column(config, "y", 32, 128), {**parts, "s0_planes": parts["s0_planes"][:2]})


def test_a_cut_that_the_format_cannot_say_is_refused(config: Any, world: SimpleNamespace) -> None:
    weights = {"down": ks.weight("affine", 4, 16, 24, 8)}
    tell(config, weights)
    layer = Rank(world.modules, 0, 6).row(config, "down", 16, 24)
    with pytest.raises(BcqError, match="BCQ-E303"):
        load(layer, weights["down"].to_torch())
