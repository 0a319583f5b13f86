"""Validation: every rule, every finding (spec: all of it).

Fast: headers, descriptors, shapes, index, config, manifest, sizes. Deep: the content of every part and all digests.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError, Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bcqfmt import limits
from bcqfmt.codes import CODES
from bcqfmt.container.files import SourceFile, hash_file, inside, named, read_json
from bcqfmt.errors import BcqError, Finding, error, escape
from bcqfmt.weight import checks
from bcqfmt.weight.scheme_json import resolved_json

from .folder import (
    CONFIG,
    INDEX,
    MANIFEST,
    SOURCE,
    Layout,
    check_quantization_config,
    file_list,
    is_documentation,
    leaving_links,
    model_layout,
    read_config,
)
from .manifest import Manifest, parse_manifest
from .model_file import FolderNames, ModelFile, read_model_file
from .provenance import check_provenance

_NOT_READ = ("BCQ-E101", "BCQ-E102", "BCQ-V508")  # something is there, and is no file that can be read
_KEPT = 1000  # findings of one code
Digest = tuple[Future[str], str]  # computed, and as the manifest states it


@dataclass(slots=True)
class Report:
    """The outcome: ``findings`` in the order of the rules, and what was looked at.

    Of one code the first thousand findings are kept; ``more`` is the number of the others.
    """

    path: str
    deep: bool
    findings: list[Finding] = field(default_factory=list)
    more: int = 0
    files: int = 0
    weights: int = 0
    nbytes: int = 0

    @property
    def errors(self) -> list[Finding]:
        """The findings that make the input invalid."""
        return [finding for finding in self.findings if finding.severity == "error"]

    @property
    def valid(self) -> bool:
        """No errors; warnings and notes do not count."""
        return not self.errors

    @property
    def exit_code(self) -> int:
        """0, or the exit code of the first error."""
        return CODES[self.errors[0].code].exit if self.errors else 0

    def as_dict(self) -> dict[str, Any]:
        return {
            "path": escape(self.path, 4096),
            "valid": self.valid,
            "deep": self.deep,
            "files": self.files,
            "weights": self.weights,
            "bytes": self.nbytes,
            "exit_code": self.exit_code,
            "findings_total": len(self.findings) + self.more,
            "findings": [finding.as_dict() for finding in self.findings],
        }


def validate(
    path: str | os.PathLike[str],
    *,
    deep: bool = False,
    progress: Callable[[int], object] | None = None,
    manifest: bytes | None = None,
) -> Report:
    """Check a BCQ file or folder against the whole specification. Raises only when there is nothing to look at.

    ``progress`` is called with the number of bytes hashed since the last call (deep only). ``manifest``: what
    bcq_manifest.json is about to hold, judged instead of what it holds.
    """
    place = named(path)
    report = Report(str(place), deep)
    if not os.path.lexists(place):
        raise error("BCQ-E101", str(place), found="nothing of that name exists")
    run = _Run(place, report, progress, manifest)
    run.folder() if place.is_dir() else run.lone_file()
    report.findings.sort(key=_order)
    return report


class _Run:
    """One validation: collects findings, never stops at the first."""

    def __init__(
        self, path: Path, report: Report, progress: Callable[[int], object] | None, manifest: bytes | None
    ) -> None:
        self.path, self.report, self.deep, self.progress = path, report, report.deep, progress
        self.raw_manifest = manifest
        self.counts: Counter[str] = Counter()
        self.stop = threading.Event()
        self.listing: set[str] = set()

    def sink(self, finding: Finding) -> None:
        """Keep a finding, unless there are very many like it."""
        self.counts[finding.code] += 1
        if self.counts[finding.code] <= _KEPT:
            self.report.findings.append(finding)
        else:
            self.report.more += 1

    def lone_file(self) -> None:
        file = self.model_file(self.path, self.path.name)
        if file is not None:
            self.content(file)
        if self.report.valid:
            note = "a file on its own: damage inside its numbers cannot be seen"
            self.sink(Finding("BCQ-E501", self.path.name, "", note))

    def folder(self) -> None:
        layout = model_layout(self.path, self.sink)
        whole = self.report.valid
        self.listing = self.list_files()
        if not layout.files and not self.report.valid and not os.access(self.path / MANIFEST, os.F_OK):
            return
        config = read_config(self.path, self.sink)
        manifest = self.manifest()
        opened = [self.model_file(self.path / name, name) for name in layout.files]
        files = [file for file in opened if file is not None]
        self.versions(files, config, manifest)
        if whole and len(files) == len(layout.files):
            self.across(files, layout)
            if manifest is not None and not manifest.faulty:
                self.same_weights(files, manifest)
        hasher = ThreadPoolExecutor(1)  # files are hashed while their content is checked
        try:
            digests = self.same_files(manifest, layout, files, hasher) if manifest is not None else {}
            for file in files:
                self.content(file)
            for name, (digest, stated) in digests.items():
                try:
                    if digest.result() != stated:
                        self.sink(Finding("BCQ-V606", name, "", digest.result(), stated))
                except BcqError as fault:
                    self.once(fault.finding)
        finally:
            self.stop.set()
            hasher.shutdown(cancel_futures=True)
        if whole and any(name.startswith(f"{SOURCE}/") for name in self.listing):
            names = None  # a file that cannot be read is one error, not one more for each of its tensors
            if len(files) == len(layout.files):
                names = {n for file in files for n in file.dense}, {n for file in files for n in file.specs}
            check_provenance(self.path, self.listing, names, self.sink)

    def list_files(self) -> set[str]:
        """The files of the folder; BCQ-V507 for its links."""
        try:
            for fault in leaving_links(self.path):
                self.once(fault.finding)
            return set(file_list(self.path))
        except BcqError as fault:
            self.sink(fault.finding)
            return set()

    def model_file(self, path: Path, shown: str) -> ModelFile | None:
        """Container, descriptor and parts of one file."""
        try:
            source = SourceFile(path, shown)
            file = read_model_file(source, self.sink)
            if file is not None:
                self.reference_reader(file)
        except BcqError as fault:
            self.sink(fault.finding)
            return None
        self.report.files += 1
        self.report.nbytes += source.size
        self.report.weights += len(file.specs) if file is not None else 0
        return file

    def reference_reader(self, file: ModelFile) -> None:
        """What the strict pass accepts, the reference reader must accept too (BCQ-E204)."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(file.source.path, framework="numpy", backend="pread") as opened:
                known = set(opened.keys())
        except (SafetensorError, OSError) as fault:
            if isinstance(file.source, SourceFile):
                file.source.check_unchanged()  # a file that changes while it is read has its own code
            self.sink(Finding("BCQ-E204", file.source.shown, "", escape(str(fault))))
            return
        if known != set(file.header.tensors):
            self.sink(
                Finding(
                    "BCQ-E204", file.source.shown, "", f"it sees {len(known)} tensors", f"{len(file.header.tensors)}"
                )
            )

    def content(self, file: ModelFile) -> None:
        """BCQ-V401 to V409 (deep only)."""
        if not self.deep:
            return
        for name, spec in file.specs.items():
            place = checks.Place(self.sink, file.source.shown, name)
            try:
                checks.check_content(spec, file.parts(name), place)
            except BcqError as fault:
                self.once(fault.finding)
                return

    def manifest(self) -> Manifest | None:
        """BCQ-V601, V602, V603."""
        if self.raw_manifest is not None:
            return parse_manifest(self.raw_manifest, self.sink)
        if not os.access(self.path / MANIFEST, os.F_OK):
            self.sink(Finding("BCQ-V601", self.path.name, "", f"no {MANIFEST}", "a finished checkpoint"))
            return None
        try:
            raw = read_json(inside(self.path, MANIFEST), limits.MAX_JSON_FILE_BYTES, MANIFEST, "BCQ-V602")
        except BcqError as fault:
            self.sink(fault.finding)
            return None
        return parse_manifest(raw, self.sink)

    def versions(self, files: list[ModelFile], config: Mapping[str, Any] | None, manifest: Manifest | None) -> None:
        """BCQ-V512, V513."""
        stated = {file.source.shown: file.descriptor.version for file in files if file.descriptor is not None}
        if manifest is not None:
            stated[MANIFEST] = manifest.version
        if not stated:
            return
        version = next(iter(stated.values()))
        for name, other in stated.items():
            if other != version:
                self.sink(Finding("BCQ-V513", name, "", f"version {other}", f"{version} as in {next(iter(stated))}"))
        if config is not None:
            check_quantization_config(config, version, self.sink)

    def across(self, files: list[ModelFile], layout: Layout) -> None:
        """BCQ-V504, V505, and V214 between files: the shards and the index together."""
        claims = FolderNames()
        for file in files:
            claims.add(file, self.sink)
        where = claims.tensors
        if layout.weight_map is None:
            return
        opened = {file.source.shown for file in files}
        wanted = {name: file for name, file in layout.weight_map.items() if file in opened}
        doubled = {f.tensor for f in self.report.findings if f.code == "BCQ-V505"}  # which is a finding of its own
        for text, names in (
            ("tensors that the index leaves out", [name for name in where if name not in wanted]),
            ("tensors that the index names and no file has", [name for name in wanted if name not in where]),
            (
                "tensors in another file than the index says",
                [n for n in wanted if n in where and where[n] != wanted[n]],
            ),
        ):
            if not set(names) <= doubled:
                shown = ", ".join(f"'{escape(name, 60)}'" for name in names[:3])
                self.sink(Finding("BCQ-V504", INDEX, "", f"{len(names)} {text}: {shown}", "none"))

    def same_weights(self, files: list[ModelFile], manifest: Manifest) -> None:
        """BCQ-V608."""
        described = {
            name: (file.source.shown, spec)
            for file in files
            if file.descriptor is not None
            for name, spec in file.descriptor.weights.items()
        }
        if any(file.descriptor is None for file in files):
            return
        for name in sorted(described.keys() | manifest.weights.keys()):
            if name not in manifest.weights or name not in described:
                here, there = ("manifest", "files") if name in described else ("files", "manifest")
                self.sink(Finding("BCQ-V608", MANIFEST, name, f"not in the {here}", f"as in the {there}"))
                continue
            record, (file, spec) = manifest.weights[name], described[name]
            if record.file != file:
                self.sink(Finding("BCQ-V608", MANIFEST, name, f"file {escape(record.file)}", file))
            elif resolved_json(record.spec) != resolved_json(spec):
                self.sink(Finding("BCQ-V608", MANIFEST, name, "another description than in the file", "the same"))

    def same_files(
        self, manifest: Manifest, layout: Layout, files: list[ModelFile], hasher: Executor
    ) -> dict[str, Digest]:
        """BCQ-V604, V605, V609. When deep, the digests that are being computed, each with the stated one."""
        opened = {file.source.shown: file.source for file in files}
        digests: dict[str, Digest] = {}
        if not self.listing:  # it cannot be listed, which is a finding of its own
            return digests
        told = {finding.file for finding in self.report.findings if finding.code in ("BCQ-V507", *_NOT_READ)}
        present = self.listing - {MANIFEST} - told
        for name in sorted(manifest.files.keys() - present - told):
            found = "the manifest itself" if name == MANIFEST else "no such file in the folder"
            self.sink(Finding("BCQ-V604", name, "", found, "the file that the manifest names"))
        for name in sorted(present - manifest.files.keys()):
            self.not_named(name, layout)
        for name in sorted(present & manifest.files.keys()):
            record = manifest.files[name]
            try:
                source = opened[name] if name in opened else SourceFile(self.path / name, name)
            except BcqError as fault:
                self.once(fault.finding)
                continue
            if source.size != record.size:
                self.sink(Finding("BCQ-V605", name, "", f"{source.size} bytes", f"{record.size}"))
            elif self.deep:
                self.report.nbytes += 0 if name in opened else source.size
                digests[name] = hasher.submit(hash_file, source, self.hashed), record.sha256
        return digests

    def not_named(self, name: str, layout: Layout) -> None:
        """BCQ-V609, or a note: a file that no digest covers."""
        if name in (CONFIG, INDEX, *layout.files) or name.startswith(f"{SOURCE}/"):
            self.sink(Finding("BCQ-V609", name, "", "no digest covers it", "its size and digest in the manifest"))
        elif is_documentation(name):
            self.sink(Finding("BCQ-E504", name, "", "its owner may edit it"))
        else:
            unused = "; nor does the index, so no weight is read from it" if name.endswith(".safetensors") else ""
            self.sink(Finding("BCQ-E505", name, "", f"the manifest does not name it{unused}"))

    def hashed(self, count: int) -> None:
        """Some bytes are hashed; raises when the rest is not wanted."""
        if self.stop.is_set():
            raise CancelledError
        if self.progress is not None:
            self.progress(count)

    def once(self, finding: Finding) -> None:
        """A file that cannot be read is one finding, however often it is read."""
        if not any(f.code == finding.code and f.file == finding.file for f in self.report.findings):
            self.sink(finding)


def _order(finding: Finding) -> tuple[int, int, str]:
    """Errors first, then by rule: the rules are numbered in the order in which they are checked."""
    kind = {"error": 0, "warning": 1, "note": 2}[finding.severity]
    number = int(finding.code[5:])
    return kind, number if finding.code[4] == "V" else -1, finding.file
