"""Source tensors from a weight by rules, and source files from a BCQ folder and its record, byte for byte."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bcqfmt.checkpoint.folder import SOURCE
from bcqfmt.checkpoint.provenance import RAW, source_record
from bcqfmt.checkpoint.reader import Checkpoint
from bcqfmt.container.files import SourceFile, inside
from bcqfmt.container.gguf.header import read_gguf
from bcqfmt.container.header import require_header
from bcqfmt.container.stored_tensor import StoredTensor
from bcqfmt.converters.source.gguf import gap_ranges
from bcqfmt.converters.source.gguf_rows import copied
from bcqfmt.converters.words.buffers import read_array
from bcqfmt.errors import error, escape, refuse
from bcqfmt.weight.weight import BcqWeight

from .protocol import Rebuild, Rule
from .registry import rebuilders

__all__ = ["SourceRebuilder", "apply_rule", "rebuilds", "same_bytes"]

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]
_COPY = 1 << 22  # bytes read at a time
_COMPARED = 1 << 20  # bytes compared while they are in the cache


def _part(weight: BcqWeight, rule: Rule) -> Array:
    """The rule ``part``: the numbers of a part, transposed, padded with zeros or reshaped where the rule says so."""
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
        return _part(weight, rule)
    if name not in known:
        raise error(
            "BCQ-E615", tensor=weight.name, found=f"rule {escape(name)}", expected=f"one of {', '.join(sorted(known))}"
        )
    return known[name](weight, rule)


def rebuilds(weight: BcqWeight, rule: Rule, tensor: StoredTensor, known: Mapping[str, Rebuild]) -> bool:
    """Whether ``rule`` gives back the bytes of the source tensor, which is read a little at a time."""
    rebuilt = _as_bytes(apply_rule(weight, rule, known))
    if rebuilt.size != tensor.nbytes:
        return False
    start = 0
    for chunk in tensor.chunks(_COMPARED):
        if not same_bytes(rebuilt[start : start + chunk.size], chunk):
            return False
        start += chunk.size
    return True


def same_bytes(left: Bytes, right: Bytes) -> bool:
    """Whether two uint8 arrays have the same content; compared eight bytes at a time, which numpy does faster."""
    if left.size != right.size:
        return False
    whole = left.size // 8 * 8
    return np.array_equal(left[:whole].view(np.uint64), right[:whole].view(np.uint64)) and np.array_equal(
        left[whole:], right[whole:]
    )


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

    def chunks(self, path: str) -> Iterator[Bytes]:
        """The bytes of a source file in order, in chunks of any size; BCQ-E613 when a tensor has the wrong size."""
        if self.files()[path]["kind"] == "verbatim":
            yield from self._copy(f"{SOURCE}/files/{path}")
            return
        if self.files()[path]["kind"] == "gguf":
            yield from self._gguf(path)
            return
        head = np.concatenate([np.empty(0, np.uint8), *self._copy(f"{SOURCE}/headers/{path}.header")])
        yield head
        header = json.loads(head[8:].tobytes())
        header.pop("__metadata__", None)
        for name in sorted(header, key=lambda name: header[name]["data_offsets"]):
            begin, end = header[name]["data_offsets"]
            yield from self._whole(path, name, end - begin)

    def _gguf(self, path: str) -> Iterator[Bytes]:
        """A GGUF file: its header, then every tensor and the bytes between them, which are zero unless archived."""
        with closing(SourceFile(inside(self.folder, f"{SOURCE}/headers/{path}.header"), path)) as opened:
            header = read_gguf(opened, whole=False)
        yield np.frombuffer(header.raw, np.uint8)
        gaps = self._raw_tensors()[f"{path}/"].array() if "" in self.record["tensors"][path] else None
        ranges, at = gap_ranges(header, self.files()[path]["size"]), 0
        for name, (begin, end) in zip([*header.tensors, ""], ranges, strict=True):
            if name:
                yield from self._whole(path, name, header.tensors[name].nbytes)
            for start in range(0, end - begin, _COPY):
                size = min(_COPY, end - begin - start)
                yield np.zeros(size, np.uint8) if gaps is None else gaps[at : at + size]
                at += size

    def _whole(self, path: str, name: str, size: int) -> Iterator[Bytes]:
        """The bytes of one source tensor, BCQ-E613 unless there are ``size`` of them."""
        done = 0
        for chunk in self._tensor(path, name):
            done += chunk.size
            yield chunk
            del chunk  # the next one may need the memory
        if done != size:
            raise error("BCQ-E613", path, name, f"{done} bytes rebuilt", f"{size}")

    def _tensor(self, path: str, name: str) -> Iterator[Bytes]:
        """The bytes of one source tensor."""
        number, *weight = self.record["tensors"][path][name]
        rule = self.record["rules"][number]
        if rule["rule"] == "raw":
            yield from self._raw_tensors()[f"{path}/{name}"].chunks()
        elif rule["rule"] == "copy":
            dense = self.checkpoint[weight[0] if weight else name]
            assert isinstance(dense, StoredTensor)
            if len(rule) == 1:
                yield from dense.chunks()
            else:
                yield _as_bytes(copied(dense.array(), rule))
        else:
            yield _as_bytes(apply_rule(self._weight(weight[0]), rule, self._known))

    def _weight(self, name: str) -> BcqWeight:
        """A weight whose parts are read into reused memory."""
        weight = self.checkpoint.weight(name)
        parts = {
            suffix: StoredTensor(part.name, part.dtype, part.shape, make=partial(read_array, part))
            for suffix, part in weight.parts().items()
        }
        return BcqWeight(weight.name, weight.spec, parts)

    def _copy(self, place: str) -> Iterator[Bytes]:
        source = SourceFile(inside(self.folder, place), place)
        for start in range(0, source.size, _COPY):
            yield source.read(start, min(_COPY, source.size - start))
        source.close()

    def _raw_tensors(self) -> dict[str, StoredTensor]:
        if self._raw is None:
            source = SourceFile(inside(self.folder, RAW), RAW)
            header = require_header(source)
            self._raw = {name: StoredTensor.in_file(name, header, source) for name in header.tensors}
        return self._raw


def _as_bytes(array: Array) -> Bytes:
    """The bytes of an array in order."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
