"""AWQ inputs that are something else, or not whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bcqfmt.converters.layouts.awq import Awq
from bcqfmt.converters.layouts.protocol import Options
from bcqfmt.errors import BcqError
from sources.awq_samples import config, gemm, gemv, gemv_fast
from sources.peers import OPTIONS, made_up, not_rebuilt, only_module, refusal

AWQ = Awq()


def refused(tmp_path: Path, tensors: dict[str, Any], stated: dict[str, Any]) -> BcqError:
    return refusal(AWQ, made_up(tmp_path, tensors, stated))


# ------------------------------------------------------------------------------------------- layouts that look alike
def test_gemv_and_gptq_of_one_outline_are_told_apart(tmp_path: Path) -> None:
    tensors = gemv(np.random.default_rng(0), 24, 128, 64)  # qweight and scales are both [24, 16]
    assert only_module(AWQ, made_up(tmp_path, tensors, config("gemv", 64))).settings["variant"] == "gemv"
    two_bits = {**tensors, "m.qzeros": tensors["m.qzeros"][:, :1]}  # GPTQ, 2 bit, groups of 16: qzeros [24, 1]
    assert (
        AWQ.modules(made_up(tmp_path, two_bits, {"quant_method": "gptq", "bits": 2, "group_size": 16}), OPTIONS) == []
    )
    assert AWQ.modules(made_up(tmp_path, tensors, {"quant_method": "gptq", "bits": 4, "group_size": 8}), OPTIONS) == []


# --------------------------------------------------------------------------------------------------------- bad inputs
@pytest.mark.parametrize("missing", ["qzeros", "scales"])
@pytest.mark.parametrize("make", [gemv_fast, gemm])
def test_a_module_without_a_tensor_is_incomplete(tmp_path: Path, make: Any, missing: str) -> None:
    tensors = make(np.random.default_rng(0), 16, 128, 64)
    del tensors[f"m.{missing}"]
    if make is gemm and missing == "scales":  # nothing tells it from GPTQ, which then says what is missing
        assert AWQ.modules(made_up(tmp_path, tensors, config(group=64)), OPTIONS) == []
    else:
        fault = refused(tmp_path, tensors, config(None, 64))
        assert (fault.code, fault.exit_code) == ("BCQ-E603", 4)
        assert missing in fault.finding.found


def test_the_configuration_must_name_the_variant_that_is_there(tmp_path: Path) -> None:
    fault = refused(tmp_path, gemm(np.random.default_rng(0), 16, 64, 32), config("gemv"))
    assert (fault.code, fault.exit_code) == ("BCQ-E602", 4)
    assert "gemm" in str(fault)
    assert "gemv" in str(fault)


@pytest.mark.parametrize("bits", [2, 3, 8])
def test_awq_has_four_bits(tmp_path: Path, bits: int) -> None:
    fault = refused(tmp_path, gemm(np.random.default_rng(0), 16, 64, 32), config(bits=bits))
    assert (fault.code, fault.exit_code) == ("BCQ-E608", 5)


def test_a_group_size_that_the_scales_contradict(tmp_path: Path) -> None:
    fault = refused(tmp_path, gemm(np.random.default_rng(0), 16, 64, 32), config(group=16))
    assert fault.code == "BCQ-E604"
    assert "[2, 2]" in fault.finding.found


@pytest.mark.parametrize("group", [1, 4, 0])
def test_groups_below_eight(tmp_path: Path, group: int) -> None:
    assert refused(tmp_path, gemm(np.random.default_rng(0), 16, 64, 32), config(group=group)).code == "BCQ-E608"


@pytest.mark.parametrize("make", [gemv, gemv_fast])
def test_padding_hides_the_group_size(tmp_path: Path, make: Any) -> None:
    assert refused(tmp_path, make(np.random.default_rng(0), 16, 192, 64), config(None, None)).code == "BCQ-E602"


@pytest.mark.parametrize(("group", "code"), [(128, "BCQ-E608"), (48, "BCQ-E608"), (96, "BCQ-E608"), (32, "BCQ-E604")])
def test_group_sizes_that_gemv_has_not(tmp_path: Path, group: int, code: str) -> None:
    assert refused(tmp_path, gemv(np.random.default_rng(0), 16, 192, 64), config("gemv", group)).code == code


def test_gemv_fast_needs_sixty_four_columns(tmp_path: Path) -> None:
    tensors = {"m.qweight": np.zeros((2, 32), np.int16), "m.scales": np.zeros((32, 8), np.float16)}
    tensors["m.qzeros"] = tensors["m.scales"]
    assert refused(tmp_path, tensors, config("gemv_fast", 32)).code == "BCQ-E604"


def test_integer_zeros_do_not_belong_into_gemv_fast(tmp_path: Path) -> None:
    tensors = gemv_fast(np.random.default_rng(0), 16, 64, 64)
    tensors["m.qzeros"] = np.zeros((16, 16), np.int32)
    assert refused(tmp_path, tensors, config("gemv_fast", 64)).code == "BCQ-E604"


def test_an_empty_tensor(tmp_path: Path) -> None:
    tensors = {"m.qweight": np.zeros((64, 0), np.int32), "m.qzeros": np.zeros((2, 0), np.int32)}
    assert refused(tmp_path, {**tensors, "m.scales": np.zeros((2, 0), np.float16)}, config()).code == "BCQ-E604"


@pytest.mark.parametrize("make", [gemm, gemv, gemv_fast])
def test_nan_scales_are_refused_unless_allowed(tmp_path: Path, make: Any) -> None:
    tensors = make(np.random.default_rng(0), 16, 64, 64)
    tensors["m.scales"][0, 0] = np.nan
    fault = refused(tmp_path, tensors, config(None, 64))
    assert (fault.code, fault.exit_code) == ("BCQ-E609", 4)
    allowed = Options(allow_nonfinite=True)
    module = only_module(AWQ, made_up(tmp_path, tensors, config(None, 64)))
    converted = AWQ.convert(module, allowed)
    assert converted.weight.scheme.nonfinite
    assert not_rebuilt(AWQ, module, converted) == []
