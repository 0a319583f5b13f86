"""AnyBCQ: there is no checkpoint to be had, so they are made after the layout's description, garbage included."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bcqfmt.converters.convert.conversion import Conversion, ConvertOptions
from bcqfmt.converters.layouts.anybcq import AnyBcq
from bcqfmt.converters.layouts.protocol import Options
from bcqfmt.inspect.summary import summarize
from sources.peers import OPTIONS, any_words, halves, made_up, not_rebuilt, only_module, peer, refusal, words

ANY = AnyBcq()


def made(rng: np.random.Generator, n: int, k: int, size: int, bits: int) -> dict[str, Any]:
    groups = k // size
    tensors: dict[str, Any] = {"m.qweight": words(rng, k // 32, bits, n), "m.bias": halves(rng, n)}
    tensors["m.q_bias"] = rng.integers(0, 2**16, (groups, n)).astype(np.uint16).view(np.float16)  # never initialised
    for p in range(2, bits + 1):
        tensors[f"m.alpha_{p}"] = halves(rng, groups, p, n)
        tensors[f"m.beta_{p}"] = halves(rng, groups, n)
    return tensors


def values(tensors: dict[str, Any], p: int, size: int) -> Any:
    """Sum of the signed alphas and beta at precision p, rounded once."""
    packed = tensors["m.qweight"].view(np.uint32)
    blocks, _, n = packed.shape
    group = np.arange(32 * blocks) // size
    with np.errstate(over="ignore"):
        total = tensors[f"m.beta_{p}"].T.astype(np.float64)[:, group]
        for b in range(p):
            bit = (packed[:, b, :, None] >> np.arange(32, dtype=np.uint32)) & np.uint32(1)  # (K/32, N, 32)
            sign = np.where(bit.transpose(1, 0, 2).reshape(n, -1), 1.0, -1.0)
            total = total + sign * tensors[f"m.alpha_{p}"][:, b].T.astype(np.float64)[:, group]
        return total.astype(np.float16)


@any_words
@given(st.integers(0, 2**32), st.integers(1, 20), st.integers(1, 5), st.sampled_from([32, 64, 96]), st.integers(2, 8))
def test_words_come_back(tmp_path: Path, seed: int, n: int, groups: int, size: int, bits: int) -> None:
    rng = np.random.default_rng(seed)
    tensors = made(rng, n, groups * size, size, bits)
    stated = {"seed_precision": 2, "parent_precision": bits, "group_size": size}
    module = only_module(ANY, made_up(tmp_path, tensors, anybcq=stated))
    converted = ANY.convert(module, OPTIONS)
    assert converted.weight.scheme.segments[0].precisions == tuple(range(2, bits))
    assert not_rebuilt(ANY, module, converted) == []
    for p in range(2, bits + 1):
        assert converted.weight.dequantize(planes=p).tobytes() == values(tensors, p, size).tobytes()


def test_garbage_in_q_bias_and_the_real_bias_are_no_business_of_the_module(tmp_path: Path) -> None:
    tensors = made(np.random.default_rng(0), 8, 64, 64, 3)
    tensors["m.q_bias"][:] = np.nan
    module = only_module(ANY, made_up(tmp_path, tensors))
    assert set(module.tensors) == {"qweight", "alpha_2", "beta_2", "alpha_3", "beta_3"}
    assert module.settings["values"] == "specification"
    assert not ANY.convert(module, OPTIONS).weight.scheme.nonfinite


def test_bits_of_the_first_plane_are_those_of_the_first_words(tmp_path: Path) -> None:
    tensors = made(np.random.default_rng(0), 2, 64, 64, 2)
    weight = ANY.convert(only_module(ANY, made_up(tmp_path, tensors)), OPTIONS).weight
    planes = weight.planes()[0]
    assert planes[1, 0, 1] == tensors["m.qweight"].view(np.uint32)[1, 1, 0]


@pytest.mark.parametrize("kind", ["dense-bf16", "gptqmodel-gptq-4b-g32-asym", "autoawq-gemm-4b-g32-asym"])
def test_other_layouts_are_left_alone(kind: str) -> None:
    assert ANY.modules(peer(kind), OPTIONS) == []


def test_a_folder_without_a_method_is_called_by_its_layout(tmp_path: Path) -> None:
    """Nothing in config.json says what it is; manifest, record, card and `inspect` do."""
    source = made_up(tmp_path / "any", made(np.random.default_rng(0), 8, 64, 64, 3))
    Conversion(source, ConvertOptions()).run(tmp_path / "bcq")
    assert json.loads((tmp_path / "bcq" / "bcq_manifest.json").read_text())["source"]["format"] == "anybcq"
    assert json.loads((tmp_path / "bcq" / "bcq_source" / "source.json").read_text())["format"] == "anybcq"
    assert "from an anybcq checkpoint" in (tmp_path / "bcq" / "README.md").read_text()
    summary = summarize(tmp_path / "any")
    assert (summary.foreign, summary.quantization) == ("anybcq", {"method": "anybcq", "evidence": "tensor names"})


# --------------------------------------------------------------------------------------------------------- bad inputs
@pytest.mark.parametrize("missing", ["beta_2", "beta_3", "alpha_3"])
def test_a_module_without_a_tensor_is_incomplete(tmp_path: Path, missing: str) -> None:
    tensors = made(np.random.default_rng(0), 8, 64, 32, 3)
    del tensors[f"m.{missing}"]
    fault = refusal(ANY, made_up(tmp_path, tensors))
    assert (fault.code, fault.exit_code) == ("BCQ-E603", 4)
    assert missing.removeprefix("alpha_") in fault.finding.found + fault.finding.expected


@pytest.mark.parametrize(
    ("suffix", "value", "code"),
    [
        ("qweight", np.zeros((3, 8), np.int32), "BCQ-E604"),
        ("qweight", np.zeros((2, 3, 8), np.int64), "BCQ-E604"),
        ("qweight", np.zeros((2, 3, 9), np.int32), "BCQ-E604"),
        ("qweight", np.zeros((2, 9, 8), np.int32), "BCQ-E608"),
        ("qweight", np.zeros((2, 4, 8), np.int32), "BCQ-E603"),
        ("alpha_2", np.zeros((2, 3, 8), np.float16), "BCQ-E604"),
        ("alpha_2", np.zeros((2, 2, 8), np.float32), "BCQ-E604"),
        ("alpha_3", np.zeros((2, 3, 8), np.int16), "BCQ-E604"),
        ("alpha_3", np.zeros((3, 3, 8), np.float16), "BCQ-E604"),
        ("alpha_3", np.zeros((16, 3, 8), np.float16), "BCQ-E608"),
        ("alpha_3", np.full((2, 3, 8), np.nan, np.float16), "BCQ-E609"),
        ("beta_2", np.full((2, 8), np.inf, np.float16), "BCQ-E609"),
        ("beta_3", np.zeros((8, 2), np.float16), "BCQ-E604"),
    ],
)
def test_tensors_that_do_not_fit(tmp_path: Path, suffix: str, value: Any, code: str) -> None:
    tensors = {**made(np.random.default_rng(0), 8, 64, 32, 3), f"m.{suffix}": value}
    assert refusal(ANY, made_up(tmp_path, tensors)).code == code


@pytest.mark.parametrize("stated", [{"parent_precision": 4}, {"group_size": 64}])
def test_the_configuration_must_say_what_the_tensors_say(tmp_path: Path, stated: dict[str, Any]) -> None:
    fault = refusal(ANY, made_up(tmp_path, made(np.random.default_rng(0), 8, 64, 32, 3), anybcq=stated))
    assert (fault.code, fault.exit_code) == ("BCQ-E602", 4)


def test_nan_alphas_may_be_allowed(tmp_path: Path) -> None:
    tensors = made(np.random.default_rng(0), 8, 64, 32, 3)
    tensors["m.alpha_2"][0, 0, 0] = np.nan
    module = only_module(ANY, made_up(tmp_path, tensors))
    converted = ANY.convert(module, Options(allow_nonfinite=True))
    assert converted.weight.scheme.nonfinite
    assert not_rebuilt(ANY, module, converted) == []
