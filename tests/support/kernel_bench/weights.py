"""One random weight on a device in every form that the products of the benchmarks take: all hold the same matrix.

Its planes and numbers are those of a BCQ file. Scales of affine weights have four significant bits: then float16 and
bfloat16 hold them, and their products with zero points, without rounding, and so does `random_vectors` with x.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bcqfmt.integrations.torch.gpu_weight import GpuWeight, gpu_weight
from bcqfmt.kernels.bits import BitOperand, BitSegment
from bcqfmt.kernels.bits.layout import BitLayout, pack_numbers, pack_planes
from bcqfmt.weight.scheme import Scheme, Segment, WeightSpec

__all__ = ["Weight", "copies", "random_vectors", "random_weight"]

_ELEMENTS = 1 << 25  # of a dense matrix that are made at a time, in float64


@dataclass(frozen=True, kw_only=True, eq=False)
class Weight:
    """A matrix (rows, columns) of one segment, columns a multiple of 32 and of ``group_size``.

    ``planes`` (q, rows, columns / 32) int32. bcq: ``first`` alpha (q, rows, G), ``second`` bias (rows, G). affine:
    ``first`` scale and ``second`` zero points, both (rows, G). Numbers are float16. table: ``second`` 16 integers.
    """

    formula: str
    group_size: int
    planes: Tensor
    first: Tensor
    second: Tensor

    @property
    def bits(self) -> int:
        """q."""
        return len(self.planes)

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, columns)."""
        return self.planes.shape[1], 32 * self.planes.shape[2]

    def operand(self, layout: BitLayout) -> BitOperand:
        """For `bit_gemv`; settled once the device has been waited for."""
        numbers = pack_numbers(layout, self.first, self.second)
        segment = BitSegment(layout=layout, planes=pack_planes(layout, self.planes), numbers=numbers, start=0)
        return BitOperand(shape=self.shape, segments=(segment,), perm=None, settled=True)

    def placed(self) -> GpuWeight:
        """For `matmul`, of a bcq weight; it may be used only while this one is there."""
        segment = Segment(encoding="bcq", bits=self.bits, group_size=self.group_size, alpha="F16", bias="F16")
        scheme = Scheme(segments=(segment,))
        spec = WeightSpec(scheme=scheme, shape=self.shape, dtype="F16", widths=self.shape[1:])
        made = gpu_weight(spec, {"s0_planes": self.planes, "s0_alpha": self.first, "s0_bias": self.second})
        assert made is not None
        return made

    def lut_gemm(self) -> tuple[Tensor, Tensor, Tensor]:
        """Words (columns / 32, q, rows), alpha (G, q, rows) and bias (G, rows) of a bcq weight, for LUT-GEMM."""
        alpha = self.first.permute(2, 0, 1).contiguous()
        return self.planes.permute(2, 0, 1).contiguous(), alpha, self.second.T.contiguous()

    def tinygemm(self) -> tuple[Tensor, Tensor]:
        """Codes (rows, columns / 2) uint8, two in a byte, and (scale, offset) pairs (G, rows, 2) bfloat16.

        An element is ``scale * (code - 8) + offset``. A bcq weight has no such form: only its codes are used.
        """
        codes = self.codes(0, self.shape[0]).to(torch.uint8)
        scale, zero = (self.first if self.formula == "affine" else self.first[0]).float(), self.second.float()
        pairs = torch.stack([scale, scale * (8 - zero)], 2).bfloat16()
        return (codes[:, ::2] << 4 | codes[:, 1::2]).contiguous(), pairs.transpose(0, 1).contiguous()

    def dense(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The matrix in float16, and ``x W^T`` (batch, rows) of the exact one in float64."""
        rows, columns = self.shape
        made = torch.empty(rows, columns, dtype=torch.float16, device=self.planes.device)
        exact = torch.empty(len(x), rows, dtype=torch.float64, device=self.planes.device)
        step = max(1, _ELEMENTS // columns)
        for start in range(0, rows, step):
            values = self.values(start, min(start + step, rows))
            made[start : start + step] = values
            exact[:, start : start + step] = x.double() @ values.T
        return made, exact

    def values(self, start: int, stop: int) -> Tensor:
        """Elements of rows ``start .. stop``, (rows, columns) float64; exact."""
        first, second = self.first[..., start:stop, :, None].double(), self.second.double()
        shape = (stop - start, first.shape[-2], self.group_size)
        if self.formula == "table":
            return (first * second[self.codes(start, stop).reshape(shape)]).reshape(stop - start, -1)
        second = second[start:stop, :, None]
        if self.formula == "affine":
            found = first * (self.codes(start, stop).reshape(shape) - second)
        else:
            found = second.expand(shape).clone()
            for i, alpha in enumerate(first):
                found += alpha * (2 * self._ones(i, start, stop).reshape(shape) - 1)
        return found.reshape(stop - start, -1)

    def codes(self, start: int, stop: int) -> Tensor:
        """Codes of rows ``start .. stop``, (rows, columns) int32; plane 0 is the most significant bit."""
        found = self._ones(0, start, stop)
        for i in range(1, self.bits):
            found = 2 * found + self._ones(i, start, stop)
        return found

    def _ones(self, plane: int, start: int, stop: int) -> Tensor:
        places = torch.arange(32, dtype=torch.int32, device=self.planes.device)
        return (self.planes[plane, start:stop, :, None] >> places & 1).reshape(stop - start, -1)


def random_weight(formula: str, q: int, rows: int, columns: int, g: int) -> Weight:
    """Random planes; numbers so small that float16 holds products with `random_vectors`."""
    planes = torch.randint(-(2**31), 2**31 - 1, (q, rows, columns // 32), device="cuda", dtype=torch.int32)
    numbers = (rows, columns // g)
    if formula == "bcq":
        first = torch.rand(q, *numbers, device="cuda") * 0.1
        second = torch.rand(numbers, device="cuda") * 0.1
    else:
        first = torch.randint(8, 16, numbers, device="cuda") / 1024
        second = torch.randint(0, 2**q, numbers, device="cuda")
    return Weight(formula=formula, group_size=g, planes=planes, first=first.half(), second=second.half())


def random_vectors(batch: int, columns: int) -> Tensor:
    """(batch, columns) float16; bfloat16 holds them as well."""
    return torch.randn(batch, columns, device="cuda").bfloat16().half()


def copies(operand: BitOperand, count: int) -> Sequence[BitOperand]:
    """The operand, and as many copies of it elsewhere in memory as make up ``count``."""
    segment = operand.segments[0]
    elsewhere = (
        replace(segment, planes=segment.planes.clone(), numbers=segment.numbers.clone()) for _ in range(count - 1)
    )
    return [operand, *(replace(operand, segments=(copy,)) for copy in elsewhere)]
