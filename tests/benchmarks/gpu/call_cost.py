"""What a product of BcqLinear costs the host: microseconds of one call, without a GPU.

    python tests/benchmarks/gpu/call_cost.py [--calls 2000] [--profile gemm]

Host tensors stand for those of a GPU, and nothing is sent to the driver: kernels, cuBLAS and torch's own kernels for
copies take no time, everything before them is measured. Weights are small, since their size does not matter here. The
least of five rounds counts. ``released``: after the stored parts were freed, as vLLM holds a weight.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import struct
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "support"))

import bcqfmt
from bcqfmt.integrations.torch import BcqLinear, linear_op
from bcqfmt.kernels.runtime import cubins, device
from bcqfmt.kernels.runtime.launch import Kernel
from products.pretended_gpu import pretend_products

ROUNDS = 5
CASES = {"bits": 1, "gemm": 16, "gemm, 256": 256, "dequantize": 512}  # vectors


class Nowhere(cubins.Loaded):
    """A kernel whose arguments are packed, and go nowhere."""

    def __init__(self, kernel: Kernel) -> None:
        kinds = ["*" if kind.endswith("*") else kind for kind, _ in kernel.arguments]
        fields = [cubins._FIELDS[kind] for kind in kinds]
        self._pack = struct.Struct("<" + "".join(fields)).pack_into
        self._singles = [k for k, kind in enumerate(kinds) if kind == "f32"]
        self._arguments = cubins._ArgumentBuffer(fields)
        self._function, self._shared = None, 1 << 20
        self._driver: Any = SimpleNamespace(cuLaunchKernel=None, cuLaunchKernelEx=None)

    def _config(self, grid: Any, threads: int, shared: int) -> Any:
        return self._arguments.configs.setdefault((threads, shared, *grid), SimpleNamespace())

    def _ask(self, function: Any, *given: Any) -> Any:
        return None


def _loaded(found: dict[Kernel, Nowhere], kernel: Kernel) -> Nowhere:
    if kernel not in found:
        found[kernel] = Nowhere(kernel)
    return found[kernel]


def pretend(patch: pytest.MonkeyPatch) -> None:
    """A GPU, and torch's own products and copies that take no time."""
    pretend_products(patch)
    loaded: dict[Kernel, Nowhere] = {}
    patch.setattr(Kernel, "_compiled", lambda kernel, *_: _loaded(loaded, kernel))
    patch.setattr(device, "stream_of", lambda array: 0)
    patch.setattr(device, "capturing", lambda array: False)


def measure(weight: bcqfmt.BcqWeight, vectors: int, calls: int, *, released: bool, bias: bool, profile: bool) -> float:
    """Microseconds of a call."""
    rows, columns = weight.spec.out, weight.spec.columns
    plus = torch.zeros(rows, dtype=torch.float16) if bias else None
    layer, x = BcqLinear.from_weight(weight, plus), torch.zeros(vectors, columns, dtype=torch.float16)
    y = torch.zeros(vectors, rows, dtype=torch.float16)

    def run() -> None:
        linear_op.linear(x, layer.parts(), layer.text, 0, 0, layer.bias)

    with pytest.MonkeyPatch.context() as patch:
        pretend(patch)
        patch.setitem(linear_op._DIRECT, "cpu", linear_op._linear_cuda)
        patch.setattr(torch.Tensor, "__matmul__", lambda *_: y)
        patch.setattr(torch.nn.functional, "linear", lambda *_: y)
        run()
        if released:
            layer.release(torch.float16, [vectors])
            run()
        if profile:
            profiler = cProfile.Profile()
            profiler.runcall(lambda: [run() for _ in range(calls)])
            pstats.Stats(profiler).sort_stats("tottime").print_stats(25)
        least = min(_round(run, calls) for _ in range(ROUNDS))
    linear_op._cache.clear()
    return least / calls * 1e6


def _round(run: Any, calls: int) -> float:
    began = time.process_time()
    for _ in range(calls):
        run()
    return time.process_time() - began


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--profile", choices=CASES, help="what takes the time of one case")
    given = parser.parse_args()
    rng = np.random.default_rng(0)
    scale = rng.uniform(0.001, 0.005, (128, 2)).astype(np.float16)
    codes = rng.integers(0, 16, (128, 256), np.uint8)
    weight = bcqfmt.BcqWeight.from_affine(codes, scale, np.full((128, 2), 8, np.uint8), group_size=128, bits=4)
    print("| path, vectors | us | released | with a bias |\n|---|---|---|---|")
    for name, vectors in CASES.items():
        if given.profile not in (None, name):
            continue
        cells = [
            measure(weight, vectors, given.calls, released=released, bias=bias, profile=given.profile == name)
            for released, bias in ((False, False), (True, False), (True, True))
        ]
        print(f"| {name}, {vectors} | {' | '.join(f'{cell:.1f}' for cell in cells)} |")


if __name__ == "__main__":
    main()
