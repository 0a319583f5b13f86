"""Loading keeps no dense copy: the memory it takes is about that of the files."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import bcqfmt
from programs.verbs import environment
from sources.tiny_models import dense_model

_LOAD = """
import sys
import bcqfmt.integrations.transformers
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM

def peak():
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))

AutoModelForCausalLM.from_pretrained(sys.argv[1])  # a small one first: modules are imported when they are needed
before = peak()
model = AutoModelForCausalLM.from_pretrained(sys.argv[2])
for _, part in model.named_buffers():
    part.sum(dtype=torch.float64)  # every byte is read
print(peak() - before)
"""


def _large(folder: Path, small: Path) -> int:
    """A Llama of about 200 MB with random planes; returns the bytes of its files."""
    rng = np.random.default_rng(0)
    hidden, inner, layers, vocabulary = 2048, 5632, 9, 1024
    shapes = {"self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (hidden, hidden)}
    shapes |= {"self_attn.v_proj": (hidden, hidden), "self_attn.o_proj": (hidden, hidden)}
    shapes |= {"mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner)}
    tensors: dict[str, object] = {}
    made = {}
    for shape in set(shapes.values()):
        codes = rng.integers(0, 16, shape, dtype=np.uint8)
        scale = rng.uniform(0.001, 0.01, (shape[0], shape[1] // 64)).astype(np.float16)
        made[shape] = bcqfmt.BcqWeight.from_affine(codes, scale, 8, group_size=64, bits=4)
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        tensors |= {f"{prefix}.{name}.weight": made[shape] for name, shape in shapes.items()}
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}.{norm}.weight"] = np.ones(hidden, np.float16)
    tensors["model.norm.weight"] = np.ones(hidden, np.float16)
    tensors["model.embed_tokens.weight"] = np.zeros((vocabulary, hidden), np.float16)
    tensors["lm_head.weight"] = np.zeros((vocabulary, hidden), np.float16)
    config = json.loads((small / "config.json").read_text()) | {
        "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers, "vocab_size": vocabulary,
        "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 128,
    }  # fmt: skip
    bcqfmt.save(folder, tensors, config=config, max_shard_size=50_000_000)  # type: ignore[arg-type]
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


@pytest.mark.soak
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak is read from /proc")
def test_peak_memory_is_that_of_the_files(tmp_path: Path) -> None:
    small = dense_model(tmp_path / "small")
    size = _large(tmp_path / "bcq", small)
    assert size > 190_000_000
    done = subprocess.run(
        [sys.executable, "-c", _LOAD, str(small), str(tmp_path / "bcq")],
        env=environment(), capture_output=True, text=True, timeout=300, check=True,
    )  # fmt: skip
    peak = int(done.stdout)
    assert peak <= 1.3 * size, f"{peak:,} bytes for {size:,} bytes of files"
