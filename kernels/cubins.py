"""Compiled kernels: machine code made once, kept in a folder, loaded and launched through the driver.

Numba compiles a kernel to PTX in seconds, too long to do at every start of a program. What comes out of the linker is
kept under ``BCQFMT_CACHE`` (by default ``~/.cache/bcqfmt``), named by a digest of the sources it is made of, the
kernel's variant, the compute capability and the compiler's version; a folder that cannot be written only means that
nothing is kept. Launching through the driver takes a few microseconds and never synchronises.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import importlib
import importlib.metadata
import os
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bcqfmt.errors import error

__all__ = ["Loaded", "cache_folder", "code_of"]

_SHARED = 48 * 1024
_TYPES: dict[str, Any] = {"u32": ctypes.c_uint32, "i32": ctypes.c_int32, "f32": ctypes.c_float, "f64": ctypes.c_double}


def cache_folder() -> Path:
    """Where compiled kernels are kept."""
    chosen = os.environ.get("BCQFMT_CACHE")
    return Path(chosen) if chosen else Path.home() / ".cache" / "bcqfmt"


def code_of(kernel: Any, capability: tuple[int, int]) -> tuple[str, bytes]:
    """The name of the entry and the machine code of a kernel, from the folder if it is there; needs no GPU."""
    place = None if kernel.variant is None else cache_folder() / "kernels" / f"{_digest(kernel, capability)}.cubin"
    if place is not None:
        with contextlib.suppress(OSError, ValueError):
            name, code = place.read_bytes().split(b"\n", 1)
            return name.decode("ascii"), code
    text = kernel.compile(capability)
    found = re.search(r"\.entry\s+([^\s(]+)", text)
    assert found is not None
    code = _linked(text, capability)
    if place is not None:
        _keep(place, found[1].encode("ascii") + b"\n" + code)
    return found[1], code


def _keep(place: Path, data: bytes) -> None:
    with contextlib.suppress(OSError):
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=place.parent, delete=False) as file:
            file.write(data)
        Path(file.name).replace(place)


def _digest(kernel: Any, capability: tuple[int, int]) -> str:
    state = hashlib.sha256(_sources(kernel.function.__module__.rpartition(".")[2]))
    said = (kernel.name, kernel.arguments, kernel.options, kernel.variant, capability)
    state.update(repr(said).encode())
    return state.hexdigest()


@functools.cache
def _sources(module: str) -> bytes:
    """A digest of a module of this room, of all that it imports from the room, and of the compiler's version."""
    state = hashlib.sha256(importlib.metadata.version("numba-cuda").encode())
    room = Path(__file__).resolve().parent
    known, ahead = set[str](), [module]
    while ahead:
        name = ahead.pop()
        if name not in known and (room / f"{name}.py").is_file():
            known.add(name)
            ahead += re.findall(r"bcqfmt\.kernels\.(\w+)", text := (room / f"{name}.py").read_text("utf-8"))
            for line in re.findall(r"from bcqfmt\.kernels import (.+)", text):
                ahead += re.findall(r"\w+", line)
    for name in sorted(known):
        state.update(name.encode() + b"\0" + (room / f"{name}.py").read_bytes())
    return state.digest()


def _linked(text: str, capability: tuple[int, int]) -> bytes:
    linker: Any = importlib.import_module("cuda.bindings.nvjitlink")
    handle = linker.create(1, [f"-arch=sm_{capability[0]}{capability[1]}"])
    try:
        data = text.encode() + b"\0"
        linker.add_data(handle, linker.InputType.PTX, data, len(data), "kernel")
        linker.complete(handle)
        code = bytearray(linker.get_linked_cubin_size(handle))
        linker.get_linked_cubin(handle, code)
    finally:
        linker.destroy(handle)
    return bytes(code)


class Loaded:
    """A kernel in the current context."""

    def __init__(self, kernel: Any, capability: tuple[int, int]) -> None:
        self._driver: Any = importlib.import_module("cuda.bindings.driver")
        self._types = tuple(ctypes.c_void_p if kind.endswith("*") else _TYPES[kind] for kind, _ in kernel.arguments)
        self._name = kernel.name
        entry, code = code_of(kernel, capability)
        self._module = self._ask(self._driver.cuModuleLoadData(code))
        self._function = self._ask(self._driver.cuModuleGetFunction(self._module, entry.encode("ascii")))
        self._shared = _SHARED

    def allow_shared(self, size: int) -> None:
        """More dynamic shared memory than 48 KB has to be asked for."""
        if size > self._shared:
            attribute = self._driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            answer = self._driver.cuFuncSetAttribute(self._function, attribute, size)
            if int(answer[0]):
                raise error("BCQ-E554", found=f"{self._name} needs {size} bytes of shared memory")
            self._shared = size

    def launch(self, grid: Sequence[int], threads: int, shared: int, stream: int, values: Sequence[Any]) -> None:
        """Start it; addresses and numbers in the order of the kernel's arguments."""
        x, y, z = (*grid, 1, 1)[:3]
        packed = (tuple(values), self._types)
        self._ask(self._driver.cuLaunchKernel(self._function, x, y, z, threads, 1, 1, shared, stream, packed, 0))

    def _ask(self, answer: Any) -> Any:
        if int(answer[0]):
            raise error("BCQ-E551", found=f"{self._name}: {answer[0].name}")
        return answer[1] if len(answer) > 1 else None
