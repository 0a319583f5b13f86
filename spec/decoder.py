"""A decoder and checker for BCQ 1.0, written from the texts of bcq-1.0.md and provenance-1.0.md alone.

It is for comparison and for porting: slow, plain, standard Python. Every function names the section that it
implements, every refusal names the rule that is broken.

    python decoder.py FILE-OR-FOLDER
"""

import hashlib
import json
import math
import os
import re
import stat
import struct
import sys
from collections.abc import Collection
from itertools import pairwise
from pathlib import Path
from typing import Any

Part = tuple[str, tuple[int, ...], bytes]  # dtype, shape, raw bytes
Shapes = dict[str, tuple[str, list[int]]]  # name without P -> dtype, shape
Weight = dict[str, Any]  # name, file, shape, dtype, widths (or None), scheme, parts (name without P -> Part)

MAX_INTEGER = 2**53 - 1
MAX_DIM = 2**31 - 1
MAX_JSON_FILE = 100_000_000
MAX_JSON_ITEMS = 2_000_000
FLOATS = ("F16", "BF16", "F32")
BYTE_FLOATS = ("E8M0", "UE4M3")
BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "I64": 64, "U64": 64, "F64": 64, "C64": 64, "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4,
}  # fmt: skip
FEATURES = {
    "aligned64", "bcq", "byte-floats", "float-zero", "multi-precision", "nonfinite", "offset", "outliers", "perm",
    "second-order", "second-order-offset", "segments", "stack", "super-groups", "table",
}  # fmt: skip


class Refused(Exception):
    """A rule is broken; `rule` is its id, for example BCQ-V113."""

    def __init__(self, rule: str, message: str) -> None:
        super().__init__(f"{rule}: {message}")
        self.rule = rule


def need(condition: bool, rule: str, message: str) -> None:
    """Refuses unless the condition holds."""
    if not condition:
        raise Refused(rule, message)


