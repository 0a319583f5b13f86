"""The header of a GGUF file, version 2 or 3, of either byte order: checked as ggml's own reader does, and beyond it.

    "GGUF" | version | tensors | key values | pairs | infos | padding | data

Every tensor begins where the padded one before it ends, in the order of the infos, and the last one is padded too.
Padding may be any bytes, and more bytes may follow: no program reads them.
"""

from __future__ import annotations

import math
import re
import struct
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np

from bcqfmt import limits
from bcqfmt.codes import CODES
from bcqfmt.container.files import ByteSource
from bcqfmt.container.other_files import other_kind
from bcqfmt.errors import BcqError, error, escape

from .cursor import Cursor
from .types import REMOVED, TYPES, TensorType

_CODES: Final = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_NUMPY: Final = {0: "u1", 1: "i1", 2: "u2", 3: "i2", 4: "u4", 5: "i4", 6: "f4", 7: "?", 10: "u8", 11: "i8", 12: "f8"}
_BOOL, _STRING, _ARRAY = 7, 8, 9
_SMALLEST_PAIR = 8 + 1 + 4 + 1  # bytes of a pair: length of the key, a character, type, value
MAX_PAIRS: Final = 1 << 16
MAX_KEY: Final = (1 << 16) - 1
MAX_ITEMS: Final = 1 << 24
MAGIC: Final = b"GGUF"
_ALIGNMENT = "general.alignment"
_U32 = 4
_MAX_ALIGNMENT = 1 << 20
_SMALLEST_INFO = 8 + 1 + 4 + 8 + 4 + 8  # bytes of an info: length of the name, a character, one dimension, type, offset
_MAX_NAME = 63
_MAX_DIMENSIONS = 4


class TensorInfo(NamedTuple):
    """A tensor: ``shape`` as numpy has it (GGUF stores it reversed), ``offset`` from the start of the file."""

    name: str
    type: TensorType
    shape: tuple[int, ...]
    offset: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one row; blocks never cross rows."""
        return self.shape[-1] // self.type.elements * self.type.nbytes

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape[:-1]) * self.row_bytes


@dataclass(frozen=True)
class GgufHeader:
    """What a header says. ``raw``: the bytes before ``data_start``; ``order``: ``<`` or ``>``."""

    version: int
    order: str
    values: dict[str, Value]
    tensors: dict[str, TensorInfo]  # in file order
    alignment: int
    data_start: int
    data_end: int  # of the last tensor and its padding; more bytes may follow
    raw: bytes = field(repr=False)

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a key: a number, a bool, a string, a numpy array, a list of strings."""
        return decode(self.raw, self.order, self.values[key]) if key in self.values else default


