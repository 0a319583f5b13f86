"""What a layout is: it finds its modules in a source, turns each into a BCQ weight, and rebuilds the source from it.

    source tensors --Layout.convert--> Converted(weight, rules)
    weight --rebuild(rule)--> source tensor, byte for byte

A *module* is one linear layer of the source: a prefix and its tensors (``qweight``, ``scales``, ...). A *rule* is the
JSON object that says how one source tensor is rebuilt from the weight's parts; it is stored in ``bcq_source/``.
A conversion applies every rule once, and archives the tensor raw where the bytes differ. So no layout has to promise
that its rules cover every bit pattern.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy.typing as npt

from bcqfmt.container.stored_tensor import StoredTensor
from bcqfmt.converters.source.checkpoint import SourceCheckpoint
from bcqfmt.weight.scheme import WeightSpec
from bcqfmt.weight.weight import BcqWeight

Array = npt.NDArray[Any]
Rule = dict[str, Any]
Values = Callable[[WeightSpec, Rule], Collection[Any]]


class Rebuilder(NamedTuple):
    """What a rule does, and all that a rule of this name may say: rules come from files, which anyone can write.

    ``make(weight, rule)`` is called only for a weight that ``fits``, with a value for every parameter in ``required``,
    maybe some for those in ``optional``, and nothing else; both say which JSON values a parameter may have for a
    weight (and, for later ones, with the earlier parameters as they are). It gives the tensor, or its rows in pieces.
    """

    make: Callable[[BcqWeight, Rule], Array | Iterator[Array]]
    fits: Callable[[WeightSpec], bool]
    required: Mapping[str, Values] = {}
    optional: Mapping[str, Values] = {}


class NonfiniteNumbers(Exception):
    """Numbers that were read late are not finite, which the description of the weight, made before, does not say."""


@dataclass(frozen=True, slots=True)
class Options:
    """What the user may decide about a conversion's meaning, and how it is done.

    ``read_late``: a layout may describe a weight before it has read its numbers, if they are finite in most files; it
    raises `NonfiniteNumbers` when a part is computed and they are not.
    """

    zero_point: str = "auto"
    allow_nonfinite: bool = False
    threads: int = 1
    read_late: bool = False


@dataclass(slots=True)
class Module:
    """A quantized linear layer of the source. ``settings``: bits, group size and so on, resolved for this module."""

    name: str
    layout: str
    tensors: Mapping[str, StoredTensor]
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def weight_name(self) -> str:
        return f"{self.name}.weight"

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


class Converted(NamedTuple):
    """The weight, its large parts computed on demand, and a rule for every tensor of the module.

    ``heavy``: source suffix -> the part it is rebuilt from, for tensors that are checked when that part is computed.
    ``proofs``: source suffix -> a list that gets, when that part is computed, whether the tensor was rebuilt from it;
    it stays empty where the layout did not compare them itself.
    """

    weight: BcqWeight
    rules: dict[str, Rule]
    heavy: dict[str, str]
    proofs: Mapping[str, list[bool]] = {}


class Layout(Protocol):
    """One layout of one family of tools."""

    name: str

    def modules(self, source: SourceCheckpoint, options: Options) -> list[Module]:
        """The modules in this layout, by tensor names and shapes, cross-checked with the configuration."""

    def convert(self, module: Module, options: Options) -> Converted:
        """The weight of a module; reads the small tensors now, the large ones when parts are computed."""

    def rebuilders(self) -> Mapping[str, Rebuilder]:
        """Rule name -> how it rebuilds a source tensor."""
