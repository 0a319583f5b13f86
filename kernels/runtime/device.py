"""Where arrays live and whether a GPU is there.

Device arrays are torch tensors; torch is never imported for them, the module that made them is used. Under the
simulator they are numpy arrays. :func:`describe` describes both in the same terms.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import sys
from typing import Any, NamedTuple

import numpy as np

from bcqfmt.container.dtypes import logical_name, numpy_dtype
from bcqfmt.errors import BcqError, error
from bcqfmt.version import pip_install

from . import simulation
from .limits import SHARED_LIMIT, SHARED_LIMITS

_TORCH = {
    "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64",
    "U8": "uint8", "I16": "int16", "I32": "int32", "I64": "int64",
}  # fmt: skip
_NAMES = {
    "float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64", "uint8": "U8", "int8": "I8",
    "int16": "I16", "uint16": "U16", "int32": "I32", "uint32": "U32", "int64": "I64",
}  # fmt: skip
_CAPABILITY = "BCQFMT_CAPABILITY"
_named: dict[Any, str] = {}  # torch.dtype -> name


class Described(NamedTuple):
    """What a kernel has to know of an argument; ``device`` is the index of the GPU, -1 on the host."""

    dtype: str
    shape: tuple[int, ...]
    contiguous: bool
    address: int
    device: int

    @property
    def size(self) -> int:
        """Number of elements."""
        count = 1
        for dim in self.shape:
            count *= dim
        return count


def simulated() -> bool:
    """Whether kernels run in a simulator in this process (`simulation`)."""
    return simulation.simulator is not None


def require_cuda(hint: str | None = None) -> None:
    """BCQ-E306 without numba-cuda, BCQ-E551 without a GPU that it can use; nothing in the simulator.

    ``hint``: what to do without a GPU, for callers that cannot use the CPU instead.
    """
    found = _trouble()
    if found is not None:
        raise error(found[0], found=found[1], hint=found[2] or hint)


@functools.cache
def _trouble() -> tuple[str, str, str | None] | None:
    if importlib.util.find_spec("numba_cuda") is None:
        return "BCQ-E306", "numba-cuda is not installed", pip_install("cuda")
    if simulated():
        return None
    if importlib.import_module("numba").config.ENABLE_CUDASIM:
        return "BCQ-E551", "Numba only simulates a GPU (NUMBA_ENABLE_CUDASIM=1)", "unset NUMBA_ENABLE_CUDASIM"
    if np.lib.NumpyVersion(np.__version__) >= "2.5.0" and not hasattr(np, "row_stack"):
        return "BCQ-E306", f"numpy {np.__version__} cannot be used with numba-cuda", "pip install 'numpy<2.5'"
    try:
        from .numba_cuda import cuda

        if not cuda.is_available():
            reason = " ".join(str(getattr(cuda, "cuda_error", lambda: "")() or "no device").split())
            return "BCQ-E551", f"Numba finds no GPU ({reason})", None
        version = cuda.get_current_device().compute_capability
    except Exception as fault:  # noqa: BLE001 - a broken driver may raise anything
        return "BCQ-E551", f"the driver fails: {type(fault).__name__}: {' '.join(str(fault).split())}", None
    if tuple(version) < (8, 0):
        return "BCQ-E551", f"a GPU of compute capability {version[0]}.{version[1]}; 8.0 is the least", None
    return None


def capability(index: int | None = None) -> tuple[int, int]:
    """Compute capability of a GPU by its number, by default of the current one; (8, 0) in the simulator.

    With ``BCQFMT_CAPABILITY`` (such as 8.0) that one: kernels are chosen and compiled for it.
    """
    require_cuda()
    return (8, 0) if simulated() else _asked(_current() if index is None else index).capability


def compiled_by_driver(index: int | None = None) -> bool:
    """Whether kernels are loaded as PTX: ``BCQFMT_CAPABILITY`` is less than the GPU's, which has other machine code."""
    found = _asked(_current() if index is None else index)
    return found.capability != found.own


def require_capability(major: int, minor: int, index: int | None = None) -> None:
    """BCQ-E551 unless the GPU of this number, by default the current one, has it or more; the simulator does any."""
    require_cuda()
    if not simulated() and capability(index) < (major, minor):
        found = "{}.{}".format(*capability(index))
        raise error("BCQ-E551", found=f"a GPU of compute capability {found}", expected=f"{major}.{minor}")


