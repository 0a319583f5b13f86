"""2/4-bit weights: which groups get four bits, what is stored, how many bits that is, and what cannot be done."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bcqfmt.container.dtypes import nbytes_of
from bcqfmt.converters.methods.gptq import UniformRule
from bcqfmt.converters.methods.mixed24 import Mixed24, Split, equation_6, equation_10, outlier_bits, split
from bcqfmt.converters.methods.mixed24_choice import by_hessian, by_range
from bcqfmt.converters.methods.protocol import InputStats
from bcqfmt.converters.methods.rtn import Rtn
from bcqfmt.converters.methods.second_order import SecondOrderFit
from bcqfmt.errors import BcqError
from bcqfmt.weight.scheme import SecondOrder, WeightSpec
from bcqfmt.weight.weight import BcqWeight
from methods import calibrated
from weights.strategies import examples

Array = np.ndarray[Any, Any]


def perm_of(weight: BcqWeight) -> Array:
    return weight.parts()["perm"].array() if weight.scheme.perm else np.arange(weight.shape[1])


def outliers_of(weight: BcqWeight) -> dict[tuple[int, int], float]:
    parts = weight.parts()
    indptr, indices, values = (parts[f"outlier_{name}"].array() for name in ("indptr", "indices", "values"))
    rows = np.repeat(np.arange(indptr.size - 1), np.diff(indptr))
    return {(int(r), int(c)): float(v) for r, c, v in zip(rows, indices, values, strict=True)}


# ------------------------------------------------------------------------------------------------- the paper's numbers
def test_equations_6_and_10() -> None:
    assert equation_6(2, 16) == 2 + 18 / 16
    assert equation_6(2, 16, 4, 16) == 2 + 6 / 16 + 20 / 256
    assert round(equation_10(0.25), 2) == 2.84
    assert round(equation_10(0.25) + outlier_bits(0.002, 4096), 2) == 2.91
    assert abs(equation_10(0.10) - 2.60) < 0.01  # 2.608: the paper's table cuts it off
    assert equation_10(1.0) == 4
    assert outlier_bits(0, 4096) == 0


def stored_bits(spec: WeightSpec, outliers: int) -> float:
    parts = spec.parts().values()
    total = sum(nbytes_of(part.dtype, tuple(outliers if dim == -1 else dim for dim in part.shape)) for part in parts)
    return 8 * total / (spec.out * spec.columns)


@pytest.mark.parametrize(
    ("share", "layout", "expected"),
    [(0, "canonical", 2.88), (0.002, "canonical", 2.95), (0, "aligned64", 2.87), (0.002, "aligned64", 2.94)],
)
def test_bits_of_a_4096_weight(share: float, layout: str, expected: float) -> None:
    """The scheme is that of a real quantization; its parts are counted, byte for byte, at another size."""
    method = Mixed24.build({"outliers": share, "layout": layout})
    made = method.quantize(calibrated.job(48, 512)).weight
    spec = made.spec
    assert stored_bits(spec, len(outliers_of(made)) if share else 0) == made.bits_per_weight
    large = replace(spec, shape=(4096, 4096), widths=(3072, 1024))
    assert abs(stored_bits(large, int(share * 4096 * 4096)) - expected) <= 0.01


@given(st.integers(1, 400), st.sampled_from([8, 16]), st.floats(0, 1))
@examples(60)
def test_groups_are_split_as_near_to_the_ratio_as_they_can(columns: int, group_size: int, ratio: float) -> None:
    groups, four, tail = split(columns, group_size, ratio)
    assert groups * group_size + tail == columns
    assert 0 <= tail < group_size
    assert 0 <= four <= groups
    if 0 < ratio < 1 and groups > 1:
        assert 1 <= four <= groups - 1
        assert abs(four - ratio * groups) <= (0.5 if 1 <= ratio * groups <= groups - 1 else 1)


def test_split_of_common_widths() -> None:
    assert split(4096, 16, 0.25) == Split(256, 64, 0)
    assert split(4096, 16, 0.10) == Split(256, 26, 0)
    assert split(172, 16, 0.25) == Split(10, 3, 12)
    assert split(64, 16, 0.0).four == 0
    assert split(64, 16, 1.0).four == 4


# ------------------------------------------------------------------------------------------------------- sensitivity
def test_sensitivity_is_equation_9() -> None:
    job = calibrated.job(5, 40, seed=3)
    assert job.stats is not None
    doubled = 2 * np.asarray(job.stats.hessian)
    inverse = np.linalg.inv(doubled + 0.01 * np.diagonal(doubled).mean() * np.eye(40))
    found = by_hessian(job, job.weight, 16, 0.01)
    for group in range(2):
        total = 0.0
        for column in range(16 * group, 16 * group + 16):
            for row in range(5):
                total += float(job.weight[row, column]) ** 2 / inverse[column, column] ** 2
        assert np.isclose(found.groups[group], total, rtol=1e-9)
    assert found.groups.size == 2
    assert np.allclose(found.columns, 1 / np.diagonal(inverse) ** 2, rtol=1e-9)


def test_without_statistics_it_is_the_squared_range() -> None:
    job = calibrated.job(5, 40, calibrated=False)
    found = by_range(job.weight, 8)
    for group in range(5):
        part = job.weight[:, 8 * group : 8 * group + 8].astype(np.float64)
        assert np.isclose(found.groups[group], sum((row.max() - row.min()) ** 2 for row in part), rtol=1e-12)
    assert Mixed24.build({}).quantize(calibrated.job(8, 64, calibrated=False)).notes["sensitivity"] == "range"
    assert Mixed24.build({}).quantize(calibrated.job(8, 64)).notes["sensitivity"] == "hessian"
    assert Mixed24.build({"sensitivity": "range"}).quantize(calibrated.job(8, 64)).notes["sensitivity"] == "range"


@pytest.mark.parametrize(("group_size", "columns"), [(16, 256), (8, 120), (16, 172)])
def test_sensitive_groups_go_last_in_their_old_order(group_size: int, columns: int) -> None:
    job = calibrated.job(20, columns)
    made = Mixed24.build({"group_size": group_size, "outliers": 0}).quantize(job).weight
    values = by_hessian(job, job.weight, group_size, 0.01).groups
    count = split(columns, group_size, 0.25).four
    chosen = sorted(sorted(range(values.size), key=lambda g: -values[g])[:count])
    others = [g for g in range(values.size) if g not in chosen]
    expected = [c for g in (*others, *chosen) for c in range(g * group_size, (g + 1) * group_size)]
    expected += range(columns - columns % group_size, columns)
    assert perm_of(made).tolist() == expected
    low, high = made.scheme.segments
    assert made.spec.widths == (len(others) * group_size, columns - len(others) * group_size)
    assert (low.bits, low.group_size, low.scale) == (2, group_size, SecondOrder(4, 16, "F16", "packed"))
    assert (high.bits, high.group_size, high.scale) == (4, min(128, made.spec.widths[1]), "F16")
    made.check()


# ---------------------------------------------------------------------------------------------------------- outliers
@pytest.mark.parametrize("choice", ["error", "magnitude"])
def test_outliers_are_the_worst_elements_of_2_bit_groups(choice: str) -> None:
    job = calibrated.job(40, 128, seed=7)
    made = Mixed24.build({"outliers": 0.01, "outlier_choice": choice}).quantize(job)
    without = Mixed24.build({"outliers": 0}).quantize(job).weight
    found = outliers_of(made.weight)
    assert len(found) == made.notes["outliers"] == int(0.01 * 40 * 128)
    low = set(perm_of(made.weight)[: made.weight.spec.widths[0]].tolist())
    assert {c for _, c in found} <= low
    assert made.weight.scheme.outliers is not None
    assert made.weight.scheme.outliers.segments == (0,)
    if choice == "magnitude":
        score = np.abs(job.weight)
    else:
        sensitivity = by_hessian(job, job.weight, 16, 0.01).columns
        score = (job.weight - without.dequantize("float64")) ** 2 * sensitivity
    ranked = sorted(((r, c) for r in range(40) for c in low), key=lambda at: -score[at])
    assert set(found) == set(ranked[: len(found)])


def test_an_outlier_holds_what_the_dense_value_lacks() -> None:
    job = calibrated.job(40, 128, seed=8)
    made = Mixed24.build({"outliers": 0.01}).quantize(job).weight
    plain = {suffix: part for suffix, part in made.parts().items() if not suffix.startswith("outlier")}
    dense = BcqWeight("", replace(made.spec, scheme=replace(made.scheme, outliers=None)), plain).dequantize("float64")
    whole = made.dequantize("float64")
    for (row, column), value in outliers_of(made).items():
        assert value == np.float16(np.float64(job.weight[row, column]) - dense[row, column])
        assert abs(whole[row, column] - job.weight[row, column]) <= 2.0**-11 * abs(value) + 2.0**-25


@pytest.mark.parametrize("clip", ["none", "search"])
def test_ranges_are_those_of_the_other_elements(clip: str) -> None:
    """An outlier may be ever so large: its group is quantized as if it were not there."""
    results = []
    for size in (5.0, 5000.0):
        job = calibrated.job(32, 64, calibrated=False)
        weight = job.weight.copy()
        weight[3, 17] = size
        settings_ = {"outliers": 1 / weight.size, "outlier_choice": "magnitude", "clip": clip, "four_bit_ratio": 0.0}
        made = Mixed24.build(settings_).quantize(replace(job, weight=weight)).weight
        assert set(outliers_of(made)) == {(3, 17)}
        values = made.dequantize("float64")
        assert abs(values[3, 17] / size - 1) < 1e-3
        results.append(np.delete(values.reshape(-1), 3 * 64 + 17))
    assert np.array_equal(*results)


# ----------------------------------------------------------------------------------------------------------- quality
def test_the_orderings_of_the_paper() -> None:
    job = calibrated.job(96, 256, seed=4)

    def error(method: Any) -> float:
        return calibrated.output_error(job, method.quantize(job).weight.dequantize("float64"))

    plain = error(Mixed24.build({"outliers": 0}))
    assert plain < error(Rtn.build({"bits": 2, "group_size": 16}))
    assert error(Mixed24.build({"outliers": 0, "four_bit_ratio": 0.1})) > plain
    assert error(Mixed24.build({"outliers": 0, "clip": "none"})) > plain
    assert error(Mixed24.build({"outliers": 0, "layout": "aligned64"})) < 1.05 * plain
    some, more = (error(Mixed24.build({"outliers": share})) for share in (0.002, 0.005))
    assert more < some < plain
    assert error(Mixed24.build({"outliers": 0.002, "rounding": "gptq"})) < 0.8 * some


def test_compensated_rounding_is_that_of_the_textbook() -> None:
    job = calibrated.job(40, 136, seed=2, threads=2)  # a tail of 8 columns, a short row group
    made = Mixed24.build({"outliers": 0, "rounding": "gptq", "four_bit_group_size": 32}).quantize(job).weight
    assert job.stats is not None
    perm, (low, high) = perm_of(made), made.spec.widths
    importance = (job.stats.square_sum / job.stats.square_sum.mean() + 0.01)[perm[:low]]
    fit = SecondOrderFit(40, 16, np.full(low // 16, 15), importance=importance, row_step=16, search=True)
    four = UniformRule(4, False, True, 0)

    def grid(group: int, columns: Array) -> tuple[Array, Array]:
        return fit(group, 0, columns) if group < low // 16 else four(group, 0, columns)

    groups = np.concatenate([np.arange(low) // 16, low // 16 + np.arange(high) // 32])
    tops = np.repeat([3, 15], [low // 16, groups.max() + 1 - low // 16])
    full = np.asarray(job.stats.hessian)[np.ix_(perm, perm)]
    codes, values = calibrated.textbook(job.weight[:, perm], full, grid, groups, tops)
    assert np.array_equal(np.concatenate([made.codes(0), made.codes(1)], axis=1), codes)
    assert np.array_equal(made.dequantize("float64")[:, perm], values)


@pytest.mark.parametrize("rounding", ["nearest", "gptq"])
def test_threads_change_nothing(rounding: str) -> None:
    method = Mixed24.build({"rounding": rounding})
    digests = {method.quantize(calibrated.job(70, 256, threads=threads)).weight.digest() for threads in (1, 2, 5)}
    assert len(digests) == 1


# --------------------------------------------------------------------------------------------------------- aligned64
@pytest.mark.parametrize("rounding", ["nearest", "gptq"])
def test_aligned64_fits_its_clipping_limit(rounding: str) -> None:
    job = calibrated.job(33, 192)
    made = Mixed24.build({"layout": "aligned64", "outliers": 0.005, "rounding": rounding}).quantize(job).weight
    assert made.scheme.aligned64
    made.check()
    plain = made.to_canonical()
    assert plain.to_aligned64().digest() == made.digest()
    assert np.array_equal(plain.dequantize(), made.dequantize())
    meta = made.parts()["tile_meta"].array()
    largest = [int((meta >> shift & mask).max()) for shift, mask in ((6, 15), (10, 7), (13, 7))]
    assert largest[0] > 7  # the first group of a tile uses its fourth bit
    assert calibrated.output_error(job, made.dequantize("float64")) < 0.5


@pytest.mark.parametrize(("columns", "more"), [(96, {}), (64 * 3 + 16, {}), (256, {"four_bit_ratio": 0.5}), (40, {})])
def test_what_cannot_be_aligned_is_refused(columns: int, more: dict[str, Any]) -> None:
    job = calibrated.job(8, columns)
    method = Mixed24.build({"layout": "aligned64", **more})
    with pytest.raises(BcqError, match="one quarter of a multiple of 64") as caught:
        method.quantize(job)
    assert caught.value.code == "BCQ-E621"
    Mixed24.build(more).quantize(job).weight.check()


def test_a_ratio_that_comes_to_one_group_in_four_can_be_aligned() -> None:
    made = Mixed24.build({"layout": "aligned64", "four_bit_ratio": 0.3}).quantize(calibrated.job(8, 64)).weight
    assert made.spec.widths == (48, 16)


# --------------------------------------------------------------------------------------------------------- bad input
@given(
    st.integers(0, 2**32), st.integers(1, 20), st.integers(8, 70), st.sampled_from([0.0, 0.1, 0.25, 1.0]),
    st.sampled_from([8, 16]), st.sampled_from(["nearest", "gptq"]), st.sampled_from([0.0, 0.02]),
    st.sampled_from(["search", "none"]),
)  # fmt: skip
@settings(examples(40), deadline=None)  # the first call compiles
def test_any_shape_has_a_valid_result_or_is_refused(
    seed: int, rows: int, columns: int, ratio: float, group_size: int, rounding: str, outliers: float, clip: str
) -> None:
    job = calibrated.job(rows, columns, seed)
    job.weight[0] = job.weight[0, 0]
    job.weight[-1, : columns // 2] = 0
    method = Mixed24.build(
        {"four_bit_ratio": ratio, "group_size": group_size, "rounding": rounding, "outliers": outliers, "clip": clip}
    )
    four = split(columns, group_size, ratio)
    last = four.four * group_size + four.tail
    if 0 < last < 8:
        assert calibrated.refusal(method, job) == "BCQ-E621"
        return
    made = method.quantize(job).weight
    made.check()
    assert made.shape == (rows, columns)
    assert made.spec.widths[-1] == (last or columns)
    assert np.isfinite(made.dequantize("float64")).all()


def test_weights_of_zeros_and_constants() -> None:
    for value in (0.0, 1.0, -0.5):
        weight = np.full((17, 64), value, np.float32)
        job = calibrated.job(17, 64, weight=weight)
        for rounding in ("nearest", "gptq"):
            made = Mixed24.build({"rounding": rounding}).quantize(job).weight
            tolerance = 1e-3 if rounding == "nearest" else 1e-2  # compensated: what one column lacks, others have
            np.testing.assert_allclose(made.dequantize("float64"), weight, rtol=tolerance)


@pytest.mark.parametrize(
    ("code", "more", "chosen"),
    [
        ("BCQ-E622", {"weight": np.full((4, 64), np.nan, np.float32)}, {}),
        ("BCQ-E622", {"weight": np.full((4, 64), -np.inf, np.float32)}, {}),
        ("BCQ-E621", {"weight": np.full((4, 64), 1e6, np.float32)}, {}),
        ("BCQ-E621", {"weight": np.full((4, 6), 1, np.float32)}, {}),
        ("BCQ-E623", {"stats": None}, {"sensitivity": "hessian"}),
        ("BCQ-E623", {"stats": None}, {"rounding": "gptq"}),
        ("BCQ-E624", {"stats": InputStats(np.ones(32), np.eye(32), 3)}, {}),
    ],
)
def test_what_cannot_be_done_is_refused(code: str, more: dict[str, Any], chosen: dict[str, Any]) -> None:
    assert calibrated.refusal(Mixed24.build(chosen), calibrated.job(4, 64, **more)) == code


def test_settings_are_checked() -> None:
    assert Mixed24.build({}).needs_stats() is None
    assert "gptq" in str(Mixed24.build({"rounding": "gptq"}).needs_stats())
    assert "hessian" in str(Mixed24.build({"sensitivity": "hessian"}).needs_stats())
    wrong: list[dict[str, Any]] = [
        {"four_bit_ratio": 1.1}, {"group_size": 32}, {"outliers": 0.2}, {"layout": "tiles"},
        {"layout": "aligned64", "group_size": 8},
    ]  # fmt: skip
    for given_ in wrong:
        with pytest.raises(BcqError) as caught:
            Mixed24.build(given_)
        assert caught.value.code == "BCQ-E620"
