"""HQQ: real checkpoints, random words at every width, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bcqfmt.container.dtypes import round_to
from bcqfmt.converters.layouts.hqq import Hqq
from bcqfmt.converters.layouts.protocol import Options
from sources.peers import OPTIONS, any_words, check_peer, halves, made_up, not_rebuilt, only_module, peer, refusal

HQQ = Hqq()
SHIFTS = {1: range(7, -1, -1), 2: (6, 4, 2, 0), 3: range(27, -1, -3), 4: (4, 0), 5: (0,), 6: (0,), 8: (0,)}
PACKING = {1: "1bit_u8", 2: "2bit_u8", 3: "3bit_32", 4: "4bit_u8", 5: "8bit_u8", 6: "8bit_u8", 8: "8bit_u8"}


def text(value: str) -> Any:
    return np.frombuffer(value.encode("latin-1"), np.uint8)


def made(rng: np.random.Generator, n: int, k: int, size: int, bits: int, kind: Any = np.float16) -> dict[str, Any]:
    """Words in which every bit that holds a code is random."""
    rows, slabs = n * k // size, len(SHIFTS[bits])
    codes = np.zeros((-(-rows // slabs) * slabs, size), np.uint32)
    codes[:rows] = rng.integers(0, 2**bits, (rows, size))
    step = len(codes) // slabs
    packed = np.zeros((step, size), np.uint32)
    for i, shift in enumerate(SHIFTS[bits]):
        packed |= codes[i * step : (i + 1) * step] << np.uint32(shift)
    return {
        "m.W_q": packed.view(np.int32) if bits == 3 else packed.astype(np.uint8),
        "m.scale": halves(rng, rows, 1).astype(kind),
        "m.zero": (halves(rng, rows, 1) / np.float16(512)).astype(kind),
        "m.nbits": np.array(bits, np.int32),
        "m.group_size": np.array(size, np.int32),
        "m.axis": np.array(1, np.int32),
        "m.shape": np.array([n, k]),
        "m.packing": text(PACKING[bits]),
        "m.compute_dtype": text(f"torch.{np.dtype(kind).name}"),
        "m.view_as_float": np.array(0, np.uint8),
        "m.quant_scale": np.array(0, np.uint8),
        "m.quant_zero": np.array(0, np.uint8),
    }


def values(tensors: dict[str, Any], n: int, k: int, bits: int) -> Any:
    """RN(RN(q - zero) * scale) slab by slab, by another decoder."""
    packed = tensors["m.W_q"].view(np.uint32 if bits == 3 else np.uint8)
    codes = np.concatenate([(packed >> shift) & (2**bits - 1) for shift in SHIFTS[bits]])
    scale, zero = tensors["m.scale"], tensors["m.zero"]
    kind = {"float16": "F16", "bfloat16": "BF16", "float32": "F32"}[scale.dtype.name]
    with np.errstate(over="ignore", invalid="ignore"):
        first = round_to(codes[: len(zero)].astype(np.float64) - zero.astype(np.float64), kind)
        return round_to(first.astype(np.float64) * scale.astype(np.float64), kind).reshape(n, k)


# ------------------------------------------------------------------------------------------------ real checkpoints
@pytest.mark.parametrize(("kind", "bits"), [("hqq-hqq-3b-g64-asym-axis1", 3), ("hqq-hqq-4b-g64-asym-axis1", 4)])
def test_real_checkpoints_have_the_values_of_the_tool_and_come_back(kind: str, bits: int) -> None:
    for module in check_peer(HQQ, kind):
        assert set(module.tensors) == {"W_q", "scale", "zero"}
        assert module.settings["bits"] == bits


def test_axis_zero_is_refused() -> None:
    fault = refusal(HQQ, peer("hqq-hqq-2b-g32-asym-axis0"))
    assert (fault.code, fault.exit_code) == ("BCQ-E601", 5)
    assert "groups are not runs along the input" in str(fault)


@pytest.mark.parametrize(
    "kind", ["dense-bf16", "llmcompressor-pack_quantized-4b-g32-asym", "gptqmodel-gptq-4b-g32-asym"]
)
def test_other_layouts_are_left_alone(kind: str) -> None:
    assert HQQ.modules(peer(kind), OPTIONS) == []


# ------------------------------------------------------------------------------------------------------ any words
@any_words
@given(
    st.integers(0, 2**32), st.sampled_from([1, 2, 3, 4, 5, 6, 8]), st.integers(1, 4), st.integers(1, 4),
    st.sampled_from([8, 24, 64]), st.sampled_from([np.float16, ml_dtypes.bfloat16, np.float32]),
)  # fmt: skip
def test_words_come_back(tmp_path: Path, seed: int, bits: int, eights: int, groups: int, size: int, kind: Any) -> None:
    rng = np.random.default_rng(seed)
    n, k = eights * (8 if bits != 3 else 3), groups * size
    tensors = made(rng, n, k, size, bits, kind)
    module = only_module(HQQ, made_up(tmp_path, tensors))
    converted = HQQ.convert(module, OPTIONS)
    assert not_rebuilt(HQQ, module, converted) == []
    assert converted.weight.dequantize().tobytes() == values(tensors, n, k, bits).tobytes()


def test_top_bits_and_padding_of_three_bits_are_what_a_rule_cannot_rebuild(tmp_path: Path) -> None:
    tensors = made(np.random.default_rng(0), 3, 32, 32, 3)
    tensors["m.W_q"] = tensors["m.W_q"] | np.int32(1 << 30)
    module = only_module(HQQ, made_up(tmp_path, tensors))
    converted = HQQ.convert(module, OPTIONS)
    assert not_rebuilt(HQQ, module, converted) == ["W_q"]
    assert converted.weight.dequantize().tobytes() == values(tensors, 3, 32, 3).tobytes()


def test_without_a_group_size_a_row_is_a_group(tmp_path: Path) -> None:
    tensors = made(np.random.default_rng(0), 8, 40, 40, 4)
    del tensors["m.group_size"]
    module = only_module(HQQ, made_up(tmp_path, tensors))
    assert module.settings["group_size"] == 40
    assert not_rebuilt(HQQ, module, HQQ.convert(module, OPTIONS)) == []


# --------------------------------------------------------------------------------------------------------- bad inputs
@pytest.mark.parametrize("missing", ["scale", "zero", "nbits", "axis", "shape"])
def test_a_module_without_a_tensor_is_incomplete(tmp_path: Path, missing: str) -> None:
    tensors = made(np.random.default_rng(0), 8, 64, 32, 4)
    del tensors[f"m.{missing}"]
    fault = refusal(HQQ, made_up(tmp_path, tensors))
    assert (fault.code, fault.exit_code) == ("BCQ-E603", 4)


@pytest.mark.parametrize(
    ("suffix", "value", "code"),
    [
        ("axis", np.array(0, np.int32), "BCQ-E601"),
        ("view_as_float", np.array(1, np.uint8), "BCQ-E601"),
        ("quant_scale", np.array(1, np.uint8), "BCQ-E601"),
        ("quant_zero", np.array(1, np.uint8), "BCQ-E601"),
        ("nbits", np.array(1.58, np.float32), "BCQ-E601"),
        ("nbits", np.array(7, np.int32), "BCQ-E608"),
        ("nbits", np.array(2, np.int32), "BCQ-E604"),
        ("nbits", np.array([4, 4], np.int32), "BCQ-E604"),
        ("group_size", np.array(48, np.int32), "BCQ-E608"),
        ("group_size", np.array(4, np.int32), "BCQ-E608"),
        ("group_size", np.array(64, np.int32), "BCQ-E604"),
        ("shape", np.array([8, 64, 1]), "BCQ-E604"),
        ("shape", np.array([-8, -64]), "BCQ-E604"),
        ("shape", np.array([64, 8]), "BCQ-E604"),
        ("shape", np.array([2**40, 2**40]), "BCQ-E604"),
        ("packing", text("8bit_u8"), "BCQ-E602"),
        ("packing", text("4bit_u8" * 100), "BCQ-E604"),
        ("compute_dtype", text("__import__('os').abort()"), "BCQ-E602"),
        ("compute_dtype", text("torch.bfloat16"), "BCQ-E602"),
        ("compute_dtype", np.zeros(3, np.int32), "BCQ-E604"),
        ("scale", np.ones((16, 1), np.float32), "BCQ-E602"),
        ("scale", np.ones((1, 16), np.float16), "BCQ-E604"),
        ("scale", np.full((16, 1), np.nan, np.float16), "BCQ-E609"),
        ("zero", np.full((16, 1), np.inf, np.float16), "BCQ-E609"),
        ("zero", np.ones((16, 1), np.uint8), "BCQ-E604"),
        ("W_q", np.zeros((8, 32), np.float16), "BCQ-E604"),
        ("W_q", np.zeros((16, 32), np.uint8), "BCQ-E604"),
    ],
)
def test_tensors_that_do_not_fit(tmp_path: Path, suffix: str, value: Any, code: str) -> None:
    tensors = {**made(np.random.default_rng(0), 8, 64, 32, 4), f"m.{suffix}": value}
    assert refusal(HQQ, made_up(tmp_path, tensors)).code == code


def test_slabs_must_be_whole(tmp_path: Path) -> None:
    tensors = made(np.random.default_rng(0), 3, 32, 32, 4)
    assert refusal(HQQ, made_up(tmp_path, tensors)).code == "BCQ-E604"


@pytest.mark.parametrize("bits", [5, 6])
def test_a_byte_above_the_codes(tmp_path: Path, bits: int) -> None:
    tensors = made(np.random.default_rng(0), 8, 64, 32, bits)
    tensors["m.W_q"][3, 3] = 2**bits
    assert refusal(HQQ, made_up(tmp_path, tensors)).code == "BCQ-E604"


def test_nan_zeros_may_be_allowed(tmp_path: Path) -> None:
    tensors = made(np.random.default_rng(0), 8, 64, 32, 4)
    tensors["m.zero"][3] = np.nan
    module = only_module(HQQ, made_up(tmp_path, tensors))
    converted = HQQ.convert(module, Options(allow_nonfinite=True))
    assert converted.weight.scheme.nonfinite
    assert not_rebuilt(HQQ, module, converted) == []