def is_int(value: Any, low: int = 0, high: int = MAX_INTEGER) -> bool:
    """An integer in low..high; true and false are no integers."""
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def ceil_div(a: int, b: int) -> int:
    """ceil(a / b)."""
    return -(-a // b)


# ---- Section 4: JSON texts


def canonical(obj: Any) -> str:
    """Section 4, canonical JSON. Python's encoder escapes exactly the characters that the section names."""
    return json.dumps(obj, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def json_depth(text: str) -> int:
    """The deepest nesting of arrays and objects; strings are stepped over."""
    depth = deepest = 0
    for match in re.finditer(r'"(?:[^"\\]++|\\.)*+"?|[\[{]|[\]}]', text, re.DOTALL):
        if match[0] in "[{":
            depth += 1
            deepest = max(deepest, depth)
        elif match[0] in "]}":
            depth -= 1
    return deepest


def parse_integer(text: str) -> int:
    """An integer that is far too long stands for itself as a value beyond every limit."""
    if len(text) > 20:
        return -(2**60) if text[0] == "-" else 2**60
    return int(text)


def parse_json(data: bytes, rules: tuple[str, str, str], kind: str = "limited") -> dict[str, Any]:
    """Section 4. One JSON object; `rules` are broken by bad text, by bad form and by duplicate keys.

    kind: "header" (section 3: no -0, nothing but spaces after it), "limited" (section 4), "numbers" (index and
    archived headers: numbers of any kind), "config" (config.json: the same, NaN and infinities too, 100 levels).
    """
    text_rule, form_rule, duplicate_rule = rules
    duplicates: list[str] = []

    def number(text: str) -> int | float:
        if kind in ("numbers", "config") and not text.lstrip("-").isdigit():
            return float(text)
        value = parse_integer(text) if text.lstrip("-").isdigit() else None
        limited = kind in ("header", "limited") and not is_int(value, -MAX_INTEGER)
        if value is None or limited or (kind == "header" and text == "-0"):
            raise ValueError(f"the number {text[:40]} is not allowed here")
        return value

    def constant(text: str) -> float:
        if kind != "config":
            raise ValueError(f"{text} is not JSON")
        return float(text.replace("Infinity", "inf"))

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(items)
        if len(result) != len(items):
            duplicates.append("an object has a key twice")
        return result

    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise Refused(text_rule, f"not UTF-8: {error.reason}") from None
    need(json_depth(text) <= (100 if kind == "config" else 16), form_rule, "JSON is nested too deeply")
    reader = json.JSONDecoder(object_pairs_hook=pairs, parse_int=number, parse_float=number, parse_constant=constant)
    start = len(text) - len(text.lstrip(" \t\r\n"))
    try:
        value, end = reader.raw_decode(text, start)
    except (ValueError, RecursionError) as error:
        raise Refused(form_rule, f"not the JSON that is asked for: {error}") from None
    rest = text[end:].strip(" " if kind == "header" else " \t\r\n")
    need(isinstance(value, dict) and not rest, form_rule, "not one JSON object with nothing after it")
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise Refused(text_rule, "a string holds a lone surrogate") from None
    need(not duplicates, duplicate_rule, "an object has the same key twice")
    return dict(value)


# ---- Section 3: container


def read_container(data: bytes, bcq: bool = True) -> tuple[dict[str, Part], dict[str, str]]:
    """Section 3. Returns the tensors and `__metadata__`; V117, V119 and V120 are asked of BCQ files only (V201)."""
    need(len(data) >= 8, "BCQ-V101", "shorter than 8 bytes")
    length = int.from_bytes(data[:8], "little")
    need(2 <= length <= 25_000_000, "BCQ-V102", f"header length {length}")
    need(len(data) >= 8 + length, "BCQ-V103", "the file ends inside the header")
    need(data[8] == 0x7B, "BCQ-V104", "the header does not begin with {")
    header = parse_json(data[8 : 8 + length], ("BCQ-V105", "BCQ-V106", "BCQ-V107"), "header")
    entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
    need(len(entries) <= 200_000, "BCQ-V108", f"{len(entries)} tensors")
    for name, entry in entries.items():
        check_tensor_entry(name, entry)
    check_offsets(entries, len(data) - 8 - length)
    metadata = header.get("__metadata__", {})
    is_map = isinstance(metadata, dict) and all(isinstance(text, str) for text in metadata.values())
    need(is_map and len(metadata) <= 1000, "BCQ-V118", "__metadata__ is no object of strings, or too long")
    if bcq:
        need("bcqfmt" in metadata, "BCQ-V201", "__metadata__ has no key bcqfmt")
        check_alignment(entries, 8 + length)
        check_names(entries)
    tensors = {}
    for name, entry in entries.items():
        begin, end = (8 + length + offset for offset in entry["data_offsets"])
        tensors[name] = (entry["dtype"], tuple(entry["shape"]), data[begin:end])
    return tensors, metadata


def check_alignment(entries: dict[str, Any], start: int) -> None:
    """Section 3, V117."""
    need(start % 8 == 0, "BCQ-V117", "the data does not begin at a multiple of 8")
    for name, entry in entries.items():
        size = max(1, BITS[entry["dtype"]] // 8)
        need(entry["data_offsets"][0] % size == 0, "BCQ-V117", f"{name!a} is not aligned to its element")


def check_tensor_entry(name: str, entry: Any) -> None:
    """Section 3, one entry of the header."""
    good = isinstance(entry, dict) and set(entry) == {"dtype", "shape", "data_offsets"}
    need(good, "BCQ-V109", f"{name!a}: not exactly the keys dtype, shape, data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    good = isinstance(dtype, str) and isinstance(shape, list) and len(shape) <= 16 and all(map(is_int, shape))
    good = good and isinstance(offsets, list) and len(offsets) == 2 and all(map(is_int, offsets))
    need(good and offsets[0] <= offsets[1], "BCQ-V109", f"{name!a}: malformed dtype, shape or data_offsets")
    need(dtype in BITS, "BCQ-V110", f"{name!a}: unknown dtype {dtype!a}")
    need(math.prod(dim for dim in shape if dim) < 2**48, "BCQ-V111", f"{name!a}: too many elements")
    bits = math.prod(shape) * BITS[dtype]
    good = bits % 8 == 0 and offsets[1] - offsets[0] == bits // 8
    need(good, "BCQ-V112", f"{name!a}: the size is not that of the shape")


def check_offsets(entries: dict[str, Any], size: int) -> None:
    """Section 3: tensor after tensor, from 0 to the end of the data."""
    position = 0
    for begin, end in sorted(entry["data_offsets"] for entry in entries.values()):
        need(begin >= position, "BCQ-V113", f"tensors overlap at {begin}")
        need(begin == position, "BCQ-V114", f"a hole before {begin}")
        position = end
    need(size <= position, "BCQ-V115", "data goes on after the last tensor")
    need(size >= position, "BCQ-V116", "data stops before the end of the last tensor")


def check_names(names: Collection[str]) -> None:
    """Section 3: names are short and differ by more than the case of ASCII letters."""
    seen: set[str] = set()
    lower = {capital: capital + 32 for capital in range(0x41, 0x5B)}
    for name in names:
        need(len(name.encode("utf-8")) <= 512, "BCQ-V119", f"a name of more than 512 bytes: {name[:40]!a}...")
    for name in names:
        folded = name.translate(lower)
        need(folded not in seen, "BCQ-V120", f"two names differ from {name!a} by case only")
        seen.add(folded)


# ---- Section 5: descriptor


def check_keys(obj: Any, required: set[str], optional: set[str], rule: str, what: str) -> None:
    """An object with all required keys and no unknown one."""
    need(isinstance(obj, dict), rule, f"{what} is not an object")
    need(required <= set(obj) <= required | optional, rule, f"{what}: keys missing or unknown")


def is_rising(value: Any, low: int, high: int) -> bool:
    """A sorted array of integers in low..high, each once, at least one."""
    if not isinstance(value, list) or not value or not all(is_int(item, low, high) for item in value):
        return False
    return all(a < b for a, b in pairwise(value))


def is_version(value: Any) -> bool:
    """Section 5: MAJOR.MINOR without leading zeros, MAJOR 1."""
    return isinstance(value, str) and re.fullmatch(r"1\.(0|[1-9][0-9]*)", value) is not None


def check_version_and_features(obj: dict[str, Any]) -> None:
    """Sections 5 and 12: what is looked at first in a descriptor and in the manifest."""
    version, features = obj.get("version"), obj.get("features")
    need(is_version(version), "BCQ-V205", f"version {str(version)[:40]!a} is not 1.x")
    for feature in features if isinstance(features, list) else []:
        known = not isinstance(feature, str) or feature in FEATURES
        need(known, "BCQ-V206", f"unknown feature {str(feature)[:40]!a}")


def check_segment(segment: Any, rule: str) -> None:
    """Section 5.3."""
    encoding = segment.get("encoding") if isinstance(segment, dict) else None
    required = {"encoding", "bits", "group_size"}
    keys_of = {"affine": {"scale", "zero"}, "float-zero": {"scale", "zero"}}
    keys_of |= {"offset": {"scale", "offset"}, "table": {"scale", "table"}, "bcq": {"alpha"}}
    need(isinstance(encoding, str) and encoding in keys_of, rule, f"encoding {str(encoding)[:40]!a}")
    optional = {"bcq": {"bias", "precisions"}, "table": {"table_exponent"}}.get(str(encoding), set())
    check_keys(segment, required | keys_of[str(encoding)], optional, rule, "segment")
    q = segment["bits"]
    need(is_int(q, 1, 8), rule, "bits is not in 1..8")
    good = segment["group_size"] == "row" or is_int(segment["group_size"], 8, MAX_DIM)
    need(good, rule, "group_size is neither row nor in 8..2^31-1")
    zero = segment.get("zero")
    if encoding == "affine" and isinstance(zero, dict):
        need(set(zero) == {"bits"} and is_int(zero["bits"], 1, q + 1), rule, "zero bits are not in 1..q+1")
    elif encoding == "affine":
        need(is_int(zero, 0, 2**q), rule, "zero is not in 0..2^q")
    elif encoding == "float-zero":
        need(zero in FLOATS, rule, "zero is not a floating-point type")
    for key in ("alpha", "bias"):
        need(key not in segment or segment[key] in FLOATS, rule, f"{key} is not a floating-point type")
    good = "precisions" not in segment or is_rising(segment["precisions"], 1, q - 1)
    need(good, rule, "precisions are not rising in 1..q-1")
    if encoding == "table":
        table = segment["table"]
        good = isinstance(table, list) and len(table) == 2**q and all(is_int(n, -(2**28), 2**28) for n in table)
        need(good, rule, "table is not an array of 2^q integers in -2^28..2^28")
        need(is_int(segment.get("table_exponent", -1), -126, -1), rule, "table_exponent is not in -126..-1")
    for key in ("scale", "offset"):
        if key in segment:
            check_number(segment[key], rule)


def group_size(segment: dict[str, Any], n: int) -> int:
    """Section 5.3: g of a segment of n columns."""
    return n if segment["group_size"] == "row" else int(segment["group_size"])


def check_number(number: Any, rule: str) -> None:
    """Section 5.3: scale or offset, a type or a second-order object."""
    if not isinstance(number, dict):
        need(number in (*FLOATS, *BYTE_FLOATS), rule, "scale or offset is not a floating-point type")
        return
    keys = {"codes"} if "codes" in number else {"bits", "zero"}
    check_keys(number, keys | {"rows", "scale"}, {"groups"}, rule, "second-order object")
    good = is_int(number["rows"], 1, MAX_DIM) and is_int(number.get("groups", 2), 2, MAX_DIM)
    good = good and number["scale"] in FLOATS
    if "codes" in number:
        good = good and number["codes"] in BYTE_FLOATS
    else:
        good = good and is_int(number["bits"], 1, 8)
        zero = number["zero"]
        good = good and (zero in ("packed", *FLOATS) if isinstance(zero, str) else is_int(zero, 0, 2 ** number["bits"]))
    need(good, rule, "malformed second-order object")


def check_scheme(scheme: Any, rule: str) -> None:
    """Section 5.2."""
    check_keys(scheme, {"segments"}, {"layout", "perm", "outliers", "nonfinite"}, rule, "scheme")
    segments = scheme["segments"]
    need(isinstance(segments, list) and 1 <= len(segments) <= 16, rule, "segments is not an array of 1..16")
    for segment in segments:
        check_segment(segment, rule)
    need(scheme.get("layout", "aligned64") == "aligned64", rule, "unknown layout")
    for flag in ("perm", "nonfinite"):
        need(scheme.get(flag, True) is True, rule, f"{flag} is not true")
    if "outliers" in scheme:
        outliers = scheme["outliers"]
        check_keys(outliers, {"mode", "dtype", "segments"}, set(), rule, "outliers")
        good = outliers["mode"] in ("add", "replace") and outliers["dtype"] in FLOATS
        good = good and is_rising(outliers["segments"], 0, len(segments) - 1)
        need(good, rule, "malformed outliers")


def check_weight_entry(entry: Any, more: set[str], rule: str) -> None:
    """Section 5.1, the table: integers from 0 on; ranges and lengths are left to V209, V210 and V211."""
    check_keys(entry, {"scheme", "shape", "dtype"} | more, {"widths"}, rule, "weight entry")
    for numbers in ([entry["scheme"]], entry["shape"], entry.get("widths", [])):
        good = isinstance(numbers, list) and all(is_int(number, 0) for number in numbers)
        need(good, rule, "scheme, shape or widths of a weight entry are not integers from 0 on")
    need(entry["dtype"] in FLOATS, rule, "dtype of a weight entry is not F16, BF16 or F32")


def check_tables(obj: dict[str, Any], more: set[str], rule: str) -> None:
    """Sections 5 to 5.3: what descriptor and manifest have in common."""
    features, schemes, weights = obj["features"], obj["schemes"], obj["weights"]
    need(isinstance(features, list) and all(isinstance(name, str) for name in features), rule, "features")
    need(isinstance(schemes, list) and isinstance(weights, dict), rule, "schemes or weights")
    need(isinstance(obj.get("ignorable", {}), dict), rule, "ignorable is not an object")
    for scheme in schemes:
        check_scheme(scheme, rule)
    for entry in weights.values():
        check_weight_entry(entry, more, rule)


def features_in_use(schemes: list[Any], shapes: list[list[int]]) -> list[str]:
    """Section 5.4."""
    used = {"stack" for shape in shapes if len(shape) == 3}
    for scheme in schemes:
        used |= {key for key in ("perm", "outliers", "nonfinite") if key in scheme}
        used |= {"aligned64"} if "layout" in scheme else set()
        used |= {"segments"} if len(scheme["segments"]) >= 2 else set()
        for segment in scheme["segments"]:
            used |= {segment["encoding"]} - {"affine"}
            used |= {"multi-precision"} if "precisions" in segment else set()
            for key, feature in (("scale", "second-order"), ("offset", "second-order-offset")):
                number = segment.get(key)
                second = number if isinstance(number, dict) else {}
                used |= {feature} if second else set()
                used |= {"super-groups"} if "groups" in second else set()
                used |= {"byte-floats"} if "codes" in second or number in BYTE_FLOATS else set()
    return sorted(used)


def check_use(obj: dict[str, Any], features_rule: str, schemes_rule: str) -> None:
    """Sections 5 and 5.1: features, schemes and weights of a descriptor (or the manifest) fit each other."""
    schemes, weights = obj["schemes"], obj["weights"].values()
    in_use = features_in_use(schemes, [entry["shape"] for entry in weights])
    need(obj["features"] == in_use, features_rule, f"features in use are {in_use}")
    used = {entry["scheme"] for entry in weights}
    need(used == set(range(len(schemes))), schemes_rule, "a scheme is not there or not used")
    need(len(set(map(canonical, schemes))) == len(schemes), schemes_rule, "two schemes are equal")


def read_descriptor(metadata: dict[str, str]) -> dict[str, Any]:
    """Section 5, from V202 on."""
    need(metadata.get("format") == "pt", "BCQ-V202", "__metadata__ has no format = pt")
    text = metadata["bcqfmt"]
    descriptor = parse_json(text.encode("utf-8"), ("BCQ-V203", "BCQ-V203", "BCQ-V203"))
    check_version_and_features(descriptor)
    keys = {"version", "features", "schemes", "weights"}
    check_keys(descriptor, keys, {"ignorable"}, "BCQ-V208", "descriptor")
    check_tables(descriptor, set(), "BCQ-V208")
    need(canonical(descriptor) == text, "BCQ-V204", "the descriptor is not canonical JSON")
    check_use(descriptor, "BCQ-V207", "BCQ-V209")
    schemes = descriptor["schemes"]
    for name, entry in descriptor["weights"].items():
        check_weight(name, entry, schemes[entry["scheme"]])
    return descriptor


def check_weight(name: str, entry: dict[str, Any], scheme: dict[str, Any]) -> None:
    """Section 5.1, the rules of one weight, and annex A."""
    shape, segments = entry["shape"], scheme["segments"]
    good = len(shape) in (2, 3) and all(is_int(dim, 1, MAX_DIM) for dim in shape)
    need(good, "BCQ-V210", f"{name[:500]!a}: shape")
    bits = math.prod(shape) * max(segment["bits"] for segment in segments)
    need(bits <= 2**40, "BCQ-V210", f"{name[:500]!a}: more than 2^40 bits")
    need(("widths" in entry) == (len(segments) >= 2), "BCQ-V211", "widths go with two or more segments")
    widths = entry.get("widths", shape[-1:])
    good = len(widths) == len(segments) and all(is_int(n, 1, MAX_DIM) for n in widths)
    need(good and sum(widths) == shape[-1], "BCQ-V211", "widths do not add up to the columns")
    for k, (n, segment) in enumerate(zip(widths, segments, strict=True)):
        g = group_size(segment, n)
        good = 8 <= g <= n and (n % g == 0 or k == len(segments) - 1)
        need(good, "BCQ-V212", f"{name[:500]!a}: group size {g} in a segment of {n} columns")
    need(is_weight_name(name), "BCQ-V213", f"weight name {name[:500]!a}")
    if "layout" in scheme:
        need(fits_aligned64(segments, widths), "BCQ-V215", "scheme or widths do not fit aligned64")


def is_weight_name(name: str) -> bool:
    """Section 5.1, V213."""
    good = re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.:+-]*", name) is not None
    return good and ".." not in name and len(name) <= 480


def fits_aligned64(segments: list[Any], widths: list[int]) -> bool:
    """Annex A, the conditions."""
    columns = sum(widths)
    if len(segments) != 2 or columns % 64 or widths != [columns // 4 * 3, columns // 4]:
        return False
    first, second = segments
    if first["encoding"] != "affine" or first["bits"] != 2 or first["group_size"] != 16:
        return False
    scale = first["scale"]
    if not isinstance(scale, dict) or scale.get("bits") != 4 or scale["zero"] != "packed" or "groups" in scale:
        return False
    if first["zero"] != {"bits": 2}:
        return False
    return bool(second["encoding"] == "affine" and second["bits"] == 4)


# ---- Section 6: parts


def prefix(name: str) -> str:
    """Section 6: P of the weight T."""
    if name.endswith(".weight") and name != ".weight":
        return name.removesuffix(".weight") + ".bcq_"
    return name + "_bcq_"


def expected_parts(entry: dict[str, Any], scheme: dict[str, Any], nnz: int) -> Shapes:
    """Section 6 and annex A: name without P -> dtype and shape of every part of a weight."""
    *stack, out, columns = entry["shape"]
    widths = entry.get("widths") or [columns]
    aligned = "layout" in scheme
    parts: Shapes = {}
    for k, (n, segment) in enumerate(zip(widths, scheme["segments"], strict=True)):
        for name, part in segment_parts(segment, out, n, aligned, k).items():
            parts[f"s{k}_{name}"] = part
    if aligned:
        tiles = columns // 64
        parts |= {"tile": ("I32", [out, tiles, 4]), "tile_extra": ("I32", [out, tiles])}
        parts["tile_meta"] = ("U16", [out, tiles])
    if "perm" in scheme:
        parts["perm"] = ("I32", [columns])
    parts = {name: (dtype, stack + shape) for name, (dtype, shape) in parts.items()}
    if "outliers" in scheme:
        parts["outlier_indptr"] = ("I32", [math.prod(stack) * out + 1])
        parts["outlier_indices"] = ("U16" if columns <= 65536 else "I32", [nnz])
        parts["outlier_values"] = (scheme["outliers"]["dtype"], [nnz])
    return parts


def segment_parts(segment: Any, out: int, n: int, aligned: bool, k: int) -> Shapes:
    """Section 6, the table, for one segment: name without P and s{k}_ -> dtype and shape."""
    parts: Shapes = {}
    groups = ceil_div(n, group_size(segment, n))
    q, zero = segment["bits"], segment.get("zero")
    if not aligned:
        parts["planes"] = ("I32", [q, out, ceil_div(n, 32)])
    for key in ("scale", "offset"):
        if key in segment:
            parts |= number_parts(key, segment[key], out, groups)
    if aligned and k == 0:
        parts["scale_zero"] = ("U8", [*parts["scale_scale"][1]])
        del parts["scale_codes"]
    if isinstance(zero, dict) and not (aligned and k == 0):
        parts["zero"] = ("I32", [out, ceil_div(groups * zero["bits"], 32)])
    if isinstance(zero, str):
        parts["zero"] = (zero, [out, groups])
    for suffix, planes in [("", q)] + [(f"_p{p}", p) for p in segment.get("precisions", [])]:
        if "alpha" in segment:
            parts["alpha" + suffix] = (segment["alpha"], [planes, out, groups])
        if "bias" in segment:
            parts["bias" + suffix] = (segment["bias"], [out, groups])
    return parts


def number_parts(key: str, number: Any, out: int, groups: int) -> Shapes:
    """Section 6, the table: the parts of a scale or an offset."""
    if isinstance(number, str):
        return {key: ("U8" if number in BYTE_FLOATS else number, [out, groups])}
    shared = [ceil_div(out, number["rows"]), ceil_div(groups, number.get("groups", 1))]
    parts: Shapes = {key + "_scale": (number["scale"], shared)}
    if "codes" in number:
        parts[key + "_codes"] = ("U8", [out, groups])
        return parts
    b, zero = number["bits"], number["zero"]
    parts[key + "_codes"] = ("I32", [out, ceil_div(groups * b, 32)])
    if zero == "packed":
        parts[key + "_zero"] = ("I32", [shared[0], ceil_div(shared[1] * b, 32)])
    elif isinstance(zero, str):
        parts[key + "_zero"] = (zero, shared)
    return parts


def collect_weights(tensors: dict[str, Part], descriptor: dict[str, Any]) -> dict[str, Weight]:
    """Sections 5.1 (V214 within a file) and 6: gives every weight its parts."""
    weights: dict[str, Weight] = {}
    wanted: dict[str, Shapes] = {}
    owned: set[str] = set()
    for name, entry in descriptor["weights"].items():
        scheme = descriptor["schemes"][entry["scheme"]]
        indices = tensors.get(prefix(name) + "outlier_indices", ("", (), b""))[1]
        wanted[name] = expected_parts(entry, scheme, indices[0] if len(indices) == 1 else 0)
        full = {prefix(name) + part for part in wanted[name]}
        need(name not in tensors and not owned & full, "BCQ-V214", f"{name}: name or part used twice")
        owned |= full
    for name, parts in wanted.items():
        for part in parts:
            need(prefix(name) + part in tensors, "BCQ-V301", f"{name} lacks its part {part}")
    for tensor in tensors:
        stray = (".bcq_" in tensor or "_bcq_" in tensor) and tensor not in owned
        need(not stray, "BCQ-V302", f"{tensor!a} is no part of a weight")
    for name, parts in wanted.items():
        entry = descriptor["weights"][name]
        found = {part: tensors[prefix(name) + part] for part in parts}
        for part, (dtype, shape) in parts.items():
            need(found[part][0] == dtype, "BCQ-V303", f"{name}: part {part} is not {dtype}")
            need(found[part][1] == tuple(shape), "BCQ-V304", f"{name}: part {part} has not the shape {shape}")
        weights[name] = {
            "name": name, "shape": entry["shape"], "dtype": entry["dtype"], "widths": entry.get("widths"),
            "scheme": descriptor["schemes"][entry["scheme"]], "parts": found,
        }  # fmt: skip
    return weights


def unpack(data: bytes, count: int, b: int) -> list[int]:
    """Section 6.1: the fields of packed(b), `count` of them a row, of all rows one after the other."""
    row_words, mask = ceil_div(count * b, 32), 2**b - 1
    words = struct.unpack(f"<{len(data) // 4}I", data)
    fields = []
    for first in range(0, len(words), row_words):
        for bit in range(0, count * b, b):
            at, shift = first + bit // 32, bit % 32
            value = words[at] >> shift
            if shift + b > 32:
                value |= words[at + 1] << (32 - shift)
            fields.append(value & mask)
    return fields


def pack(fields: list[int], count: int, b: int) -> bytes:
    """Section 6.1, the inverse of `unpack`."""
    row_words = ceil_div(count * b, 32)
    words = [0] * (len(fields) // count * row_words)
    for i, field in enumerate(fields):
        row, bit = i // count, i % count * b
        at, shift = row * row_words + bit // 32, bit % 32
        words[at] |= field << shift & 0xFFFFFFFF
        if shift + b > 32:
            words[at + 1] |= field >> (32 - shift)
    return struct.pack(f"<{len(words)}I", *words)


def integers(part: Part) -> tuple[int, ...]:
    """The numbers of an I32, U16 or U8 part, taken as unsigned (section 6)."""
    letter = {"I32": "I", "U16": "H", "U8": "B"}[part[0]]
    return struct.unpack(f"<{math.prod(part[1])}{letter}", part[2])


def floats(part: Part) -> list[float]:
    """The numbers of a floating-point part as binary64, which is exact."""
    dtype, shape, data = part
    count = math.prod(shape)
    if dtype == "BF16":
        wide = [bits << 16 for bits in struct.unpack(f"<{count}H", data)]
        dtype, data = "F32", struct.pack(f"<{count}I", *wide)
    return list(struct.unpack(f"<{count}{'e' if dtype == 'F16' else 'f'}", data))


# ---- Annex A: aligned64


def to_canonical(weight: Weight) -> Weight:
    """Annex A, the bijection: the same weight in the parts of section 6."""
    if "layout" not in weight["scheme"]:
        return weight
    *stack, out, columns = weight["shape"]
    tiles, matrices, parts = columns // 64, math.prod(stack), dict(weight["parts"])
    tile, extra = integers(parts.pop("tile")), integers(parts.pop("tile_extra"))
    meta = integers(parts.pop("tile_meta"))
    two_bit, four_bit, zeros, codes = [], [], [], []  # row after row
    for t in range(matrices * out * tiles):
        for w in range(3):
            two_bit += [tile[4 * t + w] >> 2 * m & 3 for m in range(16)]
            zeros.append(meta[t] >> 2 * w & 3)
        four_bit += [tile[4 * t + 3] >> 4 * m & 15 for m in range(8)]
        four_bit += [extra[t] >> 4 * m & 15 for m in range(8)]
        codes += [meta[t] >> 6 & 15, meta[t] >> 10 & 7, meta[t] >> 13 & 7]
    groups = 3 * tiles
    words = [*stack, out, ceil_div(groups * 4, 32)]
    parts["s0_planes"] = planes_part(two_bit, 2, stack, out, 48 * tiles)
    parts["s1_planes"] = planes_part(four_bit, 4, stack, out, 16 * tiles)
    parts["s0_scale_codes"] = ("I32", tuple(words), pack(codes, groups, 4))
    _, zero_shape, zero_bytes = parts["s0_scale_zero"]
    packed = pack([byte & 15 for byte in zero_bytes], groups, 4)
    parts["s0_scale_zero"] = ("I32", (*zero_shape[:-1], words[-1]), packed)
    zero: Any = zeros[0]
    if min(zeros) != max(zeros):
        b = max(zeros).bit_length()
        zero = {"bits": b}
        parts["s0_zero"] = ("I32", (*stack, out, ceil_div(groups * b, 32)), pack(zeros, groups, b))
    scheme = {key: value for key, value in weight["scheme"].items() if key != "layout"}
    scheme["segments"] = [scheme["segments"][0] | {"zero": zero}, scheme["segments"][1]]
    return weight | {"scheme": scheme, "parts": parts}


def planes_part(codes: list[int], q: int, stack: list[int], out: int, n: int) -> Part:
    """Section 6.2: codes (all rows of all matrices) as planes, plane 0 the most significant bits."""
    data = b""
    for first in range(0, len(codes), out * n):
        matrix = codes[first : first + out * n]
        data += b"".join(pack([code >> (q - 1 - i) & 1 for code in matrix], n, 1) for i in range(q))
    return ("I32", (*stack, q, out, ceil_div(n, 32)), data)


# ---- Sections 6.1, 6.3 and 6.4: the content of the parts


def check_content(weight: Weight) -> None:
    """The rules V401 to V411. An aligned64 weight is judged by its canonical form: the same numbers."""
    if "layout" in weight["scheme"]:
        good = all(byte < 16 for byte in weight["parts"]["s0_scale_zero"][2])
        need(good, "BCQ-V401", f"{weight['name']}: upper bits in s0_scale_zero")
    plain = to_canonical(weight)
    name, scheme, parts, columns = plain["name"], plain["scheme"], plain["parts"], plain["shape"][-1]
    segments = list(zip(plain["widths"] or [columns], scheme["segments"], strict=True))
    for k, (n, segment) in enumerate(segments):
        for part, count, b in packed_parts(k, n, segment):
            need(padding_is_zero(parts[part][2], count * b), "BCQ-V401", f"{name}: padding bits in {part}")
    for k, (n, segment) in enumerate(segments):
        if isinstance(segment.get("zero"), dict):
            b, groups = segment["zero"]["bits"], ceil_div(n, group_size(segment, n))
            zeros = unpack(parts[f"s{k}_zero"][2], groups, b)
            need(max(zeros) <= 2 ** segment["bits"], "BCQ-V404", f"{name}: a zero point above 2^q")
        for key in ("scale", "offset"):
            number = segment.get(key)
            if number == "UE4M3" or (isinstance(number, dict) and number.get("codes") == "UE4M3"):
                part = f"s{k}_{key}" + ("_codes" if isinstance(number, dict) else "")
                need(max(parts[part][2]) <= 0x7E, "BCQ-V411", f"{name}: {part} has a byte that is no UE4M3 number")
    if "nonfinite" not in scheme:
        for part, content in parts.items():
            good = content[0] not in FLOATS or all(map(math.isfinite, floats(content)))
            need(good, "BCQ-V405", f"{name}: {part} has an infinity or NaN")
    if "perm" in scheme:
        perm, identity = integers(parts["perm"]), list(range(columns))
        for first in range(0, len(perm), columns):
            good = sorted(perm[first : first + columns]) == identity
            need(good, "BCQ-V406", f"{name}: perm is no permutation")
    if "outliers" in scheme:
        check_outliers(plain)


def packed_parts(k: int, n: int, segment: dict[str, Any]) -> list[tuple[str, int, int]]:
    """Section 6: the packed parts of a segment with the fields of a row and their width."""
    groups = ceil_div(n, group_size(segment, n))
    result = [(f"s{k}_planes", n, 1)]
    for key in ("scale", "offset"):
        number = segment.get(key)
        if isinstance(number, dict) and "bits" in number:
            result.append((f"s{k}_{key}_codes", groups, number["bits"]))
            if number["zero"] == "packed":
                shared = ceil_div(groups, number.get("groups", 1))
                result.append((f"s{k}_{key}_zero", shared, number["bits"]))
    if isinstance(segment.get("zero"), dict):
        result.append((f"s{k}_zero", groups, segment["zero"]["bits"]))
    return result


def padding_is_zero(data: bytes, used: int) -> bool:
    """Section 6.1: of every row the bits after the first `used` ones."""
    last = struct.unpack(f"<{len(data) // 4}I", data)[ceil_div(used, 32) - 1 :: ceil_div(used, 32)]
    return used % 32 == 0 or all(word >> used % 32 == 0 for word in last)


def check_outliers(weight: Weight) -> None:
    """Section 6.4."""
    name, parts, (out, columns) = weight["name"], weight["parts"], weight["shape"][-2:]
    indptr, indices = integers(parts["outlier_indptr"]), integers(parts["outlier_indices"])
    good = indptr[0] == 0 and indptr[-1] == len(indices) and all(a <= b for a, b in pairwise(indptr))
    need(good, "BCQ-V407", f"{name}: outlier_indptr does not rise from 0 to nnz")
    rows = [indices[a:b] for a, b in pairwise(indptr)]
    for row in rows:
        good = all(a < b for a, b in pairwise(row)) and (not row or row[-1] < columns)
        need(good, "BCQ-V408", f"{name}: outlier_indices do not rise in 0..in-1")
    allowed = set(weight["scheme"]["outliers"]["segments"])
    for first in range(0, len(rows), out):
        segment_of = column_segments(weight, first // out)
        good = all(segment_of[column] in allowed for row in rows[first : first + out] for column in row)
        need(good, "BCQ-V409", f"{name}: an outlier in a segment without outliers")
    need(len(indices) * 8 <= math.prod(weight["shape"]), "BCQ-V410", f"{name}: too many outliers")


def permutation(weight: Weight, matrix: int) -> list[int]:
    """Section 6.4: the column of every stored column of one matrix."""
    columns = weight["shape"][-1]
    if "perm" not in weight["scheme"]:
        return list(range(columns))
    return list(struct.unpack_from(f"<{columns}I", weight["parts"]["perm"][2], 4 * columns * matrix))


def column_segments(weight: Weight, matrix: int) -> list[int]:
    """The segment in which every column of one matrix lies."""
    widths = weight["widths"] or weight["shape"][-1:]
    segments = [k for k, n in enumerate(widths) for _ in range(n)]
    result = [0] * len(segments)
    for stored, column in enumerate(permutation(weight, matrix)):
        result[column] = segments[stored]
    return result


# ---- Section 8: values


def round_once(x: float, dtype: str) -> int:
    """Section 8, RN_t: the bits of x in F16, BF16 or F32 after one rounding; NaN in its delivered form."""
    exponent_bits, fraction_bits = {"F16": (5, 10), "BF16": (8, 7), "F32": (8, 23)}[dtype]
    infinity = ((1 << exponent_bits) - 1) << fraction_bits
    if math.isnan(x):
        return infinity | 1 << (fraction_bits - 1)
    bits = int.from_bytes(struct.pack("<d", x), "little")
    sign = bits >> 63 << (exponent_bits + fraction_bits)
    field, number = bits >> 52 & 0x7FF, bits & (2**52 - 1)
    if field == 0x7FF:
        return sign | infinity
    if field:
        number |= 1 << 52
    unit = max(field, 1) - 1075  # |x| = number * 2^unit
    if number == 0:
        return sign
    bias = (1 << (exponent_bits - 1)) - 1
    exponent = max(unit + number.bit_length() - 1, 1 - bias)  # that of x, or of the smallest normal number
    shift = exponent - fraction_bits - unit  # bits to round away, always more than 0
    kept, lost, half = number >> shift, number & ((1 << shift) - 1), 1 << (shift - 1)
    if lost > half or (lost == half and kept & 1):
        kept += 1
    # The leading 1 of a normal `kept` adds 1 to the exponent field, and so does a carry.
    return sign | min(((exponent + bias - 1) << fraction_bits) + kept, infinity)


def rounded(x: float, dtype: str) -> float:
    """RN_t as a number again."""
    size = "<I" if dtype == "F32" else "<H"
    return floats((dtype, (1,), struct.pack(size, round_once(x, dtype))))[0]


def decode(weight: Weight, planes: int | None = None) -> bytes:
    """Section 8: the values in the logical dtype, little-endian, row-major; with `planes` section 8.1."""
    if planes is not None and planes < 1:
        raise ValueError("planes must be at least 1")
    plain = to_canonical(weight)
    *stack, out, columns = plain["shape"]
    letter = "I" if plain["dtype"] == "F32" else "H"
    result = []
    for matrix in range(math.prod(stack)):
        parts = {}
        for name, (dtype, shape, data) in plain["parts"].items():
            if stack and not name.startswith("outlier_"):
                size = len(data) // shape[0]
                shape, data = shape[1:], data[matrix * size : (matrix + 1) * size]
            parts[name] = (dtype, shape, data)
        exact = decode_matrix(plain, parts, matrix, planes)
        bits = [round_once(x, plain["dtype"]) for x in exact]
        result.append(struct.pack(f"<{out * columns}{letter}", *bits))
    return b"".join(result)


def decode_matrix(weight: Weight, parts: dict[str, Part], matrix: int, planes: int | None) -> list[float]:
    """Section 8: E(r, c) of all elements of one matrix, row after row."""
    scheme, (out, columns) = weight["scheme"], weight["shape"][-2:]
    perm = permutation(weight, matrix)
    result = [0.0] * (out * columns)
    start = 0
    for k, (n, segment) in enumerate(zip(weight["widths"] or [columns], scheme["segments"], strict=True)):
        own = {name.removeprefix(f"s{k}_"): part for name, part in parts.items() if name.startswith(f"s{k}_")}
        values = decode_segment(segment, own, out, n, weight["dtype"], planes)
        for r in range(out):
            for j in range(n):
                result[r * columns + perm[start + j]] = values[r * n + j]
        start += n
    if "outliers" in scheme:
        for r, c, v in matrix_outliers(parts, matrix, out):
            at = r * columns + c
            result[at] = result[at] + v if scheme["outliers"]["mode"] == "add" else v
    return result


def matrix_outliers(parts: dict[str, Part], matrix: int, out: int) -> list[tuple[int, int, float]]:
    """Section 6.4: row, column and value of the outliers of one matrix of a stack."""
    indptr = struct.unpack_from(f"<{out + 1}I", parts["outlier_indptr"][2], 4 * out * matrix)
    first, last = indptr[0], indptr[-1]
    own = []
    for name in ("outlier_indices", "outlier_values"):
        dtype, _, data = parts[name]
        size = BITS[dtype] // 8
        own.append((dtype, (last - first,), data[first * size : last * size]))
    rows = [r for r in range(out) for _ in range(indptr[r], indptr[r + 1])]
    return list(zip(rows, integers(own[0]), floats(own[1]), strict=True))


def decode_segment(
    segment: dict[str, Any], parts: dict[str, Part], out: int, n: int, dtype: str, planes: int | None
) -> list[float]:
    """Section 8, the table of encodings: E without outliers, [out, n] in the order of stored columns."""
    q, g, encoding = segment["bits"], group_size(segment, n), segment["encoding"]
    groups, elements = ceil_div(n, g), out * n
    used = min(q, planes or q)
    bits = unpack(parts["planes"][2][: 4 * used * out * ceil_div(n, 32)], n, 1)
    group_of = [r * groups + j // g for r in range(out) for j in range(n)]  # in arrays of shape [out, G]
    if encoding == "bcq" or used < q:
        alpha, result = plane_scales(segment, parts, out, n, used)
        result = [result[a] for a in group_of]
        for i in range(used):
            for at, a in enumerate(group_of):
                value = alpha[i * out * groups + a]
                result[at] = result[at] + value if bits[i * elements + at] else result[at] - value
        return result
    codes = [sum(bits[i * elements + at] << (q - 1 - i) for i in range(q)) for at in range(elements)]
    s = numbers("scale", segment, parts, out, groups)
    if encoding == "table":
        step = 2.0 ** segment.get("table_exponent", 0)
        table = [float(n) * step for n in segment["table"]]
        return [s[a] * table[code] for code, a in zip(codes, group_of, strict=True)]
    if encoding == "affine":
        zp = zero_points(segment, parts, out, groups)
        return [s[a] * (float(code) - zp[a]) for code, a in zip(codes, group_of, strict=True)]
    if encoding == "float-zero":
        zero = floats(parts["zero"])
        return [s[a] * rounded(float(code) - zero[a], dtype) for code, a in zip(codes, group_of, strict=True)]
    o = numbers("offset", segment, parts, out, groups)
    return [(s[a] * float(code)) + o[a] for code, a in zip(codes, group_of, strict=True)]


def byte_float(b: int, kind: str) -> float:
    """Section 8: the value of a byte of type E8M0 or UE4M3."""
    if kind == "E8M0":
        return 2.0 ** (b - 127)
    e, m = b // 8, b % 8
    return m * 2.0**-9 if e == 0 else (8 + m) * 2.0 ** (e - 10)


def numbers(key: str, segment: dict[str, Any], parts: dict[str, Part], out: int, groups: int) -> list[float]:
    """Section 8, Scale and Offset: [out, G]."""
    kind = segment[key]
    if kind in FLOATS:
        return floats(parts[key])
    if isinstance(kind, str):
        return [byte_float(b, kind) for b in parts[key][2]]
    h = kind.get("groups", 1)
    columns = ceil_div(groups, h)
    scale = floats(parts[key + "_scale"])
    zero = [0.0] * len(scale)
    if "codes" in kind:
        codes = [byte_float(b, kind["codes"]) for b in parts[key + "_codes"][2]]
    else:
        codes = [float(field) for field in unpack(parts[key + "_codes"][2], groups, kind["bits"])]
        if kind["zero"] == "packed":
            zero = [float(field) for field in unpack(parts[key + "_zero"][2], columns, kind["bits"])]
        elif isinstance(kind["zero"], str):
            zero = floats(parts[key + "_zero"])
        else:
            zero = [float(kind["zero"])] * len(scale)
    result = []
    for r in range(out):
        for a in range(groups):
            at = r // kind["rows"] * columns + a // h
            result.append(scale[at] * (codes[r * groups + a] - zero[at]))
    return result


def zero_points(segment: dict[str, Any], parts: dict[str, Part], out: int, groups: int) -> list[float]:
    """Section 6.3: the integer zero points as binary64, [out, G]."""
    zero = segment["zero"]
    if isinstance(zero, int):
        return [float(zero)] * (out * groups)
    return [float(field) for field in unpack(parts["zero"][2], groups, zero["bits"])]


def plane_scales(
    segment: dict[str, Any], parts: dict[str, Part], out: int, n: int, p: int
) -> tuple[list[float], list[float]]:
    """Sections 8 and 8.1: alpha [p, out, G] and z [out, G] of the bcq formula over the first p planes."""
    q, groups = segment["bits"], ceil_div(n, group_size(segment, n))
    if segment["encoding"] == "bcq":
        own = f"_p{p}" if p in segment.get("precisions", []) else ""
        z = floats(parts["bias" + own]) if "bias" in segment else [0.0] * (out * groups)
        return floats(parts["alpha" + own])[: p * out * groups], z
    if segment["encoding"] != "affine":
        raise Refused("section 8.1", "float-zero, offset and table have no value of fewer planes")
    s, zp = numbers("scale", segment, parts, out, groups), zero_points(segment, parts, out, groups)
    alpha = [x * 2.0 ** (q - 2 - i) for i in range(p) for x in s]
    return alpha, [x * ((float(2**q - 1) - 2.0 * zero) * 0.5) for x, zero in zip(s, zp, strict=True)]


# ---- One file


def read_bytes(data: bytes) -> dict[str, Any]:
    """Sections 3 to 6 and annex A: a whole file as bytes. See `read_file`."""
    tensors, metadata = read_container(data)
    descriptor = read_descriptor(metadata)
    weights = collect_weights(tensors, descriptor)
    for weight in weights.values():
        check_content(weight)
    owned = {prefix(name) + part for name, weight in weights.items() for part in weight["parts"]}
    dense = {name: tensor for name, tensor in tensors.items() if name not in owned}
    return {"dense": dense, "weights": weights, "descriptor": descriptor, "names": set(tensors)}


def read_file(path: str | Path) -> dict[str, Any]:
    """Reads one file strictly. Keys: dense (name -> (dtype, shape, bytes)), weights, descriptor, names."""
    need(is_missing(Path(path)) or is_regular(Path(path)), "BCQ-V508", f"{str(path)!a} is not a regular file")
    return read_bytes(Path(path).read_bytes())


def weight_digest(weight: Weight) -> str:
    """Section 9.4, the digest of a weight."""
    entry = {key: weight[key] for key in ("dtype", "scheme", "shape")}
    if weight["widths"] is not None:
        entry["widths"] = weight["widths"]
    text = canonical(entry) + "\n"
    for name, (dtype, shape, data) in sorted(weight["parts"].items()):
        text += f"{name} {dtype} {','.join(map(str, shape))} {hashlib.sha256(data).hexdigest()}\n"
    return hashlib.sha256(text.encode("ascii")).hexdigest()


# ---- Section 9: folder


def is_missing(path: Path) -> bool:
    """Nothing is there, or only a link that leads nowhere."""
    try:
        path.stat()
    except OSError:
        return True
    return False


def is_regular(path: Path) -> bool:
    """A regular file or a link to one. Nothing is opened before this was asked: a pipe would block."""
    return not is_missing(path) and stat.S_ISREG(path.stat().st_mode)


def stays_inside(link: Path, root: Path) -> bool:
    """Section 9.1, V507: inside the folder, or from snapshots/<revision>/ into the blobs/ of the hub cache."""
    homes = [root]
    if root.parent.name == "snapshots":
        entry = root.parent.parent
        homes += [entry / "blobs", entry.parent / "blobs"]
    target = Path(os.path.realpath(link))
    return not target.is_symlink() and any(target.is_relative_to(home) for home in homes)  # a link: a circle


def list_files(root: Path) -> dict[str, Path]:
    """Section 9: the files of a folder, relative path -> path, after a look at all links (V507).

    A link to a folder is not followed and adds no file; pipes, sockets and devices are no files either.
    """
    files, folders = {}, [root]
    while folders:
        for path in folders.pop().iterdir():
            name = path.relative_to(root).as_posix()
            if name.startswith("."):
                continue
            good = not path.is_symlink() or stays_inside(path, root)
            need(good, "BCQ-V507", f"the link {name!a} leaves the folder")
            if path.is_dir() and not path.is_symlink():
                folders.append(path)
            elif is_regular(path):
                files[name] = path
    return files


def read_member(root: Path, name: str, missing: str, limit: int, too_long: str) -> bytes:
    """A JSON file of the folder: it must exist (rule `missing`), be regular (V508) and not too long (section 11)."""
    path = root / name
    need(not is_missing(path), missing, f"{name} does not exist")
    need(is_regular(path), "BCQ-V508", f"{name} is not a regular file")
    need(path.stat().st_size <= limit, too_long, f"{name} is too long")
    data = path.read_bytes()
    need(sum(map(data.count, b",[{")) <= MAX_JSON_ITEMS, too_long, f"{name} has too many values")
    return data


def read_index(root: Path) -> dict[str, str] | None:
    """Section 9.1: `weight_map`, or None in a folder of one file."""
    name, rule = "model.safetensors.index.json", "BCQ-V501"
    if is_missing(root / name):
        return None
    need(is_missing(root / "model.safetensors"), "BCQ-V506", "both model.safetensors and an index")
    data = read_member(root, name, rule, MAX_JSON_FILE, rule)
    index = parse_json(data, (rule, rule, rule), "numbers")
    need(isinstance(index.get("metadata"), dict), rule, "metadata is not an object")
    mapping: Any = index.get("weight_map")
    good = isinstance(mapping, dict) and all(isinstance(file, str) for file in mapping.values())
    need(good, rule, "weight_map is not an object of strings")
    for file in mapping.values():
        good = re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]*\.safetensors", file) is not None
        need(good, "BCQ-V502", f"file name {file[:80]!a} in the index")
    return dict(mapping)


def read_shards(root: Path) -> dict[str, dict[str, Any]]:
    """Section 9.1: all model files, file name -> what `read_file` returns."""
    index = read_index(root)
    names = ["model.safetensors"] if index is None else sorted(set(index.values()))
    need(len(names) > 0, "BCQ-V503", "the index names no file")
    for name in names:
        need(not is_missing(root / name), "BCQ-V503", f"{name} does not exist")
    shards = {name: read_file(root / name) for name in names}
    listed = {name for shard in shards.values() for name in shard["names"]}
    if index is not None:
        good = listed == set(index) and all(name in shards[file]["names"] for name, file in index.items())
        need(good, "BCQ-V504", "the index does not name the tensors of the files")
    tensors = sum(len(shard["names"]) for shard in shards.values())
    need(len(listed) == tensors, "BCQ-V505", "a tensor is in two files")
    weights = [name for shard in shards.values() for name in shard["weights"]]
    good = len(set(weights)) == len(weights) and not listed & set(weights)
    need(good, "BCQ-V214", "a name is that of two weights, or of a weight and a tensor")
    versions = {shard["descriptor"]["version"] for shard in shards.values()}
    need(len(versions) <= 1, "BCQ-V513", f"the files state different versions {sorted(versions)}")
    return shards


def check_config(root: Path, versions: set[str]) -> None:
    """Section 9.2. `versions` has the one version of the files, or nothing where there is no file."""
    rule = "BCQ-V511"
    data = read_member(root, "config.json", "BCQ-V510", 16_000_000, rule)
    section: Any = parse_json(data, (rule, rule, rule), "config").get("quantization_config")
    good = isinstance(section, dict) and section.get("quant_method") == "bcq"
    need(good, "BCQ-V512", "quantization_config is not an object with quant_method = bcq")
    stated = section.get("format_version")
    good = isinstance(stated, str) and versions <= {stated}
    need(good, "BCQ-V512", "format_version is not that of the files")


def is_hex(value: Any) -> bool:
    """Section 9.3: 64 lower-case hexadecimal digits."""
    return isinstance(value, str) and re.fullmatch(r"[0-9a-f]{64}", value) is not None


def is_path(path: str) -> bool:
    """Section 9.3: relative, no component empty, `.` or `..`, no backslash, no NUL."""
    steps = path.split("/")
    return "\\" not in path and "\0" not in path and all(step not in ("", ".", "..") for step in steps)


def check_file_table(table: Any, kinds: tuple[str, ...], rule: str) -> None:
    """Section 9.3 and source.json: an object path -> size and sha256, with `kind` where there are kinds."""
    need(isinstance(table, dict), rule, "files is not an object")
    for path, entry in table.items():
        need(is_path(path), rule, f"{path[:80]!a} is no relative path")
        keys = {"size", "sha256"} | ({"kind"} if kinds else set())
        check_keys(entry, keys, set(), rule, f"entry of the file {path[:80]!a}")
        good = is_int(entry["size"]) and is_hex(entry["sha256"]) and (not kinds or entry["kind"] in kinds)
        need(good, rule, f"malformed entry of the file {path[:80]!a}")


def read_manifest(root: Path) -> dict[str, Any]:
    """Section 9.3: the manifest by itself (V601 to V603)."""
    rule = "BCQ-V602"
    data = read_member(root, "bcq_manifest.json", "BCQ-V601", MAX_JSON_FILE, rule)
    manifest = parse_json(data, (rule, rule, rule))
    check_version_and_features(manifest)
    need(canonical(manifest).encode("ascii") + b"\n" == data, rule, "not canonical JSON and one line feed")
    required = {"version", "generator", "features", "schemes", "weights", "files", "sha256"}
    check_keys(manifest, required, {"source", "ignorable"}, rule, "manifest")
    check_keys(manifest["generator"], {"name", "version"}, set(), rule, "generator")
    need(all(isinstance(text, str) for text in manifest["generator"].values()), rule, "generator")
    check_tables(manifest, {"file"}, rule)
    check_use(manifest, rule, rule)
    for name, entry in manifest["weights"].items():
        several = len(manifest["schemes"][entry["scheme"]]["segments"]) >= 2
        good = isinstance(entry["file"], str) and ("widths" in entry) == several and is_weight_name(name)
        need(good, rule, "name, file or widths of a weight")
    check_file_table(manifest["files"], (), rule)
    if "source" in manifest:
        check_keys(manifest["source"], {"format", "files"}, set(), rule, "source")
        need(isinstance(manifest["source"]["format"], str), rule, "format of the source")
        check_file_table(manifest["source"]["files"], (), rule)
    need(is_hex(manifest["sha256"]), rule, "sha256")
    text = canonical({key: value for key, value in manifest.items() if key != "sha256"})
    good = hashlib.sha256(text.encode("ascii")).hexdigest() == manifest["sha256"]
    need(good, "BCQ-V603", "the manifest's own digest is wrong")
    return manifest


def file_digest(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def check_manifest(manifest: Any, files: dict[str, Path], shards: dict[str, dict[str, Any]]) -> list[str]:
    """Section 9.3: the manifest against the folder (V604 to V606, V608, V609, and V513 for its version).

    Returns the files that it does not name, sorted: no digest covers them.
    """
    table, own = manifest["files"], set(files) - {"bcq_manifest.json"}
    for name in table:
        need(name in own, "BCQ-V604", f"{name!a} is no file of the folder")
    uncovered = own - set(table)
    for name in uncovered:
        needed = name in ("config.json", "model.safetensors.index.json", *shards) or name.startswith("bcq_source/")
        need(not needed, "BCQ-V609", f"{name!a} is not named")
    for name, entry in table.items():
        need(files[name].stat().st_size == entry["size"], "BCQ-V605", f"size of {name!a}")
    for name, entry in table.items():
        need(file_digest(files[name]) == entry["sha256"], "BCQ-V606", f"digest of {name!a}")
    weights = {name: weight for shard in shards.values() for name, weight in shard["weights"].items()}
    descriptors = [shard["descriptor"] for shard in shards.values()]
    features = sorted({feature for descriptor in descriptors for feature in descriptor["features"]})
    schemes = sorted({canonical(scheme) for descriptor in descriptors for scheme in descriptor["schemes"]})
    need(manifest["features"] == features, "BCQ-V608", "features are not the union over the files")
    good = sorted(map(canonical, manifest["schemes"])) == schemes
    need(good, "BCQ-V608", "schemes are not those of the files")
    need(set(manifest["weights"]) == set(weights), "BCQ-V608", "weights are not those of the files")
    for name, entry in manifest["weights"].items():
        stated = {**entry, "scheme": manifest["schemes"][entry["scheme"]]}
        good = all(stated.get(key) == weights[name][key] for key in ("file", "shape", "dtype", "widths"))
        good = good and canonical(stated["scheme"]) == canonical(weights[name]["scheme"])
        need(good, "BCQ-V608", f"{name}: not as in the file")
    for descriptor in descriptors:
        need(descriptor["version"] == manifest["version"], "BCQ-V513", "the manifest states another version")
    return sorted(uncovered)


# ---- provenance-1.0.md


def read_source(root: Path) -> dict[str, Any]:
    """source.json by itself (V701)."""
    rule = "BCQ-V701"
    data = read_member(root, "bcq_source/source.json", rule, MAX_JSON_FILE, rule)
    source = parse_json(data, (rule, rule, rule))
    need(canonical(source).encode("ascii") + b"\n" == data, rule, "not canonical JSON and one line feed")
    check_keys(source, {"version", "format", "files", "rules", "tensors"}, {"ignorable"}, rule, "source.json")
    need(is_version(source["version"]), rule, "version is not 1.x")
    need(isinstance(source["format"], str), rule, "format is not a string")
    need(isinstance(source.get("ignorable", {}), dict), rule, "ignorable is not an object")
    check_file_table(source["files"], ("verbatim", "safetensors", "gguf"), rule)
    rules, tensors = source["rules"], source["tensors"]
    good = isinstance(rules, list) and all(isinstance(item, dict) for item in rules)
    need(good and all(isinstance(item.get("rule"), str) for item in rules), rule, "malformed rules")
    need(len(set(map(canonical, rules))) == len(rules), rule, "a rule is there twice")
    good = isinstance(tensors, dict) and all(isinstance(table, dict) for table in tensors.values())
    good = good and all(is_path(path) for path in tensors)
    need(good, rule, "tensors is not an object of objects")
    for recipe in [recipe for table in tensors.values() for recipe in table.values()]:
        good = isinstance(recipe, list) and len(recipe) in (1, 2) and is_int(recipe[0], 0)
        need(good and all(isinstance(T, str) for T in recipe[1:]), rule, "a tensor is no [rule] or [rule, T]")
    return source


def archived_names(path: Path) -> set[str]:
    """The tensor names in an archived header."""
    rule = "BCQ-V702"
    need(path.stat().st_size <= MAX_JSON_FILE + 8, rule, "an archived header is too long")
    data = path.read_bytes()
    good = len(data) >= 8 and len(data) == 8 + int.from_bytes(data[:8], "little")
    need(good, rule, "an archived header has not the length it states")
    return set(parse_json(data[8:], (rule, rule, rule), "numbers")) - {"__metadata__"}


def check_source(root: Path, files: dict[str, Path], dense: set[str], weights: set[str]) -> None:
    """source.json against the folder (V702 to V704)."""
    source = read_source(root)
    headers: dict[str, set[str]] = {}
    for path, entry in source["files"].items():
        verbatim = entry["kind"] == "verbatim"
        name = f"bcq_source/files/{path}" if verbatim else f"bcq_source/headers/{path}.header"
        need(name in files, "BCQ-V702", f"{name[:80]!a} does not exist")
        if verbatim:
            good = files[name].stat().st_size == entry["size"] and file_digest(files[name]) == entry["sha256"]
            need(good, "BCQ-V702", f"content of {path[:80]!a}")
        elif entry["kind"] == "gguf":
            good = files[name].stat().st_size <= MAX_JSON_FILE and files[name].read_bytes()[:4] == b"GGUF"
            need(good, "BCQ-V702", f"{name[:80]!a} is no header of GGUF")
            headers[path] = set(source["tensors"].get(path, {}))
        else:
            headers[path] = archived_names(files[name])
    need(set(source["tensors"]) <= set(headers), "BCQ-V703", "tensors of a file that is no model file")
    raw = set()
    for path, names in headers.items():
        table = source["tensors"].get(path, {})
        need(set(table) == names, "BCQ-V703", f"tensors of {path[:80]!a} are not those of its header")
        for name, (position, *derived_from) in table.items():
            need(position < len(source["rules"]), "BCQ-V703", "a rule that does not exist")
            rule = source["rules"][position]["rule"]
            if rule == "raw":
                good = not derived_from
            elif rule == "copy":
                good = (derived_from or [name])[0] in dense
            else:
                good = len(derived_from) == 1 and derived_from[0] in weights
            need(good, "BCQ-V703", f"rule {rule[:80]!a} of {name[:80]!a} leads nowhere")
            if rule == "raw":
                raw.add(f"{path}/{name}")
    check_raw(files.get("bcq_source/raw.safetensors"), raw)


def check_raw(path: Path | None, names: set[str]) -> None:
    """V704: raw.safetensors."""
    need((path is not None) == bool(names), "BCQ-V704", "raw.safetensors is there without need, or missing")
    if path is not None:
        try:
            tensors, _ = read_container(path.read_bytes(), bcq=False)
        except Refused as error:
            raise Refused("BCQ-V704", f"raw.safetensors: {error}") from None
        need(set(tensors) == names, "BCQ-V704", "raw.safetensors does not hold exactly the raw tensors")


def read_folder(path: str | Path) -> dict[str, Any]:
    """Section 9 and provenance. Keys: dense and weights of all files, manifest, uncovered, files (as `read_file`)."""
    root = Path(path).resolve()
    files = list_files(root)
    shards = read_shards(root)
    for file, shard in shards.items():
        for weight in shard["weights"].values():
            weight["file"] = file
    check_config(root, {shard["descriptor"]["version"] for shard in shards.values()})
    manifest = read_manifest(root)
    uncovered = check_manifest(manifest, files, shards)
    dense = {name: tensor for shard in shards.values() for name, tensor in shard["dense"].items()}
    weights = {name: weight for shard in shards.values() for name, weight in shard["weights"].items()}
    if any(name.startswith("bcq_source/") for name in files):
        check_source(root, files, set(dense), set(weights))
    return {"dense": dense, "weights": weights, "manifest": manifest, "files": shards, "uncovered": uncovered}


def main(arguments: list[str]) -> int:
    """Prints one line per weight: name, shape, dtype, SHA-256 of the decoded bytes."""
    if len(arguments) != 1:
        print("usage: decoder.py FILE-OR-FOLDER", file=sys.stderr)
        return 2
    try:
        content = read_folder(arguments[0]) if Path(arguments[0]).is_dir() else read_file(arguments[0])
    except Refused as error:
        print(f"refused {error}")
        return 4
    except OSError as error:
        print(f"cannot read: {error}", file=sys.stderr)
        return 2
    for name, weight in sorted(content["weights"].items()):
        digest = hashlib.sha256(decode(weight)).hexdigest()
        print(name, "x".join(map(str, weight["shape"])), weight["dtype"], digest)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
