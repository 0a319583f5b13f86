"""Folders: shards, index, configuration, manifest and the record of a source (sections 9 and 10)."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .build import Tensor, canonical, sha256
from .weights import Weight, bcq_file, features, table, tensors_of

Files = dict[str, bytes]
INDEX, MANIFEST = "model.safetensors.index.json", "bcq_manifest.json"


def pretty(value: Any) -> bytes:
    """The JSON texts of a model folder that are not canonical."""
    return (json.dumps(value, indent=2, sort_keys=True) + "\n").encode("ascii")


def line(value: Any) -> bytes:
    """Canonical JSON and a line feed."""
    return (canonical(value) + "\n").encode("ascii")


def listing(files: Files) -> dict[str, Any]:
    """Path -> size and SHA-256."""
    return {path: {"size": len(data), "sha256": sha256(data)} for path, data in files.items()}


def seal(manifest: dict[str, Any]) -> dict[str, Any]:
    """The manifest with its own digest."""
    body = {k: v for k, v in manifest.items() if k != "sha256"}
    return {**body, "sha256": sha256(canonical(body).encode("ascii"))}


@dataclass
class Shard:
    """One model file."""

    weights: list[Weight] = field(default_factory=list)
    dense: dict[str, Tensor] = field(default_factory=dict)
    version: str = "1.0"

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Every tensor of the file."""
        return tensors_of(self.weights, self.dense)


@dataclass
class Folder:
    """A folder under construction; several shards get an index."""

    shards: dict[str, Shard]
    side: Files = field(default_factory=dict)
    version: str = "1.0"
    source: dict[str, Any] | None = None
    ignorable: dict[str, Any] | None = None
    unnamed: Files = field(default_factory=dict)  # files that the manifest leaves out

    @property
    def weights(self) -> list[Weight]:
        """All weights of the folder."""
        return [w for shard in self.shards.values() for w in shard.weights]

    @property
    def dense(self) -> dict[str, Tensor]:
        """All dense tensors of the folder."""
        return {n: t for shard in self.shards.values() for n, t in shard.dense.items()}

    def index(self) -> dict[str, Any]:
        """`model.safetensors.index.json`."""
        where = {name: file for file, shard in self.shards.items() for name in shard.tensors}
        size = sum(len(t.data) for shard in self.shards.values() for t in shard.tensors.values())
        return {"metadata": {"total_size": size}, "weight_map": where}

    def config(self) -> dict[str, Any]:
        """`config.json`."""
        quantization = {"quant_method": "bcq", "format_version": self.version}
        return {
            "model_type": "example",
            "rms_norm_eps": 1e-06,
            "quantization_config": {**quantization, "features": features(self.weights)},
        }

    def files(self) -> Files:
        """Everything but the manifest."""
        made: Files = {f: bcq_file(s.weights, s.dense, s.version) for f, s in self.shards.items()}
        if list(self.shards) != ["model.safetensors"]:
            made[INDEX] = pretty(self.index())
        return {"config.json": pretty(self.config()), **made, **self.side}

    def manifest(self, files: Files) -> dict[str, Any]:
        """The manifest for these files, without its own digest."""
        schemes, entries = table(self.weights)
        for file, shard in self.shards.items():
            for w in shard.weights:
                entries[w.name]["file"] = file
        optional = {"source": self.source, "ignorable": self.ignorable}
        return {
            "version": self.version,
            "generator": {"name": "bcq-vectors", "version": "1"},
            "features": features(self.weights),
            "schemes": schemes,
            "weights": entries,
            "files": listing({p: d for p, d in files.items() if p.split("/")[0][0] != "."}),
            **{k: v for k, v in optional.items() if v is not None},
        }

    def build(
        self,
        tamper: Callable[[Files], Any] | None = None,
        edit: Callable[[dict[str, Any]], Any] | None = None,
    ) -> Files:
        """The finished folder. `tamper` changes files before, `edit` the manifest before it is sealed."""
        files = self.files()
        if tamper:
            tamper(files)
        manifest = self.manifest(files)
        if edit:
            edit(manifest)
        return {**files, **self.unnamed, MANIFEST: line(seal(manifest))}
