"""Key values of a GGUF header: where each lies, found without decoding it, and its content on demand."""

from __future__ import annotations

import re
import struct
from typing import Any, Final, NamedTuple

import numpy as np

from bcqfmt.errors import BcqError, error, escape

from .cursor import Cursor

_CODES: Final = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_NUMPY: Final = {0: "u1", 1: "i1", 2: "u2", 3: "i2", 4: "u4", 5: "i4", 6: "f4", 7: "?", 10: "u8", 11: "i8", 12: "f8"}
_BOOL, _STRING, _ARRAY = 7, 8, 9
_SMALLEST = 8 + 1 + 4 + 1  # bytes of a pair: length of the key, a character, type, value
MAX_PAIRS: Final = 1 << 16
MAX_KEY: Final = (1 << 16) - 1
MAX_ITEMS: Final = 1 << 24


class Value(NamedTuple):
    """A value: its type (of the elements of an array), the number of items (None: no array), where it lies."""

    type: int
    items: int | None
    begin: int
    end: int


def read_values(cursor: Cursor, count: int) -> dict[str, Value]:
    """BCQ-E213, E214: ``count`` pairs. Strings are skipped, not decoded."""
    if count > MAX_PAIRS:
        raise _wrong(cursor, "", f"{count} key values", f"at most {MAX_PAIRS}")
    cursor.require(count * _SMALLEST, f"{count} key values")
    found: dict[str, Value] = {}
    for i in range(count):
        raw = cursor.text(f"key {i}")
        key = escape(raw.decode("latin-1"), 80)
        if not 0 < len(raw) <= MAX_KEY or re.search(rb"[^!-~]", raw):
            raise _wrong(cursor, key, f"a key of {len(raw)} bytes", "1 to 65535 visible ASCII characters")
        if (name := raw.decode("ascii")) in found:
            raise _wrong(cursor, key, "a key that occurs twice", "every key once")
        found[name] = _skip_value(cursor, key)
    return found


def decode(raw: bytes, order: str, value: Value) -> Any:
    """A number, a bool, a string, a numpy array of numbers, or a list of strings. Odd bytes become U+FFFD."""
    if value.type == _STRING:
        texts, at = [], value.begin
        for _ in range(1 if value.items is None else value.items):
            length = struct.unpack_from(f"{order}Q", raw, at)[0]
            texts.append(raw[at + 8 : at + 8 + length].decode("utf-8", "replace"))
            at += 8 + length
        return texts[0] if value.items is None else texts
    if value.items is None:
        return struct.unpack_from(order + _CODES[value.type], raw, value.begin)[0]
    return np.frombuffer(raw, np.dtype(order + _NUMPY[value.type]), value.items, value.begin)


def _skip_value(cursor: Cursor, key: str) -> Value:
    kind = cursor.integer("I", f"type of '{key}'")
    if kind != _ARRAY:
        begin = cursor.at
        _skip_items(cursor, key, kind, 1)
        return Value(kind, None, begin, cursor.at)
    kind, count = cursor.integer("I", f"type of '{key}'"), cursor.integer("Q", f"length of '{key}'")
    if kind == _ARRAY:
        raise _wrong(cursor, key, "an array of arrays", "arrays of numbers or strings")
    begin = cursor.at
    if kind in _CODES or kind == _STRING:
        cursor.require(count * (8 if kind == _STRING else struct.calcsize(_CODES[kind])), f"array '{key}'")
    if count > MAX_ITEMS:
        raise _wrong(cursor, key, f"an array of {count}", f"at most {MAX_ITEMS} elements")
    _skip_items(cursor, key, kind, count)
    return Value(kind, count, begin, cursor.at)


def _skip_items(cursor: Cursor, key: str, kind: int, count: int) -> None:
    if kind == _STRING:
        cursor.skip_strings(count, f"'{key}'")
        return
    if kind not in _CODES:
        raise _wrong(cursor, key, f"value type {kind}", "0..12")
    begin = cursor.skip(count * struct.calcsize(_CODES[kind]), f"'{key}'")
    if kind == _BOOL and max(cursor.bytes_from(begin), default=0) > 1:
        raise _wrong(cursor, key, "a bool that is neither 0 nor 1", "0 or 1")


def _wrong(cursor: Cursor, key: str, found: str, expected: str) -> BcqError:
    return error("BCQ-E214", cursor.source.shown, key, found, expected)
