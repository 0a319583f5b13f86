"""The specification once more, by brute force: one element, one bit, one fraction at a time.

Standard library only and nothing of the package: what both say is unlikely to be wrong in both.
"""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

Raw = tuple[str, list[int], list[int]]  # dtype, shape, elements as unsigned integers in row-major order

BYTES = {"U8": 1, "U16": 2, "F16": 2, "BF16": 2, "I32": 4, "F32": 4, "F64": 8}
PRECISION = {"F16": (11, -14, 15), "BF16": (8, -126, 127), "F32": (24, -126, 127)}
NAN = {"F16": 0x7E00, "BF16": 0x7FC0, "F32": 0x7FC00000}


@dataclass
class Plain:
    """A weight as lists and integers; `scheme` is the JSON of section 5.2, `parts` go by name without P."""

    shape: list[int]
    dtype: str
    scheme: dict[str, Any]
    widths: list[int]
    parts: dict[str, Raw] = field(default_factory=dict)

    @property
    def stack(self) -> int:
        return self.shape[0] if len(self.shape) == 3 else 1

    @property
    def out(self) -> int:
        return self.shape[-2]

    @property
    def columns(self) -> int:
        return self.shape[-1]

    @property
    def segments(self) -> list[dict[str, Any]]:
        return self.scheme["segments"]

    def group_size(self, k: int) -> int:
        size = self.segments[k]["group_size"]
        return self.widths[k] if size == "row" else size

    def groups(self, k: int) -> int:
        return ceil(self.widths[k], self.group_size(k))

    def matrix(self, suffix: str, e: int) -> Any:
        """Part `suffix` of matrix e as nested lists."""
        _, shape, flat = self.parts[suffix]
        return nest(flat, shape)[e] if len(self.shape) == 3 else nest(flat, shape)


