"""Schemes and weight entries as JSON, and the typed getters that strict readers of JSON share (spec section 5)."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from bcqfmt import limits
from bcqfmt.container.dtypes import FLOATS
from bcqfmt.container.strict_json import canonical
from bcqfmt.errors import escape

from .scheme import BYTE_FLOATS, ENCODINGS, OutlierRule, PackedZero, Scheme, SecondOrder, Segment, WeightSpec, sized


class Misfit(Exception):
    """A JSON value that does not fit the schema; the message says where and why."""


def scheme_json(scheme: Scheme) -> dict[str, Any]:
    """The JSON object of a scheme."""
    found: dict[str, Any] = {"segments": [_segment_json(segment) for segment in scheme.segments]}
    if scheme.aligned64:
        found["layout"] = "aligned64"
    if scheme.perm:
        found["perm"] = True
    if scheme.outliers is not None:
        found["outliers"] = {**scheme.outliers._asdict(), "segments": list(scheme.outliers.segments)}
    if scheme.nonfinite:
        found["nonfinite"] = True
    return found


def entry_json(spec: WeightSpec, scheme: Any) -> dict[str, Any]:
    """The JSON object of a weight; ``scheme`` is a position in a table, or the scheme itself."""
    found = {"scheme": scheme, "shape": list(spec.shape), "dtype": spec.dtype}
    if len(spec.widths) > 1:
        found["widths"] = list(spec.widths)
    return found


def resolved_json(spec: WeightSpec) -> dict[str, Any]:
    """A weight entry with the scheme written out, so that it depends on no scheme table."""
    return entry_json(spec, scheme_json(spec.scheme))


def digest_of(spec: WeightSpec, parts: Mapping[str, tuple[str, tuple[int, ...], str]]) -> str:
    """The digest of a weight (section 9.4); ``parts``: suffix -> (dtype, shape, SHA-256 of its bytes)."""
    lines = [canonical(resolved_json(spec))]
    for suffix in sorted(parts):
        dtype, shape, digest = parts[suffix]
        lines.append(f"{suffix} {dtype} {','.join(map(str, shape))} {digest}")
    return hashlib.sha256(("\n".join(lines) + "\n").encode("ascii")).hexdigest()


def _segment_json(segment: Segment) -> dict[str, Any]:
    found: dict[str, Any] = {
        "encoding": segment.encoding,
        "bits": segment.bits,
        "group_size": "row" if segment.row else segment.group_size,
        "scale": _number_json(segment.scale),
        "zero": segment.zero._asdict() if isinstance(segment.zero, PackedZero) else segment.zero,
        "offset": _number_json(segment.offset),
        "table": list(segment.table) or None,
        "table_exponent": segment.table_exponent or None,
        "alpha": segment.alpha,
        "bias": segment.bias,
        "precisions": list(segment.precisions) or None,
    }
    return {key: value for key, value in found.items() if value is not None}


def _number_json(kind: str | SecondOrder | None) -> Any:
    if not isinstance(kind, SecondOrder):
        return kind
    found = {"rows": kind.rows, "scale": kind.scale}
    found |= {"codes": kind.bits} if isinstance(kind.bits, str) else {"bits": kind.bits, "zero": kind.zero}
    return found if kind.groups == 1 else {**found, "groups": kind.groups}


def scheme_of(value: Any, where: str) -> Scheme:
    """A scheme of its JSON object; :class:`Misfit` when it is none."""
    expect_keys(value, {"segments"}, {"layout", "perm", "outliers", "nonfinite"}, where)
    segments = expect(value, "segments", list, where)
    if not 1 <= len(segments) <= limits.MAX_SEGMENTS:
        raise Misfit(f"{where}.segments has {len(segments)} entries, not 1..{limits.MAX_SEGMENTS}")
    for key, only in (("layout", "aligned64"), ("perm", True), ("nonfinite", True)):
        if key in value and (value[key] != only or type(value[key]) is not type(only)):
            raise Misfit(f"{where}.{key} is not {only!r}")
    outliers = None
    if "outliers" in value:
        rule, place = expect(value, "outliers", dict, where), f"{where}.outliers"
        expect_keys(rule, {"mode", "dtype", "segments"}, set(), place)
        chosen = _rising(rule, "segments", 0, len(segments) - 1, place)
        outliers = OutlierRule(
            one_of(rule, "mode", ("add", "replace"), place), one_of(rule, "dtype", FLOATS, place), chosen
        )
    return Scheme(
        segments=tuple(_segment(s, f"{where}.segments[{k}]") for k, s in enumerate(segments)),
        aligned64="layout" in value,
        perm="perm" in value,
        outliers=outliers,
        nonfinite="nonfinite" in value,
    )


def _segment(value: Any, where: str) -> Segment:
    if not isinstance(value, dict):
        raise Misfit(f"{where} is not an object")
    encoding = one_of(value, "encoding", ENCODINGS, where)
    keys = {"encoding", "bits", "group_size"}
    bits = integer(value, "bits", 1, 8, where)
    size = sized("row" if value.get("group_size") == "row" else integer(value, "group_size", 8, limits.MAX_DIM, where))
    if encoding == "bcq":
        expect_keys(value, keys | {"alpha"}, {"bias", "precisions"}, where)
        return Segment(
            encoding=encoding,
            bits=bits,
            **size,
            alpha=one_of(value, "alpha", FLOATS, where),
            bias=one_of(value, "bias", FLOATS, where) if "bias" in value else None,
            precisions=_rising(value, "precisions", 1, bits - 1, where) if "precisions" in value else (),
        )
    second = {"affine": "zero", "float-zero": "zero"}.get(encoding, encoding)
    expect_keys(value, keys | {"scale", second}, {"table_exponent"} if encoding == "table" else set(), where)
    zero: int | str | PackedZero | None = None
    if encoding == "affine":
        zero = _zero(value, bits, where)
    elif encoding == "float-zero":
        zero = one_of(value, "zero", FLOATS, where)
    return Segment(
        encoding=encoding,
        bits=bits,
        **size,
        scale=_number(value, "scale", where),
        zero=zero,
        offset=_number(value, "offset", where) if encoding == "offset" else None,
        table=_table(value, bits, where) if encoding == "table" else (),
        table_exponent=integer(value, "table_exponent", -126, -1, where) if "table_exponent" in value else 0,
    )


def _zero(value: Mapping[str, Any], bits: int, where: str) -> int | PackedZero:
    if isinstance(value["zero"], dict):
        expect_keys(value["zero"], {"bits"}, set(), f"{where}.zero")
        return PackedZero(integer(value["zero"], "bits", 1, bits + 1, f"{where}.zero"))
    return integer(value, "zero", 0, 2**bits, where)


def _table(value: Mapping[str, Any], bits: int, where: str) -> tuple[int, ...]:
    found = expect(value, "table", list, where)
    if len(found) != 2**bits or not all(is_int(v) and abs(v) <= 2**28 for v in found):
        raise Misfit(f"{where}.table is not an array of {2**bits} integers in -2^28..2^28")
    return tuple(found)


def _number(value: Mapping[str, Any], key: str, where: str) -> str | SecondOrder:
    """A scale or offset: a type or a second-order object."""
    order, place = value[key], f"{where}.{key}"
    if not isinstance(order, dict):
        return one_of(value, key, (*FLOATS, *BYTE_FLOATS), where)
    coded = "codes" in order
    expect_keys(order, {"rows", "scale"} | ({"codes"} if coded else {"bits", "zero"}), {"groups"}, place)
    zero: int | str = 0
    bits: int | str = one_of(order, "codes", BYTE_FLOATS, place) if coded else integer(order, "bits", 1, 8, place)
    if isinstance(bits, int):
        constant = not isinstance(order["zero"], str)
        zero = (
            integer(order, "zero", 0, 2**bits, place) if constant else one_of(order, "zero", ("packed", *FLOATS), place)
        )
    return SecondOrder(
        bits,
        integer(order, "rows", 1, limits.MAX_DIM, place),
        one_of(order, "scale", FLOATS, place),
        zero,
        integer(order, "groups", 2, limits.MAX_DIM, place) if "groups" in order else 1,
    )


# -- small typed getters ---------------------------------------------------------------------------------------


def expect_keys(value: Any, required: set[str], optional: set[str], where: str) -> None:
    """Exactly these keys."""
    if not isinstance(value, dict):
        raise Misfit(f"{where} is not an object")
    missing, unknown = required - value.keys(), value.keys() - required - optional
    if missing:
        raise Misfit(f"{where} lacks {', '.join(sorted(missing))}")
    if unknown:
        raise Misfit(f"{where} has the unknown key {', '.join(escape(k, 40) for k in sorted(unknown)[:3])}")


def expect(value: Mapping[str, Any], key: str, kind: type, where: str) -> Any:
    """A value of a JSON type."""
    if not isinstance(value[key], kind):
        raise Misfit(
            f"{where}.{key} is not {'an object' if kind is dict else 'an array' if kind is list else 'a string'}"
        )
    return value[key]


def integer(value: Mapping[str, Any], key: str, low: int, high: int, where: str) -> int:
    """An integer (not a boolean) in a range."""
    found: Any = value.get(key)
    if not is_int(found) or not low <= found <= high:
        raise Misfit(f"{where}.{key} is not an integer in {low}..{high}")
    return int(found)


def one_of(value: Mapping[str, Any], key: str, allowed: tuple[str, ...], where: str) -> str:
    """One of some strings."""
    found = value.get(key)
    if not isinstance(found, str) or found not in allowed:
        raise Misfit(f"{where}.{key} is not one of {', '.join(allowed)}")
    return found


def _rising(value: Mapping[str, Any], key: str, low: int, high: int, where: str) -> tuple[int, ...]:
    found = expect(value, key, list, where)
    if not found or not all(is_int(v) and low <= v <= high for v in found) or sorted(set(found)) != found:
        raise Misfit(f"{where}.{key} is not a rising array of integers in {low}..{high}")
    return tuple(found)


def is_int(value: Any) -> bool:
    """A JSON integer; true and false are none."""
    return isinstance(value, int) and not isinstance(value, bool)
