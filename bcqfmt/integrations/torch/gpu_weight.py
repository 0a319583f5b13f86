"""Weights whose parts are on a GPU, rearranged there with torch for the kernels, not on the host.

`dequantize` reads the planes of a BCQ file as they are stored, without a copy; products get rearranged copies
(`kernels.bits.layout`, `kernels.gemm.layout`), and where a matrix is decoded for many vectors, it is from the second of
them. This takes seconds for a large model, where the host takes minutes. Weights with a perm, outliers,
tables, floating-point zeros or scales made of codes or bytes, and weights whose content fails a check here, go through
the host, which checks them in full and reports errors.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Collection, Mapping
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from bcqfmt.container.dtypes import FLOATS
from bcqfmt.errors import error
from bcqfmt.kernels import matmul
from bcqfmt.kernels.bits import BitOperand, BitSegment, fits
from bcqfmt.kernels.bits.layout import BitLayout, group_for, pack_numbers, pack_planes
from bcqfmt.kernels.gemm.dense import dense_of
from bcqfmt.kernels.operands.device import DeviceOperand, DeviceSegment, check_operand, in_tiles
from bcqfmt.kernels.runtime import device
from bcqfmt.weight.scheme import PackedZero, WeightSpec

_FLOATS = {torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32"}


class _Piece(SimpleNamespace):
    """A segment; first, second as `operands.OperandSegment` has them, as stored.

    ``stored``: the planes (q, out, words) int32, or None where their memory was freed.
    """

    stored: Tensor | None
    first: Tensor
    second: Tensor
    start: int
    width: int
    group_size: int
    bits: int
    formula: str

    @property
    def planes(self) -> Tensor:
        """(q, out, words) int32; BCQ-E305 if nothing has them any more."""
        if self.stored is None:
            expected = "products, and values in 16 bits"
            raise error("BCQ-E305", found="a weight whose stored planes were freed", expected=expected)
        return self.stored


def gpu_weight(spec: WeightSpec, parts: Mapping[str, Tensor]) -> GpuWeight | None:
    """A weight over parts on a GPU (suffix -> tensor); None where it has to be prepared on the host.

    It does not keep the planes alive: the caller has to, for as long as it is used.
    """
    scheme = spec.scheme
    if len(spec.shape) != 2 or scheme.aligned64 or scheme.perm or scheme.outliers is not None or scheme.nonfinite:
        return None
    pieces, start = [], 0
    for k, width in enumerate(spec.widths):
        piece = _piece(spec, k, start, parts)
        if piece is None:
            return None
        pieces.append(piece)
        start += width
    return GpuWeight(spec, pieces)


def _piece(spec: WeightSpec, k: int, start: int, parts: Mapping[str, Tensor]) -> _Piece | None:
    """One segment, its content checked: padding zero, numbers finite, zero points in range (BCQ-V401 to V405)."""
    segment, width, groups = spec.scheme.segments[k], spec.widths[k], spec.groups(k)
    if segment.precisions:
        return None
    own = {suffix.partition("_")[2]: part for suffix, part in parts.items() if suffix.startswith(f"s{k}_")}
    planes = own["planes"]
    clean = width % 32 == 0 or not bool((planes[..., -1] & ~((1 << width % 32) - 1)).any())
    if segment.encoding == "bcq":
        first, second = own["alpha"], own.get("bias")
        second = torch.zeros_like(first[0]) if second is None else second
    elif segment.encoding == "affine" and segment.scale in FLOATS:
        first = own["scale"]
        if isinstance(segment.zero, PackedZero):
            codes, padding = _unpacked(own["zero"], segment.zero.bits, groups)
            clean = clean and not padding and int(codes.max()) <= 2**segment.bits
            second = codes.to(first.dtype)
        elif isinstance(segment.zero, int):
            second = torch.full_like(first, segment.zero)
        else:
            return None
    else:
        return None
    if not clean or not bool(torch.isfinite(first).all()) or not bool(torch.isfinite(second).all()):
        return None
    kind = first.dtype if first.dtype == second.dtype else torch.float32
    return _Piece(
        stored=_borrowed(planes), first=first.to(kind, copy=True), second=second.to(kind, copy=True), start=start,
        width=width, group_size=segment.group_size, bits=segment.bits, formula=segment.encoding,
    )  # fmt: skip


class _Memory:
    """The address of words on a GPU, as torch reads it."""

    def __init__(self, words: Tensor) -> None:
        shape, place = tuple(words.shape), words.data_ptr()
        self.__cuda_array_interface__ = {"shape": shape, "typestr": "<i4", "data": (place, False), "version": 3}


def _borrowed(words: Tensor) -> Tensor:
    """A tensor over the same memory, which it does not keep alive; a copy if kernels cannot read it as it is."""
    if words.data_ptr() % 16 or not words.is_contiguous():
        return words.clone(memory_format=torch.contiguous_format)
    if words.device.type == "cuda":
        return torch.as_tensor(_Memory(words), device=words.device)
    memory = (ctypes.c_int32 * words.numel()).from_address(words.data_ptr())  # in the simulator the device is the host
    return torch.frombuffer(memory, dtype=torch.int32).reshape(words.shape)


def _unpacked(words: Tensor, bits: int, count: int) -> tuple[Tensor, bool]:
    """Fields (out, count) of packed(bits) words (out, n) int32, and whether there are bits set after the last one."""
    at = torch.arange(count * bits, device=words.device)
    ones = words[:, at // 32] >> (at % 32).to(torch.int32) & 1
    weights = 2 ** torch.arange(bits, device=words.device, dtype=torch.int32)
    rest = torch.arange(count * bits, words.shape[1] * 32, device=words.device)
    padding = bool((words[:, rest // 32] >> (rest % 32).to(torch.int32) & 1).any()) if len(rest) else False
    return (ones.reshape(len(words), count, bits) * weights).sum(-1), padding


class GpuWeight(matmul.MatmulWeight):
    """A weight for `kernels.matmul`; each order of it is made on the device when it is first used."""

    def __init__(self, spec: WeightSpec, pieces: list[_Piece]) -> None:
        """Not for callers: see :func:`gpu_weight`."""
        self._spec, self._pieces = spec, pieces
        outline: Any = SimpleNamespace(shape=spec.shape, segments=tuple(pieces), outliers=None, perm=None, name="")
        super().__init__(outline, pieces[0].planes.device)

    @cached_property
    def linear(self) -> bool:
        """Whether float32 holds alpha and z; float16 numbers always fit."""
        largest = 0.0
        for piece in self._pieces:
            if piece.first.dtype != torch.float16:
                scale = 1.0 if piece.formula == "bcq" else 2.0 ** (piece.bits + 1)
                largest = max(largest, float(piece.first.abs().max()) * scale)
        return largest < float(torch.finfo(torch.float32).max)

    @cached_property
    def bits(self) -> BitOperand | None:
        """For the fast product."""
        layouts = [layout_of(piece) for piece in self._pieces]
        if not self.linear or not fits(layouts, self._place):
            return None
        segments = tuple(
            BitSegment(
                layout=layout, planes=pack_planes(layout, piece.planes),
                numbers=pack_numbers(layout, piece.first, piece.second), start=piece.start,
            )
            for piece, layout in zip(self._pieces, layouts, strict=True)
            if layout is not None
        )  # fmt: skip
        device.settle(segments[-1].planes)
        return BitOperand(shape=self.operand.shape, segments=segments, perm=None, settled=True)

    @cached_property
    def look_up(self) -> DeviceOperand:
        """For look-ups: words and numbers of neighbouring rows side by side."""
        segments = []
        for piece in self._pieces:
            alpha, z = linear_numbers(piece)
            half = piece.formula == "bcq" and piece.first.dtype == piece.second.dtype == torch.float16
            numbers = "F16" if half else "F32"
            tiles = in_tiles(piece.planes, piece.width, piece.group_size)
            segments.append(_segment(piece, tiles, alpha.permute(2, 0, 1), z.T, "bcq", numbers))
        return self._operand("lut-gemm", segments)

    def let_go(self, paths: Collection[str], dtype: str) -> bool:
        """Whether the memory of the parts may be freed, if from now on there are only products on ``paths``.

        Each of them has run, with x of ``dtype``.
        """
        if "dequantize" in paths and self.gemm(dtype) is None:
            return False
        for piece in self._pieces:
            piece.stored = None
        self.__dict__.pop("exact", None)
        return True

    @cached_property
    def exact(self) -> DeviceOperand:
        """For dequantizing: the planes as they are stored."""
        segments = [_segment(piece, piece.planes, piece.first, piece.second, piece.formula) for piece in self._pieces]
        return self._operand("canonical", segments)

    def decoder(self, dtype: str, *, twice: bool = True) -> tuple[Any, Callable[[], Any]]:
        """As of any weight, from the codes of `gemm` where there are some: the stored planes are not read."""
        many = self.gemm(dtype)
        if many is None:
            return super().decoder(dtype)
        numbers = [(piece.first, piece.second) for piece in self._pieces]
        return many.segments[0].codes, dense_of(many, numbers, self._spec.dtype, dtype, twice=twice)

    def values(self, dtype: str) -> Tensor:
        """As of any weight, also where the stored planes were freed."""
        freed = any(piece.stored is None for piece in self._pieces) and self.gemm(dtype) is not None
        found: Tensor = self.decoder(dtype, twice=False)[1]() if freed else super().values(dtype)
        return found

    def _operand(self, layout: str, segments: list[DeviceSegment]) -> DeviceOperand:
        made = DeviceOperand(
            shape=(self._spec.out, self._spec.columns), dtype=self._spec.dtype, layout=layout, segments=tuple(segments)
        )
        check_operand(made)
        return made


def _segment(
    piece: _Piece, planes: Tensor, first: Tensor, second: Tensor, formula: str, numbers: str = "F32"
) -> DeviceSegment:
    kind = torch.float16 if numbers == "F16" else torch.float32
    return DeviceSegment(
        planes=planes, first=first.to(kind).contiguous(), second=second.to(kind).contiguous(), start=piece.start,
        width=piece.width, group_size=piece.group_size, bits=piece.bits, formula=formula, numbers=numbers, finite=True,
    )  # fmt: skip


def linear_numbers(piece: _Piece) -> tuple[Tensor, Tensor]:
    """alpha (q, out, G) and z (out, G) of the linear reading, float32."""
    first, second = piece.first.double(), piece.second.double()
    if piece.formula == "bcq":
        return first.float(), second.float()
    q = piece.bits
    alpha = torch.stack([first * 2.0 ** (q - 2 - i) for i in range(q)])
    return alpha.float(), (first * ((2.0**q - 1) * 0.5 - second)).float()


def layout_of(piece: _Piece) -> BitLayout | None:
    """As `kernels.bits.layout.layout_of`, with numbers in the type that they are stored in."""
    g = group_for(piece.width, piece.group_size)
    if g is None:
        return None
    same = piece.first.dtype == piece.second.dtype
    return BitLayout(piece.bits, piece.width, g, piece.formula, _FLOATS[piece.first.dtype] if same else "F32")
