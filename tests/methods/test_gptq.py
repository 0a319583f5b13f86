"""Error-compensated rounding against a textbook version of it, and the matrices under it against numpy's."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bcqfmt.container.dtypes import round_to
from bcqfmt.converters.methods import hessian
from bcqfmt.converters.methods.gptq import Gptq
from bcqfmt.converters.methods.protocol import InputStats
from bcqfmt.converters.methods.rtn import Rtn
from bcqfmt.errors import BcqError
from methods import calibrated
from weights.strategies import examples

Array = np.ndarray[Any, Any]
PUBLISHED: dict[str, Any] = {
    "clip": "none",
    "act_order": False,
    "static_groups": False,
    "scale_dtype": "F16",
}  # the method as the paper has it


def plain_grid(bits: int, symmetric: bool) -> Any:
    """The rules of rtn in numpy: range with zero, one scale in F16, the zero point from the rounded scale."""
    top = 2**bits - 1

    def grid(group: int, columns: Array) -> tuple[Array, Array]:
        low, high = np.minimum(columns.min(axis=1), 0), np.maximum(columns.max(axis=1), 0)
        middle = np.full(low.shape, 2.0 ** (bits - 1))
        raw = np.maximum(-low, high) / (middle - 0.5) if symmetric else (high - low) / top
        scale = round_to(raw, "F16").astype(np.float64)
        return scale, middle if symmetric else np.clip(np.rint(-low / scale), 0, top)

    return grid


@pytest.mark.parametrize(
    ("rows", "columns", "group_size", "bits", "symmetric"),
    [
        (10, 96, 16, 3, False),
        (33, 300, 128, 4, True),
        (20, 256, 64, 2, False),
        (5, 200, -1, 4, False),
        (1, 72, 40, 8, False),
        (20, 520, 256, 3, False),  # a group longer than a block
        (7, 131, 100, 4, False),  # groups that fill no block, the last one short
        (70, 40, 8, 5, True),
    ],
)
def test_codes_are_those_of_the_textbook(rows: int, columns: int, group_size: int, bits: int, symmetric: bool) -> None:
    given = calibrated.job(rows, columns, seed=columns, threads=2)
    method = Gptq.build({**PUBLISHED, "bits": bits, "group_size": group_size, "symmetric": symmetric})
    made = method.quantize(given).weight
    size = columns if group_size == -1 else group_size
    assert given.stats is not None
    codes, values = calibrated.textbook(
        given.weight, np.asarray(given.stats.hessian), plain_grid(bits, symmetric), np.arange(columns) // size,
        np.full(columns, 2**bits - 1),
    )  # fmt: skip
    assert np.array_equal(made.codes(), codes)
    assert np.array_equal(made.dequantize("float64"), values)


@pytest.mark.parametrize("static", [False, True])
def test_act_order_rounds_large_channels_first(static: bool) -> None:
    given = calibrated.job(12, 96, seed=5)
    chosen = {**PUBLISHED, "group_size": 32, "act_order": True, "static_groups": static, "turns": 0}
    made = Gptq.build(chosen).quantize(given).weight
    assert given.stats is not None
    full = np.asarray(given.stats.hessian)
    order = np.argsort(-np.diagonal(full), kind="stable")
    grid, groups = plain_grid(4, False), np.arange(96) // 32
    if static:  # groups of the columns as they stand, scales of the weights as they were

        def known(group: int, columns: Array) -> tuple[Array, Array]:
            return grid(group, given.weight[:, group * 32 : group * 32 + 32].astype(np.float64))

        assert not made.scheme.perm
        args = (known, groups[order])
    else:
        assert np.array_equal(made.parts()["perm"].array(), order)
        args = (grid, groups)
    _, values = calibrated.textbook(given.weight[:, order], full[np.ix_(order, order)], *args, np.full(3, 15))
    assert np.array_equal(made.dequantize("float64")[:, order], values)


@given(
    st.integers(0, 2**32),
    st.integers(1, 20),
    st.integers(8, 80),
    st.integers(1, 8),
    st.booleans(),
    st.sampled_from([8, 12, 32, -1]),
)
@settings(examples(30), deadline=None)  # the first call compiles
def test_a_diagonal_hessian_gives_what_rtn_gives(
    seed: int, rows: int, columns: int, bits: int, symmetric: bool, group_size: int
) -> None:
    weight = np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32)
    weight[0] = weight[0, 0]
    sums = np.random.default_rng(seed).uniform(0, 9, columns) ** 4
    sums[::3] = 0
    chosen: dict[str, Any] = {"bits": bits, "group_size": group_size, "symmetric": symmetric, "clip": "none"}
    given = calibrated.job(rows, columns, weight=weight, stats=InputStats(sums, np.diag(sums), 9))
    nearest = Rtn.build(chosen).quantize(given).weight
    for static, order in ((False, False), (True, False), (True, True)):
        made = Gptq.build({**chosen, "static_groups": static, "act_order": order, "turns": 0}).quantize(given)
        assert made.weight.digest() == nearest.digest()
        assert made.notes["dead_columns"] == np.count_nonzero(sums == 0)


def test_the_layer_is_closer_than_with_rtn() -> None:
    for bits in (2, 3, 4):
        methods = (
            Rtn.build({"bits": bits}),
            Gptq.build({**PUBLISHED, "bits": bits}),
            Gptq.build({**PUBLISHED, "bits": bits, "act_order": True, "static_groups": True, "turns": 0}),
            Gptq.build({"bits": bits, "turns": 0}),
            Gptq.build({"bits": bits}),
        )
        errors = np.zeros(5)
        for seed in range(3):
            given = calibrated.job(64, 256, seed=seed)
            decoded = [method.quantize(given).weight.dequantize("float64") for method in methods]
            errors += [calibrated.output_error(given, values) for values in decoded]
        assert (errors[1:] < [0.9 * errors[0], errors[1], 0.99 * errors[2], 0.99 * errors[3]]).all()


@given(st.integers(0, 2**32), st.integers(1, 40), st.integers(8, 90), st.integers(1, 4), st.booleans())
@settings(examples(10), deadline=None)
def test_no_row_is_worse_than_with_rtn(seed: int, rows: int, columns: int, bits: int, symmetric: bool) -> None:
    given = calibrated.job(rows, columns, seed=seed)
    chosen: dict[str, Any] = {"bits": bits, "group_size": 16, "symmetric": symmetric}
    assert given.stats is not None
    full = hessian.damped(np.asarray(given.stats.hessian), 0.01)

    def errors(method: Any) -> Array:
        missed = given.weight - method.quantize(given).weight.dequantize("float64")
        return np.asarray(((missed @ full) * missed).sum(axis=1))

    ours = errors(Gptq.build(chosen))
    assert (ours <= errors(Rtn.build(chosen)) * (1 + 1e-9)).all()
    assert (ours <= errors(Gptq.build({**chosen, "turns": 0})) * (1 + 1e-9)).all()


def test_clipping_counts_errors_by_the_inputs() -> None:
    """The grid of a group is the best of its shrunken ranges for errors times squared inputs: brute force."""
    given = calibrated.job(20, 32, seed=3)
    sums = np.exp(np.random.default_rng(4).standard_normal(32) * 3)
    given = replace(given, stats=InputStats(sums, np.diag(sums), 9))
    made = Gptq.build({**PUBLISHED, "bits": 2, "clip": "search", "dampening": 0.0}).quantize(given).weight
    decoded, weight = made.dequantize("float64"), given.weight.astype(np.float64)
    least = np.full(20, np.inf)
    for factor in [1 - 0.1 * k for k in range(9)]:
        low, high = np.minimum(weight.min(1), 0) * factor, np.maximum(weight.max(1), 0) * factor
        scale = round_to((high - low) / 3, "F16").astype(np.float64)
        zero = np.clip(np.rint(-low / scale), 0, 3)[:, None]
        codes = np.clip(np.rint(weight / scale[:, None]) + zero, 0, 3)
        least = np.minimum(least, (np.square(weight - scale[:, None] * (codes - zero)) * sums).sum(axis=1))
    assert (((weight - decoded) ** 2 * sums).sum(axis=1) <= least * (1 + 1e-9)).all()


def test_threads_change_nothing() -> None:
    for chosen in ({}, {"static_groups": False, "group_size": 16}):
        found = {
            Gptq.build(chosen).quantize(calibrated.job(70, 300, threads=threads)).weight.digest()
            for threads in (1, 2, 5)
        }
        assert len(found) == 1


def test_a_float32_hessian_is_taken_as_it_is() -> None:
    x = calibrated.inputs(64)
    single = calibrated.stats_of(x, dtype=np.float32)
    double = replace(single, hessian=np.asarray(single.hessian).astype(np.float64))
    digests = {Gptq.build({}).quantize(calibrated.job(8, 64, stats=kind)).weight.digest() for kind in (single, double)}
    assert len(digests) == 1


@pytest.mark.parametrize(
    "weight",
    [
        np.zeros((3, 40), np.float32),
        np.full((3, 40), -0.75, np.float32),
        np.ones((1, 40), np.float32),
        np.full((2, 40), 1e-9, np.float32),
    ],
)
@pytest.mark.parametrize("symmetric", [False, True])
def test_degenerate_weights_have_a_result(weight: Array, symmetric: bool) -> None:
    given = calibrated.job(*weight.shape, weight=weight)
    made = Gptq.build({"group_size": 16, "symmetric": symmetric}).quantize(given).weight
    made.check()
    decoded = made.dequantize("float64")
    assert np.isfinite(decoded).all()
    if not weight.any():
        assert not decoded.any()
    elif not symmetric and weight[0, 0] != np.float32(1e-9):
        assert np.array_equal(decoded, weight)


def test_an_input_that_was_never_seen_is_rounded_to_nearest() -> None:
    weight = calibrated.job(4, 64).weight
    given = calibrated.job(4, 64, stats=InputStats(np.zeros(64), np.zeros((64, 64)), 0))
    for dampening in (0.0, 0.01):
        made = Gptq.build({"dampening": dampening, "clip": "none", "turns": 0}).quantize(given).weight
        assert made.digest() == Rtn.build({}).quantize(replace(given, weight=weight)).weight.digest()


# ---------------------------------------------------------------------------------------------------- refusals
def broken(change: Any) -> Any:
    stats = calibrated.stats_of(calibrated.inputs(64))
    full = np.asarray(stats.hessian).copy()
    change(full)
    return replace(stats, hessian=full)


@pytest.mark.parametrize(
    ("code", "more"),
    [
        ("BCQ-E623", {"stats": None}),
        ("BCQ-E623", {"stats": InputStats(np.ones(64), None, 3)}),
        ("BCQ-E624", {"stats": InputStats(np.ones(65), np.eye(65), 3)}),
        ("BCQ-E624", {"stats": InputStats(np.ones(64), np.eye(65), 3)}),
        ("BCQ-E624", {"stats": InputStats(np.full(64, np.nan), np.eye(64), 3)}),
        ("BCQ-E624", {"stats": broken(lambda full: full.__setitem__((3, 4), np.inf))}),
        ("BCQ-E624", {"stats": broken(lambda full: full.__setitem__((3, 3), -1))}),
        ("BCQ-E621", {"stats": broken(lambda full: full.__setitem__(slice(None), 1 - 2 * np.eye(64)[::-1]))}),
        ("BCQ-E622", {"weight": np.full((4, 64), np.nan, np.float32)}),
        ("BCQ-E622", {"weight": np.full((4, 64), np.inf, np.float32)}),
        ("BCQ-E621", {"weight": np.ones((4, 7), np.float32)}),
        ("BCQ-E621", {"weight": np.linspace(-1e9, 1e9, 256, dtype=np.float32).reshape(4, 64)}),
    ],
)
def test_what_cannot_be_done_is_refused(code: str, more: dict[str, Any]) -> None:
    assert (
        calibrated.refusal(Gptq.build({"dampening": 0.0, "scale_dtype": "F16"}), calibrated.job(4, 64, **more)) == code
    )


def test_settings_are_checked() -> None:
    assert Gptq.build({}).settings()["dampening"] == 0.01
    assert "Hessian" in str(Gptq.build({}).needs_stats())
    for wrong in ({"bits": 9}, {"group_size": 7}, {"dampening": -0.1}, {"act": True}, {"clip": "mse"}):
        with pytest.raises(BcqError) as caught:
            Gptq.build(wrong)
        assert caught.value.code == "BCQ-E620"


# ---------------------------------------------------------------------------------------------------- matrices
@pytest.mark.parametrize("n", [1, 5, 127, 128, 129, 300])
def test_factor_and_inverse_are_those_of_numpy(n: int) -> None:
    matrix = hessian.damped(calibrated.stats_of(calibrated.inputs(n)).hessian, 0.01)  # type: ignore[arg-type]
    expected = np.linalg.inv(matrix)
    for threads in (1, 3):
        lower = np.tril(hessian.factored(matrix.copy(), threads))
        np.testing.assert_allclose(lower @ lower.T, matrix, rtol=1e-11, atol=1e-11 * np.abs(matrix).max())
        inverse = hessian.inverse_factor(matrix.copy(), threads)
        assert np.array_equal(inverse, np.tril(inverse))
        np.testing.assert_allclose(inverse.T @ inverse, expected, rtol=1e-8, atol=1e-11 * np.abs(expected).max())
        diagonal = hessian.inverse_diagonal(matrix.copy(), threads)
        np.testing.assert_allclose(diagonal, np.diagonal(expected), rtol=1e-9)


def test_dampening_is_a_share_of_the_mean_diagonal() -> None:
    made = hessian.damped(np.array([[3.0, 1.0, 0.0], [1.0, 6.0, 0.0], [0.0, 0.0, 0.0]]), 0.01)
    assert np.allclose(made, [[6.06, 2, 0], [2, 12.06, 0], [0, 0, 6]], rtol=1e-15)