def shared_limit(index: int | None = None) -> int:
    """Bytes of shared memory that a block may have, on a GPU by its number, by default the current one."""
    return SHARED_LIMITS.get(capability(index), SHARED_LIMIT)


def like_sm_90(index: int | None = None) -> bool:
    """Whether a GPU has bulk copies and as much shared memory as sm_90; sm_120 has less."""
    return capability(index) >= (9, 0) and shared_limit(index) >= SHARED_LIMIT


def processors(index: int | None = None) -> int:
    """Multiprocessors of a GPU by its number, by default of the current one; 2 in the simulator."""
    require_cuda()
    return 2 if simulated() else _asked(_current() if index is None else index).processors


def _current() -> int:
    """The number of the current GPU. In a thread that has no context yet Numba makes one current."""
    from .numba_cuda import cuda

    return int(cuda.get_current_device().id)


class Gpu(NamedTuple):
    """What kernels are compiled for, its number of multiprocessors, and its ``own`` compute capability."""

    capability: tuple[int, int]
    processors: int
    own: tuple[int, int]


@functools.cache
def _asked(index: int) -> Gpu:
    """Cached; the GPUs of a machine may differ."""
    from .numba_cuda import cuda

    found = cuda.gpus[index]
    major, minor = found.compute_capability
    own = int(major), int(minor)
    return Gpu(_chosen(own), int(found.MULTIPROCESSOR_COUNT), own)


def _chosen(own: tuple[int, int]) -> tuple[int, int]:
    """The capability in the environment, or the GPU's own."""
    text = os.environ.get(_CAPABILITY)
    if not text:
        return own
    most = SHARED_LIMITS.get(own, SHARED_LIMIT)
    # what the GPU has the shared memory for; later PTX is for one kind of GPU alone
    known = [version for version, shared in SHARED_LIMITS.items() if version < min(own, (9, 0)) and shared <= most]
    named = {f"{major}.{minor}": (major, minor) for major, minor in (*known, own)}
    if text in named:
        return named[text]
    expected = f"one of {', '.join(named)} on this GPU"
    raise error("BCQ-E302", found=f"{_CAPABILITY}={text}", expected=expected, hint=f"unset {_CAPABILITY}")


def describe(array: Any) -> Described:
    """The same description of a torch tensor or a numpy array; BCQ-E552 for anything else."""
    if isinstance(array, np.ndarray):
        name, address = _NAMES.get(array.dtype.name, array.dtype.name), array.__array_interface__["data"][0]
        return Described(name, array.shape, bool(array.flags.c_contiguous), address, place_of(array))
    if not is_torch(array):
        found = f"a {type(array).__name__}"
        expected = "a torch tensor: torch.as_tensor(..., device='cuda')"
        raise error("BCQ-E552", found=found, expected=expected, hint="call torch.as_tensor(..., device='cuda')")
    kind = _named.get(array.dtype)
    if kind is None:
        plain = str(array.dtype).removeprefix("torch.")
        kind = _named[array.dtype] = _NAMES.get(plain, plain)
    return Described(kind, tuple(array.shape), array.is_contiguous(), array.data_ptr(), place_of(array))


def address_of(array: Any) -> int:
    """Where the first element of a torch tensor or a numpy array is."""
    return int(array.__array_interface__["data"][0] if isinstance(array, np.ndarray) else array.data_ptr())


def place_of(array: Any) -> int:
    """The number of the GPU that a torch tensor is on; -1 on the host."""
    return array.device.index or 0 if getattr(array, "is_cuda", False) else -1


def gpu_of(array: Any) -> int | None:
    """The number of the GPU that a weight is on; None for one on the host, which is refused later."""
    found = place_of(array)
    return None if found < 0 else found


