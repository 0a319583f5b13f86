"""A kernel: its source, its arguments with their types, and the launch on torch's current stream.

A kernel is declared with one line of text, which is its documentation too::

    @kernel("u32* planes, f32* alpha, f32* y, u32 rows", threads=256, blocks=2)
    def scale(planes, alpha, y, rows): ...

    scale.launch((rows // 256 + 1,), 256, planes, alpha, y, rows)

Nothing is compiled at import. The first launch on a device compiles for it; :meth:`Kernel.compile` does so for any
compute capability without a GPU. In the simulator the same source runs as Python.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from bcqfmt.errors import BcqError, error

from . import device
from .compiling import hurried
from .cubins import Loaded

__all__ = ["LIMIT", "Kernel", "Plans", "check_array", "check_product", "check_same_device", "kernel", "on_host"]

_HERE = contextlib.nullcontext()
LIMIT = 2**31 - 1  # elements of any argument, rows, columns: indices are 32-bit words
_NUMPY: dict[str, Any] = {
    "u8": np.uint8,
    "u16": np.uint16,
    "u32": np.uint32,
    "i32": np.int32,
    "f32": np.float32,
    "f64": np.float64,
}
_BYTES = {"U8": 1, "I8": 1, "F16": 2, "BF16": 2, "I16": 2, "U16": 2, "F32": 4, "I32": 4, "U32": 4, "F64": 8, "I64": 8}
_NUMBA = {"u8": "uint8", "u16": "uint16", "u32": "uint32", "i32": "int32", "f32": "float32", "f64": "float64"}


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
        self.__doc__ = function.__doc__

    def signature(self) -> Any:
        """The Numba signature."""
        from .numba_cuda import types

        kinds = [getattr(types, _NUMBA[kind.rstrip("*")]) for kind, _ in self.arguments]
        return types.void(
            *(
                types.CPointer(found) if kind.endswith("*") else found
                for found, (kind, _) in zip(kinds, self.arguments, strict=True)
            )
        )

    def compile(self, capability: tuple[int, int]) -> str:
        """PTX for a compute capability; needs no GPU."""
        from .numba_cuda import cuda

        bounds = self.options["launch_bounds"]
        with hurried():
            text, _ = cuda.compile_ptx(self.function, self.signature(), cc=capability, launch_bounds=bounds)
        return str(text)

    def launch(self, grid: Sequence[int], threads: int, *arguments: Any, shared: int = 0, early: bool = False) -> None:
        """Run ``grid`` blocks of ``threads`` threads with ``shared`` bytes of dynamic shared memory.

        Arrays are checked by the caller (:func:`check_array`); they are passed by address and must outlive the launch.
        ``early``: before the kernel in front has finished, only for kernels that wait for it themselves (`cubins`).
        """
        if len(arguments) != len(self.arguments):
            raise TypeError(f"{self.name} takes {len(self.arguments)} arguments, not {len(arguments)}")
        device.require_cuda()
        if min(grid) < 1:
            return
        if grid[0] > LIMIT or (len(grid) > 1 and max(grid[1:]) > 65535):
            raise error("BCQ-E554", found=f"{self.name}: a grid of {' x '.join(map(str, grid))} blocks")
        if device.simulated():
            self._simulate(grid, threads, arguments, shared)
            return
        first = arguments[self._pointers.index(True)]
        values = [a.data_ptr() if pointer else a for a, pointer in zip(arguments, self._pointers, strict=True)]
        with _HERE if _is_on(first) else _on(first):
            self._compiled(first, shared).launch(grid, threads, shared, device.stream_of(first), values, early)

    def prepare(self, array: Any, shared: int = 0) -> None:
        """Compile and load for the device of ``array``: what has to happen before a CUDA graph is captured."""
        device.require_cuda()
        if not device.simulated():
            with _on(array):
                self._compiled(array, shared)

    def _compiled(self, array: Any, shared: int) -> Loaded:
        """For the device of ``array``, which has to be the current one."""
        index = array.device.index or 0
        found = self._ready.get(index)
        if found is None:
            found = self._ready[index] = Loaded(self, device.capability())
        found.allow_shared(shared)
        return found

    def _simulate(self, grid: Sequence[int], threads: int, arguments: Sequence[Any], shared: int) -> None:
        from bcqfmt.kernels.simulator.block import Pointer

        from .numba_cuda import cuda

        values: list[Any] = []
        for value, (kind, name) in zip(arguments, self.arguments, strict=True):
            if kind.endswith("*"):
                wanted = np.dtype(_NUMPY[kind[:-1]])
                flat = device.on_host(value).reshape(-1).view(np.uint8)
                values.append(Pointer(flat[: flat.size // wanted.itemsize * wanted.itemsize].view(wanted)))
            elif kind in ("f32", "f64"):
                values.append(_NUMPY[kind](value))
            else:
                if not 0 <= int(value) <= 0xFFFFFFFF:
                    raise ValueError(f"{self.name}: {name} = {value}")
                values.append(int(value))
        cuda.jit(self.function)[tuple(grid), threads, 0, shared](*values)


def kernel(
    declared: str, *, threads: int, blocks: int = 1, registers: int | None = None, variant: str | None = None
) -> Callable[[Callable[..., None]], Kernel]:
    """Declare a kernel: its arguments ("u32* words, f32 scale"), the threads of a block, the blocks a processor holds.

    ``threads`` and ``blocks`` bound the registers that the compiler may use; ``registers`` sets them outright.
    ``variant`` names everything that the source takes from its surroundings; with it, compiled kernels are kept.
    """
    options: dict[str, Any] = {"launch_bounds": (threads, blocks)}
    if registers is not None:
        options["max_registers"] = registers
    return lambda function: Kernel(function, declared, options, variant)


class Plans(dict[tuple[Any, ...], Any]):
    """Launches that an operand has found once. A copy of the operand, or a pickled one, finds its own."""

    def __reduce__(self) -> tuple[type[Plans], tuple[()]]:
        return Plans, ()


def check_array(
    what: str, array: Any, dtypes: Sequence[str], shape: Sequence[int | None], align: int | None = None
) -> device.Described:
    """BCQ-E552 unless ``array`` has one of the dtypes, the shape (None: any size), is contiguous and aligned.

    ``align``: the address is a multiple of so many bytes, by default of an element's. BCQ-E554 above 2^31 - 1 elements.
    Outside of the simulator it has to be a torch tensor on a GPU.
    """
    found = device.describe(array)
    size = found.size
    if not device.simulated() and found.device < 0:
        raise on_host(what)
    if found.dtype not in dtypes:
        raise _wrong(f"{what} has dtype {found.dtype}", " or ".join(dtypes), f".to({device.torch_name(dtypes[0])})")
    if not _fits(found.shape, shape):
        shown = ", ".join("any" if w is None else str(w) for w in shape)
        raise error("BCQ-E552", found=f"{what} has shape {list(found.shape)}", expected=f"[{shown}]")
    if not found.contiguous:
        raise _wrong(f"{what} is not contiguous", "a contiguous tensor", ".contiguous()")
    align = _BYTES[found.dtype] if align is None else align
    if size and found.address % align:
        raise _wrong(f"{what} starts at an address that is no multiple of {align}", "an aligned tensor", ".clone()")
    if size > LIMIT:
        raise error(
            "BCQ-E554",
            found=f"{what} has {size} elements",
            expected=f"at most {LIMIT}",
            hint="take it in parts: fewer vectors at once, or the weight in slices of rows",
        )
    return found


def _wrong(found: str, expected: str, step: str) -> BcqError:
    """BCQ-E552 that says what to call: in the message, which is all that a traceback shows, and as the hint."""
    return error("BCQ-E552", found=found, expected=f"{expected}: {step}", hint=f"call {step}")


def on_host(what: str) -> BcqError:
    """BCQ-E552 for a tensor that has to be on a GPU."""
    made = _wrong(f"{what} is on the host", "a tensor on a CUDA device", ".to('cuda')")
    made.hint += ", or multiply on the host with bcqfmt.kernels.cpu"
    return made


def _fits(shape: Sequence[int], wanted: Sequence[int | None]) -> bool:
    return len(shape) == len(wanted) and all(w in (None, s) for s, w in zip(shape, wanted, strict=True))


def check_product(
    shape: tuple[int, int], x: Any, out: Any, *, dtypes: Sequence[str], results: Sequence[str], most: int
) -> tuple[int, str, Any, str]:
    """The vectors of a product and its result, new and of x's dtype where ``out`` is None: (batch, dtype of x, y, its).

    ``shape``: of the matrix. BCQ-E552 unless x is (1..most, in) and y (batch, out), in one of these dtypes each.
    """
    rows, columns = shape
    seen = check_array("x", x, dtypes, (None, columns), align=16)
    batch = seen.shape[0]
    if not 1 <= batch <= most:
        raise error("BCQ-E552", found=f"{batch} vectors", expected=f"1..{most}; matmul takes any number")
    y = device.empty_like(x, (batch, rows)) if out is None else out
    if out is None and batch * rows <= LIMIT:
        return batch, seen.dtype, y, seen.dtype
    return batch, seen.dtype, y, check_array("out", y, results, (batch, rows)).dtype


def check_same_device(**arrays: Any) -> None:
    """BCQ-E552 unless all arrays (None is skipped) are on one device."""
    places = {name: device.place_of(array) for name, array in arrays.items() if array is not None}
    if len(set(places.values())) > 1:
        shown = ", ".join(f"{name} on {'the host' if i < 0 else f'cuda:{i}'}" for name, i in places.items())
        there = max(places.values() if places.get("weight", -1) < 0 else [places["weight"]])
        steps = [f"{name}.to('cuda:{there}')" for name, place in places.items() if place != there]
        raise _wrong(shown, "one device for all", ", ".join(steps))


def _is_on(array: Any) -> bool:
    """Whether the array's device is the current one already."""
    return bool(sys.modules["torch"].cuda.current_device() == (array.device.index or 0))


def _on(array: Any) -> Any:
    """The context in which the array's device is the current one."""
    return sys.modules["torch"].cuda.device(array.device)
