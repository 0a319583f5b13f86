"""Fine-tuning the numbers of a weight while its planes stay as they are (AlphaTuning).

A weight of any encoding is taken as bcq: ``E = z + sum of +-alpha_i``, with alpha (q, out, G) and z (out, G) of every
segment as float32 parameters. An affine weight starts at ``alpha_i = s * 2^(q-2-i)``, ``z = s * ((2^q - 1)/2 - zp)``,
which gives its values exactly for F16 and BF16 scales; from then on every plane has a scale of its own. Of float-zero
weights the rounding inside the formula is left out; outliers stay fixed; scale sets for fewer planes are dropped.
Planes, perm and outliers are buffers. Nothing is saved for the backward pass but the input: the matrix is made again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from bcqfmt.container.dtypes import FLOATS, logical_name
from bcqfmt.errors import error
from bcqfmt.kernels.operands import operand
from bcqfmt.weight.scheme import Segment, WeightSpec
from bcqfmt.weight.weight import BcqWeight

from .layers import BcqLinear
from .parts import TORCH_DTYPES, weight_of

__all__ = ["TrainableBcqLinear"]


class TrainableBcqLinear(BcqLinear):
    """A :class:`BcqLinear` whose alpha and z are parameters; ``from_weight(w, trainable_scales=True)`` makes it."""

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
    """``x W^T`` in stored column order; the matrix is made for each pass and not kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layout: tuple[Any, ...], *tensors: Tensor) -> Tensor:
        ctx.layout = layout
        ctx.save_for_backward(x, *tensors)
        return nn.functional.linear(x, _dense(layout, tensors).to(x.dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        x, *tensors = ctx.saved_tensors
        (gradient,), (widths, sizes, mode) = gradients, ctx.layout
        found: list[Any] = [None] * (2 + len(tensors))
        if ctx.needs_input_grad[0]:
            found[0] = gradient @ _dense(ctx.layout, tensors).to(gradient.dtype)
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
        Segment(encoding="bcq", bits=segment.bits, group_size=segment.group_size, alpha=dtype, bias=dtype)
        for segment in spec.scheme.segments
    )
    return replace(spec, scheme=replace(spec.scheme, segments=segments, aligned64=False))
