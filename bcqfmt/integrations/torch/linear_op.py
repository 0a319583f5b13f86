"""Products with BCQ weights as torch operators that take the parts as they are stored.

- ``torch.ops.bcqfmt.linear(x, parts, spec, planes, index, bias)``: ``x W^T + bias``, with gradients for x and bias
- ``torch.ops.bcqfmt.values(parts, spec, planes, index, dtype)``: the dense matrix, bit for bit (section 8)

``parts``: the tensors of the parts, sorted by suffix; ``spec``: `parts.text_of`; ``planes``: the first ones only, 0 for
all; ``index``: which matrix of a stack, 0 otherwise; ``bias`` (out) or None, taken in the dtype of x and added before
the sum is rounded, as a dense layer does it (but 2/4-bit products of a GPU are rounded first).
On the CPU the kernels of `bcqfmt.kernels.cpu` run, with as many threads as torch has; on a GPU those of
`bcqfmt.kernels.matmul`. What they need in addition to the planes is prepared at the first call and cached until the
memory of a part is changed or freed. Both operators know the shape of their result without running (fake tensors,
``torch.compile``). Importing this module registers them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.multiprocessing import reductions

from bcqfmt.container.dtypes import logical_name
from bcqfmt.errors import error
from bcqfmt.kernels import cpu, matmul
from bcqfmt.kernels.runtime.limits import KINDS

from .parts import TORCH_DTYPES, borrowed, named_parts, spec_of, weight_of
from .processor import dense_products, multiplies

_Weak: Any = reductions.StorageWeakRef
_BLOCK = 1 << 22  # elements decoded at a time for a product with many vectors


class _Prepared:
    """A cache entry made from tensors: valid while their memory is not freed, moved or written to."""

    def __init__(self, tensors: Sequence[Tensor], state: list[int], made: Any) -> None:
        self.memory = [_Weak(tensor.untyped_storage()) for tensor in tensors]
        self.state = state
        self.made = made

    def freed(self) -> bool:
        return any(memory.expired() for memory in self.memory)


_cache: dict[tuple[Any, ...], _Prepared] = {}
_lock = threading.Lock()
_FEW = 64


def _drop_freed() -> int:
    """How many entries the cache has, without those whose memory was freed."""
    for key in [key for key, entry in _cache.items() if entry.freed()]:
        del _cache[key]
    return len(_cache)


def _cached(tensors: Sequence[Tensor], make: Callable[..., Any], *options: Any) -> Any:
    """``make(tensors, *options)``, once for as long as the tensors stay what they are."""
    key, state = _key(tensors, make, *options)
    entry = _cache.get(key)
    if entry is not None and entry.state == state:
        return entry.made
    made = make(tensors, *options)
    with _lock:
        _cache[key] = _Prepared(tensors, state, made)
        if len(_cache) >= _FEW and len(_cache) & (len(_cache) - 1) == 0:  # at powers of two: cheap for many weights
            _drop_freed()
    return made


def _key(tensors: Sequence[Tensor], make: Any, *options: Any) -> tuple[tuple[Any, ...], list[int]]:
    """Where the cache has what is made of tensors, and the state of them that it is valid for."""
    key, state = [make, *options], []  # in one loop: every product asks
    for tensor in tensors:
        # a weakly referenced storage keeps its address, so no other storage can get the same key
        key.append(tensor.untyped_storage()._cdata)
        state.append(tensor.data_ptr())
        state.append(-1 if tensor.is_inference() else tensor._version)
    return tuple(key), state


def _on_cpu(parts: Sequence[Tensor], spec: str, planes: int, index: int) -> cpu.CpuMatrix:
    return cpu.prepare(borrowed(spec, parts), planes=planes or None, index=_matrix(spec, index))


def _on_gpu(parts: Sequence[Tensor], spec: str, planes: int, index: int) -> matmul.MatmulWeight:
    from bcqfmt.kernels import operands

    from .gpu_weight import gpu_weight

    named, number = named_parts(spec, parts), _matrix(spec, index)
    whole = not planes and number is None
    made = gpu_weight(spec_of(spec), named) if whole else None
    if made is not None:
        return made
    weight = weight_of(spec_of(spec), {suffix: part.cpu() for suffix, part in named.items()})
    operand = operands.operand(weight, planes=planes or None, index=number)
    return matmul.MatmulWeight(operand, parts[0].device, weight if whole else None)


def gpu_operand(parts: Sequence[Tensor], spec: str, planes: int, index: int = 0) -> matmul.MatmulWeight:
    """The weight of parts on a GPU as kernels take it, prepared once."""
    found: matmul.MatmulWeight = _cached(parts, _on_gpu, spec, planes, index)
    return found


def path_of(
    parts: Sequence[Tensor], spec: str, planes: int, index: int, vectors: int, dtype: torch.dtype
) -> matmul.Path:
    """How this many vectors of ``dtype`` are multiplied on the parts' device; prepares them as the product does."""
    place, kind = parts[0].device.type, logical_name(dtype)
    if place not in ("cpu", "cuda") or kind not in KINDS:
        raise error("BCQ-E552", found=f"{kind} on {place}", expected=f"{', '.join(KINDS)} on cpu or cuda")
    if place == "cuda":
        return matmul.path_of(gpu_operand(parts, spec, planes, index), vectors, kind)
    matrix: cpu.CpuMatrix = _cached(parts, _on_cpu, spec, planes, index)
    kernel = matrix.path(vectors)
    return matmul.Path(kernel, matrix.obstacle or ("" if kernel == "planes" else "many vectors: decoding is faster"))