def read_gguf(source: ByteSource, whole: bool = True) -> GgufHeader:
    """BCQ-E211 to E219: the header. ``whole``: the file must hold the data too; not so for an archived header."""
    cursor = Cursor(source)
    version = _version(cursor)
    tensors, pairs = cursor.integer("Q", "number of tensors"), cursor.integer("Q", "number of key values")
    if tensors > limits.MAX_TENSORS:
        expected = f"at most {limits.MAX_TENSORS}"
        raise error("BCQ-E215", source.shown, found=f"{tensors} tensors announced", expected=expected)
    values = read_values(cursor, pairs)
    alignment = _alignment(cursor, values)
    infos = _infos(cursor, tensors)
    start = -(-cursor.at // alignment) * alignment
    if not infos:
        start = min(start, source.size)
    placed, end = _placed(source, infos, start, alignment)
    if whole and end > source.size:
        found, expected = f"{source.size} bytes; {end - source.size} are missing", f"{end} bytes"
        raise error("BCQ-E213", source.shown, found=found, expected=expected)
    cursor.skip(start - cursor.at, "padding before the data")
    return GgufHeader(version, cursor.order, values, placed, alignment, start, end, cursor.bytes_from(0))


def _version(cursor: Cursor) -> int:
    source = cursor.source
    head = source.read(0, min(64, source.size)).tobytes()
    if not head.startswith(MAGIC):
        other = other_kind(head, "a GGUF file")
        if other is not None:
            raise error(other[0], source.shown, found=other[1], expected=other[2])
        shown = escape(head[:4].decode("latin-1")) if head else "nothing"
        raise error("BCQ-E211", source.shown, found=f"a file that begins with {shown}", expected="GGUF")
    cursor.skip(len(MAGIC), "magic")
    version = cursor.integer("I", "version")
    if version & 0xFFFF == 0:  # written by a machine of the other byte order
        cursor.order = ">"
        version = int.from_bytes(version.to_bytes(4, "little"), "big")
    if version not in (2, 3):
        hint = CODES["BCQ-V206"].hint if version > 3 else None
        raise error("BCQ-E212", source.shown, found=f"version {version}", expected="2 or 3", hint=hint)
    return version


def _alignment(cursor: Cursor, values: dict[str, Value]) -> int:
    value = values.get(_ALIGNMENT)
    if value is None:
        return 32
    found = decode(cursor.bytes_from(0), cursor.order, value)
    if value.type != _U32 or value.items is not None or not 0 < found <= _MAX_ALIGNMENT or found & (found - 1):
        raise error("BCQ-E214", cursor.source.shown, _ALIGNMENT, escape(str(found)), "a u32, a power of two up to 2^20")
    return int(found)


def _infos(cursor: Cursor, count: int) -> dict[str, tuple[TensorType, tuple[int, ...], int]]:
    """Name -> type, shape, offset from the start of the data."""
    cursor.require(count * _SMALLEST_INFO, f"infos of {count} tensors")
    found: dict[str, tuple[TensorType, tuple[int, ...], int]] = {}
    for i in range(count):
        raw = cursor.text(f"name of tensor {i}")
        shown = raw.decode("utf-8", "replace")

        def wrong(what: str, expected: str, code: str = "BCQ-E215", shown: str = shown) -> None:
            raise error(code, cursor.source.shown, shown, what, expected)

        if not 0 < len(raw) <= _MAX_NAME or b"\0" in raw or shown.encode() != raw:
            wrong(f"a name of {len(raw)} bytes", f"1 to {_MAX_NAME} bytes of UTF-8")
        if shown in found:
            wrong("a name that occurs twice", "every name once")
        dimensions = cursor.integer("I", f"dimensions of '{escape(shown)}'")
        if not 1 <= dimensions <= _MAX_DIMENSIONS:
            wrong(f"{dimensions} dimensions", f"1 to {_MAX_DIMENSIONS}")
        sizes = [cursor.integer("Q", f"shape of '{escape(shown)}'") for _ in range(dimensions)]
        if 0 in sizes or math.prod(sizes) >= limits.MAX_ELEMENTS:
            wrong(f"shape {sizes[::-1]}", "1 to 2^48 - 1 elements")
        number = cursor.integer("I", f"type of '{escape(shown)}'")
        if number not in TYPES:
            what = f"type {number}" + (f", {REMOVED[number]}, removed from GGUF" if number in REMOVED else "")
            wrong(what, f"a type of GGUF, up to {max(TYPES)}", "BCQ-E217")
        kind = TYPES[number]
        if sizes[0] % kind.elements:
            wrong(f"rows of {sizes[0]}", f"a multiple of {kind.elements}, the block of {kind.name}")
        found[shown] = kind, tuple(sizes[::-1]), cursor.integer("Q", f"offset of '{escape(shown)}'")
    return found


def _placed(
    source: ByteSource, infos: dict[str, tuple[TensorType, tuple[int, ...], int]], start: int, alignment: int
) -> tuple[dict[str, TensorInfo], int]:
    """BCQ-E216 unless every tensor begins where the padded one before it ends; where the last one ends."""
    placed: dict[str, TensorInfo] = {}
    at = start
    for name, (kind, shape, offset) in infos.items():
        if start + offset != at:
            raise error("BCQ-E216", source.shown, name, f"offset {offset}", f"{at - start}, where the one before ends")
        placed[name] = TensorInfo(name, kind, shape, at)
        at += -(-placed[name].nbytes // alignment) * alignment
    return placed, at


# ---------------------------------------------------------------------- key values: found without decoding them
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
    cursor.require(count * _SMALLEST_PAIR, f"{count} key values")
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
