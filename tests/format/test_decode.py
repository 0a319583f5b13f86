"""Values, bit for bit, against the brute-force oracle (spec section 8)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import bcqfmt
from bcqfmt import BcqError, BcqWeight, UnsupportedError, UsageError
from bcqfmt.weight import decode
from weights import oracle
from weights.oracle import Plain
from weights.strategies import ENCODINGS, FLOATS, bits_of, build, examples, plain_of, tiled_weights, weights

Pair = tuple[BcqWeight, Plain]


def same(weight: BcqWeight, plain: Plain, dtype: str | None = None, planes: int | None = None) -> None:
    try:
        expected = oracle.values(plain, planes, dtype)
    except oracle.NoValue:
        with pytest.raises(UnsupportedError) as caught:
            weight.dequantize(dtype, planes=planes)
        assert caught.value.code == "BCQ-E304"
        return
    found = weight.dequantize(dtype, planes=planes)
    assert found.shape == tuple(plain.shape)
    assert bits_of(found) == expected


@pytest.mark.parametrize("encoding", ENCODINGS)
@given(data=st.data())
@examples(40)
def test_every_encoding(encoding: str, data: st.DataObject) -> None:
    weight, plain = data.draw(weights(encodings=(encoding,), max_segments=1, perm=False, outliers=False))
    same(weight, plain)


@given(weights())
def test_every_combination(pair: Pair) -> None:
    same(*pair)


@given(weights(nonfinite=True))
def test_infinities_and_nans(pair: Pair) -> None:
    same(*pair)


@given(weights(second_order=True, encodings=("affine", "float-zero", "offset"), max_rows=7))
@examples(40)
def test_second_order_scales(pair: Pair) -> None:
    same(*pair)


@given(weights(outliers=True))
@examples(40)
def test_outliers(pair: Pair) -> None:
    same(*pair)


@given(weights(stack=True, perm=True))
@examples(30)
def test_stacks_with_a_permutation_each(pair: Pair) -> None:
    same(*pair)


@given(tiled_weights())
@examples(30)
def test_tiles(pair: Pair) -> None:
    same(*pair)


@given(weights(nonfinite=None), st.sampled_from(("F16", "BF16", "F32", "F64")))
def test_another_type_is_one_rounding_of_the_same_number(pair: Pair, dtype: str) -> None:
    same(*pair, dtype=dtype)


@given(weights(encodings=("affine", "bcq", "bcq")), st.integers(1, 9))
def test_fewer_planes(pair: Pair, planes: int) -> None:
    same(*pair, planes=planes)


@given(tiled_weights(), st.integers(1, 4))
@examples(25)
def test_fewer_planes_of_tiles(pair: Pair, planes: int) -> None:
    same(*pair, planes=planes)


@given(weights(encodings=("float-zero", "offset"), max_segments=2), st.integers(1, 8))
@examples(30)
def test_fewer_planes_are_refused_where_they_have_no_value(pair: Pair, planes: int) -> None:
    same(*pair, planes=planes)


@given(weights(), st.data())
def test_ranges_are_ranges_of_the_whole(pair: Pair, data: st.DataObject) -> None:
    weight, plain = pair
    r0 = data.draw(st.integers(0, plain.out - 1))
    r1 = data.draw(st.integers(r0 + 1, plain.out))
    c0 = data.draw(st.integers(0, plain.columns - 1))
    c1 = data.draw(st.integers(c0 + 1, plain.columns))
    whole = np.array(oracle.values(plain), np.uint64).reshape(plain.shape)
    assert bits_of(weight.dequantize(rows=(r0, r1))) == whole[..., r0:r1, :].reshape(-1).tolist()
    assert bits_of(weight.dequantize(columns=(c0, c1))) == whole[..., c0:c1].reshape(-1).tolist()
    found = weight.dequantize(rows=(r0, r1), columns=(c0, c1))
    assert bits_of(found) == whole[..., r0:r1, c0:c1].reshape(-1).tolist()


@given(weights(max_rows=9), st.integers(1, 200), st.integers(1, 400))
@examples(50)
def test_blocks_do_not_show(pair: Pair, block: int, load: int) -> None:
    """Rows are loaded and evaluated in blocks; wherever the borders fall, the values are the same."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode, "_BLOCK", block)
        patch.setattr(decode, "_LOAD", load)
        same(*pair)


