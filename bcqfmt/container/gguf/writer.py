"""The bytes of a GGUF header, version 3, little-endian: key values, tensor infos, padding."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np

from .header import MAGIC, GgufHeader
from .types import TYPES

ALIGNMENT: Final = 32  # of the data and of every tensor; the default of the format
_CODES: Final = {"u32": (4, "I"), "i32": (5, "i"), "f32": (6, "f"), "bool": (7, "?")}
_STRING, _ARRAY = 8, 9
_NUMBERS: Final = {kind.name: number for number, kind in TYPES.items()}
_SIZES: Final = {kind.name: (kind.elements, kind.nbytes) for kind in TYPES.values()}


def pair(key: str, kind: str, value: Any) -> bytes:
    """A key value; ``kind``: u32, i32, f32, bool or str, or one of them with [] behind it for an array."""
    element = kind.removesuffix("[]")
    number = _STRING if element == "str" else _CODES[element][0]
    if kind == element:
        return _text(key.encode()) + struct.pack("<I", number) + _items(element, [value])
    return _text(key.encode()) + struct.pack("<IIQ", _ARRAY, number, len(value)) + _items(element, value)


def copied_pair(header: GgufHeader, key: str) -> bytes:
    """A key value of a little-endian file, byte for byte."""
    value = header.values[key]
    kind = struct.pack("<I", value.type)
    if value.items is not None:
        kind = struct.pack("<IIQ", _ARRAY, value.type, value.items)
    return _text(key.encode()) + kind + header.raw[value.begin : value.end]


def header_bytes(pairs: Sequence[bytes], tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> bytes:
    """The header, padding before the data included; ``tensors``: name, type and shape as numpy has it, in order."""
    infos, at = [], 0
    for name, kind, shape in tensors:
        sizes = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        infos.append(_text(name.encode()) + sizes + struct.pack("<IQ", _NUMBERS[kind], at))
        size = tensor_bytes(kind, shape)
        at += size + padding(size)
    head = MAGIC + struct.pack("<IQQ", 3, len(infos), len(pairs)) + b"".join(pairs) + b"".join(infos)
    return head + bytes(padding(len(head)))


def tensor_bytes(kind: str, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor without its padding; its rows are a multiple of the type's block."""
    elements, nbytes = _SIZES[kind]
    return math.prod(shape) // elements * nbytes


def padding(size: int) -> int:
    """Bytes up to the next multiple of the alignment."""
    return -size % ALIGNMENT


def _items(kind: str, values: Sequence[Any]) -> bytes:
    if kind == "str":
        return b"".join(_text(value.encode("utf-8", "surrogatepass")) for value in values)
    return np.array(values, f"<{_CODES[kind][1]}").tobytes()


def _text(raw: bytes) -> bytes:
    return struct.pack("<Q", len(raw)) + raw
