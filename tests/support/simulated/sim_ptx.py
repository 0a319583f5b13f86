"""Small kernels that exercise the instructions and the mended simulator; run there, and on a GPU by tests/gpu."""

from __future__ import annotations

from typing import Any

import numpy as np

from bcqfmt.kernels import ptx
from bcqfmt.kernels.runtime.launch import kernel
from bcqfmt.kernels.runtime.numba_cuda import cuda, types

# name of the instruction -> declared result and arguments; every one is a pure function of numbers
PURE = {
    "prmt": "u32 u32 u32 u32", "funnel_right": "u32 u32 u32 u32",
    "min_u32": "u32 u32 u32", "div_u32": "u32 u32 u32", "rem_u32": "u32 u32 u32",
    "f32_bits": "u32 f32", "bits_f32": "f32 u32",
    "lo_f16": "f32 u32", "hi_f16": "f32 u32", "lo_bf16": "f32 u32", "hi_bf16": "f32 u32",
    "f32_to_f16": "u32 f32", "f32_to_bf16": "u32 f32", "f64_to_f16": "u32 f64", "f64_to_bf16": "u32 f64",
    "f64_to_f32": "f32 f64", "pack_f16": "u32 f32 f32", "pack_bf16": "u32 f32 f32",
    "add_f64": "f64 f64 f64", "sub_f64": "f64 f64 f64", "mul_f64": "f64 f64 f64",
    "add_f32": "f32 f32 f32", "sub_f32": "f32 f32 f32", "mul_f32": "f32 f32 f32", "fma_f32": "f32 f32 f32 f32",
    "hadd2": "u32 u32 u32", "hsub2": "u32 u32 u32", "hmul2": "u32 u32 u32", "hfma2": "u32 u32 u32 u32",
    "bfma2": "u32 u32 u32 u32",
}  # fmt: skip
NUMPY: dict[str, Any] = {"u32": np.uint32, "i32": np.int32, "f32": np.float32, "f64": np.float64}


def pure_kernel(name: str) -> Any:
    """A kernel that applies the instruction to arrays, element by element."""
    instruction = getattr(ptx, name)
    result, *arguments = PURE[name].split()
    declared = ", ".join(f"{kind}* a{i}" for i, kind in enumerate(arguments)) + f", {result}* y, u32 n"

    if len(arguments) == 1:

        def apply(a0: Any, y: Any, n: Any) -> None:
            i = ptx.u32(cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x)
            if i < n:
                y[i] = instruction(a0[i])
    elif len(arguments) == 2:

        def apply(a0: Any, a1: Any, y: Any, n: Any) -> None:  # type: ignore[misc]
            i = ptx.u32(cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x)
            if i < n:
                y[i] = instruction(a0[i], a1[i])
    else:

        def apply(a0: Any, a1: Any, a2: Any, y: Any, n: Any) -> None:  # type: ignore[misc]
            i = ptx.u32(cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x)
            if i < n:
                y[i] = instruction(a0[i], a1[i], a2[i])

    return kernel(declared, threads=256)(apply)


@kernel("u32* a, u32* b, i32* c, i32* d", threads=32)
def mma_s8(a: Any, b: Any, c: Any, d: Any) -> None:
    """One m16n8k32: a (32, 4), b (32, 2), c and d (32, 4)."""
    t = ptx.lane_id()
    d0, d1, d2, d3 = ptx.mma_s8(
        a[4 * t], a[4 * t + 1], a[4 * t + 2], a[4 * t + 3], b[2 * t], b[2 * t + 1],
        c[4 * t], c[4 * t + 1], c[4 * t + 2], c[4 * t + 3],
    )  # fmt: skip
    d[4 * t] = d0
    d[4 * t + 1] = d1
    d[4 * t + 2] = d2
    d[4 * t + 3] = d3


