r"""Patterns of a configuration (``dynamic``, ``re:`` targets), matched in bounded time.

A stranger wrote them, and Python's ``re`` can be made to run for ever by a pattern of ten characters. So they are
matched without backtracking: the positions that a match can have reached are bits of an integer, and each piece of a
pattern turns the positions before it into those after it. Steps are counted, and a checkpoint whose patterns take too
many is refused. Understood are characters, ``.``, classes, ``\d \w \s``, groups, ``|``, ``* + ? {m,n}``, ``^ $ \b`` and
lookaheads, and they mean what they mean in ``re``; other things are refused (BCQ-E618). What a class or an anchor
accepts is left to ``re``, one character or position at a time.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from typing import Final

from bcqfmt.errors import BcqError, error, escape

_STEPS: Final = 5_000_000  # for all names of a checkpoint: seconds; ten patterns on 70,000 experts take 3.7 million
_LENGTH: Final = 4_000  # characters of a pattern
_DEPTH: Final = 30  # groups inside each other
_REPEATS: Final = 1_000
_COUNT: Final = re.compile(r"\{(?!\})([0-9]*)(,?)([0-9]*)\}")
_CLASS: Final = re.compile(r"\[\^?\]?(?:[^\]\\]|\\.)*\]", re.DOTALL)
_RESERVED: Final = re.compile(r"\[|--|&&|~~|\|\|")  # inside a class: future syntax of re

Step = Callable[["_Name", int], int]  # positions before a piece of a pattern -> positions after it


class Patterns:
    """The patterns of one checkpoint (``place``: its name, for messages)."""

    def __init__(self, place: str) -> None:
        self._place = place
        self._left = _STEPS
        self._known: dict[str, Step] = {}
        self._name: _Name | None = None

    def fits(self, pattern: str, name: str, *, anywhere: bool = False) -> bool:
        """``re.match``, or with ``anywhere`` ``re.search``: whether there is a match."""
        if pattern not in self._known:
            self._known[pattern] = self._compiled(pattern)
        if self._name is None or self._name.text != name:
            self.spend(1 + (len(name) ** 2 >> 12))
            self._name = _Name(name, self.spend)
        starts = (self._name.end << 1) - 1 if anywhere else 1
        return self._known[pattern](self._name, starts) != 0

    def spend(self, steps: int) -> None:
        """Count work; BCQ-E618 when it is too much."""
        self._left -= steps
        if self._left < 0:
            raise self._refused(f"matching takes more than {_STEPS:,} steps", "fewer or simpler patterns")

    def _compiled(self, pattern: str) -> Step:
        self.spend(len(pattern))
        try:
            if len(pattern) > _LENGTH:
                raise _NotUnderstood(f"{len(pattern):,} characters, more than {_LENGTH:,}")
            return _Parser(pattern).whole()
        except _NotUnderstood as fault:
            raise self._refused(f"'{escape(pattern, 60)}': {fault}", "a pattern that can be matched") from None

    def _refused(self, found: str, expected: str) -> BcqError:
        return error("BCQ-E618", self._place, found=found, expected=expected)


class _NotUnderstood(Exception):
    """Why a pattern is refused."""


class _Name:
    """A name, and where in it characters and anchors are: bit i is the position before character i."""

    def __init__(self, text: str, spend: Callable[[int], None]) -> None:
        self.text, self.end = text, 1 << len(text)
        self.spend = spend if len(text) < 1024 else lambda steps: spend(steps * len(text) >> 10)
        self.characters: dict[str, int] = {}
        for i, character in enumerate(text):
            self.characters[character] = self.characters.get(character, 0) | 1 << i
        last = self.end | (self.end >> 1 if text.endswith("\n") else 0)
        self._masks = {"^": 1, "\\A": 1, "$": last, "\\Z": self.end}

    def accepted(self, one: str) -> int:
        """Positions before a character of the class ``one``."""
        if one not in self._masks:
            self.spend(len(self.characters) >> 2)
            self._masks[one] = sum(mask for c, mask in self.characters.items() if _accepts(one, c))
        return self._masks[one]

    def anchors(self, anchor: str) -> int:
        """Positions where an anchor matches."""
        if anchor not in self._masks:
            self.spend(len(self.text) >> 2)
            found = re.compile(anchor)
            self._masks[anchor] = sum(1 << i for i in range(len(self.text) + 1) if found.match(self.text, i))
        return self._masks[anchor]


@lru_cache(1 << 16)
def _accepts(one: str, character: str) -> bool:
    return re.fullmatch(one, character) is not None


class _Text:
    """These characters."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __call__(self, name: _Name, starts: int) -> int:
        name.spend(1 + (len(self.text) >> 3))
        for character in self.text:
            starts = (starts & name.characters.get(character, 0)) << 1
            if not starts:
                break
        return starts


class _One:
    """One character of a class."""

    def __init__(self, one: str) -> None:
        self._one = one

    def __call__(self, name: _Name, starts: int) -> int:
        name.spend(1)
        return (starts & name.accepted(self._one)) << 1

    def all(self, name: _Name, starts: int) -> int:
        """Any number of them: an addition carries every start through the run of positions that it is in."""
        name.spend(1)
        mask = name.accepted(self._one)
        return starts | (((starts & mask) + mask) ^ mask)


def _anchor(anchor: str) -> Step:
    def step(name: _Name, starts: int) -> int:
        name.spend(1)
        return starts & name.anchors(anchor)

    return step


