"""The way back: source files from a BCQ folder and its record, byte after byte."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bcqfmt.converters.protocol import Rebuild, Rule
from bcqfmt.converters.registry import rebuilders
from bcqfmt.errors import error, escape, refuse
from bcqfmt.files import SourceFile, inside
from bcqfmt.folder import SOURCE
from bcqfmt.header import read_header
from bcqfmt.provenance import RAW, source_record
from bcqfmt.reader import Checkpoint
from bcqfmt.stored import StoredTensor
from bcqfmt.weight import BcqWeight

__all__ = ["SourceRebuilder", "apply_rule", "part_rule", "same_bytes"]

Array = npt.NDArray[Any]


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


class SourceRebuilder:
    """Yields the bytes of every source file of a converted folder."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.folder: Path = checkpoint.path
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

    def chunks(self, path: str) -> Iterator[npt.NDArray[np.uint8]]:
        """The bytes of a source file in order."""
        if self.files()[path]["kind"] == "verbatim":
            yield from self._copy(f"{SOURCE}/files/{path}")
            return
        place = f"{SOURCE}/headers/{path}.header"
        raw = b"".join(chunk.tobytes() for chunk in self._copy(place))
        yield np.frombuffer(raw, np.uint8)
        header = json.loads(raw[8:])
        header.pop("__metadata__", None)
        rules = self.record["tensors"][path]
        for name in sorted(header, key=lambda name: header[name]["data_offsets"]):
            begin, end = header[name]["data_offsets"]
            done = 0
            for chunk in self.tensor(path, name, rules[name]):
                done += chunk.size
                yield chunk
            if done != end - begin:
                raise error("BCQ-E613", path, name, f"{done} bytes rebuilt", f"{end - begin}")

    def tensor(self, path: str, name: str, entry: list[Any]) -> Iterator[npt.NDArray[np.uint8]]:
        """The bytes of one source tensor."""
        rule = self.record["rules"][entry[0]]
        if rule["rule"] == "raw":
            yield from self._raw_tensors()[f"{path}/{name}"].chunks()
        elif rule["rule"] == "copy":
            dense = self.checkpoint[name]
            assert isinstance(dense, StoredTensor)
            yield from dense.chunks()
        else:
            array = apply_rule(self.checkpoint.weight(entry[1]), rule, self._known)
            yield np.ascontiguousarray(array).reshape(-1).view(np.uint8)

    def _copy(self, place: str) -> Iterator[npt.NDArray[np.uint8]]:
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


def same_bytes(left: Array, right: Array) -> bool:
    """Equality of two byte arrays, eight at a time where that goes."""
    if left.size != right.size:
        return False
    whole = left.size // 8 * 8
    return np.array_equal(left[:whole].view(np.uint64), right[:whole].view(np.uint64)) and np.array_equal(
        left[whole:], right[whole:]
    )
