"""The plan of a conversion: decided before the first byte is written, immutable, and known by its digest.

It follows from the source and the options that change the output; how many workers carry it out does not matter.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bcqfmt import limits
from bcqfmt.checkpoint.descriptor import allowed_name, reserved_name
from bcqfmt.checkpoint.folder import SOURCE
from bcqfmt.checkpoint.manifest import Manifest
from bcqfmt.checkpoint.provenance import source_record
from bcqfmt.checkpoint.reader import Checkpoint
from bcqfmt.checkpoint.reader import open as open_checkpoint
from bcqfmt.checkpoint.shards import Unit, plan_shards, shard_names
from bcqfmt.container.files import SourceFile, hash_file, inside, read_small
from bcqfmt.container.header import twins
from bcqfmt.container.strict_json import canonical
from bcqfmt.converters.layouts.protocol import Module
from bcqfmt.converters.source.checkpoint import SourceCheckpoint
from bcqfmt.errors import BcqError, error, escape, refuse
from bcqfmt.version import __version__

from .paths import check_paths

_READING = ("layout", "zero_point")  # options that tell how a source is read


def asked_in(manifest: Manifest | None) -> dict[str, str]:
    """`Plan.asked` of the conversion that wrote a folder; empty where it asked for nothing."""
    found = (manifest.ignorable or {}).get("asked") if manifest is not None else None
    known = found if isinstance(found, dict) else {}
    return {key: value for key in _READING if isinstance(value := known.get(key), str)}


@dataclass(frozen=True, slots=True)
class Shard:
    """An output file: its name, the weights it holds and the dense tensors it copies."""

    file: str
    weights: tuple[str, ...]
    dense: tuple[str, ...]
    nbytes: int


@dataclass(frozen=True)
class Plan:
    """What will be written; ``digest`` identifies it."""

    shards: tuple[Shard, ...]
    source: dict[str, Any]
    options: dict[str, Any]
    quantized: int
    parameters: int

    def as_json(self) -> dict[str, Any]:
        return {
            "generator": {"name": "bcqfmt", "version": __version__},
            "options": self.options,
            "source": self.source,
            "shards": [{"file": s.file, "weights": list(s.weights), "dense": list(s.dense)} for s in self.shards],
        }

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 of the plan's canonical JSON; every step asks for it."""
        return hashlib.sha256(canonical(self.as_json()).encode("ascii")).hexdigest()

    @property
    def nbytes(self) -> int:
        """Bytes of the source tensors, which is close to what will be written."""
        return sum(shard.nbytes for shard in self.shards)

    @property
    def coverage(self) -> float:
        """Share of the parameters that are quantized."""
        return self.quantized / self.parameters if self.parameters else 0.0

    @property
    def asked(self) -> dict[str, str]:
        """How the source is read, where that was asked for and not found out: the manifest keeps it (`asked_in`)."""
        return {key: value for key in _READING if (value := self.options.get(key, "auto")) != "auto"}

    def is_carried_out_in(self, folder: Path, modules: Iterable[Module]) -> bool:
        """Whether ``folder`` is the complete result of this plan, so that there is nothing left to do.

        Compared are the source's headers, sizes and side files, the options that change the output, the cut into
        shards, and the version of this program. Content is not read: that is what ``validate --deep`` is for.
        """
        provenance = self.options.get("provenance", False)  # a quantization has none: it cannot be restored
        try:
            with open_checkpoint(folder) as checkpoint:
                manifest = checkpoint.manifest
                return (
                    manifest is not None
                    and manifest.generator == {"name": "bcqfmt", "version": __version__}
                    and asked_in(manifest) == self.asked
                    and self._same_source(manifest)
                    and self._same_shards(checkpoint, manifest)
                    and (folder / SOURCE).is_dir() == provenance
                    and (not provenance or self._same_provenance(folder, modules))
                )
        except BcqError:
            return False

    def _same_source(self, manifest: Manifest) -> bool:
        known: dict[str, Any] = manifest.source["files"] if manifest.source is not None else {}
        models, sides = self.source["models"], self.source["sides"]
        return (
            known.keys() == models.keys() | sides.keys()
            and all(known[path]["size"] == model["size"] for path, model in models.items())
            and all(known[path]["sha256"] == digest for path, digest in sides.items())
        )

    def _same_shards(self, checkpoint: Checkpoint, manifest: Manifest) -> bool:
        planned = {name: shard.file for shard in self.shards for name in shard.weights}
        if {name: record.file for name, record in manifest.weights.items()} != planned:
            return False
        dense = {name: tensor.file.name for name, tensor in checkpoint.dense() if tensor.file is not None}
        return dense == {name: shard.file for shard in self.shards for name in shard.dense}

    def _same_provenance(self, folder: Path, modules: Iterable[Module]) -> bool:
        """Source headers byte for byte, and zero points read by the same rules."""
        for path, model in self.source["models"].items():
            place = f"{SOURCE}/headers/{path}.header"
            header = read_small(inside(folder, place), limits.MAX_JSON_FILE_BYTES + 8, place, "BCQ-V702")
            if hashlib.sha256(header).hexdigest() != model["header"]:
                return False
        record = source_record(folder, refuse)
        assert record is not None  # refuse has raised otherwise
        known = [module.settings.get("zero_point") for module in modules]
        return all(rule["zero_point"] in known for rule in record["rules"] if "zero_point" in rule)


