"""Side files of a model (tokenizer, templates): those that are saved with it, and those that saving must not lose."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from bcqfmt.checkpoint.folder import CONFIG, INDEX, MANIFEST, SOURCE, file_list
from bcqfmt.checkpoint.manifest import Manifest, parse_manifest, relative_path
from bcqfmt.checkpoint.reader import open as open_checkpoint
from bcqfmt.container.files import cannot_list, read_json
from bcqfmt.errors import BcqError, Finding, error, escape
from bcqfmt.limits import MAX_JSON_FILE_BYTES
from bcqfmt.weight.weight import BcqWeight

GENERATION = "generation_config.json"
_WRITTEN = {CONFIG, INDEX, MANIFEST, GENERATION}
_MOST = 64_000_000  # larger files are not side files
_SHOWN = 6


def side_files(folder: Path) -> dict[str, bytes]:
    """Small files of a folder that are neither model nor about it, path -> content: the tokenizer, for one."""
    names = [n for n in file_list(folder) if n not in _WRITTEN | {"README.md"} and not n.endswith(".safetensors")]
    small = [n for n in names if not n.startswith(f"{SOURCE}/") and (folder / n).stat().st_size <= _MOST]
    return {name: (folder / name).read_bytes() for name in small}


def kept_files(target: Path, weights: Mapping[str, BcqWeight]) -> dict[str, bytes]:
    """Side files of a folder that is about to be replaced, path -> content.

    Where the folder holds these very weights, saved before, all of it stays; of another model's folder nothing does.
    BCQ-E401, naming them, for files that would be lost: not written by bcqfmt, or too large to be kept.
    """
    if target.is_symlink() or not target.is_dir():
        return {}  # new; or the writer refuses it
    names = sorted(_everything(target))
    manifest = _manifest(target)
    listed = {} if manifest is None else manifest.files
    if manifest is not None and _holds(target, manifest, weights):
        ours = {name for name in listed if name.endswith(".safetensors") or name.startswith(f"{SOURCE}/")} | _WRITTEN
        found = [name for name in names if name not in ours]
        lost = [name for name in found if not _keepable(target, name)]
    else:
        ours = _WRITTEN if manifest is not None else set()
        found = []
        lost = [name for name in names if name not in ours and not _unchanged(target, name, listed)]
    if lost:
        more = f" and {len(lost) - _SHOWN} more" if len(lost) > _SHOWN else ""
        raise error(
            "BCQ-E401", str(target), found=f"files that saving would delete: {escape(', '.join(lost[:_SHOWN]))}{more}",
            expected="a new or empty folder, or a BCQ folder with its own files only",
            hint="save into a new folder, or move these files away; save_pretrained(..., tokenizer=) takes a tokenizer",
        )  # fmt: skip
    return {name: (target / name).read_bytes() for name in found}


def _everything(folder: Path) -> Iterator[str]:
    """Every file and link as a relative path, hidden ones too."""
    for top, folders, files in os.walk(folder, onerror=cannot_list):
        place = Path(top)
        for name in (*files, *(name for name in folders if (place / name).is_symlink())):
            yield (place / name).relative_to(folder).as_posix()


def _keepable(folder: Path, name: str) -> bool:
    """Whether the writer takes it as a side file."""
    path = folder / name
    plain = relative_path(name) and not name.startswith(".") and not name.endswith(".safetensors")
    return plain and path.is_file() and not path.is_symlink() and path.stat().st_size <= _MOST


def _unchanged(folder: Path, name: str, listed: Mapping[str, tuple[int, str]]) -> bool:
    """Whether it is the file that the manifest lists; of weights, which may be large, the size tells."""
    if name not in listed or (folder / name).is_symlink():
        return False
    size, digest = listed[name]
    path = folder / name
    if path.stat().st_size != size:
        return False
    return size > _MOST or hashlib.sha256(path.read_bytes()).hexdigest() == digest


def _manifest(folder: Path) -> Manifest | None:
    """The manifest, if nothing is wrong with it."""
    faults: list[Finding] = []
    try:
        found = parse_manifest(read_json(folder / MANIFEST, MAX_JSON_FILE_BYTES, MANIFEST, "BCQ-V602"), faults.append)
    except (BcqError, OSError):
        return None
    return None if faults else found


def _holds(folder: Path, manifest: Manifest, weights: Mapping[str, BcqWeight]) -> bool:
    """Whether a folder holds these weights: all of them by what they are, the first and the last by their bytes."""
    if not weights or {n: record.spec for n, record in manifest.weights.items()} != {
        n: weight.spec for n, weight in weights.items()
    }:
        return False
    try:
        with open_checkpoint(folder) as there:
            return all(there.weight(n).digest() == weights[n].digest() for n in {min(weights), max(weights)})
    except BcqError:
        return False
