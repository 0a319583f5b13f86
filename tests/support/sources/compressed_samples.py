"""compressed-tensors tensors with any words in them, configurations, and a decoder of its own to compare with."""

from __future__ import annotations

from typing import Any

import numpy as np

from sources.peers import affine_values, halves, slots, stream, words


def weights(bits: int = 4, group: int | None = 32, symmetric: bool = True, **more: Any) -> dict[str, Any]:
    strategy = "channel" if group is None else "group"
    stated = {"num_bits": bits, "type": "int", "symmetric": symmetric, "group_size": group, "strategy": strategy}
    return {**stated, "dynamic": False, "actorder": None, **more}


def config(*groups: dict[str, Any], version: str | None = "0.19.0", **more: Any) -> dict[str, Any]:
    stated = {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"], **more}
    stated["config_groups"] = {f"group_{i}": group for i, group in enumerate(groups)}
    return stated if version is None else {**stated, "version": version}


def group(args: dict[str, Any], *targets: str, activations: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"targets": list(targets) or ["Linear"], "weights": args, "input_activations": activations}


def count(fields: int, bits: int, dense: bool) -> int:
    return -(-fields * bits // 32) if dense else -(-fields // (32 // bits))


def cut(packed: Any, fields: int, bits: int, dense: bool) -> Any:
    """Random words with the bits that hold no code set to zero, as every packer leaves them."""
    clean = packed.view(np.uint32).copy()
    if not dense:
        clean &= np.uint32(2 ** (32 // bits * bits) - 1)
    used = fields * bits % 32 if dense else fields % (32 // bits) * bits
    if used:
        clean[..., -1] &= np.uint32(2**used - 1)
    return clean.view(np.int32)


def made(
    rng: np.random.Generator, shape: tuple[int, ...], bits: int, size: int, dense: bool, asym: bool
) -> dict[str, Any]:
    *lead, n, k = shape
    groups = -(-k // size)
    tensors = {
        "m.weight_packed": cut(words(rng, *lead, n, count(k, bits, dense)), k, bits, dense),
        "m.weight_scale": halves(rng, *lead, n, groups),
        "m.weight_shape": np.array(shape, np.int64),
    }
    if asym:
        turned = cut(words(rng, *lead, groups, count(n, bits, dense)), n, bits, dense)
        tensors["m.weight_zero_point"] = turned.swapaxes(-1, -2)
    return tensors


def wanted(tensors: dict[str, Any], shape: tuple[int, ...], bits: int, column_group: Any, dense: bool) -> Any:
    """Values of a matrix by another decoder."""
    read = stream if dense else slots
    n, k = shape
    codes = np.array([read(row, bits, k) for row in tensors["m.weight_packed"]])
    scale = tensors["m.weight_scale"]
    zeros = np.full(scale.shape, 2 ** (bits - 1))
    if "m.weight_zero_point" in tensors:
        packed = np.ascontiguousarray(tensors["m.weight_zero_point"].T)
        zeros = np.array([read(row, bits, n) for row in packed]).T
    return affine_values(codes, scale, zeros, column_group)
