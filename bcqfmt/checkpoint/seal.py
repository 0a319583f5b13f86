"""Sealing: the manifest written anew, after the owner of a folder has changed files on purpose (spec section 9.3)."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from bcqfmt import limits
from bcqfmt.codes import CODES
from bcqfmt.container.durable import write_file
from bcqfmt.container.files import SourceFile, hash_file, inside, named, read_json
from bcqfmt.errors import Finding, error, escape, refuse

from .folder import INDEX, MANIFEST, SOURCE, file_list, is_documentation, model_layout
from .manifest import FileRecord, Manifest, WeightRecord, manifest_bytes, parse_manifest, relative_path
from .model_file import read_model_file
from .validation import validate


class Change(NamedTuple):
    """What became of a file since the manifest was written: ``kind`` is added, removed, changed or released.

    A released file is documentation that the old manifest names and the new one does not.
    """

    path: str
    kind: str
    old: FileRecord | None
    new: FileRecord | None

    @property
    def of_model(self) -> bool:
        """Whether weights or the archived source changed, not just files around them."""
        return self.path.endswith(".safetensors") or self.path == INDEX or self.path.startswith(f"{SOURCE}/")

    def as_dict(self) -> dict[str, Any]:
        old, new = (None if record is None else record._asdict() for record in (self.old, self.new))
        return {"path": self.path, "kind": self.kind, "old": old, "new": new}


@dataclass(slots=True)
class Sealing:
    """The outcome: ``changes`` by path; ``findings`` that kept the manifest from being written, if any."""

    path: str
    changes: list[Change]
    files: int  # that the manifest names
    findings: list[Finding] = field(default_factory=list)
    written: bool = False

    @property
    def exit_code(self) -> int:
        """0, or that of the first finding."""
        return CODES[self.findings[0].code].exit if self.findings else 0

    def as_dict(self) -> dict[str, Any]:
        return {
            "path": escape(self.path, 4096),
            "written": self.written,
            "files": self.files,
            "changes": [change.as_dict() for change in self.changes],
            "exit_code": self.exit_code,
            "findings": [finding.as_dict() for finding in self.findings],
        }


def seal(
    path: str | os.PathLike[str],
    *,
    accept: bool = False,
    dry_run: bool = False,
    progress: Callable[[int], object] | None = None,
) -> Sealing:
    """Hash all files of a BCQ folder and write its manifest anew; nothing is written when no file has changed.

    Refused, as findings: changed weights or archived source (unless ``accept``), and a folder that would not be valid.
    Raises when there is no sound manifest to begin with. ``progress`` gets the bytes hashed since the last call.
    """
    folder = named(path)
    old = _old_manifest(folder)
    files = _files(folder, progress)
    done = Sealing(str(folder), _changes(folder, old.files, files), len(files))
    touched = [change.path for change in done.changes if change.of_model]
    if touched and not accept:
        shown = escape(", ".join(touched[:3])) + (" ..." if len(touched) > 3 else "")
        done.findings.append(Finding("BCQ-E405", folder.name, "", f"{len(touched)} changed: {shown}", "none"))
    if not done.changes or done.findings:
        return done
    raw = manifest_bytes(replace(old, files=files, weights=_weights(folder)))
    done.findings += validate(folder, deep=bool(touched), manifest=raw).errors
    if not done.findings and not dry_run:
        write_file(folder / MANIFEST, raw)
        done.written = True
    return done


def _old_manifest(folder: Path) -> Manifest:
    """The manifest to renew; without a sound one nobody could tell what has changed."""
    if not os.path.lexists(folder):
        raise error("BCQ-E101", str(folder), found="nothing of that name exists")
    if not folder.is_dir():
        raise error("BCQ-E302", folder.name, found="a file", expected="a BCQ folder: a file on its own has no manifest")
    if not os.path.lexists(folder / MANIFEST):
        expected = "a finished BCQ folder"
        hint = f"finish or repeat the run that writes the folder, or download {MANIFEST} again"
        raise error("BCQ-V601", folder.name, found=f"no {MANIFEST} to renew", expected=expected, hint=hint)
    raw = read_json(inside(folder, MANIFEST), limits.MAX_JSON_FILE_BYTES, MANIFEST, "BCQ-V602")
    found = parse_manifest(raw, refuse)
    assert found is not None  # refuse has raised otherwise
    return found


def _files(folder: Path, progress: Callable[[int], object] | None) -> dict[str, FileRecord]:
    """Every file that the manifest has to name."""
    found = {}
    for name in file_list(folder):
        place = inside(folder, name)
        if name == MANIFEST or is_documentation(name):
            continue
        if not relative_path(name) or name.encode(errors="replace").decode() != name:
            expected = "text without a backslash"
            hint = "rename the file, or remove it"
            raise error("BCQ-E302", name, found="a file name that no manifest can hold", expected=expected, hint=hint)
        with closing(SourceFile(place, name)) as source:
            found[name] = FileRecord(source.size, hash_file(source, progress))
    return found


def _changes(folder: Path, old: dict[str, FileRecord], new: dict[str, FileRecord]) -> list[Change]:
    found = []
    for name in sorted(old.keys() | new.keys()):
        before, now = old.get(name), new.get(name)
        if before is None:
            found.append(Change(name, "added", None, now))
        elif now is None:
            released = is_documentation(name) and (folder / name).is_file()
            found.append(Change(name, "released" if released else "removed", before, None))
        elif before != now:
            found.append(Change(name, "changed", before, now))
    return found


def _weights(folder: Path) -> dict[str, WeightRecord]:
    """The weights as the files themselves describe them."""
    found = {}
    for name in model_layout(folder, refuse).files:
        with closing(SourceFile(folder / name, name)) as source:
            file = read_model_file(source, refuse)
        assert file is not None  # refuse has raised otherwise
        found.update({weight: WeightRecord(spec, name) for weight, spec in file.specs.items()})
    return found
