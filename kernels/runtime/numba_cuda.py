"""``numba.cuda`` and ``numba.types`` for kernels, typed as `Any` because they have no annotations.

Kernel files say ``from runtime.numba_cuda import cuda, types``. In a simulator device functions are plain functions.
"""

from __future__ import annotations

import importlib
from typing import Any

from .simulation import simulator

cuda: Any = simulator.cuda if simulator else importlib.import_module("numba.cuda")
types: Any = importlib.import_module("numba.types")


def inlined(function: Any) -> Any:
    """A device function that is always inlined into the kernel that calls it."""
    return function if simulator else cuda.jit(function, device=True, inline="always")
