"""Which instructions of the processor are used; `features` says of which processor."""

from __future__ import annotations

import functools
from typing import NamedTuple


@functools.cache
def target() -> str:
    """The best known of its instructions: "avx512", "avx2", "ssse3", "neon" or "portable", those every one has."""
    from bcqfmt.compiled.intrinsics import features  # numba is imported late

    known = features()
    for name, flags in (
        ("avx512", ("+avx512f", "+avx512bw")), ("avx2", ("+avx2",)), ("ssse3", ("+ssse3",)), ("neon", ("+neon",)),
    ):  # fmt: skip
        if known.issuperset(flags):
            return name
    return "portable"


class Dot(NamedTuple):
    """How products of bytes are summed.

    ``kind``: "sdot" (ARM) or "vpdpbusd" (x86), which add four products to 32 bits; "pmaddubsw" (x86), two to 16;
    "plain": multiplications of 16 bits. ``rows``: of a vector, which has 16 bytes of each. ``vectors``: that are
    multiplied together, as the registers allow. ``lookup_planes``: weights of up to this many planes, in
    groups shorter than a word, or with a scale for every plane are multiplied by look-ups (`lut`) instead, which are
    faster there, as measured; 0: none is.
    """

    kind: str
    rows: int
    vectors: int
    lookup_planes: int = 0

    @property
    def tile(self) -> int:
        """Rows that are multiplied together."""
        return self.rows * self.vectors

    @property
    def unsigned(self) -> bool:
        """Whether one of the two bytes, the code, has no sign."""
        return self.kind in ("vpdpbusd", "pmaddubsw")

    @property
    def looks_up_bytes(self) -> bool:
        """Whether sixteen bytes can be looked up at a time."""
        return self.unsigned or target() == "neon"


@functools.cache
def dot() -> Dot:
    """For the processor that numba compiles for."""
    from bcqfmt.compiled.intrinsics import features, has_dot_products

    known, name = features(), target()
    if name == "avx512":
        kind, planes = ("vpdpbusd", 2) if "+avx512vnni" in known else ("pmaddubsw", 4)
        return Dot(kind, 4, 2, lookup_planes=planes)
    if name == "avx2":
        return Dot("vpdpbusd" if "+avxvnni" in known else "pmaddubsw", 2, 1, lookup_planes=2)
    if name == "ssse3":
        return Dot("pmaddubsw", 1, 1)
    return Dot("sdot" if has_dot_products() else "plain", 1, 2)
