"""Whether a folder is what a plan would make: then there is nothing left to do.

Compared is what a plan is known by: the source's headers, sizes and side files, the options that change the output,
the cut into shards, and the version of this program. That its bytes are sound is for ``validate --deep`` to say.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bcqfmt.checkpoint.folder import SOURCE
from bcqfmt.checkpoint.manifest import Manifest
from bcqfmt.checkpoint.provenance import source_record
from bcqfmt.checkpoint.reader import Checkpoint
from bcqfmt.checkpoint.reader import open as open_checkpoint
from bcqfmt.container.files import inside
from bcqfmt.converters.layouts.protocol import Module
from bcqfmt.errors import BcqError, refuse
from bcqfmt.version import __version__

from .plan import Plan

__all__ = ["carried_out"]


def carried_out(target: Path, plan: Plan, modules: Iterable[Module]) -> bool:
    """Whether ``target`` is the complete result of ``plan``."""
    provenance = plan.options.get("provenance", False)  # a quantization has none: nothing leads back
    try:
        with open_checkpoint(target) as checkpoint:
            manifest = checkpoint.manifest
            return (
                manifest is not None
                and manifest.generator == {"name": "bcqfmt", "version": __version__}
                and _same_source(manifest, plan)
                and _same_shards(checkpoint, manifest, plan)
                and (target / SOURCE).is_dir() == provenance
                and (not provenance or _same_record(target, plan, modules))
            )
    except BcqError:
        return False


def _same_source(manifest: Manifest, plan: Plan) -> bool:
    known: dict[str, Any] = manifest.source["files"] if manifest.source is not None else {}
    models, sides = plan.source["models"], plan.source["sides"]
    return (
        known.keys() == models.keys() | sides.keys()
        and all(known[path]["size"] == model["size"] for path, model in models.items())
        and all(known[path]["sha256"] == digest for path, digest in sides.items())
    )


def _same_shards(checkpoint: Checkpoint, manifest: Manifest, plan: Plan) -> bool:
    planned = {name: shard.file for shard in plan.shards for name in shard.weights}
    if {name: record.file for name, record in manifest.weights.items()} != planned:
        return False
    dense = {name: tensor.file.name for name, tensor in checkpoint.dense() if tensor.file is not None}
    return dense == {name: shard.file for shard in plan.shards for name in shard.dense}


def _same_record(target: Path, plan: Plan, modules: Iterable[Module]) -> bool:
    """Headers byte for byte, and zero points read in the same way."""
    for path, model in plan.source["models"].items():
        header = inside(target, f"{SOURCE}/headers/{path}.header").read_bytes()
        if hashlib.sha256(header).hexdigest() != model["header"]:
            return False
    record = source_record(target, refuse)
    assert record is not None  # refuse has raised otherwise
    rules = {rule["zero_point"] for rule in record["rules"] if "zero_point" in rule}
    return rules <= {module.settings.get("zero_point") for module in modules}
