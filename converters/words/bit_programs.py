"""Bit programs: how the words of a block of codes become one word per bit plane, and back.

Most layouts only *permute the bits of an address*. A block of 32 four-bit codes is 128 bits; in the GPTQ layout bit
t1t0 of code k4k3k2k1k0 has the address [k4 k3 | k2 k1 k0 t1 t0] (word | bit of the word), in planes it has the address
[t1 t0 | k4 k3 k2 k1 k0]. Exchanging a digit of the word number with a digit of the bit number is a SWAP of two words:
a shift, a mask and three exclusive-ors. Five exchanges do any such layout; `_exchange` finds them. Streams of 3, 5, 6
and 7 bits are not such permutations: their codes are first moved, one by one, into fields of 4 or 8 bits.

A `Container` is the program from a layout's words to planes; run backwards it leads from planes to the words.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .loop import CLEAR, MOVE, SWAP, TAIL

_PLANAR_PARTS = {1: (1,), 2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 7: (4, 2, 1), 8: (8,)}
_CODE = ("k0", "k1", "k2", "k3", "k4")  # which of 32 codes, lowest digit first: the bit address in a plane
Key = tuple[int, int]  # column, bit (0: the lowest)


class Step(NamedTuple):
    """SWAP exchanges ``mask << right`` of row x with ``mask`` of row y; MOVE ors bits of x, shifted, into y."""

    kind: int
    x: int
    y: int
    right: int
    left: int
    mask: int

    def back(self) -> Step:
        """The inverse, provided that the row that a MOVE goes to is clear."""
        if self.kind == MOVE:
            return Step(MOVE, self.y, self.x, self.left, self.right, self.mask << self.right >> self.left)
        return self

    def on(self, rows: dict[int, int]) -> Step:
        """The same step on other rows."""
        return self._replace(x=rows[self.x], y=rows[self.y])


@dataclass(frozen=True, eq=False)
class Container:
    """Rows 0..words-1 are the layout's words; after ``steps`` row ``ends[column, bit]`` is that plane."""

    words: int
    steps: tuple[Step, ...]
    ends: dict[Key, int]
    scratch: tuple[int, ...] = ()  # further rows, that must be clear before the steps

    @property
    def columns(self) -> int:
        """Codes side by side in a word, of different columns."""
        return 1 + max(column for column, _ in self.ends)


@dataclass(frozen=True)
class Program:
    """For the loop: load the source's words into the rows ``source``, run the steps, store the rows ``target``.

    ``steps`` int64 [any, 6]: the numbers of a `Step` each.
    """

    rows: int
    source: npt.NDArray[np.int64]
    target: npt.NDArray[np.int64]
    steps: npt.NDArray[np.int64]


@cache
def program(source: Container, target: Container, tail: int = 0) -> Program:
    """From the words of one container to those of another. ``tail``: codes in the last block, 0 if it is full."""
    rows: dict[int, int] = {row: source.ends[key] for key, row in target.ends.items() if key in source.ends}
    count = source.words + len(source.scratch)
    clear = list(source.scratch)
    used = {row for step in target.steps for row in (step.x, step.y)} | set(target.ends.values())
    for row in sorted(used | set(range(target.words))):
        if row not in rows:
            rows[row] = count
            clear.append(count)
            count += 1
    there = list(source.steps)
    back = [step.back().on(rows) for step in reversed(target.steps)]
    while not tail and there and back and there[-1] == back[0] and back[0].kind == SWAP:
        there.pop()
        back.pop(0)
    cut = [Step(TAIL, row, row, 0, 0, (1 << tail) - 1) for row in source.ends.values()] if tail else []
    steps = [Step(CLEAR, row, row, 0, 0, 0) for row in clear] + there + cut + back
    return Program(
        count,
        np.arange(source.words),
        np.array([rows[row] for row in range(target.words)], np.int64),
        np.array(steps, np.int64).reshape(-1, 6),
    )


def _exchange(word: Iterable[str], bit: Iterable[str], planes: Iterable[str]) -> Container:
    """``word``, ``bit``: what the digits of a bit's address mean, lowest first. ``planes``: t digits, then c digits."""
    word, bit, planes = list(word), list(bit), list(planes)
    words = 1 << len(word)
    steps: list[Step] = []
    while bit != list(_CODE):
        high = next(i for i, label in enumerate(word) if label in _CODE)
        low = _CODE.index(word[high])
        mask = sum(1 << i for i in range(32) if not i >> low & 1)
        pairs = ((row, row | 1 << high) for row in range(words) if not row >> high & 1)
        steps += [Step(SWAP, x, y, 1 << low, 0, mask) for x, y in pairs]
        word[high], bit[low] = bit[low], word[high]
    bits = sum(label.startswith("t") for label in planes)
    ends = {}
    for n in range(words):
        row = sum((n >> i & 1) << word.index(label) for i, label in enumerate(planes))
        ends[n >> bits, n & (1 << bits) - 1] = row
    return Container(words, tuple(steps), ends)


@cache
def stream(bits: int) -> Container:
    """LE(bits): 32 codes in ``bits`` words, code j at bit j*bits of the stream."""
    if bits not in (1, 2, 4, 8):
        return _odd_stream(bits)
    value = [f"t{i}" for i in range(bits.bit_length() - 1)]
    address = [*value, *_CODE]
    return _exchange(address[5:], address[:5], value)