@kernel("u32* a, u32* b, f32* c, f32* d, f32* e", threads=32)
def mma_float(a: Any, b: Any, c: Any, d: Any, e: Any) -> None:
    """One m16n8k16 with F16 into d and one with BF16 into e."""
    t = ptx.lane_id()
    d0, d1, d2, d3 = ptx.mma_f16(
        a[4 * t], a[4 * t + 1], a[4 * t + 2], a[4 * t + 3], b[2 * t], b[2 * t + 1],
        c[4 * t], c[4 * t + 1], c[4 * t + 2], c[4 * t + 3],
    )  # fmt: skip
    d[4 * t] = d0
    d[4 * t + 1] = d1
    d[4 * t + 2] = d2
    d[4 * t + 3] = d3
    d0, d1, d2, d3 = ptx.mma_bf16(
        a[4 * t], a[4 * t + 1], a[4 * t + 2], a[4 * t + 3], b[2 * t], b[2 * t + 1],
        c[4 * t], c[4 * t + 1], c[4 * t + 2], c[4 * t + 3],
    )  # fmt: skip
    e[4 * t] = d0
    e[4 * t + 1] = d1
    e[4 * t + 2] = d2
    e[4 * t + 3] = d3


@kernel("u32* words, u32* y", threads=64)
def exchanges(words: Any, y: Any) -> None:
    """Two warps: y (10, 64) = shuffles of words and of numbers, ballot, lop3, matrices out of shared memory."""
    room = cuda.shared.array(512, types.uint32)
    t = ptx.u32(cuda.threadIdx.x)
    lane = ptx.lane_id()
    w = words[t]
    y[t] = ptx.shfl_u32(w, ptx.u32((lane * 7 + 3) & 31))
    y[64 + t] = ptx.shfl_xor_u32(w, 5)
    number = ptx.f32(w & 0xFFFF)
    y[128 + t] = ptx.f32_bits(ptx.shfl_f32(number, ptx.u32(31 - lane)))
    y[192 + t] = ptx.f32_bits(ptx.shfl_xor_f32(number, 16))
    y[256 + t] = ptx.ballot(w & 4)
    y[320 + t] = ptx.lop3(w, t, y[t], 0xCA)
    # each warp: 32 rows of 16 bytes, written as numbers of two widths, read as four 8x8 matrices
    base = ptx.u32(ptx.shared_address(room) + (t >> 5) * 1024)
    ptx.sts64(base, ptx.u32(lane * 16), w, ptx.u32(w + 1))
    ptx.sts32(base, ptx.u32(lane * 16 + 8), ptx.u32(w + 2))
    ptx.sts_f32(base, ptx.u32(lane * 16 + 12), number)
    ptx.syncwarp()
    m0, m1, m2, m3 = ptx.ldmatrix_x4(ptx.u32(base + lane * 16))
    y[384 + t] = m0
    y[448 + t] = m1
    y[512 + t] = m2
    y[576 + t] = m3


@kernel("u32* words, u32* y", threads=64)
def arrivals(words: Any, y: Any) -> None:
    """Two phases of a barrier that wants three arrivals and 32 bytes: what warp 1 finds after each, y (2, 32)."""
    room = cuda.shared.array(64, types.uint32)
    t, lane = ptx.u32(cuda.threadIdx.x), ptx.lane_id()
    base = ptx.shared_address(room)
    bar = ptx.u32(base + 128)
    if t == 0:
        ptx.mbarrier_init_arrivals(bar, ptx.u32(3))
        ptx.mbarrier_fence()
    ptx.sync_block()
    for phase in range(2):
        if t == 0:
            ptx.mbarrier_expect(bar, ptx.u32(32))
            ptx.bulk_copy(words, ptx.u32(2 * phase + 1), ptx.u32(base + 16), ptx.u32(16), bar)
            ptx.bulk_copy(words, ptx.u32(2 * phase), base, ptx.u32(16), bar)
        elif t < 3:
            ptx.sts32(base, ptx.u32(32 + 4 * t), ptx.u32(phase + 1))
            ptx.mbarrier_arrive(bar)
        elif t >= 32:
            ptx.mbarrier_wait(bar, ptx.u32(phase))
            y[32 * phase + lane] = ptx.lds32(base, ptx.u32(lane * 4)) if lane < 11 else ptx.u32(0)
        ptx.sync_block()


