"""Output errors tr(E H E^T) of uniform and non-uniform grids at about equal bytes, on some weights of a model.

    python tests/benchmarks/models/layer_errors.py MODEL STATS

STATS: of `bcqfmt calibrate --weighting loss`. Prints bits per weight and the geometric mean of the errors over the
weights, divided by that of the first line with as many bits. 192 rows of each weight.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open

from bcqfmt.converters.methods.protocol import Job
from bcqfmt.converters.methods.registry import build_method
from bcqfmt.converters.quantize.stats import open_stats

WEIGHTS = ("11.self_attn.k_proj", "11.self_attn.o_proj", "5.mlp.up_proj", "20.self_attn.v_proj", "25.mlp.gate_proj")
LINES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("gptq", {"bits": 2, "group_size": 64}),
    ("gptq", {"bits": 2, "group_size": 32}),
    ("bcq", {"bits": 2, "group_size": 128, "bias": False}),
    ("bcq", {"bits": 2, "group_size": 128}),
    ("bcq", {"bits": 2, "group_size": 64}),
    ("gptq", {"bits": 3, "group_size": 128}),
    ("gptq", {"bits": 3, "group_size": 64}),
    ("gptq", {"bits": 3, "group_size": 32}),
    ("bcq", {"bits": 3, "group_size": 288}),
    ("bcq", {"bits": 3, "group_size": 128, "bias": False}),
    ("bcq", {"bits": 3, "group_size": 128}),
)


def main() -> int:
    """Measure and print."""
    stats = open_stats(Path(sys.argv[2]))
    first: dict[int, float] = {}
    with safe_open(Path(sys.argv[1]) / "model.safetensors", "np") as file:
        for method, settings in LINES:
            rounding = {"rounding": "gptq"} if method == "bcq" else {}
            logs, bits = [], []
            for name in (f"model.layers.{one}.weight" for one in WEIGHTS):
                weight, given = file.get_tensor(name).astype(np.float32)[:192], stats.of(name)
                made = build_method(method, {**settings, **rounding}).quantize(Job(name, weight, "F16", given)).weight
                error = weight - made.dequantize("float64")
                logs.append(math.log(((error @ given.hessian) * error).sum()))
                bits.append(8 * made.nbytes / weight.size)
            error = math.exp(float(np.mean(logs)))
            relative = error / first.setdefault(settings["bits"], error)
            print(f"{method} {settings}: {np.mean(bits):.2f} bits, {relative:.3f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
