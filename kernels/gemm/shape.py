"""How a product of many vectors is carried out: tiles, stages, and which instruction multiplies."""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass
from typing import Any

from bcqfmt.kernels.runtime.limits import PROCESSOR_SHARED, PROCESSORS, SHARED_LIMIT, SMALL_SHARED

from .layout import SIDE, GemmLayout

__all__ = [
    "COPYING",
    "FEW",
    "MANY_TILES",
    "WIDTH_STEP",
    "FewShape",
    "GemmShape",
    "blocks_for",
    "few_alone",
    "gemm_shape",
    "whole_for",
]

_TILES = (16, 32, 64)  # vectors of a tile; with wgmma, more of them have tiles of their own
FEW = (8, 16)  # vectors of a tile of the engine few
REGISTERS, COPYING = 65536, 32  # of a processor; of a thread that copies
_LARGE = 1 << 27  # elements of a matrix
_SHORT = 64  # blocks of a row: few turns for every warp
_EVEN = 0.9  # of the blocks that fit, if they share tiles evenly
_WHOLE = 0.87  # of the blocks that fit, if each has whole tiles
_SHARED = 0.26  # of a tile: what it costs a block to share some
WIDTH_STEP = 16  # vectors: tiles for many of them have multiples
_WIDE_TILES = tuple(  # groups and vectors
    (groups, vectors) for groups, most in ((2, 208), (3, 128)) for vectors in range(96, most + 1, WIDTH_STEP)
)
_SMALL_TILES = ((2, 64), (2, 80), (2, 96), (3, 64))  # taken if they keep enough processors busy, the first that does
MANY_TILES = tuple(sorted({*_SMALL_TILES, *_WIDE_TILES}))  # all that more than 64 vectors can take
_ONE_TILE = 96, 128  # vectors that one tile takes: always, and where small tiles do not keep enough processors busy
# Costs, in products of 64 rows, 64 columns and one vector: of every 64 columns of a tile, in addition to its products;
# of partial sums that blocks share, for 64 rows and a vector.
_STEP, _SUMS = 48, 30


