"""How a product with 2/4-bit weights is carried out: types, warps, buffers, and the shared memory it takes."""

from __future__ import annotations

from typing import NamedTuple

from bcqfmt.kernels.operands.outliers import OutlierNeeds, x_bytes
from bcqfmt.kernels.runtime.limits import SHARED_LIMIT

from .layout import FOUR_COLUMNS, TWO_BYTES, TWO_COLUMNS


class MixedShape(NamedTuple):
    """What a kernel is compiled for.

    ``kind`` and ``out``: 0 float32, 1 float16, 2 bfloat16. ``outliers``: bytes of an entry, 0 without outliers, 4 with
    float16 values, 8 with float32 ones. ``slices`` warps share a tile, ``sides`` tiles are handled side by side, each
    warp multiplies a unit at a time. Each of ``stages`` buffers of a tile holds a unit for each of its warps.
    """

    batch: int
    kind: int
    out: int
    outliers: int
    slices: int = 8
    sides: int = 2
    stages: int = 4

    @property
    def warps(self) -> int:
        return self.slices * self.sides

    @property
    def threads(self) -> int:
        """Threads of a block: the consumers, and for each tile a producer warp and one for the epilogue."""
        return 32 * (self.warps + 2 * self.sides)

    @property
    def parts(self) -> int:
        """16-bit integers of an element of x: float32 gets a second one for the remainder."""
        return 2 if self.kind == 0 else 1

    @property
    def slot_bytes(self) -> int:
        return self.slices * TWO_BYTES

    @property
    def held_bytes(self) -> int:
        """Bytes of the sums of a tile."""
        return self.slices * self.batch * 64

    @property
    def barriers(self) -> int:
        """Barriers of a tile: filled and free for every buffer; two for sums left, two for sums taken; outliers.

        One more entry of the same size holds a zero.
        """
        return 2 * self.stages + 6


class MixedSpace(NamedTuple):
    """Bytes for the outliers of a tile, bytes of shared memory."""

    room: int
    shared_bytes: int


def space_for(shape: MixedShape, twos: int, fours: int, columns: int, outliers: OutlierNeeds) -> MixedSpace | None:
    """None where it does not fit."""
    padded = twos * TWO_COLUMNS + fours * FOUR_COLUMNS
    fixed = shape.batch * (x_bytes(columns, shape.kind) + shape.parts * (padded * 4 + padded // 2))
    side = 2 * shape.held_bytes + outliers.room + shape.stages * shape.slot_bytes + shape.barriers * 8
    whole = fixed + shape.sides * side
    return MixedSpace(outliers.room, whole) if whole <= SHARED_LIMIT else None


def preferred(vectors: int, outliers: float) -> list[tuple[int, int, int]]:
    """Slices, sides and stages, the best first, as measured on an H200; the caller takes the first that fits.

    ``vectors``: integers of an element of x for all vectors together; ``outliers``: their share of all elements.
    """
    one = [(8, 1, 3), (8, 1, 2), (4, 1, 2), (1, 1, 2)]
    if vectors > 1:  # more registers
        return [(8, 1, 4), *one]
    best = (8, 2, 4)
    if outliers:  # adding them up takes time: more tiles side by side, with fewer consumer warps each
        best = (6, 3, 3) if outliers <= 0.01 else (5, 3, 4)
    return [best, (8, 2, 3), (8, 2, 2), *one]
