"""A checkpoint as it lies on a hub, small, with things around it that must stay where they are."""

from __future__ import annotations

import json

import numpy as np
from safetensors.numpy import save

NAME = "some-org/Some.Model-4bit"
CONFIG = json.dumps({"model_type": "test", "quantization_config": {"quant_method": "gptq"}}).encode()


def shard(seed: int) -> bytes:
    rng = np.random.default_rng(seed)
    return save({f"layer{seed}.qweight": rng.integers(-(2**31), 2**31, (64, 64), np.int32)})


def files(seed: int = 0) -> dict[str, bytes]:
    """A sharded checkpoint; ``seed`` decides what is in the shards and how the tensors are called."""
    names = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    index = {"metadata": {}, "weight_map": {f"layer{seed + i}.qweight": name for i, name in enumerate(names)}}
    return {
        "config.json": CONFIG,
        "model.safetensors.index.json": json.dumps(index).encode(),
        **{name: shard(seed + i) for i, name in enumerate(names)},
        "tokenizer.json": b"{}",
        "tokenizer.model": b"sp",
        "chat_template.jinja": b"{{ x }}",
        "merges.txt": b"a b",
        "LICENSE": b"free",
        "README.md": b"# model",
        "modeling_evil.py": b"import os",
        "tokenizer_evil.py": b"import os",
        "pytorch_model.bin": b"pickle",
        "model-Q4.gguf": b"GGUF",
        "original/consolidated.safetensors": shard(9),
        "flax_model.msgpack": b"f",
        ".gitattributes": b"x",
    }


WANTED = sorted(
    name for name in files()
    if not name.endswith((".py", ".bin", ".gguf", ".msgpack", ".gitattributes")) and not name.startswith("original")
)  # fmt: skip