def _ahead(inner: Step, wanted: bool) -> Step:
    def step(name: _Name, starts: int) -> int:
        kept = 0
        while starts:
            name.spend(1)
            first = starts & -starts
            kept |= first if (inner(name, first) != 0) == wanted else 0
            starts ^= first
        return kept

    return step


def _sequence(steps: list[Step]) -> Step:
    def step(name: _Name, starts: int) -> int:
        for one in steps:
            if not starts:
                break
            starts = one(name, starts)
        return starts

    return steps[0] if len(steps) == 1 else step


def _either(branches: list[Step]) -> Step:
    def step(name: _Name, starts: int) -> int:
        found = 0
        for branch in branches:
            name.spend(1)
            found |= branch(name, starts)
        return found

    return branches[0] if len(branches) == 1 else step


def _repeat(inner: Step, least: int, most: int | None) -> Step:
    def step(name: _Name, starts: int) -> int:
        for _ in range(least):
            name.spend(1)
            starts = inner(name, starts)
        if most is None and isinstance(inner, _One):
            return inner.all(name, starts)
        new, rounds = starts, least
        while new and rounds != most:  # a position that was reached before leads nowhere new
            name.spend(1)
            new = inner(name, new) & ~starts
            starts |= new
            rounds += 1
        return starts

    return step


class _Parser:
    """A pattern as a step; :class:`_NotUnderstood` for what is not in the subset, or not a pattern at all."""

    def __init__(self, text: str) -> None:
        self._text, self._at, self._depth = text, 0, 0

    def whole(self) -> Step:
        step = self._alternatives()
        if self._at < len(self._text):
            raise _NotUnderstood("a parenthesis too many")
        return step

    def _alternatives(self) -> Step:
        branches = [self._branch()]
        while self._take("|"):
            branches.append(self._branch())
        return _either(branches)

    def _branch(self) -> Step:
        steps: list[Step] = []
        while self._at < len(self._text) and self._text[self._at] not in "|)":
            step = self._repeated()
            last = steps[-1] if steps else None
            if isinstance(step, _Text) and isinstance(last, _Text):
                steps[-1] = _Text(last.text + step.text)
            else:
                steps.append(step)
        return _sequence(steps)

    def _repeated(self) -> Step:
        count = self._count()
        if count is not None:
            raise _NotUnderstood("nothing to repeat")
        step, repeatable = self._atom()
        count = self._count()
        if count is None:
            return step
        self._take("?")  # greedy or not, the same names match
        if not repeatable or self._take("+") or self._count() is not None:
            raise _NotUnderstood("a repetition that is possessive, repeated, or of nothing")
        return _repeat(step, *count)

    def _count(self) -> tuple[int, int | None] | None:
        """A quantifier, if one is next; a brace that is none stands for itself."""
        for sign, found in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self._take(sign):
                return found
        match = _COUNT.match(self._text, self._at)
        if match is None:
            return None
        self._at = match.end()
        if max(len(match[1]), len(match[3])) > 4:
            raise _NotUnderstood(f"more than {_REPEATS} repetitions")
        least = int(match[1] or 0)
        most = least if not match[2] else int(match[3]) if match[3] else None
        if max(least, most or 0) > _REPEATS or (most is not None and most < least):
            raise _NotUnderstood(f"{least} to {most} repetitions")
        return least, most

    def _atom(self) -> tuple[Step, bool]:
        """The next piece, and whether it may be repeated."""
        character = self._text[self._at]
        if character == "(":
            return self._group(), True
        if character == "[":
            return _One(self._class()), True
        self._at += 1
        if character in "^$":
            return _anchor(character), False
        if character == ".":
            return _One("."), True
        if character != "\\":
            return _Text(character), True
        escaped = self._text[self._at : self._at + 1]
        self._at += 1
        if escaped and escaped in "AZbB":
            return _anchor(f"\\{escaped}"), False
        if not escaped or (escaped.isascii() and escaped.isalnum() and escaped not in "dDwWsS"):
            raise _NotUnderstood(f"the escape \\{escaped}")
        return _One(f"\\{escaped}") if escaped in "dDwWsS" else _Text(escaped), True

    def _class(self) -> str:
        match = _CLASS.match(self._text, self._at)
        if match is None or _RESERVED.search(match[0], 1):
            raise _NotUnderstood("a class of characters that does not end, or has [, --, &&, ~~ or || in it")
        try:
            re.compile(match[0])
        except (re.error, OverflowError):
            raise _NotUnderstood(f"the class {escape(match[0], 40)}") from None
        self._at = match.end()
        return match[0]

    def _group(self) -> Step:
        self._at += 1
        self._depth += 1
        kind = next((kind for kind in ("?:", "?=", "?!") if self._take(kind)), "")
        if self._depth > _DEPTH or (not kind and self._text[self._at : self._at + 1] == "?"):
            raise _NotUnderstood(
                f"more than {_DEPTH} groups inside each other, or a group that is not (, (?:, (?=, (?!"
            )
        step = self._alternatives()
        if not self._take(")"):
            raise _NotUnderstood("a group that does not end")
        self._depth -= 1
        return _ahead(step, kind == "?=") if kind in ("?=", "?!") else step

    def _take(self, text: str) -> bool:
        found = self._text.startswith(text, self._at)
        self._at += len(text) if found else 0
        return found
