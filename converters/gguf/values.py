"""Values of GGUF blocks by ggml's own arithmetic, F32 in its order of operations, for ``verify`` to compare with.

Written from the description of the blocks alone, plainly: for every element of a block the byte and the shift of its
code. It shares nothing with `blocks`, the word packers or the decoder, so that a mistake there is not repeated here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
_TYPES: Final = {  # bytes of a block, elements
    "Q4_0": (18, 32), "Q4_1": (20, 32), "Q5_0": (22, 32), "Q5_1": (24, 32), "Q8_0": (34, 32), "Q2_K": (84, 256),
    "Q3_K": (110, 256), "Q4_K": (144, 256), "Q5_K": (176, 256), "Q6_K": (210, 256), "TQ1_0": (54, 256),
    "TQ2_0": (66, 256), "Q1_0": (18, 128), "Q2_0": (18, 64), "IQ4_NL": (18, 32), "IQ4_XS": (136, 256),
    "MXFP4": (17, 32), "NVFP4": (36, 64),
}  # fmt: skip
_IQ4 = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)
_FP4 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)  # twice E2M1
_E: Final = np.arange(256)


def values_of(name: str, rows: Array, order: str = "<") -> npt.NDArray[np.float32]:
    """F32 [N, K] of blocks uint8 [N, row bytes]; ``order``: the byte order of the file."""
    nbytes, elements = _TYPES[name]
    blocks = np.ascontiguousarray(rows).reshape(-1, nbytes)
    with np.errstate(all="ignore"):
        found: Array = _VALUES[name](blocks, order)
    return found.reshape(len(rows), -1, elements).reshape(len(rows), -1)


def _half(blocks: Array, at: int, order: str) -> Array:
    """The F16 at byte ``at`` of every block as F32 [B, 1]."""
    raw = np.ascontiguousarray(blocks[:, at : at + 2]).view(f"{order}f2")
    return raw.astype(np.float32)


def _number(blocks: Array, at: int, kind: str, order: str) -> Array:
    """The integer at byte ``at`` of every block, [B, 1]."""
    size = np.dtype(kind).itemsize
    return np.ascontiguousarray(blocks[:, at : at + size]).view(order + kind).astype(np.int64)


def _code(blocks: Array, byte: Array, shift: Array | int, bits: int) -> Array:
    """int64 [B, len(byte)]: the ``bits`` from ``shift`` on of these bytes of every block."""
    return blocks[:, byte].astype(np.int64) >> shift & ((1 << bits) - 1)


def _nibbles(blocks: Array, at: int, count: int = 32, half: int = 16) -> Array:
    """Element j of ``2 * half`` in the low nibble of byte j, j + half in the high one."""
    e = _E[:count]
    run, j = e // (2 * half), e % (2 * half)
    return _code(blocks, at + run * half + j % half, 4 * (j // half), 4)


def _pairs(blocks: Array, at: int) -> Array:
    return _code(blocks, at + 32 * (_E // 128) + _E % 32, 2 * (_E % 128 // 32), 2)


def _f32(codes: Array) -> Array:
    return codes.astype(np.float32)


def _q5_0(b: Array, o: str) -> Array:
    high = _number(b, 2, "u4", o) >> _E[:32] & 1
    return _f32((_nibbles(b, 6) | high << 4) - 16) * _half(b, 0, o)


def _q5_1(b: Array, o: str) -> Array:
    high = _number(b, 4, "u4", o) >> _E[:32] & 1
    return _f32(_nibbles(b, 8) | high << 4) * _half(b, 0, o) + _half(b, 2, o)


def _q1_0(b: Array, o: str) -> Array:
    d = _half(b, 0, o)
    return np.where(_code(b, 2 + _E[:128] // 8, _E[:128] % 8, 1) == 1, d, -d)


def _tq1_0(b: Array, o: str) -> Array:
    first, second, third = _E < 160, (_E >= 160) & (_E < 240), _E >= 240
    byte = np.select([first, second, third], [_E % 32, 32 + (_E - 160) % 16, 48 + (_E - 240) % 4])
    digit = np.select([first, second, third], [_E // 32, (_E - 160) // 16, (_E - 240) // 4])
    trit = (b[:, byte].astype(np.int64) * 3**digit % 256 * 3) >> 8
    return _f32(trit - 1) * _half(b, 52, o)


def _q2_k(b: Array, o: str) -> Array:
    scale, offset = _code(b, _E // 16, 0, 4), _code(b, _E // 16, 4, 4)
    found: Array = _f32(_pairs(b, 16)) * (_half(b, 80, o) * _f32(scale)) - _half(b, 82, o) * _f32(offset)
    return found


def _q3_k(b: Array, o: str) -> Array:
    code = _pairs(b, 32) | _code(b, _E % 32, _E // 32, 1) << 2
    i = _E // 16
    scale = _code(b, 96 + i % 8, 4 * (i // 8), 4) | _code(b, 104 + i % 4, 2 * (i // 4), 2) << 4
    return _half(b, 108, o) * _f32(scale - 32) * _f32(code - 4)


def _six_bits(b: Array, at: int) -> tuple[Array, Array]:
    """Scales and offsets of Q4_K and Q5_K, [B, 256]."""
    i = np.arange(8)
    low = i < 4
    scale = np.where(
        low, _code(b, at + i % 8, 0, 6), _code(b, at + np.minimum(i + 4, 11), 0, 4) | _code(b, at + i % 4, 6, 2) << 4
    )
    offset = np.where(
        low, _code(b, at + i % 4 + 4, 0, 6), _code(b, at + np.minimum(i + 4, 11), 4, 4) | _code(b, at + i, 6, 2) << 4
    )
    return scale[:, _E // 32], offset[:, _E // 32]


def _q4_k(b: Array, o: str) -> Array:
    scale, offset = _six_bits(b, 4)
    code = _code(b, 16 + 32 * (_E // 64) + _E % 32, 4 * (_E % 64 // 32), 4)
    found: Array = _half(b, 0, o) * _f32(scale) * _f32(code) - _half(b, 2, o) * _f32(offset)
    return found


def _q5_k(b: Array, o: str) -> Array:
    scale, offset = _six_bits(b, 4)
    code = _code(b, 48 + 32 * (_E // 64) + _E % 32, 4 * (_E % 64 // 32), 4) | _code(b, 16 + _E % 32, _E // 32, 1) << 4
    found: Array = _half(b, 0, o) * _f32(scale) * _f32(code) - _half(b, 2, o) * _f32(offset)
    return found


def _q6_k(b: Array, o: str) -> Array:
    h, r = _E // 128, _E % 128
    code = _code(b, 64 * h + r % 64, 4 * (r // 64), 4) | _code(b, 128 + 32 * h + r % 32, 2 * (r // 32), 2) << 4
    scale = np.ascontiguousarray(b[:, 192:208]).view(np.int8)[:, _E // 16]
    return _half(b, 208, o) * _f32(scale) * _f32(code - 32)


def _iq4_xs(b: Array, o: str) -> Array:
    i = _E // 32
    scale = _code(b, 4 + i // 2, 4 * (i % 2), 4) | (_number(b, 2, "u2", o) >> 2 * i & 3) << 4
    return _half(b, 0, o) * _f32(scale - 32) * _IQ4[_nibbles(b, 8, 256)]


def _mxfp4(b: Array, _: str) -> Array:
    scale = np.ldexp(np.float32(1), b[:, :1].astype(np.int32) - 128)
    return scale.astype(np.float32) * _FP4[_nibbles(b, 1)]


def _nvfp4(b: Array, _: str) -> Array:
    raw = b[:, _E[:64] // 16].astype(np.int64)
    exponent, mantissa = raw >> 3 & 15, raw & 7
    number = np.where(exponent > 0, np.ldexp(8.0 + mantissa, exponent - 10), np.ldexp(1.0 * mantissa, -9))
    number = np.where(raw == 127, 0.0, number)  # 255 is no zero: ggml compares before it drops bit 7
    return (0.5 * number).astype(np.float32) * _FP4[_nibbles(b, 4, 64, 8)]


# of blocks b in the byte order o of the file
_VALUES: Final[dict[str, Callable[[Array, str], Array]]] = {
    "Q4_0": lambda b, o: _f32(_nibbles(b, 2) - 8) * _half(b, 0, o),
    "Q4_1": lambda b, o: _f32(_nibbles(b, 4)) * _half(b, 0, o) + _half(b, 2, o),
    "Q8_0": lambda b, o: _f32(np.ascontiguousarray(b[:, 2:]).view(np.int8)) * _half(b, 0, o),
    "TQ2_0": lambda b, o: _f32(_pairs(b, 0) - 1) * _half(b, 64, o),
    "Q2_0": lambda b, o: _f32(_code(b, 2 + _E[:64] // 4, 2 * (_E[:64] % 4), 2) - 1) * _half(b, 0, o),
    "IQ4_NL": lambda b, o: _half(b, 0, o) * _IQ4[_nibbles(b, 2)],
    "Q5_0": _q5_0, "Q5_1": _q5_1, "Q2_K": _q2_k, "Q3_K": _q3_k, "Q4_K": _q4_k, "Q5_K": _q5_k,
    "Q6_K": _q6_k, "TQ1_0": _tq1_0, "Q1_0": _q1_0, "IQ4_XS": _iq4_xs, "MXFP4": _mxfp4, "NVFP4": _nvfp4,
}  # fmt: skip
