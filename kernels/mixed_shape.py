"""How a product with 2/4-bit weights is carried out: types, warps, buffers, and the shared memory it takes."""

from __future__ import annotations

from typing import NamedTuple

from bcqfmt.kernels.mixed_layout import FOUR_COLUMNS, TWO_BYTES, TWO_COLUMNS

__all__ = ["PREFERRED", "SHAPES", "SHARED_LIMIT", "SLICES", "MixedShape", "MixedSpace", "space_for"]

SHARED_LIMIT = 227 * 1024  # of a block on sm_90
SLICES = 8  # warps that share a tile, for its outliers two rows each
# Warps of a tile, tiles, units at a time, buffers at least: the first that fits (two units need one vector, see below).
PREFERRED = ((4, 6, 2, 3), (4, 5, 2, 3), (4, 4, 2, 2), (8, 2, 1, 2))
ROOM = 4096  # bytes of outliers that a warp asks for ahead, at most


class MixedShape(NamedTuple):
    """What a kernel is compiled for.

    ``kind`` and ``out``: 0 float32, 1 float16, 2 bfloat16. ``outliers``: bytes of an entry, 0 without outliers, 4 with
    float16 values, 8 with float32 ones. ``slices`` warps share a tile (a power of two up to 16), ``tiles`` tiles are
    handled side by side, ``deep`` units are copied and multiplied at a time (1 or 2). Without ``overlap`` a warp waits
    for all its copies before it multiplies.
    """

    batch: int
    kind: int
    out: int
    outliers: int
    slices: int = SLICES
    tiles: int = 2
    overlap: bool = True
    deep: int = 1

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * self.slices * self.tiles

    @property
    def parts(self) -> int:
        """16-bit integers of an element of x: float32 gets a second one for what the first leaves over."""
        return 2 if self.kind == 0 else 1


SHAPES = (  # what the compile check looks at
    MixedShape(1, 1, 1, 4, 4, 6, deep=2),
    MixedShape(1, 1, 1, 0, 4, 5, deep=2),
    MixedShape(1, 1, 1, 4, 4, 5, overlap=False, deep=2),
    MixedShape(1, 2, 2, 4),
    MixedShape(2, 2, 0, 8),
    MixedShape(1, 0, 0, 8),
)


class MixedSpace(NamedTuple):
    """What is decided at launch: buffers of a warp, bytes for the outliers of a warp."""

    stages: int
    room: int
    shared_bytes: int


def space_for(shape: MixedShape, twos: int, fours: int, columns: int, room: int) -> MixedSpace | None:
    """As many buffers as fit, up to 10 (2 without overlap); None where x leaves no place for two."""
    warps = shape.slices * shape.tiles
    padded = twos * TWO_COLUMNS + fours * FOUR_COLUMNS
    room = min(-(-room // 16) * 16, ROOM) if shape.outliers else 0
    original = -(-(columns + 1) * (4 if shape.kind == 0 else 2) // 16) * 16
    vectors = shape.batch * shape.parts
    fixed = shape.batch * original + vectors * (padded * 2 + padded // 2)
    fixed += 2 * (warps + shape.tiles) * shape.batch * 64 + warps * (room + 8)
    buffer = shape.deep * TWO_BYTES + 8
    stages = min((SHARED_LIMIT - fixed) // (warps * buffer), 10 if shape.overlap else 2)
    if stages < 2:
        return None
    return MixedSpace(stages, room, fixed + warps * stages * buffer)
