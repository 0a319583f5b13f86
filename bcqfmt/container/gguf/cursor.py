"""The beginning of a file, read forward: every length is compared with what the file has before it is used."""

from __future__ import annotations

import struct
from typing import Final

from bcqfmt.container.files import ByteSource
from bcqfmt.errors import error

MAX_HEADER: Final = 100_000_000  # bytes; the largest tokenizers take about 20 million
_WINDOW = 1 << 20  # bytes read first; doubled on need


class Cursor:
    """Integers and byte strings of ``source``, one after the other from byte 0. ``order``: ``<`` or ``>``."""

    def __init__(self, source: ByteSource) -> None:
        self.source = source
        self.order = "<"
        self.at = 0
        self._held = bytearray()

    def require(self, size: int, what: str) -> None:
        """BCQ-E213 unless the file has ``size`` more bytes, BCQ-E219 when the header grows too long with them."""
        left = self.source.size - self.at
        if size > left:
            found = f"{what} at byte {self.at}: {left} bytes left"
            raise error("BCQ-E213", self.source.shown, found=found, expected=f"{size}")
        if self.at + size > MAX_HEADER:
            found = f"{what} ends at byte {self.at + size}"
            raise error("BCQ-E219", self.source.shown, found=found, expected=f"{MAX_HEADER}")

    def skip(self, size: int, what: str) -> int:
        """Go on by ``size`` bytes, which are there; where they begin."""
        self.require(size, what)
        begin, self.at = self.at, self.at + size
        if self.at > len(self._held):
            wanted = min(max(self.at, 2 * len(self._held), _WINDOW), self.source.size)
            self._held += self.source.read(len(self._held), wanted - len(self._held)).data
        return begin

    def integer(self, code: str, what: str) -> int:
        """A number of the type that ``struct`` calls ``code``."""
        begin = self.skip(struct.calcsize(code), what)
        value: int = struct.unpack_from(self.order + code, self._held, begin)[0]
        return value

    def text(self, what: str) -> bytes:
        """A string: 64 bits of length, then the bytes."""
        length = self.integer("Q", f"length of {what}")
        begin = self.skip(length, what)
        return bytes(self._held[begin : self.at])

    def skip_strings(self, count: int, what: str) -> None:
        """Go on behind ``count`` strings."""
        self.require(8 * count, what)
        unpack = struct.Struct(f"{self.order}Q").unpack_from
        held, at = self._held, self.at
        for _ in range(count):
            if at + 8 <= len(held):
                end = at + 8 + unpack(held, at)[0]
                if end <= len(held):
                    at = end
                    continue
            self.at = at
            self.skip(self.integer("Q", f"length in {what}"), what)
            at = self.at
        self.at = at

    def bytes_from(self, begin: int) -> bytes:
        """The bytes from ``begin`` to here."""
        return bytes(self._held[begin : self.at])
