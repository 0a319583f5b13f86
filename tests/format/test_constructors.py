"""What authors of quantizers call: arrays in, the same numbers out, wrong arrays refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given

import bcqfmt
from bcqfmt import BcqError, BcqWeight, OutlierRule, PackedZero, Scheme, UsageError
from weights import oracle, samples
from weights.oracle import Plain
from weights.strategies import bits_of, examples, plain_of, weights

KINDS = [np.float16, ml_dtypes.bfloat16, np.float32]
RNG = np.random.default_rng(12)


def normal(*shape: int, kind: Any = np.float16) -> Any:
    return RNG.normal(size=shape).astype(kind)


def spread(array: Any, columns: int, g: int) -> Any:
    """Numbers per group as numbers per column."""
    return np.repeat(array.astype(np.float64), g, axis=-1)[..., :columns]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lead", [(), (3,)])
@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
def test_affine(bits: int, lead: tuple[int, ...], kind: Any) -> None:
    codes = RNG.integers(0, 2**bits, (*lead, 5, 40))
    scale, zero = normal(*lead, 5, 3, kind=kind), RNG.integers(0, 2**bits + 1, (*lead, 5, 3))
    weight = BcqWeight.from_affine(codes, scale, zero, group_size=16, bits=bits)
    expected = spread(scale, 40, 16) * (codes - spread(zero, 40, 16))
    assert weight.dequantize("float64").tobytes() == expected.tobytes()
    assert weight.shape == codes.shape
    assert weight.codes().tolist() == codes.tolist()
    assert bits_of(weight.dequantize()) == oracle.values(plain_of(weight))
    weight.check()


def test_affine_with_one_zero_point() -> None:
    codes = RNG.integers(0, 8, (2, 16))
    for zero in (5, np.full((2, 2), 5), np.int64(5)):
        weight = BcqWeight.from_affine(codes, normal(2, 2), zero, group_size=8, bits=3)
        assert weight.scheme.segments[0].zero == 5
        assert set(weight.parts()) == {"s0_planes", "s0_scale"}


def test_the_fewest_bits() -> None:
    def bits(codes: list[int], zero: int) -> int:
        return BcqWeight.from_affine(np.array([codes]), normal(1, 1), zero, group_size=8).scheme.segments[0].bits

    assert bits([0] * 8, 0) == 1
    assert bits([0] * 7 + [1], 2) == 1
    assert bits([0] * 7 + [1], 3) == 2
    assert bits([0] * 7 + [7], 8) == 3
    assert bits([0] * 7 + [255], 256) == 8
    weight = BcqWeight.from_affine(np.array([[0] * 7 + [7]] * 2), normal(2, 1), np.array([[0], [8]]), group_size=8)
    assert weight.scheme.segments[0].zero == PackedZero(4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lead", [(), (2,)])
def test_offset(lead: tuple[int, ...], kind: Any) -> None:
    codes = RNG.integers(0, 8, (*lead, 3, 24))
    scale, offset = normal(*lead, 3, 3, kind=kind), normal(*lead, 3, 3, kind=np.float32)
    weight = BcqWeight.from_offset(codes, scale, offset, group_size=8, bits=3)
    expected = spread(scale, 24, 8) * codes + spread(offset, 24, 8)
    assert weight.dequantize("float64").tobytes() == expected.tobytes()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_float_zero(dtype: str) -> None:
    codes, scale, zero = RNG.integers(0, 16, (3, 24)), normal(3, 3), normal(3, 3, kind=np.float32) * 7
    weight = BcqWeight.from_float_zero(codes, scale, zero, group_size=8, bits=4, dtype=dtype)
    assert weight.dequantize().dtype.name == dtype
    assert bits_of(weight.dequantize()) == oracle.values(plain_of(weight))


@pytest.mark.parametrize("lead", [(), (2,)])
@pytest.mark.parametrize("bias", [True, False])
def test_bcq(lead: tuple[int, ...], bias: bool) -> None:
    signs = RNG.integers(0, 2, (*lead, 3, 4, 40))
    alpha, z = normal(*lead, 3, 4, 3), normal(*lead, 4, 3, kind=np.float32)
    sets = {p: (normal(*lead, p, 4, 3), normal(*lead, 4, 3, kind=np.float32) if bias else None) for p in (1, 2)}
    weight = BcqWeight.from_bcq(signs, alpha, z if bias else None, group_size=16, scale_sets=sets)
    for p in (3, 2, 1):
        chosen, start = (alpha, z) if p == 3 else sets[p]
        expected = spread(start, 40, 16) if bias else np.zeros((*lead, 4, 40))
        for i in range(p):
            step = spread(chosen[..., i, :, :], 40, 16)
            expected = np.where(signs[..., i, :, :] == 1, expected + step, expected - step)
        assert weight.dequantize("float64", planes=p).tobytes() == expected.tobytes()


def test_second_order() -> None:
    codes, order = RNG.integers(0, 4, (5, 24)), RNG.integers(0, 64, (5, 3))
    scale = normal(3, 3, kind=np.float32)
    for zero in (RNG.integers(0, 64, (3, 3)), normal(3, 3)):
        weight = BcqWeight.from_affine(codes, np.ones((5, 3), np.float16), 1, group_size=8, bits=2, dtype="bfloat16")
        weight = weight.with_second_order(order, scale, zero, bits=6, rows=2)
        row = np.arange(5) // 2
        s = scale.astype(np.float64)[row] * (order - zero.astype(np.float64)[row])
        assert weight.dequantize("float64").tobytes() == (np.repeat(s, 8, axis=1) * (codes - 1.0)).tobytes()
        assert weight.scheme.segments[0].scale.zero == ("packed" if zero.dtype.kind == "i" else "F16")


@pytest.mark.parametrize("lead", [(), (3,)])
@pytest.mark.parametrize("zero", ["constant", "packed", "floating", "bytes"])
def test_scales_and_offsets_made_of_codes(zero: str, lead: tuple[int, ...]) -> None:
    codes, row, column = RNG.integers(0, 4, (*lead, 5, 56)), np.arange(5) // 2, np.arange(7) // 3
    scale, order = normal(*lead, 3, 3, kind=np.float32), RNG.integers(0, 64, (*lead, 5, 7))
    given: dict[str, Any] = {
        "constant": 33,
        "packed": RNG.integers(0, 64, (*lead, 3, 3)),
        "floating": normal(*lead, 3, 3),
    }
    if zero == "bytes":
        order = RNG.integers(0, 0x7F, order.shape).astype(np.uint8).view(ml_dtypes.float8_e4m3fn)
    coded = bcqfmt.Coded(order, scale, given.get(zero, 0), 6, rows=2, groups=3)
    shared = given.get(zero, 0)
    spread_zero = shared if np.ndim(shared) == 0 else shared.astype(np.float64)[..., row, :][..., column]
    numbers = scale.astype(np.float64)[..., row, :][..., column] * (order.astype(np.float64) - spread_zero)
    weight = BcqWeight.from_offset(codes, coded, coded, group_size=8, bits=2)
    expected = np.repeat(numbers, 8, axis=-1) * codes + np.repeat(numbers, 8, axis=-1)
    assert weight.dequantize("float64").tobytes() == expected.tobytes()
    assert weight.dtype == "F32"
    declared = {"constant": 33, "packed": "packed", "floating": "F16", "bytes": 0}[zero]
    assert (weight.scheme.segments[0].scale.zero, weight.scheme.segments[0].offset.zero) == (declared, declared)
    affine_ = BcqWeight.from_affine(codes, coded, 1, group_size=8, bits=2)
    assert affine_.dequantize("float64").tobytes() == (np.repeat(numbers, 8, axis=-1) * (codes - 1.0)).tobytes()


@pytest.mark.parametrize("kind", [ml_dtypes.float8_e8m0fnu, ml_dtypes.float8_e4m3fn])
def test_scales_of_one_byte(kind: Any) -> None:
    """ml_dtypes knows both types; its only E8M0 NaN is a number here."""
    scale = np.arange(0x7F, dtype=np.uint8).view(kind)[None]
    weight = BcqWeight.from_affine(np.ones((1, 8 * 0x7F), int), scale, 0, group_size=8, bits=1)
    assert weight.dtype == "F32"
    assert np.array_equal(weight.dequantize("float64")[0, ::8], scale[0].astype(np.float64))


def test_segments_perm_and_outliers() -> None:
    left, right = samples.affine(3, 32, 2), samples.affine(3, 20, 5, 1, 16)
    perm = RNG.permutation(52)
    weight = BcqWeight.from_segments([left, right], perm=perm)
    stored = np.concatenate([left.dequantize("float64"), right.dequantize("float64")], axis=1)
    expected = np.empty_like(stored)
    expected[:, perm] = stored
    assert weight.dequantize("float64").tobytes() == expected.tobytes()
    values = normal(4)
    for mode in ("add", "replace"):
        more = weight.with_outliers(np.array([0, 2, 2, 4]), np.array([5, 51, 0, 7]), values, mode=mode)
        wanted = expected.copy()
        for r, c, v in zip((0, 0, 2, 2), (5, 51, 0, 7), values.astype(np.float64), strict=True):
            wanted[r, c] = wanted[r, c] + v if mode == "add" else v
        assert more.dequantize("float64").tobytes() == wanted.tobytes()
        assert more.scheme.outliers.segments == (0, 1)


def test_no_outliers() -> None:
    weight = samples.affine(2, 32)
    none = weight.with_outliers(np.zeros(3, int), np.zeros(0, int), np.zeros(0, np.float16))
    assert none.parts()["outlier_values"].shape == (0,)
    none.check()
    assert none.dequantize().tobytes() == weight.dequantize().tobytes()


@given(weights(nonfinite=None))
@examples(30)
def test_the_digest_depends_on_content_alone(pair: tuple[BcqWeight, Plain]) -> None:
    import hashlib

    weight, plain = pair
    entry: dict[str, Any] = {"dtype": plain.dtype, "scheme": plain.scheme, "shape": plain.shape}
    if len(plain.segments) > 1:
        entry["widths"] = plain.widths
    lines = [oracle.canonical(entry)]
    for suffix in sorted(plain.parts):
        dtype, shape, _ = plain.parts[suffix]
        digest = hashlib.sha256(oracle.raw_bytes(plain.parts[suffix])).hexdigest()
        lines.append(f"{suffix} {dtype} {','.join(map(str, shape))} {digest}")
    expected = hashlib.sha256(("\n".join(lines) + "\n").encode()).hexdigest()
    assert weight.digest() == expected
    assert BcqWeight("another.name", weight.spec, weight.parts()).digest() == expected


# -- wrong arrays ----------------------------------------------------------------------------------------------

ONE = np.ones((2, 1), np.float16)
CODES = np.ones((2, 8), int)
BITS = np.ones((2, 2, 8), int)
BYTES = np.ones((2, 1), ml_dtypes.float8_e4m3fn)
ALPHA = np.ones((2, 2, 1), np.float16)


def affine(codes: Any = CODES, scale: Any = ONE, zero: Any = 1, **options: Any) -> BcqWeight:
    return BcqWeight.from_affine(codes, scale, zero, **{"group_size": 8, "bits": 2, **options})


WRONG: dict[str, Callable[[], Any]] = {
    "code too large": lambda: affine(CODES * 4),
    "negative code": lambda: affine(-CODES),
    "codes of floats": lambda: affine(CODES * 1.0),
    "codes of booleans": lambda: affine(CODES.astype(bool)),
    "codes of one dimension": lambda: affine(CODES[0], ONE[0]),
    "codes of four dimensions": lambda: affine(CODES[None, None], ONE[None, None]),
    "no codes": lambda: affine(np.zeros((0, 8), int), np.zeros((0, 1), np.float16)),
    "no columns": lambda: affine(np.zeros((2, 0), int), np.zeros((2, 0), np.float16)),
    "no codes and no bits": lambda: affine(np.zeros((0, 8), int), np.zeros((0, 1), np.float16), bits=None),
    "scale of doubles": lambda: affine(scale=ONE.astype(float)),
    "scale of integers": lambda: affine(scale=ONE.astype(np.int16)),
    "scale of another shape": lambda: affine(scale=np.ones((2, 2), np.float16)),
    "scale of one dimension": lambda: affine(scale=np.ones(2, np.float16)),
    "zero point too large": lambda: affine(zero=5),
    "negative zero point": lambda: affine(zero=-1),
    "fractional zero point": lambda: affine(zero=1.5),
    "zero points of floats": lambda: affine(zero=ONE),
    "zero points of another shape": lambda: affine(zero=np.array([[1, 2], [1, 2]])),
    "equal zero points of another shape": lambda: affine(zero=np.ones((5, 7), int)),
    "nine bits": lambda: affine(bits=9),
    "no bits": lambda: affine(bits=0),
    "groups of seven": lambda: affine(group_size=7),
    "groups of nothing": lambda: affine(group_size=0),
    "groups larger than the row": lambda: affine(group_size=9),
    "logical dtype of doubles": lambda: affine(dtype="float64"),
    "logical dtype of nothing": lambda: affine(dtype="int8"),
    "offsets of doubles": lambda: BcqWeight.from_offset(CODES, ONE, ONE.astype(float), group_size=8, bits=2),
    "float zeros of integers": lambda: BcqWeight.from_float_zero(CODES, ONE, CODES[:, :1], group_size=8, bits=2),
    "bits of two": lambda: BcqWeight.from_bcq(BITS * 2, ALPHA, group_size=8),
    "bits of two dimensions": lambda: BcqWeight.from_bcq(BITS[0], ALPHA[0], group_size=8),
    "nine planes": lambda: BcqWeight.from_bcq(np.ones((9, 2, 8), int), np.ones((9, 2, 1), np.float16), group_size=8),
    "alpha of another shape": lambda: BcqWeight.from_bcq(BITS, ALPHA[:1], group_size=8),
    "scale set of another 16-bit type": lambda: BcqWeight.from_bcq(
        BITS, ALPHA, group_size=8, scale_sets={1: (ALPHA[:1].astype(ml_dtypes.bfloat16), None)}
    ),
    "scale set of another size of type": lambda: BcqWeight.from_bcq(
        BITS, ALPHA, group_size=8, scale_sets={1: (ALPHA[:1].astype(np.float32), None)}
    ),
    "scale set of integers": lambda: BcqWeight.from_bcq(
        BITS, ALPHA, group_size=8, scale_sets={1: (ALPHA[:1].astype(np.int16), None)}
    ),
    "bias of a scale set of another type": lambda: BcqWeight.from_bcq(
        BITS, ALPHA, ONE, group_size=8, scale_sets={1: (ALPHA[:1], ONE.astype(ml_dtypes.bfloat16))}
    ),
    "scale set without its bias": lambda: BcqWeight.from_bcq(
        BITS, ALPHA, ONE, group_size=8, scale_sets={1: (ALPHA[:1], None)}
    ),
    "scale set for all planes": lambda: BcqWeight.from_bcq(BITS, ALPHA, group_size=8, scale_sets={2: (ALPHA, None)}),
    "scale set for no plane": lambda: BcqWeight.from_bcq(BITS, ALPHA, group_size=8, scale_sets={0: (ALPHA[:0], None)}),
    "scale set for more planes": lambda: BcqWeight.from_bcq(
        BITS, ALPHA, group_size=8, scale_sets={3: (np.ones((3, 2, 1), np.float16), None)}
    ),
    "second order code too large": lambda: affine().with_second_order(
        np.full((2, 1), 16), ONE[:1], np.zeros((1, 1), int), bits=4, rows=2
    ),
    "second order zero too large": lambda: affine().with_second_order(
        np.zeros((2, 1), int), ONE[:1], np.full((1, 1), 16), bits=4, rows=2
    ),
    "second order of no rows": lambda: affine().with_second_order(
        np.zeros((2, 1), int), ONE[:1], ONE[:1], bits=4, rows=0
    ),
    "second order of negative rows": lambda: affine().with_second_order(
        np.zeros((2, 1), int), ONE[:1], ONE[:1], bits=4, rows=-1
    ),
    "second order of another shape": lambda: affine().with_second_order(
        np.zeros((2, 1), int), ONE, ONE, bits=4, rows=2
    ),
    "second order for bcq": lambda: BcqWeight.from_bcq(BITS, ALPHA, group_size=8).with_second_order(
        np.zeros((2, 1), int), ONE[:1], ONE[:1], bits=4, rows=2
    ),
    "second order zero of the segment too large": lambda: affine(scale=bcqfmt.Coded(CODES[:, :1], ONE, 17, 4)),
    "second order zero of the segment negative": lambda: affine(scale=bcqfmt.Coded(CODES[:, :1], ONE, -1, 4)),
    "second order of no groups": lambda: affine(scale=bcqfmt.Coded(CODES[:, :1], ONE, 0, 4, groups=0)),
    "second order of bytes with a zero": lambda: affine(scale=bcqfmt.Coded(BYTES, ONE, 1)),
    "second order of halves": lambda: affine(scale=bcqfmt.Coded(ONE, ONE)),
    "second order scale of bytes": lambda: affine(scale=bcqfmt.Coded(CODES[:, :1], BYTES)),
    "bytes with a sign": lambda: affine(scale=-BYTES),
    "bytes that are no number": lambda: affine(scale=np.full((2, 1), 0x7F, np.uint8).view(BYTES.dtype)),
    "codes of bytes with a sign": lambda: affine(scale=bcqfmt.Coded(-BYTES, ONE)),
    "other bytes": lambda: affine(scale=ONE.astype(ml_dtypes.float8_e5m2)),
    "table of three": lambda: BcqWeight.from_table(CODES, ONE, [0, 1, 2], group_size=8),
    "table of none": lambda: BcqWeight.from_table(CODES, ONE, [], group_size=8),
    "table of large numbers": lambda: BcqWeight.from_table(CODES, ONE, [0, 2**28 + 1], group_size=8),
    "table of 512": lambda: BcqWeight.from_table(CODES, ONE, range(512), group_size=8),
    "table with codes beyond": lambda: BcqWeight.from_table(CODES * 2, ONE, [0, 1], group_size=8),
    "table of multiples of 2": lambda: BcqWeight.from_table(CODES, ONE, [0, 1], exponent=1, group_size=8),
    "table of multiples of 2^-127": lambda: BcqWeight.from_table(CODES, ONE, [0, 1], exponent=-127, group_size=8),
    "perm of another length": lambda: affine().with_perm(np.arange(7)),
    "perm after outliers": lambda: (
        affine().with_outliers(np.zeros(3, int), np.zeros(0, int), ONE[:0, 0]).with_perm(np.arange(8))
    ),
    "no pieces": lambda: BcqWeight.from_segments([]),
    "pieces of other rows": lambda: BcqWeight.from_segments(
        [affine(), affine(np.ones((3, 8), int), np.ones((3, 1), np.float16))]
    ),
    "pieces of other types": lambda: BcqWeight.from_segments([affine(), affine(dtype="float32")]),
    "seventeen pieces": lambda: BcqWeight.from_segments([affine()] * 17),
    "a short group in the middle": lambda: BcqWeight.from_segments(
        [samples.affine(2, 20, 2, 0, 8), samples.affine(2, 16, 2, 0, 8)]
    ),
    "outlier beyond": lambda: affine().with_outliers(np.array([0, 1, 1]), np.array([8]), ONE[:1, 0]),
    "outlier below": lambda: affine().with_outliers(np.array([0, 1, 1]), np.array([-1]), ONE[:1, 0]),
    "outlier mode": lambda: affine().with_outliers(np.array([0, 1, 1]), np.array([1]), ONE[:1, 0], mode="multiply"),
    "outlier segment": lambda: affine().with_outliers(np.array([0, 1, 1]), np.array([1]), ONE[:1, 0], segments=[1]),
    "outliers in no segment": lambda: affine().with_outliers(
        np.array([0, 1, 1]), np.array([1]), ONE[:1, 0], segments=[]
    ),
    "outliers without values": lambda: affine().with_outliers(np.array([0, 1, 1]), np.array([1]), ONE[:0, 0]),
    "outliers of doubles": lambda: affine().with_outliers(np.array([0, 1, 1]), np.array([1]), np.ones(1)),
    "outlier rows": lambda: affine().with_outliers(np.array([0, 1]), np.array([1]), ONE[:1, 0]),
    "outlier rows beyond 2^31": lambda: affine().with_outliers(
        np.array([0, 2**32, 2**32 + 1]), np.array([1]), ONE[:1, 0]
    ),
    "too many outliers": lambda: affine().with_outliers(np.array([0, 3, 3]), np.arange(3), np.ones(3, np.float16)),
    "a column twice": lambda: affine().with_outliers(np.array([0, 2, 2]), np.array([1, 1]), ONE[:, 0]),
    "perm twice": lambda: affine().with_perm(np.zeros(8, int)),
    "perm beyond": lambda: affine().with_perm(np.arange(8) + 1),
    "perm beyond 2^32": lambda: affine().with_perm(np.arange(8) + 2**32),
    "perm of fractions": lambda: affine().with_perm(np.arange(8) + 0.5),
    "infinite scale": lambda: affine(scale=ONE * np.float16(np.inf)),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arrays_are_refused(case: str) -> None:
    """By the constructor, or at the latest by the check that every save makes; never by numpy, never silently."""
    with pytest.raises(BcqError) as caught:
        WRONG[case]().check()
    assert caught.value.code != "BCQ-E999"


def handmade(
    segment: dict[str, Any] | None = None, scheme: dict[str, Any] | None = None, dtype: str = "F16"
) -> BcqWeight:
    """A weight put together without a constructor, its scheme changed."""
    weight = samples.affine(2, 32)
    first = replace(weight.scheme.segments[0], **(segment or {}))
    changed = Scheme(**{"segments": (first,), **(scheme or {})})
    spec = replace(weight.spec, scheme=changed, dtype=dtype)
    parts = weight.parts()
    if not isinstance(first.zero, PackedZero):
        del parts["s0_zero"]
    if changed.outliers is not None:
        empty = weight.with_outliers(np.zeros(3, int), np.zeros(0, int), np.zeros(0, np.float16)).parts()
        parts |= {suffix: part for suffix, part in empty.items() if suffix.startswith("outlier")}
    return BcqWeight("", spec, parts)


HANDMADE: dict[str, Callable[[], Any]] = {
    "zero beyond 2^q": lambda: handmade({"zero": 17}),
    "negative zero": lambda: handmade({"zero": -1}),
    "zero that is true": lambda: handmade({"zero": True}),
    "no zero": lambda: handmade({"zero": None}),
    "unknown encoding": lambda: handmade({"encoding": "ternary", "zero": 1}),
    "a bias too many": lambda: handmade({"bias": "F16", "zero": 1}),
    "precisions of an affine segment": lambda: handmade({"precisions": (1,), "zero": 1}),
    "logical dtype F64": lambda: handmade(dtype="F64"),
    "outliers in segment 1 of one": lambda: handmade(scheme={"outliers": OutlierRule("add", "F16", (1,))}),
    "outliers in segment 0 twice": lambda: handmade(scheme={"outliers": OutlierRule("add", "F16", (0, 0))}),
    "outliers in no segment": lambda: handmade(scheme={"outliers": OutlierRule("add", "F16", ())}),
    "outliers of no mode": lambda: handmade(scheme={"outliers": OutlierRule("max", "F16", (0,))}),
    "nine planes": WRONG["nine planes"],
    "seventeen pieces": WRONG["seventeen pieces"],
    "scale set for no plane": WRONG["scale set for no plane"],
    "scale set for more planes": WRONG["scale set for more planes"],
}


@pytest.mark.parametrize("case", HANDMADE)
def test_what_the_constructors_let_through_is_not_saved(case: str, tmp_path: Path) -> None:
    """Nothing that a validator would refuse is ever written, however the weight was made."""
    with pytest.raises(BcqError):
        bcqfmt.save(tmp_path / "a.safetensors", {"w.weight": HANDMADE[case]()})
    assert list(tmp_path.iterdir()) == []


def test_arguments_are_named_in_the_message() -> None:
    with pytest.raises(UsageError, match=r"codes 4\.\.4"):
        affine(CODES * 4)
    with pytest.raises(UsageError, match="float64"):
        affine(scale=ONE.astype(float))


TWO = np.ones((2, 2), np.float16)
NAMED: dict[str, tuple[str, Callable[[], Any]]] = {
    "no codes": ("codes", lambda: affine(None)),
    "codes of text": ("codes", lambda: affine("abc")),
    "uneven codes": ("codes", lambda: affine([[1, 2], [3]])),
    "scale of two groups": ("scale", lambda: affine(scale=TWO)),
    "wrong scales and right zero points": ("scale", lambda: affine(scale=TWO, zero=np.ones((2, 1), int))),
    "no scale": ("scale", lambda: affine(scale=None)),
    "no zero point": ("zero_point", lambda: affine(zero=None)),
    "no zero point, bits to be found": ("zero_point", lambda: affine(zero=None, bits=None)),
    "zero point too large": ("zero_point", lambda: affine(zero=5)),
    "zero points of two groups": ("zero_point", lambda: affine(zero=np.ones((2, 2), int))),
    "groups of text": ("group_size", lambda: affine(group_size="8")),
    "groups of seven": ("group_size", lambda: affine(group_size=7)),
    "groups of none": ("group_size", lambda: affine(group_size=None)),
    "bits of text": ("bits", lambda: affine(bits="2")),
    "no offset": ("offset", lambda: BcqWeight.from_offset(CODES, ONE, None, group_size=8, bits=2)),
    "no number of bits": ("bits", lambda: BcqWeight.from_offset(CODES, ONE, ONE, group_size=8, bits=None)),
    "float zeros of two groups": ("zero", lambda: BcqWeight.from_float_zero(CODES, ONE, TWO, group_size=8, bits=2)),
    "no table": ("table", lambda: BcqWeight.from_table(CODES, ONE, None, group_size=8)),
    "table of fractions": ("table", lambda: BcqWeight.from_table(CODES, ONE, [0.5, 1.5], group_size=8)),
    "bcq without alpha": ("alpha", lambda: BcqWeight.from_bcq(BITS, None, group_size=8)),
    "bcq without bits": ("bits", lambda: BcqWeight.from_bcq(BITS[:0], ALPHA, group_size=8)),
    "bias of two groups": ("bias", lambda: BcqWeight.from_bcq(BITS, ALPHA, TWO, group_size=8)),
    "scale sets in a list": ("scale_sets", lambda: BcqWeight.from_bcq(BITS, ALPHA, group_size=8, scale_sets=[ALPHA])),
    "scale set without a pair": (
        "scale_sets[1]", lambda: BcqWeight.from_bcq(BITS, ALPHA, group_size=8, scale_sets={1: ALPHA[:1]})
    ),
    "scale set of two planes for one": (
        "scale_sets[1][0]", lambda: BcqWeight.from_bcq(BITS, ALPHA, group_size=8, scale_sets={1: (ALPHA, None)})
    ),
    "coded scales without a scale": ("scale.scale", lambda: affine(scale=bcqfmt.Coded(CODES[:, :1], None))),
    "coded scales without a zero": ("scale.zero", lambda: affine(scale=bcqfmt.Coded(CODES[:, :1], ONE, None))),
    "second order without codes": ("codes", lambda: affine().with_second_order(None, ONE, ONE, bits=4, rows=1)),
    "second order of text": ("rows", lambda: affine().with_second_order(CODES[:, :1], ONE, ONE, bits=4, rows="1")),
    "one piece": ("pieces", lambda: BcqWeight.from_segments(affine())),
    "pieces of arrays": ("pieces", lambda: BcqWeight.from_segments([CODES])),
    "short perm": ("perm", lambda: affine().with_perm(np.arange(7))),
    "no perm": ("perm", lambda: affine().with_perm(None)),
    "perm twice": ("perm", lambda: affine().with_perm(np.zeros(8, int))),
    "no outliers": ("indices", lambda: affine().with_outliers([0, 0, 0], None, ONE[:0, 0])),
    "outliers of two rows in one": ("indptr", lambda: affine().with_outliers([0, 1], [1], ONE[:1, 0])),
    "outliers without values": ("values", lambda: affine().with_outliers([0, 1, 1], [1], ONE[:0, 0])),
    "outliers in segment 1": ("segments", lambda: affine().with_outliers([0, 1, 1], [1], ONE[:1, 0], segments=[1])),
    "mode of outliers": ("mode", lambda: affine().with_outliers([0, 1, 1], [1], ONE[:1, 0], mode=None)),
}  # fmt: skip


@pytest.mark.parametrize("case", NAMED)
def test_the_argument_at_fault_is_named(case: str) -> None:
    """And no file is blamed: there is none."""
    name, call = NAMED[case]
    with pytest.raises(BcqError) as caught:
        call()
    fault = caught.value
    assert fault.code == ("BCQ-V406" if case == "perm twice" else "BCQ-E302")
    assert fault.finding.tensor == name
    assert fault.finding.expected
    assert fault.hint
    assert "file" not in fault.hint


def test_lists_and_numbers_of_numpy_are_taken() -> None:
    plain = affine(zero=CODES[:, :1])
    listed = affine(CODES.tolist(), zero=[[1], [1]], group_size=np.int64(8), bits=np.uint8(2))
    assert listed.digest() == plain.digest()
    assert affine().with_perm(list(range(8))).digest() == affine().with_perm(np.arange(8)).digest()
    assert BcqWeight.from_bcq(BITS.tolist(), ALPHA, group_size=np.int64(8)).digest() == (
        BcqWeight.from_bcq(BITS, ALPHA, group_size=8).digest()
    )


def test_repr_is_one_line_without_reading() -> None:
    text = repr(samples.rich())
    assert "\n" not in text
    assert "affine q=2 g=16" in text
    assert "offset q=3 g=32" in text
