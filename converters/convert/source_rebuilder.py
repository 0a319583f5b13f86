"""The files of a source again, from a BCQ folder and its record of the source."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bcqfmt.checkpoint.folder import SOURCE
from bcqfmt.checkpoint.provenance import RAW, RECORD, check_raw, check_rules, source_record
from bcqfmt.checkpoint.reader import Checkpoint
from bcqfmt.container.files import ByteSource, SourceFile, inside, unfit
from bcqfmt.container.gguf.header import GgufHeader, read_gguf
from bcqfmt.container.header import Header, require_header
from bcqfmt.container.stored_tensor import StoredTensor
from bcqfmt.container.strict_json import canonical
from bcqfmt.converters.layouts.rebuild import as_bytes, check_rule, pieces
from bcqfmt.converters.layouts.registry import rebuilders
from bcqfmt.converters.source.gguf import gap_ranges
from bcqfmt.converters.source.gguf_rows import copied, copy_fits
from bcqfmt.converters.words.buffers import new_array
from bcqfmt.errors import BcqError, error, escape, refuse
from bcqfmt.weight.weight import BcqWeight

Bytes = npt.NDArray[np.uint8]
_CHUNK = 1 << 22  # bytes at a time


def _archived(folder: Path, place: str) -> SourceFile:
    """An archived file; BCQ-V702 when it is not there, as `validate` says."""
    try:
        return SourceFile(inside(folder, place), place)
    except BcqError as fault:
        if fault.code != "BCQ-E101":
            raise
        raise error("BCQ-V702", place, found=fault.finding.found, expected="the archived file") from None


class _Archived(ByteSource):
    """The archived header of a source file, as if it were the file with its ``size``; after it there are zeros."""

    def __init__(self, folder: Path, path: str, size: int) -> None:
        self.shown = f"{SOURCE}/headers/{path}.header"
        self.path = inside(folder, self.shown)
        self.size, self.bytes_read = size, 0
        self._stored = _archived(folder, self.shown)

    def read_into(self, offset: int, buffer: Bytes) -> None:
        """Fill ``buffer`` from ``offset``."""
        stored = max(0, min(buffer.size, self._stored.size - offset))
        self._stored.read_into(offset, buffer[:stored])
        buffer[stored:] = 0

    def close(self) -> None:
        """Close the archived header."""
        self._stored.close()

    def header(self) -> Header:
        """The header, as strictly checked as that of a file; BCQ-V702 when there is anything after it."""
        with closing(self):
            found = require_header(self)
        if found.data_start != self._stored.size:
            raise error("BCQ-V702", self.shown, found=f"{self._stored.size} bytes", expected=f"{found.data_start}")
        return found


def _archived_gguf(folder: Path, path: str, size: int) -> GgufHeader:
    """The archived header of a GGUF file of ``size`` bytes; BCQ-V702 unless it is whole and the data fits."""
    place = f"{SOURCE}/headers/{path}.header"
    with closing(_archived(folder, place)) as stored:
        found = read_gguf(stored, whole=False)
        if found.data_start != stored.size or found.data_end > size:
            said = f"{stored.size} bytes, data up to {found.data_end}"
            raise error("BCQ-V702", place, found=said, expected=f"{found.data_start} bytes, data up to {size}")
    return found


class SourceRebuilder:
    """Yields the bytes of every source file of a converted folder."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.folder: Path = checkpoint.path
        manifest = checkpoint.manifest
        if manifest is not None and manifest.source is not None and manifest.source["format"] == "dense":
            found = "quantized from a dense checkpoint, which rounds"
            hint = "keep the source; `bcqfmt export --to dense` writes the quantized values"
            raise error("BCQ-E614", self.folder.name, found=found, expected="a folder that was converted", hint=hint)
        if not (self.folder / SOURCE).is_dir():
            raise error(
                "BCQ-E614", self.folder.name, found=f"no {SOURCE}/", expected="a folder converted with provenance"
            )
        record = source_record(self.folder, refuse)
        assert record is not None  # refuse has raised otherwise
        self.record = record
        self._known = rebuilders()
        self._headers: dict[str, Header] = {}
        self._ggufs: dict[str, GgufHeader] = {}
        self._raw: dict[str, StoredTensor] = {}
        self._weights: dict[str, BcqWeight] = {}
        self._check()

    def _check(self) -> None:
        """All that the record says, against what is there, before anything is allocated or written."""
        files = self.files()
        if wrong := unfit(files):
            raise error("BCQ-E617", *wrong)
        for path, entry in files.items():
            if entry["kind"] == "safetensors":
                self._headers[path] = _Archived(self.folder, path, entry["size"]).header()
            elif entry["kind"] == "gguf":
                self._ggufs[path] = _archived_gguf(self.folder, path, entry["size"])
            else:
                place = f"{SOURCE}/files/{path}"
                with closing(_archived(self.folder, place)) as file:
                    if file.size != entry["size"]:
                        raise error("BCQ-V702", place, found=f"{file.size} bytes", expected=f"{entry['size']}")
        dense = dict(self.checkpoint.dense())
        weights = {name: spec for file in self.checkpoint.files() for name, spec in file.specs.items()}
        archived = {path: list(header.tensors) for path, header in self._headers.items()}
        for path, gguf in self._ggufs.items():
            between = [""] if "" in self.record["tensors"].get(path, {}) else []
            archived[path] = [*gguf.tensors, *between]
        wanted = check_rules(self.record, archived, (dense, weights), refuse)
        check_raw(self.folder, (self.folder / RAW).is_file(), wanted, refuse)
        if wanted:
            source = SourceFile(inside(self.folder, RAW), RAW)
            header = require_header(source)
            self._raw = {name: StoredTensor.in_file(name, header, source) for name in header.tensors}
        checked = set()
        for path, tensors in self.record["tensors"].items():
            for name, (number, *named) in tensors.items():
                rule = self.record["rules"][number]
                if rule["rule"] not in ("raw", "copy"):
                    spec = weights[named[0]]
                    if (number, spec) not in checked:
                        check_rule(spec, rule, self._known, RECORD, name)
                        checked.add((number, spec))
                    continue
                raw = rule["rule"] == "raw"
                stored = self._raw[f"{path}/{name}"] if raw else dense[named[0] if named else name]
                fits = (
                    copy_fits(rule, stored.dtype, stored.shape)
                    if path in self._ggufs and not raw
                    else rule.keys() == {"rule"}
                )
                if not fits or stored.nbytes != self._size(path, name):
                    found = f"{escape(canonical(rule), 80)} of {stored.nbytes} bytes"
                    raise error("BCQ-V703", RECORD, name, found, f"{self._size(path, name)} bytes, parameters that fit")

    def _size(self, path: str, name: str) -> int:
        """The bytes of a source tensor; of the one without a name, all that belong to none."""
        if path in self._headers:
            *_, begin, end = self._headers[path].tensors[name]
            return end - begin
        header = self._ggufs[path]
        if name:
            return header.tensors[name].nbytes
        return sum(end - begin for begin, end in gap_ranges(header, self.files()[path]["size"]))

    def files(self) -> dict[str, dict[str, Any]]:
        """path -> kind, size, sha256."""
        found: dict[str, dict[str, Any]] = self.record["files"]
        return found

    def left_out(self) -> dict[str, str]:
        """What the source had besides its files, path -> why it was not carried; nothing depends on it."""
        found = self.record.get("ignorable", {}).get("left_out")
        return {path: str(why) for path, why in found.items()} if isinstance(found, dict) else {}

    def chunks(self, path: str) -> Iterator[Bytes]:
        """The bytes of a source file in order, in small chunks; BCQ-V703 when a tensor has the wrong size."""
        if self.files()[path]["kind"] == "verbatim":
            yield from self._copy(f"{SOURCE}/files/{path}")
            return
        yield from self._copy(f"{SOURCE}/headers/{path}.header")
        if path in self._ggufs:
            yield from self._gguf(path)
            return
        tensors = self._headers[path].tensors
        for name in sorted(tensors, key=lambda name: tensors[name][2:]):
            yield from self._whole(path, name)

    def _gguf(self, path: str) -> Iterator[Bytes]:
        """The data of a GGUF file: every tensor and the bytes between them, which are zero unless archived."""
        header, kept = self._ggufs[path], self._raw.get(f"{path}/")
        between, at = kept.array() if kept is not None else None, 0
        ranges = gap_ranges(header, self.files()[path]["size"])
        for name, (begin, end) in zip([*header.tensors, ""], ranges, strict=True):
            if name:
                yield from self._whole(path, name)
            for start in range(0, end - begin, _CHUNK):
                size = min(_CHUNK, end - begin - start)
                yield np.zeros(size, np.uint8) if between is None else between[at : at + size]
                at += size

    def _whole(self, path: str, name: str) -> Iterator[Bytes]:
        """The bytes of one source tensor, BCQ-V703 unless there are as many as in the source."""
        size, done = self._size(path, name), 0
        for chunk in self._tensor(path, name):
            done += chunk.size
            for start in range(0, chunk.size, _CHUNK):
                yield chunk[start : start + _CHUNK]
            del chunk  # the next one may need the memory
        if done != size:
            raise error("BCQ-V703", path, name, f"a rule that gives {done} bytes", f"{size}")

    def _tensor(self, path: str, name: str) -> Iterator[Bytes]:
        """The bytes of one source tensor."""
        number, *weight = self.record["tensors"][path][name]
        rule = self.record["rules"][number]
        if rule["rule"] == "raw":
            yield from self._raw[f"{path}/{name}"].chunks()
        elif rule["rule"] == "copy":
            dense = self.checkpoint[weight[0] if weight else name]
            assert isinstance(dense, StoredTensor)
            if len(rule) == 1:
                yield from dense.chunks()
            else:
                yield as_bytes(copied(dense.array(), rule))
        else:
            yield from map(as_bytes, pieces(self._weight(weight[0]), rule, self._known))

    def _weight(self, name: str) -> BcqWeight:
        """A weight whose parts are read into reused memory; several tensors of the source are made of it."""
        found = self._weights.get(name)
        if found is None:
            weight = self.checkpoint.weight(name)
            parts = {suffix: part.allocated_by(new_array) for suffix, part in weight.parts().items()}
            found = self._weights[name] = BcqWeight(weight.name, weight.spec, parts)
        return found

    def _copy(self, place: str) -> Iterator[Bytes]:
        source = SourceFile(inside(self.folder, place), place)
        for start in range(0, source.size, _CHUNK):
            yield source.read(start, min(_CHUNK, source.size - start))
        source.close()
