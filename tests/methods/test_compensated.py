"""Levels of any kind with compensated errors, and numbers fitted to a layer's output, against plain numpy."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bcqfmt.converters.methods import hessian
from bcqfmt.converters.methods.bcq import Bcq
from bcqfmt.converters.methods.compensated import fitted, output_errors
from bcqfmt.converters.methods.gptq import UniformNumbers
from methods import calibrated
from weights.strategies import examples

Array = np.ndarray[Any, Any]
CHOSEN = {"bits": 3, "group_size": 32, "rounding": "gptq"}


def full_of(given: Any) -> Array:
    return hessian.damped(np.asarray(given.stats.hessian), 0.01)


def errors(given: Any, decoded: Array) -> Array:
    missed = given.weight - decoded
    return np.asarray(((missed @ full_of(given)) * missed).sum(axis=1))


def test_codes_are_those_of_the_textbook_for_uneven_levels() -> None:
    given = calibrated.job(12, 96, seed=5)
    made = Bcq.build({**CHOSEN, "turns": 0}).quantize(given).weight
    full = full_of(given)
    signs = np.array([[2 * (code >> (2 - plane) & 1) - 1 for plane in range(3)] for code in range(8)])
    alpha, bias = (made.parts()[name].array().astype(np.float64) for name in ("s0_alpha", "s0_bias"))
    levels = np.einsum("cp,prg->rgc", signs, alpha) + bias[:, :, None]
    order = np.argsort(-np.diagonal(full), kind="stable")
    upper = np.linalg.cholesky(np.linalg.inv(full[np.ix_(order, order)])).T
    left = given.weight[:, order].astype(np.float64)
    values = np.empty_like(left)
    for i, column in enumerate(order):
        own = levels[:, column // 32]
        nearest = np.abs(own - left[:, i, None]).argmin(axis=1)
        values[:, column] = np.take_along_axis(own, nearest[:, None], axis=1)[:, 0]
        left[:, i:] -= np.outer((left[:, i] - values[:, column]) / upper[i, i], upper[i, i:])
    found = made.dequantize("float64")
    same = np.isclose(found, values, rtol=0, atol=1e-6).all(axis=1)
    assert same.sum() >= 11  # a row may keep the nearest codes, where those happen to be better
    assert (errors(given, found) <= errors(given, values) * (1 + 1e-6)).all()


@given(st.integers(0, 2**32), st.integers(1, 30), st.integers(8, 90), st.integers(1, 4), st.booleans())
@settings(examples(8), deadline=None)
def test_no_row_of_bcq_is_worse_than_with_nearest_levels(
    seed: int, rows: int, columns: int, bits: int, bias: bool
) -> None:
    given = calibrated.job(rows, columns, seed=seed)
    chosen: dict[str, Any] = {"bits": bits, "group_size": 16, "bias": bias, "rounding": "gptq"}
    made = {turns: Bcq.build({**chosen, "turns": turns}).quantize(given).weight for turns in (0, 2)}
    for weight in made.values():
        weight.check()
        alpha = weight.parts()["s0_alpha"].array()
        assert (alpha >= 0).all()
        assert (np.diff(alpha.astype(np.float64), axis=0) <= 0).all()
    found = {turns: errors(given, weight.dequantize("float64")) for turns, weight in made.items()}
    assert (found[2] <= found[0] * (1 + 1e-6)).all()


def test_compensation_and_fitting_help_bcq() -> None:
    given = calibrated.job(64, 256, seed=1)
    for bits in (2, 3):
        kinds: tuple[dict[str, Any], ...] = (
            {"weighting": "activations"}, {"rounding": "gptq", "turns": 0}, {"rounding": "gptq"},
        )  # fmt: skip
        nearest, compensated, fitted_too = (
            errors(given, Bcq.build({"bits": bits, **kind}).quantize(given).weight.dequantize("float64")).sum()
            for kind in kinds
        )
        assert compensated < 0.7 * nearest
        assert fitted_too < 0.95 * compensated


def test_threads_change_nothing() -> None:
    found = {Bcq.build(CHOSEN).quantize(calibrated.job(70, 96, threads=n)).weight.digest() for n in (1, 2, 5)}
    assert len(found) == 1


def test_a_fit_is_least_squares() -> None:
    """One group a row: with the codes of the first rounding the scale is the one numpy's least squares finds."""
    given = calibrated.job(9, 64, seed=2, dtype="F32")
    full = full_of(given)
    scale = np.abs(given.weight).max(axis=1, keepdims=True).astype(np.float64) / 3
    numbers = UniformNumbers(scale.copy(), np.full((9, 1), 4.0), 64, "F32")
    order = np.arange(64)
    factor, costs = hessian.compensation_in(full, order)
    first, before = fitted(given.weight, full, factor, costs, order, numbers, 7, 0)
    assert np.array_equal(numbers.scale, scale)
    after = fitted(given.weight, full, factor, costs, order, numbers, 7, 1)[1]
    missed = given.weight - scale * (first - 4.0)
    np.testing.assert_allclose(before, np.einsum("ri,ij,rj->r", missed, full, missed), rtol=1e-9)
    np.testing.assert_allclose(before, output_errors(missed, full, 2), rtol=1e-9)
    root = np.linalg.cholesky(full).T
    best = [
        np.linalg.lstsq((root @ (codes - 4.0))[:, None], root @ row, rcond=None)[0][0]
        for codes, row in zip(first, given.weight.astype(np.float64), strict=True)
    ]
    improved = after < before
    assert improved.any()
    np.testing.assert_allclose(numbers.scale[improved, 0], np.array(best)[improved], rtol=1e-6)
    assert np.array_equal(numbers.scale[~improved], scale[~improved])


@pytest.mark.parametrize("chosen", [{"rounding": "gptq"}, {"rounding": "gptq", "weighting": "activations"}])
def test_what_it_needs_is_said(chosen: dict[str, Any]) -> None:
    assert "Hessian" in str(Bcq.build(chosen).needs_stats())
    assert calibrated.refusal(Bcq.build(chosen), calibrated.job(4, 64, calibrated=False)) == "BCQ-E623"
