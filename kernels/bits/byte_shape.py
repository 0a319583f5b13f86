"""How a product of bit planes with bytes of x is carried out: types, batch, warps, buffers, shared memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

from bcqfmt.kernels.operands.outliers import NONE, Beside
from bcqfmt.kernels.runtime.limits import SHARED_LIMIT

from .layout import BitLayout
from .shape import Ring

__all__ = ["BATCH", "ByteShape", "byte_shape_for", "examples", "first_that_fits"]

BATCH = 8  # vectors of one launch
_PREFERRED = ((8, 2, 3), (8, 2, 2), (4, 2, 2), (4, 1, 2))  # slices, tiles, stages: the first that fits


class ByteShape(NamedTuple):
    """What a kernel is compiled for. ``kind``: 1 float16, 2 bfloat16; ``out``: these or 0, float32."""

    layout: BitLayout
    batch: int
    kind: int
    out: int
    reordered: bool = False
    added: bool = False
    slices: int = 8  # at most the chunks of a row
    tiles: int = 2
    stages: int = 3
    outliers: int = 0  # bytes of an entry, 0 without outliers

    @property
    def ring(self) -> Ring:
        """Its buffers."""
        return Ring(
            self.layout,
            self.slices,
            self.tiles,
            self.stages,
            self.batch,
            int(self.outliers > 0),
            32 // self.layout.places,
        )

    @property
    def sets(self) -> int:
        """Products of eight columns: a pair of columns for every vector and every group side by side."""
        return -(-self.batch * self.layout.places // 4)

    @property
    def stride(self) -> int:
        """Bytes of 128 columns of x; 64 more keep banks apart."""
        return 1024 * self.sets + 64

    @property
    def sums_at(self) -> int:
        """Where powers of two and sums of x begin."""
        return 2 * self.layout.chunks * self.stride

    @property
    def fixed_bytes(self) -> int:
        """Shared memory for x and its sums."""
        return -(-(self.sums_at + 2 * self.layout.chunks * self.sets * 32) // 128) * 128

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block, outliers apart: these follow (`outlier_entries.Beside`)."""
        return -(-(self.fixed_bytes + self.ring.bytes) // 16) * 16


Shape = TypeVar("Shape", bound=ByteShape)


def byte_shape_for(
    layout: BitLayout, batch: int, kind: int, out: int, *, reordered: bool, added: bool, beside: Beside = NONE
) -> ByteShape | None:
    """The shape for a product, as measured on an H200; None where x does not fit into shared memory.

    None as well for float32, whose 24 bits two bytes do not hold, and for groups of 8 and 16.
    """
    if kind == 0 or layout.passes > 1 or not 1 <= batch <= BATCH:
        return None
    return first_that_fits(ByteShape(layout, batch, kind, out, reordered, added), _PREFERRED, beside)


def first_that_fits(shape: Shape, choices: Sequence[tuple[int, int, int]], beside: Beside) -> Shape | None:
    """``shape`` with the first of these slices, tiles and stages with which all fits into shared memory."""
    for slices, tiles, stages in choices:
        warps = min(slices, shape.layout.chunks)
        found = shape._replace(slices=warps, tiles=tiles, stages=stages, outliers=beside.size)
        if found.shared_bytes + beside.bytes(shape.batch, shape.kind, tiles) <= SHARED_LIMIT:
            return found
    return None


def examples() -> list[ByteShape]:
    """Both formulas, four vectors and one with short groups, outliers: what has to compile without spilling."""
    return [
        ByteShape(BitLayout(4, 8192, 128, "bcq", "F16"), 4, 1, 1),
        ByteShape(BitLayout(4, 4096, 32, "affine", "F16"), 1, 2, 2, reordered=True, added=True, tiles=1),
        ByteShape(BitLayout(3, 4096, 256, "affine", "F16"), 8, 1, 0),
        ByteShape(BitLayout(4, 4096, 128, "affine", "F16"), 4, 1, 1, outliers=4),
    ]
