"""The instructions for the compiler; `ptx` documents them, the simulator of the tests has the same in Python."""

from __future__ import annotations

from .asm import (
    F32,
    F64,
    I32,
    NONE,
    U32,
    U64,
    asm,
    asm_at,
    copy_run,
    multiply_group,
    reinterpret,
    shared_base,
    shared_load,
    shared_store,
)

u32, i32, f32, f64, u64 = U32, I32, F32, F64, U64  # a Numba type is a cast

# bits
prmt = asm("prmt.b32 $0, $1, $2, $3;", U32, U32, U32, U32)
lop3 = asm("lop3.b32 $0, $1, $2, $3, {0};", U32, U32, U32, U32, literals=1)
here = asm("mov.b32 $0, $1;", U32, U32, effects="memory")
funnel_right = asm("shf.r.wrap.b32 $0, $1, $2, $3;", U32, U32, U32, U32)
min_u32 = asm("min.u32 $0, $1, $2;", U32, U32, U32)
div_u32 = asm("div.u32 $0, $1, $2;", U32, U32, U32)
rem_u32 = asm("rem.u32 $0, $1, $2;", U32, U32, U32)

# numbers
f32_bits = reinterpret(F32, U32)
bits_f32 = reinterpret(U32, F32)
lo_f16 = asm("{ .reg .b16 h, g; mov.b32 {h, g}, $1; cvt.f32.f16 $0, h; }", F32, U32)
hi_f16 = asm("{ .reg .b16 h, g; mov.b32 {g, h}, $1; cvt.f32.f16 $0, h; }", F32, U32)
lo_bf16 = asm("shl.b32 $0, $1, 16;", F32, U32)
hi_bf16 = asm("and.b32 $0, $1, 0xffff0000;", F32, U32)
f16_to_f32, bf16_to_f32 = lo_f16, lo_bf16
_PAIR = "{ .reg .b16 h, z; cvt.rn.%s h, $1; mov.b16 z, 0; mov.b32 $0, {h, z}; }"
f32_to_f16 = asm(_PAIR % "f16.f32", U32, F32)
f32_to_bf16 = asm(_PAIR % "bf16.f32", U32, F32)
f64_to_f16 = asm(_PAIR % "f16.f64", U32, F64)
pack_f16 = asm("cvt.rn.f16x2.f32 $0, $2, $1;", U32, F32, F32)
pack_bf16 = asm("cvt.rn.bf16x2.f32 $0, $2, $1;", U32, F32, F32)
f64_to_f32 = asm("cvt.rn.f32.f64 $0, $1;", F32, F64)
# Rounding to odd first (truncate, then a sticky last bit) makes the second rounding the only one.
f64_to_bf16 = asm(
    "{ .reg .f32 t; .reg .f64 d; .reg .pred p; .reg .b32 u; .reg .b16 h, z; cvt.rz.f32.f64 t, $1; "
    "cvt.f64.f32 d, t; setp.neu.f64 p, d, $1; mov.b32 u, t; @p or.b32 u, u, 1; mov.b32 t, u; "
    "cvt.rn.bf16.f32 h, t; mov.b16 z, 0; mov.b32 $0, {h, z}; }",
    U32,
    F64,
)
add_f64, sub_f64, mul_f64 = (asm(f"{op}.rn.f64 $0, $1, $2;", F64, F64, F64) for op in ("add", "sub", "mul"))
add_f32, sub_f32, mul_f32 = (asm(f"{op}.rn.f32 $0, $1, $2;", F32, F32, F32) for op in ("add", "sub", "mul"))
fma_f32 = asm("fma.rn.f32 $0, $1, $2, $3;", F32, F32, F32, F32)
hadd2, hsub2, hmul2 = (asm(f"{op}.rn.f16x2 $0, $1, $2;", U32, U32, U32) for op in ("add", "sub", "mul"))
hfma2 = asm("fma.rn.f16x2 $0, $1, $2, $3;", U32, U32, U32, U32)
bfma2 = asm("fma.rn.bf16x2 $0, $1, $2, $3;", U32, U32, U32, U32)
mad_i32 = asm("mad.lo.s32 $0, $1, $2, $3;", I32, I32, I32, I32)
rint_i32 = asm("cvt.rni.s32.f32 $0, $1;", I32, F32)
div_f32 = asm("div.rn.f32 $0, $1, $2;", F32, F32, F32)
sqrt_f32 = asm("sqrt.rn.f32 $0, $1;", F32, F32)
max_f32 = asm("max.f32 $0, $1, $2;", F32, F32, F32)
min_f32 = asm("min.f32 $0, $1, $2;", F32, F32, F32)
exp2 = asm("ex2.approx.ftz.f32 $0, $1;", F32, F32)
log2 = asm("lg2.approx.ftz.f32 $0, $1;", F32, F32)

