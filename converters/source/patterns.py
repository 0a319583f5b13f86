"""Patterns of a configuration (``dynamic``, ``re:`` targets): `re` in meaning, matched in bounded time.

A stranger wrote them, and Python's ``re`` can be made to run for ever by a pattern of ten characters. The package
``regex`` reads the same patterns and has a time limit; the work on a checkpoint's patterns as a whole has one here. It
unrolls counted repetitions when it compiles, so their product is limited too. What is refused is BCQ-E618.
"""

from __future__ import annotations

import math
import re
import time
from typing import Any, Final

from bcqfmt.errors import BcqError, error, escape

_SECONDS: Final = 30.0  # for all names of a checkpoint; twelve patterns on 70,000 experts take three
_LENGTH: Final = 4_000  # characters of a pattern
_REPEATS: Final = 1_000
_COUNT: Final = re.compile(r"\{([0-9]*),?([0-9]*)\}")
_SET: Final = re.compile(r"\\.|\[\^?\]?((?:[^\]\\]|\\.)*)", re.DOTALL)
_RESERVED: Final = re.compile(r"\[|--|&&|~~|\|\|")  # inside a set: future syntax of re


class Patterns:
    """The patterns of one checkpoint (``place``: its name, for messages)."""

    def __init__(self, place: str) -> None:
        self._place = place
        self._left = _SECONDS
        self._known: dict[str, Any] = {}

    def fits(self, pattern: str, name: str, *, anywhere: bool = False) -> bool:
        """``re.match``, or with ``anywhere`` ``re.search``: whether there is a match."""
        start = time.thread_time()
        if pattern not in self._known:
            self._known[pattern] = self._compiled(pattern)
        found = None
        try:
            found = (self._known[pattern].search if anywhere else self._known[pattern].match)(name, timeout=self._left)
        except TimeoutError:
            self._left = 0.0
        self.spend(time.thread_time() - start)
        return found is not None

    def spend(self, seconds: float) -> None:
        """Count work; BCQ-E618 when it is too much."""
        self._left -= seconds
        if self._left <= 0:
            raise self._refused(f"matching takes more than {_SECONDS:g} seconds", "fewer or simpler patterns")

    def _compiled(self, pattern: str) -> Any:
        import regex

        try:
            if len(pattern) > _LENGTH:
                raise ValueError(f"{len(pattern):,} characters, more than {_LENGTH:,}")
            if math.prod(max(1, *(int(count or 1) for count in found)) for found in _COUNT.findall(pattern)) > _REPEATS:
                raise ValueError(f"more than {_REPEATS:,} repetitions")
            if any(_RESERVED.search(inner) for inner in _SET.findall(pattern)):
                raise ValueError("a set of characters that has [, --, &&, ~~ or || in it")
            re.compile(pattern)  # nothing is understood that it refuses
            return regex.compile(pattern, regex.VERSION0)
        except (ValueError, OverflowError, RecursionError, re.error, regex.error) as fault:
            raise self._refused(f"'{escape(pattern, 60)}': {fault}", "a pattern that can be matched") from None

    def _refused(self, found: str, expected: str) -> BcqError:
        return error("BCQ-E618", self._place, found=found, expected=expected)
