"""What a checkpoint is, in numbers: counts, coverage, sizes, schemes. Headers only; one file at a time.

A checkpoint that is not BCQ is summed up too, as far as its headers and its config.json tell.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from bcqfmt.checkpoint.folder import MANIFEST, model_layout
from bcqfmt.checkpoint.manifest import Manifest
from bcqfmt.checkpoint.model_file import FolderNames, ModelFile, read_model_file
from bcqfmt.checkpoint.reader import read_manifest
from bcqfmt.container.files import ByteSource, SourceFile, named
from bcqfmt.container.gguf.header import GgufHeader, read_gguf
from bcqfmt.container.header import Header, header_of, read_header
from bcqfmt.errors import Finding, error, escape, refuse
from bcqfmt.weight.describe import PART_KINDS, part_kind, scheme_text
from bcqfmt.weight.scheme import Scheme, WeightSpec, features_of, part_prefix
from bcqfmt.weight.scheme_json import scheme_json

from .kinds import kind_of, method_of, model_config, model_files


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


class TensorRow(NamedTuple):
    """One tensor of a plain checkpoint."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    file: str


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
        counts = {"weights": self.weights, "parameters": self.parameters, "bytes": self.nbytes}
        return {**counts, "bits_per_weight": self.bits_per_weight}


@dataclass(slots=True)
class TypeRow:
    """Tensors of one element type, as stored."""

    tensors: int = 0
    elements: int = 0
    nbytes: int = 0


@dataclass(slots=True)
class Summary:
    """The numbers. ``foreign`` says what a checkpoint is that is not BCQ; it is empty for BCQ.

    ``tensors``: of a checkpoint that nothing says is quantized, if a row per weight was asked for.
    """

    path: str
    folder: bool
    foreign: str = ""
    version: str = ""
    features: list[str] = field(default_factory=list)
    generator: dict[str, str] | None = None
    source: dict[str, Any] | None = None
    quantization: dict[str, Any] = field(default_factory=dict)
    files: int = 0
    file_bytes: int = 0
    parts: dict[str, int] = field(default_factory=dict)
    schemes: list[SchemeRow] = field(default_factory=list)
    dense: dict[str, TypeRow] = field(default_factory=dict)
    modules: list[ModuleRow] | None = None
    tensors: list[TensorRow] | None = None
    warnings: list[Finding] = field(default_factory=list)

    @property
    def weights(self) -> int:
        return sum(row.weights for row in self.schemes)

    @property
    def dense_tensors(self) -> int:
        return sum(row.tensors for row in self.dense.values())

    @property
    def quantized_parameters(self) -> int:
        return sum(row.parameters for row in self.schemes)

    @property
    def parameters(self) -> int:
        return self.quantized_parameters + sum(row.elements for row in self.dense.values())

    @property
    def coverage(self) -> float:
        """Quantized share of the parameters, in percent."""
        return 100.0 * self.quantized_parameters / self.parameters if self.parameters else 0.0

    @property
    def dense_bytes(self) -> int:
        return sum(row.nbytes for row in self.dense.values())

    @property
    def bits_per_weight(self) -> float | None:
        """Average over the quantized weights; None without any."""
        quantized = self.quantized_parameters
        return sum(row.nbytes for row in self.schemes) * 8 / quantized if quantized else None

    @property
    def overall_bits(self) -> float | None:
        """Average over all parameters; None without any."""
        total = sum(row.nbytes for row in self.schemes) + self.dense_bytes
        return total * 8 / self.parameters if self.parameters else None

    def as_dict(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "path": self.path,
            "kind": "folder" if self.folder else "file",
            "bcq": not self.foreign,
            "format": self.foreign or "bcq",
            "version": self.version or None,
            "features": self.features,
            "generator": self.generator,
            "source": self.source and {"format": self.source["format"], "files": len(self.source["files"])},
            "quantization": self.quantization or None,
            "files": self.files,
            "bytes": self.file_bytes,
            "weights": self.weights,
            "dense": self.dense_tensors,
            "parameters": {"quantized": self.quantized_parameters, "total": self.parameters},
            "coverage": self.coverage,
            "bits_per_weight": {"quantized": self.bits_per_weight, "overall": self.overall_bits},
            "sizes": {**{kind: self.parts.get(kind, 0) for kind in PART_KINDS}, "dense": self.dense_bytes},
            "schemes": [
                {"text": scheme_text(row.scheme), "scheme": scheme_json(row.scheme), **row.as_dict()}
                for row in self.schemes
            ],
            "dense_types": {
                name: {"tensors": row.tensors, "elements": row.elements, "bytes": row.nbytes}
                for name, row in sorted(self.dense.items())
            },
            "warnings": [finding.as_dict() for finding in self.warnings],
        }
        if self.modules is not None:
            found["modules"] = [
                {**row._asdict(), "shape": list(row.shape), "bits_per_weight": row.bits_per_weight}
                for row in self.modules
            ]
        if self.tensors is not None:
            found["tensors"] = [{**row._asdict(), "shape": list(row.shape)} for row in self.tensors]
        return found


