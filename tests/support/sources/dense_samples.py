"""Dense checkpoints for the tests of `quantize`: a little of everything that a model can have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import safetensors.numpy

from bcqfmt.converters.quantize.quantization import Quantization, QuantizeOptions
from bcqfmt.converters.source.checkpoint import open_source

Array = npt.NDArray[Any]
DTYPES: dict[str, Any] = {"F16": np.float16, "BF16": ml_dtypes.bfloat16, "F32": np.float32}
SHAPES = {
    "self_attn.q_proj": (32, 64),
    "self_attn.o_proj": (64, 32),
    "mlp.up_proj": (96, 64),
    "mlp.down_proj": (64, 96),
}


def layer(rng: np.random.Generator, prefix: str, dtype: str = "F16") -> dict[str, Array]:
    """Four linear layers and a norm."""
    found = {f"{prefix}.{name}.weight": rng.normal(size=shape) * 0.05 for name, shape in SHAPES.items()}
    found[f"{prefix}.input_layernorm.weight"] = rng.normal(size=64)
    return {name: array.astype(DTYPES[dtype]) for name, array in found.items()}


def dense_tensors(layers: int = 2, dtype: str = "F16", seed: int = 0) -> dict[str, Array]:
    """Layers, an embedding, a head, a stack of experts with their router."""
    rng = np.random.default_rng(seed)
    kind = DTYPES[dtype]
    found: dict[str, Array] = {"model.embed_tokens.weight": rng.normal(size=(40, 64)).astype(kind)}
    for number in range(layers):
        found |= layer(rng, f"model.layers.{number}", dtype)
    found["model.layers.0.mlp.experts.gate_up_proj"] = (rng.normal(size=(3, 16, 64)) * 0.05).astype(kind)
    found["model.layers.0.mlp.gate.weight"] = rng.normal(size=(3, 64)).astype(kind)
    found["lm_head.weight"] = rng.normal(size=(40, 64)).astype(kind)
    return found


def dense_folder(folder: Path, tensors: dict[str, Array] | None = None, **config: Any) -> Path:
    """A model folder of these tensors, with a side file and a card."""
    folder.mkdir(parents=True, exist_ok=True)
    arrays = dense_tensors() if tensors is None else tensors
    safetensors.numpy.save_file(arrays, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "README.md").write_text("---\nlicense: mit\ntags:\n- x\n---\nText\n")
    return folder


def quantize(source: Path, target: Path, method: str | None = "rtn", **options: Any) -> Quantization:
    """Run a quantization in this process; settings by default are small enough for small matrices."""
    options.setdefault("settings", {"bits": 4, "group_size": 32} if method in ("rtn", "bcq") else {})
    made = Quantization(open_source(source), QuantizeOptions(method=method, **options))
    made.run(target)
    return made
