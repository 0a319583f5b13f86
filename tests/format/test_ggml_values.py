"""The block types of ggml as weights of the format: its own float32 arithmetic, operation by operation, is the oracle.

ggml widens F16 to float32 and works in float32 in the order written here, without fusing (fused or not, its results
are the same, because at most one of its operations rounds). numpy's float32 does exactly that. Nothing of the package
is used on that side.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest

from bcqfmt import BcqWeight, Coded

Array = np.ndarray[Any, Any]
K = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113]
F = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12]
FINITE = np.arange(1 << 16, dtype=np.uint16)[np.arange(1 << 16) & 0x7C00 != 0x7C00].view(np.float16)


class Blocks(NamedTuple):
    """Numbers of blocks: d and m (rows, blocks) F16; sc, mn (rows, blocks * h); q (rows, blocks * h * g)."""

    d: Array
    m: Array
    sc: Array
    mn: Array
    q: Array
    g: int
    h: int


class Type(NamedTuple):
    """Bits of a code, columns of a group, groups of a block, bits of a scale code, bits a weight in GGUF."""

    bits: int
    g: int
    h: int
    scale_bits: int
    size: float
    weight: Callable[[Blocks], BcqWeight]
    values: Callable[[Blocks], Array]


def drawn(kind: Type, d: Array, g: int, h: int) -> Blocks:
    """Random codes for these scales; m has the same numbers in another order."""
    rng = np.random.default_rng(d.size)
    rows, blocks = d.shape
    m = rng.permutation(d.reshape(-1)).reshape(d.shape)
    sc, mn = rng.integers(0, 2**kind.scale_bits, (2, rows, blocks * h))
    return Blocks(d, m, sc, mn, rng.integers(0, 2**kind.bits, (rows, blocks * h * g)), g, h)


def per_column(numbers: Array, times: int) -> Array:
    """Numbers of groups or blocks as float32, one for every column."""
    return np.repeat(numbers.astype(np.float32), times, axis=1)


# -- affine ----------------------------------------------------------------------------------------------------


def affine(zero: int, bits: int) -> tuple[Any, Any]:
    """d * (q - zero), the difference an integer."""
    return (
        lambda b: BcqWeight.from_affine(b.q, b.d, zero, bits=bits, group_size=b.g, dtype="F32"),
        lambda b: per_column(b.d, b.g) * (b.q - zero).astype(np.float32),
    )


def affine_coded(zero: int, bits: int, scale_zero: int, scale_bits: int) -> tuple[Any, Any]:
    """(d * (sc - scale_zero)) * (q - zero)."""
    return (
        lambda b: BcqWeight.from_affine(
            b.q, Coded(b.sc, b.d, scale_zero, scale_bits, groups=b.h), zero, bits=bits, group_size=b.g, dtype="F32"
        ),
        lambda b: per_column(coded(b, b.d, b.sc - scale_zero), b.g) * (b.q - zero).astype(np.float32),
    )


def coded(b: Blocks, d: Array, codes: Array) -> Array:
    return per_column(d, b.h) * codes.astype(np.float32)


# -- with a min ------------------------------------------------------------------------------------------------


def with_min(bits: int) -> tuple[Any, Any]:
    """d * q + m."""
    return (
        lambda b: BcqWeight.from_offset(b.q, b.d, b.m, bits=bits, group_size=b.g, dtype="F32"),
        lambda b: per_column(b.d, b.g) * b.q.astype(np.float32) + per_column(b.m, b.g),
    )


def with_coded_min(bits: int, scale_bits: int) -> tuple[Any, Any]:
    """(d * sc) * q - dmin * mn; the offset is made of -dmin, the sign bit flipped."""
    return (
        lambda b: BcqWeight.from_offset(
            b.q, Coded(b.sc, b.d, 0, scale_bits, groups=b.h), Coded(b.mn, -b.m, 0, scale_bits, groups=b.h),
            bits=bits, group_size=b.g, dtype="F32",
        ),
        lambda b: per_column(coded(b, b.d, b.sc), b.g) * b.q.astype(np.float32)
        - per_column(coded(b, b.m, b.mn), b.g),
    )  # fmt: skip


# -- tables ----------------------------------------------------------------------------------------------------


def table(levels: list[int]) -> tuple[Any, Any]:
    """d * table[q]."""
    return (
        lambda b: BcqWeight.from_table(b.q, b.d, levels, group_size=b.g, dtype="F32"),
        lambda b: per_column(b.d, b.g) * np.array(levels, np.float32)[b.q],
    )


def table_coded(levels: list[int], scale_zero: int, scale_bits: int) -> tuple[Any, Any]:
    """(d * (ls - scale_zero)) * table[q]."""
    return (
        lambda b: BcqWeight.from_table(
            b.q, Coded(b.sc, b.d, scale_zero, scale_bits, groups=b.h), levels, group_size=b.g, dtype="F32"
        ),
        lambda b: per_column(coded(b, b.d, b.sc - scale_zero), b.g) * np.array(levels, np.float32)[b.q],
    )


def half_of_e8m0(e: Array) -> Array:
    """ggml's bits of 2^(e-128) as a float32: subnormal for 0 and 1."""
    bits = np.where(e < 2, np.uint32(0x00200000) << np.minimum(e, 1), (e.astype(np.uint32) - 1) << 23)
    return bits.astype(np.uint32).view(np.float32)


