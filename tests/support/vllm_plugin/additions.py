"""What is served beside a small Llama model: a LoRA adapter, a draft model of EAGLE. Random weights."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor

RANK, ALPHA = 4, 8


def lora_adapter(folder: Path, dense: Path, modules: str) -> Path:
    """An adapter of the modules that a pattern finds, as peft writes it; ``folder``-merged: the model with it."""
    generator = torch.Generator().manual_seed(1)
    tensors = safetensors.torch.load_file(dense / "model.safetensors")
    parts: dict[str, Tensor] = {}
    names = [name.removesuffix(".weight") for name in tensors if re.fullmatch(modules, name.removesuffix(".weight"))]
    for name in names:
        rows, columns = tensors[f"{name}.weight"].shape
        first, second = (torch.randn(rows, RANK, generator=generator), torch.randn(RANK, columns, generator=generator))
        first, second = first * 0.2, second * 0.2
        tensors[f"{name}.weight"] = tensors[f"{name}.weight"].float() + ALPHA / RANK * first @ second
        if "embed" in name:  # a table: its rows are looked up in A
            kinds = {"lora_embedding_A": first.T.contiguous(), "lora_embedding_B": second.T.contiguous()}
        else:
            kinds = {"lora_A.weight": second, "lora_B.weight": first}
        parts |= {f"base_model.model.{name}.{kind}": part for kind, part in kinds.items()}
    merged = folder.with_name(f"{folder.name}-merged")
    shutil.copytree(dense, merged)
    safetensors.torch.save_file(tensors, merged / "model.safetensors", metadata={"format": "pt"})
    folder.mkdir()
    safetensors.torch.save_file(parts, folder / "adapter_model.safetensors")
    targets = sorted({name.rpartition(".")[2] for name in names})
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": targets, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def eagle_draft(folder: Path, dense: Path) -> Path:
    """A draft of one layer, made of the first layer of a model; embedding and head are those of its target."""
    tensors = safetensors.torch.load_file(dense / "model.safetensors")
    first = "model.layers.0."
    kept = {name.removeprefix("model."): part for name, part in tensors.items() if name.startswith(first)}
    kept.pop("layers.0.input_layernorm.weight")
    width = tensors["model.norm.weight"].numel()
    generator = torch.Generator().manual_seed(2)
    kept["fc.weight"] = (torch.randn(width, 2 * width, generator=generator) * 0.1).to(torch.float16)
    folder.mkdir()
    safetensors.torch.save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((dense / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))
    return folder
