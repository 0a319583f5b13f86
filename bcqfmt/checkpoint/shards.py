"""Which tensor goes into which file, decided before the first byte is written."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from bcqfmt.container.stored_tensor import StoredTensor
from bcqfmt.limits import MAX_TENSORS, SHARD_HEADER_BYTES
from bcqfmt.weight.weight import BcqWeight

from .folder import SINGLE

_ENTRY = 120  # bytes of a tensor entry in the header without its name, rounded up
_DESCRIBED = 200  # bytes of a weight in the descriptor without its name; schemes are shared


class Unit(NamedTuple):
    """What must stay together: the parts of a weight, or one dense tensor."""

    name: str
    tensors: Mapping[str, StoredTensor]
    is_weight: bool

    @classmethod
    def of_weight(cls, weight: BcqWeight) -> Unit:
        return cls(weight.name, {part.name: part for part in weight.parts().values()}, True)

    @classmethod
    def of_dense(cls, tensor: StoredTensor) -> Unit:
        return cls(tensor.name, {tensor.name: tensor}, False)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def header_bytes(self) -> int:
        """An upper bound of what it adds to the header; a character of a name takes up to twelve bytes there."""
        wide = [len(json.dumps(name)) - 2 for name in self.tensors]
        return sum(size + _ENTRY for size in wide) + (2 * len(self.name) + _DESCRIBED if self.is_weight else 0)


def natural(name: str) -> list[tuple[int, int | str]]:
    """A sort key in which layer 10 comes after layer 9."""
    return [
        (0, int(piece)) if piece.isdecimal() and piece.isascii() else (1, piece)
        for piece in re.split(r"([0-9]+)", name)
    ]


def plan_shards(units: Iterable[Unit], max_bytes: int) -> list[list[Unit]]:
    """Units in natural order, a new shard whenever data or header would grow too large; at least one shard."""
    shards: list[list[Unit]] = [[]]
    data = header = count = 0
    for unit in sorted(units, key=lambda unit: (natural(unit.name), unit.name)):
        nbytes, described = unit.nbytes, unit.header_bytes
        full = (
            data + nbytes > max_bytes
            or header + described > SHARD_HEADER_BYTES
            or count + len(unit.tensors) > MAX_TENSORS
        )
        if shards[-1] and full:
            shards.append([])
            data = header = count = 0
        shards[-1].append(unit)
        data, header, count = data + nbytes, header + described, count + len(unit.tensors)
    return shards


def shard_names(count: int) -> list[str]:
    """``model.safetensors``, or ``model-00001-of-00007.safetensors`` and so on."""
    if count == 1:
        return [SINGLE]
    return [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
