"""Reading: a checkpoint as a mapping from names to weights and dense tensors, nothing read until asked for."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from pathlib import Path

from bcqfmt import limits
from bcqfmt.container.files import SourceFile, inside, named, read_json
from bcqfmt.container.header import header_of
from bcqfmt.container.stored_tensor import StoredTensor
from bcqfmt.errors import Finding, error, nearest_names, refuse
from bcqfmt.system import ForkLock
from bcqfmt.weight.scheme import WeightSpec, features_of
from bcqfmt.weight.weight import BcqWeight

from .folder import MANIFEST, Layout, model_layout
from .manifest import Manifest, parse_manifest
from .model_file import FolderNames, ModelFile, read_model_file


class Checkpoint:
    """A BCQ file or folder: ``ckpt[name]`` is a :class:`BcqWeight` or, for a dense tensor, a :class:`StoredTensor`.

    Attributes: ``path``; ``manifest`` (None for a lone file); ``warnings``, findings that did not stop the reading.
    """

    def __init__(self, path: Path, files: dict[str, Path], layout: Layout, manifest: Manifest | None) -> None:
        self.path = path
        self.manifest = manifest
        self.warnings: list[Finding] = []
        self._paths = files
        self._opened: dict[str, ModelFile] = {}
        self._layout = layout
        self._claims = FolderNames()
        self._lock = ForkLock()

    def __getitem__(self, name: str) -> BcqWeight | StoredTensor:
        file = self._file_of(name)
        if name in file.specs:
            return BcqWeight(name, file.specs[name], file.parts(name))
        return file.tensor(name)

    def weight(self, name: str) -> BcqWeight:
        """A quantized weight; an error when the name is that of a dense tensor."""
        found = self[name]
        if not isinstance(found, BcqWeight):
            raise error("BCQ-E301", self.path.name, name, "a dense tensor", "a quantized weight")
        return found

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def weights(self) -> Iterator[tuple[str, BcqWeight]]:
        """(name, weight) for every quantized weight."""
        for file in self.files():
            for name, spec in file.specs.items():
                yield name, BcqWeight(name, spec, file.parts(name))

    def dense(self) -> Iterator[tuple[str, StoredTensor]]:
        """(name, tensor) for everything that is not quantized, byte for byte."""
        for file in self.files():
            for name in file.dense:
                yield name, file.tensor(name)

    def files(self) -> Iterator[ModelFile]:
        """Every model file, its header read and checked."""
        for name in self._paths:
            yield self._open(name)

    @property
    def features(self) -> list[str]:
        """The features in use."""
        if self.manifest is not None:
            return list(self.manifest.features)
        return features_of(spec for file in self.files() for spec in file.specs.values())

    @property
    def version(self) -> str:
        """The format version that the files state."""
        if self.manifest is not None:
            return self.manifest.version
        descriptor = next(self.files()).descriptor
        assert descriptor is not None
        return descriptor.version

    @property
    def bytes_read(self) -> int:
        """Bytes read from the model files so far."""
        return sum(file.source.bytes_read for file in self._opened.values())

    def close(self) -> None:
        """Give all file descriptors back."""
        for file in self._opened.values():
            file.source.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Checkpoint({str(self.path)!r}, {len(self._paths)} file(s))"

    @functools.cached_property
    def _names(self) -> dict[str, str]:
        """Name of every weight and dense tensor -> file."""
        return {name: file.source.shown for file in self.files() for name in (*file.specs, *file.dense)}

    def _file_of(self, name: str) -> ModelFile:
        """The file that holds a name, found through manifest or index without opening the others."""
        guess: str | None = None
        if len(self._paths) == 1:
            guess = next(iter(self._paths))
        elif self.manifest is not None and name in self.manifest.weights:
            guess = self.manifest.weights[name].file
        elif self._layout.weight_map is not None:
            guess = self._layout.weight_map.get(name)
        if guess in self._paths:
            file = self._open(guess)
            if name in file.specs or name in file.dense:
                return file
        found = f"not in this checkpoint{nearest_names(name, self._names)}"
        raise error("BCQ-E301", self.path.name, name, found)

    def _open(self, name: str) -> ModelFile:
        with self._lock:
            if name not in self._opened:
                fallback = None if self.manifest is None else self._described.get(name, {})
                file = read_model_file(SourceFile(self._paths[name], name), self._sink, fallback)
                assert file is not None  # the sink has raised otherwise
                if len(self._paths) > 1:
                    self._claims.add(file, refuse)
                self._opened[name] = file
            return self._opened[name]

    @functools.cached_property
    def _described(self) -> dict[str, dict[str, WeightSpec]]:
        """File -> its weights as the manifest describes them; made once, a large model has many files."""
        return {} if self.manifest is None else self.manifest.weights_by_file()

    def _sink(self, finding: Finding) -> None:
        refuse(finding)
        self.warnings.append(finding)


def open(path: str | os.PathLike[str]) -> Checkpoint:
    """Open a BCQ file or a finished BCQ folder. Headers are read when they are needed, data when it is asked for."""
    place = named(path)
    if place.is_dir():
        return _open_folder(place)
    if not os.path.lexists(place):
        raise error("BCQ-E101", str(place), found="nothing of that name exists")
    checkpoint = Checkpoint(place, {place.name: place}, Layout(files=[place.name]), None)
    next(checkpoint.files())
    return checkpoint


def _open_folder(folder: Path) -> Checkpoint:
    layout = model_layout(folder, refuse)
    if not os.access(folder / MANIFEST, os.F_OK):
        _refuse_foreign(folder, layout.files[0])
    manifest = read_manifest(folder)
    return Checkpoint(folder, {name: folder / name for name in layout.files}, layout, manifest)


def _refuse_foreign(folder: Path, name: str) -> None:
    """BCQ-V201 for a folder of another format; one of ours without a manifest is unfinished instead."""
    if "bcqfmt" not in header_of(folder / name).metadata:
        raise error("BCQ-V201", name, found="__metadata__ has no key bcqfmt", expected="a BCQ descriptor")


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a finished folder; its digest is left to the validator."""
    if not os.access(folder / MANIFEST, os.F_OK):
        raise error("BCQ-V601", folder.name, found=f"no {MANIFEST}", expected="a finished checkpoint")
    raw = read_json(inside(folder, MANIFEST), limits.MAX_JSON_FILE_BYTES, MANIFEST, "BCQ-V602")
    manifest = parse_manifest(raw, refuse, check_digest=False)
    assert manifest is not None  # refuse has raised otherwise
    return manifest