# global memory
ldg32 = asm_at("ld.global.nc.L1::no_allocate.u32 $0, [$1];", U32, size=4, effects="load")
ldg64 = asm_at("ld.global.nc.L1::no_allocate.v2.u32 {$0, $1}, [$2];", U32, size=8, count=2, effects="load")
ldg128 = asm_at("ld.global.nc.L1::no_allocate.v4.u32 {$0, $1, $2, $3}, [$4];", U32, size=16, count=4, effects="load")
ldg128_keep = asm_at("ld.global.nc.v4.u32 {$0, $1, $2, $3}, [$4];", U32, size=16, count=4, effects="load")
ldcg128 = asm_at("ld.global.cg.v4.u32 {$0, $1, $2, $3}, [$4];", U32, size=16, count=4, effects="memory")
stg64 = asm_at("st.global.v2.u32 [$2], {$0, $1};", NONE, U32, U32, size=8, effects="memory")
stg128 = asm_at("st.global.v4.u32 [$4], {$0, $1, $2, $3};", NONE, *(U32,) * 4, size=16, effects="memory")
stg128_stream = asm_at("st.global.cs.v4.u32 [$4], {$0, $1, $2, $3};", NONE, *(U32,) * 4, size=16, effects="memory")
atomic_inc = asm_at("atom.global.inc.u32 $0, [$2], $1;", U32, U32, size=4, effects="memory")
ldcg_f32 = asm_at("ld.global.cg.f32 $0, [$1];", F32, size=4, effects="memory")
ldcg128_f32 = asm_at("ld.global.cg.v4.f32 {$0, $1, $2, $3}, [$4];", F32, size=16, count=4, effects="memory")
prefetch = asm_at("prefetch.global.L2 [$0];", NONE, size=16, effects="memory")

# shared memory: loads and stores that the compiler knows as such, so it keeps their order around barriers
shared_address = shared_base()
lds32, lds64, lds128 = shared_load(U32), shared_load(U32, 2), shared_load(U32, 4)
lds_f32, lds64_f32, lds128_f32 = shared_load(F32), shared_load(F32, 2), shared_load(F32, 4)
sts32, sts64, sts128 = shared_store(U32), shared_store(U32, 2), shared_store(U32, 4)
sts_f32, sts64_f32, sts128_f32 = shared_store(F32), shared_store(F32, 2), shared_store(F32, 4)
_LDS16 = "{ .reg .u32 a; .reg .u16 h; add.u32 a, $1, $2; ld.shared.u16 h, [a]; cvt.u32.u16 $0, h; }"
lds16 = asm(_LDS16, U32, U32, U32, effects="memory")
lds8 = asm("{ .reg .u32 a; add.u32 a, $1, $2; ld.shared.u8 $0, [a]; }", U32, U32, U32, effects="memory")
_STS8 = "{ .reg .u32 a; add.u32 a, $0, $1; st.shared.u8 [a], $2; }"
sts8 = asm(_STS8, NONE, U32, U32, U32, effects="memory")
cp_async16 = asm_at("cp.async.cg.shared.global [$0], [$2], 16, $1;", NONE, U32, U32, size=16, effects="memory")
cp_async_commit = asm("cp.async.commit_group;", NONE, effects="memory")
cp_async_wait = asm("cp.async.wait_group {0};", NONE, effects="memory", literals=1)
cp_async_run = copy_run
cp_async_arrive = asm("cp.async.mbarrier.arrive.noinc.shared.b64 [$0];", NONE, U32, effects="memory")
mbarrier_poll = asm(
    "{ .reg .pred p; W: mbarrier.test_wait.parity.shared.b64 p, [$0], $1; @!p bra W; }",
    NONE, U32, U32, effects="memory",
)  # fmt: skip

# warps; every lane takes part
_ALL = "0xffffffff"
lane_id = asm("mov.u32 $0, %laneid;", U32)
syncwarp = asm(f"bar.warp.sync {_ALL};", NONE, effects="barrier")
shfl_u32 = asm(f"shfl.sync.idx.b32 $0, $1, $2, 31, {_ALL};", U32, U32, U32, effects="warp")
shfl_xor_u32 = asm(f"shfl.sync.bfly.b32 $0, $1, $2, 31, {_ALL};", U32, U32, U32, effects="warp")
shfl_f32 = asm(f"shfl.sync.idx.b32 $0, $1, $2, 31, {_ALL};", F32, F32, U32, effects="warp")
shfl_xor_f32 = asm(f"shfl.sync.bfly.b32 $0, $1, $2, 31, {_ALL};", F32, F32, U32, effects="warp")
ballot = asm(f"{{ .reg .pred p; setp.ne.u32 p, $1, 0; vote.sync.ballot.b32 $0, p, {_ALL}; }}", U32, U32, effects="warp")
warp_max_u32 = asm(f"redux.sync.max.u32 $0, $1, {_ALL};", U32, U32, effects="warp")
transpose = asm("movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;", U32, U32, effects="warp")

