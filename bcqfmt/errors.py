"""What goes wrong, as data and as exceptions.

A :class:`Finding` says what is wrong: code, place, what was found, what was expected. A check reports findings to
a *sink*. The validator's sink collects them; the reader's sink, :func:`refuse`, raises the first one::

    BcqError                      code, place, found, expected, hint, exit_code
    |-- InputError                exit 3   missing, unreadable, changed while it is read
    |-- FormatError               exit 4   malformed
    |-- UnsupportedError          exit 5   valid, but not for this version
    |-- MismatchError             exit 6   a digest or a comparison fails
    |-- OutputError               exit 7   cannot be written
    |-- NetworkError              exit 8   the hub or the network
    |-- ResourceError             exit 9   refused before it costs memory
    `-- UsageError                exit 2   the caller's arguments (also a ValueError)
"""

from __future__ import annotations

import difflib
import heapq
import itertools
import unicodedata
from collections.abc import Callable, Collection
from typing import NamedTuple

from .codes import CODES

_SHOWN = 160  # characters of a foreign name or text that a message shows
_LIKELY = 100  # names that are compared closely with a wrong one


def escape(text: str, limit: int = _SHOWN) -> str:
    """Foreign text made safe for a terminal, a log or a page: printable, on one line, bounded."""
    if len(text) <= limit and text.isprintable():  # the same test as below, a hundred times faster
        return text
    safe = []
    for character in text[: limit + 1]:
        category = unicodedata.category(character)
        if character == " " or category[0] not in "CZ":
            safe.append(character)
        else:
            safe.append(character.encode("unicode_escape").decode("ascii"))
    shown = "".join(safe[:limit])
    return shown + "..." if len(text) > limit else shown


def nearest_names(name: str, names: Collection[str]) -> str:
    """Names like a wrong one, up to three, for the end of a message: ``; there is a, b``. Empty where none is."""

    def shared(other: str) -> int:  # letters at both ends; difflib alone takes seconds for 50,000 names
        ends = zip(name, other, strict=False), zip(reversed(name), reversed(other), strict=False)
        return sum(len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))) for pairs in ends)

    close = difflib.get_close_matches(name, heapq.nlargest(_LIKELY, names, shared))
    close = close or [other for other in names if name in other][:3]
    return f"; there is {', '.join(map(escape, close))}" if close else ""


class Finding(NamedTuple):
    """One fault: ``code`` from the registry, ``file``, ``tensor`` (either may be empty), found and expected."""

    code: str
    file: str
    tensor: str
    found: str
    expected: str = ""

    @property
    def severity(self) -> str:
        """``error``, ``warning`` or ``note``."""
        return CODES[self.code].severity

    @property
    def place(self) -> str:
        """File and tensor, escaped."""
        tensor = f"'{escape(self.tensor)}'" if self.tensor else ""
        return ": ".join(part for part in (escape(self.file), tensor) if part)

    def text(self) -> str:
        """One line: code, place, title, found, expected."""
        place = f" {self.place}" if self.place else ""
        line = f"{self.code}{place}: {CODES[self.code].title}: {self.found}"
        return f"{line}; expected {self.expected}" if self.expected else line

    def as_dict(self) -> dict[str, str]:
        """The same as data for JSON output."""
        entry = CODES[self.code]
        return {
            "code": self.code,
            "severity": entry.severity,
            "title": entry.title,
            "file": escape(self.file),
            "tensor": escape(self.tensor, 512),
            "found": self.found,
            "expected": self.expected,
            "hint": entry.hint,
        }


Sink = Callable[[Finding], None]


class BcqError(Exception):
    """Base of every error that bcqfmt raises on purpose."""

    def __init__(self, finding: Finding, hint: str | None = None) -> None:
        super().__init__(finding, hint)
        self.finding = finding
        self.hint = CODES[finding.code].hint if hint is None else hint

    @property
    def code(self) -> str:
        """The stable code, for example ``BCQ-V113``."""
        return self.finding.code

    @property
    def exit_code(self) -> int:
        """The exit code of a program that stops here."""
        return CODES[self.finding.code].exit

    def __str__(self) -> str:
        return self.finding.text()


class InputError(BcqError):
    """The input is missing, unreadable or changes while it is read."""


class FormatError(BcqError):
    """The input breaks a rule of the format."""


class UnsupportedError(BcqError):
    """The input may be valid but is not something this version handles."""


class MismatchError(BcqError):
    """Bytes differ from what a digest or a comparison says."""


class OutputError(BcqError):
    """The output cannot be written."""


class NetworkError(BcqError):
    """The hub or the network fails."""


class ResourceError(BcqError):
    """Refused because of its size, before any of it is allocated."""


class UsageError(BcqError, ValueError):
    """An argument of the caller is wrong."""


_BY_EXIT: dict[int, type[BcqError]] = {
    2: UsageError,
    3: InputError,
    4: FormatError,
    5: UnsupportedError,
    6: MismatchError,
    7: OutputError,
    8: NetworkError,
    9: ResourceError,
}


def error(
    code: str, file: str = "", tensor: str = "", found: str = "", expected: str = "", hint: str | None = None
) -> BcqError:
    """The exception for ``code``, of the class that goes with its exit code."""
    return _BY_EXIT.get(CODES[code].exit, BcqError)(Finding(code, file, tensor, found, expected), hint)


def in_file(fault: BcqError, file: str) -> BcqError:
    """The same fault with the file it is in, which was not known where it was raised."""
    told = fault.finding
    return error(fault.code, file, told.tensor, told.found, told.expected, fault.hint)


def refuse(finding: Finding) -> None:
    """The reader's sink: raise errors, let warnings and notes pass."""
    if finding.severity == "error":
        raise _BY_EXIT.get(CODES[finding.code].exit, BcqError)(finding)