def half_of_ue4m3(byte: Array) -> Array:
    """ggml's number of a byte of NVFP4, halved; 7F is left out here: it has no UE4M3 number."""
    exponent, digits = byte >> 3 & 15, (byte & 7).astype(np.float32)
    normal = np.ldexp(np.float32(1) + digits / np.float32(8), exponent.astype(np.int32) - 7)
    return np.where(exponent == 0, np.ldexp(digits, -9), normal).astype(np.float32) * np.float32(0.5)


def table_of_bytes(kind: Any, top: int, widened: Any) -> tuple[Any, Any]:
    """A byte times table[q], the byte's number halved because the table is twice E2M1."""

    def scales(b: Blocks) -> Array:
        return (b.sc % (top + 1)).astype(np.uint8)

    return (
        lambda b: BcqWeight.from_table(b.q, scales(b).view(kind), F, exponent=-1, group_size=b.g, dtype="F32"),
        lambda b: per_column(widened(scales(b)), b.g) * np.array(F, np.float32)[b.q],
    )


def one_bit() -> tuple[Any, Any]:
    """bit ? d : -d; a bias of -0 keeps the sign where d is a zero."""

    def weight(b: Blocks) -> BcqWeight:
        bias = np.full(b.d.shape, -0.0, np.float16)
        return BcqWeight.from_bcq(b.q[None], b.d[None], bias, group_size=b.g, dtype="F32")

    return weight, lambda b: np.where(b.q == 1, per_column(b.d, b.g), -per_column(b.d, b.g))


TYPES = {
    "Q4_0": Type(4, 32, 1, 1, 4.5, *affine(8, 4)),
    "Q5_0": Type(5, 32, 1, 1, 5.5, *affine(16, 5)),
    "Q8_0": Type(8, 32, 1, 1, 8.5, *affine(128, 8)),
    "Q4_1": Type(4, 32, 1, 1, 5.0, *with_min(4)),
    "Q5_1": Type(5, 32, 1, 1, 6.0, *with_min(5)),
    "Q2_K": Type(2, 16, 16, 4, 2.625, *with_coded_min(2, 4)),
    "Q3_K": Type(3, 16, 16, 6, 3.4375, *affine_coded(4, 3, 32, 6)),
    "Q4_K": Type(4, 32, 8, 6, 4.5, *with_coded_min(4, 6)),
    "Q5_K": Type(5, 32, 8, 6, 5.5, *with_coded_min(5, 6)),
    "Q6_K": Type(6, 16, 16, 8, 6.5625, *affine_coded(32, 6, 128, 8)),
    "TQ1_0": Type(2, 256, 1, 1, 2.0625, *affine(1, 2)),  # as two planes; GGUF has 1.6875
    "TQ2_0": Type(2, 256, 1, 1, 2.0625, *affine(1, 2)),
    "Q1_0": Type(1, 128, 1, 1, 1.25, *one_bit()),  # GGUF has 1.125, and BCQ without a bias
    "Q2_0": Type(2, 64, 1, 1, 2.25, *affine(1, 2)),
    "IQ4_NL": Type(4, 32, 1, 1, 4.5, *table(K)),
    "IQ4_XS": Type(4, 32, 8, 6, 4.25, *table_coded(K, 32, 6)),
    "MXFP4": Type(4, 32, 1, 8, 4.25, *table_of_bytes(ml_dtypes.float8_e8m0fnu, 255, half_of_e8m0)),
    "NVFP4": Type(4, 16, 1, 7, 4.5, *table_of_bytes(ml_dtypes.float8_e4m3fn, 0x7E, half_of_ue4m3)),
}


