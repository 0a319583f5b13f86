"""The block types that become BCQ weights: the fields of a block in their order, and what each of them is.

| field | meaning |
|---|---|
| d, m | F16 scale and offset of a group |
| dd, dmin | F16 second-order scale, of the scales and of the offsets |
| e | 8-bit floating-point scale of a group |
| s | scales and offsets as codes, packed in a way of its own (`scales`) |
| everything else | codes: see ``codes`` |
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Final, NamedTuple

import numpy as np


class Codes(NamedTuple):
    """A field that holds the planes ``first`` to ``stop`` (0: the most significant) in an order of `words.gguf`."""

    field: str
    order: str
    first: int
    stop: int


@dataclass(frozen=True)
class Kind:
    """``fields``: (name, numpy type, count). ``zero``: the code whose value is 0, None for offsets and tables."""

    bits: int
    group_size: int
    fields: tuple[tuple[str, str, int], ...]
    codes: tuple[Codes, ...]
    zero: int | None = None
    scale_bits: int = 0  # of second-order scale codes
    scale_zero: int = 0
    groups: int = 0  # that share a second-order scale

    @cached_property
    def elements(self) -> int:
        """Elements of a block."""
        if not self.codes:
            return 256  # TQ1_0
        field, _, first, stop = self.codes[0]
        size = next(count * np.dtype(kind).itemsize for name, kind, count in self.fields if name == field)
        return 8 * size // (stop - first)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of a block."""
        return self.block().itemsize

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Of the fields."""
        return tuple(name for name, _, _ in self.fields)

    def block(self, order: str = "<") -> np.dtype[np.void]:
        """A block as a numpy structure, numbers in the byte ``order`` of the file."""
        return np.dtype([(name, order + kind, (count,)) for name, kind, count in self.fields])

    @cached_property
    def runs(self) -> np.dtype[np.void]:
        """A block as runs of bytes, one for every field: numpy copies those much faster than arrays of bytes."""
        sizes = {name: count * np.dtype(kind).itemsize for name, kind, count in self.fields}
        return np.dtype([(name, f"V{size}") for name, size in sizes.items()])


_D, _M, _DD, _DMIN = ("d", "f2", 1), ("m", "f2", 1), ("dd", "f2", 1), ("dmin", "f2", 1)
_QS16, _QS32, _QS64, _QS128 = (("qs", "u1", count) for count in (16, 32, 64, 128))
_HALVES = (Codes("qs", "halves", 0, 4),)
_FIFTH = (Codes("qh", "stream 1", 0, 1), Codes("qs", "halves", 1, 5))
_Q3_K = (Codes("hmask", "bits", 0, 1), Codes("qs", "pairs", 1, 3))
_Q5_K = (Codes("qh", "bits", 0, 1), Codes("qs", "nibbles", 1, 5))
_Q6_K = (Codes("qh", "pairs", 0, 2), Codes("ql", "far nibbles", 2, 6))
_QH = ("qh", "u4", 1)  # one number, of the byte order of the file

KINDS: Final = {
    "Q4_0": Kind(4, 32, (_D, _QS16), _HALVES, 8),
    "Q4_1": Kind(4, 32, (_D, _M, _QS16), _HALVES),
    "Q5_0": Kind(5, 32, (_D, _QH, _QS16), _FIFTH, 16),
    "Q5_1": Kind(5, 32, (_D, _M, _QH, _QS16), _FIFTH),
    "Q8_0": Kind(8, 32, (_D, _QS32), (Codes("qs", "stream 8", 0, 8),), 128),
    "Q1_0": Kind(1, 128, (_D, _QS16), (Codes("qs", "stream 1", 0, 1),)),
    "Q2_0": Kind(2, 64, (_D, _QS16), (Codes("qs", "stream 2", 0, 2),), 1),
    "TQ1_0": Kind(2, 256, (("qs", "u1", 48), ("qh", "u1", 4), _D), (), 1),
    "TQ2_0": Kind(2, 256, (_QS64, _D), (Codes("qs", "pairs", 0, 2),), 1),
    "Q2_K": Kind(2, 16, (("s", "u1", 16), _QS64, _DD, _DMIN), (Codes("qs", "pairs", 0, 2),), None, 4, 0, 16),
    "Q3_K": Kind(3, 16, (("hmask", "u1", 32), _QS64, ("s", "u1", 12), _DD), _Q3_K, 4, 6, 32, 16),
    "Q4_K": Kind(4, 32, (_DD, _DMIN, ("s", "u1", 12), _QS128), (Codes("qs", "nibbles", 0, 4),), None, 6, 0, 8),
    "Q5_K": Kind(5, 32, (_DD, _DMIN, ("s", "u1", 12), ("qh", "u1", 32), _QS128), _Q5_K, None, 6, 0, 8),
    "Q6_K": Kind(6, 16, (("ql", "u1", 128), ("qh", "u1", 64), ("s", "u1", 16), _DD), _Q6_K, 32, 8, 128, 16),
    "IQ4_NL": Kind(4, 32, (_D, _QS16), _HALVES),
    "IQ4_XS": Kind(4, 32, (_DD, ("sh", "u2", 1), ("s", "u1", 4), _QS128), _HALVES, None, 6, 32, 8),
    "MXFP4": Kind(4, 32, (("e", "u1", 1), _QS16), _HALVES),
    "NVFP4": Kind(4, 16, (("e", "u1", 4), _QS32), (Codes("qs", "quarters", 0, 4),)),
}
