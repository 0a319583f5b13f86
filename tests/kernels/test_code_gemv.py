"""The kernel for 4-bit codes and several vectors in the simulator, against the float64 product of the decoder."""

from __future__ import annotations

import numpy as np
import pytest

import kernel_samples as ks
import sim_code
from bcqfmt import BcqWeight
from bcqfmt.dtypes import numpy_dtype
from bcqfmt.kernels import reference
from bcqfmt.kernels.code_shape import CodeShape, space_for
from bcqfmt.kernels.mixed_shape import SHARED_LIMIT
from cuda_sim import SimulationError, simulate

pytestmark = pytest.mark.xdist_group("simulator-code_gemv")
BOUND = 3e-5  # 16-bit integers for x


def normal(batch: int, columns: int, dtype: str = "F16") -> np.ndarray:
    """Activations of one size."""
    return np.random.default_rng(columns).normal(size=(batch, columns)).astype(numpy_dtype(dtype))


@pytest.mark.parametrize(
    ("rows", "columns", "g", "batch", "dtype"),
    [
        (16, 128, 128, 1, "F16"),
        (33, 512, 128, 3, "F16"),
        (17, 396, 128, 8, "BF16"),
        (40, 384, 384, 5, "F16"),
        (7, 1024, 256, 2, "BF16"),
        (20, 100, 128, 4, "F16"),
    ],
)
def test_any_shape(rows: int, columns: int, g: int, batch: int, dtype: str) -> None:
    weight = sim_code.weight(rows, columns, min(g, columns))
    x = normal(batch, columns, dtype)
    found = simulate(sim_code.product, weight, x)
    assert (found.same, found.intact) == (True, True)
    assert reference.relative_error(found.value, reference.product(weight, x)) < BOUND


@pytest.mark.parametrize(("slices", "tiles"), [(1, 1), (2, 3), (4, 2)])
def test_shares_of_the_work_change_sums_by_rounding_only(slices: int, tiles: int) -> None:
    weight = sim_code.weight(70, 640, zeros=False)
    x = normal(2, 640)
    found = simulate(sim_code.product, weight, x, slices=slices, tiles=tiles)
    assert (found.same, found.intact) == (True, True)
    assert reference.relative_error(found.value, reference.product(weight, x)) < BOUND


def test_a_vector_does_not_depend_on_its_neighbours() -> None:
    weight, x = sim_code.weight(19, 256), normal(6, 256)
    together = simulate(sim_code.product, weight, x, slices=2, tiles=1).value
    alone = simulate(sim_code.product, weight, x[4:5], slices=2, tiles=1).value
    assert together[4:5].tobytes() == alone.tobytes()


@pytest.mark.parametrize(("result", "bound"), [("F16", 1e-3), ("BF16", 4e-3)])
def test_results_in_every_type(result: str, bound: float) -> None:
    weight, x = sim_code.weight(21, 256), ks.vectors(2, 256, "F16")
    found = simulate(sim_code.product, weight, x, result=result)
    assert reference.relative_error(found.value, reference.product(weight, x)) < bound


def test_the_smallest_and_the_largest_numbers() -> None:
    weight = sim_code.weight(16, 256)
    for size in (2.0**-24, 60000.0, 0.0):
        x = np.full((1, 256), size, np.float16)
        found = simulate(sim_code.product, weight, x)
        assert reference.relative_error(found.value, reference.product(weight, x)) < BOUND


def test_infinities_in_x_are_not_hidden() -> None:
    x = normal(2, 256)
    x[1, 200] = np.inf
    found = simulate(sim_code.product, sim_code.weight(16, 256), x).value
    assert np.isnan(found[1]).all()
    assert np.isfinite(found[0]).all()


def test_vectors_that_fit() -> None:
    space = space_for(CodeShape(8, 1, 1), 64)
    assert space is not None
    assert space.stages >= 4
    assert space.shared_bytes <= SHARED_LIMIT
    assert space_for(CodeShape(8, 1, 1), 200) is None


@pytest.mark.parametrize(
    ("weight", "said"),
    [
        (ks.weight("affine", 3, 4, 128, 128), "one segment of 4 bits"),
        (ks.weight("bcq", 4, 4, 128, 128), "bcq of 4 bits"),
        (ks.weight("affine", 4, 4, 256, 32), "groups of 32 columns"),
        (ks.weight("affine", 4, 4, 128, 128, perm=True), "reordered"),
        (ks.weight("affine", 4, 4, 128, 128, outliers="add"), "outliers"),
        (ks.weight("affine", 4, 4, 130, 130), "130 columns"),
    ],
)
def test_weights_that_it_cannot_take(weight: BcqWeight, said: str) -> None:
    with pytest.raises(SimulationError) as caught:
        simulate(sim_code.checked, weight, normal(1, weight.spec.columns))
    assert caught.value.kind == "BCQ-E553"
    assert said in caught.value.text


def test_arguments_that_it_cannot_take() -> None:
    weight = sim_code.weight(16, 256)
    for x in (normal(9, 256), normal(1, 128), np.ones((1, 256), np.float32), normal(2, 256)[:, ::2]):
        with pytest.raises(SimulationError) as caught:
            simulate(sim_code.checked, weight, x)
        assert caught.value.kind == "BCQ-E552"