def summarize(path: str | os.PathLike[str], *, modules: bool = False) -> Summary:
    """Sum up a BCQ folder or file, or any other of safetensors or GGUF; ``modules`` adds a row per weight."""
    place = named(path)
    if not os.path.lexists(place):
        raise error("BCQ-E101", str(place), found="nothing of that name exists")
    folder = place.is_dir()
    summary = Summary(str(place), folder, modules=[] if modules else None)
    if folder and os.path.lexists(place / MANIFEST):
        manifest = read_manifest(place)
        names = model_layout(place, refuse).files
        _Sum(summary).bcq([place / name for name in names], manifest)
        return summary
    paths = [place / name for name in model_files(place)] if folder else [place]
    if all(path.name.endswith(".gguf") for path in paths):
        _Sum(summary).gguf(paths)
        return summary
    if folder:
        config = model_config(place, summary.warnings.append)
        if "bcqfmt" in header_of(paths[0]).metadata or method_of(config) == "bcq":
            raise error("BCQ-V601", place.name, found=f"no {MANIFEST}", expected="a finished checkpoint")
        _Sum(summary).foreign(paths, config)
    elif "bcqfmt" in header_of(place).metadata:
        _Sum(summary).bcq(paths, None)
    else:
        _Sum(summary).foreign(paths, {})
    return summary


def summarize_sources(
    path: str, sources: Mapping[str, ByteSource], headers: Mapping[str, Header], config: Mapping[str, Any],
    *, modules: bool = False,
) -> Summary:  # fmt: skip
    """Sum up a checkpoint whose model files lie elsewhere and whose headers are known; nothing more is read."""
    summary = Summary(path, True, modules=[] if modules else None)
    total = _Sum(summary)
    summary.files, summary.file_bytes = len(sources), sum(source.size for source in sources.values())
    if "bcqfmt" not in next(iter(headers.values())).metadata:
        total.headers(headers, config)
        return summary
    for name, source in sources.items():
        total.file(source, None, headers[name])
    return summary


def summarize_gguf(path: str, files: Iterable[tuple[int, GgufHeader]]) -> Summary:
    """Sum up GGUF files that lie elsewhere: size and header of each."""
    summary = Summary(path, False)
    for size, header in files:
        summary.files, summary.file_bytes = summary.files + 1, summary.file_bytes + size
        _Sum(summary).gguf_header(header)
    return summary


