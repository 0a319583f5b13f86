"""The header's JSON, read entry by entry: ``json.loads`` would make objects of everything first.

Here one entry is decoded, checked by the caller, and only what is kept stays.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator
from json.decoder import scanstring  # type: ignore[attr-defined]  # in C, and in every version so far
from typing import Any, NoReturn

from bcqfmt import limits

from .strict_json import JsonFault, check_limits, unique_keys

_SPACE = re.compile(r"[ \t\n\r]*")
_LARGE = 1_000_000  # characters of a header from which on an entry is looked at before it is parsed
_DEEP = re.compile(rf'(?:\[|\{{"[^"\\]{{0,80}}":){{{limits.MAX_JSON_DEPTH}}}')
_MOST_COMMAS = 100  # of an entry: it has 19 at most
_LEVELS = f"at most {limits.MAX_JSON_DEPTH} levels"

# The next entry as nearly every writer spells it. What does not match is parsed as JSON.
_INTEGER = "(?:0|[1-9][0-9]{0,14})"
_OFFSETS = rf'"data_offsets":\[({_INTEGER}),({_INTEGER})\]'
_DTYPE = '"dtype":"([A-Z0-9_]{1,16})"'
_SHAPE = rf'"shape":\[((?:{_INTEGER}(?:,{_INTEGER}){{0,15}})?)\]'
_PLAIN = re.compile(
    rf',"([^"\\\x00-\x1f]{{0,600}})":\{{(?:{_OFFSETS},{_DTYPE},{_SHAPE}|{_DTYPE},{_SHAPE},{_OFFSETS})\}}'
)


class HeaderFault(Exception):
    """A header that is refused: rule, what was found, what was expected, tensor name."""

    def __init__(self, code: str, found: str, expected: str = "", tensor: str = "") -> None:
        super().__init__(code, found)
        self.code, self.found, self.expected, self.tensor = code, found, expected, tensor


def scan_header(
    raw: bytes,
    entry: Callable[[str, Any], None],
    plain: Callable[[str, str, tuple[int, ...], int, int], None],
) -> dict[str, str]:
    """Call ``plain(name, dtype, shape, begin, end)`` or, for another spelling, ``entry(name, value)`` for every tensor.

    Returns the metadata. BCQ-V105 to V108 and V118.
    """
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as fault:
        raise HeaderFault("BCQ-V105", f"byte {fault.start} of the header") from None
    metadata: dict[str, str] = {}
    names: set[str] = set()
    top = _members(text, 0)
    try:
        name, at = next(top)
        while True:
            if name in names:
                raise HeaderFault("BCQ-V107", f"{name[:80]!a} occurs twice", "each key once")
            names.add(name)
            if name == "__metadata__":
                at = _metadata(text, at, metadata)
            else:
                if len(names) - ("__metadata__" in names) > limits.MAX_TENSORS:
                    raise HeaderFault("BCQ-V108", f"more than {limits.MAX_TENSORS}", f"at most {limits.MAX_TENSORS}")
                if not _is_small(text, at):
                    raise HeaderFault("BCQ-V109", "far more than a tensor's entry has", "an object of three keys", name)
                value, at = _value(text, at, name)
                entry(name, value)
            name, at = top.send(_plain_run(text, at, names, plain))
    except StopIteration as done:
        if text[done.value :].strip(" "):
            raise HeaderFault("BCQ-V106", f"text after the object, at {done.value}", "nothing but spaces") from None
    if "\\ud" in text or "\\uD" in text:
        _refuse_surrogates([*names, *metadata, *metadata.values()])
    return metadata


def _plain_run(
    text: str, at: int, names: set[str], plain: Callable[[str, str, tuple[int, ...], int, int], None]
) -> int:
    """Read entries in the usual spelling; stop at the first other one."""
    match = _PLAIN.match
    shapes: dict[str, tuple[int, ...]] = {"": ()}  # a model has many tensors and few shapes
    room = limits.MAX_TENSORS + ("__metadata__" in names)
    while (found := match(text, at)) is not None:
        name, begin, end, dtype, shape, dtype2, shape2, begin2, end2 = found.groups()
        if name in names or name == "__metadata__" or len(names) >= room:
            break
        names.add(name)
        at = found.end()
        if dtype is None:
            begin, end, dtype, shape = begin2, end2, dtype2, shape2
        dims = shapes.get(shape)
        if dims is None:
            dims = shapes[shape] = tuple(map(int, shape.split(",")))
        plain(name, dtype, dims, int(begin), int(end))
    return at


def _members(text: str, at: int) -> Generator[tuple[str, int], int, int]:
    """(key, start of its value) of the object that opens at ``at``; is sent the end of the value; returns its end."""
    at = _skip(text, at + 1)
    if text[at : at + 1] == "}":
        return at + 1
    while True:
        if text[at : at + 1] != '"':
            raise _syntax(at, "a key")
        key, at = _string(text, at)
        at = _skip(text, at)
        if text[at : at + 1] != ":":
            raise _syntax(at, "a colon")
        at = yield key, _skip(text, at + 1)
        at = _skip(text, at)
        if text[at : at + 1] == "}":
            return at + 1
        if text[at : at + 1] != ",":
            raise _syntax(at, "a comma or a brace")
        at = _skip(text, at + 1)


def _metadata(text: str, at: int, found: dict[str, str]) -> int:
    if text[at : at + 1] != "{":
        if _is_small(text, at):
            _value(text, at, "")
        raise HeaderFault("BCQ-V118", "no object", "an object of strings")
    inner = _members(text, at)
    try:
        key, at = next(inner)
        while True:
            if key in found:
                raise HeaderFault("BCQ-V107", f"{key[:80]!a} occurs twice in __metadata__", "each key once")
            if len(found) >= limits.MAX_METADATA_KEYS:
                raise HeaderFault("BCQ-V118", f"more than {limits.MAX_METADATA_KEYS} keys", "fewer")
            if text[at : at + 1] != '"':
                what = _kind(_value(text, at, "", 2)[0]) if _is_small(text, at) else "no string"
                raise HeaderFault("BCQ-V118", f"{key[:80]!a} is {what}", "a string")
            found[key], at = _string(text, at)
            key, at = inner.send(at)
    except StopIteration as done:
        end: int = done.value
        return end


def _is_small(text: str, at: int) -> bool:
    """Whether a value may be parsed: in a small header all, in a large one only objects that are flat and short.

    Millions of values in one entry would cost seconds and hundreds of megabytes before the entry is refused.
    """
    if len(text) - at < _LARGE or text[at : at + 1] not in ("[", "{"):
        return True
    if _DEEP.match(text, at):
        raise HeaderFault("BCQ-V106", "nested too deeply", _LEVELS)
    end = text.find("}", at)
    return text[at] == "{" and text.rfind("{", at, end) == at and text.count(",", at, end) <= _MOST_COMMAS


def _value(text: str, at: int, name: str, above: int = 1) -> tuple[Any, int]:
    """A value and its end; ``above`` levels of nesting lie around it."""
    try:
        value, end = _DECODER.raw_decode(text, at)
        check_limits(value, limits.MAX_JSON_DEPTH - above)
    except JsonFault as fault:
        if fault.kind == "duplicate":
            raise HeaderFault("BCQ-V107", fault.detail, "each key once", name) from None
        raise HeaderFault("BCQ-V106", fault.detail, _LEVELS if "deep" in fault.detail else "", name) from None
    except RecursionError:
        raise HeaderFault("BCQ-V106", "nested too deeply", _LEVELS, name) from None
    except json.JSONDecodeError as fault:
        raise _syntax(fault.pos, "JSON") from None
    return value, end


def _string(text: str, at: int) -> tuple[str, int]:
    try:
        value, end = scanstring(text, at + 1, True)
    except json.JSONDecodeError as fault:
        raise _syntax(fault.pos, "a string") from None
    return value, end


def _skip(text: str, at: int) -> int:
    if text[at : at + 1] not in " \t\n\r":
        return at
    match = _SPACE.match(text, at)
    return match.end() if match else at


def _syntax(at: int, expected: str) -> HeaderFault:
    return HeaderFault("BCQ-V106", f"not JSON at character {at} of the header", expected)


def _kind(value: Any) -> str:
    kinds = {dict: "an object", list: "an array", int: "a number", bool: "a boolean", type(None): "null"}
    return kinds.get(type(value), "something else")


def _refuse_surrogates(texts: list[str]) -> None:
    try:
        for text in texts:
            text.encode("utf-8")
    except UnicodeEncodeError:
        raise HeaderFault("BCQ-V105", "a lone surrogate in a string") from None


def _no_float(text: str) -> NoReturn:
    raise JsonFault("json", f"{text[:40]} is not an integer")


def _integer(text: str) -> int:
    """``-0`` is a floating-point number to the reference reader: two readers must not disagree on a file."""
    if text == "-0":
        raise JsonFault("json", "-0 is not an integer of a header")
    if len(text) > 17:
        raise JsonFault("json", "an integer beyond 2^53-1")
    return int(text)


_DECODER = json.JSONDecoder(
    object_pairs_hook=unique_keys, parse_int=_integer, parse_float=_no_float, parse_constant=_no_float
)
