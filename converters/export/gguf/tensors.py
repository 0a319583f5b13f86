"""The tensors of the file: which weight or dense tensor becomes which, under what name, of what type."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from bcqfmt.checkpoint.reader import Checkpoint
from bcqfmt.checkpoint.shards import natural
from bcqfmt.container.dtypes import FLOATS, numpy_dtype
from bcqfmt.container.gguf.types import DENSE
from bcqfmt.container.gguf.writer import tensor_bytes
from bcqfmt.container.stored_tensor import StoredTensor
from bcqfmt.converters.gguf.kinds import KINDS
from bcqfmt.converters.source.gguf_names import LAYERS, Named, architecture, namer, stored_name
from bcqfmt.converters.source.gguf_rows import rows_back
from bcqfmt.errors import error, escape
from bcqfmt.weight.weight import BcqWeight

from .choice import Choice, choose
from .encode import Each, Error, encoded
from .metadata import Metadata

Bytes = npt.NDArray[np.uint8]
_EXPERT = re.compile(r"(.*\.experts)\.(0|[1-9][0-9]{0,4})\.(.*)")  # one matrix of a stack
_MAX_NAME: Final = 63
_COPY: Final = 1 << 20  # elements


@dataclass(slots=True)
class Tensor:
    """A tensor to be written: ``members``, one of them or the matrices of a stack; ``names`` of these in the folder."""

    name: str
    type: str
    shape: tuple[int, ...]
    names: list[str]
    members: list[BcqWeight] | list[StoredTensor]
    heads: int = 0
    choice: Choice | None = None  # of weights
    error: Error = field(default_factory=Error)

    @property
    def nbytes(self) -> int:
        return tensor_bytes(self.type, self.shape)

    def chunks(self, each: Each = map) -> Iterator[Bytes]:
        """The bytes in order; ``each`` as in `encoded`."""
        for member in self.members:
            if isinstance(member, BcqWeight):
                assert self.choice is not None
                yield from encoded(member, self.choice, self.heads, self.error, each)
            else:
                yield from _dense_bytes(member, self.type, self.heads)


def tensors_of(checkpoint: Checkpoint, meta: Metadata, notes: list[str]) -> list[Tensor]:
    """Every tensor, in the order of the file; BCQ-E640, BCQ-E641 if they are not those that the header needs."""
    kind, named = architecture(meta.header), namer(meta.header) or (lambda name, shape: Named(name))
    found: dict[str, Tensor] = {}
    for names, members in _stacks(checkpoint, notes):
        made = _tensor(names, members, meta, kind, named)
        if made.name in found:
            raise _misplaced(names[0], f"it would be '{made.name}' too", "every name once", meta)
        found[made.name] = made
        if (scale := _second_scale(made)) is not None:
            found[scale.name] = scale
    _compare(found, meta, notes)
    for name, tensor in meta.donated.items():
        if name not in found:
            found[name] = Tensor(name, "F32", tensor.shape, [name], [tensor])
    place = {name: i for i, name in enumerate(meta.tensors)}
    return sorted(found.values(), key=lambda t: (place.get(t.name, len(place)), natural(t.name)))


def _stacks(checkpoint: Checkpoint, notes: list[str]) -> Iterator[tuple[list[str], Any]]:
    """Weights and dense tensors, experts that are stored one by one together."""
    modules = {name.removesuffix(".weight") for name, _ in checkpoint.weights()}
    experts: dict[tuple[str, type], dict[int, tuple[str, Any]]] = {}
    left = []
    for name, thing in [*checkpoint.weights(), *checkpoint.dense()]:
        described = isinstance(thing, StoredTensor) and thing.dtype not in FLOATS
        if described and name.rpartition(".")[0] in modules:
            left.append(name)
        elif match := _EXPERT.fullmatch(name):
            experts.setdefault((f"{match[1]}.{match[3]}", type(thing)), {})[int(match[2])] = name, thing
        else:
            yield [name], [thing]
    if left:
        notes.append(f"left out: {len(left)} tensors that describe the source's layout, '{escape(left[0])}' the first")
    for (name, _), stack in experts.items():
        if sorted(stack) != list(range(len(stack))):
            raise error("BCQ-E641", tensor=name, found=f"experts {sorted(stack)}", expected="all, from 0")
        yield [stack[i][0] for i in range(len(stack))], [stack[i][1] for i in range(len(stack))]


def _tensor(names: list[str], members: Any, meta: Metadata, kind: str, named: Any) -> Tensor:
    match = _EXPERT.fullmatch(names[0])
    name = f"{match[1]}.{match[3]}" if match else names[0]
    kept = meta.own and name in meta.tensors  # convert left it as it was
    stored = name if kept else stored_name(kind, name) or (name if name in meta.tensors or kind not in LAYERS else "")
    if not 0 < len(stored.encode()) <= _MAX_NAME:
        raise _misplaced(name, f"no name for it in files of architecture {kind}", "a tensor of such a model", meta)
    shapes = {member.shape for member in members}
    shape = members[0].shape if not match else (len(members), *members[0].shape)
    if len(shapes) > 1:
        raise _misplaced(name, f"matrices of {len(shapes)} shapes", "one shape for all experts", meta)
    if stored in meta.tensors and math.prod(meta.tensors[stored].shape) == math.prod(shape):
        shape = meta.tensors[stored].shape if meta.own else shape
    back, heads, added = Named(name) if kept else named(stored, shape)
    if back != name:
        found = f"rows that do not divide into the heads: {list(shape)}"
        raise _misplaced(name, found, "pairs of rows for every head that the header names", meta)
    if isinstance(members[0], BcqWeight):
        own = meta.tensors[stored].type.name if meta.own and stored in meta.tensors else ""
        choice = _common([choose(member, own if own in KINDS else "") for member in members])
        return Tensor(stored, choice.type, shape, names, members, heads, choice)
    members = [_raised(member, added) for member in members] if added else members
    return Tensor(stored, _dense_type(stored, members[0], meta), shape, names, members, heads)


def _raised(tensor: StoredTensor, added: int) -> StoredTensor:
    """The weights of a norm as GGUF stores them: F32, and in the Gemma family with 1 added."""
    return StoredTensor(tensor.name, "F32", tensor.shape, make=lambda: tensor.array().astype(np.float32) + added)


def _common(choices: list[Choice]) -> Choice:
    """One choice for all matrices of a stack: the same where they agree, else all by their values."""
    if len(set(choices)) == 1:
        return choices[0]
    wrong = next((choice for choice in choices if not choice.exact), choices[0])
    types = ", ".join(sorted({choice.type for choice in choices}))
    return Choice("Q8_0", "values", wrong.found or f"experts that need {types}", wrong.expected or "one type for all")


def _dense_type(stored: str, tensor: StoredTensor, meta: Metadata) -> str:
    """Its own; F32 for vectors and routers, which llama.cpp wants so. BCQ-E641 for what no file of GGUF has."""
    if tensor.dtype not in DENSE:
        raise error("BCQ-E641", tensor=tensor.name, found=f"type {tensor.dtype}", expected=", ".join(sorted(DENSE)))
    if meta.own or tensor.dtype not in FLOATS:
        return tensor.dtype
    return "F32" if len(tensor.shape) < 2 or "ffn_gate_inp" in stored else tensor.dtype


def _second_scale(made: Tensor) -> Tensor | None:
    """The tensor next to a weight of NVFP4 with one more scale for every matrix."""
    if made.type != "NVFP4" or "s0_scale_scale" not in made.members[0].parts():  # type: ignore[union-attr]
        return None
    parts = [member.parts()["s0_scale_scale"] for member in made.members if isinstance(member, BcqWeight)]
    numbers = np.concatenate([part.array().reshape(-1) for part in parts])
    name = f"{made.name.removesuffix('.weight')}.scale"
    return Tensor(name, "F32", (len(numbers),), [], [StoredTensor.from_array(name, numbers)])


def _compare(found: dict[str, Tensor], meta: Metadata, notes: list[str]) -> None:
    """BCQ-E640 unless a donor has the same tensors, of the same shapes; what it may have besides is donated."""
    if not meta.tensors:
        return
    for name, tensor in found.items():
        info = meta.tensors.get(name)
        if info is None and name != "output.weight" and not name.endswith(".scale"):
            raise _misplaced(tensor.names[0], f"'{name}' is not in it", "a GGUF file of the same model", meta)
        if info is not None and info.shape != tensor.shape and not name.endswith(".scale"):
            shown = f"{list(tensor.shape)} here, {list(info.shape)} there"
            raise _misplaced(tensor.names[0], shown, "a GGUF file of the same model", meta)
    missing = [name for name in meta.tensors if name not in found and name not in meta.donated]
    missing = [name for name in missing if not name.endswith((".scale", ".input_scale"))]
    if missing == ["output.weight"]:
        notes.append("output.weight: left out; the folder's head is its embedding, which llama.cpp takes instead")
    elif missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise _misplaced("", f"it has '{escape(missing[0])}'{more}, the folder has not", "the same tensors", meta)


def _misplaced(tensor: str, found: str, expected: str, meta: Metadata) -> Exception:
    return error("BCQ-E640" if meta.tensors else "BCQ-E641", meta.origin, tensor, found, expected)


def _dense_bytes(tensor: StoredTensor, kind: str, heads: int) -> Iterator[Bytes]:
    """The bytes of a dense tensor, converted to a wider type where the file wants it; exact."""
    if kind == tensor.dtype and not heads:
        yield from tensor.chunks()
        return
    rows = tensor.shape[0] if tensor.shape else 1
    step = max(1, _COPY * rows // max(1, math.prod(tensor.shape)))
    if heads:
        step = max(1, step // (rows // heads)) * (rows // heads)
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        block = (tensor.read((start, stop)) if tensor.shape else tensor.array()).astype(numpy_dtype(kind))
        moved = rows_back(block, heads * (stop - start) // rows)
        yield np.ascontiguousarray(moved).reshape(-1).view(np.uint8)
