"""``numba.cuda`` and ``numba.types`` for kernels, typed as `Any` because they have no annotations.

Kernel files say ``from runtime.numba_cuda import cuda, types``; the simulator finds the module ``cuda`` among a
kernel's globals by identity, so it must be the module itself.
"""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["cuda", "inlined", "simulated", "types"]

cuda: Any = importlib.import_module("numba.cuda")
types: Any = importlib.import_module("numba.types")


def inlined(function: Any) -> Any:
    """A device function that is always inlined into the kernel that calls it."""
    return cuda.jit(function, device=True, inline="always")


def simulated() -> bool:
    """Whether this process was started with ``NUMBA_ENABLE_CUDASIM=1``."""
    config: Any = importlib.import_module("numba").config
    return bool(config.ENABLE_CUDASIM)
