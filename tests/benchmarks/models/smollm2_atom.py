"""Atom's 4-bit forward pass, simulated: what a kernel would compute, with torch in float32.

Before every linear layer the activations are rounded as the folder's record says (`notes.activations` of the method
`atom`): channels in the stored order, symmetric, one scale per token and group, found on the fly. The weights are those
that `bcqfmt export --to dense` wrote. Keys and values are rounded where they leave their projections, per token and
head, with a zero point.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import bcqfmt
from bcqfmt.converters.quantize.record import read_record

__all__ = ["attach", "bits_of", "rows_and_tokens"]

KV_BITS = 4


def attach(model: Any, folder: Path | None, kind: str, source: dict[str, torch.Tensor]) -> None:
    """Hook the simulation into ``model``, whose weights are the folder's.

    ``kind``: `rows` - no folder: weights are rounded here by rows, activations by tokens; `outliers` - outlier channels
    stay FP16 in activations and, from ``source``, in weights; `all` - they are INT8; `kv` - and the cache is INT4.
    """
    linears = {name: module for name, module in model.named_modules() if f"{name}.weight" in source}
    if kind == "rows":
        for module in linears.values():
            rows_and_tokens(module)
        return
    assert folder is not None
    record = read_record(folder)
    assert record is not None
    with bcqfmt.open(folder) as checkpoint:
        for name, module in linears.items():
            parts = checkpoint.weight(f"{name}.weight").parts()
            width = module.weight.shape[1]
            perm = torch.from_numpy(parts["perm"].array().astype(np.int64)) if "perm" in parts else torch.arange(width)
            perm = perm.to(module.weight.device)
            rule = record.weights[f"{name}.weight"]["notes"]["activations"]
            assert rule["scale_rule"] == "paper"
            groups = rule["groups"]
            if kind == "outliers":
                kept = perm[-groups[-1]["columns"] :]
                with torch.no_grad():
                    module.weight[:, kept] = source[f"{name}.weight"].to(kept.device)[:, kept]
                groups = [*groups[:-1], {**groups[-1], "bits": 16}]
            module.register_forward_pre_hook(_activations(perm, groups))
            if kind == "kv" and name.endswith((".k_proj", ".v_proj")):
                module.register_forward_hook(_cache(model.config.head_dim))


def rows_and_tokens(module: Any) -> None:
    """Plain W4A4: one symmetric scale for a row of the weight and one for a token."""
    width = module.weight.shape[1]
    with torch.no_grad():
        module.weight.copy_(_symmetric(module.weight, 4, width, 1.0, half_scales=True))
    group = {"columns": width, "group_size": width, "bits": 4, "clip": 1.0}
    module.register_forward_pre_hook(_activations(torch.arange(width, device=module.weight.device), [group]))


def bits_of(shapes: list[tuple[int, int]], outliers: int) -> float:
    """Bits per weight of the two rows that no folder holds: 4 bit by rows, ``outliers`` columns in 16 bit."""
    bits = sum(rows * ((columns - outliers) * 4 + 16 + outliers * 16) for rows, columns in shapes)
    return bits / sum(rows * columns for rows, columns in shapes)


def _activations(perm: torch.Tensor, groups: list[dict[str, Any]]) -> Callable[[Any, tuple[Any, ...]], tuple[Any, ...]]:
    back = torch.argsort(perm)

    def hook(module: Any, given: tuple[Any, ...]) -> tuple[Any, ...]:
        stored, start, pieces = given[0].index_select(-1, perm), 0, []
        for group in groups:
            piece = stored[..., start : start + group["columns"]]
            start += group["columns"]
            if group["bits"] < 16:
                piece = _symmetric(piece, group["bits"], group["group_size"], group["clip"])
            pieces.append(piece)
        return (torch.cat(pieces, -1).index_select(-1, back), *given[1:])

    return hook


def _symmetric(values: torch.Tensor, bits: int, size: int, clip: float, half_scales: bool = False) -> torch.Tensor:
    """Codes -2^(bits-1)..2^(bits-1)-1 times 2 max|x| / (2^bits - 1) * clip, per run of ``size`` along the last axis."""
    groups = values.reshape(*values.shape[:-1], -1, size)
    scale = groups.abs().amax(-1, keepdim=True) * (2 * clip / (2**bits - 1))
    if half_scales:
        scale = scale.half().float()
    codes = torch.clamp(torch.round(groups / scale.clamp_min(1e-30)), -(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    made: torch.Tensor = (codes * scale).reshape(values.shape)
    return made


def _cache(width: int) -> Callable[[Any, tuple[Any, ...], torch.Tensor], torch.Tensor]:
    """Asymmetric, 4 bit, per token and head of ``width``."""

    def hook(module: Any, given: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        heads = output.reshape(*output.shape[:-1], -1, width)
        low, high = heads.amin(-1, keepdim=True).clamp_max(0), heads.amax(-1, keepdim=True).clamp_min(0)
        scale = ((high - low) / (2**KV_BITS - 1)).clamp_min(1e-30)
        zero = torch.round(-low / scale)
        codes = torch.clamp(torch.round(heads / scale) + zero, 0, 2**KV_BITS - 1)
        made: torch.Tensor = ((codes - zero) * scale).reshape(output.shape)
        return made

    return hook