def release(
    parts: Sequence[Tensor], spec: str, planes: int, dtype: torch.dtype, counts: Sequence[int], *, exact: bool = False
) -> list[Tensor]:
    """Tensors of one element for parts on a GPU whose memory no product needs any more; the parts where one does.

    ``counts``: all numbers of vectors of ``dtype`` that will be multiplied; each has been already, so that the layouts
    for them exist. ``exact``: values are decoded too.
    """
    weight, kind = gpu_operand(parts, spec, planes), logical_name(dtype)
    paths = {matmul.path_of(weight, count, kind).kernel for count in counts}
    let_go = getattr(weight, "let_go", None)  # of a weight that was prepared on the host nothing is read any more
    if let_go is not None and (exact or not let_go(paths, kind)):
        return list(parts)
    held = [torch.empty(1, dtype=part.dtype, device=part.device) for part in parts]
    key, state = _key(held, _on_gpu, spec, planes, 0)
    with _lock:
        _cache[key] = _Prepared(held, state, weight)
    return held


def _matrix(spec: str, index: int) -> int | None:
    return index if len(spec_of(spec).shape) == 3 else None


def _check(x: Tensor, spec: str, parts: Sequence[Tensor], bias: Tensor | None) -> None:
    columns, rows = spec_of(spec).columns, spec_of(spec).out
    if x.dim() < 1 or x.shape[-1] != columns or x.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        found = f"x of shape {list(x.shape)} and {x.dtype}"
        raise error("BCQ-E552", found=found, expected=f"[..., {columns}], float32, float16 or bfloat16")
    if not parts or parts[0].device != x.device:
        raise error("BCQ-E552", found=f"x on {x.device}, {len(parts)} parts on another", expected="one device")
    if bias is not None and (bias.shape != (rows,) or bias.device != x.device or not bias.is_floating_point()):
        raise error(
            "BCQ-E552",
            found=f"a bias of shape {list(bias.shape)} and {bias.dtype} on {bias.device}",
            expected=f"[{rows}], floating point, on {x.device}",
        )