def make_plan(
    source: SourceCheckpoint,
    modules: list[Module],
    options: dict[str, Any],
    max_shard_size: int,
    *,
    carried_out: bool = True,
) -> Plan:
    """Weights and dense tensors in natural order, cut into shards; names checked against the format's rules.

    A plan that is only shown (not ``carried_out``) reads nothing more from the source; its digest means nothing.
    """
    claimed = {tensor.name for module in modules for tensor in module.tensors.values()}
    dense = [name for name in source.tensors if name not in claimed]
    units = [Unit(m.weight_name, {t.name: t for t in m.tensors.values()}, True) for m in modules]
    units += [Unit.of_dense(source.tensors[name]) for name in dense]
    _check_names(source, modules, dense)
    for module in modules:
        if not allowed_name(module.weight_name):
            raise error(
                "BCQ-V213",
                source.home[next(iter(module.tensors.values())).name],
                module.weight_name,
                "a module whose name a weight cannot have",
                "letters, digits and _.:+-, at most 480",
                hint="rename its tensors in the source, and its module in the model's code",
            )
    shards = []
    planned = plan_shards(units, max_shard_size)
    for file, group in zip(shard_names(len(planned)), planned, strict=True):
        shards.append(
            Shard(
                file,
                tuple(unit.name for unit in group if unit.is_weight),
                tuple(unit.name for unit in group if not unit.is_weight),
                sum(unit.nbytes for unit in group),
            )
        )
    check_paths(source, [shard.file for shard in shards])
    shapes = [m.settings.get("shape") or (m.settings["n"], m.settings["k"]) for m in modules]
    quantized = sum(math.prod(shape) for shape in shapes)
    plain = sum(math.prod(source.tensors[name].shape) for name in dense)
    known = _fingerprint(source) if carried_out else {}
    asked = {**options, "max_shard_size": max_shard_size}
    return Plan(tuple(shards), known, asked, quantized, quantized + plain)


def _check_names(source: SourceCheckpoint, modules: list[Module], dense: list[str]) -> None:
    """Errors show what the source calls a tensor: that is what a user can change."""
    names = [(module.weight_name, next(iter(module.tensors.values())).name) for module in modules]
    copied = [(name, source.copies[name].stored if name in source.copies else name) for name in dense]
    for name, stored in copied:
        if reserved_name(name):
            found, expected = "a name that the format reserves, or a too long one", "another name for a dense tensor"
            raise error("BCQ-V302", source.home[stored], stored, found, expected, hint="rename it in the source")
    names += copied
    for name, other in twins(name for name, _ in names):
        first, second, *_ = (stored for new, stored in names if new in (name, other))
        found = f"equal to '{escape(first)}' but for case"
        if name == other:
            found = f"it and '{escape(first)}' would both be '{escape(name)}'"
        raise error("BCQ-V120", source.home[second], second, found)


def _fingerprint(source: SourceCheckpoint) -> dict[str, Any]:
    """Sizes and digests of headers and side files: a source that changed is another source."""
    models = {
        path: {"size": model.source.size, "header": hashlib.sha256(model.header_bytes()).hexdigest()}
        for path, model in source.models.items()
    }
    sides = {path: _digest(source, path) for path in source.side_files}
    return {"models": models, "sides": sides, "left_out": source.left_out}


def _digest(source: SourceCheckpoint, path: str) -> str:
    with closing(SourceFile(source.path_of(path), path)) as opened:
        return hash_file(opened)
