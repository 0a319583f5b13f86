"""GGUF files for tests: the stored ones, and a plain writer whose every number can be wrong."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np

DATA = Path(__file__).parents[2] / "data/gguf"
EXPECTED: dict[str, Any] = json.loads((DATA / "expected.json").read_text())
FILES = sorted(EXPECTED)
CODES = {"u8": 0, "i8": 1, "u16": 2, "i16": 3, "u32": 4, "i32": 5, "f32": 6, "bool": 7, "str": 8, "u64": 10, "i64": 11}
CODES["f64"] = 12
STRUCT = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}


class Writer:
    """A GGUF file in pieces; each method returns bytes."""

    def __init__(self, order: str = "<", version: int = 3, alignment: int | None = None) -> None:
        self.order, self.version, self.alignment = order, version, alignment
        self.pairs: list[bytes] = []
        self.tensors: list[tuple[bytes, list[int], int, bytes]] = []  # name, ne, type number, data
        self.offsets: dict[int, int] = {}  # tensor number -> offset instead of the right one
        self.counts: tuple[int, int] | None = None
        self.fill = b"\0"
        self.tail = b""
        if alignment is not None:
            self.pair("general.alignment", "u32", alignment)

    def number(self, code: str, value: Any) -> bytes:
        return struct.pack(self.order + code, value)

    def text(self, value: bytes | str) -> bytes:
        raw = value.encode() if isinstance(value, str) else value
        return self.number("Q", len(raw)) + raw

    def value(self, kind: int, value: Any) -> bytes:
        return self.text(value) if kind == 8 else self.number(STRUCT[kind], value)

    def pair(self, key: bytes | str, kind: str, value: Any) -> Writer:
        """``kind``: a name in ``CODES``, or one with [] behind it for an array."""
        code = CODES[kind.removesuffix("[]")]
        if kind.endswith("[]"):
            body = self.number("I", 9) + self.number("I", code) + self.number("Q", len(value))
            body += b"".join(self.value(code, item) for item in value)
        else:
            body = self.number("I", code) + self.value(code, value)
        self.pairs.append(self.text(key) + body)
        return self

    def tensor(self, name: bytes | str, shape: list[int], kind: int, data: bytes) -> Writer:
        """``shape`` as numpy has it."""
        self.tensors.append((name.encode() if isinstance(name, str) else name, shape[::-1], kind, data))
        return self

    def padded(self, data: bytes) -> bytes:
        step = self.alignment or 32
        return data + self.fill * (-len(data) % step)

    def header(self) -> bytes:
        infos, at = b"", 0
        for i, (name, sizes, kind, data) in enumerate(self.tensors):
            infos += self.text(name) + self.number("I", len(sizes))
            infos += b"".join(self.number("Q", size) for size in sizes)
            infos += self.number("I", kind) + self.number("Q", self.offsets.get(i, at))
            at += len(self.padded(data))
        tensors, pairs = self.counts or (len(self.tensors), len(self.pairs))
        head = b"GGUF" + self.number("I", self.version) + self.number("Q", tensors) + self.number("Q", pairs)
        return head + b"".join(self.pairs) + infos

    def bytes(self) -> bytes:
        data = b"".join(self.padded(data) for *_, data in self.tensors)
        return self.padded(self.header()) + data + self.tail


def small(**options: Any) -> Writer:
    """A valid file of two tensors, F32 [3, 4] and Q4_0 [2, 32]."""
    rng = np.random.default_rng(1)
    writer = Writer(**options).pair("general.architecture", "str", "llama").pair("x.tokens", "str[]", ["a", "", "b"])
    writer.tensor("a.weight", [3, 4], 0, rng.bytes(48))
    return writer.tensor("b.weight", [2, 32], 2, rng.bytes(36))