@given(weights(nonfinite=None))
@examples(40)
def test_a_file_made_of_the_same_words(tmp_path_factory: pytest.TempPathFactory, pair: Pair) -> None:
    """The whole way: bytes laid out by the oracle, found by the reader, decoded by the package."""
    _, plain = pair
    path = tmp_path_factory.mktemp("oracle") / "a.safetensors"
    path.write_bytes(oracle.file_bytes({"a.weight": plain}))
    report = bcqfmt.validate(path, deep=True)
    assert not report.errors
    with bcqfmt.open(path) as checkpoint:
        same(checkpoint.weight("a.weight"), plain)
        assert plain_of(checkpoint.weight("a.weight")) == plain


@given(weights(nonfinite=None))
@examples(30)
def test_codes_are_those_of_the_planes(pair: Pair) -> None:
    weight, plain = pair
    for k, segment in enumerate(plain.segments):
        found = weight.codes(k).reshape(plain.stack, plain.out, -1)
        for e in range(plain.stack):
            planes = plain.matrix(f"s{k}_planes", e)
            for r in range(plain.out):
                bits = [oracle.plane_bits(planes, r, j) for j in range(plain.widths[k])]
                assert found[e, r].tolist() == [int("".join(map(str, b)), 2) for b in bits]
        assert found.shape[-1] == plain.widths[k]
        assert int(found.max()) < 2 ** segment["bits"]


# -- alpha and z -----------------------------------------------------------------------------------------------


