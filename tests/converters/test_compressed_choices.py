"""compressed-tensors: which packing, which group of the configuration, and inputs that are something else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from bcqfmt.converters.layouts.compressed_tensors import CompressedTensors
from bcqfmt.converters.layouts.protocol import Options
from bcqfmt.errors import BcqError
from sources.compressed_samples import config, count, group, made, weights
from sources.peers import OPTIONS, any_words, made_up, not_rebuilt, only_module, refusal, words

CT = CompressedTensors()


def refused(tmp_path: Path, tensors: dict[str, Any], stated: dict[str, Any] | None) -> BcqError:
    return refusal(CT, made_up(tmp_path, tensors, stated))


# ---------------------------------------------------------------------------------------------- which packing it is
@pytest.mark.parametrize(("bits", "k"), [(3, 30), (3, 20), (5, 12), (6, 15), (7, 8)])
def test_a_version_tells_packings_of_equal_width_apart(tmp_path: Path, bits: int, k: int) -> None:
    assert count(k, bits, True) == count(k, bits, False)
    tensors = {"m.weight_packed": words(np.random.default_rng(0), 4, count(k, bits, True))}
    tensors |= {"m.weight_scale": np.ones((4, 1), np.float16), "m.weight_shape": np.array([4, k])}
    for version, packing in (("0.17.1", "slots"), ("0.18.0", "dense"), ("0.9.4", "slots"), ("0.19.0", "dense")):
        source = made_up(tmp_path, tensors, config(group(weights(bits, None)), version=version))
        assert only_module(CT, source).settings["packing"] == packing


@any_words
@given(st.integers(0, 2**32), st.sampled_from([(3, 20), (5, 12), (6, 15), (7, 8)]), st.booleans())
def test_without_a_version_the_zero_bits_tell(tmp_path: Path, seed: int, case: tuple[int, int], dense: bool) -> None:
    bits, k = case
    tensors = made(np.random.default_rng(seed), (16, k), bits, k, dense, asym=False)
    stored = tensors["m.weight_packed"].view(np.uint32)
    assume(
        (stored >> np.uint32(32 // bits * bits)).any() if dense else (stored[:, -1] >> np.uint32(k * bits % 32)).any()
    )
    module = only_module(CT, made_up(tmp_path, tensors, config(group(weights(bits, None)), version=None)))
    assert module.settings["packing"] == ("dense" if dense else "slots")


def test_without_a_version_and_without_a_trace_it_is_refused(tmp_path: Path) -> None:
    tensors = {"m.weight_packed": np.zeros((4, 2), np.int32), "m.weight_scale": np.ones((4, 1), np.float16)}
    fault = refused(
        tmp_path, {**tensors, "m.weight_shape": np.array([4, 20])}, config(group(weights(3, None)), version=None)
    )
    assert (fault.code, fault.exit_code) == ("BCQ-E602", 4)


# ------------------------------------------------------------------------------------------------------ which group
def test_names_beat_patterns_and_patterns_beat_classes(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    tensors = {}
    for name, bits in (("a.down", 8), ("a.up", 2), ("b.up", 4)):
        one = made(rng, (8, 64), bits, 32, True, asym=False)
        tensors |= {f"{name}{key.removeprefix('m')}": value for key, value in one.items()}
    stated = config(group(weights(4), "Linear"), group(weights(2), "re:a[.].*"), group(weights(8), "a.down"))
    modules = CT.modules(made_up(tmp_path, tensors, stated), OPTIONS)
    assert {module.name: module.settings["bits"] for module in modules} == {"a.down": 8, "a.up": 2, "b.up": 4}


def test_among_classes_the_tensors_decide(tmp_path: Path) -> None:
    tensors = made(np.random.default_rng(0), (8, 64), 4, 32, True, asym=False)
    floats = {"num_bits": 8, "type": "float", "strategy": "channel"}
    stated = config(group(floats, "Linear"), group(weights(8), "Embedding"), group(weights(4), "Linear"))
    assert only_module(CT, made_up(tmp_path, tensors, stated)).settings["bits"] == 4


def test_a_quantized_module_on_the_ignore_list_is_quantized(tmp_path: Path) -> None:
    tensors = made(np.random.default_rng(0), (8, 64), 4, 32, True, asym=False)
    assert only_module(CT, made_up(tmp_path, tensors, config(group(weights()), ignore=["m"]))).settings["bits"] == 4


@pytest.mark.parametrize("plain", [False, True])
def test_stored_zero_points_count_whatever_the_configuration_says(tmp_path: Path, plain: bool) -> None:
    tensors = made(np.random.default_rng(0), (8, 64), 4, 32, True, asym=True)
    if plain:
        tensors["m.weight_zero_point"] = np.arange(-8, 8, dtype=np.int8).reshape(8, 2)
    module = only_module(CT, made_up(tmp_path, tensors, config(group(weights()))))
    converted = CT.convert(module, OPTIONS)
    assert "s0_zero" in converted.weight.parts()
    assert not_rebuilt(CT, module, converted) == []


# --------------------------------------------------------------------------------------------------------- bad inputs
@pytest.fixture
def tensors() -> dict[str, Any]:
    return made(np.random.default_rng(0), (8, 64), 4, 32, True, asym=True)


ASYM = config(group(weights(symmetric=False)))


@pytest.mark.parametrize("missing", ["weight_scale", "weight_shape", "weight_zero_point"])
def test_a_module_without_a_tensor_is_incomplete(tmp_path: Path, tensors: dict[str, Any], missing: str) -> None:
    del tensors[f"m.{missing}"]
    fault = refused(tmp_path, tensors, ASYM)
    assert (fault.code, fault.exit_code) == ("BCQ-E603", 4)
    assert missing in fault.finding.found


def test_an_order_that_old_versions_would_have_written(tmp_path: Path, tensors: dict[str, Any]) -> None:
    args = group(weights(symmetric=False, actorder="dynamic"))
    assert refused(tmp_path, tensors, config(args, version="0.12.2")).code == "BCQ-E603"
    assert only_module(CT, made_up(tmp_path, tensors, config(args)))  # from 0.19 on there is none


@pytest.mark.parametrize(
    ("suffix", "value", "code"),
    [
        ("weight_shape", np.array([8, 65]), "BCQ-E604"),
        ("weight_shape", np.array([9, 64]), "BCQ-E604"),
        ("weight_shape", np.array([0, 64]), "BCQ-E604"),
        ("weight_shape", np.array([8, -64]), "BCQ-E604"),
        ("weight_shape", np.array([1, 8, 64]), "BCQ-E604"),
        ("weight_scale", np.ones((8, 3), np.float16), "BCQ-E604"),
        ("weight_scale", np.ones((2, 8), np.float16), "BCQ-E604"),
        ("weight_scale", np.ones((8, 2), np.float64), "BCQ-E604"),
        ("weight_scale", np.full((8, 2), np.inf, np.float16), "BCQ-E609"),
        ("weight_zero_point", np.zeros((8, 2), np.int32), "BCQ-E604"),
        ("weight_zero_point", np.zeros((8, 3), np.int8), "BCQ-E604"),
        ("weight_packed", np.zeros((8, 9), np.int32), "BCQ-E604"),
        ("weight_packed", np.zeros((8, 32), np.uint8), "BCQ-E601"),
        ("weight_packed", np.zeros((0, 8), np.int32), "BCQ-E604"),
        ("weight_g_idx", np.zeros(63, np.int32), "BCQ-E604"),
        ("weight_g_idx", np.zeros(64, np.int32), "BCQ-E607"),
        ("weight_g_idx", np.full(64, 2, np.int32), "BCQ-E606"),
    ],
)
def test_tensors_that_do_not_fit(tmp_path: Path, tensors: dict[str, Any], suffix: str, value: Any, code: str) -> None:
    tensors[f"m.{suffix}"] = value
    assert refused(tmp_path, tensors, ASYM).code == code


@pytest.mark.parametrize(
    ("stated", "code"),
    [
        (None, "BCQ-E602"),
        (config(), "BCQ-E602"),
        (config(group(weights(), "other.module")), "BCQ-E602"),
        (config(group(weights(), "re:(")), "BCQ-E618"),
        (config(group(weights(), "re:other.*")), "BCQ-E602"),
        (config(group(weights(8))), "BCQ-E604"),
        (config(group(weights(4, 64))), "BCQ-E604"),
        (config(group(weights(4, None))), "BCQ-E604"),
        (config(group(weights(9))), "BCQ-E608"),
        (config(group(weights(0))), "BCQ-E608"),
        (config(group(weights(type="float"))), "BCQ-E608"),
        (config(group(weights(strategy="block"))), "BCQ-E608"),
        (config(group(weights(4, 4))), "BCQ-E608"),
        (config(group(weights(4, 0))), "BCQ-E602"),
        (config(group({**weights(), "group_size": "32"})), "BCQ-E602"),
        (config(group(weights()), format="marlin-24"), "BCQ-E601"),
        (config(group(weights()), sparsity_config={"format": "sparse-24-bitmask"}), "BCQ-E601"),
    ],
)
def test_configurations_that_do_not_fit(
    tmp_path: Path, tensors: dict[str, Any], stated: dict[str, Any] | None, code: str
) -> None:
    assert refused(tmp_path, tensors, stated).code == code


def test_nan_scales_may_be_allowed(tmp_path: Path, tensors: dict[str, Any]) -> None:
    tensors["m.weight_scale"][3, 1] = np.nan
    module = only_module(CT, made_up(tmp_path, tensors, ASYM))
    converted = CT.convert(module, Options(allow_nonfinite=True))
    assert converted.weight.scheme.nonfinite
    assert not_rebuilt(CT, module, converted) == []
