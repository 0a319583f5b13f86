"""Kernels without a GPU, as `bcqfmt.kernels.runtime.simulation` asks for them.

`block` runs the threads of a block as Python, the other files are what PTX instructions do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from . import arithmetic, barriers, block, memory, sums

cuda = block.Cuda()
INSTRUCTIONS: dict[str, Any] = {"f32": np.float32, "f64": np.float64}
for _module in (arithmetic, barriers, memory, sums):
    INSTRUCTIONS |= {name: value for name, value in vars(_module).items() if not name.startswith("_")}


def launch(kernel: Any, grid: Sequence[int], threads: int, shared: int, arguments: Sequence[Any]) -> None:
    """Run a `Kernel`; arrays on the host stand for those on a GPU."""
    from bcqfmt.kernels.runtime import device
    from bcqfmt.kernels.runtime.launch import TYPES

    values: list[Any] = []
    for value, (kind, name) in zip(arguments, kernel.arguments, strict=True):
        if kind.endswith("*"):
            wanted = np.dtype(TYPES[kind[:-1]])
            flat = device.on_host(value).reshape(-1).view(np.uint8)
            values.append(block.Pointer(flat[: flat.size // wanted.itemsize * wanted.itemsize].view(wanted)))
        elif kind == "map":
            values.append(value)
        elif kind in ("f32", "f64"):
            values.append(getattr(np, TYPES[kind])(value))
        else:
            if not 0 <= int(value) <= 0xFFFFFFFF:
                raise ValueError(f"{kernel.name}: {name} = {value}")
            values.append(int(value))
    block.install()
    cuda.jit(kernel.function)[tuple(grid), threads, 0, shared](*values)
