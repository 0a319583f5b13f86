"""Small checkpoints that several tests need."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from bcqfmt import BcqWeight
from bcqfmt.container.dtypes import BITS
from weights import oracle

VECTORS = Path(__file__).resolve().parents[3] / "spec" / "vectors"


def affine(rows: int = 4, columns: int = 64, bits: int = 4, seed: int = 0, group_size: int = 32) -> BcqWeight:
    """Stored zero points, F16 scales."""
    rng = np.random.default_rng(seed)
    groups = -(-columns // group_size)
    return BcqWeight.from_affine(
        rng.integers(0, 2**bits, (rows, columns)),
        rng.normal(size=(rows, groups)).astype(np.float16),
        np.arange(rows * groups).reshape(rows, groups) % 2**bits,
        group_size=group_size,
        bits=bits,
    )


def planes(rows: int = 4, columns: int = 64, bits: int = 3, seed: int = 0) -> BcqWeight:
    """A bcq weight with bias, BF16 alphas and one more scale set."""
    rng = np.random.default_rng(seed)
    alpha = rng.normal(size=(bits, rows, columns // 32)).astype(ml_dtypes.bfloat16)
    bias = rng.normal(size=(rows, columns // 32)).astype(np.float16)
    return BcqWeight.from_bcq(
        rng.integers(0, 2, (bits, rows, columns)), alpha, bias, group_size=32, scale_sets={1: (alpha[:1], bias)}
    )


def rich(rows: int = 4, seed: int = 0) -> BcqWeight:
    """Two segments, second order, perm and outliers."""
    rng = np.random.default_rng(seed)
    left = affine(rows, 32, 2, seed, 16).with_second_order(
        rng.integers(0, 8, (rows, 2)), np.ones((1, 2), np.float32), np.ones((1, 2), np.float16), bits=3, rows=rows
    )
    right = BcqWeight.from_offset(
        rng.integers(0, 8, (rows, 40)), rng.normal(size=(rows, 2)).astype(np.float16),
        rng.normal(size=(rows, 2)).astype(np.float16), group_size=32, bits=3,
    )  # fmt: skip
    weight = BcqWeight.from_segments([left, right], perm=rng.permutation(72))
    indptr = np.arange(rows + 1) * 2
    return weight.with_outliers(indptr, np.tile([3, 70], rows), rng.normal(size=2 * rows).astype(np.float16))


def tensors(seed: int = 0) -> dict[str, Any]:
    """A little of everything, dense tensors included."""
    rng = np.random.default_rng(seed)
    return {
        "model.embed.weight": rng.normal(size=(10, 8)).astype(ml_dtypes.bfloat16),
        "model.layers.0.up.weight": affine(seed=seed),
        "model.layers.1.up.weight": affine(8, 96, 3, seed + 1),
        "model.layers.2.up.weight": planes(seed=seed),
        "model.layers.10.up.weight": rich(seed=seed),
        "model.layers.9.experts.gate_up": BcqWeight.from_affine(
            rng.integers(0, 4, (2, 3, 16)), rng.normal(size=(2, 3, 2)).astype(np.float32), 1, group_size=8, bits=2
        ),
        "model.norm.weight": rng.normal(size=8).astype(np.float32),
        "step": np.array(7, np.int64),
        "mask": np.array([True, False, True]),
        "nothing": np.zeros((0, 4), np.float16),
    }


CONFIG = {"architectures": ["TestModel"], "hidden_size": 8, "rope_theta": 10000.5, "name": "naïve"}
SIDE = {"tokenizer.json": b'{"a": 1}\n', "docs/card.md": b"# card\n", "empty.txt": b""}


def dense_file(path: Path) -> dict[str, tuple[str, list[int], bytes]]:
    """One tensor of every type the container knows, with odd names and shapes."""
    rng = np.random.default_rng(9)
    tensors = {}
    for i, dtype in enumerate(BITS):
        shape = [[2, 4], [8], [1, 2, 4], [0, 3], []][i % 5] if BITS[dtype] >= 8 else [2, 4]
        count = int(np.prod(shape)) * BITS[dtype] // 8
        raw = (
            rng.integers(0, 256, count, np.uint8).tobytes()
            if dtype != "BOOL"
            else b"\1\0" * (count // 2) + b"\1" * (count % 2)
        )
        tensors[f"x/{dtype} \u00e9\n.weight"] = (dtype, shape, raw)
    metadata = {"format": "pt", "bcqfmt": oracle.canonical(oracle.descriptor({}))}
    path.write_bytes(oracle.container(tensors, metadata, BITS))
    return tensors


def tree(folder: Path) -> dict[str, bytes]:
    """Relative path -> bytes of everything below a folder."""
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def vector_index() -> dict[str, Any]:
    """spec/vectors/index.json."""
    found: dict[str, Any] = json.loads((VECTORS / "index.json").read_text())
    return found
