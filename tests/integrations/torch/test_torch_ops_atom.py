"""The operators of W4A4 and of the INT4 cache, on host tensors in the simulator."""

from __future__ import annotations

from typing import Any

import pytest

from bcqfmt.errors import BcqError
from bcqfmt.kernels.runtime import device
from products import op_samples
from simulated import sim_torch_each, sim_torch_refused
from simulated.cuda_sim import SimulationError, simulate


@pytest.mark.parametrize("name", op_samples.ATOM)
def test_the_kernel_is_what_runs(name: str) -> None:
    through, direct = simulate(sim_torch_each.same, name)
    assert through == direct


@pytest.mark.parametrize("name", op_samples.ATOM)
def test_torch_finds_nothing_to_complain_about(name: str) -> None:
    said = simulate(sim_torch_each.checked, name)
    assert set(said.values()) == {"SUCCESS"}
    assert len(said) >= 4


@pytest.mark.parametrize("name", op_samples.ATOM)
def test_the_operator_is_one_node_of_a_traced_program(name: str) -> None:
    inside, outside, nodes = simulate(sim_torch_each.traced, name)
    assert inside == outside
    assert nodes == 1


def test_a_program_for_any_number_of_tokens() -> None:
    inside, outside = simulate(sim_torch_each.any_number_of_tokens)
    assert inside == outside


@pytest.mark.parametrize("case", sim_torch_refused.ATOM)
def test_tensors_that_do_not_fit_are_refused(case: str) -> None:
    with pytest.raises(SimulationError) as caught:
        simulate(sim_torch_refused.refused, case, "ATOM")
    assert caught.value.kind == "BCQ-E552"
    assert sim_torch_refused.ATOM[case][2] in caught.value.text
    assert "expected" in caught.value.text


def _calls() -> dict[str, Any]:
    """Every operator with host tensors."""
    import torch

    x, words = torch.ones(1, 256), torch.zeros(1, 2, 32, 8, dtype=torch.int32)
    cache = (words, words[..., 0].contiguous()) * 2
    return {
        "quantize_reorder": (x, words, 1.0, "absmax"),
        "rmsnorm_reorder_quant": (x, x, words, 1e-5, 1.0, "absmax"),
        "w4a4": (words, x, 1, words, x, words, words, 1, torch.float16),
        "quantize_kv": (*cache, x, x, words),
        "decode_attention": (x, *cache, words, None, None),
    }


@pytest.mark.parametrize("name", op_samples.ATOM)
def test_host_tensors_are_refused_where_there_is_no_simulator(name: str) -> None:
    """BCQ-E551 or BCQ-E552: without a GPU there is none to use, with one the tensors are not on it."""
    import torch

    with pytest.raises(BcqError, match=r"BCQ-E55[12]"):
        getattr(torch.ops.bcqfmt, name)(*_calls()[name])


@pytest.mark.parametrize("name", op_samples.ATOM)
def test_without_numba_cuda(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    device._trouble.cache_clear()
    monkeypatch.setattr(device.importlib.util, "find_spec", lambda name: None)
    try:
        with pytest.raises(BcqError, match="BCQ-E306"):
            getattr(torch.ops.bcqfmt, name)(*_calls()[name])
    finally:
        device._trouble.cache_clear()
