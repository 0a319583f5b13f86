"""The descriptor of a file: JSON <-> schemes and weights, strict and canonical (spec section 5)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from bcqfmt import limits
from bcqfmt.container.dtypes import FLOATS
from bcqfmt.container.strict_json import JsonFault, canonical, parse
from bcqfmt.errors import Finding, Sink, escape
from bcqfmt.weight.scheme import FEATURES, Scheme, WeightSpec, features_of
from bcqfmt.weight.scheme_json import (
    Misfit,
    entry_json,
    expect,
    expect_keys,
    integer,
    is_int,
    one_of,
    scheme_json,
    scheme_of,
)

VERSION = "1.0"
_VERSION = re.compile(r"(0|[1-9][0-9]*)\.(0|[1-9][0-9]*)")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:+-]*")
_WRONG = 1000  # wrong entries of a table, after which the rest is not looked at


@dataclass(slots=True)
class Descriptor:
    """What a file says about itself."""

    version: str = VERSION
    weights: dict[str, WeightSpec] = field(default_factory=dict)
    ignorable: dict[str, Any] | None = None
    unreadable: list[str] = field(default_factory=list)  # weights whose entries were refused


# -- to JSON ---------------------------------------------------------------------------------------------------


def tables_json(weights: Mapping[str, WeightSpec]) -> tuple[list[Any], dict[str, Any]]:
    """The scheme table, sorted by its text so that it does not depend on the order of weights, and the entries."""
    texts = {id(spec.scheme): canonical(scheme_json(spec.scheme)) for spec in weights.values()}
    table = {text: scheme_json(spec.scheme) for spec in weights.values() for text in (texts[id(spec.scheme)],)}
    position = {text: i for i, text in enumerate(sorted(table))}
    entries = {name: entry_json(spec, position[texts[id(spec.scheme)]]) for name, spec in weights.items()}
    return [table[text] for text in sorted(table)], entries


def descriptor_json(descriptor: Descriptor) -> str:
    """The canonical text that goes into ``__metadata__``."""
    schemes, weights = tables_json(descriptor.weights)
    found: dict[str, Any] = {
        "version": descriptor.version,
        "features": features_of(descriptor.weights.values()),
        "schemes": schemes,
        "weights": weights,
    }
    if descriptor.ignorable is not None:
        found["ignorable"] = descriptor.ignorable
    return canonical(found)


# -- from JSON -------------------------------------------------------------------------------------------------


def parse_descriptor(text: str, file: str, sink: Sink) -> Descriptor | None:
    """The descriptor, or None when nothing of it can be relied on; faults go to the sink."""

    def report(code: str, found: str, expected: str = "", weight: str = "") -> None:
        sink(Finding(code, file, weight, found, expected))

    try:
        value = parse(text.encode("utf-8", "surrogatepass"))
        if not isinstance(value, dict):
            raise JsonFault("json", f"a {type(value).__name__}")
    except JsonFault as fault:
        report("BCQ-V203", fault.detail, "a JSON object without duplicate keys")
        return None
    if not check_version(value, report) or not known_features(value, report):
        return None
    try:
        expect_keys(value, {"version", "features", "schemes", "weights"}, {"ignorable"}, "descriptor")
        expect_tables(value, "descriptor")
    except Misfit as misfit:
        report("BCQ-V208", str(misfit))
        return None
    schemes = parse_schemes(value["schemes"], report)
    entries = parse_entries(value["weights"], report)
    if canonical(value) != text:
        report("BCQ-V204", "another spelling of the same JSON", "canonical JSON")
    weights = parse_weights(entries, schemes, report)
    unreadable = [name for name in value["weights"] if name not in weights]
    descriptor = Descriptor(value["version"], weights, value.get("ignorable"), unreadable)
    if not unreadable:
        check_tables(value["features"], value["schemes"], value["weights"], weights, report)
    return descriptor


def check_version(value: Mapping[str, Any], report: Any) -> bool:
    """BCQ-V205, before anything else is looked at."""
    version = value.get("version")
    match = _VERSION.fullmatch(version) if isinstance(version, str) else None
    if match is None or match[1] != "1":
        found = f"version {escape(str(version), 40)}" if isinstance(version, str) else "no version that is a text"
        report("BCQ-V205", found if "version" in value else "no version", "1.x")
        return False
    return True


def known_features(value: Mapping[str, Any], report: Any) -> bool:
    """BCQ-V206, before other keys; a feature that is not known may change the meaning of anything."""
    features = value.get("features")
    names = [name for name in features if isinstance(name, str)] if isinstance(features, list) else []
    unknown = [escape(name, 40) for name in names if name not in FEATURES]
    if unknown:
        report("BCQ-V206", ", ".join(unknown[:8]), f"one of {', '.join(FEATURES)}")
    return not unknown


def expect_tables(value: Mapping[str, Any], where: str) -> None:
    """The types of what descriptor and manifest share; :class:`Misfit` when one is another."""
    if not all(isinstance(name, str) for name in expect(value, "features", list, where)):
        raise Misfit("features is not an array of strings")
    expect(value, "schemes", list, where)
    expect(value, "weights", dict, where)
    if "ignorable" in value:
        expect(value, "ignorable", dict, where)


def check_tables(features: Any, schemes: Any, entries: Any, weights: Mapping[str, WeightSpec], report: Any) -> None:
    """BCQ-V207 and the whole-table half of BCQ-V209."""
    used = features_of(weights.values())
    if features != used:
        report("BCQ-V207", f"features {features}", f"{used}")
    if len(schemes) > len(entries):
        found = f"{len(schemes):,} schemes for {len(entries):,} weights"
        report("BCQ-V209", found, "every scheme in use")
        return
    numbers = {entry["scheme"] for entry in entries.values()}
    if numbers != set(range(len(schemes))):
        report(
            "BCQ-V209", f"scheme {min(set(range(len(schemes))) - numbers)} is used by no weight", "every scheme in use"
        )
    if len({canonical(scheme) for scheme in schemes}) != len(schemes):
        report("BCQ-V209", "two equal schemes", "each scheme once")


def parse_schemes(values: list[Any], report: Any) -> list[Scheme | None]:
    """Schemes by position; None for one that does not fit."""
    schemes: list[Scheme | None] = []
    wrong = 0
    for i, value in enumerate(values):
        try:
            schemes.append(scheme_of(value, f"schemes[{i}]"))
        except Misfit as misfit:
            report("BCQ-V208", str(misfit))
            schemes.append(None)
            wrong += 1
        if wrong == _WRONG:
            left = len(values) - len(schemes)
            report("BCQ-V208", f"{left:,} more schemes, which are not looked at")
            return schemes + [None] * left
    return schemes


def parse_entries(entries: Mapping[str, Any], report: Any, extra: Iterable[str] = ()) -> dict[str, Any]:
    """BCQ-V208: the weight entries that fit their table; the others are reported and left out."""
    found: dict[str, Any] = {}
    for i, (name, entry) in enumerate(entries.items()):
        try:
            _check_entry(entry, f"weights.{escape(name)}", set(extra))
            found[name] = entry
        except Misfit as misfit:
            report("BCQ-V208", str(misfit), "", name)
            if i + 1 - len(found) == _WRONG:
                report("BCQ-V208", f"{len(entries) - i - 1:,} more weights, which are not looked at")
                break
    return found


def parse_weights(entries: Mapping[str, Any], schemes: list[Scheme | None], tell: Any) -> dict[str, WeightSpec]:
    """Weights by name; those that cannot be understood are reported and left out."""
    wrong = 0

    def report(*said: str) -> None:
        nonlocal wrong
        wrong += 1
        tell(*said)

    weights: dict[str, WeightSpec] = {}
    for i, (name, entry) in enumerate(entries.items()):
        if wrong == _WRONG:
            tell("BCQ-V208", f"{len(entries) - i:,} more weights, which are not looked at")
            break
        if not allowed_name(name):
            report("BCQ-V213", f"'{escape(name)}'", "letters, digits and _.:+-, at most 480", name)
            continue
        if entry["scheme"] >= len(schemes):
            report("BCQ-V209", f"scheme {entry['scheme']}", f"0..{len(schemes) - 1}", name)
            continue
        scheme = schemes[entry["scheme"]]
        if scheme is None:
            continue
        shape = tuple(entry["shape"])
        several = len(scheme.segments) > 1
        if several != ("widths" in entry):
            report(
                "BCQ-V211",
                "widths present" if "widths" in entry else "no widths",
                "widths with two or more segments only",
                name,
            )
            continue
        widths = tuple(entry["widths"]) if several else shape[-1:]
        weights[name] = WeightSpec(scheme=scheme, shape=shape, dtype=entry["dtype"], widths=widths)
    return weights


def allowed_name(name: str) -> bool:
    """Whether a weight may have this name (BCQ-V213)."""
    return bool(_NAME.fullmatch(name)) and ".." not in name and len(name) <= limits.MAX_WEIGHT_NAME_BYTES


def reserved_name(name: str) -> bool:
    """Whether a dense tensor cannot have this name: too long, or one that the format gives a meaning (BCQ-V302)."""
    return (
        name == "__metadata__"
        or ".bcq_" in name
        or "_bcq_" in name
        or len(name.encode("utf-8", "surrogatepass")) > limits.MAX_NAME_BYTES
    )


def _check_entry(entry: Any, where: str, extra: set[str]) -> None:
    expect_keys(entry, {"scheme", "shape", "dtype"} | extra, {"widths"}, where)
    for key in ("shape", "widths"):
        if key in entry:
            values = expect(entry, key, list, where)
            if not all(is_int(v) and v >= 0 for v in values):
                raise Misfit(f"{where}.{key} is not an array of integers from 0 on")
    one_of(entry, "dtype", FLOATS, where)
    integer(entry, "scheme", 0, limits.MAX_JSON_INTEGER, where)
