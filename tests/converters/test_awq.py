"""AWQ in its three layouts: real checkpoints, and random words."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bcqfmt.converters.layouts.awq import Awq
from sources.awq_samples import config, fast_codes, gemm, gemm_codes, gemv, gemv_fast
from sources.peers import (
    OPTIONS,
    affine_values,
    any_words,
    check_peer,
    made_up,
    not_rebuilt,
    only_module,
    peer,
    references,
    stream,
)

AWQ = Awq()


# ------------------------------------------------------------------------------------------------ real checkpoints
@pytest.mark.parametrize(
    ("kind", "variant"),
    [
        ("autoawq-gemm-4b-g32-asym", "gemm"),
        ("autoawq-gemv-4b-g64-asym-rtn", "gemv"),
        ("autoround-auto_awq-4b-g64-sym", "gemm"),
        ("autoround-auto_round-4b-g32-asym", "gemm"),
    ],
)
def test_real_checkpoints_have_the_values_of_the_tool_and_come_back(kind: str, variant: str) -> None:
    modules = check_peer(AWQ, kind)
    assert {module.settings["variant"] for module in modules} == {variant}


def test_gemv_fast_has_the_values_of_its_kernel_and_comes_back() -> None:
    kind = "autoawq-gemv_fast-4b-g64-asym-rtn"
    intended, arrays = references(kind, "intended")
    differ = 0
    modules = AWQ.modules(peer(kind), OPTIONS)
    assert {module.weight_name for module in modules} == set(intended)
    for module in modules:
        converted = AWQ.convert(module, OPTIONS)
        codes = fast_codes(module.tensors["qweight"].array())
        group = np.arange(codes.shape[1]) // 64
        scale = module.tensors["scales"].array().T.astype(np.float64)[:, group]
        zero = module.tensors["qzeros"].array().T.astype(np.float64)[:, group]
        values = converted.weight.dequantize()
        assert values.tobytes() == (codes * scale + zero).astype(np.float16).tobytes()
        assert not_rebuilt(AWQ, module, converted) == []
        if module.weight_name in arrays:
            meant = arrays[module.weight_name].astype(np.float64)
            step = np.maximum(np.abs(scale), 2.0**-24)
            assert (np.abs(values - meant) <= 0.02 * step + np.abs(meant) * 2.0**-10).all()
            differ += int(np.count_nonzero(values != arrays[module.weight_name]))
    assert differ > 0


@pytest.mark.parametrize(
    "kind", ["hqq-hqq-4b-g64-asym-axis1", "llmcompressor-pack_quantized-4b-g32-asym", "dense-fp16"]
)
def test_other_layouts_are_left_alone(kind: str) -> None:
    assert AWQ.modules(peer(kind), OPTIONS) == []


@pytest.mark.parametrize(
    "kind", ["gptqmodel-gptq-4b-g32-asym", "gptqmodel-gptq-8b-g-1-sym", "autogptq-gptq-3b-g64-asym"]
)
def test_gptq_is_left_alone(kind: str) -> None:
    assert AWQ.modules(peer(kind), OPTIONS) == []


# ------------------------------------------------------------------------------------------------------ any words
@any_words
@given(st.integers(0, 2**32), st.integers(1, 9), st.integers(1, 5), st.sampled_from([16, 32, 48, 64]))
def test_gemm_words_come_back(tmp_path: Path, seed: int, eights: int, groups: int, group: int) -> None:
    rng = np.random.default_rng(seed)
    n, k = 8 * eights, max(8, groups * group - 8 * int(rng.integers(0, 2)))
    tensors = gemm(rng, n, k, group)
    module = only_module(AWQ, made_up(tmp_path, tensors, config(group=group)))
    converted = AWQ.convert(module, OPTIONS)
    assert not_rebuilt(AWQ, module, converted) == []
    columns = np.arange(k) // group
    zeros = gemm_codes(tensors["m.qzeros"])
    wanted = affine_values(gemm_codes(tensors["m.qweight"]), tensors["m.scales"].T, zeros, columns)
    assert converted.weight.dequantize().tobytes() == wanted.tobytes()


@any_words
@given(st.integers(0, 2**32), st.integers(1, 20), st.integers(1, 12), st.sampled_from([32, 64, 128, 256]))
def test_gemv_words_come_back(tmp_path: Path, seed: int, n: int, groups: int, group: int) -> None:
    rng = np.random.default_rng(seed)
    k = groups * group
    tensors = gemv(rng, n, k, group)
    module = only_module(AWQ, made_up(tmp_path, tensors, config("gemv", group)))
    converted = AWQ.convert(module, OPTIONS)
    assert not_rebuilt(AWQ, module, converted) == []
    codes = np.array([stream(row, 4, k) for row in tensors["m.qweight"]])
    zeros = np.array([stream(row, 4, groups) for row in tensors["m.qzeros"]])
    wanted = affine_values(codes, tensors["m.scales"], zeros, np.arange(k) // group)
    assert converted.weight.dequantize().tobytes() == wanted.tobytes()


@any_words
@given(st.integers(0, 2**32), st.integers(1, 6), st.integers(1, 5), st.sampled_from([32, 64, 128]), st.booleans())
def test_gemv_fast_words_come_back(tmp_path: Path, seed: int, fours: int, wide: int, group: int, llm_awq: bool) -> None:
    rng = np.random.default_rng(seed)
    n, k = 4 * fours, max(group, 64) * wide
    zeros = "scaled_zeros" if llm_awq else "qzeros"
    tensors = gemv_fast(rng, n, k, group, zeros)
    stated = config("llm-awq" if llm_awq else "gemv_fast", group)
    module = only_module(AWQ, made_up(tmp_path, tensors, stated))
    converted = AWQ.convert(module, OPTIONS)
    assert not_rebuilt(AWQ, module, converted) == []
    columns = np.arange(k) // group
    scale, zero = (tensors[f"m.{s}"].T.astype(np.float64)[:, columns] for s in ("scales", zeros))
    with np.errstate(over="ignore"):
        wanted = (fast_codes(tensors["m.qweight"]) * scale + zero).astype(np.float16)
    assert converted.weight.dequantize().tobytes() == wanted.tobytes()


def test_minus_zero_stays_minus_zero(tmp_path: Path) -> None:
    tensors = gemv_fast(np.random.default_rng(0), 4, 64, 64)
    tensors["m.qzeros"][0] = np.float16(-0.0)
    module = only_module(AWQ, made_up(tmp_path, tensors, config("gemv_fast", 64)))
    offset = AWQ.convert(module, OPTIONS).weight.parts()["s0_offset"].array()
    assert np.signbit(offset).all()


def test_padding_that_is_not_zero_is_what_a_rule_cannot_rebuild(tmp_path: Path) -> None:
    tensors = gemv(np.random.default_rng(0), 4, 128, 64)
    tensors["m.qzeros"][0, 1] = 7
    tensors["m.scales"][0, 2] = np.nan
    module = only_module(AWQ, made_up(tmp_path, tensors, config("gemv", 64)))
    converted = AWQ.convert(module, OPTIONS)
    assert not_rebuilt(AWQ, module, converted) == ["qzeros", "scales"]
    assert not converted.weight.scheme.nonfinite


@pytest.mark.parametrize("group", [-1, 4096])
def test_one_group_a_row(tmp_path: Path, group: int) -> None:
    tensors = gemm(np.random.default_rng(0), 16, 96, 96)
    module = only_module(AWQ, made_up(tmp_path, tensors, config(group=group)))
    assert module.settings["group_size"] == 96
    assert not_rebuilt(AWQ, module, AWQ.convert(module, OPTIONS)) == []


def test_without_a_configuration_the_scales_tell_the_group_size(tmp_path: Path) -> None:
    module = only_module(AWQ, made_up(tmp_path, gemm(np.random.default_rng(0), 16, 96, 48)))
    assert module.settings["group_size"] == 48
