"""Compiled kernels: machine code in a cache folder, loaded and launched through the driver.

Numba compiles a kernel to PTX in seconds, too long to do at every start of a program. What comes out of the linker is
cached under ``BCQFMT_CACHE`` (by default ``~/.cache/bcqfmt``), under a digest of all sources of the kernels, the
kernel's variant, the compute capability and the compiler's version; if the folder cannot be written, nothing is cached.
With ``BCQFMT_CAPABILITY`` (`device`) the PTX is cached and loaded, and the driver compiles it.
Launching through the driver takes a few microseconds and never synchronises.

A kernel that is launched *early* may begin while the previous one in the stream still runs. It copies its weight in the
meantime, and waits itself (`ptx.wait_previous_kernel`) before it reads or writes anything that other kernels write.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import importlib
import importlib.metadata
import itertools
import os
import re
import struct
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from bcqfmt.errors import error

from .limits import SHARED_LIMIT, SHARED_LIMITS
from .tensor_map import MAP_BYTES

_SHARED = 48 * 1024
_FIELDS = {"map": f"{MAP_BYTES}s", "*": "Q", "u32": "I4x", "i32": "i4x", "f32": "f4x", "f64": "d"}
_NO_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT
_listeners: list[Callable[[str, Path], None]] = []


@contextlib.contextmanager
def compile_listener(listener: Callable[[str, Path], None]) -> Iterator[None]:
    """A context in which ``listener(kernel name, cache folder)`` is called before every compilation."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


def cache_folder() -> Path:
    """Where compiled kernels are cached."""
    chosen = os.environ.get("BCQFMT_CACHE")
    return Path(chosen) if chosen else Path.home() / ".cache" / "bcqfmt"


def code_of(kernel: Any, capability: tuple[int, int], *, ptx: bool = False) -> tuple[str, bytes]:
    """The name of the entry and the machine code of a kernel, from the cache or compiled; needs no GPU.

    ``ptx``: the text that it is compiled from, in its place.
    """
    kind = "ptx" if ptx else "cubin"
    place = None if kernel.variant is None else cache_folder() / "kernels" / f"{_digest(kernel, capability)}.{kind}"
    if place is not None:
        with contextlib.suppress(OSError, ValueError):
            name, code = place.read_bytes().split(b"\n", 1)
            return name.decode("ascii"), code
    for listener in tuple(_listeners):
        listener(kernel.name, cache_folder())
    text = kernel.compile(capability)
    found = re.search(r"\.entry\s+([^\s(]+)", text)
    assert found is not None
    code = text.encode() + b"\0" if ptx else _linked(text, kernel.target(capability))
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
    state = hashlib.sha256(_sources())
    said = (kernel.name, kernel.arguments, kernel.options, kernel.variant, capability)
    state.update(repr(said).encode())
    return state.hexdigest()


@functools.cache
def _sources() -> bytes:
    """A digest of all sources of the kernels and of the compiler's version: any change compiles anew."""
    state = hashlib.sha256(importlib.metadata.version("numba-cuda").encode())
    folder = Path(__file__).resolve().parents[1]
    for path in sorted(folder.rglob("*.py")):
        state.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes())
    return state.digest()


def _linked(text: str, target: tuple[Any, ...]) -> bytes:
    linker: Any = importlib.import_module("cuda.bindings.nvjitlink")
    handle = linker.create(1, [f"-arch=sm_{''.join(map(str, target))}"])
    try:
        data = text.encode() + b"\0"
        linker.add_data(handle, linker.InputType.PTX, data, len(data), "kernel")
        linker.complete(handle)
        code = bytearray(linker.get_linked_cubin_size(handle))
        linker.get_linked_cubin(handle, code)
    finally:
        linker.destroy(handle)
    return bytes(code)


class _ArgumentBuffer(threading.local):
    """Memory of one thread for the arguments of a launch; the driver copies them during the call."""

    def __init__(self, fields: Sequence[str]) -> None:
        """``fields``: formats of `struct`."""
        sizes = [struct.calcsize("<" + field) for field in fields]
        self.words = ctypes.create_string_buffer(sum(sizes))
        start = ctypes.addressof(self.words)
        self.pointers = (ctypes.c_uint64 * len(sizes))(*itertools.accumulate(sizes[:-1], initial=start))
        self.address = ctypes.addressof(self.pointers)
        self.configs: dict[tuple[int, ...], Any] = {}


