"""compressed-tensors: real checkpoints, random words in both packings, and stacks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bcqfmt.converters.layouts.compressed_tensors import CompressedTensors
from sources.compressed_samples import config, group, made, wanted, weights
from sources.peers import (
    OPTIONS,
    affine_values,
    any_words,
    check_peer,
    halves,
    made_up,
    not_rebuilt,
    only_module,
    peer,
    words,
)

CT = CompressedTensors()
ODD = [3, 5, 6, 7]


# ------------------------------------------------------------------------------------------------ real checkpoints
@pytest.mark.parametrize(
    "kind",
    [
        "compressedtensors0.12-pack_quantized-3b-g32-sym",
        "compressedtensors0.12-pack_quantized-4b-g32-sym-actorder_group",
        "llmcompressor-int_quantized-8b-g-1-sym-w8a8",
        "llmcompressor-pack_quantized-3b-g32-asym",
        "llmcompressor-pack_quantized-4b-g32-asym",
        "llmcompressor-pack_quantized-4b-g64-sym-bf16",
        "llmcompressor-pack_quantized-8b-g-1-sym",
    ],
)
def test_real_checkpoints_have_the_values_of_the_tool_and_come_back(kind: str) -> None:
    modules = check_peer(CT, kind)
    assert all(("activations" in module.settings) == kind.endswith("w8a8") for module in modules)


def test_the_scheme_of_activations_is_kept() -> None:
    module = CT.modules(peer("llmcompressor-int_quantized-8b-g-1-sym-w8a8"), OPTIONS)[0]
    assert module.settings["activations"]["strategy"] == "token"
    assert module.settings["activations"]["dynamic"] is True


@pytest.mark.parametrize("kind", ["dense-bf16", "hqq-hqq-4b-g64-asym-axis1", "gptqmodel-gptq-4b-g32-asym"])
def test_other_layouts_are_left_alone(kind: str) -> None:
    assert CT.modules(peer(kind), OPTIONS) == []


# ------------------------------------------------------------------------------------------------------ any words
@any_words
@given(
    st.integers(0, 2**32), st.integers(1, 8), st.integers(1, 40), st.integers(1, 5), st.sampled_from([8, 24, 32, 40]),
    st.booleans(), st.booleans(),
)  # fmt: skip
def test_words_come_back(
    tmp_path: Path, seed: int, bits: int, n: int, groups: int, size: int, dense: bool, asym: bool
) -> None:
    rng = np.random.default_rng(seed)
    k = max(8, groups * size - int(rng.integers(0, 2)) * 5)
    tensors = made(rng, (n, k), bits, size, dense, asym)
    stated = config(group(weights(bits, size, not asym)), version="0.19.0" if dense else "0.17.1")
    module = only_module(CT, made_up(tmp_path, tensors, stated))
    converted = CT.convert(module, OPTIONS)
    assert not_rebuilt(CT, module, converted) == []
    values = wanted(tensors, (n, k), bits, np.arange(k) // size, dense)
    assert converted.weight.dequantize().tobytes() == values.tobytes()


@any_words
@given(st.integers(0, 2**32), st.integers(1, 8), st.integers(1, 4))
def test_words_of_whole_blocks_come_back_whatever_they_are(tmp_path: Path, seed: int, bits: int, blocks: int) -> None:
    rng = np.random.default_rng(seed)
    n, k = 32, 32 * blocks
    tensors = {
        "m.weight_packed": words(rng, n, bits * blocks),
        "m.weight_zero_point": words(rng, bits, blocks),
        "m.weight_scale": halves(rng, n, blocks),
        "m.weight_shape": np.array([n, k]),
    }
    module = only_module(CT, made_up(tmp_path, tensors, config(group(weights(bits, 32, symmetric=False)))))
    assert not_rebuilt(CT, module, CT.convert(module, OPTIONS)) == []


@any_words
@given(
    st.integers(0, 2**32), st.integers(1, 20), st.integers(8, 100), st.sampled_from(["none", "plain"]), st.booleans()
)
def test_bytes_come_back(tmp_path: Path, seed: int, n: int, k: int, zeros: str, grouped: bool) -> None:
    rng = np.random.default_rng(seed)
    size = 8 if grouped else k
    groups = -(-k // size)
    codes = rng.integers(-128, 128, (n, k)).astype(np.int8)
    tensors: dict[str, Any] = {"m.weight": codes, "m.weight_scale": halves(rng, n, groups)}
    zero = np.zeros((n, groups), np.int8)
    if zeros == "plain":
        zero = rng.integers(-128, 128, (n, groups)).astype(np.int8)
        tensors["m.weight_zero_point"] = zero
    stated = config(group(weights(8, size if grouped else None, zeros == "none")), format="int-quantized")
    module = only_module(CT, made_up(tmp_path, tensors, stated))
    converted = CT.convert(module, OPTIONS)
    assert not_rebuilt(CT, module, converted) == []
    values = affine_values(codes, tensors["m.weight_scale"], zero, np.arange(k) // size)
    assert converted.weight.dequantize().tobytes() == values.tobytes()


@any_words
@given(st.integers(0, 2**32), st.integers(1, 8), st.booleans(), st.booleans())
def test_scattered_columns_come_back(tmp_path: Path, seed: int, bits: int, dense: bool, asym: bool) -> None:
    rng = np.random.default_rng(seed)
    n, k, size = 12, 160, 32
    tensors = made(rng, (n, k), bits, size, dense, asym)
    index = rng.permutation(k) // size
    tensors["m.weight_g_idx"] = index.astype(np.int32)
    stated = config(group(weights(bits, size, not asym, actorder="group")), version="0.19.0" if dense else "0.12.2")
    module = only_module(CT, made_up(tmp_path, tensors, stated))
    converted = CT.convert(module, OPTIONS)
    assert not_rebuilt(CT, module, converted) == []
    values = wanted(tensors, (n, k), bits, index, dense)
    assert converted.weight.dequantize().tobytes() == values.tobytes()


@any_words
@given(st.integers(0, 2**32), st.integers(1, 8), st.integers(1, 4), st.booleans(), st.booleans())
def test_stacks_come_back(tmp_path: Path, seed: int, bits: int, experts: int, asym: bool, ordered: bool) -> None:
    rng = np.random.default_rng(seed)
    n, k, size = 9, 72, 24
    tensors = made(rng, (experts, n, k), bits, size, True, asym)
    index = np.stack([rng.permutation(k) // size if ordered else np.arange(k) // size for _ in range(experts)])
    if ordered:
        tensors["m.weight_g_idx"] = index.astype(np.int32)
    stated = config(group(weights(bits, size, not asym, actorder="group" if ordered else None)))
    module = only_module(CT, made_up(tmp_path, tensors, stated))
    converted = CT.convert(module, OPTIONS)
    assert converted.weight.shape == (experts, n, k)
    assert not_rebuilt(CT, module, converted) == []
    for e in range(experts):
        of_one = {name: tensor[e] for name, tensor in tensors.items() if name != "m.weight_shape"}
        values = wanted(of_one, (n, k), bits, index[e], True)
        assert converted.weight.dequantize()[e].tobytes() == values.tobytes()


def test_experts_may_share_scales_and_order(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    tensors = made(rng, (3, 8, 64), 4, 32, True, asym=False)
    tensors["m.weight_scale"] = halves(rng, 8, 2)
    tensors["m.weight_g_idx"] = (rng.permutation(64) // 32).astype(np.int32)
    module = only_module(CT, made_up(tmp_path, tensors, config(group(weights(4, 32, actorder="group")))))
    converted = CT.convert(module, OPTIONS)
    assert converted.weight.parts()["perm"].shape == (3, 64)
    assert not_rebuilt(CT, module, converted) == []


def test_a_stack_of_bytes(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    codes = rng.integers(-128, 128, (2, 8, 24)).astype(np.int8)
    for shape in ((2, 8, 1), (8, 1), (8,)):
        tensors = {"m.weight": codes, "m.weight_scale": halves(rng, *shape)}
        module = only_module(CT, made_up(tmp_path, tensors, config(group(weights(8, None)))))
        converted = CT.convert(module, OPTIONS)
        assert not_rebuilt(CT, module, converted) == []
        scale = np.broadcast_to(tensors["m.weight_scale"].reshape(-1, 8, 1), (2, 8, 1))
        with np.errstate(over="ignore"):
            values = (scale.astype(np.float64) * codes).astype(np.float16)
        assert converted.weight.dequantize().tobytes() == values.tobytes()


@pytest.mark.parametrize("asym", [False, True])
@pytest.mark.parametrize("shape", [(1,), (1, 1), ()])
@pytest.mark.parametrize("packed", [False, True])
def test_one_scale_for_a_tensor(tmp_path: Path, shape: tuple[int, ...], packed: bool, asym: bool) -> None:
    rng = np.random.default_rng(0)
    tensors: dict[str, Any] = {"m.weight_scale": np.full(shape, -0.5, np.float16)}
    if packed:
        tensors |= {"m.weight_packed": words(rng, 6, 8), "m.weight_shape": np.array([6, 64])}
    else:
        tensors["m.weight"] = rng.integers(-128, 128, (6, 64)).astype(np.int8)
    if asym:
        tensors["m.weight_zero_point"] = np.full(shape, 3, np.int8)
    bits = 4 if packed else 8
    stated = config(group({"num_bits": bits, "type": "int", "symmetric": not asym}))  # no strategy, no group_size
    module = only_module(CT, made_up(tmp_path, tensors, stated))
    converted = CT.convert(module, OPTIONS)
    assert converted.weight.scheme.segments[0].zero == 2 ** (bits - 1) + 3 * asym
    assert not_rebuilt(CT, module, converted) == []


def test_four_bits_in_bytes_may_be_any_byte(tmp_path: Path) -> None:
    tensors = {
        "m.weight": np.arange(-128, 128, dtype=np.int8).reshape(2, 128),
        "m.weight_scale": np.ones((2, 1), np.float16),
    }
    module = only_module(CT, made_up(tmp_path, tensors, config(group(weights(4, None)), format="naive-quantized")))
    converted = CT.convert(module, OPTIONS)
    assert (converted.weight.dequantize() == tensors["m.weight"]).all()
    assert not_rebuilt(CT, module, converted) == []


@pytest.mark.parametrize("index", [np.full(64, -1, np.int32), np.full(64, -1, np.int64)])
def test_an_order_of_minus_one_is_none(tmp_path: Path, index: Any) -> None:
    tensors = {**made(np.random.default_rng(0), (4, 64), 4, 32, True, asym=False), "m.weight_g_idx": index}
    module = only_module(CT, made_up(tmp_path, tensors, config(group(weights(4, 32, actorder="group")))))
    converted = CT.convert(module, OPTIONS)
    assert not converted.weight.scheme.perm
    assert not_rebuilt(CT, module, converted) == []


def test_a_half_initialised_order_is_none_and_kept_raw(tmp_path: Path) -> None:
    index = (np.arange(64) // 32).astype(np.int32)
    index[5] = -1
    tensors = {**made(np.random.default_rng(0), (4, 64), 4, 32, True, asym=False), "m.weight_g_idx": index}
    module = only_module(CT, made_up(tmp_path, tensors, config(group(weights(4, 32, actorder="group")))))
    converted = CT.convert(module, OPTIONS)
    assert not converted.weight.scheme.perm
    assert not_rebuilt(CT, module, converted) == ["weight_g_idx"]


@pytest.mark.parametrize("bits", ODD)
def test_unused_top_bits_are_what_a_rule_cannot_rebuild(tmp_path: Path, bits: int) -> None:
    tensors = made(np.random.default_rng(0), (8, 320), bits, 32, False, asym=False)
    tensors["m.weight_packed"] = tensors["m.weight_packed"] | np.int32(-(2**31))
    module = only_module(CT, made_up(tmp_path, tensors, config(group(weights(bits)), version=None)))
    assert module.settings["packing"] == "slots"
    converted = CT.convert(module, OPTIONS)
    assert not_rebuilt(CT, module, converted) == ["weight_packed"]
