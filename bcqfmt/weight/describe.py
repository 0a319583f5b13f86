"""Schemes and parts in words, for tables."""

from __future__ import annotations

from math import prod
from typing import Final

from .scheme import PackedZero, Scheme, SecondOrder, Segment, WeightSpec

PART_KINDS: Final = ("planes", "scales", "zeros", "offsets", "alphas", "biases", "perm", "outliers", "tiles")


def part_kind(suffix: str) -> str:
    """The kind of a part by its suffix: ``s0_scale_codes`` -> ``scales``."""
    if suffix == "perm":
        return "perm"
    if suffix.startswith(("tile", "outlier")):
        return "tiles" if suffix.startswith("tile") else "outliers"
    kind = suffix.partition("_")[2]
    return next(known for known in PART_KINDS if known.startswith(kind.partition("_")[0]))


def spare_bits(spec: WeightSpec) -> int:
    """Bits of a weight that hold no number of it: ends of packed words, the column order, pointers to outlier rows."""
    found = 0
    for name, part in spec.parts().items():
        if name in ("perm", "outlier_indptr"):
            found += 32 * prod(part.shape)
        elif part.bits:
            found += prod(part.shape[:-1]) * (32 * part.shape[-1] - part.bits * part.fields)
    return found


def scheme_text(scheme: Scheme) -> str:
    """A scheme in one line."""
    flags = ["perm"] if scheme.perm else []
    if scheme.outliers is not None:
        flags.append(f"outliers {scheme.outliers.mode} {scheme.outliers.dtype}")
    flags += [name for name, on in (("aligned64", scheme.aligned64), ("nonfinite", scheme.nonfinite)) if on]
    return ", ".join([" + ".join(segment_text(segment) for segment in scheme.segments), *flags])


def segment_text(segment: Segment) -> str:
    """A segment in a few words: encoding, q, g, types."""
    words = [segment.encoding, f"q={segment.bits}", f"g={segment.group_size}"]
    words += [f"{name}={_number_text(kind)}" for name, kind in segment.numbers().items()]
    if segment.zero is not None:
        words.append(f"zero={segment.zero.bits}bit" if isinstance(segment.zero, PackedZero) else f"zero={segment.zero}")
    if segment.table:
        words.append(f"table={min(segment.table)}..{max(segment.table)}")
        words += [f"*2^{segment.table_exponent}"] if segment.table_exponent else []
    types = {"alpha": segment.alpha, "bias": segment.bias}
    words += [f"{name}={dtype}" for name, dtype in types.items() if dtype is not None]
    if segment.precisions:
        words.append("p=" + ",".join(map(str, segment.precisions)))
    return " ".join(words)


def _number_text(kind: str | SecondOrder) -> str:
    if isinstance(kind, str):
        return kind
    codes = kind.bits if isinstance(kind.bits, str) else f"{kind.bits}bit"
    shared = f"{kind.rows}rows" + (f"x{kind.groups}groups" if kind.groups > 1 else "")
    return f"{codes}*{kind.scale}/{shared}"
