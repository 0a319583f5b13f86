"""Weights as plain numbers, and the parts, schemes, descriptors and digests they turn into."""

from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from math import prod
from typing import Any

from .build import BYTE_FLOATS, Rows, Tensor, canonical, container, packed, sha256, tensor


@dataclass
class Segment:
    """A run of stored columns. Tables have one row per row of all E matrices, floats as raw bits."""

    spec: dict[str, Any]
    codes: Rows
    numbers: dict[str, Rows] = field(default_factory=dict)
    plane_numbers: dict[str, list[Rows]] = field(default_factory=dict)

    @property
    def width(self) -> int:
        """The number n of stored columns."""
        return len(self.codes[0])


@dataclass
class Outliers:
    """Entries (column, raw bits) of every row of all E matrices."""

    mode: str
    dtype: str
    segments: list[int]
    rows: list[list[tuple[int, int]]]


@dataclass
class Weight:
    """A weight before it is cut into parts."""

    name: str
    shape: list[int]
    dtype: str
    segments: list[Segment]
    aligned64: bool = False
    perm: Rows | None = None
    outliers: Outliers | None = None
    nonfinite: bool = False

    @property
    def prefix(self) -> str:
        """P of section 6."""
        stem = self.name.removesuffix(".weight")
        return stem + ".bcq_" if stem and stem != self.name else self.name + "_bcq_"

    @property
    def scheme(self) -> dict[str, Any]:
        """The scheme object of section 5.2."""
        scheme: dict[str, Any] = {"segments": [s.spec for s in self.segments]}
        if self.aligned64:
            scheme["layout"] = "aligned64"
        if self.perm is not None:
            scheme["perm"] = True
        if self.outliers is not None:
            o = self.outliers
            scheme["outliers"] = {"mode": o.mode, "dtype": o.dtype, "segments": o.segments}
        if self.nonfinite:
            scheme["nonfinite"] = True
        return scheme

    @property
    def entry(self) -> dict[str, Any]:
        """The weight entry of section 5.1, without `scheme`."""
        entry: dict[str, Any] = {"shape": self.shape, "dtype": self.dtype}
        if len(self.segments) > 1:
            entry["widths"] = [s.width for s in self.segments]
        return entry

    @property
    def planes(self) -> int:
        """The largest number of planes of a segment."""
        return max(int(s.spec["bits"]) for s in self.segments)


def flat(rows: Iterable[Iterable[int]]) -> list[int]:
    """All elements in row-major order."""
    return [x for row in rows for x in row]


