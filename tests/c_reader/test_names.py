"""Rule V120 in C: normalization form C and full case folding, against Python's own tables."""

from __future__ import annotations

import random
import re
import unicodedata

import pytest

import c_reader
from c_reader import Runner

pytestmark = pytest.mark.cc

CODE_POINTS = [c for c in range(0x110000) if not 0xD800 <= c <= 0xDFFF]
# what composes, decomposes, reorders or folds in an unusual way
ODD = [
    *range(0x41, 0x5B), *range(0xC0, 0x180), *range(0x300, 0x370), *range(0x370, 0x400), 0x1E9E, 0x212A, 0x212B,
    *range(0x1100, 0x1113), *range(0x1161, 0x1176), *range(0x11A7, 0x11C3), 0xAC00, 0xAC01, 0xD7A3,
    *range(0x1F00, 0x2000), *range(0x0900, 0x0DDF), 0x0FB2, 0x0F71, 0x0F80, *range(0x3041, 0x30FF), 0x3099, 0x309A,
    *range(0xFB00, 0xFB50), *range(0x1D15E, 0x1D165), 0x11131, 0x11127, 0x2F800, 0xF900, 0x20, 0x2260, 0x338,
]  # fmt: skip


def tables_version() -> str:
    found = re.search(r'#define BCQ__UNICODE "([0-9.]+)"', (c_reader.SOURCES / "bcq.h").read_text("ascii"))
    assert found is not None
    return found[1]


def folded(name: str) -> str:
    return unicodedata.normalize("NFC", name).casefold()


def ask(runner: Runner, names: list[str]) -> list[str]:
    answers = runner.ask([f"fold\t{name.encode().hex()}" for name in names])
    return [bytes.fromhex(line).decode() for (line,) in answers]


def test_every_character(runner: Runner) -> None:
    """One by one, kept apart by U+0000. Python may know a later Unicode: then characters may be missing in C."""
    names = ["\0".join(map(chr, CODE_POINTS[i : i + 100])) for i in range(0, len(CODE_POINTS), 100)]
    exact = tables_version() == unicodedata.unidata_version
    for name, found in zip(names, ask(runner, names), strict=True):
        for character, result in zip(name.split("\0"), found.split("\0"), strict=True):
            if result != folded(character):
                assert not exact, hex(ord(character))
                assert result == character, hex(ord(character))


def test_sequences(runner: Runner) -> None:
    rng = random.Random(120)
    names = ["".join(chr(rng.choice(ODD)) for _ in range(rng.randint(2, 12))) for _ in range(4000)]
    names += ["e" + "\u0301" * 200, "\u1100\u1161\u11a8" * 40, "\u0344" * 100, "\ufb03" * 150, "\U0001d160" * 120]
    for name, found in zip(names, ask(runner, names), strict=True):
        assert found == folded(name), ascii(name)