class _Sum:
    """Adds up file after file and keeps none of them."""

    def __init__(self, summary: Summary) -> None:
        self.summary = summary
        self.rows: dict[Scheme, int] = {}
        self.names = FolderNames()

    def bcq(self, files: list[Path], manifest: Manifest | None) -> None:
        """BCQ files, described by themselves or by the manifest."""
        described = {} if manifest is None else manifest.weights_by_file()
        if manifest is not None:
            self.summary.version, self.summary.features = manifest.version, list(manifest.features)
            self.summary.generator, self.summary.source = manifest.generator, manifest.source
        for path in files:
            with self._counted(path) as source:
                self.file(source, described.get(path.name, {}) if manifest is not None else None)

    def file(self, source: ByteSource, fallback: Mapping[str, WeightSpec] | None, header: Header | None = None) -> None:
        """One BCQ file; ``fallback`` comes from a manifest, which then also gives version and features."""
        file = read_model_file(source, self._sink, fallback, header)
        assert file is not None  # the sink has refused anything else
        assert file.descriptor is not None
        self.names.add(file, refuse)
        self._add(file)
        if fallback is None:
            self.summary.version = file.descriptor.version
            self.summary.features = sorted({*self.summary.features, *features_of(file.specs.values())})

    def foreign(self, files: list[Path], config: Mapping[str, Any]) -> None:
        """Any other safetensors files."""
        found = {}
        for path in files:
            with self._counted(path) as source:
                header = read_header(source, self._sink)
            assert header is not None  # the sink has refused anything else
            found[path.name] = header
        self.headers(found, config)

    def gguf(self, files: list[Path]) -> None:
        """GGUF files; the first one says what the model is."""
        for path in files:
            with self._counted(path) as source:
                self.gguf_header(read_gguf(source))

    def gguf_header(self, header: GgufHeader) -> None:
        """The tensors of one GGUF file."""
        summary = self.summary
        for info in header.tensors.values():
            self._dense(info.type.name, info.shape, info.nbytes)
        if not summary.foreign:
            summary.foreign, summary.version = "gguf", str(header.version)
            kept = {name: header.get(f"general.{name}") for name in ("architecture", "name")}
            summary.quantization = {"method": "gguf", "evidence": "header"}
            summary.quantization |= {key: escape(value) for key, value in kept.items() if isinstance(value, str)}

    def headers(self, found: Mapping[str, Header], config: Mapping[str, Any]) -> None:
        """Tensors of files that are not BCQ, by file."""
        endings: set[str] = set()
        rows = []
        for file, header in found.items():
            for name, entry in header.tensors.items():
                self._dense(entry.dtype, entry.shape, entry.end - entry.begin)
                endings.add(name.rpartition(".")[2])
                rows.append(TensorRow(name, entry.shape, entry.dtype, entry.end - entry.begin, file))
        self.summary.foreign, self.summary.quantization = kind_of(config, endings)
        if self.summary.modules is not None and not self.summary.quantization:
            self.summary.tensors = rows

    def _add(self, file: ModelFile) -> None:
        suffixes: dict[int, list[tuple[str, str]]] = {}  # few schemes, many weights
        tensors, summary = file.header.tensors, self.summary
        for name, spec in file.specs.items():
            known = suffixes.get(id(spec.scheme))
            if known is None:
                known = suffixes[id(spec.scheme)] = [(suffix, part_kind(suffix)) for suffix in spec.parts()]
            prefix, total = part_prefix(name), 0
            for suffix, kind in known:
                entry = tensors[prefix + suffix]
                size = entry.end - entry.begin
                summary.parts[kind] = summary.parts.get(kind, 0) + size
                total += size
            number = self._scheme(spec.scheme)
            row = summary.schemes[number]
            row.weights += 1
            row.parameters += prod(spec.shape)
            row.nbytes += total
            if summary.modules is not None:
                summary.modules.append(ModuleRow(name, spec.shape, spec.dtype, number, total, file.source.shown))
        for name in file.dense:
            entry = tensors[name]
            self._dense(entry.dtype, entry.shape, entry.end - entry.begin)

    def _scheme(self, scheme: Scheme) -> int:
        number = self.rows.get(scheme)
        if number is None:
            number = self.rows[scheme] = len(self.summary.schemes)
            self.summary.schemes.append(SchemeRow(scheme))
        return number

    def _dense(self, dtype: str, shape: tuple[int, ...], nbytes: int) -> None:
        row = self.summary.dense.setdefault(dtype, TypeRow())
        row.tensors += 1
        row.elements += prod(shape)
        row.nbytes += nbytes

    @contextmanager
    def _counted(self, path: Path) -> Iterator[SourceFile]:
        with closing(SourceFile(path)) as source:
            self.summary.files += 1
            self.summary.file_bytes += source.size
            yield source

    def _sink(self, finding: Finding) -> None:
        refuse(finding)
        self.summary.warnings.append(finding)
