"""Vectors in shared memory, as they come: how they get there and how one element is read, as device functions."""

from __future__ import annotations

from typing import Any

from bcqfmt.kernels import ptx
from bcqfmt.kernels.runtime.numba_cuda import cuda, inlined, types
from bcqfmt.kernels.runtime.unroll import static, unrolled

from .numbers import WIDEN


def vector_loader(batch: int, kind: int, threads: int, together: int = 2) -> Any:
    """A device function for ``threads`` threads: all vectors to ``base``, ``xs_bytes`` each, zeros after the last.

    Not by a bulk copy: it would queue behind those of the weights, which start earlier. ``together`` pieces of 16
    bytes are loaded before any is used.
    """
    each, words = 1 if kind == 0 else 2, 4 * together
    per = 4 * each

    def load(x: Any, base: Any, xs_bytes: Any, columns: Any, thread: Any) -> None:
        zero = ptx.u32(0)
        held = cuda.local.array(words, types.uint32)
        for b in static(batch):
            here = ptx.u32(base + b * xs_bytes)
            s = thread
            if columns % per == 0:
                pieces, begin = ptx.u32(columns // per), ptx.u32(b * (columns // per))
                while s <= pieces:
                    for i in static(together):
                        a0, a1, a2, a3 = zero, zero, zero, zero
                        if ptx.u32(s + i * threads) < pieces:
                            a0, a1, a2, a3 = ptx.ldcg128(x, ptx.u32(begin + s + i * threads))
                        held[4 * i], held[4 * i + 1], held[4 * i + 2], held[4 * i + 3] = a0, a1, a2, a3
                    for i in static(together):
                        at = ptx.u32(s + i * threads)
                        if at <= pieces:
                            ptx.sts128(
                                ptx.u32(here + at * 16), zero,
                                held[4 * i], held[4 * i + 1], held[4 * i + 2], held[4 * i + 3],
                            )  # fmt: skip
                    s = ptx.u32(s + together * threads)
            else:
                while ptx.u32(s * 16) < xs_bytes:
                    for w in static(4):
                        held[w] = zero
                    for k in static(per):
                        if ptx.u32(s * per + k) < columns:
                            found = ptx.u32(x[ptx.u32(b * columns + s * per + k)])
                            held[k // each] = ptx.u32(held[k // each] | found << (k % each * 16))
                    ptx.sts128(ptx.u32(here + s * 16), zero, held[0], held[1], held[2], held[3])
                    s = ptx.u32(s + threads)

    return inlined(unrolled(load))


def element_at(kind: int) -> Any:
    """A device function: element ``place`` of a vector in shared memory, as float32."""
    widen = WIDEN[kind]

    def full(address: Any, place: Any) -> Any:
        return ptx.lds_f32(ptx.u32(address + place * 4), ptx.u32(0))

    def half(address: Any, place: Any) -> Any:
        return widen(ptx.lds16(ptx.u32(address + place * 2), ptx.u32(0)))

    return inlined(full if kind == 0 else half)
