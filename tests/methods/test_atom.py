"""Atom's weights: the order of channels, scales by either rule, the 8-bit group, what is noted for the kernel."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bcqfmt.converters.methods.atom import Atom
from bcqfmt.converters.methods.protocol import InputStats, Job
from bcqfmt.errors import BcqError
from methods import calibrated
from weights.strategies import examples

Array = np.ndarray[Any, Any]
SMALL: dict[str, Any] = {"outliers": 16, "group_size": 32}


def perm_of(weight: Any) -> Array:
    return weight.parts()["perm"].array() if weight.scheme.perm else np.arange(weight.shape[1])


def scales(group: Array, bits: int, rule: str, clip: float) -> Array:
    """The paper's or the program's formula, in F16."""
    size = np.abs(group.astype(np.float64)).max(axis=1)
    step = 2 / (2**bits - 1) if rule == "paper" else 1 / (2 ** (bits - 1) - 1)
    return np.float16(step * size * clip).astype(np.float64)


def decoded(group: Array, scale: Array, bits: int) -> Array:
    codes = np.clip(np.rint(group / scale[:, None]), -(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    return codes * scale[:, None]


@pytest.mark.parametrize("bits", [3, 4])
@pytest.mark.parametrize("rule", ["paper", "code"])
@pytest.mark.parametrize("clip", [0.85, 1.0])
def test_values_are_those_of_the_formulas(bits: int, rule: str, clip: float) -> None:
    job = calibrated.job(24, 128)  # 112 normal channels: three groups of 32 and one of 16
    made = Atom.build({"bits": bits, "scale_rule": rule, "clip": clip, **SMALL}).quantize(job)
    weight = made.weight
    assert weight.spec.widths == (96, 16, 16)
    assert [(s.bits, s.group_size, s.zero) for s in weight.scheme.segments] == [
        (bits, 32, 2 ** (bits - 1)),
        (bits, 16, 2 ** (bits - 1)),
        (8, 16, 128),
    ]
    moved = job.weight[:, perm_of(weight)].astype(np.float64)
    expected = np.empty_like(moved)
    for start, stop in ((0, 32), (32, 64), (64, 96), (96, 112)):
        group = moved[:, start:stop]
        expected[:, start:stop] = decoded(group, scales(group, bits, rule, clip), bits)
    expected[:, 112:] = decoded(moved[:, 112:], scales(moved[:, 112:], 8, rule, 1.0), 8)  # never clipped
    assert np.array_equal(weight.dequantize("float64")[:, perm_of(weight)], expected)
    assert made.notes["scale_rule"] == rule
    assert made.notes["clip"] == clip


@given(st.integers(0, 2**32), st.integers(24, 90), st.sampled_from(["sorted", "moved"]))
@settings(examples(20), deadline=None)  # the first call compiles
def test_the_largest_channels_are_last(seed: int, columns: int, order: str) -> None:
    rng = np.random.default_rng(seed)
    sums = rng.integers(0, 6, columns).astype(np.float64)  # with ties
    job = calibrated.job(2, columns, seed, stats=InputStats(sums, None, 4))
    made = Atom.build({"outliers": 8, "group_size": columns, "order": order}).quantize(job).weight
    rising = sorted(range(columns), key=lambda c: (sums[c], c))
    kept = set(rising[-8:])
    expected = rising if order == "sorted" else [c for c in range(columns) if c not in kept] + sorted(kept)
    assert perm_of(made).tolist() == expected


@pytest.mark.parametrize("rounding", ["nearest", "gptq"])
def test_projections_of_one_input_share_their_order(rounding: str) -> None:
    names = ("k_proj.weight", "q_proj.weight", "v_proj.weight")
    stats = calibrated.stats_of(calibrated.inputs(96), *names)
    orders = []
    for seed, (name, rows) in enumerate(zip(names, (16, 48, 16), strict=True)):
        weight = calibrated.job(rows, 96, seed).weight
        made = Atom.build({"rounding": rounding, **SMALL}).quantize(Job(name, weight, "F16", stats))
        orders.append(perm_of(made.weight).tolist())
        assert made.weight.spec.widths == (64, 16, 16)
    assert orders[0] == orders[1] == orders[2]
    assert orders[0] == np.argsort(stats.square_sum, kind="stable").tolist()


def test_compensated_rounding_is_that_of_the_textbook() -> None:
    job = calibrated.job(20, 128, threads=2)
    made = Atom.build({"rounding": "gptq", **SMALL}).quantize(job).weight
    assert job.stats is not None
    perm = perm_of(made)
    groups = np.repeat(np.arange(5), [32, 32, 32, 16, 16])
    kinds = [(4, 0.85)] * 4 + [(8, 1.0)]

    def grid(group: int, columns: Array) -> tuple[Array, Array]:
        bits, clip = kinds[group]
        return scales(columns, bits, "paper", clip), np.full(20, 2.0 ** (bits - 1))

    full = np.asarray(job.stats.hessian)[np.ix_(perm, perm)]
    tops = np.array([15, 15, 15, 15, 255])
    codes, values = calibrated.textbook(job.weight[:, perm], full, grid, groups, tops)
    assert np.array_equal(np.concatenate([made.codes(k) for k in range(3)], axis=1), codes)
    assert np.array_equal(made.dequantize("float64")[:, perm], values)


def test_the_orderings_of_the_paper() -> None:
    job = calibrated.job(64, 256, seed=6)

    def error(**chosen: Any) -> float:
        made = Atom.build({"outliers": 32, "group_size": 32, **chosen}).quantize(job).weight
        return calibrated.output_error(job, made.dequantize("float64"))

    assert error(clip="search") < error(clip=1.0)
    assert error(clip="search", rounding="gptq") < error(clip="search")
    assert error(bits=4) < error(bits=3)
    assert error(group_size=32) < error(group_size=224)
    assert error(outliers=64) < error(outliers=8)


def test_the_clipping_search_is_at_least_as_good_as_every_factor_it_tries() -> None:
    job = calibrated.job(16, 80, seed=9)

    def noise(clip: Any) -> Array:
        made = Atom.build({"clip": clip, "outliers": 16, "group_size": 64}).quantize(job).weight
        perm = perm_of(made)[:64]
        return ((job.weight - made.dequantize("float64"))[:, perm] ** 2).sum(axis=1)

    best = noise("search")
    trials = [noise(1 - 0.025 * k) for k in range(21)]
    assert np.allclose(best, np.min(trials, axis=0), rtol=1e-9)
    assert Atom.build({"clip": "search"}).settings()["clip"] == "search"


def test_the_kernel_can_read_what_to_do_to_activations() -> None:
    made = Atom.build({"activation_clip": 0.95, "kv_bits": 8, **SMALL}).quantize(calibrated.job(4, 128))
    notes = json.loads(json.dumps(made.notes))
    assert notes["activations"] == {
        "dynamic": True,
        "per": "token and group",
        "symmetric": True,
        "scale_rule": "paper",
        "groups": [
            {"columns": 96, "group_size": 32, "bits": 4, "clip": 0.95},
            {"columns": 16, "group_size": 16, "bits": 4, "clip": 0.95},
            {"columns": 16, "group_size": 16, "bits": 8, "clip": 1.0},
        ],
        "kv": {"bits": 8, "symmetric": False, "per": "token and head"},
    }
    assert sum(group["columns"] for group in notes["activations"]["groups"]) == 128
    assert notes["outlier_channels"] == 16


def test_by_default_it_is_the_papers_configuration() -> None:
    made = Atom.build({}).quantize(calibrated.job(4, 384)).weight
    assert [(s.bits, s.group_size) for s in made.scheme.segments] == [(4, 128), (8, 128)]
    assert made.spec.widths == (256, 128)
    chosen = Atom.build({}).settings()
    assert (chosen["clip"], chosen["activation_clip"], chosen["kv_bits"]) == (0.85, 0.9, 4)


def test_threads_change_nothing() -> None:
    for chosen in ({}, {"clip": "search", "rounding": "gptq"}):
        jobs = (calibrated.job(70, 160, threads=threads) for threads in (1, 2, 5))
        assert len({Atom.build({**SMALL, **chosen}).quantize(job).weight.digest() for job in jobs}) == 1


@pytest.mark.parametrize("rounding", ["nearest", "gptq"])
@pytest.mark.parametrize("value", [0.0, 1.0, 1e-9])
def test_degenerate_weights_have_a_result(rounding: str, value: float) -> None:
    job = calibrated.job(1, 64)
    job = replace(job, weight=np.full((1, 64), value, np.float32))
    made = Atom.build({"rounding": rounding, **SMALL}).quantize(job).weight
    made.check()
    found = made.dequantize("float64")
    assert np.isfinite(found).all()
    assert value or not found.any()


@pytest.mark.parametrize(
    ("code", "more", "chosen"),
    [
        ("BCQ-E621", {}, {"outliers": 64}),  # nothing is left
        ("BCQ-E621", {}, {"outliers": 60}),  # four channels are left
        ("BCQ-E621", {}, {"outliers": 28, "group_size": 32}),  # 36: a group of 32 and four channels
        ("BCQ-E621", {"weight": np.full((4, 64), 1e6, np.float32)}, {"outliers": 16, "clip": 1.0}),
        ("BCQ-E622", {"weight": np.full((4, 64), np.inf, np.float32)}, SMALL),
        ("BCQ-E623", {"stats": None}, SMALL),
        ("BCQ-E623", {"stats": InputStats(np.ones(64), None, 3)}, {"rounding": "gptq", **SMALL}),
        ("BCQ-E624", {"stats": InputStats(np.ones(63), None, 3)}, SMALL),
    ],
)
def test_what_cannot_be_done_is_refused(code: str, more: dict[str, Any], chosen: dict[str, Any]) -> None:
    assert calibrated.refusal(Atom.build(chosen), calibrated.job(4, 64, **more)) == code


def test_settings_are_checked() -> None:
    assert "square sums" in str(Atom.build({}).needs_stats())
    assert "Hessian" in str(Atom.build({"rounding": "gptq"}).needs_stats())
    for wrong in ({"bits": 5}, {"outliers": 4}, {"clip": 1.2}, {"clip": "grid"}, {"order": "random"}):
        with pytest.raises(BcqError) as caught:
            Atom.build(wrong)
        assert caught.value.code == "BCQ-E620"