def words(width: int, lead: list[int], rows: Rows) -> Tensor:
    """An I32 tensor of packed rows."""
    data = b"".join(packed(width, row) for row in rows)
    return Tensor("I32", [*lead, len(data) // 4 // prod(lead)], data)


def number_kinds(key: str, kind: Any) -> dict[str, Any]:
    """The parts of a scale or an offset: a type, or the width of packed fields."""
    if not isinstance(kind, dict):
        return {key: "U8" if kind in BYTE_FLOATS else kind}
    zero = kind["bits"] if kind.get("zero") == "packed" else kind.get("zero")
    return {f"{key}_codes": kind.get("bits", "U8"), f"{key}_scale": kind["scale"], f"{key}_zero": zero}


def segment_parts(seg: Segment, matrices: int, stack: list[int], aligned: bool) -> dict[str, Tensor]:
    """The parts of one segment, by their name after `s{k}_`."""
    spec, out = seg.spec, len(seg.codes) // matrices
    parts: dict[str, Tensor] = {}
    if not aligned:
        q = spec["bits"]
        bits = [
            [code >> (q - 1 - i) & 1 for code in seg.codes[e * out + r]]
            for e in range(matrices)
            for i in range(q)
            for r in range(out)
        ]
        parts["planes"] = words(1, [*stack, q, out], bits)
    kinds: dict[str, Any] = {
        "zero": spec["zero"]["bits"] if isinstance(spec.get("zero"), dict) else spec.get("zero"),
        **number_kinds("scale", spec.get("scale")),
        **number_kinds("offset", spec.get("offset")),
    }
    for name, rows in seg.numbers.items():
        kind = kinds[name] if name in kinds else spec["bias"]
        lead = [*stack, len(rows) // matrices]
        if isinstance(kind, int):
            parts[name] = words(kind, lead, rows)
        else:
            parts[name] = tensor(kind, [*lead, len(rows[0])], flat(rows))
    for name, tables in seg.plane_numbers.items():
        order = [t[e * out + r] for e in range(matrices) for t in tables for r in range(out)]
        parts[name] = tensor(spec["alpha"], [*stack, len(tables), out, len(order[0])], flat(order))
    return parts


def tiles(weight: Weight) -> dict[str, Tensor]:
    """The parts of section 7 that replace planes, zeros and scale codes."""
    low, high = weight.segments
    lead, tile, extra, meta = weight.shape[:-1], [], [], []
    count = weight.shape[-1] // 64
    zeros, scales = low.numbers["zero"], low.numbers["scale_codes"]
    for r, (two, four) in enumerate(zip(low.codes, high.codes, strict=True)):
        for t in range(count):
            for w in range(3):
                start = 48 * t + 16 * w
                tile.append(sum(c << 2 * m for m, c in enumerate(two[start : start + 16])))
            halves = [sum(c << 4 * m for m, c in enumerate(four[i : i + 8])) for i in (16 * t, 16 * t + 8)]
            tile.append(halves[0])
            extra.append(halves[1])
            z, s = zeros[r][3 * t : 3 * t + 3], scales[r][3 * t : 3 * t + 3]
            meta.append(z[0] | z[1] << 2 | z[2] << 4 | s[0] << 6 | s[1] << 10 | s[2] << 13)
    second = low.numbers["scale_zero"]
    stack = weight.shape[:-2]
    return {
        "tile": tensor("I32", [*lead, count, 4], tile),
        "tile_extra": tensor("I32", [*lead, count], extra),
        "tile_meta": tensor("U16", [*lead, count], meta),
        "s0_scale_zero": tensor("U8", [*stack, len(second) // prod(stack), len(second[0])], flat(second)),
    }


def parts(weight: Weight) -> dict[str, Tensor]:
    """All parts of a weight, by their name after P."""
    stack = weight.shape[:-2]
    result: dict[str, Tensor] = {}
    for k, seg in enumerate(weight.segments):
        for name, part in segment_parts(seg, prod(stack), stack, weight.aligned64).items():
            result[f"s{k}_{name}"] = part
    if weight.aligned64:
        for replaced in ("s0_zero", "s0_scale_codes"):
            del result[replaced]
        result.update(tiles(weight))
    if weight.perm is not None:
        result["perm"] = tensor("I32", [*stack, weight.shape[-1]], flat(weight.perm))
    if weight.outliers is not None:
        rows = weight.outliers.rows
        ends = [sum(len(row) for row in rows[:r]) for r in range(len(rows) + 1)]
        entries = [entry for row in rows for entry in row]
        kind = "U16" if weight.shape[-1] <= 65536 else "I32"
        result["outlier_indptr"] = tensor("I32", [len(ends)], ends)
        result["outlier_indices"] = tensor(kind, [len(entries)], [c for c, _ in entries])
        result["outlier_values"] = tensor(weight.outliers.dtype, [len(entries)], [v for _, v in entries])
    return result


def digest(weight: Weight) -> str:
    """The digest of a weight (section 9.4)."""
    lines = [canonical({**weight.entry, "scheme": weight.scheme})]
    for name, part in sorted(parts(weight).items()):
        lines.append(f"{name} {part.dtype} {','.join(map(str, part.shape))} {sha256(part.data)}")
    return sha256("".join(line + "\n" for line in lines).encode("ascii"))


def features(weights: Iterable[Weight]) -> list[str]:
    """The features in use (section 5.4)."""
    found: set[str] = set()
    for w in weights:
        found |= {k for k in ("perm", "outliers", "nonfinite") if k in w.scheme}
        found |= {"aligned64"} if w.aligned64 else set()
        found |= {"segments"} if len(w.segments) > 1 else set()
        found |= {"stack"} if len(w.shape) == 3 else set()
        for s in w.segments:
            found |= {s.spec["encoding"]} - {"affine"}
            found |= {"multi-precision"} if "precisions" in s.spec else set()
            for key, feature in (("scale", "second-order"), ("offset", "second-order-offset")):
                kind = s.spec.get(key)
                second = kind if isinstance(kind, dict) else {}
                found |= {feature} if second else set()
                found |= {"super-groups"} if "groups" in second else set()
                found |= {"byte-floats"} if second.get("codes", kind) in BYTE_FLOATS else set()
    return sorted(found)


def table(weights: Iterable[Weight]) -> tuple[list[Any], dict[str, Any]]:
    """The schemes, each once, and the weight entries that point to them."""
    schemes: list[Any] = []
    entries: dict[str, Any] = {}
    for w in weights:
        if w.scheme not in schemes:
            schemes.append(w.scheme)
        entries[w.name] = {**w.entry, "scheme": schemes.index(w.scheme)}
    return deepcopy((schemes, entries))  # the invalid vectors edit what comes from here


def descriptor(weights: list[Weight], version: str = "1.0", ignorable: Any = None) -> dict[str, Any]:
    """The descriptor object of section 5."""
    schemes, entries = table(weights)
    extra = {} if ignorable is None else {"ignorable": ignorable}
    return {
        "version": version,
        "features": features(weights),
        "schemes": schemes,
        "weights": entries,
        **extra,
    }


def tensors_of(weights: Iterable[Weight], dense: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Every tensor of a file, parts and dense ones."""
    named = {w.prefix + name: part for w in weights for name, part in parts(w).items()}
    return {**named, **(dense or {})}


def metadata(described: Any) -> dict[str, str]:
    """`__metadata__` with a descriptor."""
    return {"bcqfmt": canonical(described), "format": "pt"}


def bcq_file(weights: list[Weight], dense: Mapping[str, Tensor] | None = None, version: str = "1.0") -> bytes:
    """A whole BCQ file."""
    return container(tensors_of(weights, dense), metadata(descriptor(weights, version)))
