"""2-bit groups with second-order scales: what is fitted is what a reader decodes."""

from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bcqfmt.converters.methods.second_order import SecondOrderFit
from weights.strategies import examples

Array = np.ndarray[Any, Any]


def fitted(
    weight: Array, group_size: int = 16, limit: int = 15, *, search: bool = True, row_step: int = 16,
    without: Array | None = None, importance: Array | None = None, threads: int = 1,
) -> tuple[SecondOrderFit, Array]:  # fmt: skip
    groups = weight.shape[1] // group_size
    fit = SecondOrderFit(
        weight.shape[0], group_size, np.full(groups, limit), row_step=row_step, search=search, without=without,
        importance=np.ones(weight.shape[1]) if importance is None else importance, threads=threads,
    )  # fmt: skip
    return fit, fit.nearest_codes(weight, np.arange(weight.shape[1]))


def gaussian(rows: int, columns: int, seed: int = 0) -> Array:
    return (np.random.default_rng(seed).standard_normal((rows, columns)) * 0.02).astype(np.float32)


@given(
    st.integers(0, 2**32), st.integers(1, 40), st.integers(1, 4), st.sampled_from([8, 16]),
    st.sampled_from([1, 7, 15]), st.booleans(), st.sampled_from([1, 3, 16]),
)  # fmt: skip
@settings(examples(40), deadline=None)  # the first call compiles
def test_a_reader_decodes_what_was_fitted(
    seed: int, rows: int, groups: int, group_size: int, limit: int, search: bool, row_step: int
) -> None:
    weight = gaussian(rows, groups * group_size, seed) * np.float32(10.0 ** (seed % 5 - 2))
    weight[seed % rows] = 0
    fit, codes = fitted(weight, group_size, limit, search=search, row_step=row_step)
    made = fit.weight(codes, 4, "F32")
    made.check()
    decoded = made.dequantize("float64")
    for group in range(groups):
        run = slice(group * group_size, (group + 1) * group_size)
        assert np.array_equal(decoded[:, run], fit.values(codes[:, run], group))
    assert fit.codes.max() <= limit
    assert not decoded[seed % rows].any()
    # every code is a nearest one of the grid that is stored
    scale = np.repeat(fit.scales(), group_size, axis=1)
    zero = np.repeat(fit.zeros, group_size, axis=1)
    grid = scale[..., None] * (np.arange(4) - zero[..., None])
    nearest = np.abs(weight[..., None] - grid).min(axis=-1)
    np.testing.assert_allclose(np.abs(weight - decoded), nearest, rtol=0, atol=1e-12 * np.abs(weight).max())


def brute_force(group: Array, unit: float, limit: int) -> float:
    """The least squared error that any scale codes and zero points reach with this scale_scale."""
    total = 0.0
    for row in group:
        grids = (unit * c * (np.arange(4) - z) for c, z in product(range(limit + 1), range(4)))
        total += min(float((np.abs(row[:, None] - grid).min(axis=1) ** 2).sum()) for grid in grids)
    return total


@pytest.mark.parametrize("limit", [7, 15])
def test_the_search_finds_nearly_the_best_codes(limit: int) -> None:
    for seed in range(6):
        weight = gaussian(16, 16, seed)
        fit, codes = fitted(weight, limit=limit)
        error = float(((weight - fit.values(codes, 0)) ** 2).sum())
        best = min(brute_force(weight, unit, limit) for unit in fit.units[0, 0] * np.linspace(0.8, 1.25, 19))
        assert best <= error * (1 + 1e-9)
        assert brute_force(weight, fit.units[0, 0], limit) <= error * (1 + 1e-9)
        assert error <= 1.06 * best


def test_search_is_never_worse_than_ranges_and_more_codes_help() -> None:
    totals = {}
    for search, limit in product((False, True), (7, 15)):
        errors = []
        for seed in range(8):
            weight = gaussian(16, 16, seed)
            fit, codes = fitted(weight, limit=limit, search=search)
            errors.append(float(((weight - fit.values(codes, 0)) ** 2).sum()))
        totals[search, limit] = errors
    for limit in (7, 15):
        assert all(new <= old * (1 + 1e-9) for new, old in zip(totals[True, limit], totals[False, limit], strict=True))
        assert sum(totals[True, limit]) < 0.8 * sum(totals[False, limit])
    assert sum(totals[True, 15]) < sum(totals[True, 7])


@given(st.integers(0, 2**32), st.booleans())
@settings(examples(20), deadline=None)  # the first call compiles
def test_what_is_left_out_has_no_influence(seed: int, search: bool) -> None:
    rng = np.random.default_rng(seed)
    weight = gaussian(20, 32, seed)
    without = rng.random(weight.shape) < 0.1
    other = weight.copy()
    other[without] = rng.standard_normal(int(without.sum())) * 100
    one, _ = fitted(weight, search=search, without=without)
    two, _ = fitted(other, search=search, without=without)
    for name in ("units", "codes", "zeros"):
        assert np.array_equal(getattr(one, name), getattr(two, name))


def test_columns_that_matter_are_closer() -> None:
    weight = gaussian(64, 16)
    importance = np.ones(16)
    plain, codes = fitted(weight)
    before = ((weight - plain.values(codes, 0)) ** 2).sum(axis=0)
    importance[:2] = 100
    fit, codes = fitted(weight, importance=importance)
    after = ((weight - fit.values(codes, 0)) ** 2).sum(axis=0)
    assert after[:2].sum() < 0.5 * before[:2].sum()
    assert after.sum() > before.sum()


def test_ranges_give_the_papers_scales() -> None:
    """Equations 2 and 3, and the scales themselves to the nearest of 15 steps."""
    weight = gaussian(16, 16).astype(np.float64)
    low, high = np.minimum(weight.min(axis=1), 0), np.maximum(weight.max(axis=1), 0)
    scale = (high - low) / 3
    unit = float(np.float16(scale.max() / 15))
    fit, _ = fitted(weight.astype(np.float32), search=False)
    assert fit.units[0, 0] == unit
    assert np.array_equal(fit.codes[:, 0], np.clip(np.rint(scale / unit), 1, 15))
    assert np.array_equal(fit.zeros[:, 0], np.clip(np.rint(-low / (unit * fit.codes[:, 0])), 0, 3))


def test_threads_change_nothing() -> None:
    weight = gaussian(100, 32)
    made = [fitted(weight, threads=threads) for threads in (1, 2, 5)]
    assert len({fit.weight(codes, 4, "F16").digest() for fit, codes in made}) == 1


@pytest.mark.parametrize("value", [0.0, 1.0, -3.5, 1e-9])
@pytest.mark.parametrize("search", [False, True])
def test_constant_groups(value: float, search: bool) -> None:
    weight = np.full((3, 16), value, np.float32)
    fit, codes = fitted(weight, search=search)
    found = fit.values(codes, 0)
    assert np.isfinite(found).all()
    if abs(value) != 1e-9:  # far below F16
        np.testing.assert_allclose(found, weight, rtol=1e-3)
