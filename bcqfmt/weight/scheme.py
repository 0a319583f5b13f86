"""What a weight is made of: segments, schemes, and the parts that follow from them (spec sections 5 and 6)."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

from .packing import words_for

FEATURES: Final = (
    "aligned64", "bcq", "byte-floats", "float-zero", "multi-precision", "nonfinite", "offset", "outliers", "perm",
    "second-order", "second-order-offset", "segments", "stack", "super-groups", "table",
)  # fmt: skip
ENCODINGS: Final = ("affine", "float-zero", "offset", "table", "bcq")
BYTE_FLOATS: Final = ("E8M0", "UE4M3")  # unsigned floating-point numbers of one byte, stored as U8


class PackedZero(NamedTuple):
    """Integer zero points stored as packed(bits)."""

    bits: int


class SecondOrder(NamedTuple):
    """Scales or offsets made of codes: ``scale * (code - zero)``.

    Codes are integers of ``bits`` bits, or bytes of the type ``bits``; then ``zero`` is 0. ``rows`` rows and
    ``groups`` groups along a row share scale and zero. ``zero`` is "packed", a dtype, or one integer for all.
    """

    bits: int | str
    rows: int
    scale: str
    zero: str | int
    groups: int = 1


class OutlierRule(NamedTuple):
    """CSR outliers: ``mode`` "add" or "replace", value dtype, the segments they may lie in."""

    mode: str
    dtype: str
    segments: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Encoding of a run of stored columns; the fields that its encoding does not use are None.

    ``row``: the group size is ``"row"``, one group over all columns of the segment. ``group_size`` is their number
    once the segment belongs to a :class:`WeightSpec`.
    """

    encoding: str
    bits: int
    group_size: int
    row: bool = False
    scale: str | SecondOrder | None = None
    zero: int | str | PackedZero | None = None
    offset: str | SecondOrder | None = None
    table: tuple[int, ...] = ()
    table_exponent: int = 0
    alpha: str | None = None
    bias: str | None = None
    precisions: tuple[int, ...] = ()

    def numbers(self) -> dict[str, str | SecondOrder]:
        """``scale`` and ``offset``, those that there are: a type, or how they are made of codes."""
        both = {"scale": self.scale, "offset": self.offset}
        return {name: kind for name, kind in both.items() if kind is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """What weights share."""

    segments: tuple[Segment, ...]
    aligned64: bool = False
    perm: bool = False
    outliers: OutlierRule | None = None
    nonfinite: bool = False


class PartSpec(NamedTuple):
    """A part that has to be there; ``bits`` and ``fields`` for packed ones; -1 in a shape is nnz."""

    dtype: str
    shape: tuple[int, ...]
    bits: int = 0
    fields: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightSpec:
    """A weight without its name and its bytes; ``widths`` has one entry per segment, always."""

    scheme: Scheme
    shape: tuple[int, ...]
    dtype: str
    widths: tuple[int, ...]

    def __post_init__(self) -> None:
        """Group sizes that are ``"row"`` become numbers here and nowhere else."""
        if any(segment.row for segment in self.scheme.segments):
            object.__setattr__(self, "scheme", _with_row_sizes(self.scheme, self.widths))

    @property
    def stack(self) -> int:
        """Number of matrices; 1 for a plain weight."""
        return self.shape[0] if len(self.shape) == 3 else 1

    @property
    def out(self) -> int:
        """Rows of one matrix."""
        return self.shape[-2]

    @property
    def columns(self) -> int:
        """Columns, the dimension called ``in`` in the specification."""
        return self.shape[-1]

    def groups(self, k: int) -> int:
        """Number of groups in segment ``k``."""
        return -(-self.widths[k] // self.scheme.segments[k].group_size)

    def parts(self) -> dict[str, PartSpec]:
        """Suffix -> what the part must be."""
        found: dict[str, PartSpec] = {}
        for k in range(len(self.scheme.segments)):
            found.update(self._segment_parts(k))
        if self.scheme.aligned64:
            self._retile(found)
        if self.scheme.perm:
            found["perm"] = PartSpec("I32", (self.columns,))
        if len(self.shape) == 3:
            found = {name: part._replace(shape=(self.shape[0], *part.shape)) for name, part in found.items()}
        if self.scheme.outliers is not None:
            found["outlier_indptr"] = PartSpec("I32", (self.stack * self.out + 1,))
            found["outlier_indices"] = PartSpec("U16" if self.columns <= 65536 else "I32", (-1,))
            found["outlier_values"] = PartSpec(self.scheme.outliers.dtype, (-1,))
        return found

    def _segment_parts(self, k: int) -> dict[str, PartSpec]:
        segment, out, groups, width = self.scheme.segments[k], self.out, self.groups(k), self.widths[k]
        per_group = (out, groups)
        found = {"planes": PartSpec("I32", (segment.bits, out, words_for(width, 1)), 1, width)}
        for name, kind in segment.numbers().items():
            found.update(_number_parts(name, kind, out, groups))
        if isinstance(segment.zero, PackedZero):
            bits = segment.zero.bits
            found["zero"] = PartSpec("I32", (out, words_for(groups, bits)), bits, groups)
        elif isinstance(segment.zero, str):
            found["zero"] = PartSpec(segment.zero, per_group)
        if segment.alpha is not None:
            for p in (segment.bits, *segment.precisions):
                suffix = "" if p == segment.bits else f"_p{p}"
                found[f"alpha{suffix}"] = PartSpec(segment.alpha, (p, out, groups))
                if segment.bias is not None:
                    found[f"bias{suffix}"] = PartSpec(segment.bias, per_group)
        return {f"s{k}_{name}": part for name, part in found.items()}

    def _retile(self, found: dict[str, PartSpec]) -> None:
        """The parts of annex A in place of those they replace."""
        for name in ("s0_planes", "s1_planes", "s0_zero", "s0_scale_codes"):
            found.pop(name, None)
        tiles = self.columns // 64
        found["tile"] = PartSpec("I32", (self.out, tiles, 4))
        found["tile_extra"] = PartSpec("I32", (self.out, tiles))
        found["tile_meta"] = PartSpec("U16", (self.out, tiles))
        found["s0_scale_zero"] = PartSpec("U8", found["s0_scale_scale"].shape)


def _number_parts(name: str, kind: str | SecondOrder, out: int, groups: int) -> dict[str, PartSpec]:
    if isinstance(kind, str):
        return {name: PartSpec("U8" if kind in BYTE_FLOATS else kind, (out, groups))}
    shared = (-(-out // kind.rows), -(-groups // kind.groups))
    found = {f"{name}_codes": PartSpec("U8", (out, groups)), f"{name}_scale": PartSpec(kind.scale, shared)}
    if isinstance(kind.bits, int):
        found[f"{name}_codes"] = PartSpec("I32", (out, words_for(groups, kind.bits)), kind.bits, groups)
        if kind.zero == "packed":
            words = words_for(shared[1], kind.bits)
            found[f"{name}_zero"] = PartSpec("I32", (shared[0], words), kind.bits, shared[1])
    if isinstance(kind.zero, str) and kind.zero != "packed":
        found[f"{name}_zero"] = PartSpec(kind.zero, shared)
    return found


@functools.lru_cache(maxsize=256)
def _with_row_sizes(scheme: Scheme, widths: tuple[int, ...]) -> Scheme:
    if len(widths) != len(scheme.segments):
        return scheme  # BCQ-V211 will say so
    pairs = zip(scheme.segments, widths, strict=True)
    return replace(scheme, segments=tuple(replace(s, group_size=width) if s.row else s for s, width in pairs))


def sized(group_size: int | str) -> dict[str, Any]:
    """The fields of a :class:`Segment` for a group size that may be ``"row"``."""
    return {"group_size": 0, "row": True} if group_size == "row" else {"group_size": group_size}


def part_prefix(name: str) -> str:
    """The prefix P of a weight's parts (section 6)."""
    stem = name.removesuffix(".weight")
    return f"{stem}.bcq_" if stem != name and stem else f"{name}_bcq_"


def features_of(specs: Iterable[WeightSpec]) -> list[str]:
    """The features that weights use, sorted (section 5.4)."""
    used: set[str] = set()
    kinds = {(id(spec.scheme), len(spec.shape)): spec for spec in specs}  # many weights, few schemes
    for spec in kinds.values():
        scheme = spec.scheme
        flags = {
            "aligned64": scheme.aligned64,
            "multi-precision": any(segment.precisions for segment in scheme.segments),
            "nonfinite": scheme.nonfinite,
            "outliers": scheme.outliers is not None,
            "perm": scheme.perm,
            "segments": len(scheme.segments) > 1,
            "stack": len(spec.shape) == 3,
        }
        used.update(name for name, on in flags.items() if on)
        for segment in scheme.segments:
            used.update({segment.encoding} - {"affine"})
            for name, kind in segment.numbers().items():
                if isinstance(kind, SecondOrder):
                    used.add("second-order" if name == "scale" else "second-order-offset")
                    used.update({"super-groups"} if kind.groups > 1 else ())
                used.update({"byte-floats"} if byte_type(kind) else ())
    return sorted(used)


def byte_type(kind: str | SecondOrder) -> str:
    """The type of scales, offsets or codes that are bytes of a type; empty for others."""
    found = kind.bits if isinstance(kind, SecondOrder) else kind
    return found if isinstance(found, str) and found in BYTE_FLOATS else ""
