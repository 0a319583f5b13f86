"""How a product of many vectors is carried out: tiles, stages, and which instruction multiplies."""

from __future__ import annotations

from dataclasses import dataclass

from bcqfmt.kernels.runtime.limits import SHARED_LIMIT

from .layout import SIDE, GemmLayout

__all__ = ["COPYING", "TILES", "GemmShape", "gemm_shape"]

TILES = {"wgmma": (8, 16, 32, 64, 128), "mma": (8, 16, 32, 64)}  # vectors of a tile
REGISTERS, COPYING = 65536, 40  # of a processor; of a thread that copies
_SMALL = 99 * 1024  # bytes of shared memory that every GPU since sm_80 has
_LARGE, _SMALLEST = 1 << 26, 1 << 24  # elements of a matrix


@dataclass(frozen=True, slots=True)
class GemmShape:
    """A block of threads multiplies ``vectors`` vectors with ``groups`` x 128 threads, each group with 64 rows.

    ``kind``: type of x, 1 float16, 2 bfloat16; ``out``: of y, 0 float32. ``added``: to an addend. ``engine``: "wgmma"
    (sm_90a), which has 128 threads more, for copies, or "mma" (sm_80). ``blocks``: on a processor at the same time. A
    stage has ``depth`` blocks of columns. ``paired``: y has an even number of rows, and two numbers of it are stored at
    once. ``slices``: groups with the same rows, each with a part of the columns of a stage.
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
    slices: int = 1

    @property
    def multiplying(self) -> int:
        """Threads of a block that multiply."""
        return 128 * self.groups

    @property
    def members(self) -> int:
        """Those of the first slice, which write y."""
        return self.multiplying // self.slices

    @property
    def threads(self) -> int:
        """Of a block."""
        return self.multiplying + (128 if self.engine == "wgmma" else 0)

    @property
    def registers(self) -> int:
        """Of a thread that multiplies, if each that copies has ``COPYING``."""
        return (REGISTERS // self.blocks - 128 * COPYING) // self.multiplying // 8 * 8

    @property
    def x_warps(self) -> int:
        """Warps that copy x: more would have nothing to do with eight vectors."""
        return min(4, self.vectors // 4)

    @property
    def row_groups(self) -> int:
        """Row blocks of a tile."""
        return self.groups // self.slices

    @property
    def rows(self) -> int:
        """Of a tile."""
        return SIDE * self.row_groups

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
        return self.codes_at + self.depth * self.row_groups * self.layout.code_bytes

    @property
    def sets(self) -> int:
        """Sets of numbers of a stage: one, where its columns have the same."""
        sharing = self.layout.sharing
        return 1 if sharing % self.depth == 0 else self.depth // sharing if self.depth % sharing == 0 else self.depth

    @property
    def stage_bytes(self) -> int:
        """Bytes of a stage."""
        used = self.numbers_at + self.sets * self.row_groups * self.layout.set_bytes
        return -(-used // 1024) * 1024

    @property
    def barriers_at(self) -> int:
        """Where two barriers of every stage are, then a word for the block and the sums of other slices."""
        return self.stages * self.stage_bytes

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: all stages, barriers, and what is lost before the first 1024."""
        return self.barriers_at + 16 * self.stages + 1024 + 16 + 4 * (self.slices - 1) * self.partial_words

    @property
    def partial_words(self) -> int:
        """Float32 numbers of a tile that several blocks add up."""
        return self.rows * self.vectors


def gemm_shape(
    layout: GemmLayout, count: int, rows: int, kind: int, out: int, engine: str, *, added: bool = False
) -> GemmShape:
    """The shape for ``count`` vectors and a matrix of ``rows`` rows; measured on an H200 (docs/benchmarks/gemm.md)."""
    sizes, own, elements = TILES[engine], engine == "wgmma", rows * layout.width
    vectors = next((size for size in sizes if size >= count), sizes[-1])
    # small matrices have too few large tiles; two small blocks on a processor hide each other's waiting
    large = own and (vectors == 8 or (vectors > 32 and elements > _LARGE))
    groups, blocks = (4, 1) if large else (2, 1) if own and vectors > 32 else (2, 2)
    # long stages wait less often; with small matrices and little to multiply, too few of them are on the way
    long = own and layout.blocks % 4 == 0 and vectors < 128 and (vectors in (8, 64) or elements > _SMALLEST)
    limit = SHARED_LIMIT if own else _SMALL
    kinds = [(4, 4 if vectors == 8 else 3)] * long + [(2, 4), (2, 3), (1, 4), (1, 3)]  # depth, stages
    choices = [(blocks, *stage) for blocks in range(blocks, 0, -1) for stage in kinds]
    for blocks, depth, stages in choices:
        made = GemmShape(layout, vectors, kind, out, engine, groups, depth, stages, blocks, added, paired=rows % 2 == 0)
        if blocks * made.shared_bytes <= limit:
            break
    return made