def check_identity(weight: BcqWeight, plain: Plain, slack: float) -> None:
    """The sum of the alphas against the affine value, within `slack` of the largest number that takes part."""
    ((alpha, z),) = weight.alpha_z()
    q, g = plain.segments[0]["bits"], plain.group_size(0)
    assert alpha.shape == (*plain.shape[:-2], q, plain.out, plain.groups(0))
    assert z.shape == (*plain.shape[:-2], plain.out, plain.groups(0))
    alpha = alpha.astype(np.float64).reshape(plain.stack, q, plain.out, -1)
    z = z.astype(np.float64).reshape(plain.stack, plain.out, -1)
    codes = weight.codes().reshape(plain.stack, plain.out, -1)
    expected = iter(oracle.exact_values(plain))
    for e, r, j in np.ndindex(plain.stack, plain.out, plain.columns):
        total = largest = float(z[e, r, j // g])
        for i in range(q):
            step = float(alpha[e, i, r, j // g])
            total = total + step if codes[e, r, j] >> (q - 1 - i) & 1 else total - step
            largest = max(abs(largest), abs(step))
        assert abs(total - next(expected)) <= slack * largest


ONE_AFFINE = {"encodings": ("affine",), "perm": False, "outliers": False, "max_segments": 1}


@given(weights(second_order=False, **ONE_AFFINE))
def test_alpha_and_z_give_the_affine_values(pair: Pair) -> None:
    """Spec 8.1: with all planes the sum of the alphas is the affine value, up to the sign of zero."""
    weight, plain = pair
    ((alpha, z),) = weight.alpha_z()
    kinds = {"F16": {"float32"}, "BF16": {"float32", "float64"}}  # BF16 may be beyond float32
    assert {alpha.dtype.name, z.dtype.name} <= kinds.get(plain.segments[0]["scale"], {"float64"})
    assert alpha.dtype == z.dtype
    check_identity(weight, plain, 0.0)


@given(weights(second_order=True, **ONE_AFFINE))
@examples(40)
def test_alpha_and_z_of_second_order_are_close(pair: Pair) -> None:
    """A second-order scale may have all 53 bits: sums of its multiples round."""
    assert all(numbers.dtype == np.float64 for numbers in pair[0].alpha_z()[0])
    check_identity(*pair, 2.0**-48)


@given(weights(encodings=("affine", "bcq"), perm=None, styles=("plain", "any")), st.integers(1, 8))
def test_alpha_and_z_are_the_numbers_of_section_8_1(pair: Pair, planes: int) -> None:
    weight, plain = pair
    for k, (alpha, z) in enumerate(weight.alpha_z(planes)):
        p = min(planes, plain.segments[k]["bits"])
        for e in range(plain.stack):
            matrix = oracle._Matrix(plain, e, planes)
            a64 = alpha.astype(np.float64).reshape(plain.stack, p, plain.out, -1)[e]
            z64 = z.astype(np.float64).reshape(plain.stack, plain.out, -1)[e]
            for r in range(plain.out):
                for a in range(plain.groups(k)):
                    want_alpha, want_z = numbers_of(matrix, k, r, a, p)
                    assert a64[:, r, a].tolist() == want_alpha
                    assert z64[r, a] == want_z


def numbers_of(matrix: Any, k: int, r: int, a: int, p: int) -> tuple[list[float], float]:
    segment = matrix.plain.segments[k]
    q = segment["bits"]
    if segment["encoding"] == "affine":
        s, zp = matrix._number("scale", k, r, a), matrix._zero_point(k, r, a)
        return [s * 2.0 ** (q - 2 - i) for i in range(p)], s * (((2**q - 1) - 2 * zp) / 2)
    suffix = f"_p{p}" if p in segment.get("precisions", []) else ""
    alphas = [oracle.number(matrix.parts[f"s{k}_alpha{suffix}"][i][r][a], segment["alpha"]) for i in range(p)]
    bias = oracle.number(matrix.parts[f"s{k}_bias{suffix}"][r][a], segment["bias"]) if "bias" in segment else 0.0
    return alphas, bias


def test_alpha_of_the_largest_bfloat16_scale_is_finite() -> None:
    """3.39e38 * 2^6 is beyond binary32: float32 is not exact there, so the numbers have to come in float64."""
    scale = np.array([[3.3895313892515355e38]], ml_dtypes.bfloat16)
    weight = BcqWeight.from_affine(np.full((1, 8), 200), scale, 128, group_size=8, bits=8)
    ((alpha, z),) = weight.alpha_z()
    s = float(scale[0, 0])
    assert alpha[:, 0, 0].astype(np.float64).tolist() == [s * 2.0 ** (6 - i) for i in range(8)]
    assert float(z[0, 0]) == s * (255 - 256) / 2


@pytest.mark.parametrize("encoding", ["float-zero", "offset"])
def test_alpha_and_z_are_refused_where_there_are_none(encoding: str) -> None:
    make = BcqWeight.from_float_zero if encoding == "float-zero" else BcqWeight.from_offset
    weight = make(np.zeros((1, 8), int), np.ones((1, 1), np.float16), np.ones((1, 1), np.float16), group_size=8, bits=2)
    with pytest.raises(UnsupportedError) as caught:
        weight.alpha_z()
    assert caught.value.code == "BCQ-E304"


# -- arguments -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        ("float16", "float16"),
        ("F16", "float16"),
        (np.float16, "float16"),
        (np.dtype("f2"), "float16"),
        ("bfloat16", "bfloat16"),
        (ml_dtypes.bfloat16, "bfloat16"),
        ("float32", "float32"),
        ("F32", "float32"),
        ("float64", "float64"),
        (np.float64, "float64"),
        ("F64", "float64"),
    ],
)
def test_names_of_types(asked: Any, name: str) -> None:
    weight = BcqWeight.from_affine(np.arange(8).reshape(1, 8), np.ones((1, 1), np.float16), 3, group_size=8)
    found = weight.dequantize(asked)
    assert found.dtype.name == name
    assert found.astype(np.float64).tolist() == [[-3, -2, -1, 0, 1, 2, 3, 4]]


@pytest.mark.parametrize(
    "arguments",
    [
        {"dtype": "int8"},
        {"dtype": "complex64"},
        {"dtype": object()},
        {"rows": (0, 0)},
        {"rows": (1, 0)},
        {"rows": (-1, 1)},
        {"rows": (0, 3)},
        {"columns": (0, 9)},
        {"columns": (8, 8)},
        {"columns": (-8, -1)},
        {"planes": 0},
        {"planes": -1},
        {"planes": "2"},
        {"planes": 1.5},
        {"rows": 2},
        {"rows": ("0", 1)},
        {"rows": (0, 1, 2)},
        {"columns": (0.0, 8)},
    ],
)
def test_arguments_out_of_range(arguments: dict[str, Any]) -> None:
    weight = BcqWeight.from_affine(np.ones((2, 8), int), np.ones((2, 1), np.float16), 1, group_size=8, bits=2)
    with pytest.raises(UsageError) as caught:
        weight.dequantize(**arguments)
    assert caught.value.code == "BCQ-E302"
    assert caught.value.hint
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("call", ["codes(1)", "codes('0')", "planes('1')", "alpha_z('1')", "alpha_z(0)", "rows(0, 9)"])
def test_arguments_of_other_methods_out_of_range(call: str) -> None:
    weight = BcqWeight.from_affine(np.ones((2, 8), int), np.ones((2, 1), np.float16), 1, group_size=8, bits=2)
    with pytest.raises(UsageError) as caught:
        eval(f"weight.{call}", {"weight": weight})
    assert caught.value.hint


# -- what a reader must not deliver ----------------------------------------------------------------------------


def with_outliers(indptr: list[int], indices: list[int], perm: list[int] | None = None) -> Plain:
    """A weight [3, 16] whose outlier parts are given, legal or not."""
    segment = {"encoding": "affine", "bits": 1, "group_size": 8, "scale": "F16", "zero": 0}
    scheme: dict[str, Any] = {"segments": [segment], "outliers": {"mode": "add", "dtype": "F16", "segments": [0]}}
    parts: dict[str, oracle.Raw] = {
        "s0_planes": ("I32", [1, 3, 1], [0xFFFF, 0, 0xFFFF]),
        "s0_scale": ("F16", [3, 2], [0x3C00] * 6),
        "outlier_indptr": ("I32", [4], [x & 0xFFFFFFFF for x in indptr]),
        "outlier_indices": ("U16", [len(indices)], indices),
        "outlier_values": ("F16", [len(indices)], [0x3C00] * len(indices)),
    }
    if perm is not None:
        scheme["perm"] = True
        parts["perm"] = ("I32", [16], [x & 0xFFFFFFFF for x in perm])
    return Plain([3, 16], "F16", scheme, [16], parts)


IDENTITY = list(range(16))
MALFORMED = {
    "falling": (with_outliers([0, 3, 1, 3], [1, 2, 3]), "BCQ-V407"),
    "negative": (with_outliers([0, -5, 1, 3], [1, 2, 3]), "BCQ-V407"),
    "beyond": (with_outliers([0, 1, 2, 900], [1, 2, 3]), "BCQ-V407"),
    "huge": (with_outliers([0, 2**31 - 1, 2**31 - 1, 3], [1, 2, 3]), "BCQ-V407"),
    "column beyond": (with_outliers([0, 1, 2, 3], [1, 16, 3]), "BCQ-V408"),
    "column twice": (with_outliers([0, 2, 2, 2], [4, 4]), "BCQ-V408"),
    "columns falling": (with_outliers([0, 2, 2, 2], [5, 4]), "BCQ-V408"),
    "perm twice": (with_outliers([0, 0, 0, 0], [], [0, 0, *IDENTITY[2:]]), "BCQ-V406"),
    "perm beyond": (with_outliers([0, 0, 0, 0], [], [*IDENTITY[:15], 16]), "BCQ-V406"),
    "perm negative": (with_outliers([0, 0, 0, 0], [], [-1, *IDENTITY[1:]]), "BCQ-V406"),
    "perm huge": (with_outliers([0, 0, 0, 0], [], [2**31 - 1, *IDENTITY[1:]]), "BCQ-V406"),
}


@pytest.mark.parametrize("case", MALFORMED)
@pytest.mark.parametrize("source", ["memory", "file"])
def test_positions_that_break_a_rule_give_no_value(tmp_path: Path, case: str, source: str) -> None:
    """Such numbers become memory accesses, or make the value depend on the reader: refused, and named."""
    plain, code = MALFORMED[case]
    path = tmp_path / "a.safetensors"
    path.write_bytes(oracle.file_bytes({"a.weight": plain}))
    assert {f.code for f in bcqfmt.validate(path, deep=True).errors} == {code}
    weight = build(plain) if source == "memory" else bcqfmt.open(path).weight("a.weight")
    with pytest.raises(BcqError) as caught:
        weight.check()
    assert caught.value.code == code
    with pytest.raises(BcqError) as caught:
        weight.dequantize()
    assert caught.value.code == code


@pytest.mark.parametrize("case", MALFORMED)
@pytest.mark.parametrize("source", ["memory", "file"])
@pytest.mark.parametrize("cut", ["rows", "columns"])
def test_slices_of_such_weights_are_refused_too(tmp_path: Path, case: str, source: str, cut: str) -> None:
    plain, code = MALFORMED[case]
    path = tmp_path / "a.safetensors"
    path.write_bytes(oracle.file_bytes({"a.weight": plain}))
    weight = build(plain) if source == "memory" else bcqfmt.open(path).weight("a.weight")
    with pytest.raises(BcqError) as caught:
        (weight.rows(0, 3) if cut == "rows" else weight.columns(0, 16)).dequantize()
    assert caught.value.code == code


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_sign_of_zero(dtype: str) -> None:
    """Spec 8.2: s = 0 and s < 0."""
    scale = np.array([[0.0], [-0.0], [-1.0], [1.0]], np.float16)
    codes = np.tile(np.array([0, 1, 2, 3, 2, 2, 2, 2]), (4, 1))
    found = BcqWeight.from_affine(codes, scale, 2, group_size=8, bits=2).dequantize(dtype).astype(np.float64)
    minus = np.signbit(found).tolist()
    assert minus[0] == [True, True, False, False, False, False, False, False]
    assert minus[1] == [False, False, True, True, True, True, True, True]
    assert minus[2] == [False, False, True, True, True, True, True, True]
    assert minus[3] == [True, True, False, False, False, False, False, False]
