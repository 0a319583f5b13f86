"""Inputs of the benchmarks: random weights of realistic shapes, folders of them, files with very long headers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
from sparse_folder import expert_weights, sparse_file

import bcqfmt
from bcqfmt.checkpoint.descriptor import Descriptor, descriptor_json
from bcqfmt.container.header import header_bytes, layout
from bcqfmt.weight.scheme import part_prefix

Array = npt.NDArray[Any]
SIDE, GROUP = 4096, 128


def random_affine(bits: int, seed: int = 0, side: int = SIDE) -> tuple[Array, Array, Array]:
    """Codes (side, side) uint8, scales F16 and zero points (side, G); zeros that need ``bits`` bits."""
    random = np.random.default_rng(seed)
    codes = random.integers(0, 2**bits, (side, side), np.uint8)
    scale = random.uniform(0.001, 0.02, (side, side // GROUP)).astype(np.float16)
    zero = random.integers(0, 2**bits, scale.shape, np.uint8)
    return codes, scale, zero


def affine_weight(bits: int, seed: int = 0, side: int = SIDE) -> bcqfmt.BcqWeight:
    """``random_affine`` as a weight."""
    codes, scale, zero = random_affine(bits, seed, side)
    return bcqfmt.BcqWeight.from_affine(codes, scale, zero, group_size=GROUP, bits=bits)


def bcq_weight(planes: int, side: int = SIDE) -> bcqfmt.BcqWeight:
    """Binary-coding weight with F16 alpha and bias."""
    random = np.random.default_rng(planes)
    bits = random.integers(0, 2, (planes, side, side), np.uint8)
    alpha = random.uniform(0.001, 0.02, (planes, side, side // GROUP)).astype(np.float16)
    bias = random.normal(0, 0.001, (side, side // GROUP)).astype(np.float16)
    return bcqfmt.BcqWeight.from_bcq(bits, alpha, bias, group_size=GROUP)


def aligned64_weight(side: int = SIDE) -> bcqfmt.BcqWeight:
    """Three quarters at 2 bits with second-order scales, one quarter at 4 bits, as aligned64 tiles."""
    random = np.random.default_rng(64)
    low, high = side // 4 * 3, side // 4
    groups = low // 16
    first = bcqfmt.BcqWeight.from_affine(
        random.integers(0, 4, (side, low), np.uint8),
        np.ones((side, groups), np.float16),
        random.integers(0, 4, (side, groups), np.uint8),
        group_size=16,
        bits=2,
    ).with_second_order(
        random.integers(0, 8, (side, groups), np.uint8),
        random.uniform(0.001, 0.02, (side // 16, groups)).astype(np.float16),
        random.integers(0, 8, (side // 16, groups), np.uint8),
        bits=4,
        rows=16,
    )
    second = bcqfmt.BcqWeight.from_affine(
        random.integers(0, 16, (side, high), np.uint8),
        random.uniform(0.001, 0.02, (side, high // GROUP)).astype(np.float16),
        random.integers(0, 16, (side, high // GROUP), np.uint8),
        group_size=GROUP,
        bits=4,
    )
    return bcqfmt.BcqWeight.from_segments([first, second]).to_aligned64()


def model_folder(path: Path, size: int, shard: int) -> int:
    """A folder of about ``size`` bytes: a quarter bfloat16 embeddings, the rest 4-bit weights; its bytes."""
    random = np.random.default_rng(7)
    rows = max(1, size // 4 // (2 * SIDE))
    noise = random.integers(0, 1 << 16, (rows, SIDE), np.uint16)
    noise &= 0xBFFF  # no infinities, no NaN
    tensors: dict[str, Any] = {"model.embed_tokens.weight": noise.view(ml_dtypes.bfloat16)}
    shapes = [affine_weight(4, seed) for seed in range(4)]  # few are enough: nothing looks for equal tensors
    for i in range(max(1, (size - noise.nbytes) // shapes[0].nbytes)):
        tensors[f"model.layers.{i // 4}.self_attn.{'qkvo'[i % 4]}_proj.weight"] = shapes[i % 4]
    bcqfmt.save(path, tensors, config={"model_type": "random"}, max_shard_size=shard)
    return folder_bytes(path)


def folder_files(path: Path) -> list[Path]:
    """The files of a folder, sorted."""
    return sorted(entry for entry in path.rglob("*") if entry.is_file())


def folder_bytes(path: Path) -> int:
    """Their size."""
    return sum(entry.stat().st_size for entry in folder_files(path))


def read_chunks(paths: list[Path], buffer: bytearray) -> Iterator[memoryview]:
    """The bytes of files, read into one buffer over and over."""
    view = memoryview(buffer)
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(view):
                yield view[:count]


def long_header(path: Path, length: int, *, dense: bool) -> int:
    """A file with a header of exactly ``length`` bytes (about 25 MB), its data a hole; the number of tensors.

    ``dense``: 180,000 short tensors; otherwise 48,000 weights of three parts each and their descriptor.
    """
    if dense:
        weights = {}
        tensors: dict[str, tuple[str, tuple[int, ...]]] = {
            f"model.layers.{i // 1000}.mlp.experts.{i % 1000}.some_projection.with_a_long_name.weight": ("F16", (8,))
            for i in range(180_000)
        }
    else:
        weights = expert_weights(48_000)
        tensors = {
            part_prefix(name) + suffix: (part.dtype, part.shape)
            for name, spec in weights.items()
            for suffix, part in spec.parts().items()
        }
    entries = layout(tensors)
    metadata = {"format": "pt", "bcqfmt": descriptor_json(Descriptor(weights=weights)), "filler": ""}
    metadata["filler"] = "x" * (length + 8 - len(header_bytes(entries, metadata)))
    head = header_bytes(entries, metadata)
    assert len(head) - 8 == length
    sparse_file(path, head, max(entry.end for entry in entries.values()))
    return len(tensors)