def is_torch(array: Any) -> bool:
    """Whether it is a torch tensor, without importing torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(array, torch.Tensor)


def torch_name(dtype: str) -> str:
    """The name of a dtype in torch: ``torch.float16`` for ``F16``; words are int32."""
    return "torch." + _TORCH.get(dtype, "int32")


def empty_like(array: Any, shape: tuple[int, ...], dtype: str | None = None) -> Any:
    """An uninitialised array of ``dtype`` ("F32"; by default that of ``array``) where ``array`` lives."""
    if isinstance(array, np.ndarray):
        return np.empty(shape, array.dtype if dtype is None else numpy_dtype(dtype))
    if dtype is None:
        return array.new_empty(shape)
    return array.new_empty(shape, dtype=getattr(sys.modules["torch"], _TORCH[dtype]))


def aligned(array: Any) -> Any:
    """The array itself, or a copy that starts at a multiple of 16 bytes."""
    return array if address_of(array) % 16 == 0 else array + 0


def upload(array: Any, device: Any = None) -> Any:
    """A numpy array as a device array: a torch tensor on ``device``, or in the simulator the array itself.

    Words (uint32) become int32, 16-bit floats keep their type.
    """
    plain = np.ascontiguousarray(array)
    if simulated() and device is None:
        return plain
    try:
        torch = importlib.import_module("torch")
    except ImportError:
        raise error("BCQ-E306", found="torch is not installed", hint=pip_install("torch")) from None
    if not plain.flags.writeable or plain.base is not None:
        plain = plain.copy()  # torch needs writable memory that it owns
    if plain.dtype == np.uint32:
        tensor = torch.from_numpy(plain.view(np.int32))
    elif plain.dtype.name == "bfloat16":
        tensor = torch.from_numpy(plain.view(np.int16)).view(torch.bfloat16)
    else:
        tensor = torch.from_numpy(plain)
    try:
        return tensor.to("cuda" if device is None else device)
    except (RuntimeError, AssertionError) as fault:
        raise _no_device(fault, device) from None


def tensor(array: Any, device: Any = None) -> Any:
    """The same, always as a torch tensor: in the simulator on the host. A tensor is taken as it is."""
    return array if is_torch(array) else upload(array, "cpu" if simulated() and device is None else device)


def columns(array: Any, chosen: Any) -> Any:
    """Columns ``chosen`` (in) int32 of an array (count, in), in that order."""
    if isinstance(array, np.ndarray):
        return np.ascontiguousarray(array[:, on_host(chosen)])
    return array.index_select(1, chosen)


def _no_device(fault: Exception, device: Any) -> BcqError:
    text = str(fault).strip().splitlines()[0] if str(fault).strip() else type(fault).__name__
    return error("BCQ-E551", found=f"torch cannot use {device or 'cuda'}: {text}")


def stream_of(array: Any) -> int:
    """The number of torch's current stream on the device of ``array``; read at every launch: captures change it."""
    torch = sys.modules["torch"]
    raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # as in code that torch generates
    if raw is not None:
        return int(raw(array.device.index or 0))
    return int(torch.cuda.current_stream(array.device).cuda_stream)


def capturing(array: Any) -> bool:
    """Whether torch's current stream on the device of ``array`` records a CUDA graph."""
    cuda = sys.modules["torch"].cuda
    if cuda.current_device() == (array.device.index or 0):
        return bool(cuda.is_current_stream_capturing())
    with cuda.device(array.device):
        return bool(cuda.is_current_stream_capturing())


def settle(array: Any) -> None:
    """Wait until torch's current stream on the device of ``array`` has finished; does nothing on the host.

    BCQ-E552 while a CUDA graph is captured, when waiting is impossible.
    """
    if is_torch(array) and array.device.type == "cuda":
        torch = sys.modules["torch"]
        if torch.cuda.is_current_stream_capturing():
            found = "a weight that is prepared while a CUDA graph is captured"
            hint = "multiply as many vectors as in the graph once before the capture"
            raise error("BCQ-E552", found=found, expected="one that was prepared before", hint=hint)
        torch.cuda.current_stream(array.device).synchronize()


def on_host(array: Any) -> Any:
    """A numpy array that shares the memory of a host tensor; bfloat16 as its bits."""
    if isinstance(array, np.ndarray):
        return array
    if array.dtype == sys.modules["torch"].bfloat16:
        array = array.view(sys.modules["torch"].int16)
    return array.detach().numpy()


def dtype_name(dtype: Any) -> str:
    """``F16``, ``BF16`` or ``F32``; BCQ-E552 for any other."""
    try:
        name = logical_name(dtype)
    except BcqError:
        name = str(dtype)
    if name not in ("F16", "BF16", "F32"):
        hint = "ask for one of these and convert the result: .to(dtype)"
        raise error("BCQ-E552", found=f"dtype {dtype}", expected="float16, bfloat16 or float32", hint=hint)
    return name
