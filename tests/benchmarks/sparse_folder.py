"""A BCQ folder of any size that takes no room: real headers, descriptors, index and manifest; data that are holes.

The digests in the manifest are made up, so `validate --deep` would refuse it; everything else is as it should be.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
from pathlib import Path

from bcqfmt.checkpoint.descriptor import Descriptor, descriptor_json
from bcqfmt.checkpoint.folder import CONFIG, INDEX, MANIFEST
from bcqfmt.checkpoint.manifest import FileRecord, Manifest, WeightRecord, manifest_bytes
from bcqfmt.checkpoint.shards import shard_names
from bcqfmt.container.header import header_bytes, layout
from bcqfmt.weight.scheme import PackedZero, Scheme, Segment, WeightSpec, part_prefix

_SCHEME = Scheme(segments=(Segment(encoding="affine", bits=4, group_size=128, scale="F16", zero=PackedZero(4)),))
_SHAPES = {"gate_proj": (2048, 7168), "up_proj": (2048, 7168), "down_proj": (7168, 2048)}
EXPERTS = 400


def expert_weights(count: int) -> dict[str, WeightSpec]:
    """Names and shapes of ``count`` expert weights of a large mixture-of-experts model; three parts each."""
    specs = {
        kind: WeightSpec(scheme=_SCHEME, shape=shape, dtype="BF16", widths=shape[-1:])
        for kind, shape in _SHAPES.items()
    }
    kinds = list(specs)
    found: dict[str, WeightSpec] = {}
    for i in range(count):
        kind, expert, layer = kinds[i % 3], i // 3 % EXPERTS, i // 3 // EXPERTS
        found[f"model.layers.{layer}.mlp.experts.{expert}.{kind}.weight"] = specs[kind]
    return found


def sparse_file(path: Path, head: bytes, data: int) -> None:
    """``head``, then ``data`` bytes that occupy nothing."""
    path.write_bytes(head)
    os.truncate(path, len(head) + data)


def sparse_shard(path: Path, weights: dict[str, WeightSpec]) -> tuple[int, list[str]]:
    """One model file; its size and the names of its tensors."""
    tensors = {
        part_prefix(name) + suffix: (part.dtype, part.shape)
        for name, spec in weights.items()
        for suffix, part in spec.parts().items()
    }
    entries = layout(tensors)
    head = header_bytes(entries, {"format": "pt", "bcqfmt": descriptor_json(Descriptor(weights=weights))})
    data = max(entry.end for entry in entries.values())
    sparse_file(path, head, data)
    return len(head) + data, list(entries)


def sparse_folder(folder: Path, shards: int, weights_per_shard: int) -> int:
    """Fill ``folder``; the number of tensors."""
    weights = expert_weights(shards * weights_per_shard)
    names = list(weights)
    records: dict[str, FileRecord] = {}
    found: dict[str, WeightRecord] = {}
    weight_map: dict[str, str] = {}
    for i, file in enumerate(shard_names(shards)):
        here = {name: weights[name] for name in names[i * weights_per_shard : (i + 1) * weights_per_shard]}
        size, tensors = sparse_shard(folder / file, here)
        records[file] = FileRecord(size, _made_up(file))
        weight_map.update(dict.fromkeys(tensors, file))
        found.update({name: WeightRecord(spec, file) for name, spec in here.items()})
    total = sum(record.size for record in records.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    declared = {"quant_method": "bcq", "format_version": "1.0", "features": []}
    config = {"model_type": "sparse", "quantization_config": declared}
    for name, value in ((INDEX, index), (CONFIG, config)):
        data = json.dumps(value, indent=2, sort_keys=True).encode() + b"\n"
        (folder / name).write_bytes(data)
        records[name] = FileRecord(len(data), hashlib.sha256(data).hexdigest())
    manifest = Manifest(generator={"name": "sparse_folder", "version": "1"}, weights=found, files=records)
    (folder / MANIFEST).write_bytes(manifest_bytes(manifest))
    return len(weight_map)


def _made_up(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shards", type=int, default=1500)
    parser.add_argument("--weights", type=int, default=40, help="per shard, three tensors each")
    options = parser.parse_args()
    options.folder.mkdir(parents=True)
    print(sparse_folder(options.folder, options.shards, options.weights), "tensors")


if __name__ == "__main__":
    main()
