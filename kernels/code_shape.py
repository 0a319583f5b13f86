"""How a product of 4-bit codes with up to eight vectors is carried out: types, warps, buffers, shared memory."""

from __future__ import annotations

from typing import NamedTuple

from bcqfmt.kernels.mixed_layout import FOUR_BYTES, FOUR_COLUMNS
from bcqfmt.kernels.mixed_shape import SHARED_LIMIT

__all__ = ["BATCH", "PREFERRED", "SHAPES", "CodeShape", "CodeSpace", "space_for"]

BATCH = 8  # vectors of one launch
PREFERRED = ((8, 2), (4, 4), (8, 1), (4, 1), (2, 1), (1, 1))  # warps of a tile, tiles side by side: the first that fits


class CodeShape(NamedTuple):
    """What a kernel is compiled for.

    ``kind``: 1 float16, 2 bfloat16; ``out``: these or 0, float32. ``slices`` warps share a tile, ``tiles`` tiles are
    handled side by side.
    """

    batch: int
    kind: int
    out: int
    slices: int = 8
    tiles: int = 2

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * self.slices * self.tiles

    @property
    def sets(self) -> int:
        """Sets of four vectors: the tensor cores multiply eight columns, two for each vector."""
        return -(-self.batch // 4)


SHAPES = (CodeShape(4, 1, 1), CodeShape(8, 2, 0))  # for the compile check


class CodeSpace(NamedTuple):
    """What is decided at launch: buffers of a warp."""

    stages: int
    shared_bytes: int


def space_for(shape: CodeShape, units: int) -> CodeSpace | None:
    """As many buffers as fit, up to 10; None where the vectors leave no place for two."""
    warps, vectors, padded = shape.slices * shape.tiles, 4 * shape.sets, units * FOUR_COLUMNS
    fixed = vectors * (2 * padded + 64) + units * 5 * vectors * 4 + 2 * warps * vectors * 64
    stages = min((SHARED_LIMIT - fixed) // (warps * (FOUR_BYTES + 8)), 10)
    if stages < 2:
        return None
    return CodeSpace(stages, fixed + warps * stages * (FOUR_BYTES + 8))
