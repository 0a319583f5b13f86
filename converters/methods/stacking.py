"""Weights of equal matrices as one stack ``[E, out, in]``: fused experts are quantized one by one and stored as one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from bcqfmt.container.dtypes import float64_of, round_to
from bcqfmt.errors import error
from bcqfmt.weight.build import minimal_zeros, wrap
from bcqfmt.weight.packing import pack, unpack
from bcqfmt.weight.scheme import PackedZero, Segment, WeightSpec
from bcqfmt.weight.weight import BcqWeight

Array = npt.NDArray[Any]
Parts = dict[str, Array]

_FIELDS = ("alpha", "bias")  # numbers whose type a method may widen from one matrix to the next
_OUTLIERS = ("outlier_indptr", "outlier_indices", "outlier_values")


def stack(weights: Sequence[BcqWeight]) -> BcqWeight:
    """One weight ``[E, out, in]`` out of E weights ``[out, in]`` of equal shape, dtype and scheme, in their order.

    Two details may differ, because they depend on the numbers, and are widened to what holds them all: the width of
    stored zero points (constant ones count as stored), and the types of plane scales and biases. Anything else is
    refused with BCQ-E305. Every value stays what it was.
    """
    if not weights:
        raise error("BCQ-E302", found="no weights", expected="at least one")
    specs = [weight.spec for weight in weights]
    shared = _shared([spec.scheme.segments for spec in specs])
    first = replace(specs[0], scheme=replace(specs[0].scheme, segments=shared))
    for spec in specs:
        if len(spec.shape) != 2 or _adapted(spec, shared) != first:
            raise _unequal(weights[0], spec)
    parts = [_fitted(weight, shared) for weight in weights]
    joined: Parts = {}
    for suffix in parts[0]:
        if suffix not in _OUTLIERS:
            joined[suffix] = np.stack([part[suffix] for part in parts])
    if specs[0].scheme.outliers is not None:
        joined |= _outliers(parts)
    spec, arrays = minimal_zeros(replace(first, shape=(len(weights), *first.shape)), joined)
    return BcqWeight("", spec, wrap(spec, arrays))


def _shared(lists: list[tuple[Segment, ...]]) -> tuple[Segment, ...]:
    """Segments that hold the numbers of all; those of the first where the others differ in more than that."""
    found = []
    for k, segment in enumerate(lists[0]):
        peers = [segments[k] for segments in lists if k < len(segments)]
        zeros = [one.zero for one in peers]
        if all(isinstance(zero, int | PackedZero) for zero in zeros) and len(set(zeros)) > 1:
            segment = replace(segment, zero=PackedZero(max(_width(zero) for zero in zeros)))
        alpha, bias = _widest([one.alpha for one in peers]), _widest([one.bias for one in peers])
        found.append(replace(segment, alpha=alpha, bias=bias))
    return tuple(found)


def _adapted(spec: WeightSpec, shared: tuple[Segment, ...]) -> WeightSpec:
    """The spec with zero points and types as in the shared segments, where it has their kind."""
    segments = list(spec.scheme.segments)
    for k, (own, common) in enumerate(zip(segments, shared, strict=False)):
        integer = isinstance(own.zero, int | PackedZero) and isinstance(common.zero, int | PackedZero)
        segments[k] = replace(
            own,
            zero=common.zero if integer else own.zero,
            alpha=common.alpha if own.alpha else None,
            bias=common.bias if own.bias else None,
        )
    return replace(spec, scheme=replace(spec.scheme, segments=tuple(segments)))


def _widest(kinds: list[str | None]) -> str | None:
    """The type that holds the numbers of all; the first one's where some have none."""
    return kinds[0] if len(set(kinds)) == 1 or None in kinds else "F32"


def _width(zero: Any) -> int:
    """Bits that hold a declared zero point."""
    return zero.bits if isinstance(zero, PackedZero) else max(1, int(zero).bit_length())


def _fitted(weight: BcqWeight, shared: tuple[Segment, ...]) -> Parts:
    """The parts of a weight, rewritten for the shared segments as far as these ask for it."""
    arrays = {suffix: part.array() for suffix, part in weight.parts().items()}
    for k, (own, common) in enumerate(zip(weight.scheme.segments, shared, strict=False)):
        if own.zero != common.zero and isinstance(common.zero, PackedZero):
            arrays[f"s{k}_zero"] = pack(_zeros(weight.spec, own, arrays, k), common.zero.bits)
        for field in _FIELDS:
            kind = getattr(common, field)
            if kind is not None and getattr(own, field) not in (kind, None):
                for suffix in [name for name in arrays if name.startswith(f"s{k}_{field}")]:
                    arrays[suffix] = round_to(float64_of(arrays[suffix]), kind)
    return arrays


def _zeros(spec: WeightSpec, segment: Segment, arrays: Parts, k: int) -> Array:
    groups = spec.groups(k)
    if isinstance(segment.zero, PackedZero):
        return unpack(arrays[f"s{k}_zero"], segment.zero.bits, groups)
    return np.full((spec.out, groups), segment.zero, np.uint16)


def _outliers(parts: list[Parts]) -> Parts:
    """CSR arrays one after the other."""
    ends = np.cumsum([0, *(part["outlier_indices"].size for part in parts)])
    indptr = [part["outlier_indptr"][1:].astype(np.int64) + end for part, end in zip(parts, ends, strict=False)]
    if ends[-1] > np.iinfo(np.int32).max:
        raise error("BCQ-E302", found=f"{ends[-1]} outliers", expected="at most 2^31-1 in a stack")
    return {
        "outlier_indptr": np.concatenate([[0], *indptr]).astype(np.int32),
        "outlier_indices": np.concatenate([part["outlier_indices"] for part in parts]),
        "outlier_values": np.concatenate([part["outlier_values"] for part in parts]),
    }


def _unequal(first: BcqWeight, other: WeightSpec) -> Exception:
    found = f"a weight of shape {list(other.shape)}, {other.dtype}, {_words(other)}"
    expected = f"{list(first.shape)}, {first.dtype}, {_words(first.spec)}, like the first of the stack"
    return error("BCQ-E305", tensor=first.name, found=found, expected=expected)


def _words(spec: WeightSpec) -> str:
    segments = " + ".join(f"{s.encoding} q={s.bits} g={s.group_size}" for s in spec.scheme.segments)
    extras = [name for name in ("aligned64", "perm", "outliers", "nonfinite") if getattr(spec.scheme, name)]
    return ", ".join([segments, *extras])
