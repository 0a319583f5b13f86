"""One BCQ file: header, descriptor, and which tensors are whose parts (spec sections 3, 5 and 6)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from bcqfmt.container.files import ByteSource
from bcqfmt.container.header import Header, check_strict, read_header
from bcqfmt.container.stored_tensor import StoredTensor
from bcqfmt.errors import Finding, Sink, escape
from bcqfmt.weight import checks
from bcqfmt.weight.scheme import WeightSpec, part_prefix

from .descriptor import Descriptor, parse_descriptor

_PREFIX_END = re.compile("bcq_")


@dataclass(slots=True)
class ModelFile:
    """A file that was understood: ``specs`` of its weights, the names of its ``dense`` tensors.

    ``descriptor`` is None when the file does not describe itself; then there are no weights either.
    """

    source: ByteSource
    header: Header
    descriptor: Descriptor | None = None
    specs: dict[str, WeightSpec] = field(default_factory=dict)
    dense: dict[str, None] = field(default_factory=dict)

    def tensor(self, name: str) -> StoredTensor:
        """A tensor of the container by its own name."""
        return StoredTensor.in_file(name, self.header, self.source)

    def parts(self, weight: str) -> dict[str, StoredTensor]:
        """The parts of a weight by suffix."""
        prefix = part_prefix(weight)
        return {suffix: self.tensor(prefix + suffix) for suffix in self.specs[weight].parts()}


def read_model_file(
    source: ByteSource,
    sink: Sink,
    fallback: Mapping[str, WeightSpec] | None = None,
    header: Header | None = None,
) -> ModelFile | None:
    """Header, descriptor and structure of a file; None when not even its header can be used.

    ``fallback`` describes the weights of a file whose own descriptor was lost; its use is reported (BCQ-E502).
    ``header``: where it has been read already. Weights with a fault are left out of ``specs``.
    """
    if header is None:
        header = read_header(source, sink)
    if header is None:
        return None
    file = source.shown
    found = ModelFile(source, header)
    text = header.metadata.get("bcqfmt")
    if text is not None or fallback is not None:  # for a plain safetensors file BCQ-V201 says enough
        check_strict(header, file, sink)
    if text is None and fallback is not None:
        sink(Finding("BCQ-E502", file, "", "no key bcqfmt"))
        found.descriptor = Descriptor(weights=dict(fallback))
    elif text is None:
        sink(Finding("BCQ-V201", file, "", "__metadata__ has no key bcqfmt", "a BCQ descriptor"))
    else:
        if header.metadata.get("format") != "pt":
            sink(Finding("BCQ-V202", file, "", f"format = {escape(str(header.metadata.get('format')), 40)}", "pt"))
        found.descriptor = parse_descriptor(text, file, sink)
    if found.descriptor is not None:
        _assign(found, found.descriptor, sink)
    return found


class FolderNames:
    """The names in the files of a folder, tensor or weight -> file. A name in two files has two values."""

    def __init__(self) -> None:
        self.tensors: dict[str, str] = {}
        self.weights: dict[str, str] = {}

    def add(self, file: ModelFile, sink: Sink) -> None:
        """BCQ-V505 and, across files, V214; the names of ``file`` are added."""
        shown, weights = file.source.shown, file.descriptor.weights if file.descriptor is not None else {}
        for name in file.header.tensors:
            if name in self.tensors:
                sink(Finding("BCQ-V505", shown, name, f"also in {self.tensors[name]}", "one file"))
            elif name in self.weights:
                sink(Finding("BCQ-V214", shown, name, f"the name of a weight in {self.weights[name]}"))
        for name in weights:
            if name in self.tensors or name in self.weights:
                other = self.tensors.get(name) or self.weights[name]
                sink(Finding("BCQ-V214", shown, name, f"the name of something else in {other}"))
        self.tensors = {**dict.fromkeys(file.header.tensors, shown), **self.tensors}
        self.weights = {**dict.fromkeys(weights, shown), **self.weights}


def _assign(found: ModelFile, descriptor: Descriptor, sink: Sink) -> None:
    """Check every weight's structure and tell parts from dense tensors."""
    tensors, file = found.header.tensors, found.source.shown
    claimed: set[str] = set()
    unreadable = {part_prefix(name) for name in descriptor.unreadable}
    for name, spec in descriptor.weights.items():
        prefix = part_prefix(name)
        if name in tensors:
            sink(Finding("BCQ-V214", file, name, "a dense tensor of the same name"))
        place = checks.Place(sink, file, name)
        if not checks.check_spec(spec, place):
            unreadable.add(prefix)
            continue
        names = {suffix: prefix + suffix for suffix in spec.parts()}
        claimed.update(names.values())
        present = {s: (n, tensors[n].dtype, tensors[n].shape) for s, n in names.items() if n in tensors}
        if checks.check_parts(spec, present, place):
            found.specs[name] = spec
    for name in tensors:
        if name in claimed or (unreadable and _begins_with(name, unreadable)):
            continue
        if ".bcq_" in name or "_bcq_" in name:
            sink(Finding("BCQ-V302", file, name, "no weight of this file has such a part"))
        else:
            found.dense[name] = None


def _begins_with(name: str, prefixes: set[str]) -> bool:
    """Whether a tensor is named like a part of one of the weights; all prefixes end in ``bcq_``."""
    return any(name[: found.end()] in prefixes for found in _PREFIX_END.finditer(name))