class Loaded:
    """A kernel in the current context."""

    def __init__(self, kernel: Any, capability: tuple[int, int], *, ptx: bool = False) -> None:
        """``ptx``: the driver compiles it, as :func:`code_of` has it then."""
        self._driver: Any = importlib.import_module("cuda.bindings.driver")
        kinds = ["*" if kind.endswith("*") else kind for kind, _ in kernel.arguments]
        fields = [_FIELDS[kind] for kind in kinds]
        self._pack = struct.Struct("<" + "".join(fields)).pack_into
        self._singles = [k for k, kind in enumerate(kinds) if kind == "f32"]
        self._arguments = _ArgumentBuffer(fields)
        self._name = kernel.name
        self._context: Any = None
        self._most = SHARED_LIMITS.get(capability, SHARED_LIMIT)
        entry, code = code_of(kernel, capability, ptx=ptx)
        self._module = self._ask(self._driver.cuModuleLoadData, code)
        self._function = self._ask(self._driver.cuModuleGetFunction, self._module, entry.encode("ascii"))
        self._context = self._ask(self._driver.cuCtxGetCurrent)
        self._shared = _SHARED
        self._overlap = self._driver.CUlaunchAttribute()
        self._overlap.id = self._driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        self._overlap.value.programmaticStreamSerializationAllowed = 1

    def allow_shared(self, size: int) -> None:
        """Raise the kernel's limit of dynamic shared memory, 48 KB by default, to ``size`` bytes."""
        if size > self._shared:
            attribute = self._driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            granted = size <= self._most
            if not granted or int(self._answer(self._driver.cuFuncSetAttribute, self._function, attribute, size)[0]):
                raise error("BCQ-E554", found=f"{self._name} needs {size} bytes of shared memory")
            self._shared = size

    def launch(
        self, grid: Sequence[int], threads: int, shared: int, stream: int, values: list[Any], early: bool = False
    ) -> None:
        """Start it; addresses and numbers in the order of the kernel's arguments. ``early``: see the module."""
        for k in self._singles:
            values[k] = ctypes.c_float(values[k]).value  # struct refuses numbers beyond float32; these become infinite
        buffer = self._arguments
        self._pack(buffer.words, 0, *values)
        if early:
            config = buffer.configs.get((threads, shared, *grid)) or self._config(grid, threads, shared)
            config.hStream = stream
            self._ask(self._driver.cuLaunchKernelEx, config, self._function, buffer.address, 0)
        else:
            size = (*grid, 1, 1)[:3]
            start, function = self._driver.cuLaunchKernel, self._function
            self._ask(start, function, *size, threads, 1, 1, shared, stream, buffer.address, 0)

    def _config(self, grid: Sequence[int], threads: int, shared: int) -> Any:
        """A launch configuration, one for each thread: no thread changes what the driver reads for another."""
        made = self._driver.CUlaunchConfig()
        made.gridDimX, made.gridDimY, made.gridDimZ = (*grid, 1, 1)[:3]
        made.blockDimX, made.blockDimY, made.blockDimZ = threads, 1, 1
        made.sharedMemBytes = shared
        made.attrs, made.numAttrs = [self._overlap], 1
        self._arguments.configs[threads, shared, *grid] = made
        return made

    def _answer(self, function: Any, *given: Any) -> Any:
        """Call the driver; a thread without a CUDA context gets the one that the kernel was loaded into."""
        answer = function(*given)
        if answer[0] == _NO_CONTEXT and self._context is not None:
            self._driver.cuCtxSetCurrent(self._context)
            answer = function(*given)
        return answer

    def _ask(self, function: Any, *given: Any) -> Any:
        answer = self._answer(function, *given)
        if answer[0] != 0:
            raise error("BCQ-E551", found=f"{self._name}: {answer[0].name}")
        return answer[1] if len(answer) > 1 else None
