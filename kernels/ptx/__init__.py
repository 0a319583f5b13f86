"""The few instructions that Numba does not offer, as functions for kernels.

On a GPU they are inline PTX (`ptx_device`), under ``NUMBA_ENABLE_CUDASIM=1`` Python twins (`ptx_twins`,
`simulator_ptx`), so one kernel source serves both. Use them as ``ptx.name(...)``; what Numba has itself comes from
`ptx_numba`. A *word* is a uint32; pointers are kernel arguments (`launch`), indices count accesses of the width in the
name (``ldg128(p, 2)``: bytes 32..47), and addresses must be multiples of that width.

==========================  ================================================================================
casts                       u32 i32 u64 f32 f64; every sum of words needs u32(...) around it: Numba
                            computes in 64 bits, the simulator in Python integers
bits                        prmt(a, b, selector) lop3(a, b, c, table) funnel_right(low, high, shift)
                            dp4a(a, b, c): signed bytes; `table` is a constant
words as numbers            min_u32 max_u32 (Numba's min and max of signed and unsigned numbers go through
                            floating point) div_u32 rem_u32 (Numba divides in 64 bits)
patterns                    f32_bits bits_f32 f64_bits bits_f64
16-bit floats in words      lo_f16(w) hi_f16(w) lo_bf16(w) hi_bf16(w) -> f32; f16_to_f32 bf16_to_f32 of the
                            low half; f32_to_f16 f32_to_bf16 f64_to_f16 f64_to_bf16 -> word, upper half 0;
                            pack_f16(low, high) pack_bf16(low, high) -> word; all round once
pairs of F16 in words       hadd2 hsub2 hmul2 hfma2
one rounding, never fused   add_ sub_ mul_ with f32 and f64, fma_f32, f64_to_f32
global loads, past L1       ldg32 -> word, ldg64 -> 2 words, ldg128 -> 4 words: read-only data, used once
the same, kept in L1        ldg64_keep ldg128_keep
what other blocks wrote     ldcg_f32(p, i), after their threadfence; what an earlier kernel wrote while this one
                            was there already: ldcg128(p, i) -> 4 words
global stores               stg64(p, i, a, b) stg128(p, i, a, b, c, d) stg128_stream
tickets                     atomic_inc(p, i, limit): the old value; wraps to 0 after `limit`
shared memory               shared_address(array) -> word; lds32 lds64 lds128 (address, offset) -> words,
                            lds_f32 lds64_f32 lds128_f32; sts32 sts64 sts128 sts_f32 ... (address, offset, *values)
copies                      cp_async16(p, i, address, bytes) (rest zero) cp_async_commit cp_async_wait(n)
a warp, all 32 lanes        lane_id syncwarp ballot; shfl_ shfl_xor_ shfl_down_ with u32 and f32
tensor cores                mma_s8: m16n8k32, mma_f16 mma_bf16: m16n8k16; (a0..a3, b0, b1, c0..c3) -> d0..d3;
                            ldmatrix_x4(address) -> 4 words
==========================  ================================================================================
"""

from __future__ import annotations

from bcqfmt.kernels.runtime.numba_cuda import simulated

SIMULATED = simulated()

if SIMULATED:
    import numpy as np

    from bcqfmt.kernels.simulator import block as simulator
    from bcqfmt.kernels.simulator.arithmetic import *  # noqa: F403
    from bcqfmt.kernels.simulator.memory import *  # noqa: F403

    f32, f64 = np.float32, np.float64
    simulator.install()
else:
    from .instructions import *  # noqa: F403
