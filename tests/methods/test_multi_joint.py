"""`multi --nested joint`: near planes of their own at every precision, checked against all bits of tiny groups."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bcqfmt.converters.methods.bcq import Bcq, Compensation, PlaneNumbers, solve
from bcqfmt.converters.methods.compensated import missed
from bcqfmt.converters.methods.errors import decoded_square_sums
from bcqfmt.converters.methods.hessian import importance_of
from bcqfmt.converters.methods.multi import Multi, nested_fitted
from bcqfmt.converters.methods.protocol import Reading
from bcqfmt.errors import BcqError
from methods.method_samples import as_dtype, calibration, group_errors, job, matrices, matrix

GOALS = {2: 1.1, 3: 1.1, 4: 1.25}


def joint(weight: Any, dtype: str = "F16", stats: Any = None, threads: int = 1, **given: Any) -> Any:
    made = Multi.build({"nested": "joint", **given}).quantize(job(weight, dtype, stats, threads)).weight
    made.check()
    return made


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", ["gauss", "heavy"])
def test_every_precision_is_near_planes_of_its_own(kind: str, bias: bool):
    weight = matrix(16, 2048, kind)
    made = joint(weight, bias=bias, group_size=64)
    for p, goal in GOALS.items():
        alone = Bcq.build({"bits": p, "bias": bias, "group_size": 64}).quantize(job(weight)).weight
        assert decoded_square_sums(weight, made, p)[1] <= goal * decoded_square_sums(weight, alone)[1]


def least_of_all_bits(values: Any, weights: Any, bias: bool) -> float:
    """The least weighted sum of squared errors at 1 and 2 planes: every choice of bits, scales by least squares.

    Scales may have any sign, so the first number's bits can be zeros.
    """
    codes = np.array([(0, *rest) for rest in itertools.product(range(4), repeat=values.size - 1)])
    signs = [np.where(codes >> i & 1, 1.0, -1.0) for i in (1, 0)] + [np.ones(codes.shape)] * bias
    total = np.zeros(len(codes))
    for weight, chosen in zip(weights, (signs[:1] + signs[2:], signs), strict=True):
        basis = np.stack(chosen, axis=2)
        fitted = (basis @ (np.linalg.pinv(basis) @ values)[:, :, None])[:, :, 0]
        total += weight * np.square(values - fitted).sum(axis=1)
    return float(total.min())


@settings(max_examples=6, deadline=None)
@given(st.integers(0, 2**32), st.booleans(), st.sampled_from([0.5, 1.0, 4.0]))
def test_tiny_groups_get_the_best_bits_there_are(seed: int, bias: bool, second: float):
    weight = np.random.default_rng(seed).normal(size=(1, 8)).astype(np.float32)
    method = Multi.build({"nested": "joint", "bits": 2, "lowest_bits": 1, "group_size": 8, "bias": bias, "starts": 64})
    work = job(weight, "F32")
    alone = [solve(work, weight, p, method._settings, None) for p in (1, 2)]
    _, _, errors = method._extended(work, weight, alone[0], np.array([1.0, second]), None, alone, 64)
    least = least_of_all_bits(weight[0].astype(np.float64), (1.0, second), bias)
    assert least * (1 - 2e-3) <= errors[0] @ (1.0, second) <= least * 1.02


@settings(max_examples=15, deadline=None)
@given(
    matrices(), st.integers(1, 3), st.integers(0, 2), st.sampled_from([8, 33, "row"]), st.booleans(),
    st.sampled_from([0, 1, 6]),
)  # fmt: skip
def test_no_group_gets_worse_with_a_plane_more(
    sample: tuple[Any, str], lowest: int, more: int, group_size: Any, bias: bool, starts: int
):
    weight, dtype = sample
    made = joint(weight, dtype, bits=lowest + more, lowest_bits=lowest, group_size=group_size, bias=bias, starts=starts)
    assert made.scheme.segments[0].precisions == tuple(range(lowest, lowest + more))
    size = made.scheme.segments[0].group_size
    errors = [group_errors(weight, made.dequantize(planes=p), size) for p in range(lowest, lowest + more + 1)]
    for before, after in itertools.pairwise(errors):
        assert (after <= before * (1 + 1e-11)).all()


def test_one_precision_alone_is_never_worse_than_bcq():
    weight = matrix(8, 512, "heavy")
    for bits in (2, 4):
        alone = Bcq.build({"bits": bits}).quantize(job(weight)).weight
        made = joint(weight, bits=bits, lowest_bits=bits)
        errors = [group_errors(weight, one.dequantize(), 128) for one in (made, alone)]
        assert (errors[0] <= errors[1]).all()
        assert errors[0].sum() < 0.99 * errors[1].sum()


@pytest.mark.parametrize("nested", ["seed", "joint"])
def test_errors_count_by_the_inputs_where_asked_for(nested: str):
    weight, stats = matrix(16, 512), calibration(512)
    importance = importance_of(stats)
    plain, weighted = (
        joint(weight, stats=stats, weighting=weighting, nested=nested, group_size=64)
        for weighting in ("none", "activations")
    )
    for p in (2, 3, 4):
        alone = Bcq.build({"bits": p, "group_size": 64, "weighting": "activations"}).quantize(job(weight, stats=stats))
        errors = [
            float((np.square(weight - one.dequantize("float32", planes=p)) * importance).sum())
            for one in (weighted, plain, alone.weight)
        ]
        assert errors[0] < 0.8 * errors[1]
        if nested == "joint":
            assert errors[0] <= GOALS[p] * errors[2]
        elif p == 2:
            assert weighted.planes(2)[0].tobytes() == alone.weight.planes()[0].tobytes()
    with pytest.raises(BcqError, match="no statistics") as caught:
        joint(weight, weighting="activations", nested=nested)
    assert caught.value.code == "BCQ-E623"


def output_errors(weight: Any, made: Any, hessian: Any) -> list[float]:
    """tr(E H E^T) at 2, 3 and 4 planes."""
    missing = [weight - made.dequantize("float32", planes=p).astype(np.float64) for p in (2, 3, 4)]
    return [float((one @ hessian * one).sum()) for one in missing]


@pytest.mark.parametrize("nested", ["seed", "joint"])
def test_compensated_errors_are_smaller_in_the_layers_output(nested: str):
    weight, stats = matrix(16, 256), calibration(256, tokens=96)
    common = {"nested": nested, "group_size": 64}
    made, plain = (
        joint(weight, stats=stats, **common, **given) for given in ({"rounding": "gptq"}, {"weighting": "activations"})
    )
    errors = [output_errors(weight, one, stats.hessian) for one in (made, plain)]
    assert errors[0] == sorted(errors[0], reverse=True)
    assert errors[0][0] < 0.9 * errors[1][0]
    if nested == "joint":
        assert (np.array(errors[0]) < 0.95 * np.array(errors[1])).all()
        return
    alone = Bcq.build({"bits": 2, "group_size": 64, "rounding": "gptq"}).quantize(job(weight, stats=stats)).weight
    assert made.planes(2)[0].tobytes() == alone.planes()[0].tobytes()
    assert made.dequantize(planes=2).tobytes() == alone.dequantize().tobytes()


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 2**32), st.booleans())
def test_without_compensation_a_code_is_the_best_for_all_precisions(seed: int, held: bool):
    """With a diagonal Hessian columns do not touch each other: every code of every number is tried here."""
    drawn = np.random.default_rng(seed)
    weight = drawn.normal(size=(3, 24)).astype(np.float32)
    layer = Compensation(np.diag(drawn.uniform(0.5, 2.0, 24)), drawn.permutation(24), np.eye(24), np.ones(24))
    numbers = [PlaneNumbers(drawn.normal(size=(3, 3, p + 1)), 8, p, ("F32", "F32")) for p in (2, 3)]
    fixed = drawn.integers(0, 2, (3, 24)).astype(np.uint8) if held else None
    weights = drawn.uniform(0.1, 4.0, 2).astype(np.float32)
    targets = [weight, weight + drawn.normal(size=weight.shape).astype(np.float32)]
    found = nested_fitted(targets, [layer] * 2, numbers, weights, 0, fixed)
    for row, column in np.ndindex(weight.shape):
        costs = []
        for code in range(8):
            cost = 0.0
            for one, share, target in zip(numbers, weights, targets, strict=True):
                p, own = one.planes, one.numbers[row, column // 8]
                signs = [1.0 if code >> (3 - 1 - i) & 1 else -1.0 for i in range(p)]
                cost += share * (target[row, column] - np.dot(own[:p], signs) - own[p]) ** 2
            costs.append(cost if fixed is None or code >> 2 == fixed[row, column] else np.inf)
        assert costs[found[row, column]] == pytest.approx(min(costs), rel=1e-9, abs=1e-12)


def test_turns_raise_the_output_error_of_no_row():
    weight, stats = matrix(8, 96, "heavy"), calibration(96, tokens=16)
    layer = Compensation.of(job(weight, stats=stats), 0.01, "")
    drawn = np.random.default_rng(0)
    numbers = [PlaneNumbers(np.abs(drawn.normal(size=(8, 3, p + 1))) / 50, 32, p, ("F16", "F16")) for p in (2, 3)]
    before, shares = np.full(8, np.inf), np.array([1, 3], np.float32)
    for turns in (0, 2):
        own = [one.rows(slice(None)) for one in numbers]
        codes, after = nested_fitted([weight] * 2, [layer] * 2, own, shares, turns, None, 2), np.zeros(8)
        for one, share in zip(own, shares, strict=True):
            missing = missed(weight, one, codes >> np.uint8(3 - one.planes))
            after += share * (missing @ layer.hessian * missing).sum(axis=1)
        assert (after <= before * (1 + 1e-9)).all()
        before = after


def test_every_precision_is_fitted_to_its_own_inputs_and_target():
    weight, stats = matrix(16, 128), calibration(128, tokens=96)
    other = np.random.default_rng(1).permutation(128)
    assert stats.hessian is not None
    turned = replace(stats, hessian=stats.hessian[np.ix_(other, other)])
    lower = tuple(Reading(turned, (share * weight).astype(np.float32)) for share in (0.5, 0.8))
    method = Multi.build({"nested": "joint", "rounding": "gptq", "group_size": 64})
    assert method.lower_precisions == (2, 3)
    own, same = (method.quantize(replace(job(weight, stats=stats), lower=given)).weight for given in (lower, ()))
    for planes, (seen, target) in zip((2, 3), lower, strict=True):
        missing = [target - one.dequantize("float32", planes=planes).astype(np.float64) for one in (own, same)]
        errors = [float((one @ seen.hessian * one).sum()) for one in missing]
        assert errors[0] < 0.3 * errors[1]


def test_threads_do_not_matter():
    weight, stats = matrix(37, 200, "heavy"), calibration(200)
    for rounding in ("nearest", "gptq"):
        given = {"bits": 3, "group_size": 48, "rounding": rounding}
        assert len({joint(weight, stats=stats, threads=threads, **given).digest() for threads in (1, 2, 64)}) == 1


@pytest.mark.parametrize("value", [0.0, 0.3, -0.3])
def test_zeros_and_constant_rows_are_exact_at_every_precision(value: float):
    weight = as_dtype(np.full((1, 19), value))
    made = joint(weight, group_size=8)
    for p in (2, 3, 4):
        assert (made.dequantize(planes=p) == weight).all()