def ceil(a: int, b: int) -> int:
    return -(-a // b)


def nest(flat: list[int], shape: list[int]) -> Any:
    """Row-major elements as nested lists."""
    for size in reversed(shape[1:]):
        flat = [flat[i : i + size] for i in range(0, len(flat), size)] if size else [[] for _ in range(shape[0])]
    return flat


# -- section 6.1 -----------------------------------------------------------------------------------------------


def bit(words: list[int], t: int) -> int:
    """Bit t of the stream."""
    return words[t // 32] >> (t % 32) & 1


def get_field(words: list[int], bits: int, j: int) -> int:
    """Field j of packed(bits)."""
    return sum(bit(words, bits * j + i) << i for i in range(bits))


def pack(fields: list[int], bits: int) -> list[int]:
    """A row of fields as words."""
    words = [0] * ceil(len(fields) * bits, 32)
    for j, value in enumerate(fields):
        assert 0 <= value < 2**bits
        for i in range(bits):
            t = bits * j + i
            words[t // 32] |= (value >> i & 1) << (t % 32)
    return words


def plane_bits(planes: list[list[list[int]]], r: int, j: int) -> list[int]:
    """The bits of an element, plane 0 first."""
    return [bit(plane[r], j) for plane in planes]


# -- section 8 -------------------------------------------------------------------------------------------------


def number(raw: int, dtype: str) -> float:
    """The number that a bit pattern stands for."""
    if dtype == "F16":
        return float(struct.unpack("<e", struct.pack("<H", raw))[0])
    if dtype == "BF16":
        return float(struct.unpack("<f", struct.pack("<I", raw << 16))[0])
    if dtype == "E8M0":
        return float(Fraction(2) ** (raw - 127))
    if dtype == "UE4M3":
        assert raw <= 0x7E
        return float((Fraction(raw & 7, 8) + (raw >= 8)) * Fraction(2) ** (max(raw >> 3, 1) - 7))
    return float(struct.unpack("<f", struct.pack("<I", raw))[0])


def rounded(x: float, dtype: str) -> int:
    """RN_dtype(x) as a bit pattern, with exact fractions."""
    precision, emin, emax = PRECISION[dtype]
    width = BYTES[dtype] * 8
    if math.isnan(x):
        return NAN[dtype]
    sign = (math.copysign(1.0, x) < 0) << (width - 1)
    infinity = (2 * emax + 1) << (precision - 1)
    if math.isinf(x):
        return sign | infinity
    if x == 0:
        return sign
    exact = abs(Fraction(x))
    exponent = max(math.frexp(abs(x))[1] - 1, emin)
    count = round(exact / Fraction(2) ** (exponent - precision + 1))  # ties to even
    if count == 2**precision:
        count, exponent = count // 2, exponent + 1
    if exponent > emax:
        return sign | infinity
    if count < 2 ** (precision - 1):  # subnormal or zero
        return sign | count
    return sign | (exponent + emax) << (precision - 1) | (count - 2 ** (precision - 1))


def bits64(x: float) -> int:
    """The pattern of a binary64; one pattern for every NaN."""
    if math.isnan(x):
        return 0x7FF8000000000000
    return int(struct.unpack("<Q", struct.pack("<d", x))[0])


class NoValue(Exception):
    """A segment that has no value at fewer planes."""


def exact_values(plain: Plain, planes: int | None = None) -> list[float]:
    """E of every element, row-major over [E, out, in]."""
    found = []
    for e in range(plain.stack):
        matrix = _Matrix(plain, e, planes)
        found += [matrix.value(r, c) for r in range(plain.out) for c in range(plain.columns)]
    return found


def values(plain: Plain, planes: int | None = None, dtype: str | None = None) -> list[int]:
    """Bit patterns of all values in `dtype`, the logical one by default."""
    kind = dtype or plain.dtype
    found = exact_values(plain, planes)
    return [bits64(x) for x in found] if kind == "F64" else [rounded(x, kind) for x in found]


class _Matrix:
    """One matrix of a weight, and the value of any of its elements."""

    def __init__(self, plain: Plain, e: int, planes: int | None) -> None:
        self.plain, self.planes = plain, planes
        aligned = plain.scheme.get("layout") == "aligned64"
        self.parts = {suffix: plain.matrix(suffix, e) for suffix in plain.parts if not suffix.startswith("outlier_")}
        if aligned:
            self._untile()
        perm = self.parts.get("perm", list(range(plain.columns)))
        assert sorted(perm) == list(range(plain.columns))
        self.stored = {c: j for j, c in enumerate(perm)}
        self.outliers: dict[tuple[int, int], float] = {}
        if "outliers" in plain.scheme:
            indptr, indices, raw = (plain.parts[f"outlier_{s}"][2] for s in ("indptr", "indices", "values"))
            for r in range(plain.out):
                for i in range(indptr[e * plain.out + r], indptr[e * plain.out + r + 1]):
                    self.outliers[r, indices[i]] = number(raw[i], plain.scheme["outliers"]["dtype"])

    def _untile(self) -> None:
        """Annex A: planes, zeros and scale codes out of the tiles."""
        plain, parts = self.plain, self.parts
        tiles = plain.columns // 64
        low: list[list[int]] = []
        high: list[list[int]] = []
        zeros: list[list[int]] = []
        codes: list[list[int]] = []
        for r in range(plain.out):
            low.append([parts["tile"][r][t][w] >> 2 * m & 3 for t in range(tiles) for w in range(3) for m in range(16)])
            high.append([
                (parts["tile"][r][t][3] if m < 8 else parts["tile_extra"][r][t]) >> 4 * (m % 8) & 15
                for t in range(tiles) for m in range(16)
            ])  # fmt: skip
            meta = parts["tile_meta"][r]
            zeros.append([meta[t] >> shift & 3 for t in range(tiles) for shift in (0, 2, 4)])
            codes.append([
                meta[t] >> shift & mask for t in range(tiles) for shift, mask in ((6, 15), (10, 7), (13, 7))
            ])  # fmt: skip
        for name, rows, bits in (("s0_planes", low, 2), ("s1_planes", high, 4)):
            parts[name] = [[pack([code >> (bits - 1 - i) & 1 for code in row], 1) for row in rows] for i in range(bits)]
        parts["s0_zero"] = [pack(row, 2) for row in zeros]
        parts["s0_scale_codes"] = [pack(row, 4) for row in codes]
        parts["s0_scale_zero"] = [pack(row, 4) for row in parts["s0_scale_zero"]]

    def value(self, r: int, c: int) -> float:
        j, k = self.stored[c], 0
        while j >= self.plain.widths[k]:
            j -= self.plain.widths[k]
            k += 1
        found = self._segment(k, r, j)
        if (r, c) in self.outliers:
            v = self.outliers[r, c]
            found = found + v if self.plain.scheme["outliers"]["mode"] == "add" else v
        return found

    def _segment(self, k: int, r: int, j: int) -> float:
        segment = self.plain.segments[k]
        q, a = segment["bits"], j // self.plain.group_size(k)
        p = min(self.planes or q, q)
        bits = plane_bits(self.parts[f"s{k}_planes"], r, j)
        code = sum(b << (q - 1 - i) for i, b in enumerate(bits))
        encoding = segment["encoding"]
        if encoding == "bcq":
            suffix = f"_p{p}" if p < q and p in segment.get("precisions", []) else ""
            alphas = [number(self.parts[f"s{k}_alpha{suffix}"][i][r][a], segment["alpha"]) for i in range(p)]
            z = number(self.parts[f"s{k}_bias{suffix}"][r][a], segment["bias"]) if "bias" in segment else 0.0
            return _plane_sum(z, alphas, bits)
        if p < q and encoding != "affine":
            raise NoValue
        s = self._number("scale", k, r, a)
        if encoding == "affine":
            zp = self._zero_point(k, r, a)
            if p < q:
                alphas = [s * 2.0 ** (q - 2 - i) for i in range(p)]
                return _plane_sum(s * (((2.0**q - 1.0) - 2.0 * zp) * 0.5), alphas, bits)
            return s * (float(code) - float(zp))
        if encoding == "float-zero":
            zero = number(self.parts[f"s{k}_zero"][r][a], segment["zero"])
            return s * number(rounded(float(code) - zero, self.plain.dtype), self.plain.dtype)
        if encoding == "table":
            return s * (float(segment["table"][code]) * 2.0 ** segment.get("table_exponent", 0))
        return (s * float(code)) + self._number("offset", k, r, a)

    def _number(self, key: str, k: int, r: int, a: int) -> float:
        """The scale or the offset of a group."""
        kind, name = self.plain.segments[k][key], f"s{k}_{key}"
        if isinstance(kind, str):
            return number(self.parts[name][r][a], kind)
        row, column = r // kind["rows"], a // kind.get("groups", 1)
        scale = number(self.parts[f"{name}_scale"][row][column], kind["scale"])
        if "codes" in kind:
            return scale * number(self.parts[f"{name}_codes"][r][a], kind["codes"])
        code, zero = get_field(self.parts[f"{name}_codes"][r], kind["bits"], a), kind["zero"]
        if zero == "packed":
            zero = get_field(self.parts[f"{name}_zero"][row], kind["bits"], column)
        elif isinstance(zero, str):
            zero = number(self.parts[f"{name}_zero"][row][column], zero)
        return scale * (float(code) - float(zero))

    def _zero_point(self, k: int, r: int, a: int) -> int:
        zero = self.plain.segments[k]["zero"]
        return zero if isinstance(zero, int) else get_field(self.parts[f"s{k}_zero"][r], zero["bits"], a)


def _plane_sum(z: float, alphas: list[float], bits: list[int]) -> float:
    for alpha, b in zip(alphas, bits, strict=False):
        z = z + alpha if b else z - alpha
    return z


# -- sections 3 to 6: a file -----------------------------------------------------------------------------------


def prefix(name: str) -> str:
    """P of a weight."""
    stem = name[: -len(".weight")] if name.endswith(".weight") else ""
    return f"{stem}.bcq_" if stem else f"{name}_bcq_"


def canonical(value: Any) -> str:
    """Canonical JSON; only for texts in ASCII, where json.dumps has the escapes right."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)


def raw_bytes(raw: Raw) -> bytes:
    """The bytes of a part."""
    size = BYTES[raw[0]]
    return b"".join(element.to_bytes(size, "little") for element in raw[2])


def features(weights: dict[str, Plain]) -> list[str]:
    """Section 5.4."""
    used = set()
    for plain in weights.values():
        scheme = plain.scheme
        used |= {key for key in ("nonfinite", "outliers", "perm") if key in scheme}
        used |= {"aligned64"} if "layout" in scheme else set()
        used |= {"segments"} if len(plain.segments) > 1 else set()
        used |= {"stack"} if len(plain.shape) == 3 else set()
        for segment in plain.segments:
            used |= {segment["encoding"]} - {"affine"}
            used |= {"multi-precision"} if "precisions" in segment else set()
            for key, feature in (("scale", "second-order"), ("offset", "second-order-offset")):
                kind = segment.get(key)
                used |= {"byte-floats"} if kind in ("E8M0", "UE4M3") else set()
                if isinstance(kind, dict):
                    used |= {feature}
                    used |= {"super-groups"} if "groups" in kind else set()
                    used |= {"byte-floats"} if "codes" in kind else set()
    return sorted(used)


def descriptor(weights: dict[str, Plain]) -> dict[str, Any]:
    """The descriptor as JSON values; schemes in the order of their texts."""
    texts = sorted({canonical(plain.scheme) for plain in weights.values()})
    entries = {}
    for name, plain in weights.items():
        entry = {"scheme": texts.index(canonical(plain.scheme)), "shape": plain.shape, "dtype": plain.dtype}
        entries[name] = {**entry, "widths": plain.widths} if len(plain.segments) > 1 else entry
    schemes = [json.loads(text) for text in texts]
    return {"version": "1.0", "features": features(weights), "schemes": schemes, "weights": entries}


def container(
    tensors: dict[str, tuple[str, list[int], bytes]], metadata: dict[str, str] | None, sizes: dict[str, int]
) -> bytes:
    """A safetensors file, tensors in the recommended order."""
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    data = b""
    for name in sorted(tensors, key=lambda name: (-sizes[tensors[name][0]], name)):
        dtype, shape, raw = tensors[name]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    return framed(canonical(header).encode(), data)


def framed(header: bytes, data: bytes) -> bytes:
    """Length, header padded to a multiple of 8, data."""
    header += b" " * (-len(header) % 8)
    return struct.pack("<Q", len(header)) + header + data


def split(raw: bytes) -> tuple[dict[str, Any], bytes]:
    """The header as JSON and the data of a file."""
    (length,) = struct.unpack("<Q", raw[:8])
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def file_bytes(weights: dict[str, Plain], dense: dict[str, tuple[str, list[int], bytes]] | None = None) -> bytes:
    """A whole BCQ file."""
    tensors = dict(dense or {})
    for name, plain in weights.items():
        for suffix, raw in plain.parts.items():
            tensors[prefix(name) + suffix] = (raw[0], raw[1], raw_bytes(raw))
    metadata = {"format": "pt", "bcqfmt": canonical(descriptor(weights))}
    sizes = {"BOOL": 8, "I8": 8, "F4": 4, **{dtype: size * 8 for dtype, size in BYTES.items()}}
    return container(tensors, metadata, sizes)