@dataclass(frozen=True, slots=True)
class GemmShape:
    """A block of threads multiplies ``vectors`` vectors with ``groups`` x 128 threads, each group with 64 rows.

    ``kind``: type of x, 1 float16, 2 bfloat16; ``out``: of y, 0 float32. ``added``: to an addend. ``engine``: "wgmma"
    (sm_90a), "mma" (sm_80) or "few" (`FewShape`). ``blocks``: on a processor at the same time. A stage has ``depth``
    blocks of columns. ``paired``: y has an even number of rows, and two numbers of it are stored at once. With wgmma
    there are 128 threads more, which only copy, with mma ``producers`` warps. ``height``: with mma, blocks of 64 rows
    of a group, 1 or 2. ``early``: few, on sm_90, where weights are copied before the previous kernel ends.
    """

    layout: GemmLayout
    vectors: int
    kind: int
    out: int
    engine: str
    groups: int = 4
    depth: int = 2
    stages: int = 4
    blocks: int = 1
    added: bool = False
    paired: bool = False
    height: int = 1
    producers: int = 2
    early: bool = False

    @property
    def members(self) -> int:
        """Threads of a block that multiply."""
        return 128 * self.groups

    @property
    def threads(self) -> int:
        """Of a block."""
        return self.members + self.copiers

    @property
    def copiers(self) -> int:
        """Threads that only copy."""
        return 128 if self.engine == "wgmma" else 32 * self.producers

    @property
    def row_blocks(self) -> int:
        """Blocks of 64 rows of a tile."""
        return self.groups * self.height

    @property
    def registers(self) -> int:
        """Of a thread that multiplies, if each that copies has ``COPYING``."""
        return (REGISTERS // self.blocks - 128 * COPYING) // self.members // 8 * 8

    @property
    def rows(self) -> int:
        """Of a tile."""
        return SIDE * self.row_blocks

    @property
    def x_bytes(self) -> int:
        """Bytes of 64 columns of all vectors."""
        return 2 * SIDE * self.vectors

    @property
    def steps(self) -> int:
        """Stages that a tile takes."""
        return -(-self.layout.blocks // self.depth)

    @property
    def codes_at(self) -> int:
        """Where the codes of a stage are, after x, which the tensor cores want at multiples of 1024 bytes."""
        return self.depth * self.x_bytes

    @property
    def numbers_at(self) -> int:
        """Where the numbers of a stage are."""
        return self.codes_at + self.depth * self.row_blocks * self.layout.code_bytes

    @property
    def sets(self) -> int:
        """Sets of numbers of a stage: one, where its columns have the same."""
        sharing = self.layout.sharing
        return 1 if sharing % self.depth == 0 else self.depth // sharing if self.depth % sharing == 0 else self.depth

    @property
    def stage_bytes(self) -> int:
        """Bytes of a stage."""
        used = self.numbers_at + self.sets * self.row_blocks * self.layout.set_bytes
        return -(-used // 1024) * 1024

    @property
    def barriers_at(self) -> int:
        """Where two barriers of every stage are, and then a word for the block."""
        return self.stages * self.stage_bytes

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: all stages, barriers, and what is lost before the first 1024."""
        return self.barriers_at + 16 * self.stages + 1024 + 16

    @property
    def partial_words(self) -> int:
        """Float32 numbers of a tile that several blocks add up."""
        return self.rows * self.vectors


@dataclass(frozen=True, slots=True)
class FewShape(GemmShape):
    """8 or 16 vectors: ``groups`` warps share the columns of 16 ``height`` rows; each has stages of its own."""

    @property
    def members(self) -> int:
        return 32 * self.groups

    @property
    def copiers(self) -> int:
        return 0

    @property
    def rows(self) -> int:
        return 16 * self.height

    @property
    def numbers_at(self) -> int:
        return self.codes_at + self.depth * self.height * self.layout.code_bytes // 4

    @property
    def stage_bytes(self) -> int:
        return self.numbers_at + self.sets * self.height * self.layout.set_bytes // 4

    @property
    def shared_bytes(self) -> int:
        return self.groups * self.stages * self.stage_bytes


def blocks_for(tiles: int, steps: int, most: int) -> int:
    """How many of ``most`` blocks share the steps of all tiles: all, or fewer if each then has a part of one tile."""
    return min(_evenly(tiles, most) or most, tiles * steps)


def whole_for(tiles: int, most: int) -> int:
    """How many of ``most`` blocks have a number of tiles each and share none; 0 if too many would be idle."""
    turns = -(-tiles // most)
    taken = tiles and tiles >= max(_WHOLE * turns, turns - _SHARED) * most
    return -(-tiles // turns) if taken else 0


def _evenly(tiles: int, most: int) -> int:
    """The largest number of blocks that all have as large a part of one tile; 0 if too many would be idle."""
    found = most // max(1, tiles) * tiles
    return found if found >= _EVEN * most else 0


@functools.lru_cache(maxsize=4096)
def _tile_of_many(layout: GemmLayout, rows: int, count: int) -> tuple[int, int]:
    """Groups and vectors of a tile for more than 64 vectors: one for all, a small one, or the fastest by a model.

    After docs/benchmarks/gemm_tiles.json, of matrices with 4096 rows and more. ``count``: a multiple of 16.
    """

    def tiles_of(groups: int, vectors: int) -> int:
        return -(-rows // (SIDE * groups)) * -(-count // vectors)

    if count <= _ONE_TILE[0]:
        return 2, count
    for tile in _SMALL_TILES:
        tiles = tiles_of(*tile)
        if tiles <= PROCESSORS and (tiles >= _WHOLE * PROCESSORS or _evenly(tiles, PROCESSORS)):
            return tile
    if tiles_of(2, 64) <= PROCESSORS:
        return 3, 64
    if count <= _ONE_TILE[1]:
        return 2, count

    def time(tile: tuple[int, int]) -> float:
        size, tiles = math.prod(tile), tiles_of(*tile)
        work = layout.blocks * (size + _STEP)
        if whole_for(tiles, PROCESSORS):
            return -(-tiles // PROCESSORS) * work
        return tiles / blocks_for(tiles, layout.blocks, PROCESSORS) * work + size * _SUMS

    return min(_WIDE_TILES, key=time)


def few_alone(part: Any) -> bool:
    """Whether ``few`` is as fast as the fast product with one vector too: affine, 4 bits, groups of 32 and more.

    ``part``: a layout or a segment.
    """
    return (part.formula, part.bits) == ("affine", 4) and part.group_size >= 32


def _few_shape(
    layout: GemmLayout, count: int, rows: int, kind: int, out: int, engine: str, added: bool
) -> FewShape | None:
    """The shape of ``few`` where it is faster, or None. Each block reads all of x: with 16 vectors, small matrices.

    With mma and 9 to 16 vectors measured with affine weights of 4 bits alone.
    """
    tiles, older = -(-rows // 32), engine == "mma"
    short = tiles <= PROCESSORS and layout.blocks <= _SHORT
    if count <= FEW[0]:  # height, depth, stages, blocks on a processor
        choices = [(2, 1, n, 3) for n in (4, 3)] if short and not older else [(2, 2, 2, 2)]
    elif count > FEW[1] or rows * layout.width >= _LARGE or tiles > 3 * PROCESSORS:  # too many blocks
        return None
    elif short:
        choices = [(2, 1, n, 2) for n in (4, 3)]
    elif tiles <= PROCESSORS or layout.formula == "bcq":
        choices = [(2, 2, 2, 2)]
    else:
        choices = [(2, 1, n, 3) for n in (3, 2)]
    made = [
        FewShape(
            layout, FEW[count > FEW[0]], kind, out, "few", 8, depth, stages, blocks, added, rows % 2 == 0, height,
            early=not older,
        )
        for height, depth, stages, blocks in [*choices, (2, 1, 2, 2), (1, 1, 2, 2)]
    ]  # fmt: skip
    return next((shape for shape in made if _fits(shape, older)), made[-1])


def _fits(shape: FewShape, older: bool) -> bool:
    """Whether a GPU since sm_80 has the shared memory for a block, or one of sm_90 for all."""
    return (
        shape.shared_bytes <= SMALL_SHARED if older else shape.blocks * (shape.shared_bytes + 1024) <= PROCESSOR_SHARED
    )


def gemm_shape(
    layout: GemmLayout, count: int, rows: int, kind: int, out: int, engine: str, *, added: bool = False,
    tile: tuple[int, int] | None = None,
) -> GemmShape:  # fmt: skip
    """The shape for ``count`` vectors and a matrix of ``rows`` rows; measured on an H200 (docs/benchmarks/gemm.md).

    ``tile``: groups and vectors of a tile with wgmma, one of ``MANY_TILES``, for more than 64 vectors; by default what
    is fastest.
    """
    few = _few_shape(layout, count, rows, kind, out, engine, added)
    if few is not None:
        return few
    vectors = next((size for size in _TILES if size >= count), _TILES[-1])
    heights: tuple[int, ...]
    if engine == "wgmma":
        if tile is not None:
            groups, vectors = tile
        elif count > _TILES[-1]:
            rounded = -(-count // WIDTH_STEP) * WIDTH_STEP  # few kernels to compile ahead for all numbers of vectors
            groups, vectors = _tile_of_many(layout, rows, rounded)
        else:
            groups = 2 if _evenly(-(-rows // 128), PROCESSORS) else 3 if vectors == 64 else 4
        # long stages wait less often; with small matrices and little to multiply, too few of them are on the way
        long = layout.blocks % 4 == 0 and (vectors in (64, 80) or (vectors < 64 and rows * layout.width >= _LARGE))
        depths, limit, producers, heights = (4, 2, 1) if long else (2, 1), SHARED_LIMIT, 4, (1,)
    else:
        # tall tiles load and copy less of x
        groups, depths, limit, producers, heights = 2, (2, 1), SMALL_SHARED, 4 if vectors == 64 else 2, (2, 1)
    for height, depth, stages in itertools.product(heights, depths, range(8, 2, -1)):
        made = GemmShape(
            layout, vectors, kind, out, engine, groups, depth, stages, added=added, paired=rows % 2 == 0,
            height=height, producers=producers,
        )  # fmt: skip
        if made.shared_bytes <= limit:
            break
    return made
