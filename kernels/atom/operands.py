"""A weight in Atom's form, laid out so that every lane of a warp loads its tensor-core fragments with 16-byte loads.

The layout is a pure permutation of the codes. Rows come in units of 32, a unit in
two tiles of 16; lane ``4 r + q`` of a warp holds rows ``4 r + 2 t + p`` (p = 0, 1) of tile t, so that after the product
a lane owns four neighbouring outputs. Of the 128 columns of a group it holds ``64 h + 16 q + 8 j + 4 s + b``
(h, j, s = 0, 1; b = 0..3)::

    words  uint32 [out/16, G + 1, 256]     G - 1 int4 groups of 256 words, then the int8 group with 512
    int4 group   [h][lane][j][p]           byte b of a word: columns s = 0 (low half) and s = 1 (high half)
    int8 group   [h][j][lane][s][p]        byte b of a word: column b
    scale  float32 [G, rows]               int4 groups: the weight's scale / 16, because their codes reach the tensor
                                           cores as the upper half of a byte; rows: out rounded up to 32, zeros there

Activations: codes uint32 ``[tiles of 8 tokens, G, 256]``, bytes ``[h][token][64 columns]``; scale float32
``[G, 8 * tiles]``; absent tokens are zeros.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bcqfmt.container.dtypes import FLOATS, float64_of
from bcqfmt.errors import error
from bcqfmt.weight.scheme import Segment
from bcqfmt.weight.weight import BcqWeight

GROUP = 128  # columns that share a scale
OUTLIERS = 128  # channels in int8: the last group
RULES = ("absmax", "paper")
NORM_THREADS = 256  # the order of the sum of squares depends on it
UNIT = 32  # rows that a warp takes together
TOKENS = 8  # tokens of a tensor-core tile

I8 = npt.NDArray[np.int8]
F32 = npt.NDArray[np.float32]
U32 = npt.NDArray[np.uint32]


def step_factor(bits: int, clip: float = 1.0, rule: str = "absmax") -> np.float32:
    """What the absolute maximum of a group is multiplied with: float32, rounded once.

    ``absmax``: clip / (2^(bits-1) - 1), what Atom's code does; ``paper``: 2 clip / (2^bits - 1), its section 2.
    """
    if rule not in RULES or not 0.0 < clip <= 1.0:
        raise error("BCQ-E552", found=f"rule {rule!r}, clip {clip}", expected=f"one of {RULES}; 0 < clip <= 1")
    return np.float32(clip / (2 ** (bits - 1) - 1) if rule == "absmax" else 2 * clip / (2**bits - 1))


@dataclass(frozen=True, slots=True)
class AtomWeight:
    """Host arrays of one weight; ``perm[j]`` is the channel of x that goes with stored column j."""

    out: int
    columns: int
    words: U32
    scale: F32
    perm: npt.NDArray[np.int32]


def padded(size: int, unit: int) -> int:
    """``size`` rounded up to whole units."""
    return -(-size // unit) * unit


def atom_codes(weight: BcqWeight) -> tuple[I8, F32, npt.NDArray[np.int32]]:
    """Signed codes ``[out, in]``, scales ``[out, G]`` float32 (exact), perm ``[in]`` of a weight in Atom's form.

    Anything else is refused with BCQ-E553: one matrix; segment 0 affine with up to 4 bits, segment 1 affine with up
    to 8 bits and 128 columns, both with g = 128, constant zero points that make the codes int4 and int8, and plain
    scales; no outliers.
    """
    _check_form(weight)
    codes = []
    scales = []
    arrays = weight.parts()
    for k, segment in enumerate(weight.scheme.segments):
        codes.append((weight.codes(k).astype(np.int16) - np.int16(_zero(segment))).astype(np.int8))
        scales.append(float64_of(arrays[f"s{k}_scale"].array()).astype(np.float32))
    columns = weight.spec.columns
    perm = arrays["perm"].array().astype(np.int32) if weight.scheme.perm else np.arange(columns, dtype=np.int32)
    return np.concatenate(codes, axis=1), np.concatenate(scales, axis=1), perm


def pack_w4(weight: BcqWeight) -> AtomWeight:
    """The operands of the W4A4 product; the weight is checked as :func:`atom_codes` says."""
    codes, scale, perm = atom_codes(weight)
    return pack_codes(codes, scale, perm)


def pack_codes(codes: I8, scale: F32, perm: npt.NDArray[np.int32]) -> AtomWeight:
    """The same from signed codes ``[out, in]``, scales ``[out, G]`` and perm ``[in]``."""
    out, columns = codes.shape
    groups, rows = columns // GROUP, padded(out, UNIT)
    if rows * (groups + 1) * 16 >= 2**31:
        raise error("BCQ-E554", found=f"{out} x {columns}", expected="fewer than 2^31 words")
    full = np.zeros((rows, columns), np.int8)
    full[:out] = codes
    words = np.empty((rows // UNIT, 2, groups + 1, 256), np.uint32)
    for first in range(0, rows // UNIT, 32):  # 1024 rows at a time bound the copies
        some = slice(first, min(first + 32, rows // UNIT))
        taken = full[some.start * UNIT : some.stop * UNIT]
        block = taken.reshape(-1, 8, 2, 2, groups, 2, 4, 2, 2, 4)  # u r t p g h q j s b
        words[some, :, :-2] = _int4_words(block[:, :, :, :, :-1])
        words[some, :, -2:] = _int8_words(block[:, :, :, :, -1])
    factors = np.full(groups, 1 / 16, np.float32)
    factors[-1] = 1
    scales = np.zeros((groups, rows), np.float32)
    scales[:, :out] = (scale * factors).T
    return AtomWeight(out, columns, words.reshape(-1, groups + 1, 256), scales, perm.astype(np.int32))


def _int4_words(block: I8) -> U32:
    fields = (block.view(np.uint8) & 15).astype(np.uint32)
    shifts = (np.arange(4)[None, :] * 8 + np.arange(2)[:, None] * 4).astype(np.uint32)
    words = np.bitwise_or.reduce(fields << shifts, axis=(-2, -1))  # u r t p g h q j
    ordered: U32 = words.transpose(0, 2, 4, 5, 1, 6, 7, 3)  # u t g h r q j p
    return ordered.reshape(*ordered.shape[:3], 256)


def _int8_words(block: I8) -> U32:
    words = np.ascontiguousarray(block).view(np.uint32)[..., 0]  # u r t p h q j s
    ordered = words.transpose(0, 2, 4, 6, 1, 5, 7, 3)  # u t h j r q s p
    return ordered.reshape(*ordered.shape[:2], 2, 256)


def _zero(segment: Segment) -> int:
    assert isinstance(segment.zero, int)
    return segment.zero


def _check_form(weight: BcqWeight) -> None:
    spec = weight.spec

    def refuse(found: str) -> None:
        raise error("BCQ-E553", tensor=weight.name, found=found, expected="Atom's form: int4 groups, one int8 group")

    if len(spec.shape) != 2 or spec.scheme.outliers is not None or spec.scheme.aligned64:
        refuse("a stack, outliers or tiles")
    if len(spec.widths) != 2 or spec.widths[1] != OUTLIERS or spec.widths[0] % GROUP:
        refuse(f"segments of {list(spec.widths)} columns")
    for segment, bits in zip(spec.scheme.segments, (4, 8), strict=True):
        top = 2 ** (bits - 1)
        if segment.encoding != "affine" or segment.group_size != GROUP or segment.scale not in FLOATS:
            refuse(f"{segment.encoding}, g = {segment.group_size}, scales {segment.scale}")
        if not isinstance(segment.zero, int) or segment.zero > top or 2**segment.bits - 1 - segment.zero >= top:
            refuse(f"{segment.bits} bits with zero point {segment.zero}")
