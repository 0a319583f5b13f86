"""Bytes: canonical JSON, packed fields, raw floating-point bits, the safetensors container."""

import hashlib
import json
import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

Rows = list[list[int]]
BITS = {
    **dict.fromkeys(["BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"], 8),
    **dict.fromkeys(["I16", "U16", "F16", "BF16"], 16),
    **dict.fromkeys(["I32", "U32", "F32"], 32),
    **dict.fromkeys(["I64", "U64", "F64", "C64"], 64),
    **dict.fromkeys(["F6_E2M3", "F6_E3M2"], 6),
    "F4": 4,
}
BYTE_FLOATS = ("E8M0", "UE4M3")
# precision, exponent of the smallest subnormal number, bits of infinity, canonical NaN, total bits
FORMATS = {
    "F16": (11, -24, 0x7C00, 0x7E00, 16),
    "BF16": (8, -133, 0x7F80, 0x7FC0, 16),
    "F32": (24, -149, 0x7F800000, 0x7FC00000, 32),
}


def canonical(value: Any) -> str:
    """Canonical JSON (section 4): Python's sorted, compact, pure ASCII form happens to be it."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def sha256(data: bytes) -> str:
    """The digest as the format writes it."""
    return hashlib.sha256(data).hexdigest()


def packed(width: int, fields: Iterable[int]) -> bytes:
    """One row of packed(b) (section 6.1), padded with zero bits to a whole word."""
    stream, length = 0, 0
    for field in fields:
        assert 0 <= field < 1 << width, (field, width)
        stream |= field << length
        length += width
    return stream.to_bytes((length + 31) // 32 * 4, "little")


def round_once(x: float, dtype: str) -> int:
    """RN_t of section 8: the bits of x rounded once, to nearest, ties to even."""
    precision, lowest, infinity, nan, total = FORMATS[dtype]
    if math.isnan(x):
        return nan
    sign = (math.copysign(1.0, x) < 0) << (total - 1)
    if math.isinf(x):
        return sign | infinity
    return sign | (0 if x == 0 else min(_magnitude(abs(x), precision, lowest), infinity))


@cache
def _magnitude(x: float, precision: int, lowest: int) -> int:
    quantum = max(math.frexp(x)[1] - precision, lowest)
    units = round(math.ldexp(x, -quantum))  # the scaling is exact, round() takes ties to even
    return ((quantum - lowest) << (precision - 1)) + units


def exact(dtype: str, x: float) -> int:
    """The bits of a number that the type holds exactly."""
    bits = round_once(x, dtype)
    assert math.isnan(x) or number(dtype, bits) == x, (dtype, x)
    return bits


def exact_rows(dtype: str, rows: Iterable[Iterable[float]]) -> Rows:
    """`exact` for a table of numbers."""
    return [[exact(dtype, x) for x in row] for row in rows]


def number(dtype: str, bits: int) -> float:
    """The binary64 value of raw bits; of every type an exact one."""
    if dtype == "E8M0":
        return math.ldexp(1.0, bits - 127)
    if dtype == "UE4M3":
        return math.ldexp(bits % 8 + 8 * (bits >= 8), max(bits // 8, 1) - 10)
    if dtype == "F16":
        value: float = struct.unpack("<e", struct.pack("<H", bits))[0]
    else:
        wide = bits << 16 if dtype == "BF16" else bits
        value = struct.unpack("<f", struct.pack("<I", wide))[0]
    return value


def little(dtype: str, values: Iterable[int]) -> bytes:
    """Raw little-endian elements; negative integers in two's complement."""
    size = BITS[dtype] // 8
    return b"".join((v & ((1 << 8 * size) - 1)).to_bytes(size, "little") for v in values)


@dataclass(frozen=True)
class Tensor:
    """One tensor of a safetensors file."""

    dtype: str
    shape: list[int]
    data: bytes


def tensor(dtype: str, shape: list[int], values: Iterable[int]) -> Tensor:
    """A tensor from the raw bits of its elements (types of whole bytes)."""
    data = little(dtype, values)
    assert len(data) == math.prod(shape) * BITS[dtype] // 8, (dtype, shape, len(data))
    return Tensor(dtype, shape, data)


def place(tensors: Mapping[str, Tensor], order: list[str] | None = None) -> tuple[dict[str, Any], bytes]:
    """Header entries and data; by element size, largest first, then by name, unless told otherwise."""
    names = order or sorted(tensors, key=lambda n: (-max(8, BITS[tensors[n].dtype]), n))
    entries: dict[str, Any] = {}
    data = b""
    for name in names:
        t = tensors[name]
        entries[name] = {
            "dtype": t.dtype,
            "shape": t.shape,
            "data_offsets": [len(data), len(data) + len(t.data)],
        }
        data += t.data
    return entries, data


def frame(text: str | bytes, data: bytes, pad: bool = True) -> bytes:
    """Length, header text padded with spaces, data."""
    header = text.encode("ascii") if isinstance(text, str) else text
    if pad:
        header += b" " * (-len(header) % 8)
    return struct.pack("<Q", len(header)) + header + data


def container(tensors: Mapping[str, Tensor], metadata: Mapping[str, str], order: list[str] | None = None) -> bytes:
    """A safetensors file."""
    entries, data = place(tensors, order)
    return frame(canonical({"__metadata__": dict(metadata), **entries}), data)


class Lcg:
    """Pseudo-random integers that are the same everywhere: Knuth's 64-bit linear congruence."""

    def __init__(self, seed: int) -> None:
        self.state = seed

    def below(self, n: int) -> int:
        """An integer in 0..n-1."""
        self.state = (self.state * 6364136223846793005 + 1442695040888963407) & (1 << 64) - 1
        return (self.state >> 33) % n

    def rows(self, count: int, width: int, n: int) -> Rows:
        """A table of integers in 0..n-1."""
        return [[self.below(n) for _ in range(width)] for _ in range(count)]

    def floats(self, dtype: str, count: int, width: int) -> Rows:
        """A table of raw bits: either sign, magnitudes between about 1/32 and 4, any significand."""
        precision, _, _, _, total = FORMATS[dtype]
        bias = 15 if dtype == "F16" else 127
        return [
            [
                self.below(2) << (total - 1)
                | (bias - 5 + self.below(7)) << (precision - 1)
                | self.below(1 << (precision - 1))
                for _ in range(width)
            ]
            for _ in range(count)
        ]

    def permutation(self, n: int) -> list[int]:
        """A permutation of 0..n-1 (Fisher-Yates)."""
        items = list(range(n))
        for i in range(n - 1, 0, -1):
            j = self.below(i + 1)
            items[i], items[j] = items[j], items[i]
        return items
