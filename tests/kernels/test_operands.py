"""Operands: what kernels read is what the weight says, and nothing that would lead them astray gets through."""

from __future__ import annotations

from typing import Any

import hypothesis
import ml_dtypes
import numpy as np
import pytest
import torch

from bcqfmt import BcqWeight, StoredTensor
from bcqfmt.errors import BcqError
from bcqfmt.kernels.bits.layout import layout_of
from bcqfmt.kernels.operands import Operand, operand
from bcqfmt.kernels.operands.device import in_tiles
from products import kernel_samples as ks
from products.lut_gemm_arrays import LutGemm, from_lut_gemm, to_lut_gemm
from weights import oracle, strategies

examples = hypothesis.settings(strategies.examples(80), deadline=None)


def linear(found: Operand) -> Any:
    """E of the linear reading, one element at a time in float64."""
    dense = np.zeros(found.shape)
    for segment in found.segments:
        for j in range(segment.width):
            group = j // segment.group_size
            value = segment.z[:, group].astype(np.float64)
            for i in range(segment.bits):
                bit = segment.planes[i, :, j // 32] >> np.uint32(j % 32) & 1
                value += np.where(bit == 1, 1.0, -1.0) * segment.alpha[i, :, group].astype(np.float64)
            stored = segment.start + j
            dense[:, stored if found.perm is None else found.perm[stored]] = value
    if found.outliers is not None:
        for row in range(found.rows):
            for entry in range(found.outliers.indptr[row], found.outliers.indptr[row + 1]):
                dense[row, found.outliers.indices[entry]] += found.outliers.added[entry]
    return dense


@examples
@hypothesis.given(strategies.weights(encodings=("affine", "bcq"), stack=False, second_order=False, styles=("plain",)))
def test_the_linear_reading(pair: tuple[BcqWeight, oracle.Plain]) -> None:
    weight, plain = pair
    found = operand(weight)
    exact = np.array(oracle.exact_values(plain)).reshape(weight.shape)
    assert np.allclose(linear(found), exact, rtol=0, atol=1e-4)  # numbers up to 512, rounded to float32 once
    if weight.scheme.outliers is None and all(
        s.encoding == "bcq" or s.scale in ("F16", "BF16") for s in weight.scheme.segments
    ):
        assert np.allclose(linear(found), exact, rtol=1e-14, atol=1e-14)


@examples
@hypothesis.given(strategies.weights(stack=False, nonfinite=None))
def test_the_exact_reading_holds_the_stored_numbers(pair: tuple[BcqWeight, oracle.Plain]) -> None:
    """Decoding from nothing but the operand gives every bit of the decoder's E."""
    weight, plain = pair
    found = operand(weight)
    dense = np.zeros(found.shape)
    with np.errstate(all="ignore"):
        for segment in found.segments:
            group = np.arange(segment.width) // segment.group_size
            column = np.arange(segment.width)
            bits = segment.planes[:, :, column // 32] >> (column % 32).astype(np.uint32) & np.uint32(1)
            first, second = segment.first.astype(np.float64), segment.second.astype(np.float64)
            second = second if segment.formula == "table" else second[:, group]
            if segment.formula == "bcq":
                value = second
                for i in range(segment.bits):
                    value = value + np.where(bits[i] == 1, first[i][:, group], -first[i][:, group])
            else:
                code = sum(bits[i].astype(np.float64) * 2.0 ** (segment.bits - 1 - i) for i in range(segment.bits))
                scale = first[:, group]
                if segment.formula == "table":
                    value = scale * second[code.astype(int)]
                elif segment.formula == "offset":
                    value = scale * code + second
                else:
                    value = code - second
                    if segment.formula == "float-zero":
                        value = _through(value, weight.dtype)
                    value = scale * value
            dense[:, segment.start + column] = value
        original = dense[:, found.stored]
        if found.outliers is not None:
            rows = np.repeat(np.arange(found.rows), np.diff(found.outliers.indptr))
            at = (rows, found.outliers.indices)
            values = found.outliers.values.astype(np.float64)
            original[at] = values if found.outliers.mode == "replace" else original[at] + values
    expected = [oracle.bits64(x) for x in oracle.exact_values(plain)]
    assert [oracle.bits64(x) for x in original.reshape(-1)] == expected


def _through(values: Any, dtype: str) -> Any:
    flat = [oracle.number(oracle.rounded(x, dtype), dtype) for x in values.reshape(-1)]
    return np.array(flat).reshape(values.shape)


@pytest.mark.parametrize("planes", [1, 2, 3, 4])
@pytest.mark.parametrize("encoding", ["affine", "bcq", "second-order"])
def test_the_first_planes(encoding: str, planes: int) -> None:
    weight = ks.weight(encoding, 4, 5, 72, 24, perm=True, outliers="add")
    found = operand(weight, planes=planes)
    assert [s.bits for s in found.segments] == [planes]
    assert np.allclose(linear(found), weight.dequantize("float64", planes=planes), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("encoding", ["float-zero", "offset"])
def test_fewer_planes_are_refused_where_they_mean_nothing(encoding: str) -> None:
    with pytest.raises(BcqError, match="BCQ-E304"):
        operand(ks.weight(encoding, 4, 2, 64, 32), planes=2)


def test_scale_sets_are_used() -> None:
    rng = np.random.default_rng(0)
    alpha = rng.normal(size=(3, 4, 2)).astype(np.float16)
    own = (rng.normal(size=(2, 4, 2)).astype(np.float16), None)
    weight = BcqWeight.from_bcq(rng.integers(0, 2, (3, 4, 64)), alpha, group_size=32, scale_sets={2: own})
    assert np.array_equal(operand(weight, planes=2).segments[0].alpha, own[0])
    assert np.array_equal(operand(weight, planes=1).segments[0].alpha, alpha[:1])
    assert np.array_equal(operand(weight).segments[0].alpha, alpha)


@pytest.mark.parametrize(
    ("numbers", "encoding", "size", "narrow"),
    [
        ("F16", "bcq", 1, "F16"),
        ("BF16", "bcq", 1, "F16"),  # eight bits of precision and no large exponent fit in
        ("BF16", "bcq", 2.0**40, "BF16"),
        ("F32", "bcq", 1, "F32"),
        ("F16", "affine", 1, "F16"),
    ],
)
def test_the_narrowest_type_that_holds_the_scales(numbers: str, encoding: str, size: float, narrow: str) -> None:
    weight = ks.weight(encoding, 3, 9, 320, 32, numbers=numbers)
    if size != 1:
        weight = _spoiled(weight, "s0_alpha", lambda a: np.multiply(a, a.dtype.type(size), out=a))
    layout = layout_of(operand(weight).segments[0])
    assert layout is not None
    assert layout.number == narrow


def test_numbers_beyond_float32_are_refused_by_products_only() -> None:
    huge = np.full((2, 2), 3e38, np.float32)
    weight = BcqWeight.from_affine(np.full((2, 64), 255), huge, 0, group_size=32, bits=8)
    found = operand(weight)
    assert found.segments[0].first.dtype == np.float32
    with pytest.raises(BcqError, match="BCQ-E553"):
        _ = found.segments[0].alpha


def test_a_replaced_element_ends_up_replaced() -> None:
    for encoding in ks.ENCODINGS:
        weight = ks.weight(encoding, 3, 6, 64, 32, perm=True, outliers="replace", share=0.2)
        assert np.allclose(linear(operand(weight)), weight.dequantize("float64"), rtol=1e-5, atol=1e-5)


def test_stacks_need_an_index_and_others_take_none() -> None:
    rng = np.random.default_rng(0)
    stack = BcqWeight.from_affine(
        rng.integers(0, 4, (2, 3, 16)), np.ones((2, 3, 2), np.float16), 1, group_size=8, bits=2
    )
    for e in (0, 1):
        assert np.array_equal(linear(operand(stack, index=e)), stack.dequantize("float64")[e])
    for weight, index in ((stack, None), (stack, 2), (stack, -1), (ks.weight("affine", 2, 3, 16, 8), 0)):
        with pytest.raises(BcqError, match="BCQ-E552"):
            operand(weight, index=index)


def _spoiled(weight: BcqWeight, suffix: str, change: Any) -> BcqWeight:
    parts = weight.parts()
    array = parts[suffix].array().copy()
    change(array)
    parts[suffix] = StoredTensor.from_array(suffix, array, parts[suffix].dtype)
    return BcqWeight("w", weight.spec, parts)


@pytest.mark.parametrize(
    ("suffix", "change", "code"),
    [
        ("perm", lambda a: a.__setitem__(0, 64), "BCQ-V406"),
        ("perm", lambda a: a.__setitem__(0, -1), "BCQ-V406"),
        ("perm", lambda a: a.__setitem__(0, a[1]), "BCQ-V406"),
        ("outlier_indptr", lambda a: a.__setitem__(1, 2**31 - 1), "BCQ-V407"),
        ("outlier_indptr", lambda a: a.__setitem__(0, -5), "BCQ-V407"),
        ("outlier_indices", lambda a: a.__setitem__(-1, 64), "BCQ-V408"),
        ("outlier_indices", lambda a: a.__setitem__(0, 65535), "BCQ-V408"),
        ("s0_zero", lambda a: a.__setitem__((0, 0), -1), "BCQ-V4"),
        ("s0_scale", lambda a: a.__setitem__((0, 0), np.inf), "BCQ-V405"),
    ],
)
def test_hostile_content_never_becomes_an_operand(suffix: str, change: Any, code: str) -> None:
    weight = ks.weight("affine", 3, 4, 64, 32, perm=True, outliers="add", share=0.2)
    with pytest.raises(BcqError, match=code):
        operand(_spoiled(weight, suffix, change))


# -- the published kernel's arrays ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("columns", "g"), [(96, 32), (100, 33), (130, 12), (520, 320), (70, 70), (45, 9)])
def test_every_group_begins_at_a_byte_for_look_ups(columns: int, g: int) -> None:
    (segment,) = operand(ks.weight("bcq", 2, 37, columns, g)).segments
    tiles = in_tiles(torch.from_numpy(segment.planes.view(np.int32).copy()), columns, g).numpy()
    words = tiles.transpose(1, 2, 0, 3).reshape(2, 37, -1, 8)
    order = np.arange(8) ^ np.arange(37)[:, None] // 4 % 8
    words = np.take_along_axis(words, order[None, :, None], 3).reshape(2, 37, -1)
    bits = np.unpackbits(words.view(np.uint8), axis=2, bitorder="little")
    stored = np.unpackbits(segment.planes.view(np.uint8), axis=2, bitorder="little")
    for j in range(columns):
        assert np.array_equal(bits[:, :, j // g * -(-g // 8) * 8 + j % g], stored[:, :, j]), j


@pytest.mark.parametrize("q", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("bias", [True, False])
def test_lut_gemm_there_and_back(q: int, bias: bool) -> None:
    weight = ks.weight("bcq", q, 6, 96, 32, seed=0 if bias else 1)
    arrays = to_lut_gemm(weight)
    assert arrays.words.shape == (3, q, 6)
    assert (arrays.bias is not None) == bias
    assert from_lut_gemm(arrays).digest() == weight.digest()
    dense = weight.dequantize("float64")
    for column in (0, 31, 32, 95):  # by the definition of that layout
        group = column // 32
        value = np.zeros(6) if arrays.bias is None else arrays.bias[group].astype(np.float64)
        for i in range(q):
            sign = 2.0 * (arrays.words[column // 32, i] >> np.uint32(column % 32) & 1) - 1
            value = value + sign * arrays.alpha[group, i].astype(np.float64)
        assert np.array_equal(value, dense[:, column])


def test_lut_gemm_arrays_come_back_as_they_were() -> None:
    rng = np.random.default_rng(0)
    arrays = LutGemm(
        rng.integers(0, 2**32, (4, 3, 5), dtype=np.uint32),
        rng.normal(size=(2, 3, 5)).astype(np.float16),
        rng.normal(size=(2, 5)).astype(np.float16),
    )
    back = to_lut_gemm(from_lut_gemm(arrays))
    for a, b in zip(arrays, back, strict=True):
        assert a is not None
        assert b is not None
        assert (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())


@pytest.mark.parametrize(
    ("weight", "reason"),
    [
        (ks.weight("affine", 2, 3, 64, 32), "encoding affine"),
        (ks.weight("bcq", 2, 3, 64, 32, numbers="BF16"), "other than F16"),
        (ks.weight("bcq", 2, 3, 72, 24), "72 columns"),
        (ks.weight("bcq", 2, 3, 96, 64), "groups of 64"),
        (ks.weight("bcq", 2, 3, 64, 32, perm=True), "reordering"),
        (ks.weight("bcq", 2, 8, 64, 32, outliers="add"), "outliers"),
        (ks.mixed(3, 48, 32, outliers=""), "more than one segment"),
    ],
)
def test_lut_gemm_refuses_what_it_has_no_place_for(weight: BcqWeight, reason: str) -> None:
    with pytest.raises(BcqError, match=f"BCQ-E553.*{reason}"):
        to_lut_gemm(weight)


def test_lut_gemm_arrays_that_do_not_fit_are_refused() -> None:
    good = to_lut_gemm(ks.weight("bcq", 2, 3, 64, 32))
    assert good.bias is not None
    bad = [
        good._replace(words=good.words.astype(np.int64)),
        good._replace(words=good.words[0]),
        good._replace(alpha=good.alpha.astype(np.float32)),
        good._replace(alpha=good.alpha[:, :1]),
        good._replace(alpha=np.zeros((3, 2, 3), np.float16)),
        good._replace(bias=good.bias[:1]),
        good._replace(words=good.words[:0]),
    ]
    for arrays in bad:
        with pytest.raises(BcqError, match="BCQ-E552"):
            from_lut_gemm(arrays)


def test_bfloat16_alphas_are_exact_in_float32() -> None:
    weight = ks.weight("bcq", 2, 3, 64, 32, numbers="BF16")
    stored = weight.parts()["s0_alpha"].array()
    assert stored.dtype == ml_dtypes.bfloat16
    assert np.array_equal(operand(weight).segments[0].alpha, stored.astype(np.float32))
