"""A stack has the values of its matrices, whatever their zero points, types, orders and outliers."""

from __future__ import annotations

import numpy as np
import pytest

from bcqfmt import BcqWeight
from bcqfmt.converters.methods.stacking import stack
from bcqfmt.errors import BcqError
from weights import samples


def affine(zero: object, seed: int = 0, columns: int = 48) -> BcqWeight:
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 16, (3, columns))
    return BcqWeight.from_affine(
        codes, rng.normal(size=(3, columns // 16)).astype(np.float16), zero, group_size=16, bits=4
    )


def assert_joined(weights: list[BcqWeight]) -> BcqWeight:
    made = stack(weights)
    made.check()
    assert made.shape == (len(weights), *weights[0].shape)
    assert made.name == ""
    for e, weight in enumerate(weights):
        assert made.dequantize()[e].tobytes() == weight.dequantize().tobytes()
    return made


def test_zero_points_of_different_widths():
    stored = [np.full((3, 3), 3) + np.eye(3, dtype=int) * k for k in (1, 5, 12)]
    made = assert_joined([affine(zero, k) for k, zero in enumerate(stored)])
    assert made.scheme.segments[0].zero == (4,)
    made = assert_joined([affine(7), affine(8), affine(stored[0])])
    assert made.scheme.segments[0].zero == (4,)
    assert assert_joined([affine(8), affine(8, 1)]).scheme.segments[0].zero == 8
    assert assert_joined([affine(0), affine(1)]).scheme.segments[0].zero == (1,)


def test_equal_to_the_constructor_of_a_stack():
    rng = np.random.default_rng(0)
    codes, zero = rng.integers(0, 8, (4, 5, 24)), rng.integers(0, 8, (4, 5, 3))
    scale = rng.normal(size=(4, 5, 3)).astype(np.float32)
    whole = BcqWeight.from_affine(codes, scale, zero, group_size=8, bits=3)
    parts = [BcqWeight.from_affine(codes[e], scale[e], zero[e], group_size=8, bits=3) for e in range(4)]
    assert stack(parts).digest() == whole.digest()


def test_plane_scales_of_different_types_are_widened():
    rng = np.random.default_rng(0)

    def planes(alpha: type, bias: type) -> BcqWeight:
        numbers = rng.normal(size=(3, 2, 2))
        sets = {1: (numbers[:1].astype(alpha), numbers[1].astype(bias))}
        return BcqWeight.from_bcq(
            rng.integers(0, 2, (2, 2, 16)), numbers[:2].astype(alpha), numbers[2].astype(bias), group_size=8,
            dtype="float16", scale_sets=sets,
        )  # fmt: skip

    made = assert_joined([planes(np.float16, np.float16), planes(np.float16, np.float32)])
    assert (made.scheme.segments[0].alpha, made.scheme.segments[0].bias) == ("F16", "F32")
    first = [planes(np.float16, np.float16), planes(np.float32, np.float32)]
    made = stack(first)
    assert (made.scheme.segments[0].alpha, made.scheme.segments[0].bias) == ("F32", "F32")
    assert made.dequantize(planes=1)[0].tobytes() == first[0].dequantize(planes=1).tobytes()


def test_segments_perm_second_order_and_outliers():
    made = assert_joined([samples.rich(seed=seed) for seed in range(3)])
    assert made.scheme.perm
    assert made.parts()["outlier_indptr"].shape == (3 * 4 + 1,)


def test_tiles():
    def tiled(seed: int) -> BcqWeight:
        rng = np.random.default_rng(seed)
        left = BcqWeight.from_affine(
            rng.integers(0, 4, (2, 48)), np.ones((2, 3), np.float16), rng.integers(0, 4, (2, 3)), group_size=16, bits=2
        ).with_second_order(
            rng.integers(0, 8, (2, 3)), np.ones((1, 3), np.float16), rng.integers(0, 9, (1, 3)), bits=4, rows=2
        )
        scale = rng.normal(size=(2, 1)).astype(np.float16)
        right = BcqWeight.from_affine(rng.integers(0, 16, (2, 16)), scale, 7 + seed, group_size=16, bits=4)
        return BcqWeight.from_segments([left, right]).to_aligned64()

    made = assert_joined([tiled(0), tiled(1), tiled(0)])
    assert made.scheme.aligned64
    assert made.scheme.segments[1].zero == (4,)


@pytest.mark.parametrize(
    "other",
    [
        affine(8, columns=64),
        samples.planes(3, 64).columns(0, 48),
        BcqWeight.from_affine(np.zeros((3, 48), int), np.ones((3, 3), np.float16), 8, group_size=16, bits=5),
        BcqWeight.from_affine(np.zeros((3, 48), int), np.ones((3, 2), np.float16), 8, group_size=32, bits=4),
        BcqWeight.from_affine(np.zeros((3, 48), int), np.ones((3, 3), np.float32), 8, group_size=16, bits=4),
        affine(8).with_perm(np.arange(48)[::-1].copy()),
    ],
)
def test_other_differences_are_refused(other: BcqWeight):
    with pytest.raises(BcqError) as caught:
        stack([affine(8), other])
    assert caught.value.code == "BCQ-E305"


def test_a_stack_is_not_stacked_and_nothing_is_none():
    with pytest.raises(BcqError) as caught:
        stack([stack([affine(8), affine(8)])] * 2)
    assert caught.value.code == "BCQ-E305"
    with pytest.raises(BcqError) as caught:
        stack([])
    assert caught.value.code == "BCQ-E302"
