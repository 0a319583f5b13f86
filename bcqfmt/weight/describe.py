"""Schemes and parts in words, for tables."""

from __future__ import annotations

from typing import Final

from .scheme import PackedZero, Scheme, SecondOrder, Segment

__all__ = ["PART_KINDS", "part_kind", "scheme_text", "segment_text"]

PART_KINDS: Final = ("planes", "scales", "zeros", "offsets", "alphas", "biases", "perm", "outliers", "tiles")
_KIND: Final = {"planes": "planes", "zero": "zeros", "offset": "offsets"}


def part_kind(suffix: str) -> str:
    """The kind of a part by its suffix: ``s0_scale_codes`` -> ``scales``."""
    if suffix == "perm":
        return "perm"
    if suffix.startswith(("tile", "outlier")):
        return "tiles" if suffix.startswith("tile") else "outliers"
    kind = suffix.partition("_")[2]
    for start in ("scale", "alpha"):
        if kind.startswith(start):
            return f"{start}s"
    return "biases" if kind.startswith("bias") else _KIND[kind]


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
    if isinstance(segment.scale, SecondOrder):
        order = segment.scale
        words.append(f"scale={order.bits}bit*{order.scale}/{order.rows}rows")
    elif segment.scale is not None:
        words.append(f"scale={segment.scale}")
    if segment.zero is not None:
        words.append(f"zero={segment.zero.bits}bit" if isinstance(segment.zero, PackedZero) else f"zero={segment.zero}")
    types = {"offset": segment.offset, "alpha": segment.alpha, "bias": segment.bias}
    words += [f"{name}={dtype}" for name, dtype in types.items() if dtype is not None]
    if segment.precisions:
        words.append("p=" + ",".join(map(str, segment.precisions)))
    return " ".join(words)
