"""A kernel: its source, its arguments with their types, and the launch on torch's current stream.

A kernel is declared with one line of text, which is its documentation too::

    @kernel("u32* planes, f32* alpha, f32* y, u32 rows", threads=256, blocks=2)
    def scale(planes, alpha, y, rows): ...

    scale.launch((rows // 256 + 1,), 256, planes, alpha, y, rows)

An argument ``map x`` is a `TensorMap`. Nothing is compiled at import. The first launch on a device compiles for it;
:meth:`Kernel.compile` does so for any compute capability without a GPU. In a simulator (`simulation`) the same source
runs as Python.
"""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from bcqfmt.errors import error

from . import device, simulation
from .cubins import Loaded
from .limits import LIMIT
from .tensor_map import TensorMap, maps_by_value

_NO_SWITCH = contextlib.nullcontext()
_compiling = threading.Lock()
TYPES = {
    "u8": "uint8",
    "u16": "uint16",
    "u32": "uint32",
    "i32": "int32",
    "f32": "float32",
    "f64": "float64",
    "map": "uint64",
}  # of numpy and Numba; a map is 128 bytes, of which the kernel sees the address


class Kernel:
    """A kernel's source with everything that it takes to launch it; made by :func:`kernel`."""

    def __init__(
        self, function: Callable[..., None], declared: str, options: dict[str, Any], variant: str | None
    ) -> None:
        self.function = function
        self.variant = variant
        self.name = function.__name__
        self.arguments = [tuple(piece.split()) for piece in declared.split(",")]
        self._pointers = [kind.endswith("*") for kind, _ in self.arguments]
        self.options = options
        self._ready: dict[int, Loaded] = {}

    def signature(self) -> Any:
        """The Numba signature."""
        from .numba_cuda import types

        kinds = [getattr(types, TYPES[kind.rstrip("*")]) for kind, _ in self.arguments]
        return types.void(
            *(
                types.CPointer(found) if kind.endswith("*") else found
                for found, (kind, _) in zip(kinds, self.arguments, strict=True)
            )
        )

    def target(self, capability: tuple[int, int]) -> tuple[Any, ...]:
        """What to compile for: the capability, and "a" where the kernel uses what later ones do not have."""
        return (*capability, "a") if self.options.get("specific") else capability

    def compile(self, capability: tuple[int, int]) -> str:
        """PTX for a compute capability; needs no GPU."""
        from .numba_cuda import cuda

        bounds = self.options["launch_bounds"]
        with _rare_collections():
            text, _ = cuda.compile_ptx(
                self.function, self.signature(), cc=self.target(capability), launch_bounds=bounds
            )
        return maps_by_value(str(text), [k for k, (kind, _) in enumerate(self.arguments) if kind == "map"])

    def launch(self, grid: Sequence[int], threads: int, *arguments: Any, shared: int = 0, early: bool = False) -> None:
        """Run ``grid`` blocks of ``threads`` threads with ``shared`` bytes of dynamic shared memory.

        Arrays are checked by the caller (`checks`); they are passed by address and must outlive the launch.
        ``early``: before the previous kernel has finished; only for kernels that wait for it themselves (`cubins`).
        """
        if len(arguments) != len(self.arguments):
            raise TypeError(f"{self.name} takes {len(self.arguments)} arguments, not {len(arguments)}")
        if not self._ready:
            device.require_cuda()
        if min(grid) < 1:
            return
        if grid[0] > LIMIT or (len(grid) > 1 and max(grid[1:]) > 65535):
            raise error("BCQ-E554", found=f"{self.name}: a grid of {' x '.join(map(str, grid))} blocks")
        if device.simulated():
            simulation.simulator.launch(self, grid, threads, shared, arguments)
            return
        first = arguments[self._pointers.index(True)]
        values = [
            a.data_ptr() if pointer else a.encoded() if isinstance(a, TensorMap) else a
            for a, pointer in zip(arguments, self._pointers, strict=True)
        ]
        with _NO_SWITCH if _is_on(first) else _on(first):
            self._compiled(first, shared).launch(grid, threads, shared, device.stream_of(first), values, early)

    def _compiled(self, array: Any, shared: int) -> Loaded:
        """For the device of ``array``, which has to be the current one."""
        index = array.device.index or 0
        found = self._ready.get(index)
        if found is None:
            found = self._ready[index] = Loaded(self, device.capability(), ptx=device.compiled_by_driver())
        found.allow_shared(shared)
        return found


def kernel(
    declared: str, *, threads: int, blocks: int = 1, variant: str | None = None, specific: bool = False
) -> Callable[[Callable[..., None]], Kernel]:
    """Declare a kernel: its arguments ("u32* words, f32 scale"), the threads of a block, the blocks a processor holds.

    ``threads`` and ``blocks`` bound the registers that the compiler may use.
    ``variant`` names everything that the source takes from its surroundings; with it, compiled kernels are cached.
    ``specific``: it uses instructions of one architecture alone (sm_90a).
    """
    options: dict[str, Any] = {"launch_bounds": (threads, blocks)}
    if specific:
        options["specific"] = True
    return lambda function: Kernel(function, declared, options, variant)


@contextlib.contextmanager
def _rare_collections() -> Iterator[None]:
    """Run the garbage collector less often: it takes a quarter of the time of a compilation and frees nothing."""
    with _compiling:
        before = gc.get_threshold()
        if before[0]:
            gc.set_threshold(max(before[0], 50_000), *before[1:])
        try:
            yield
        finally:
            gc.set_threshold(*before)


class Step(NamedTuple):
    """One launch of a product: what is the same whenever as many vectors of the same types are multiplied."""

    kernel: Kernel
    grid: tuple[int]
    threads: int
    shared: int
    room: int = 0  # bytes for the outliers of a tile, if the kernel adds them
    early: bool = True  # it waits for the previous kernel itself


class Plans(dict[tuple[Any, ...], Any]):
    """The launches of an operand, computed once. A copy of the operand, or a pickled one, starts without any."""

    def __reduce__(self) -> tuple[type[Plans], tuple[()]]:
        return Plans, ()


def _is_on(array: Any) -> bool:
    """Whether the array's device is the current one already."""
    return bool(sys.modules["torch"]._C._cuda_getDevice() == (array.device.index or 0))


def _on(array: Any) -> Any:
    """The context in which the array's device is the current one."""
    return sys.modules["torch"].cuda.device(array.device)
