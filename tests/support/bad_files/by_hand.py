"""Files of the format put together by hand, byte by byte, so that any byte of them can be wrong.

Shares no code with the package, but for :func:`folder`, which starts from what ``bcqfmt.save`` writes.
"""

from __future__ import annotations

import functools
import hashlib
import json
import struct
import tempfile
from pathlib import Path
from typing import Any

Json = dict[str, Any]
Tensor = tuple[str, list[int], bytes]

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MANIFEST = "bcq_manifest.json"
CONFIG = "config.json"


# -- one file ---------------------------------------------------------------------------------------------------


def canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def frame(header: bytes | Json, data: bytes = b"", *, length: int | None = None, pad: bool = True) -> bytes:
    """Length, header, data; ``length`` is what the file claims, if not the truth."""
    raw = header if isinstance(header, bytes) else canonical(header).encode("ascii")
    raw += b" " * (-len(raw) % 8) if pad else b""
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


def entries(tensors: dict[str, Tensor]) -> tuple[Json, bytes]:
    """The header's entries and the data of tensors that follow each other in the given order."""
    header: Json = {}
    data = b""
    for name, (dtype, shape, raw) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    return header, data


def described(tensors: dict[str, Tensor], descriptor: Json | str) -> tuple[Json, bytes]:
    """Header and data of a BCQ file."""
    header, data = entries(tensors)
    text = descriptor if isinstance(descriptor, str) else canonical(descriptor)
    header["__metadata__"] = {"format": "pt", "bcqfmt": text}
    return header, data


def place(folder: Path, content: bytes, name: str = SINGLE) -> Path:
    """Write ``content`` as a lone file."""
    path = folder / name
    path.write_bytes(content)
    return path


def sparse(path: Path, size: int, head: bytes = b"") -> Path:
    """A file of ``size`` bytes that takes no room: ``head`` and a hole."""
    with path.open("wb") as file:
        file.write(head)
        file.truncate(size)
    return path


def i32(*numbers: int) -> bytes:
    return struct.pack(f"<{len(numbers)}i", *numbers)


def u16(*numbers: int) -> bytes:
    return struct.pack(f"<{len(numbers)}H", *numbers)


def f16(*numbers: float) -> bytes:
    return struct.pack(f"<{len(numbers)}e", *numbers)


def example_tensors() -> dict[str, Tensor]:
    """The worked example of the spec (section 14): ``w.weight`` [2, 8], two planes."""
    return {
        "w.bcq_s0_planes": ("I32", [2, 2, 1], bytes.fromhex("3c000000cf0000005a000000c0000000")),
        "w.bcq_s0_scale": ("F16", [2, 1], bytes.fromhex("003800bc")),
    }


def example_descriptor() -> Json:
    segment = {"encoding": "affine", "bits": 2, "group_size": 8, "scale": "F16", "zero": 2}
    return {
        "version": "1.0",
        "features": [],
        "schemes": [{"segments": [segment]}],
        "weights": {"w.weight": {"scheme": 0, "shape": [2, 8], "dtype": "F16"}},
    }


def example() -> tuple[Json, bytes]:
    """Header and data of the worked example."""
    return described(example_tensors(), example_descriptor())


def with_dense(name: str) -> bytes:
    """The worked example with one more tensor, dense, of any name."""
    header, data = example()
    header[name] = {"dtype": "U8", "shape": [4], "data_offsets": [len(data), len(data) + 4]}
    return frame(header, data + b"abcd")


