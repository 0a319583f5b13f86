"""Layers with a BCQ weight, whose parts are their buffers; and a layer with trainable scales."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Self, cast

import torch
from torch import Tensor, nn

from bcqfmt.container.dtypes import FLOATS, logical_name
from bcqfmt.errors import error
from bcqfmt.kernels import matmul
from bcqfmt.kernels.operands import operand
from bcqfmt.weight.scheme import Segment, WeightSpec
from bcqfmt.weight.weight import BcqWeight

from . import linear_op
from .parts import (
    TORCH_DTYPES,
    bits_per_weight,
    empty_parts,
    refuse_bias,
    refuse_planes,
    require_tensor,
    spec_of,
    suffixes,
    text_of,
    weight_of,
)
from .processor import dense_products

_CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}  # types that nothing converts, by element size


class BcqModule(nn.Module):
    """The parts of one weight as buffers ``<prefix><suffix>``, named as in files: ``q_proj.bcq_s0_planes``.

    Buffers keep their stored types: ``half()`` and ``to(dtype)`` never convert them.
    ``exact``: decode the weight bit by bit and multiply as a dense layer would, instead of using the kernels.
    ``planes``: use the first ones only.
    """

    _decodes = False  # values are read, too

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

    @classmethod
    def from_weight(cls, weight: BcqWeight, **options: Any) -> Self:
        """A module over a weight, which is read and checked."""
        weight.check()
        module = cls(weight.spec, device="meta", **options)
        module.fill(weight.to_torch())
        return module

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
        found: Tensor = linear_op.values(self.parts(), self.text, self.planes or 0, index, kind)
        return found

    def product(self, x: Tensor, bias: Tensor | None = None, index: int = 0) -> Tensor:
        """``x W^T + bias`` for x (..., in)."""
        require_tensor(x, "x")
        if self.exact:  # the operator of nn.Linear, with the dense matrix
            dense = self.values(index=index).to(x.dtype)
            with dense_products(x.dtype):
                return nn.functional.linear(x, dense, None if bias is None else bias.to(x.dtype))
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        return linear_op.linear(x, self.parts(), self.text, self.planes or 0, index, bias)

    def path(self, vectors: int, dtype: torch.dtype, index: int = 0) -> matmul.Path:
        """The kernel that multiplies this many vectors of ``dtype`` on the buffers' device, and why not the usual one.

        The weight is prepared as the product does it.
        """
        if self.exact:
            return matmul.Path("dequantize", "exact=True: the matrix is decoded and multiplied by torch")
        return linear_op.path_of(self.parts(), self.text, self.planes or 0, index, vectors, dtype)

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Put tensors (suffix -> part) in the place of the buffers, without copying."""
        for name in self.names:
            self._buffers[name] = tensors[name.removeprefix(self.prefix)]

    def release(self, dtype: torch.dtype, counts: Sequence[int]) -> None:
        """On a GPU, for good: free the buffers where no product of these numbers of vectors of ``dtype`` reads them.

        Every one of the products has run before. What is left multiplies, and cannot be saved or moved.
        """
        held = linear_op.release(self.parts(), self.text, self.planes or 0, dtype, counts, exact=self._decodes)
        self.fill(dict(zip(suffixes(self.text), held, strict=True)))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Moves and conversions of the module. Parts are passed as integers, which no conversion changes."""
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
            found = f"a stack of shape {list(spec.shape)}"
            raise error("BCQ-E552", found=found, expected="one matrix; BcqStack takes stacks")
        super().__init__(spec, device=device, **options)
        self.in_features, self.out_features = spec.columns, spec.out
        self.register_buffer("bias", torch.empty(spec.out, dtype=dtype, device=device) if bias else None)

    @classmethod
    def from_weight(
        cls, weight: BcqWeight, bias: Tensor | None = None, *, trainable_scales: bool = False, **options: Any
    ) -> Self:
        """A layer over a weight, which is read and checked; ``bias`` (out) or None.

        ``trainable_scales``: a :class:`TrainableBcqLinear`, whose plane scales and biases are trained.
        """
        refuse_bias(weight.spec, bias)
        if trainable_scales:
            refused = [name for name in ("exact", "planes") if options.pop(name, None)]
            if refused:
                found = f"{refused[0]} with trainable_scales"
                raise error("BCQ-E302", found=found, expected="all planes, as they are while trained")
            return cast("Self", TrainableBcqLinear(weight, bias, **options))
        layer = super().from_weight(weight, **options)
        if bias is not None:
            layer.bias = bias.detach().clone()
        return layer

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) -> (..., out)."""
        return self.product(x, self.bias)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, bias={self.bias is not None}"


