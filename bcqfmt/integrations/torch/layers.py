"""Layers whose weight is a BCQ weight: its parts are buffers, nothing else is stored."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn

from bcqfmt.errors import error
from bcqfmt.weight.scheme import WeightSpec
from bcqfmt.weight.weight import BcqWeight

from . import linear_op as torch_cpu_ops
from .parts import (
    TORCH_DTYPES,
    bits_per_weight,
    empty_parts,
    refuse_bias,
    refuse_planes,
    spec_of,
    suffixes,
    text_of,
    weight_of,
)

__all__ = ["BcqLinear", "BcqModule", "BcqStack"]


class BcqModule(nn.Module):
    """The parts of one weight as buffers ``<prefix><suffix>``, so that ``q_proj.bcq_s0_planes`` is called as in files.

    Buffers keep their stored types: ``half()`` and ``to(dtype)`` change where they are, never what they say.
    ``exact``: decode the weight bit by bit and multiply as a dense layer would, instead of using the kernels.
    ``planes``: use the first ones only.
    """

    def __init__(
        self, spec: WeightSpec, *, exact: bool = False, planes: int | None = None, nnz: int = 0, prefix: str = "bcq_",
        device: Any = None,
    ) -> None:  # fmt: skip
        """Empty buffers of the right shapes, on any device (``"meta"`` too); ``nnz``: the number of outliers."""
        super().__init__()
        if planes is not None:
            refuse_planes(spec, planes)
        self.text, self.prefix, self.exact, self.planes = text_of(spec), prefix, exact, planes
        self.logical = TORCH_DTYPES[spec.dtype]
        self.names = tuple(prefix + suffix for suffix in suffixes(self.text))
        for suffix, tensor in empty_parts(spec, nnz, device).items():
            self.register_buffer(prefix + suffix, tensor)

    @property
    def spec(self) -> WeightSpec:
        """Shape, logical dtype, scheme."""
        return spec_of(self.text)

    def parts(self) -> list[Tensor]:
        """The buffers of the parts, sorted by suffix."""
        held: dict[str, Any] = self._buffers  # attributes of a module cost microseconds each
        return [held[name] if name in held else getattr(self, name) for name in self.names]

    def to_weight(self, name: str = "") -> BcqWeight:
        """The weight, for :func:`bcqfmt.save` or anything else; it views the buffers if they are on the CPU."""
        tensors = dict(zip(suffixes(self.text), (part.cpu() for part in self.parts()), strict=True))
        return weight_of(self.spec, tensors, name)

    def values(self, dtype: torch.dtype | None = None, index: int = 0) -> Tensor:
        """The dense matrix (out, in), by default in the logical dtype; of a stack, matrix ``index``."""
        kind = self.logical if dtype is None else dtype
        found: Tensor = torch_cpu_ops.values(self.parts(), self.text, self.planes or 0, index, kind)
        return found

    def product(self, x: Tensor, bias: Tensor | None = None, index: int = 0) -> Tensor:
        """``x W^T + bias`` for x (..., in)."""
        if self.exact:  # what nn.Linear does with the dense matrix, to the last bit
            dense = self.values(index=index).to(x.dtype)
            return nn.functional.linear(x, dense, None if bias is None else bias.to(x.dtype))
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        return torch_cpu_ops.linear(x, self.parts(), self.text, self.planes or 0, index, bias)

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Put tensors (suffix -> part) in the place of the buffers, without copying."""
        for name in self.names:
            self._buffers[name] = tensors[name.removeprefix(self.prefix)]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Moves and conversions of the module. Parts are handed over as integers, which nothing converts."""
        held = {name: self._buffers.pop(name) for name in self.names if name in self._buffers}
        try:
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        finally:
            for name, part in held.items():
                assert part is not None
                self._buffers[name] = fn(part.view(_CARRIERS[part.element_size()])).view(part.dtype)
        return self

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles: unsigned 16-bit integers go as signed ones, because torch cannot pickle them."""
        state = self.__dict__.copy()
        state["_buffers"] = {
            name: part.view(torch.int16) if part is not None and part.dtype == torch.uint16 else part
            for name, part in self._buffers.items()
        }
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        for name in self.names:
            part = self._buffers.get(name)
            if part is not None and part.dtype == torch.int16:
                self._buffers[name] = part.view(torch.uint16)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *arguments: Any) -> None:
        """Buffers of outliers take the length of what is loaded; their content is checked before it is used."""
        for suffix in ("outlier_indices", "outlier_values"):
            held, found = self._buffers.get(self.prefix + suffix), state_dict.get(prefix + self.prefix + suffix)
            if held is not None and isinstance(found, Tensor) and found.dim() == 1 and len(found) != len(held):
                self._buffers[self.prefix + suffix] = held.new_empty(len(found))
        super()._load_from_state_dict(state_dict, prefix, *arguments)

    def extra_repr(self) -> str:
        """Shape, planes, group size, bits per weight."""
        spec = self.spec
        kinds = " + ".join(
            f"{s.encoding} q={s.bits} g={s.group_size}" + (f" x{w}" if len(spec.widths) > 1 else "")
            for s, w in zip(spec.scheme.segments, spec.widths, strict=True)
        )
        stack = f"stack={spec.stack}, " if len(spec.shape) == 3 else ""
        shown = f"{stack}in_features={spec.columns}, out_features={spec.out}, {kinds}, "
        shown += f"{bits_per_weight(self.parts(), spec.shape):.3f} bit"
        return shown + (", exact" if self.exact else "") + (f", planes={self.planes}" if self.planes else "")


_CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


class BcqLinear(BcqModule):
    """``y = x W^T + b`` with a BCQ weight W (out, in) in place of :class:`torch.nn.Linear`.

    x (..., in) float32, float16 or bfloat16; y has its dtype (under autocast, that of autocast).
    """

    bias: Tensor | None

    def __init__(
        self, spec: WeightSpec, *, bias: bool = False, dtype: torch.dtype | None = None, device: Any = None,
        **options: Any,
    ) -> None:  # fmt: skip
        """Empty: for ``load_state_dict``. ``bias`` of type ``dtype``; ``options``: those of :class:`BcqModule`."""
        if len(spec.shape) != 2:
            raise error(
                "BCQ-E552", found=f"a stack of shape {list(spec.shape)}", expected="one matrix; BcqStack takes stacks"
            )
        super().__init__(spec, device=device, **options)
        self.in_features, self.out_features = spec.columns, spec.out
        self.register_buffer("bias", torch.empty(spec.out, dtype=dtype, device=device) if bias else None)

    @classmethod
    def from_weight(
        cls, weight: BcqWeight, bias: Tensor | None = None, *, trainable_scales: bool = False, **options: Any
    ) -> BcqLinear:
        """A layer over a weight, which is read and checked; ``bias`` (out) or None.

        ``trainable_scales``: `torch_train.TrainableBcqLinear`, whose plane scales and biases learn.
        """
        refuse_bias(weight.spec, bias)
        if trainable_scales:
            refused = [name for name in ("exact", "planes") if options.pop(name, None)]
            if refused:
                raise error(
                    "BCQ-E302",
                    found=f"{refused[0]} with trainable_scales",
                    expected="all planes, as they are while trained",
                )
            from .train import TrainableBcqLinear

            return TrainableBcqLinear(weight, bias, **options)
        weight.check()
        layer = cls(weight.spec, device="meta", **options)
        layer.fill(weight.to_torch())
        if bias is not None:
            layer.bias = bias.detach().clone()
        return layer

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) -> (..., out)."""
        return self.product(x, self.bias)

    def extra_repr(self) -> str:
        """As nn.Linear, and what the weight is."""
        return f"{super().extra_repr()}, bias={self.bias is not None}"


class BcqStack(BcqModule):
    """A stack of matrices (E, out, in), such as the experts of a layer: ``stack(x, e)`` multiplies with matrix e."""

    def __init__(self, spec: WeightSpec, **options: Any) -> None:
        """Empty: for ``load_state_dict``. ``options``: those of :class:`BcqModule`."""
        if len(spec.shape) != 3:
            raise error("BCQ-E552", found=f"a weight of shape {list(spec.shape)}", expected="a stack (E, out, in)")
        super().__init__(spec, **options)

    @classmethod
    def from_weight(cls, weight: BcqWeight, **options: Any) -> Self:
        """A module over a stack, which is read and checked."""
        weight.check()
        stack = cls(weight.spec, device="meta", **options)
        stack.fill(weight.to_torch())
        return stack

    def forward(self, x: Tensor, index: int) -> Tensor:
        """(..., in) -> (..., out) with matrix ``index``."""
        return self.product(x, index=index)
