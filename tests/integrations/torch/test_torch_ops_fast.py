"""The operators of the fast products, on host tensors in the simulator."""

from __future__ import annotations

from typing import Any

import pytest

from bcqfmt.errors import BcqError
from bcqfmt.kernels.runtime import device
from products import op_samples
from simulated import sim_torch_each, sim_torch_refused
from simulated.cuda_sim import SimulationError, simulate


@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])  # outliers in a launch of their own, and in the same one
@pytest.mark.parametrize("name", [name for name in op_samples.FAST if name.startswith("bit_gemv")])
def test_the_fast_product_is_what_runs(name: str, capability: tuple[int, int]) -> None:
    through, direct = simulate(sim_torch_each.same, name, capability)
    assert through == direct


@pytest.mark.parametrize("name", [name for name in op_samples.FAST if not name.startswith("bit_gemv")])
def test_the_kernel_is_what_runs(name: str) -> None:
    through, direct = simulate(sim_torch_each.same, name)
    assert through == direct


@pytest.mark.parametrize("name", op_samples.FAST)
def test_torch_finds_nothing_to_complain_about(name: str) -> None:
    said = simulate(sim_torch_each.checked, name)
    assert set(said.values()) == {"SUCCESS"}
    assert len(said) >= 4


@pytest.mark.parametrize("name", ["bit_gemv", "mixed_gemv", "csr_outliers"])
def test_the_operator_is_one_node_of_a_traced_program(name: str) -> None:
    inside, outside, nodes = simulate(sim_torch_each.traced, name)
    assert inside == outside
    assert nodes == 1


def test_results_changed_in_place_are_those_of_a_compiled_graph() -> None:
    inside, outside = simulate(sim_torch_each.fused_outliers)
    assert inside == outside


@pytest.mark.parametrize(("name", "which"), [places for places in op_samples.PLACES if places[0] in op_samples.FAST])
def test_wrong_places_are_never_followed(name: str, which: str) -> None:
    rows = {"bit_gemv with everything": [(2, 9)], "mixed_gemv with everything": [(1, 5)], "csr_outliers": []}
    assert simulate(sim_torch_each.wrong_places, name, which) == rows[name]


@pytest.mark.parametrize("case", sim_torch_refused.FAST)
def test_tensors_that_do_not_fit_are_refused(case: str) -> None:
    with pytest.raises(SimulationError) as caught:
        simulate(sim_torch_refused.refused, case, "FAST")
    assert caught.value.kind == "BCQ-E552"
    assert sim_torch_refused.FAST[case][2] in caught.value.text
    assert "expected" in caught.value.text


def _calls() -> dict[str, Any]:
    """Every operator with host tensors."""
    import torch

    x, words = torch.ones(1, 8), torch.zeros(4, dtype=torch.int32)
    return {
        "bit_gemv": (x, [words], [words], 8, [1], [8], [8], "bcq", "F16", None, None, None, None, 0, 0, 0, False),
        "mixed_gemv": (x, words, words, 8, 8, 0, 1, None, None, 0, 0, 0, False),
        "csr_outliers": (torch.ones(1, 3), words, words, x, x),
    }


@pytest.mark.parametrize("name", ["bit_gemv", "mixed_gemv", "csr_outliers"])
def test_host_tensors_are_refused_where_there_is_no_simulator(name: str) -> None:
    """BCQ-E551 or BCQ-E552: without a GPU there is none to use, with one the tensors are not on it."""
    import torch

    with pytest.raises(BcqError, match=r"BCQ-E55[12]"):
        getattr(torch.ops.bcqfmt, name)(*_calls()[name])


@pytest.mark.parametrize("name", ["bit_gemv", "mixed_gemv", "csr_outliers"])
def test_without_numba_cuda(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    device._trouble.cache_clear()
    monkeypatch.setattr(device.importlib.util, "find_spec", lambda name: None)
    try:
        with pytest.raises(BcqError, match="BCQ-E306"):
            getattr(torch.ops.bcqfmt, name)(*_calls()[name])
    finally:
        device._trouble.cache_clear()
