"""The arrays of the published LUT-GEMM kernel, there and back.

That kernel takes words ``[in/32][q][out]`` (bit t of word w is column ``32w + t``, 1 for +alpha), scales
``[G][q][out]`` and biases ``[G][out]``, the last two in float16: our planes, alpha and bias transposed. A weight
of one bcq segment with F16 numbers goes there and comes back without a change.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from bcqfmt.errors import error
from bcqfmt.weight.packing import unpack_bits
from bcqfmt.weight.weight import BcqWeight

__all__ = ["LutGemm", "from_lut_gemm", "to_lut_gemm"]

Half = npt.NDArray[np.float16]


class LutGemm(NamedTuple):
    """``words`` (in/32, q, out) uint32, ``alpha`` (G, q, out) float16, ``bias`` (G, out) float16 or None."""

    words: npt.NDArray[np.uint32]
    alpha: Half
    bias: Half | None


def to_lut_gemm(weight: BcqWeight) -> LutGemm:
    """The arrays of a weight; BCQ-E553 where the published kernel has no place for what it is."""
    segment, width = weight.segments[0]
    scheme = weight.scheme
    reasons = {
        "more than one segment": len(weight.segments) > 1,
        f"encoding {segment.encoding}": segment.encoding != "bcq",
        "a stack": len(weight.shape) == 3,
        "a reordering": scheme.perm,
        "outliers": scheme.outliers is not None,
        "several scale sets": bool(segment.precisions),
        "numbers other than F16": segment.alpha != "F16" or segment.bias not in (None, "F16"),
        f"{width} columns, no multiple of 32": width % 32 != 0,
        f"groups of {segment.group_size} in {width} columns": width % segment.group_size != 0,
    }
    found = [reason for reason, applies in reasons.items() if applies]
    if found:
        raise error(
            "BCQ-E553",
            tensor=weight.name,
            found=", ".join(found),
            expected="one bcq segment with F16 numbers and whole groups",
        )
    parts = weight.parts()
    bias = parts["s0_bias"].array() if segment.bias else None
    return LutGemm(
        np.ascontiguousarray(weight.planes()[0].transpose(2, 0, 1)),
        np.ascontiguousarray(parts["s0_alpha"].array().transpose(2, 0, 1)),
        None if bias is None else np.ascontiguousarray(bias.T),
    )


def from_lut_gemm(arrays: LutGemm, *, dtype: Any = "float16") -> BcqWeight:
    """The weight of such arrays; ``dtype`` is its logical one."""
    words, alpha, bias = arrays
    fits = (
        words.ndim == 3
        and alpha.ndim == 3
        and words.dtype == np.uint32
        and alpha.dtype == np.float16
        and words.shape[1:] == alpha.shape[1:]
        and min(words.shape + alpha.shape) > 0
        and words.shape[0] * 32 % alpha.shape[0] == 0
        and (bias is None or (bias.dtype == np.float16 and bias.shape == (alpha.shape[0], alpha.shape[2])))
    )
    if not fits:
        shown = [f"{a.dtype}{list(a.shape)}" for a in (words, alpha, bias) if a is not None]
        raise error(
            "BCQ-E552",
            found=", ".join(shown),
            expected="uint32[in/32, q, out], float16[G, q, out] with G dividing in, float16[G, out] or None",
        )
    columns = words.shape[0] * 32
    bits = unpack_bits(np.ascontiguousarray(words.transpose(1, 2, 0)), columns)
    return BcqWeight.from_bcq(
        bits,
        np.ascontiguousarray(alpha.transpose(1, 2, 0)),
        None if bias is None else np.ascontiguousarray(bias.T),
        group_size=columns // alpha.shape[0],
        dtype=dtype,
    )
