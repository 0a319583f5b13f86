"""How a product is carried out: types, batch, warps, pipeline stages, shared memory, and which kernel does it.

`BitShape`: x as bit planes, on binary tensor cores. `ByteShape`: x as bytes, on integer tensor cores, for several
vectors or groups of 32 columns. `ShortShape`: the same for groups of 8 and 16 columns.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

from bcqfmt.kernels.operands.outliers import NO_OUTLIERS, OutlierNeeds
from bcqfmt.kernels.runtime.limits import SHARED_LIMIT

from .layout import BitLayout

_IN_FLIGHT = 160 * 1024  # bytes of buffers: more are slower
BATCH = 8  # vectors of one launch
_BYTE_CHOICES = ((8, 2, 3), (8, 2, 2), (4, 2, 2), (4, 1, 2))  # slices, tiles, stages: the first that fits
_PAIR = 64  # bytes of 32 columns of x: high and low bytes
_FEW = 16  # up to this many chunks in a row, fewer warps per tile are faster
# slices, tiles, stages: the first that fits
_SHORT_CHOICES = (
    (8, 2, 4), (8, 2, 3), (4, 3, 3), (6, 2, 2), (8, 1, 2), (4, 2, 3), (4, 2, 2), (7, 1, 2), (6, 1, 2), (4, 1, 2),
    (3, 1, 2), (2, 1, 2),
)  # fmt: skip


class Chip(NamedTuple):
    """What a GPU offers: ``bulk`` copies (since sm_90; before, lanes copy 16 bytes each), shared memory of a block."""

    bulk: bool = True
    shared: int = SHARED_LIMIT


SM_90 = Chip()


class Wanted(NamedTuple):
    """A product of one segment: ``batch`` vectors of ``kind``, a result of ``out`` (0 float32, 1 float16, 2 bfloat16).

    ``added``: to an addend. ``precise``: as exact as float32, possible only with bits. ``needs``: of the outliers,
    only with bulk copies.
    """

    layout: BitLayout
    batch: int
    kind: int
    out: int
    reordered: bool = False
    added: bool = False
    precise: bool = False
    needs: OutlierNeeds = NO_OUTLIERS
    chip: Chip = SM_90


class Ring(NamedTuple):
    """Buffers of a product (`ring`): ``slices`` warps and ``stages`` buffers for each of ``sides`` tiles.

    ``extra``: 1 where a further warp of each tile adds up outliers, else 0. ``storing``: lanes of a warp that
    store sums at the end of a tile. ``bulk``: see `Chip`.
    """

    layout: BitLayout
    slices: int
    sides: int
    stages: int
    batch: int
    extra: int = 0
    storing: int = 8
    bulk: bool = True

    @property
    def threads(self) -> int:
        """Threads of a block: the consumers, and for each tile a producer warp, and the one for outliers."""
        return 32 * (self.slices + 1 + self.extra) * self.sides

    @property
    def terms(self) -> int:
        """Sums that make an element of y."""
        return self.slices + self.extra

    @property
    def arrivals(self) -> int:
        """Lanes that store sums of a tile; those of outliers are 16."""
        return self.slices * self.storing + 16 * self.extra

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
        """Tiles whose sums may be waiting to be added up; the warp for outliers needs one more (`outliers`)."""
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
    bulk: bool = True  # copies: see `Chip`

    @property
    def ring(self) -> Ring:
        """Its buffers."""
        extra = int(self.outliers > 0)
        return Ring(self.layout, self.slices, self.tiles, self.stages, self.batch, extra, bulk=self.bulk)

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
        """Dynamic shared memory of a block, outliers apart: these follow (`OutlierNeeds`)."""
        return -(-(self.fixed_bytes + self.ring.bytes) // 16) * 16

    @property
    def converted(self) -> bool:
        """Whether sums outgrow the 22 bits that the pattern of 1.5 * 2^23 leaves them."""
        layout = self.layout
        held = 2 * self.parts * layout.places
        most = layout.span // layout.places * (2**held - 1)
        return bool(most * (1 if layout.formula == "bcq" else 2**layout.bits - 1) >= 2**22)


def bit_shape_for(wanted: Wanted) -> BitShape | None:
    """The shape for a product, as measured on an H200; None where x does not fit into shared memory, or sums overflow.

    None as well for more than two vectors in groups of 16 columns, or one in groups of 8: each takes two or four passes
    there, all unrolled, which is too much for the compiler. Precise products take three parts of x instead of two.
    """
    layout, batch, kind, out, reordered, added, precise, needs, chip = wanted
    parts = 3 if precise else 2
    if batch * layout.passes > 4:
        return None
    if parts == 3 and layout.places == 4 and layout.formula != "bcq" and layout.bits > 4:
        return None
    slices = min(8, layout.chunks)
    few = layout.chunks <= 2 * slices  # then most thread blocks have all their weights in flight at once
    for tiles, stages in ((2, 2), (1, 2)) if few else ((2, 4), (2, 3), (2, 2), (1, 3), (1, 2)):
        shape = BitShape(
            layout, batch, kind, out, parts, reordered, added, slices, tiles, stages, needs.size, chip.bulk
        )  # fmt: skip
        whole = shape.shared_bytes + needs.shared_bytes(batch, kind, tiles)
        least = (tiles, stages) == (1, 2)
        if (shape.ring.bytes <= _IN_FLIGHT or least) and whole <= chip.shared:
            return shape
    return None


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
    bulk: bool = True  # copies: see `Chip`

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
            self.bulk,
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
        """Dynamic shared memory of a block, outliers apart: these follow (`OutlierNeeds`)."""
        return -(-(self.fixed_bytes + self.ring.bytes) // 16) * 16


Shape = TypeVar("Shape", bound=ByteShape)


def byte_shape_for(wanted: Wanted) -> ByteShape | None:
    """The shape for a product, as measured on an H200; None where x does not fit into shared memory.

    None as well for float32, whose 24 bits two bytes do not hold, and for groups of 8 and 16.
    """
    if wanted.precise or wanted.kind == 0 or wanted.layout.passes > 1 or not 1 <= wanted.batch <= BATCH:
        return None
    many = wanted.layout.formula == "bcq" and wanted.batch * wanted.layout.places > 8  # 16 warps would lack registers
    return _first_that_fits(ByteShape, wanted, _BYTE_CHOICES[2:] if many else _BYTE_CHOICES)


def _first_that_fits(
    kind: type[Shape], wanted: Wanted, choices: Sequence[tuple[int, int, int]]
) -> Shape | None:  # fmt: skip
    """The first of these slices, tiles and stages with which all fits into shared memory."""
    shape, needs = kind(*wanted[:6], bulk=wanted.chip.bulk), wanted.needs
    for slices, tiles, stages in choices:
        warps = min(slices, shape.layout.chunks)
        found = shape._replace(slices=warps, tiles=tiles, stages=stages, outliers=needs.size)
        if found.shared_bytes + needs.shared_bytes(shape.batch, shape.kind, tiles) <= wanted.chip.shared:
            return found
    return None


class ShortShape(ByteShape):
    """The same for short groups, of whose bytes of x only those are stored that are not zero."""

    __slots__ = ()

    @property
    def stride(self) -> int:
        """Bytes of 128 columns of x."""
        return 4 * _PAIR * self.batch

    @property
    def zeros_at(self) -> int:
        """Where the zeros begin that lanes without a column of x read."""
        return 2 * self.layout.chunks * self.stride

    @property
    def sums_at(self) -> int:
        """Where sums of x and powers of two begin."""
        return self.zeros_at + self.stride

    @property
    def sums_bytes(self) -> int:
        """Bytes of them for 128 columns."""
        return (self.layout.passes + 1) * self.batch * 32

    @property
    def fixed_bytes(self) -> int:
        """Shared memory for x and its sums."""
        return -(-(self.sums_at + 2 * self.layout.chunks * self.sums_bytes) // 128) * 128


def short_shape_for(wanted: Wanted) -> ShortShape | None:
    """The shape for a product, as measured on an H200; None where x does not fit into shared memory.

    None as well for float32, whose 24 bits two bytes do not hold, for longer groups, and for more vectors than two in
    groups of 8 columns and four in groups of 16, for which there are not enough registers.
    """
    layout, batch = wanted.layout, wanted.batch
    if wanted.precise or wanted.kind == 0 or layout.passes == 1 or batch < 1 or batch * layout.passes > 8:
        return None
    few = layout.chunks <= _FEW
    most = 4 if few else 6 if batch > 2 else 8  # with more vectors, more would lack registers
    side_by_side = 3 if few and batch == 1 and wanted.needs == NO_OUTLIERS else 2
    choices = [choice for choice in _SHORT_CHOICES if choice[0] <= most and choice[1] <= side_by_side]
    return _first_that_fits(ShortShape, wanted, choices)


AnyShape = BitShape | ByteShape


@functools.cache
def product_shape(wanted: Wanted) -> AnyShape | None:
    """How up to eight vectors are multiplied: with bits of x, or with bytes where there are many or groups are short.

    None where x does not fit, or more than four vectors would have to be bits.
    """
    short = short_shape_for(wanted)
    if short is not None:
        return short
    with_bytes = byte_shape_for(wanted)
    if with_bytes is not None and (wanted.batch > 2 or wanted.layout.places == 4):
        return with_bytes
    if wanted.batch > 4:
        return None
    return bit_shape_for(wanted) or with_bytes


@functools.cache
def at_once(
    layouts: tuple[BitLayout, ...], kind: int, out: int, *, needs: OutlierNeeds = NO_OUTLIERS, chip: Chip = SM_90
) -> int:
    """How many vectors of a type one launch takes for every one of these segments; 0 where not one fits.

    ``out``: the type of the result. Outliers go with the last segment.
    """
    precise = 0 in (kind, out)
    *others, last = layouts
    for batch in (8, 4, 2, 1):
        wanted = [Wanted(layout, batch, kind, out, False, True, precise, chip=chip) for layout in others]
        wanted.append(Wanted(last, batch, kind, out, False, True, precise, needs, chip))
        if None not in map(product_shape, wanted):
            return batch
    return 0