def sparse_weight(
    *,
    perm: list[int] | None = None,
    indptr: tuple[int, ...] = (0, 1, 1, 2, 3),
    indices: tuple[int, ...] = (3, 0, 31),
) -> bytes:
    """``w.weight`` [4, 32] of one plane with outliers and, if given, a reordering."""
    tensors: dict[str, Tensor] = {
        "w.bcq_outlier_indptr": ("I32", [len(indptr)], i32(*indptr)),
        "w.bcq_s0_planes": ("I32", [1, 4, 1], i32(1, -1, 0x0F0F, 0)),
        "w.bcq_outlier_indices": ("U16", [len(indices)], u16(*indices)),
        "w.bcq_outlier_values": ("F16", [len(indices)], f16(*[2.5] * len(indices))),
        "w.bcq_s0_scale": ("F16", [4, 4], f16(*[0.5] * 16)),
    }
    segment = {"encoding": "affine", "bits": 1, "group_size": 8, "scale": "F16", "zero": 0}
    scheme: Json = {"segments": [segment], "outliers": {"mode": "add", "dtype": "F16", "segments": [0]}}
    features = ["outliers"]
    if perm is not None:
        tensors = {"w.bcq_perm": ("I32", [32], i32(*perm)), **tensors}
        scheme["perm"] = True
        features.append("perm")
    weight = {"scheme": 0, "shape": [4, 32], "dtype": "F16"}
    tables = {"schemes": [scheme], "weights": {"w.weight": weight}}
    return frame(*described(tensors, {"version": "1.0", "features": features, **tables}))


# -- a folder ---------------------------------------------------------------------------------------------------


@functools.cache
def _saved(shards: bool) -> dict[str, bytes]:
    """The files that ``bcqfmt.save`` makes of a small model."""
    import numpy as np

    import bcqfmt

    codes = (np.arange(16 * 64, dtype=np.uint8).reshape(16, 64) * 7) % 16
    scale = np.linspace(0.25, 2, 32, dtype=np.float16).reshape(16, 2)
    zero = np.arange(32, dtype=np.uint8).reshape(16, 2) % 9
    tensors: dict[str, Any] = {
        f"model.layers.{i}.mlp.{proj}_proj.weight": bcqfmt.BcqWeight.from_affine(
            codes, scale, zero, bits=4, group_size=32
        )
        for i in range(2)
        for proj in ("up", "down")
    }
    tensors["model.norm.weight"] = np.ones(64, np.float16)
    tensors["model.embed_tokens.weight"] = np.arange(256, dtype=np.float32).reshape(4, 64)
    with tempfile.TemporaryDirectory() as work:
        target = Path(work) / "saved"
        config = {"architectures": ["TinyForCausalLM"], "vocab_size": 4}
        bcqfmt.save(target, tensors, config=config, max_shard_size=1500 if shards else 10**9)
        return {file.name: file.read_bytes() for file in target.iterdir()}


def folder(where: Path, *, shards: bool = False, name: str = "checkpoint") -> Path:
    """A finished checkpoint, of one file or of three shards with an index."""
    target = where / name
    target.mkdir(parents=True)
    for path, data in _saved(shards).items():
        (target / path).write_bytes(data)
    return target


def read_json(path: Path) -> Any:
    return json.loads(path.read_bytes())


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")


def split(path: Path) -> tuple[Json, bytes]:
    """Header and data of a file."""
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def describe_again(path: Path, change: Any) -> None:
    """Apply ``change`` to the descriptor of a file and write it back."""
    header, data = split(path)
    descriptor = json.loads(header["__metadata__"]["bcqfmt"])
    change(descriptor)
    header["__metadata__"]["bcqfmt"] = canonical(descriptor)
    path.write_bytes(frame(header, data))


def add_tensor(path: Path, name: str, raw: bytes = b"abcd") -> None:
    """One more dense tensor at the end of a file."""
    header, data = split(path)
    header[name] = {"dtype": "U8", "shape": [len(raw)], "data_offsets": [len(data), len(data) + len(raw)]}
    path.write_bytes(frame(header, data + raw))


def seal(target: Path, change: Any = None) -> Path:
    """Make every digest of the manifest right again; ``change`` edits the manifest first."""
    manifest = read_json(target / MANIFEST)
    manifest["files"] = {
        file.relative_to(target).as_posix(): {"size": file.stat().st_size, "sha256": _sha(file.read_bytes())}
        for file in sorted(target.rglob("*"))
        if file.is_file() and file.name != MANIFEST
    }
    if change is not None:
        change(manifest)
    manifest.pop("sha256")
    manifest["sha256"] = _sha(canonical(manifest).encode())
    (target / MANIFEST).write_text(canonical(manifest) + "\n")
    return target


def _sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
