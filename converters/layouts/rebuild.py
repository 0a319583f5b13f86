"""Source tensors from a weight by rules, byte for byte; a rule is checked before it is applied, wherever it is from."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from bcqfmt.container.dtypes import FLOATS
from bcqfmt.container.stored_tensor import StoredTensor
from bcqfmt.container.strict_json import canonical
from bcqfmt.errors import error, escape
from bcqfmt.weight.scheme import WeightSpec
from bcqfmt.weight.weight import BcqWeight

from .protocol import Rebuilder, Rule
from .tensors import padded_groups

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]
_COMPARED = 1 << 20  # bytes of the source that are read at a time, to be compared while they are in the cache


def check_rule(spec: WeightSpec, rule: Rule, known: Mapping[str, Rebuilder], place: str = "", tensor: str = "") -> None:
    """BCQ-E615 for a rule that is not known, BCQ-V703 for one that no converter writes for such a weight."""
    name = rule["rule"]
    rebuilder = _PART if name == "part" else known.get(name)
    if rebuilder is None:
        raise error("BCQ-E615", place, tensor, f"rule {escape(name)}", f"one of {', '.join(sorted(known))}")
    if not rebuilder.fits(spec):
        shape = "x".join(map(str, spec.shape))
        raise error("BCQ-V703", place, tensor, f"rule {name} for a weight {shape}", "a weight that the rule fits")
    values = {**rebuilder.required, **rebuilder.optional}
    wrong = (rule.keys() - values.keys() - {"rule"}) | (rebuilder.required.keys() - rule.keys())
    if wrong:
        found = f"rule {name} with {', '.join(sorted(map(escape, rule.keys() - {'rule'}))) or 'nothing'}"
        raise error("BCQ-V703", place, tensor, escape(found), f"{', '.join(values) or 'no parameter'}")
    for key in [key for key in values if key in rule]:  # in order: what a later one may be depends on earlier ones
        allowed = [canonical(value) for value in values[key](spec, rule)]
        if (found := canonical(rule[key])) not in allowed:
            raise error("BCQ-V703", place, tensor, f"{key} = {escape(found, 80)}", " or ".join(allowed) or f"no {key}")


def apply_rule(weight: BcqWeight, rule: Rule, known: Mapping[str, Rebuilder]) -> Array:
    """The source tensor that ``rule`` makes of a weight."""
    check_rule(weight.spec, rule, known, tensor=weight.name)
    found = list(pieces(weight, rule, known))
    return found[0] if len(found) == 1 else np.concatenate(found)


def pieces(weight: BcqWeight, rule: Rule, known: Mapping[str, Rebuilder]) -> Iterator[Array]:
    """The same in pieces of some rows, in order; the rule has been checked."""
    made = (_PART if rule["rule"] == "part" else known[rule["rule"]]).make(weight, rule)
    yield from [made] if isinstance(made, np.ndarray) else made


def _part(weight: BcqWeight, rule: Rule) -> Array:
    """The rule ``part``: the numbers of a part, transposed, padded with zeros or reshaped where the rule says so."""
    array = weight.parts()[rule["part"]].array()
    if rule.get("transpose"):
        array = np.ascontiguousarray(array.swapaxes(-1, -2))
    shape = tuple(rule.get("shape", array.shape))
    if math.prod(shape) == array.size:
        return array.reshape(shape)
    padded = np.zeros(shape, array.dtype)
    padded[tuple(slice(0, dim) for dim in array.shape)] = array
    return padded


def _part_shapes(spec: WeightSpec, rule: Rule) -> list[list[int]]:
    """Of a part of segment 0: flat (GGUF), one number a line (HQQ), its groups padded (AWQ); transposed before that."""
    *lead, rows, groups = spec.parts()[rule["part"]].shape
    wide = padded_groups(spec.columns, spec.scheme.segments[0].group_size)
    turned = "transpose" in rule
    size = math.prod((*lead, rows, groups))
    return [[size], [size, 1], [*lead, wide, rows] if turned else [*lead, rows, wide]]


_PART = Rebuilder(
    _part,
    lambda spec: len(spec.scheme.segments) == 1,
    {"part": lambda spec, _: [name for name, part in spec.parts().items() if part.dtype in FLOATS and name[0] == "s"]},
    {"transpose": lambda *_: [True], "shape": _part_shapes},
)


def rebuilds(weight: BcqWeight, rule: Rule, tensor: StoredTensor, known: Mapping[str, Rebuilder]) -> bool:
    """Whether ``rule`` gives back the bytes of the source tensor, which is read a little at a time."""
    check_rule(weight.spec, rule, known, tensor=weight.name)
    done = 0
    buffer = np.empty(min(_COMPARED, tensor.nbytes), np.uint8)
    for piece in map(as_bytes, pieces(weight, rule, known)):
        if done + piece.size > tensor.nbytes:
            return False
        for start in range(0, piece.size, _COMPARED):
            chunk = piece[start : start + _COMPARED]
            tensor.read_into(buffer[: chunk.size], done)
            if not same_bytes(chunk, buffer[: chunk.size]):
                return False
            done += chunk.size
    return done == tensor.nbytes


def same_bytes(left: Bytes, right: Bytes) -> bool:
    """Whether two uint8 arrays have the same content; compared eight bytes at a time, which numpy does faster."""
    if left.size != right.size:
        return False
    whole = left.size // 8 * 8
    same = bool((left[:whole].view(np.uint64) == right[:whole].view(np.uint64)).all())
    return same and (whole == left.size or np.array_equal(left[whole:], right[whole:]))


def as_bytes(array: Array) -> Bytes:
    """The bytes of an array in order."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
