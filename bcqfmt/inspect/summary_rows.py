"""Rows of the tables that a summary is made of."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

from bcqfmt.weight.scheme import Scheme

__all__ = ["ModuleRow", "SchemeRow", "TypeRow"]


class ModuleRow(NamedTuple):
    """One weight."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    scheme: int
    nbytes: int
    file: str

    @property
    def bits_per_weight(self) -> float:
        """Stored bits per element, everything counted."""
        return self.nbytes * 8 / prod(self.shape)


@dataclass(slots=True)
class SchemeRow:
    """A scheme and what it is used for."""

    scheme: Scheme
    weights: int = 0
    parameters: int = 0
    nbytes: int = 0

    @property
    def bits_per_weight(self) -> float:
        """Average over its weights."""
        return self.nbytes * 8 / self.parameters

    def as_dict(self) -> dict[str, Any]:
        """The numbers."""
        counts = {"weights": self.weights, "parameters": self.parameters, "bytes": self.nbytes}
        return {**counts, "bits_per_weight": self.bits_per_weight}


@dataclass(slots=True)
class TypeRow:
    """Tensors of one element type, as stored."""

    tensors: int = 0
    elements: int = 0
    nbytes: int = 0
