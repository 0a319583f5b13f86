"""How a product on binary tensor cores is carried out: types, batch, warps, buffers, and the shared memory it takes."""

from __future__ import annotations

from typing import NamedTuple

from bcqfmt.kernels.operands.outliers import NONE, Beside
from bcqfmt.kernels.runtime.limits import SHARED_LIMIT

from .layout import BitLayout

__all__ = ["BitShape", "Ring", "examples", "shape_for"]

_IN_FLIGHT = 160 * 1024  # bytes of buffers: more are slower


class Ring(NamedTuple):
    """Buffers of a product (`bit_ring`): ``slices`` warps and ``stages`` buffers for each of ``sides`` tiles.

    ``extra``: 1 where a further warp of each tile adds up outliers, else 0. ``leaving``: lanes of a warp that leave
    sums at the end of a tile.
    """

    layout: BitLayout
    slices: int
    sides: int
    stages: int
    batch: int
    extra: int = 0
    leaving: int = 8

    @property
    def threads(self) -> int:
        """Threads of a block: those that multiply, and for each tile a warp that fetches, and the one for outliers."""
        return 32 * (self.slices + 1 + self.extra) * self.sides

    @property
    def terms(self) -> int:
        """Sums that make an element of y."""
        return self.slices + self.extra

    @property
    def arrivals(self) -> int:
        """Lanes that leave sums of a tile; those of outliers are 16."""
        return self.slices * self.leaving + 16 * self.extra

    @property
    def blocks(self) -> int:
        """Blocks of a tile."""
        return -(-self.layout.chunks // self.slices)

    @property
    def sets(self) -> int:
        """Sets of numbers that a block needs at most."""
        each, sharing = 256 // self.layout.span, self.layout.sharing
        most = 0
        for first in range(0, self.layout.chunks, self.slices):
            end = min(first + self.slices, self.layout.chunks)
            most = max(most, (end * each - 1) // sharing - first * each // sharing + 1)
        return most

    @property
    def plane_bytes(self) -> int:
        """Bytes of planes in a buffer; numbers follow."""
        return self.slices * self.layout.bits * 512

    @property
    def slot_bytes(self) -> int:
        """Bytes of a buffer."""
        return self.plane_bytes + self.sets * self.layout.set_bytes

    @property
    def finished(self) -> int:
        """Tiles whose sums may be waiting to be added up; the warp for outliers needs one more (`bit_outliers`)."""
        return self.stages // self.blocks + 1 + self.extra

    @property
    def barriers(self) -> int:
        """Barriers for each of the tiles side by side: filled, free, finished, outliers."""
        return 2 * self.stages + self.finished + self.extra

    @property
    def held_bytes(self) -> int:
        """Bytes of sums of one tile."""
        return self.terms * self.batch * 64

    @property
    def held_at(self) -> int:
        """Where sums begin, counted from the buffers."""
        return self.sides * self.stages * self.slot_bytes

    @property
    def barriers_at(self) -> int:
        """Where barriers begin."""
        return self.held_at + self.sides * self.finished * self.held_bytes

    @property
    def bytes(self) -> int:
        """All of it."""
        return self.barriers_at + self.sides * self.barriers * 8


class BitShape(NamedTuple):
    """How a product is carried out: see the module. ``kind`` and ``out``: 0 float32, 1 float16, 2 bfloat16."""

    layout: BitLayout
    batch: int
    kind: int
    out: int
    parts: int  # bytes of an integer of x: 2 or 3
    reordered: bool = False
    added: bool = False
    slices: int = 8  # at most the chunks of a row
    tiles: int = 2
    stages: int = 4
    outliers: int = 0  # bytes of an entry, 0 without outliers

    @property
    def ring(self) -> Ring:
        """Its buffers."""
        return Ring(self.layout, self.slices, self.tiles, self.stages, self.batch, int(self.outliers > 0))

    @property
    def sharers(self) -> int:
        """Lanes that share a group, each with other planes of x."""
        return 4 // self.layout.places

    @property
    def held(self) -> int:
        """Planes of x of a lane."""
        return 8 * self.parts // self.sharers

    @property
    def stride(self) -> int:
        """Bytes of 128 columns of x; 16 more keep banks apart."""
        return (self.parts * 32 + 4) * 4

    @property
    def sums_at(self) -> int:
        """Where sums of x and powers of two begin."""
        return self.batch * self.layout.chunks * 2 * self.stride

    @property
    def fixed_bytes(self) -> int:
        """Shared memory for x and its sums."""
        layout = self.layout
        sums = self.batch * layout.chunks * (256 // layout.span) * layout.passes * 64
        return -(-(self.sums_at + sums) // 128) * 128

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block, outliers apart: these follow (`outlier_entries.Beside`)."""
        return -(-(self.fixed_bytes + self.ring.bytes) // 16) * 16

    @property
    def converted(self) -> bool:
        """Whether sums outgrow the 22 bits that the pattern of 1.5 * 2^23 leaves them."""
        layout = self.layout
        held = 2 * self.parts * layout.places
        most = layout.span // layout.places * (2**held - 1)
        return bool(most * (1 if layout.formula == "bcq" else 2**layout.bits - 1) >= 2**22)


def shape_for(
    layout: BitLayout, batch: int, kind: int, out: int, *, reordered: bool, added: bool, precise: bool = False,
    beside: Beside = NONE,
) -> BitShape | None:  # fmt: skip
    """The shape for a product, as measured on an H200; None where x does not fit into shared memory, or sums overflow.

    None as well for more than two vectors in groups of 16 columns, or one in groups of 8: each takes two or four passes
    there, all of them written out, and compilers give up. ``precise``: three parts of x instead of two, as good as
    float32. ``beside``: outliers.
    """
    parts = 3 if precise else 2
    if batch * layout.passes > 4:
        return None
    if parts == 3 and layout.places == 4 and layout.formula != "bcq" and layout.bits > 4:
        return None
    slices = min(8, layout.chunks)
    few = layout.chunks <= 2 * slices  # then most blocks of threads see all their weights at once
    for tiles, stages in ((2, 2),) if few else ((2, 4), (2, 3), (2, 2), (1, 3), (1, 2)):
        shape = BitShape(layout, batch, kind, out, parts, reordered, added, slices, tiles, stages, beside.size)
        if shape.ring.bytes <= _IN_FLIGHT and shape.shared_bytes + beside.bytes(batch, kind, tiles) <= SHARED_LIMIT:
            return shape
    shape = BitShape(layout, batch, kind, out, parts, reordered, added, slices, 1, 2, beside.size)
    return shape if shape.shared_bytes + beside.bytes(batch, kind, 1) <= SHARED_LIMIT else None


def examples() -> list[BitShape]:
    """Both formulas, one and two vectors, a reordered one, outliers: what has to compile without spilling."""
    return [
        BitShape(BitLayout(4, 4096, 128, "affine", "F16"), 1, 1, 1, 2, outliers=4),
        BitShape(BitLayout(4, 8192, 128, "bcq", "F16"), 1, 1, 1, 2),
        BitShape(BitLayout(3, 4096, 64, "affine", "F16"), 2, 2, 2, 2, reordered=True, added=True, tiles=1),
    ]