class BcqStack(BcqModule):
    """A stack of matrices (E, out, in), such as the experts of a layer: ``stack(x, e)`` multiplies with matrix e."""

    def __init__(self, spec: WeightSpec, **options: Any) -> None:
        """Empty: for ``load_state_dict``. ``options``: those of :class:`BcqModule`."""
        if len(spec.shape) != 3:
            raise error("BCQ-E552", found=f"a weight of shape {list(spec.shape)}", expected="a stack (E, out, in)")
        super().__init__(spec, **options)

    def forward(self, x: Tensor, index: int) -> Tensor:
        """(..., in) -> (..., out) with matrix ``index``."""
        return self.product(x, index=index)


class TrainableBcqLinear(BcqLinear):
    """Fine-tuning the numbers of a weight while its planes stay as they are (AlphaTuning).

    ``BcqLinear.from_weight(w, trainable_scales=True)`` makes it. A weight of any encoding but table is taken as bcq:
    ``E = z + sum of +-alpha_i``, with alpha (q, out, G) and z (out, G) of every segment as float32 parameters. An
    affine weight starts at ``alpha_i = s * 2^(q-2-i)``, ``z = s * ((2^q - 1)/2 - zp)``, which gives its values exactly
    for F16 and BF16 scales; from then on every plane has a scale of its own. Of float-zero weights the rounding inside
    the formula is left out; outliers stay fixed; scale sets for fewer planes are dropped. Planes, perm and outliers are
    buffers. Only the input is saved for the backward pass: the matrix is decoded again.
    """

    def __init__(self, weight: BcqWeight, bias: Tensor | None = None, *, prefix: str = "bcq_") -> None:
        """The weight is read and checked; ``bias`` (out) stays fixed."""
        if len(weight.shape) != 2:
            raise error("BCQ-E552", found=f"a stack of shape {list(weight.shape)}", expected="one matrix")
        weight = weight.to_canonical()
        spec = _as_bcq(weight.spec, "F32")
        super().__init__(spec, device="meta", prefix=prefix)
        held = weight.to_torch()
        for k, segment in enumerate(operand(weight).segments):
            held[f"s{k}_alpha"] = torch.from_numpy(segment.alpha.copy())
            held[f"s{k}_bias"] = torch.from_numpy(segment.z.copy())
        self.fill(held)
        self.learned = [f"{prefix}s{k}_{kind}" for k in range(len(spec.widths)) for kind in ("alpha", "bias")]
        for name in self.learned:
            start = self._buffers.pop(name)
            assert start is not None
            self.register_parameter(name, nn.Parameter(start))
        if bias is not None:
            self.bias = bias.detach().clone()
        mode = "" if spec.scheme.outliers is None else spec.scheme.outliers.mode
        self._layout = spec.widths, tuple(segment.group_size for segment in spec.scheme.segments), mode
        self._perm = prefix + "perm" if spec.scheme.perm else ""
        self._used = [f"{prefix}s{k}_{kind}" for k in range(len(spec.widths)) for kind in ("planes", "alpha", "bias")]
        if mode:
            for name in ("outlier_rows", "outlier_columns"):
                self.register_buffer(name, torch.empty(0, dtype=torch.int64), persistent=False)
            self._used += ["outlier_rows", "outlier_columns", prefix + "outlier_values"]
            self._place_outliers()

    def path(self, vectors: int, dtype: torch.dtype, index: int = 0) -> matmul.Path:
        """The same for any number of vectors."""
        return matmul.Path("dequantize", "trainable scales: the matrix is decoded and multiplied by torch")

    def _place_outliers(self) -> None:
        """Row and stored column of every outlier."""
        indptr, columns = (getattr(self, f"{self.prefix}outlier_{kind}").long() for kind in ("indptr", "indices"))
        if self._perm:
            columns = torch.argsort(getattr(self, self._perm))[columns]
        rows = torch.arange(self.out_features, device=indptr.device)
        self.outlier_rows, self.outlier_columns = torch.repeat_interleave(rows, indptr.diff()), columns

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *arguments: Any) -> None:
        super()._load_from_state_dict(state_dict, prefix, *arguments)
        if self._layout[2]:
            self._place_outliers()

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) -> (..., out); gradients reach x, alpha and z."""
        require_tensor(x, "x")
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        if self._perm:
            x = x[..., getattr(self, self._perm)]
        tensors = [getattr(self, name) for name in self._used]
        y: Tensor = _Product.apply(x, self._layout, *tensors)  # type: ignore[no-untyped-call]
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def values(self, dtype: torch.dtype | None = None, index: int = 0) -> Tensor:
        """The dense matrix (out, in) as it is now, by default in the logical dtype."""
        with torch.no_grad():
            found = _dense(self._layout, [getattr(self, name) for name in self._used])
        if self._perm:
            found = found[:, torch.argsort(getattr(self, self._perm))]
        return found.to(self.logical if dtype is None else dtype)

    def to_weight(self, name: str = "", *, dtype: Any = "F32") -> BcqWeight:
        """The weight in bcq encoding with the numbers as they are now, alpha and z rounded to ``dtype``."""
        kind = logical_name(dtype)
        if kind not in FLOATS:
            raise error("BCQ-E552", found=f"dtype {kind}", expected="F16, BF16 or F32")
        tensors = {}
        for full, part in zip(self.names, self.parts(), strict=True):
            held = part.detach().cpu()
            tensors[full.removeprefix(self.prefix)] = held.to(TORCH_DTYPES[kind]) if full in self.learned else held
        return weight_of(_as_bcq(self.spec, kind), tensors, name)


class _Product(torch.autograd.Function):
    """``x W^T`` in stored column order; the matrix is decoded for each pass and not kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layout: tuple[Any, ...], *tensors: Tensor) -> Tensor:
        ctx.layout = layout
        ctx.save_for_backward(x, *tensors)
        with dense_products(x.dtype):
            return nn.functional.linear(x, _dense(layout, tensors).to(x.dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        x, *tensors = ctx.saved_tensors
        (gradient,), (widths, sizes, mode) = gradients, ctx.layout
        found: list[Any] = [None] * (2 + len(tensors))
        if ctx.needs_input_grad[0]:
            with dense_products(gradient.dtype):
                found[0] = gradient @ _dense(ctx.layout, tensors).to(gradient.dtype)
        with dense_products(gradient.dtype):
            inner = (gradient.reshape(-1, gradient.shape[-1]).T @ x.reshape(-1, x.shape[-1])).float()
        if mode == "replace":
            rows, columns = tensors[3 * len(widths) : 3 * len(widths) + 2]
            inner = inner.index_put((rows, columns), inner.new_zeros(()))
        start = 0
        for k, (width, size) in enumerate(zip(widths, sizes, strict=True)):
            planes, alpha, _ = tensors[3 * k : 3 * k + 3]
            piece = inner[:, start : start + width]
            sums = [_group_sums(torch.where(_bits(plane, width), piece, -piece), size) for plane in planes]
            found[3 * k + 3] = torch.stack(sums).to(alpha.dtype)
            found[3 * k + 4] = _group_sums(piece, size).to(alpha.dtype)
            start += width
        return tuple(found)


def _dense(layout: tuple[Any, ...], tensors: Sequence[Tensor]) -> Tensor:
    """W (out, in) in stored column order, float32."""
    widths, sizes, mode = layout
    pieces = []
    for k, (width, size) in enumerate(zip(widths, sizes, strict=True)):
        planes, alpha, z = tensors[3 * k : 3 * k + 3]
        total = _spread(z, size, width)
        for plane, scale in zip(planes, alpha, strict=True):
            wide = _spread(scale, size, width)
            total = total + torch.where(_bits(plane, width), wide, -wide)
        pieces.append(total)
    dense = torch.cat(pieces, 1)
    if mode:
        rows, columns, values = tensors[3 * len(widths) :]
        dense = dense.index_put((rows, columns), values.float(), accumulate=mode == "add")
    return dense


def _spread(numbers: Tensor, size: int, width: int) -> Tensor:
    """(out, G) to (out, width): every group's number for each of its columns."""
    return numbers.float().repeat_interleave(size, 1)[:, :width]


def _group_sums(values: Tensor, size: int) -> Tensor:
    """(out, width) to (out, G)."""
    short = -values.shape[1] % size
    return nn.functional.pad(values, (0, short)).reshape(values.shape[0], -1, size).sum(-1)


def _bits(plane: Tensor, width: int) -> Tensor:
    """Words (out, words) to booleans (out, width)."""
    shifts = torch.arange(32, dtype=torch.int32, device=plane.device)
    return ((plane[:, :, None] >> shifts) & 1).bool().reshape(plane.shape[0], -1)[:, :width]


def _as_bcq(spec: WeightSpec, dtype: str) -> WeightSpec:
    """The same weight with every segment in bcq encoding, alpha and bias of a type."""
    segments = tuple(
        Segment(
            encoding="bcq", bits=segment.bits, group_size=segment.group_size, row=segment.row, alpha=dtype, bias=dtype
        )
        for segment in spec.scheme.segments
    )
    return replace(spec, scheme=replace(spec.scheme, segments=segments, aligned64=False))
