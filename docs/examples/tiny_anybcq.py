"""Write a tiny checkpoint in AnyBCQ's layout, with made-up numbers: python docs/examples/tiny_anybcq.py FOLDER.

AnyBCQ publishes models of several gigabytes only; this one has a weight of 64 x 128, 4 planes, and numbers of their own
for 2, 3 and 4 of them.
"""

import json
import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

ROWS, COLUMNS, GROUP, SEED_BITS, BITS = 64, 128, 64, 2, 4


def main(folder: Path) -> None:
    rng = np.random.default_rng(0)
    groups = COLUMNS // GROUP
    module = "model.layers.0.self_attn.k_proj"
    tensors = {
        f"{module}.qweight": rng.integers(-(2**31), 2**31, (COLUMNS // 32, BITS, ROWS)).astype(np.int32),
        f"{module}.q_bias": np.zeros((groups, ROWS), np.float16),
        "model.norm.weight": np.ones(COLUMNS, np.float16),
    }
    for bits in range(SEED_BITS, BITS + 1):
        steps = 0.04 * 2.0 ** -np.arange(bits)  # every plane half as heavy as the one before
        alpha = steps[:, None] * rng.uniform(0.9, 1.1, (groups, bits, ROWS))
        tensors[f"{module}.alpha_{bits}"] = alpha.astype(np.float16)
        tensors[f"{module}.beta_{bits}"] = rng.uniform(-0.01, 0.01, (groups, ROWS)).astype(np.float16)
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    config = {"model_type": "llama", "anybcq": {"seed_precision": 2, "parent_precision": 4, "group_size": GROUP}}
    (folder / "config.json").write_text(json.dumps(config))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
