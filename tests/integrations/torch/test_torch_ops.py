"""The torch operators, on host tensors in the simulator: right, known to torch, refused when tensors do not fit."""

from __future__ import annotations

import numpy as np
import pytest

from bcqfmt.errors import BcqError
from products import kernel_samples as ks
from products import product_reference as reference
from simulated import sim_torch
from simulated.cuda_sim import SimulationError, simulate


@pytest.mark.parametrize("dtype", ["F16", "BF16", "F32"])
def test_products_and_dense_matrices(dtype: str) -> None:
    weight = ks.mixed(9, 48, 64)
    x, y, dense = simulate(sim_torch.products, weight, dtype)
    bound = {"F16": 1e-3, "BF16": 8e-3, "F32": 1e-6}[dtype]
    assert reference.relative_error(y, reference.product(weight, x)) < bound
    assert np.array_equal(dense, weight.dequantize(dtype).astype(np.float32))


@pytest.mark.parametrize("weight", [ks.weight("bcq", 3, 5, 64, 32), ks.mixed(9, 48, 64)], ids=["plain", "mixed"])
def test_torch_finds_nothing_to_complain_about(weight: object) -> None:
    said = simulate(sim_torch.checked, weight)
    assert set(said.values()) == {"SUCCESS"}
    assert len(said) >= 8


def test_the_operator_is_one_node_of_a_traced_program() -> None:
    inside, outside = simulate(sim_torch.traced, ks.weight("affine", 4, 5, 64, 32))
    assert np.array_equal(inside, outside)


@pytest.mark.parametrize(
    "which",
    [
        "short planes", "wide planes", "short scales", "wide scales", "transposed biases", "no group size",
        "more columns", "strided scales", "no planes", "flat planes", "two group sizes",
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit_are_refused(which: str) -> None:
    with pytest.raises(SimulationError) as caught:
        simulate(sim_torch.refused, which)
    assert caught.value.kind == "BCQ-E552"


def test_uploads_change_nothing() -> None:
    assert simulate(sim_torch.same_as_numpy, ks.weight("bcq", 3, 5, 64, 32))
    assert simulate(sim_torch.same_as_numpy, ks.weight("affine", 3, 5, 64, 32, numbers="F32"))


def test_host_tensors_are_refused_where_there_is_no_simulator() -> None:
    """BCQ-E551 or BCQ-E552: without a GPU there is none to use, with one the tensors are not on it."""
    import torch

    import bcqfmt.integrations.torch.ops.lut  # noqa: F401 - registers the operators

    with pytest.raises(BcqError, match=r"BCQ-E55[12]"):
        torch.ops.bcqfmt.lut_gemv(
            torch.ones(1, 32), [torch.zeros(1, 2, 4, dtype=torch.int32)], [torch.ones(1, 2, 4)], [torch.ones(1, 4)],
            [32], [32], None, None, None, None,
        )  # fmt: skip