def _linear_cpu(
    x: Tensor, parts: Sequence[Tensor], spec: str, planes: int, index: int, bias: Tensor | None = None
) -> Tensor:
    _check(x, spec, parts, bias)
    matrix: cpu.CpuMatrix = _cached(parts, _on_cpu, spec, planes, index)
    rows, columns = matrix.shape
    vectors = x.detach().reshape(-1, columns)
    threads = torch.get_num_threads()
    plus = None if bias is None else bias.detach().to(x.dtype)
    if matrix.path(vectors.shape[0]) == "planes":
        y = torch.from_numpy(matrix.matmul(vectors.float().numpy(), threads=threads))
        y = y if plus is None else y.add_(plus)
    else:
        y = _by_values(matrix, vectors, plus, threads)
    return y.to(x.dtype).reshape(*x.shape[:-1], rows)


def _by_values(matrix: cpu.CpuMatrix, vectors: Tensor, bias: Tensor | None, threads: int) -> Tensor:
    """Many vectors: some rows at a time are decoded and multiplied by torch.

    With inputs of 16 bits these are the values that a dense copy has in their dtype. Where the processor has no
    instructions for the dtype, they are multiplied as float32.
    """
    rows, columns = matrix.shape
    kind = vectors.dtype if multiplies(vectors.dtype) else torch.float32
    inputs = vectors.to(kind)
    y = inputs.new_empty(inputs.shape[0], rows)
    step = max(1, _BLOCK // columns)
    block = torch.empty(min(step, rows), columns, dtype=vectors.dtype)
    for top in range(0, rows, step):
        piece = block[: min(step, rows - top)]
        _decode(matrix, top, piece, threads, twice=vectors.dtype != torch.float32)
        plus = None if bias is None else bias[top : top + len(piece)].to(kind)
        y[:, top : top + len(piece)] = torch.nn.functional.linear(inputs, piece.to(kind), plus)
    return y


def _decode(matrix: cpu.CpuMatrix, first_row: int, out: Tensor, threads: int, twice: bool = False) -> None:
    kind = logical_name(out.dtype)
    patterns = out.view({1: torch.uint8, 2: torch.uint16, 4: torch.int32, 8: torch.int64}[out.element_size()]).numpy()
    matrix.decode_into(kind, first_row, patterns, threads=threads, twice=twice)


def _values_cpu(parts: Sequence[Tensor], spec: str, planes: int, index: int, dtype: torch.dtype) -> Tensor:
    matrix: cpu.CpuMatrix = _cached(parts, _on_cpu, spec, planes, index)
    out = torch.empty(matrix.shape, dtype=dtype)
    _decode(matrix, 0, out, torch.get_num_threads())
    return out


def _linear_cuda(
    x: Tensor, parts: Sequence[Tensor], spec: str, planes: int, index: int, bias: Tensor | None = None
) -> Tensor:
    _check(x, spec, parts, bias)
    plain = x.detach() if x.requires_grad else x
    weight = gpu_operand(parts, spec, planes, index)
    found: Tensor
    if bias is None:
        found = matmul.matmul(weight, plain.contiguous())
        return found
    kind = logical_name(x.dtype)
    product = weight.product(x.numel() // x.shape[-1], kind)
    path = product.path
    if product.dense is not None:
        return torch.nn.functional.linear(plain, product.dense(), bias.detach().to(x.dtype))
    if path in ("bits", "gemm"):
        found = matmul.matmul(weight, plain.contiguous(), addend=_cached((bias,), _addend, x.dtype, bias.data_ptr()))
        return found
    wide = matmul.matmul(weight, plain.contiguous(), result="F32" if path == "look-up" else None)
    found = (wide + bias.detach().to(x.dtype)).to(x.dtype)
    return found


def _addend(tensors: Sequence[Tensor], dtype: torch.dtype, place: int) -> Tensor:
    """A bias in a dtype as float32, once for each vector of a launch: what kernels add before they round.

    ``place``: its address; biases may share a storage, which the cache knows them by.
    """
    return tensors[0].detach().to(dtype).float().expand(matmul.BATCH_LIMIT, -1).contiguous()


def _values_cuda(parts: Sequence[Tensor], spec: str, planes: int, index: int, dtype: torch.dtype) -> Tensor:
    found: Tensor = gpu_operand(parts, spec, planes, index).values(logical_name(dtype))
    return found


def _values_fake(parts: Sequence[Tensor], spec: str, _planes: int, _index: int, dtype: torch.dtype) -> Tensor:
    return parts[0].new_empty(spec_of(spec).shape[-2:], dtype=dtype)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, parts, ctx.spec, ctx.planes, ctx.index, bias = (*inputs, None)[:6]
    ctx.bias = None if bias is None else bias.dtype
    ctx.save_for_backward(*parts)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    parts = ctx.saved_tensors  # read once only: with activation checkpointing each reading recomputes them
    matrix = values(parts, ctx.spec, ctx.planes, ctx.index, gradient.dtype)
    own = None if ctx.bias is None else gradient.reshape(-1, gradient.shape[-1]).sum(0).to(ctx.bias)
    with dense_products(gradient.dtype):
        found = (gradient @ matrix, [None] * len(parts), None, None, None, own)
    return found[: len(ctx.needs_input_grad)]  # a bias of None is an input or not, depending on torch's version


torch.library.define(
    "bcqfmt::linear", "(Tensor x, Tensor[] parts, str spec, int planes, int index, Tensor? bias=None) -> Tensor"
)
torch.library.define("bcqfmt::values", "(Tensor[] parts, str spec, int planes, int index, ScalarType dtype) -> Tensor")
for _name, _on, _function in (
    ("linear", "CPU", _linear_cpu), ("linear", "CUDA", _linear_cuda), ("values", "CPU", _values_cpu),
    ("values", "CUDA", _values_cuda),
):  # fmt: skip
    torch.library.impl(f"bcqfmt::{_name}", _on, _function)
torch.library.register_fake(
    "bcqfmt::linear", lambda x, _parts, spec, *_: x.new_empty((*x.shape[:-1], spec_of(spec).out))
)
torch.library.register_fake("bcqfmt::values", _values_fake)
torch.library.register_autograd("bcqfmt::linear", _backward, setup_context=_setup)

values: Any = torch.ops.bcqfmt.values.default
_linear: Any = torch.ops.bcqfmt.linear.default
_DIRECT = {"cpu": _linear_cpu, "cuda": _linear_cuda}
_modes: Any = getattr(torch._C, "_len_torch_dispatch_stack", None)


def linear(
    x: Tensor, parts: Sequence[Tensor], spec: str, planes: int, index: int, bias: Tensor | None = None
) -> Tensor:
    """``torch.ops.bcqfmt.linear``; where nothing of torch watches, the function that it leads to.

    Calling an operator of Python takes as long as everything that is done here for a product on a GPU.
    Forward derivatives and the transforms of ``torch.func`` use the dense matrix, which torch can differentiate.
    """
    found: Tensor
    if torch.compiler.is_compiling():
        found = _linear(x, parts, spec, planes, index, bias)
        return found
    if _transformed():
        dense = values(parts, spec, planes, index, TORCH_DTYPES[spec_of(spec).dtype]).to(x.dtype)
        with dense_products(x.dtype):
            return torch.nn.functional.linear(x, dense, None if bias is None else bias.to(x.dtype))
    direct = None if _watched(x) or (torch.is_grad_enabled() and _learning(x, parts, bias)) else _DIRECT
    found = (_linear if direct is None else direct.get(x.device.type, _linear))(x, parts, spec, planes, index, bias)
    return found


def _watched(x: Tensor) -> bool:
    """Whether operators may be seen by others: fake and other special tensors, modes, tracing."""
    return type(x) is not Tensor or _modes is None or _modes() > 0 or torch._C._get_tracing_state() is not None


def _learning(x: Tensor, parts: Sequence[Tensor], bias: Tensor | None) -> bool:
    return x.requires_grad or (bias is not None and bias.requires_grad) or any(part.requires_grad for part in parts)


def _transformed() -> bool:
    """Whether a forward derivative is being taken, or a function is inside ``vmap``, ``jvp``, ``grad`` ..."""
    return forward_ad._current_level >= 0 or torch._C._functorch.peek_interpreter_stack() is not None
