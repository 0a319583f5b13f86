"""Products on the CPU against the float64 product of the normative decoder."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from bcqfmt import BcqError, BcqWeight
from bcqfmt.kernels import cpu
from products import kernel_samples as ks
from products import product_reference as reference
from weights.strategies import examples, tiled_weights, weights

CALM: Any = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}  # compiling takes time

# (encoding, planes, group size, batch); 0: the whole row is a group. A kernel is compiled for each of them.
KERNELS = [
    ("affine", 1, 32, 1),
    ("bcq", 1, 8, 2),
    ("second-order", 2, 16, 1),
    ("affine", 2, 64, 8),
    ("offset", 3, 128, 3),
    ("affine", 4, 32, 1),
    ("offset", 4, 96, 1),
    ("bcq", 4, 64, 2),
    ("float-zero", 4, 16, 1),
    ("bcq", 5, 0, 1),
    ("affine", 6, 8, 2),
    ("offset", 7, 32, 1),
    ("affine", 8, 0, 4),
]
# less than a block of words, one, one and a half, many; one row, a tile and a bit of one
SHAPES = [(1, 40), (17, 512), (16, 712), (37, 1100)]
# rows of whole blocks take one kernel more: once for each number of planes
FIRST = {q: (encoding, g) for encoding, q, g, _ in reversed(KERNELS)}


def assert_close(found: Any, weight: BcqWeight, x: Any, planes: int | None = None, index: int | None = None) -> None:
    """The error next to the sum of all terms without their signs: terms may cancel, their rounding does not."""
    values = np.abs(weight.dequantize("float64", planes=planes))
    terms = np.abs(x).astype(np.float64) @ (values if index is None else values[index]).T
    error = np.asarray(found).astype(np.float64) - reference.product(weight, x, planes=planes, index=index)
    assert np.linalg.norm(error) < 1e-6 * np.linalg.norm(terms)


@pytest.mark.parametrize(("encoding", "q", "g", "batch"), KERNELS)
def test_planes_give_the_product_for_every_encoding_and_number_of_planes(
    encoding: str, q: int, g: int, batch: int
) -> None:
    for seed, (rows, columns) in enumerate(SHAPES):
        if columns % 128 == 0 and FIRST[q] != (encoding, g):
            continue
        weight = ks.weight(encoding, q, rows, columns, min(g or columns, columns), seed=seed)
        matrix = cpu.prepare(weight)
        if matrix.obstacle:  # the only group of a short row
            assert columns < g
            continue
        x = ks.vectors(batch, columns)
        assert matrix.path(batch) == "planes"
        assert_close(matrix.matmul(x), weight, x)


@pytest.mark.parametrize("batch", [1, 2])
def test_whole_numbers_are_multiplied_exactly(batch: int) -> None:
    """Also beside numbers that are much larger."""
    rng = np.random.default_rng(batch)
    codes = rng.integers(0, 16, (21, 256))
    weight = BcqWeight.from_affine(codes, np.full((21, 4), 0.5, np.float16), 8, group_size=64, bits=4)
    x = rng.integers(-3, 4, (batch, 256)).astype(np.float32)
    x[:, ::32] = 2.0**16
    assert np.array_equal(cpu.prepare(weight).matmul(x), reference.product(weight, x))


def test_inputs_of_any_size() -> None:
    weight = ks.weight("affine", 4, 9, 128, 32)
    matrix, x = cpu.prepare(weight), ks.vectors(1, 128)
    for power in (-108, -60, 60, 100):
        small = np.ldexp(x, power)
        assert_close(matrix.matmul(small).astype(np.float64) * 2.0**20, weight, small.astype(np.float64) * 2.0**20)
    assert not matrix.matmul(np.zeros((1, 128), np.float32)).any()


@pytest.mark.parametrize("value", [0.99502, -0.99502, 0.99999, -0.99999])  # around where x gets a digit less
def test_the_largest_sums_of_a_word_fit(value: float) -> None:
    codes = np.repeat(np.array([[0], [15]], np.uint8), 128, 1)
    weight = BcqWeight.from_affine(codes, np.ones((2, 1), np.float16), 8, group_size=128, bits=4)
    x = np.full((1, 128), value, np.float32)
    assert_close(cpu.prepare(weight).matmul(x), weight, x)


@pytest.mark.parametrize("wrong", [np.inf, -np.inf, np.nan])
def test_what_is_not_finite_stays_in_its_vector(wrong: float) -> None:
    weight = ks.weight("affine", 4, 9, 128, 32)
    matrix, x = cpu.prepare(weight), ks.vectors(2, 128)
    alone = matrix.matmul(x)
    x[0, 77] = wrong
    found = matrix.matmul(x)
    assert not np.isfinite(found[0]).any()
    assert np.array_equal(found[1], alone[1])


def test_a_vector_gives_a_vector_and_no_vectors_give_none() -> None:
    weight = ks.weight("affine", 4, 9, 64, 32)
    matrix, x = cpu.prepare(weight), ks.vectors(1, 64)
    assert matrix.matmul(x[0]).shape == (9,)
    assert np.array_equal(matrix.matmul(x[0]), matrix.matmul(x)[0])
    assert matrix.matmul(x[:0]).shape == (0, 9)


@pytest.mark.parametrize("batch", [1, 2, 7, 9, 19, 60])
def test_a_vector_of_a_batch_is_multiplied_as_if_it_were_alone(batch: int) -> None:
    weight = ks.weight("affine", 4, 20, 96, 32)
    matrix, x = cpu.prepare(weight), ks.vectors(batch, 96)
    assert matrix.path(batch) == ("planes" if batch < 49 else "values")
    found = matrix.matmul(x)
    assert_close(found, weight, x)
    assert_close(matrix.matmul(x[-1]), weight, x[-1])


@pytest.mark.parametrize("outliers", ["add", "replace"])
def test_segments_reordering_and_outliers(outliers: str) -> None:
    weight = ks.mixed(35, 48, 96, outliers=outliers)
    matrix, x = cpu.prepare(weight), ks.vectors(2, 144)
    assert not matrix.obstacle
    assert_close(matrix.matmul(x), weight, x)
    many = ks.vectors(70, 144)
    assert matrix.path(70) == "values"
    assert_close(matrix.matmul(many), weight, many)


@pytest.mark.parametrize(("encoding", "planes"), [("affine", 1), ("bcq", 4)])
def test_the_first_planes_only(encoding: str, planes: int) -> None:
    weight = ks.weight(encoding, 4 if encoding == "affine" else 5, 6, 64, 64)
    x = ks.vectors(1, 64)
    assert_close(cpu.prepare(weight, planes=planes).matmul(x), weight, x, planes=planes)


def test_a_scale_set_is_used_for_its_number_of_planes() -> None:
    rng = np.random.default_rng(0)
    alpha, own = (rng.normal(size=(p, 5, 2)).astype(np.float16) for p in (4, 1))
    weight = BcqWeight.from_bcq(rng.integers(0, 2, (4, 5, 64)), alpha, group_size=32, scale_sets={1: (own, None)})
    x = ks.vectors(1, 64)
    assert_close(cpu.prepare(weight, planes=1).matmul(x), weight, x, planes=1)


def test_every_matrix_of_a_stack() -> None:
    rng = np.random.default_rng(0)
    scale = rng.normal(size=(3, 5, 2)).astype(np.float16)
    weight = BcqWeight.from_affine(rng.integers(0, 16, (3, 5, 64)), scale, 1, group_size=32, bits=4)
    x = ks.vectors(1, 64)
    for index in range(3):
        assert_close(cpu.prepare(weight, index=index).matmul(x), weight, x, index=index)


@given(tiled_weights())
@settings(examples(15), **CALM)
def test_tiles_of_64_columns(pair: tuple[BcqWeight, Any]) -> None:
    weight, _ = pair
    x = ks.vectors(1, weight.spec.columns)
    for index in range(weight.spec.stack):
        which = {"index": index} if len(weight.shape) == 3 else {}
        values = weight.dequantize("float64").reshape(weight.spec.stack, *weight.shape[-2:])[index]
        if np.abs(values).max() < 1e30:  # float32 sums overflow beyond that, the float64 product does not
            found = cpu.prepare(weight, **which).matmul(x)
            # cancellation makes a sum smaller than its terms: compare with those
            scale = np.linalg.norm(np.abs(x).astype(np.float64) @ np.abs(values).T) or 1.0
            assert np.linalg.norm(found - reference.product(weight, x, **which)) <= 2e-6 * scale


@given(weights(max_segments=1, outliers=False, perm=False, styles=("plain",)))
@settings(examples(30), **CALM)
def test_any_weight_has_a_way(pair: tuple[BcqWeight, Any]) -> None:
    weight, _ = pair
    matrix = cpu.prepare(weight, **({"index": 0} if len(weight.shape) == 3 else {}))
    matrix._segments, matrix.obstacle = (), matrix.obstacle or "on purpose"  # kernels of all kinds would take minutes
    x = ks.vectors(1, weight.spec.columns)
    which = {"index": 0} if len(weight.shape) == 3 else {}
    terms = np.abs(weight.dequantize("float64")).reshape(-1, *weight.shape[-2:])[0] @ np.abs(x[0]).astype(np.float64)
    found = matrix.matmul(x)[0]
    assert np.linalg.norm(found - reference.product(weight, x[0], **which)) <= 2e-6 * (np.linalg.norm(terms) or 1)


EXTRAS = [("table", 32, {}), ("short table", 16, {"outliers": "add", "perm": True})]


@pytest.mark.parametrize(("encoding", "g", "extras"), EXTRAS)
def test_tables_of_small_numbers_are_looked_up(encoding: str, g: int, extras: dict[str, Any]) -> None:
    for batch, (rows, columns) in enumerate(SHAPES, 1):
        weight = ks.weight(encoding, 4, rows, columns, g, seed=batch, **extras)
        matrix, x = cpu.prepare(weight), ks.vectors(batch, columns)
        assert matrix.path(batch) == ("values" if cpu.target() == "portable" else "planes")
        assert_close(matrix.matmul(x), weight, x)


@pytest.mark.parametrize("levels", [[0, 1, 2, 300], [-128, 1, 2, 3], [5, -6], list(range(32))])
def test_tables_that_bytes_do_not_hold_are_decoded(levels: list[int]) -> None:
    rng, scale = np.random.default_rng(0), np.full((5, 2), 0.5, np.float16)
    weight = BcqWeight.from_table(rng.integers(0, len(levels), (5, 64)), scale, levels, group_size=32)
    matrix, x = cpu.prepare(weight), ks.vectors(2, 64)
    assert "has a table" in matrix.obstacle
    assert_close(matrix.matmul(x), weight, x)


@pytest.mark.parametrize("g", [12, 33, 40])
def test_groups_that_tables_cannot_take_are_named_and_decoded(g: int) -> None:
    weight = ks.weight("affine", 4, 7, 200, g)
    matrix, x = cpu.prepare(weight), ks.vectors(3, 200)
    assert f"groups of {g} columns" in matrix.obstacle
    assert matrix.path() == "values"
    assert_close(matrix.matmul(x), weight, x)


def test_numbers_beyond_float32_are_named_and_decoded() -> None:
    scale = np.full((3, 2), 3e38, np.float32)
    weight = BcqWeight.from_affine(np.ones((3, 64), np.uint8), scale, 15, group_size=32, bits=4)
    matrix = cpu.prepare(weight)
    assert "not finite in float32" in matrix.obstacle
    assert np.isneginf(matrix.matmul(np.ones((1, 64), np.float32))).all()


def test_infinities_come_out_as_they_would_of_the_dense_matrix() -> None:
    scale = np.full((2, 1), 1.0, np.float16)
    scale[1] = np.inf
    codes = np.full((2, 32), 3, np.uint8)
    weight = BcqWeight.from_affine(codes, scale, 1, group_size=32, bits=2).allow_nonfinite()
    assert cpu.prepare(weight).matmul(np.ones(32, np.float32)).tolist() == [64.0, float("inf")]


def test_float_zeros_that_round_are_taken_without_the_rounding_by_tables_and_with_it_by_values() -> None:
    rng = np.random.default_rng(0)
    codes, scale = rng.integers(0, 16, (32, 64)), np.ones((32, 1), np.float16)
    zeros = rng.uniform(0, 15, (32, 1)).astype(np.float16)
    weight = BcqWeight.from_float_zero(codes, scale, zeros, group_size=64, bits=4)
    matrix, x = cpu.prepare(weight), ks.vectors(2, 64)
    linear = x.astype(np.float64) @ (codes - zeros.astype(np.float64)).T
    assert reference.relative_error(matrix.matmul(x), linear) < 2e-6
    many = ks.vectors(64, 64)
    assert_close(matrix.matmul(many), weight, many)


@pytest.mark.parametrize("batch", [1, 2, 60])
def test_the_number_of_threads_does_not_show(batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "_SMALL", 0)  # small products get one thread otherwise
    weight = ks.with_outliers(ks.weight("affine", 4, 600, 1024, 64), "replace", 0.01)
    matrix, x = cpu.prepare(weight), ks.vectors(batch, 1024)
    alone = matrix.matmul(x, threads=1)
    assert_close(alone, weight, x)
    for threads in (2, 3, 7):
        assert np.array_equal(matrix.matmul(x, threads=threads), alone)
    values = matrix.dequantize(threads=1).view(np.uint16)
    assert np.array_equal(matrix.dequantize(threads=3).view(np.uint16), values)


@pytest.mark.parametrize(
    ("x", "found"),
    [
        (np.zeros(63, np.float32), r"x of shape \[63\]"),
        (np.zeros((2, 3, 64), np.float32), r"x of shape \[2, 3, 64\]"),
        (np.zeros(64), "type float64"),
        (np.zeros(64, np.float16), "type float16"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(x: Any, found: str) -> None:
    matrix = cpu.prepare(ks.weight("affine", 4, 3, 64, 32))
    with pytest.raises(BcqError, match=found) as caught:
        matrix.matmul(x)
    assert caught.value.code == "BCQ-E552"


def test_no_threads_and_no_rows_are_refused() -> None:
    matrix = cpu.prepare(ks.weight("affine", 4, 256, 512, 32))
    with pytest.raises(BcqError, match="0 threads"):
        matrix.matmul(ks.vectors(1, 512), threads=0)
    with pytest.raises(BcqError, match=r"rows 3\.\.3"):
        matrix.dequantize(rows=(3, 3))
    with pytest.raises(BcqError, match="matrix 0 of a weight"):
        cpu.prepare(ks.weight("affine", 4, 3, 64, 32), index=0)


def test_planes_are_not_copied() -> None:
    weight = ks.weight("affine", 4, 3, 64, 32)
    stored = weight.parts()["s0_planes"].array()
    assert np.shares_memory(cpu.prepare(weight)._segments[0].planes, stored)
