"""The W4A4 product for a few dozen tokens: the activations of a block stay in shared memory (sm_90).

A block has up to 32 tokens, whose bytes it fetches once for all columns, and walks over tiles of rows. Weights do not
pass through shared memory: their layout gives every lane its own 16 bytes, and a warp asks for those of the next
``ahead`` groups while it multiplies one. So the warps of a block never wait for one another within a tile.

The columns are shared out over ``parts`` warps of the same rows: each leaves its sums in shared memory at the end of a
tile, and all threads add them up, in the order of the parts. It is what `kernel` does with as many slices, without
a round trip through global memory.
"""

from __future__ import annotations

import functools
from typing import Any

from bcqfmt.kernels import ptx
from bcqfmt.kernels.runtime.launch import Kernel, kernel
from bcqfmt.kernels.runtime.numba_cuda import cuda, inlined, types
from bcqfmt.kernels.runtime.unroll import static, unrolled

from .shape import Held
from .steps import UPPER, group_product, quad_writer

_ARGUMENTS = (
    "u32* words, f32* weight_scale, u32* codes, f32* scale, {y}* y, "
    "u32 groups, u32 rows, u32 out, u32 tiles, u32 tokens, u32 row_tiles"
)


@functools.cache
def w4a4_held_kernel(shape: Held, out_type: str) -> Kernel:
    """The kernel for one shape and one output type: F16, BF16 or F32.

    Grid: (blocks along tokens, blocks that share the tiles of rows). ``rows``: out rounded up to 32; ``tiles``: tiles
    of 8 tokens; ``row_tiles``: tiles of ``shape.block_rows``. Arrays as in `operands`; y ``[tokens, out]``.
    """
    NT, WM, PARTS, AHEAD, THREADS = shape.tokens // 8, shape.warps, shape.parts, shape.ahead, shape.threads
    VALUES, QUADS = NT * 8, NT * 2
    RING, SCALES = AHEAD * 16, AHEAD * 4
    multiply, write, load_unit = group_product(2, NT), quad_writer(out_type), _unit_loader()

    @kernel(
        _ARGUMENTS.format(y="f32" if out_type == "F32" else "u16"), threads=THREADS, variant=repr((shape, out_type))
    )
    @unrolled
    def w4a4_held(
        words: Any, weight_scale: Any, codes: Any, scale: Any, y: Any,
        groups: Any, rows: Any, out: Any, tiles: Any, tokens: Any, row_tiles: Any,
    ) -> None:  # fmt: skip
        shared = cuda.shared.array(0, types.uint32)
        base = ptx.shared_address(shared)
        acc = cuda.local.array(VALUES, types.float32)
        a = cuda.local.array(32, types.uint32)
        ring = cuda.local.array(RING, types.uint32)
        scales = cuda.local.array(SCALES, types.float32)
        ws = cuda.local.array(4, types.float32)
        thread = ptx.u32(cuda.threadIdx.x)
        lane, warp = ptx.u32(thread & 31), ptx.u32(thread >> 5)
        warp_row, part = ptx.u32(warp % WM), ptx.u32(warp // WM)
        first_tile = ptx.u32(cuda.blockIdx.x * NT)  # of tokens
        first = ptx.u32(ptx.u32(groups * part) // PARTS)
        count = ptx.u32(ptx.u32(ptx.u32(groups * (part + 1)) // PARTS) - first)
        last = ptx.u32(1) if part == PARTS - 1 else ptx.u32(0)  # whose last group is the int8 one, two units
        plain, units = ptx.u32(count - last), ptx.u32(count + last)
        steps = ptx.u32((units + (AHEAD - 1)) // AHEAD * AHEAD)
        xs_base = ptx.u32(base + groups * (NT * 1024))
        sums_at = ptx.u32(xs_base + groups * (NT * 32))
        bar = ptx.u32(sums_at + (PARTS * WM * QUADS * 512) + part * 8)
        tile = ptx.u32(cuda.blockIdx.y)

        if warp_row == 0 and lane == 0:
            ptx.mbarrier_init(bar)
            ptx.mbarrier_fence()
        ptx.syncwarp()
        unit_rows = min(ptx.u32(tile * WM + warp_row), ptx.u32((rows >> 5) - 1))
        for d in static(AHEAD):
            if d < units:
                load_unit(words, weight_scale, unit_rows, ptx.u32(first + d), groups, rows, lane, ring, scales, d)
        ptx.wait_previous_kernel()
        ptx.launch_next_kernel()
        if warp_row == 0 and lane == 0 and count > 0:
            there = min(ptx.u32(NT), ptx.u32(tiles - first_tile))
            ptx.mbarrier_expect(bar, ptx.u32(there * count * 1024))
            for n in range(there):
                piece = ptx.u32(ptx.u32((first_tile + n) * groups + first) * 64)
                ptx.bulk_copy(codes, piece, ptx.u32(base + (n * groups + first) * 1024), ptx.u32(count * 1024), bar)
        i = thread
        while i < groups * QUADS:
            g = ptx.u32(i // QUADS)
            piece = ptx.u32(g * (tiles * 2) + min(ptx.u32(first_tile * 2 + i % QUADS), ptx.u32(tiles * 2 - 1)))
            found = ptx.ldcg128(scale, piece)
            ptx.sts128(ptx.u32(xs_base + i * 16), ptx.u32(0), found[0], found[1], found[2], found[3])
            i = ptx.u32(i + THREADS)
        cuda.syncthreads()
        if count > 0:
            ptx.mbarrier_wait(bar, ptx.u32(0))

        at_x = ptx.u32(base + first * 1024 + lane * 16)
        at_xs = ptx.u32(xs_base + first * (NT * 32) + (lane & 3) * 8)
        step_x = ptx.u32(groups * 1024)
        while tile < row_tiles:
            next_tile = ptx.u32(tile + cuda.gridDim.y)
            next_rows = min(ptx.u32(next_tile * WM + warp_row), ptx.u32((rows >> 5) - 1))
            for i in static(VALUES):
                acc[i] = ptx.f32(0)
            begin = ptx.u32(0)
            while begin < steps:
                for d in static(AHEAD):
                    step = ptx.u32(begin + d)
                    if step < plain:
                        for m in range(2):
                            for h in range(2):
                                for k in range(4):
                                    w = ring[d * 16 + m * 8 + h * 4 + k]
                                    to = m * 16 + h * 8 + (k // 2) * 4 + k % 2
                                    a[to] = ptx.u32(ptx.u32(w << 4) & UPPER)
                                    a[to + 2] = ptx.u32(w & UPPER)
                    elif step == plain:
                        for m in range(2):
                            for k in range(8):
                                a[m * 16 + k] = ring[d * 16 + m * 8 + k]
                                a[m * 16 + 8 + k] = ring[(d + 1) % AHEAD * 16 + m * 8 + k]
                    for k in range(4):
                        ws[k] = scales[d * 4 + k]
                    ahead = ptx.u32(step + AHEAD)
                    if ahead < steps:
                        if ahead < units:
                            load_unit(
                                words, weight_scale, unit_rows, ptx.u32(first + ahead), groups, rows, lane,
                                ring, scales, d,
                            )  # fmt: skip
                    elif next_tile < row_tiles and ptx.u32(ahead - steps) < units:
                        load_unit(
                            words, weight_scale, next_rows, ptx.u32(first + ahead - steps), groups, rows, lane,
                            ring, scales, d,
                        )  # fmt: skip
                    if step < ptx.u32(plain + last):
                        multiply(a, ws, acc, ptx.u32(at_x + step * 1024), step_x, ptx.u32(at_xs + step * (NT * 32)))
                begin = ptx.u32(begin + AHEAD)

            mine = ptx.u32(sums_at + warp * (QUADS * 512) + lane * 16)
            for n in static(NT):
                for k in static(2):
                    e, f = n * 4 + k, (NT + n) * 4 + k
                    ptx.sts128_f32(mine, ptx.u32((n * 2 + k) * 512), acc[e], acc[e + 2], acc[f], acc[f + 2])
            cuda.syncthreads()
            i = thread
            while i < WM * QUADS * 32:
                rows_of, quad, whose = ptx.u32(i // (QUADS * 32)), ptx.u32(i // 32 % QUADS), ptx.u32(i & 31)
                total = ptx.lds128_f32(ptx.u32(sums_at + i * 16), ptx.u32(0))
                v0, v1, v2, v3 = total[0], total[1], total[2], total[3]
                for p in static(1, PARTS):
                    more = ptx.lds128_f32(ptx.u32(sums_at + i * 16), ptx.u32(p * WM * QUADS * 512))
                    v0, v1 = ptx.add_f32(v0, more[0]), ptx.add_f32(v1, more[1])
                    v2, v3 = ptx.add_f32(v2, more[2]), ptx.add_f32(v3, more[3])
                token = ptx.u32((first_tile + (quad >> 1)) * 8 + (whose & 3) * 2 + (quad & 1))
                row = ptx.u32((tile * WM + rows_of) * 32 + (whose >> 2) * 4)
                write(y, token, row, tokens, out, v0, v1, v2, v3)
                i = ptx.u32(i + THREADS)
            cuda.syncthreads()
            tile, unit_rows = next_tile, next_rows

    return w4a4_held


def _unit_loader() -> Any:
    """A device function: a unit of 32 rows, 64 bytes a lane and four scales, into place ``d`` of the ring."""

    def load_unit(
        words: Any, weight_scale: Any, unit_rows: Any, unit: Any, groups: Any, rows: Any, lane: Any,
        ring: Any, scales: Any, d: Any,
    ) -> None:  # fmt: skip
        piece = ptx.u32(ptx.u32(unit_rows * 2 * (groups + 1) + unit) * 64 + lane)
        for m in range(2):
            for h in range(2):
                found = ptx.ldg128(words, ptx.u32(piece + m * ptx.u32((groups + 1) * 64) + h * 32))
                for k in range(4):
                    ring[d * 16 + m * 8 + h * 4 + k] = found[k]
        group = min(unit, ptx.u32(groups - 1))
        four = ptx.ldg128_keep(weight_scale, ptx.u32(group * (rows >> 2) + unit_rows * 8 + (lane >> 2)))
        for k in range(4):
            scales[d * 4 + k] = ptx.bits_f32(four[k])

    return inlined(load_unit)
