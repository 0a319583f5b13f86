"""The W4A4 product on tensor cores: int4 weights widened to int8 in registers, int32 sums per group of 128 columns.

One source for all batch sizes; `shape` says how rows and tokens are shared out. A block owns a tile of rows times
tokens and walks over its groups: while it multiplies one, the next ones are in flight to shared memory (``stages``
buffers, ``cp.async``). Small batches split the groups over several blocks (``slices``) to occupy the GPU: each leaves
its sums in a workspace, and the block that comes last adds them, always in the order of the
slices. `steps` multiplies.
"""

from __future__ import annotations

import functools
from typing import Any

from bcqfmt.kernels import ptx
from bcqfmt.kernels.runtime.launch import Kernel, kernel
from bcqfmt.kernels.runtime.numba_cuda import cuda, types
from bcqfmt.kernels.runtime.unroll import static, unrolled

from .shape import Tile
from .steps import UPPER, group_product, quad_writer

_ARGUMENTS = (
    "u32* words, f32* weight_scale, u32* codes, f32* scale, {y}* y, f32* partials, u32* tickets, "
    "u32 groups, u32 rows, u32 out, u32 tiles, u32 tokens"
)


@functools.cache
def w4a4_kernel(tile: Tile, out_type: str) -> Kernel:
    """The kernel for one tile and one output type: F16, BF16 or F32.

    Grid: (blocks along tokens, blocks along rows, slices). ``rows``: out rounded up to 32; ``tiles``: tiles of 8
    tokens. Arrays as in `operands`; y ``[tokens, out]``; partials ``[slices, 8 tiles, rows]`` and tickets (zeros,
    one for each tile of the grid) are used with more than one slice only.
    """
    THREADS, STAGES, STAGE, WM = tile.threads, tile.stages, tile.stage, tile.warps_m
    BM, BN, MT, NT = tile.block_rows, tile.block_tokens, tile.rows // 16, tile.tokens // 8
    AT_X, AT_WS, AT_XS = BM * 128, (BM + BN) * 128, (BM + BN) * 128 + BM * 4
    W_COPIES, X_COPIES, WS_COPIES, S_COPIES = BM * 4, BN * 8, BM // 4, (BM + BN) // 4
    W_STEPS, X_STEPS = W_COPIES // THREADS, X_COPIES // THREADS
    assert (W_STEPS * THREADS, X_STEPS * THREADS) == (W_COPIES, X_COPIES), tile
    ACC, A_WORDS, SCALES, QUADS = MT * NT * 4, MT * 16, MT * 2, MT // 2
    AHEAD, WAIT = STAGES - 1, STAGES - 2
    PITCH, ROW_QUADS, PLACES = BM + 4, BM // 4, tile.rows * tile.tokens // 128  # of the finished tile
    CHUNK = min(PLACES, 4)
    TOTALS, PARTS = CHUNK * 4, CHUNK * 16
    multiply, write = group_product(MT, NT), quad_writer(out_type)

    def w4a4(
        words: Any, weight_scale: Any, codes: Any, scale: Any, y: Any, partials: Any, tickets: Any,
        groups: Any, rows: Any, out: Any, tiles: Any, tokens: Any,
    ) -> None:  # fmt: skip
        shared = cuda.shared.array(0, types.uint32)
        acc = cuda.local.array(ACC, types.float32)
        a = cuda.local.array(A_WORDS, types.uint32)
        ws = cuda.local.array(SCALES, types.float32)
        total = cuda.local.array(TOTALS, types.float32)
        part = cuda.local.array(PARTS, types.float32)
        for i in range(ACC):
            acc[i] = ptx.f32(0)

        thread = ptx.u32(cuda.threadIdx.x)
        lane, warp = ptx.u32(thread & 31), ptx.u32(thread >> 5)
        warp_m, warp_n = ptx.u32(warp % WM), ptx.u32(warp // WM)
        first_row, first_token = ptx.u32(cuda.blockIdx.y * BM), ptx.u32(cuda.blockIdx.x * BN)
        # rows are numbered so that a lane has four neighbours: of two tiles of 16, both halves
        row_bytes = ptx.u32(warp_m * (MT * 64))
        slices = ptx.u32(cuda.gridDim.z)
        first = ptx.u32(ptx.u32(groups * cuda.blockIdx.z) // slices)
        count = ptx.u32(ptx.u32(ptx.u32(groups * (cuda.blockIdx.z + 1)) // slices) - first)
        int8_step = ptx.u32(groups - 1 - first)
        base = ptx.shared_address(shared)
        end = ptx.u32(base + STAGES * STAGE)
        filling = base
        used = base

        from_w = cuda.local.array(W_STEPS, types.uint32)  # sources of this thread's copies, in units of 16 bytes
        from_x = cuda.local.array(X_STEPS, types.uint32)
        for i in range(W_STEPS):
            t = min(ptx.u32((first_row >> 4) + (thread >> 6) + i * THREADS // 64), ptx.u32((rows >> 4) - 1))
            from_w[i] = ptx.u32(ptx.u32(t * (groups + 1) + first) * 64 + (thread & 63) + i * THREADS % 64)
        for i in range(X_STEPS):
            t = min(ptx.u32((first_token >> 3) + (thread >> 6) + i * THREADS // 64), ptx.u32(tiles - 1))
            from_x[i] = ptx.u32(ptx.u32(t * groups + first) * 64 + (thread & 63) + i * THREADS % 64)
        if thread < WS_COPIES:
            from_s = ptx.u32(first * (rows >> 2) + min(ptx.u32((first_row >> 2) + thread), ptx.u32((rows >> 2) - 1)))
        else:
            t = min(ptx.u32((first_token >> 2) + thread - WS_COPIES), ptx.u32(tiles * 2 - 1))
            from_s = ptx.u32(first * (tiles * 2) + t)
        to_w = ptx.u32((thread >> 6) * 2048 + (thread & 63) * 16)

        for i in range(ptx.u32(count + AHEAD)):
            step = ptx.u32(i)
            if step >= AHEAD:
                ptx.cp_async_wait(WAIT)
                cuda.syncthreads()
            if step < count:  # the next group, into the buffer that was used last
                for i in range(W_STEPS):
                    place = ptx.u32(filling + to_w + (i * THREADS // 64 * 2048 + i * THREADS % 64 * 16))
                    ptx.cp_async16(words, from_w[i], place, 16)
                    if step == int8_step:
                        ptx.cp_async16(words, ptx.u32(from_w[i] + 64), ptx.u32(place + 1024), 16)
                    from_w[i] = ptx.u32(from_w[i] + 64)
                for i in range(X_STEPS):
                    ptx.cp_async16(codes, from_x[i], ptx.u32(filling + thread * 16 + (AT_X + i * THREADS * 16)), 16)
                    from_x[i] = ptx.u32(from_x[i] + 64)
                if thread < WS_COPIES:
                    ptx.cp_async16(weight_scale, from_s, ptx.u32(filling + thread * 16 + AT_WS), 16)
                    from_s = ptx.u32(from_s + (rows >> 2))
                elif thread < S_COPIES:
                    ptx.cp_async16(scale, from_s, ptx.u32(filling + thread * 16 + AT_WS), 16)
                    from_s = ptx.u32(from_s + tiles * 2)
                filling = ptx.u32(filling + STAGE)
                if filling == end:
                    filling = base
            ptx.cp_async_commit()

            if step >= AHEAD:
                at_w = ptx.u32(used + warp_m * (MT * 2048) + lane * 16)
                at_x = ptx.u32(used + AT_X + warp_n * (NT * 1024) + lane * 16)
                at_ws = ptx.u32(used + AT_WS + row_bytes + (lane >> 2) * 16)
                at_xs = ptx.u32(used + AT_XS + warp_n * (NT * 32) + (lane & 3) * 8)
                used = ptx.u32(used + STAGE)
                if used == end:
                    used = base
                if step == ptx.u32(int8_step + AHEAD):
                    for m in range(MT):
                        for j in range(4):
                            w = ptx.lds128(at_w, ptx.u32(m * 2048 + j * 512))
                            for k in range(4):
                                a[m * 16 + j * 4 + k] = w[k]
                else:
                    for m in range(MT):
                        for h in range(2):
                            w = ptx.lds128(at_w, ptx.u32(m * 2048 + h * 512))
                            for k in range(4):
                                to = m * 16 + h * 8 + (k // 2) * 4 + k % 2
                                a[to] = ptx.u32(ptx.u32(w[k] << 4) & UPPER)
                                a[to + 2] = ptx.u32(w[k] & UPPER)
                for k in range(QUADS):
                    quad = ptx.lds128_f32(at_ws, ptx.u32(k * 128))
                    for i in range(4):
                        ws[k * 4 + i] = quad[i]

                multiply(a, ws, acc, at_x, 1024, at_xs)

        # The tile goes through shared memory, [token][row], so that neighbouring threads store neighbouring rows.
        cuda.syncthreads()
        at = ptx.u32(base + (warp_n * (NT * 8) + (lane & 3) * 2) * (PITCH * 4) + row_bytes + (lane >> 2) * 16)
        for n in static(NT):
            for k in range(2):
                for r in range(QUADS):
                    e = (2 * r * NT + n) * 4 + k
                    ptx.sts128_f32(
                        at, ptx.u32(((n * 8 + k) * PITCH + r * 32) * 4),
                        acc[e], acc[e + 2], acc[e + NT * 4], acc[e + NT * 4 + 2],
                    )  # fmt: skip
        cuda.syncthreads()

        if slices > 1:
            for i in range(PLACES):
                place = ptx.u32(i * THREADS + thread)
                token, row = ptx.u32(first_token + place // ROW_QUADS), ptx.u32(first_row + place % ROW_QUADS * 4)
                if token < tiles * 8 and row < rows:
                    w = ptx.lds128(base, ptx.u32((place // ROW_QUADS * PITCH + place % ROW_QUADS * 4) * 4))
                    to = ptx.u32(ptx.u32((cuda.blockIdx.z * tiles * 8 + token) * rows + row) >> 2)
                    ptx.stg128(partials, to, w[0], w[1], w[2], w[3])
            cuda.threadfence()
            cuda.syncthreads()
            if thread == 0:
                number = ptx.u32(cuda.blockIdx.y * cuda.gridDim.x + cuda.blockIdx.x)
                ptx.sts32(base, ptx.u32(0), ptx.atomic_inc(tickets, number, ptx.u32(slices - 1)))
            cuda.syncthreads()
            if ptx.lds32(base, ptx.u32(0)) != slices - 1:
                return

        for first_place in static(0, PLACES, CHUNK):
            for i in range(CHUNK):
                place = ptx.u32((first_place + i) * THREADS + thread)
                v = ptx.lds128_f32(base, ptx.u32((place // ROW_QUADS * PITCH + place % ROW_QUADS * 4) * 4))
                for k in range(4):
                    total[i * 4 + k] = v[k] if slices == 1 else ptx.f32(0)
            if slices > 1:
                for turn in range(ptx.u32((slices + 3) >> 2)):  # four slices in flight at once, added in order
                    for z in range(4):
                        for i in range(CHUNK):
                            place = ptx.u32((first_place + i) * THREADS + thread)
                            token = min(ptx.u32(first_token + place // ROW_QUADS), ptx.u32(tiles * 8 - 1))
                            row = min(ptx.u32(first_row + place % ROW_QUADS * 4), ptx.u32(rows - 4))
                            which = min(ptx.u32(turn * 4 + z), ptx.u32(slices - 1))
                            at = ptx.u32(ptx.u32((which * tiles * 8 + token) * rows + row) >> 2)
                            v = ptx.ldcg128_f32(partials, at)
                            for k in range(4):
                                part[(z * CHUNK + i) * 4 + k] = v[k]
                    for z in range(4):
                        there = ptx.u32(turn * 4 + z) < slices
                        for k in range(CHUNK * 4):
                            more = ptx.add_f32(total[k], part[z * CHUNK * 4 + k])
                            total[k] = cuda.selp(there, more, total[k])
            for i in range(CHUNK):
                place = ptx.u32((first_place + i) * THREADS + thread)
                token, row = ptx.u32(first_token + place // ROW_QUADS), ptx.u32(first_row + place % ROW_QUADS * 4)
                write(y, token, row, tokens, out, total[i * 4], total[i * 4 + 1], total[i * 4 + 2], total[i * 4 + 3])

    declared = _ARGUMENTS.format(y="f32" if out_type == "F32" else "u16")
    kept = repr((tile, out_type))
    return kernel(declared, threads=THREADS, blocks=tile.blocks, variant=kept)(unrolled(w4a4))