def _odd_stream(bits: int) -> Container:
    width = 4 if bits == 3 else 8
    rows = {row: bits + row for row in range(width)}
    steps = _moves([divmod(j * bits, 32) for j in range(32)], bits, width, bits)
    steps += [step.on(rows) for step in stream(width).steps]
    ends = {key: rows[row] for key, row in stream(width).ends.items()}
    return Container(bits, tuple(steps), ends, tuple(rows.values()))


def _moves(places: list[tuple[int, int]], bits: int, width: int, first: int) -> list[Step]:
    """Code j, which begins at (row, bit) ``places[j]``, to field j of ``width`` bits in the rows from ``first`` on."""
    steps: list[Step] = []
    for j, (row, at) in enumerate(places):
        target, to = divmod(j * width, 32)
        inside = min(bits, 32 - at)
        for source, start, done, count in ((row, at, 0, inside), (row + 1, 0, inside, bits - inside)):
            if count:
                by = to + done - start
                mask = ((1 << count) - 1) << (to + done)
                steps.append(Step(MOVE, source, first + target, max(-by, 0), max(by, 0), mask))
    return steps


@cache
def slots(bits: int) -> Container:
    """floor(32/bits) whole codes per word. Its ends are words of four codes, a byte each (`byte_words`)."""
    per = 32 // bits
    codes = math.lcm(per, 32)  # a run that fills whole words on both sides
    words = codes // per
    places = [(j // per, j % per * bits) for j in range(codes)]
    ends = {(0, i): words + i for i in range(codes // 4)}
    return Container(words, tuple(_moves(places, bits, 8, words)), ends, tuple(ends.values()))


@cache
def byte_words(count: int) -> Container:
    """Words of four codes that stay as they are: the other side of `slots`."""
    return Container(count, (), {(0, i): i for i in range(count)})


@cache
def planar(bits: int) -> Container:
    """gptq_p: the low 4 or 2 bits of 32 codes as one stream, the next 2 or 1 as another, then the top one."""
    steps: list[Step] = []
    ends: dict[Key, int] = {}
    for width in _PLANAR_PARTS[bits]:
        base = len(ends)
        rows = {row: base + row for row in range(width)}
        steps += [step.on(rows) for step in stream(width).steps]
        ends |= {(0, base + bit): rows[row] for (_, bit), row in stream(width).ends.items()}
    return Container(bits, tuple(steps), ends)


@cache
def awq() -> Container:
    """32 words, one for each k, of eight columns: column c2c1c0 lies in nibble c0c2c1."""
    return _exchange(_CODE, ["t0", "t1", "c1", "c2", "c0"], ["t0", "t1", "c0", "c1", "c2"])


@cache
def gemv_fast() -> Container:
    """Eight int16 as four words: code k is nibble k4k3 of int16 number k2k1k0."""
    return _exchange(["k1", "k2"], ["t0", "t1", "k3", "k4", "k0"], ["t0", "t1"])


# GGUF: digits of the word and of the bit in it, digits of the value and of the block of 32 codes
_GGUF = {
    "halves": (["k2", "k3"], ["t0", "t1", "k4", "k0", "k1"], ["t0", "t1"]),
    "quarters": (["k2", "k4"], ["t0", "t1", "k3", "k0", "k1"], ["t0", "t1"]),
    "nibbles": (["k2", "k3", "k4"], ["t0", "t1", "c0", "k0", "k1"], ["t0", "t1", "c0"]),
    "far nibbles": (["k2", "k3", "k4", "c0"], ["t0", "t1", "c1", "k0", "k1"], ["t0", "t1", "c0", "c1"]),
    "pairs": (["k2", "k3", "k4"], ["t0", "c0", "c1", "k0", "k1"], ["t0", "c0", "c1"]),
    "bits": (["k2", "k3", "k4"], ["c0", "c1", "c2", "k0", "k1"], ["c0", "c1", "c2"]),
}


@cache
def gguf(order: str) -> Container:
    """Fields of GGUF blocks, the low bits of a byte first.

    halves: codes j and j+16 of 32 in byte j. quarters: the same of 16, twice. nibbles: code j of two blocks of 32 in
    byte j. far nibbles: of four blocks, the first two in the low nibbles. pairs: 2 bits of four blocks in a byte. bits:
    one bit of eight blocks in a byte.
    """
    return _exchange(*_GGUF[order])


@cache
def sheet(bits: int) -> Container:
    """32 words, one for each k, of eight columns of 4 bits or four of 8, in plain order."""
    value = ["t0", "t1"] if bits <= 4 else ["t0", "t1", "t2"]
    column = ["c0", "c1", "c2"][: 5 - len(value)]
    return _exchange(_CODE, value + column, value + column)


@cache
def plane_words(bits: int) -> Container:
    """Words of planes, the most significant first: no steps."""
    return Container(bits, (), {(0, bit): bits - 1 - bit for bit in range(bits)})


@cache
def together(container: Container, count: int) -> Container:
    """``count`` lanes as columns of one: their words one after the other."""
    height = container.words + len(container.scratch)
    steps: list[Step] = []
    ends: dict[Key, int] = {}
    scratch: list[int] = []
    for column in range(count):
        rows = {row: container.words * column + row for row in range(container.words)}
        extra = container.words * count + len(container.scratch) * column - container.words
        rows |= {row: extra + row for row in range(container.words, height)}
        steps += [step.on(rows) for step in container.steps]
        ends |= {(column, bit): rows[row] for (_, bit), row in container.ends.items()}
        scratch += [rows[row] for row in container.scratch]
    return Container(container.words * count, tuple(steps), ends, tuple(scratch))
