"""y = W x for many vectors: codes become 16-bit numbers on their way into the tensor cores, and are never stored.

A block of threads takes tiles of 64 ``groups`` rows and ``vectors`` vectors. Codes, numbers and x come to shared memory
by asynchronous copies, ``stages`` deep. Every thread turns its codes into the fragment of W that it has to bring, in
registers, two numbers at a time (`decode`): the code is put into the last bits of a word, which makes it a 16-bit
number, then scaled and shifted. Values of bcq weights and tables are looked up (`look_up`); where bcq has one plane,
more than four or short groups, the sign of each plane's scale is flipped by its bit, and the scales are added.

x is the other operand, in shared memory, 128 bytes of every vector with their 16-byte pieces exchanged so that no two
are in the same bank. ``mma`` (sm_80 and later, `portable`) takes it from registers. ``wgmma`` (sm_90a, `roles`) reads x
from shared memory itself, and multiplies while the next codes are turned into numbers. With both, some warps only copy.
A kernel whose blocks share no tile (`few`) takes up to eight vectors, and up to 16 where the matrix is not large.

Work is divided evenly among the blocks, also in the middle of a tile. A block that has a part of a tile stores its
sums, and the last one to finish adds up all parts in their order (`tile_end`): two runs give the same bits.
"""

from __future__ import annotations

import functools

from bcqfmt.kernels.runtime.launch import Kernel

from .few import few_kernel
from .portable import portable_kernel
from .roles import roles_kernel
from .shape import FewShape, GemmShape


@functools.cache
def gemm_kernel(shape: GemmShape) -> Kernel:
    """The kernel for one layout, number of vectors and choice of types.

    Arrays: codes, numbers and row_scale as in `layout`; x [count, columns]; addend float32, row ``v * addend_step`` for
    vector v; y [count, rows]; partials [2 blocks][numbers of a tile]; tickets, zeros, a word for every shared tile.
    Tiles are numbered along the vectors. ``whole``: how many, the first ones, one block has alone, only with wgmma;
    ``total``: steps of all others.
    """
    x, y = "map" if shape.engine == "wgmma" else "u16*", "f32*" if shape.out == 0 else "u16*"
    declared = (
        f"u32* codes, u32* numbers, f32* row_scale, {x} x, f32* addend, {y} y, f32* partials, u32* tickets, "
        "u32 rows, u32 row_blocks, u32 columns, u32 start, u32 count, u32 total, "
        "u32 vector_tiles, u32 addend_step, u32 whole"
    )
    if isinstance(shape, FewShape):
        return few_kernel(shape, declared)
    return (roles_kernel if shape.engine == "wgmma" else portable_kernel)(shape, declared)