# tensor cores
_MMA = "mma.sync.aligned.%s {$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};"
mma_s8 = asm(_MMA % "m16n8k32.row.col.s32.s8.s8.s32", I32, *(U32,) * 6, *(I32,) * 4, count=4, effects="warp")
mma_u8 = asm(_MMA % "m16n8k32.row.col.s32.u8.s8.s32", I32, *(U32,) * 6, *(I32,) * 4, count=4, effects="warp")
mma_f16 = asm(_MMA % "m16n8k16.row.col.f32.f16.f16.f32", F32, *(U32,) * 6, *(F32,) * 4, count=4, effects="warp")
mma_bf16 = asm(_MMA % "m16n8k16.row.col.f32.bf16.bf16.f32", F32, *(U32,) * 6, *(F32,) * 4, count=4, effects="warp")
ldmatrix_x4 = asm(
    "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {$0, $1, $2, $3}, [$4];", U32, U32, count=4, effects="memory"
)
_B1 = "mma.sync.aligned.%s.row.col.s32.b1.b1.s32.and.popc {$0, $1, $2, $3}, %s, {0, 0, 0, 0};"
mma_b1 = asm(_B1 % ("m16n8k128", "{$4, $5}, {$6}"), I32, U32, U32, U32, count=4, effects="warp")
mma_b1_wide = asm(_B1 % ("m16n8k256", "{$4, $5, $6, $7}, {$8, $9}"), I32, *(U32,) * 6, count=4, effects="warp")

# sm_90: bulk copies with their barriers, warps with different work, dependent launches
mbarrier_init = asm("mbarrier.init.shared.b64 [$0], 1;", NONE, U32, effects="memory")
mbarrier_init_arrivals = asm("mbarrier.init.shared.b64 [$0], $1;", NONE, U32, U32, effects="memory")
mbarrier_arrive = asm("mbarrier.arrive.shared.b64 _, [$0];", NONE, U32, effects="memory")
mbarrier_fence = asm("fence.mbarrier_init.release.cluster;", NONE, effects="memory")
mbarrier_expect = asm("mbarrier.arrive.expect_tx.shared.b64 _, [$0], $1;", NONE, U32, U32, effects="memory")
bulk_copy = asm_at(
    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$3], $1, [$2];",
    NONE, U32, U32, U32, size=16, effects="memory",
)  # fmt: skip
tensor_copy = asm(
    "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [$3], [$0, {$1, $2}], [$4];",
    NONE, U64, *(U32,) * 4, effects="memory",
)  # fmt: skip
prefetch_map = asm("prefetch.tensormap [$0];", NONE, U64, effects="memory")
mbarrier_wait = asm(
    "{ .reg .pred p; W: mbarrier.try_wait.parity.shared.b64 p, [$0], $1; @!p bra W; }",
    NONE, U32, U32, effects="memory",
)  # fmt: skip
# bar.sync requires all its warps to arrive at the same instruction, barrier.sync does not
sync_block = asm("barrier.sync 0;", NONE, effects="barrier")
sync_warps = asm("bar.sync $0, $1;", NONE, U32, U32, effects="barrier")
wait_previous_kernel = asm("griddepcontrol.wait;", NONE, effects="memory")
launch_next_kernel = asm("griddepcontrol.launch_dependents;", NONE, effects="memory")

# sm_90a: tensor cores that read an operand from shared memory and work on their own
wgmma = multiply_group
wgmma_fence = asm("wgmma.fence.sync.aligned;", NONE, effects="memory")
wgmma_commit = asm("wgmma.commit_group.sync.aligned;", NONE, effects="memory")
wgmma_wait = asm("wgmma.wait_group.sync.aligned {0};", NONE, effects="memory", literals=1)
more_registers = asm("setmaxnreg.inc.sync.aligned.u32 {0};", NONE, effects="barrier", literals=1)
fewer_registers = asm("setmaxnreg.dec.sync.aligned.u32 {0};", NONE, effects="barrier", literals=1)
