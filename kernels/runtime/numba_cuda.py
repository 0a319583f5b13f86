"""``numba.cuda`` and ``numba.types`` for kernels, typed as `Any` because they have no annotations.

Kernel files say ``from runtime.numba_cuda import cuda, types``. In the simulator device functions are plain functions,
and ``cuda`` is what leads to the running block (`simulator.block.Cuda`).
"""

from __future__ import annotations

import importlib
from typing import Any

from bcqfmt.kernels.simulator.block import Cuda

__all__ = ["cuda", "inlined", "simulated", "types"]


def simulated() -> bool:
    """Whether this process was started with ``NUMBA_ENABLE_CUDASIM=1``."""
    config: Any = importlib.import_module("numba").config
    return bool(config.ENABLE_CUDASIM)


cuda: Any = Cuda() if simulated() else importlib.import_module("numba.cuda")
types: Any = importlib.import_module("numba.types")


def inlined(function: Any) -> Any:
    """A device function that is always inlined into the kernel that calls it."""
    return function if simulated() else cuda.jit(function, device=True, inline="always")