def check(kind: Type, blocks: Blocks) -> BcqWeight:
    weight = kind.weight(blocks)
    with np.errstate(all="ignore"):
        expected = kind.values(blocks)
    assert expected.dtype == np.float32
    differ = weight.dequantize("float32").view(np.uint32) != expected.view(np.uint32)
    assert not differ.any(), f"{np.count_nonzero(differ)} values, the first at {np.argwhere(differ)[0]}"
    return weight


@pytest.mark.parametrize("name", TYPES)
def test_every_scale_gives_the_bits_of_ggml(name: str) -> None:
    """Every finite F16 number as d (and, shuffled, as m or dmin), in short groups."""
    kind = TYPES[name]
    check(kind, drawn(kind, FINITE[:, None], 8, min(kind.h, 2)))


@pytest.mark.parametrize("name", TYPES)
def test_blocks_of_the_real_size(name: str) -> None:
    """Two blocks and more in a row: neighbours share what a block shares; as many bits as in GGUF."""
    kind = TYPES[name]
    rows, blocks = 24, 1024 // (kind.g * kind.h)
    d = np.random.default_rng(1).choice(FINITE, (rows, blocks))
    weight = check(kind, drawn(kind, d, kind.g, kind.h))
    assert weight.bits_per_weight == kind.size
    assert bool({"super-groups"} & set(features(weight))) == (kind.h > 1)


def features(weight: BcqWeight) -> list[str]:
    from bcqfmt.weight.scheme import features_of

    return features_of([weight.spec])


def test_a_min_of_zero_keeps_the_sign_that_ggml_gives_it() -> None:
    """0 - 0, 0 - -0, -0 - 0 and -0 - -0: the offset is a product with the sign of dmin flipped."""
    zeros = np.array([0.0, -0.0], np.float16)
    for d in zeros:
        for m in zeros:
            one = Blocks(
                np.full((1, 1), d), np.full((1, 1), m), np.ones((1, 1), int), np.ones((1, 1), int),
                np.arange(8)[None] % 4, 8, 1,
            )  # fmt: skip
            check(TYPES["Q2_K"], one)


def test_nvfp4_with_a_number_for_the_whole_weight() -> None:
    """Two levels: a byte for every 16 columns, one float32 for each matrix, multiplied exactly and rounded once."""
    rng = np.random.default_rng(2)
    codes, scales = rng.integers(0, 16, (3, 10, 64)), rng.integers(0, 0x7F, (3, 10, 4)).astype(np.uint8)
    whole = rng.normal(size=(3, 1, 1)).astype(np.float32)
    made = Coded(scales.view(ml_dtypes.float8_e4m3fn), whole, rows=2**31 - 1, groups=2**31 - 1)
    weight = BcqWeight.from_table(codes, made, F, exponent=-1, group_size=16)
    exact = np.repeat(half_of_ue4m3(scales).astype(np.float64) * whole, 16, axis=2) * np.array(F)[codes]
    assert np.array_equal(weight.dequantize(), exact.astype(np.float32))
    assert weight.bits_per_weight == 4.5 + 32 * 3 / codes.size
    cut = weight.rows(3, 7).columns(16, 48)  # one number for all stays one number for all
    assert np.array_equal(cut.dequantize(), weight.dequantize()[:, 3:7, 16:48])
    assert cut.parts()["s0_scale_scale"].shape == (3, 1, 1)


def test_nf4_fits_a_table() -> None:
    """The 16 float32 numbers of bitsandbytes' NF4 as integers times 2^-27: not rounded."""
    nf4 = np.array(
        [
            -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
            -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
            0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
        ],
        np.float32,
    )  # fmt: skip
    levels = nf4.astype(np.float64) * 2.0**27
    assert (levels == np.round(levels)).all()
    codes = np.random.default_rng(3).integers(0, 16, (4, 64))
    absmax = np.array([[0.5], [3.7], [1e-30], [7e10]], np.float32)
    weight = BcqWeight.from_table(codes, absmax, [int(v) for v in levels], exponent=-27, group_size=64)
    assert np.array_equal(weight.dequantize(), absmax * nf4[codes])