_TWO = ptx.cp_async_run(2, 512)


@kernel("u32* words, u32* y, u32* counter", threads=64)
def copies(words: Any, y: Any, counter: Any) -> None:
    """64 threads copy 1024 bytes in every way: y (4, 256) and a counter that wraps."""
    room = cuda.shared.array(516, types.uint32)
    t = ptx.u32(cuda.threadIdx.x)
    base = ptx.shared_address(room)
    a, b, c, d = ptx.ldg128(words, t)
    ptx.stg128(y, t, a, b, c, d)
    bar = ptx.u32(base + 2048)
    if t == 0:
        ptx.mbarrier_init_arrivals(bar, ptx.u32(32))
    ptx.sync_block()
    if t < 32:
        _TWO(words, t, ptx.u32(base + t * 16))
        ptx.cp_async_arrive(bar)
    ptx.mbarrier_poll(bar, ptx.u32(0))
    ptx.cp_async16(words, t, ptx.u32(base + 1024 + t * 16), ptx.u32(t & 1) * 8)
    ptx.cp_async_commit()
    ptx.cp_async_wait(0)
    cuda.syncthreads()
    a, b, c, d = ptx.lds128(base, ptx.u32((63 - t) * 16))
    ptx.stg128_stream(y, ptx.u32(64 + t), a, b, c, d)
    a, b = ptx.lds64(base, ptx.u32(1024 + t * 16))
    ptx.stg64(y, ptx.u32(256 + 2 * t), a, b)
    c, d = ptx.ldg64(words, ptx.u32(2 * t + 1))
    ptx.stg64(y, ptx.u32(256 + 2 * t + 1), c, d)
    y[768 + t] = ptx.ldg32(words, t)
    y[832 + t] = ptx.lds32(base, ptx.u32(t * 4))
    y[896 + t] = ptx.f32_bits(ptx.lds_f32(base, ptx.u32(t * 4)))
    y[960 + t] = ptx.atomic_inc(counter, 0, 40)


@kernel("u32* y", threads=64)
def divergent(y: Any) -> None:
    """Half of a warp waits for the block, half for the warp: an error on any device."""
    if cuda.threadIdx.x < 16:
        cuda.syncthreads()
    else:
        ptx.syncwarp()
    y[0] = 1


@kernel("u32* y, u32 at", threads=32)
def writes_at(y: Any, at: Any) -> None:
    """One word at an index of the caller's choice."""
    if cuda.threadIdx.x == 3:
        y[at] = 1


@kernel("u32* y, u32 at", threads=32)
def shared_at(y: Any, at: Any) -> None:
    """One word of a shared array of 64 at a byte of the caller's choice."""
    room = cuda.shared.array(64, types.uint32)
    room[cuda.threadIdx.x] = 7
    room[cuda.threadIdx.x + 32] = 7
    cuda.syncthreads()
    if cuda.threadIdx.x == 0:
        y[0] = ptx.lds32(ptx.shared_address(room), at)


@kernel("u32* y", threads=64)
def early_exit(y: Any) -> None:
    """Threads that end do not hold up a barrier of the others."""
    if cuda.threadIdx.x >= 40:
        return
    cuda.syncthreads()
    y[cuda.threadIdx.x] = 1


def run(name: str, *arguments: Any, grid: int = 1, threads: int = 64) -> list[Any]:
    """Launch one of the kernels above on host arrays and return them."""
    found = [np.ascontiguousarray(a).copy() if isinstance(a, np.ndarray) else a for a in arguments]
    globals()[name].launch((grid,), threads, *found)
    return found


def run_pure(name: str, *arguments: Any) -> Any:
    """An instruction on arrays, through a kernel."""
    y = np.zeros(arguments[0].size, NUMPY[PURE[name].split()[0]])
    pure_kernel(name).launch((-(-y.size // 32),), 32, *arguments, y, y.size)
    return y
