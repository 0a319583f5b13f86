"""How a product on binary tensor cores is carried out: types, batch, warps, buffers, and the shared memory it takes."""

from __future__ import annotations

from typing import NamedTuple

from bcqfmt.kernels.bit_layout import BitLayout

__all__ = ["SHARED_LIMIT", "BitShape", "examples", "shape_for"]

SHARED_LIMIT = 227 * 1024  # of a block on sm_90


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

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * self.slices * self.tiles

    @property
    def fixed_bytes(self) -> int:
        """Shared memory for x, its sums and the partial sums."""
        chunks = self.layout.chunks
        bits = self.batch * chunks * 2 * (self.parts * 32 + 4) * 4
        sums = self.batch * chunks * (256 // self.layout.span) * self.layout.passes * 64
        return -(-(bits + sums + 2 * self.slices * self.tiles * self.batch * 64) // 128) * 128

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block."""
        return self.fixed_bytes + self.slices * self.tiles * self.stages * (self.layout.unit_bytes + 8)

    @property
    def converted(self) -> bool:
        """Whether sums outgrow the 22 bits that the pattern of 1.5 * 2^23 leaves them."""
        layout = self.layout
        held = 2 * self.parts * layout.places
        most = layout.span // layout.places * (2**held - 1)
        return bool(most * (1 if layout.formula == "bcq" else 2**layout.bits - 1) >= 2**22)


def shape_for(
    layout: BitLayout, batch: int, kind: int, out: int, *, reordered: bool, added: bool, precise: bool = False
) -> BitShape | None:
    """The shape for a product, as measured on an H200; None where x does not fit into shared memory, or sums overflow.

    ``precise``: three parts of x instead of two, as good as float32.
    """
    parts = 3 if precise else 2
    if parts == 3 and layout.places == 4 and layout.formula != "bcq" and layout.bits > 4:
        return None
    slices = min(8, layout.chunks)
    for tiles, stages in ((2, 4), (2, 3), (2, 2), (1, 3), (1, 2)):
        shape = BitShape(layout, batch, kind, out, parts, reordered, added, slices, tiles, stages)
        if shape.shared_bytes <= SHARED_LIMIT:
            return shape
    return None


def examples() -> list[BitShape]:
    """Both formulas, one and two vectors, a reordered one: what has to compile without spilling."""
    return [
        BitShape(BitLayout(4, 8192, 128, "bcq", "F16"), 1, 1, 1, 2),
        BitShape(BitLayout(3, 4096, 64, "affine", "F16"), 2, 2, 2, 2, reordered=True, added=True, tiles=1),
    ]
