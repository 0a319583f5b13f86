"""A weight as torch tensors and back: the types of parts, the text that describes a weight, views without copies."""

from __future__ import annotations

import ctypes
import functools
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bcqfmt.container.dtypes import numpy_dtype
from bcqfmt.container.stored_tensor import StoredTensor
from bcqfmt.container.strict_json import canonical
from bcqfmt.errors import error
from bcqfmt.weight.decode import refuse_truncation
from bcqfmt.weight.scheme import WeightSpec
from bcqfmt.weight.scheme_json import resolved_json, scheme_of
from bcqfmt.weight.weight import BcqWeight

TORCH_DTYPES: dict[str, torch.dtype] = {
    "I32": torch.int32, "U16": torch.uint16, "U8": torch.uint8,
    "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32,
}  # fmt: skip
_MOST_PLANES = 8
_CARRIERS = {torch.bfloat16: torch.int16}  # types that torch and numpy do not share


def text_of(spec: WeightSpec) -> str:
    """The description of a weight in one line: the canonical JSON of its entry with the scheme written out."""
    return canonical(resolved_json(spec))


@functools.cache
def spec_of(text: str) -> WeightSpec:
    """The inverse of :func:`text_of`; the same object every time."""
    value = json.loads(text)
    shape = tuple(value["shape"])
    return WeightSpec(
        scheme=scheme_of(value["scheme"], "scheme"),
        shape=shape,
        dtype=value["dtype"],
        widths=tuple(value.get("widths", shape[-1:])),
    )


@functools.cache
def suffixes(text: str) -> tuple[str, ...]:
    """The parts of a weight in the order in which operators take them: sorted by suffix."""
    return tuple(sorted(spec_of(text).parts()))


def empty_parts(spec: WeightSpec, nnz: int, device: Any) -> dict[str, Tensor]:
    """Tensors of the right types and shapes, their content undefined; ``nnz``: the number of outliers."""
    return {
        suffix: torch.empty(
            [nnz if size < 0 else size for size in part.shape], dtype=TORCH_DTYPES[part.dtype], device=device
        )
        for suffix, part in sorted(spec.parts().items())
    }


def refuse_planes(spec: WeightSpec, planes: int) -> None:
    """BCQ-E302 for fewer planes than one or more than any weight can have, BCQ-E304 for segments that need all."""
    refuse_truncation(spec, planes)
    if planes > _MOST_PLANES:  # up to this, planes that a weight does not have are ignored (section 8.1)
        raise error("BCQ-E302", tensor="planes", found=f"{planes} planes", expected=f"at most {_MOST_PLANES}")


def require_tensor(x: Any, name: str) -> None:
    """BCQ-E552 for what is no tensor, such as an array of numpy."""
    if not isinstance(x, Tensor):
        hint = f"pass torch.as_tensor({name}), on the device of the layer"
        raise error("BCQ-E552", tensor=name, found=f"a {type(x).__name__}", expected="a torch tensor", hint=hint)


def refuse_bias(spec: WeightSpec, bias: Tensor | None) -> None:
    """BCQ-E552 for a bias that is not one number for each row."""
    if bias is not None:
        require_tensor(bias, "bias")
    if bias is not None and (tuple(bias.shape) != (spec.out,) or not bias.is_floating_point()):
        found = f"a bias of shape {list(bias.shape)} and {bias.dtype}"
        raise error("BCQ-E552", found=found, expected=f"[{spec.out}], floating point")


def weight_of(spec: WeightSpec, tensors: Mapping[str, Tensor], name: str = "") -> BcqWeight:
    """A weight over tensors on the CPU, which it views and keeps alive; suffix -> tensor. Content is not checked."""
    return BcqWeight(name, spec, _stored(spec, {suffix: _numpy(tensor) for suffix, tensor in tensors.items()}))


def named_parts(text: str, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
    """Tensors in the order of :func:`suffixes`, by suffix; BCQ-E552 unless there is one for each part."""
    if len(tensors) != len(suffixes(text)):
        raise error("BCQ-E552", found=f"{len(tensors)} parts", expected=", ".join(suffixes(text)))
    return dict(zip(suffixes(text), tensors, strict=True))


def borrowed(text: str, tensors: Sequence[Tensor]) -> BcqWeight:
    """A weight over the memory of contiguous tensors on the CPU, in the order of :func:`suffixes`.

    It does not keep them alive: the caller has to, for as long as it is used.
    """
    spec = spec_of(text)
    arrays = {}
    for suffix, tensor in named_parts(text, tensors).items():
        kind = spec.parts()[suffix].dtype
        if tensor.dtype != TORCH_DTYPES[kind] or not tensor.is_contiguous():
            found = f"{tensor.dtype} with strides {tensor.stride()}"
            raise error("BCQ-E552", tensor=suffix, found=found, expected=f"contiguous {kind}")
        shape = tuple(tensor.shape)
        if not tensor.numel():
            arrays[suffix] = np.empty(shape, numpy_dtype(kind))
            continue
        memory = (ctypes.c_uint8 * (tensor.numel() * tensor.element_size())).from_address(tensor.data_ptr())
        arrays[suffix] = np.frombuffer(memoryview(memory), numpy_dtype(kind)).reshape(shape)
    return BcqWeight("", spec, _stored(spec, arrays))


def stored_of(name: str, tensor: Tensor) -> StoredTensor:
    """Any tensor as one of the container, viewed if it is on the CPU."""
    return StoredTensor.from_array(
        name, _numpy(tensor.cpu().contiguous()), "BF16" if tensor.dtype == torch.bfloat16 else None
    )


def _stored(spec: WeightSpec, arrays: Mapping[str, npt.NDArray[Any]]) -> dict[str, StoredTensor]:
    wanted = spec.parts()
    if set(wanted) != set(arrays):
        raise error("BCQ-E552", found=f"parts {', '.join(sorted(arrays))}", expected=", ".join(sorted(wanted)))
    return {
        suffix: StoredTensor.from_array(suffix, array.view(numpy_dtype(wanted[suffix].dtype)), wanted[suffix].dtype)
        for suffix, array in arrays.items()
    }


def _numpy(tensor: Tensor) -> npt.NDArray[Any]:
    """The same memory as an array; bfloat16 comes as its patterns."""
    plain = tensor.detach()
    found: npt.NDArray[Any] = plain.view(_CARRIERS.get(plain.dtype, plain.dtype)).numpy()
    return found


def bits_per_weight(tensors: Sequence[Tensor], shape: Sequence[int]) -> float:
    """Stored bits per element."""
    return sum(t.numel() * t.element_size() for t in tensors) * 8 / math.prod(shape)
