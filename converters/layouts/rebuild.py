"""The way back: source files from a BCQ folder and its record, byte after byte."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from bcqfmt.checkpoint.folder import SOURCE
from bcqfmt.checkpoint.provenance import RAW, source_record
from bcqfmt.checkpoint.reader import Checkpoint
from bcqfmt.container.files import SourceFile, inside
from bcqfmt.container.header import read_header
from bcqfmt.container.stored_tensor import StoredTensor
from bcqfmt.converters.words.buffers import read_array
from bcqfmt.converters.words.expected import expecting
from bcqfmt.errors import error, escape, refuse
from bcqfmt.weight.weight import BcqWeight

from .protocol import Rebuild, Rule
from .registry import rebuilders

__all__ = ["Piece", "SourceRebuilder", "apply_rule", "as_bytes", "part_rule", "rebuilds", "same_bytes"]

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]


def part_rule(weight: BcqWeight, rule: Rule) -> Array:
    """The rule ``part``: a part's numbers as they are, transposed, padded with zeros or reshaped where it says so."""
    array = weight.parts()[rule["part"]].array()
    if rule.get("transpose"):
        array = np.ascontiguousarray(array.swapaxes(-1, -2))
    shape = tuple(rule.get("shape", array.shape))
    if (
        len(shape) == array.ndim
        and shape != array.shape
        and all(a >= b for a, b in zip(shape, array.shape, strict=True))
    ):
        padded = np.zeros(shape, array.dtype)
        padded[tuple(slice(0, dim) for dim in array.shape)] = array
        return padded
    return array.reshape(shape)


def apply_rule(weight: BcqWeight, rule: Rule, known: Mapping[str, Rebuild]) -> Array:
    """The source tensor that ``rule`` makes of a weight."""
    name = rule["rule"]
    if name == "part":
        return part_rule(weight, rule)
    if name not in known:
        raise error(
            "BCQ-E615", tensor=weight.name, found=f"rule {escape(name)}", expected=f"one of {', '.join(sorted(known))}"
        )
    return known[name](weight, rule)


class Piece(NamedTuple):
    """A header, a tensor or a whole small file: its bytes, and for what a rule makes whether they are the expected."""

    name: str
    size: int
    chunks: Callable[[], Iterator[Bytes]]
    equals: Callable[[Array], bool] | None = None


class SourceRebuilder:
    """Yields the bytes of every source file of a converted folder."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.folder: Path = checkpoint.path
        manifest = checkpoint.manifest
        if manifest is not None and manifest.source is not None and manifest.source["format"] == "dense":
            raise error(
                "BCQ-E614",
                self.folder.name,
                found="quantized from a dense checkpoint, which rounds",
                expected="a folder that was converted",
                hint="keep the source; `bcqfmt export --to dense` writes the quantized values",
            )
        if not (self.folder / SOURCE).is_dir():
            raise error(
                "BCQ-E614", self.folder.name, found=f"no {SOURCE}/", expected="a folder converted with provenance"
            )
        record = source_record(self.folder, refuse)
        assert record is not None  # refuse has raised otherwise
        self.record = record
        self._known = rebuilders()
        self._raw: dict[str, StoredTensor] | None = None

    def files(self) -> dict[str, dict[str, Any]]:
        """path -> kind, size, sha256."""
        found: dict[str, dict[str, Any]] = self.record["files"]
        return found

    def pieces(self, path: str) -> Iterator[Piece]:
        """The pieces of a source file in order."""
        if self.files()[path]["kind"] == "verbatim":
            yield Piece("", self.files()[path]["size"], partial(self._copy, f"{SOURCE}/files/{path}"))
            return
        place = f"{SOURCE}/headers/{path}.header"
        raw = np.concatenate([np.empty(0, np.uint8), *self._copy(place)])
        yield Piece("", raw.size, lambda: iter((raw,)))
        header = json.loads(raw[8:].tobytes())
        header.pop("__metadata__", None)
        rules = self.record["tensors"][path]
        for name in sorted(header, key=lambda name: header[name]["data_offsets"]):
            begin, end = header[name]["data_offsets"]
            number, *weight = rules[name]
            rule = self.record["rules"][number]
            if rule["rule"] == "raw":
                yield Piece(name, end - begin, self._raw_tensors()[f"{path}/{name}"].chunks)
            elif rule["rule"] == "copy":
                dense = self.checkpoint[name]
                assert isinstance(dense, StoredTensor)
                yield Piece(name, end - begin, dense.chunks)
            else:
                found = partial(self._by_rule, weight[0], rule)
                yield Piece(name, end - begin, found, partial(self._rebuilds, weight[0], rule))

    def chunks(self, path: str) -> Iterator[Bytes]:
        """The bytes of a source file in order."""
        for piece in self.pieces(path):
            done = 0
            for chunk in piece.chunks():
                done += chunk.size
                yield chunk
            if done != piece.size:
                raise error("BCQ-E613", path, piece.name, f"{done} bytes rebuilt", f"{piece.size}")

    def _by_rule(self, weight: str, rule: Rule) -> Iterator[Bytes]:
        yield as_bytes(apply_rule(self._weight(weight), rule, self._known))

    def _rebuilds(self, weight: str, rule: Rule, expected: Array) -> bool:
        return rebuilds(self._weight(weight), rule, expected, self._known)

    def _weight(self, name: str) -> BcqWeight:
        """A weight whose parts are read into memory that is used again."""
        weight = self.checkpoint.weight(name)
        parts = {
            suffix: StoredTensor(part.name, part.dtype, part.shape, make=partial(read_array, part))
            for suffix, part in weight.parts().items()
        }
        return BcqWeight(weight.name, weight.spec, parts)

    def _copy(self, place: str) -> Iterator[Bytes]:
        source = SourceFile(inside(self.folder, place), place)
        for start in range(0, source.size, 1 << 22):
            yield source.read(start, min(1 << 22, source.size - start))
        source.close()

    def _raw_tensors(self) -> dict[str, StoredTensor]:
        if self._raw is None:
            source = SourceFile(inside(self.folder, RAW), RAW)
            header = read_header(source, refuse)
            assert header is not None  # refuse has raised otherwise
            self._raw = {
                name: StoredTensor(name, e.dtype, e.shape, source=source, offset=header.data_start + e.begin)
                for name, e in header.tensors.items()
            }
        return self._raw


def rebuilds(weight: BcqWeight, rule: Rule, expected: Array, known: Mapping[str, Rebuild]) -> bool:
    """Whether ``rule`` gives back the bytes of the source tensor ``expected``."""
    with expecting(expected) as comparison:
        rebuilt = apply_rule(weight, rule, known)
    if comparison.took(rebuilt):
        return comparison.equal
    if not comparison.equal:  # what was made of words that are not right is not right either, but let that be shown
        rebuilt = apply_rule(weight, rule, known)
    return same_bytes(as_bytes(rebuilt), as_bytes(expected))


def as_bytes(array: Array) -> Bytes:
    """The bytes of an array in order."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def same_bytes(left: Array, right: Array) -> bool:
    """Equality of two byte arrays, eight at a time where that goes."""
    if left.size != right.size:
        return False
    whole = left.size // 8 * 8
    return np.array_equal(left[:whole].view(np.uint64), right[:whole].view(np.uint64)) and np.array_equal(
        left[whole:], right[whole:]
    )
