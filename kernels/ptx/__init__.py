"""The few instructions that Numba does not offer, as functions for kernels.

On a GPU they are inline PTX (`instructions`), in a simulator Python functions (`runtime.simulation`), so one kernel
source serves both. Use them as ``ptx.name(...)``; what Numba has itself comes from `runtime.numba_cuda`.
A *word* is a uint32; pointers are kernel arguments (`runtime.launch`), indices count accesses of the width in the name
(``ldg128(p, 2)``: bytes 32..47), and addresses must be multiples of that width.

==========================  ================================================================================
casts                       u32 i32 u64 f32 f64; every sum of words needs u32(...) around it: Numba
                            computes in 64 bits, the simulator in Python integers
bits                        prmt(a, b, selector) lop3(a, b, c, table) funnel_right(low, high, shift);
                            `table` is a constant; here(word): the same word, and what is computed from it is
                            computed after this place, not before a loop, where it would take registers
words as numbers            min_u32 (Numba's min of a signed and an unsigned number goes through floating point)
                            div_u32 rem_u32 (Numba divides in 64 bits)
patterns                    f32_bits bits_f32
16-bit floats in words      lo_f16(w) hi_f16(w) lo_bf16(w) hi_bf16(w) -> f32; f16_to_f32 bf16_to_f32 of the
                            low half; f32_to_f16 f32_to_bf16 f64_to_f16 f64_to_bf16 -> word, upper half 0;
                            pack_f16(low, high) pack_bf16(low, high) -> word; all round once
pairs of F16 in words       hadd2 hsub2 hmul2 hfma2; of BF16: bfma2
one rounding, never fused   add_ sub_ mul_ with f32 and f64, fma_f32 div_f32 sqrt_f32, f64_to_f32
other arithmetic            rint_i32(f): nearest, ties to even, a NaN is 0; max_f32 min_f32: a NaN loses;
                            exp2 log2: fast approximations, about 2 units in the last place; mad_i32(a, b, c):
                            a * b + c in this order (the compiler would reassociate, one instruction more)
global loads, past L1       ldg32 -> word, ldg64 -> 2 words, ldg128 -> 4 words: read-only data, used once
the same, kept in L1        ldg128_keep
what other blocks wrote     ldcg128_f32(p, i), after their threadfence; what an earlier kernel wrote while this
                            one was running already: ldcg_f32(p, i), ldcg128(p, i) -> 4 words
prefetch to L2              prefetch(p, i): the 16 bytes i, with their neighbours
global stores               stg64(p, i, a, b) stg128(p, i, a, b, c, d) stg128_stream
tickets                     atomic_inc(p, i, limit): the old value; wraps to 0 after `limit`
shared memory               shared_address(array) -> word; lds8 lds16 lds32 lds64 lds128 (address, offset) -> words,
                            lds_f32 lds64_f32 lds128_f32; sts8 sts32 sts64 sts128 sts_f32 ... (address, offset,
                            *values)
copies                      cp_async16(p, i, address, bytes) (rest zero) cp_async_commit cp_async_wait(n);
                            cp_async_run(count, step) -> f(p, i, address): `count` copies, `step` bytes apart;
                            cp_async_arrive(barrier): an arrival when the copies of this lane have come
bulk copies, sm_90          bulk_copy(p, i, address, bytes, barrier): 16-byte pieces from piece i on; completes
                            bytes that mbarrier_expect(barrier, bytes) announced; tensor_copy(map, column, row,
                            address, barrier): a box of a `runtime.tensor_map`, which prefetch_map(map) fetches
barriers in memory          mbarrier_init_arrivals(barrier, count) mbarrier_arrive(barrier): `count` arrivals end a
                            phase; mbarrier_poll(barrier, parity) waits for its end
the same, sm_90             mbarrier_init(barrier): for bulk copies; mbarrier_fence() after initialising;
                            mbarrier_wait(barrier, parity): the lane sleeps meanwhile
warps with different work   sync_block(): all threads of the block, each warp from any instruction;
                            sync_warps(id, threads): some warps, all at the same instruction
dependent launch, sm_90     wait_previous_kernel(): until all that was launched before is done and visible;
                            launch_next_kernel(): the next kernel may start, up to where it waits for this one
a warp, all 32 lanes        lane_id syncwarp ballot warp_max_u32; shfl_ shfl_xor_ with u32 and f32;
                            transpose(word): an 8 x 8 matrix of 16-bit numbers, row r in lanes 4 r .. 4 r + 3
tensor cores                mma_s8 mma_u8 (unsigned A): m16n8k32, mma_f16 mma_bf16: m16n8k16; (a0..a3, b0, b1,
                            c0..c3) -> d0..d3; ldmatrix_x4(address) -> 4 words; mma_b1(a0, a1, b0): 16 x 128 by
                            128 x 8 bits, and + popcount, sums from 0; mma_b1_wide(a0..a3, b0, b1): 16 x 256
tensor cores, sm_90a        wgmma(vectors, "f16" or "bf16") -> f(sums, a0..a3, address, piece): four warps, x in shared
                            memory (`asm.multiply_group`); wgmma_fence before the first, wgmma_commit after the
                            last, wgmma_wait(n) before sums are read;
                            more_registers(n) fewer_registers(n): what each thread of four warps has from here on
sums of a tile              zero_sums scale_sums save_sums load_sums at_once add_rows store_sums (`sums`);
                            looked_up(stride, span, planes) -> f(words, table, lane, part)
==========================  ================================================================================

Fragments of ``mma_b1``: lane l has row l // 4 (a0) and l // 4 + 8 (a1), columns 32 (l % 4) .. + 31 of A; column l // 4,
the same 32 of B; of the sums rows l // 4 (first two) and l // 4 + 8, columns 2 (l % 4) and the next. The wide one has
columns 128 .. 255 in a2, a3 and b1.
"""

from __future__ import annotations

from bcqfmt.kernels.runtime.simulation import simulator

if simulator is not None:
    globals().update(simulator.INSTRUCTIONS)
else:
    from .instructions import *  # noqa: F403
    from .sums import *  # noqa: F403
