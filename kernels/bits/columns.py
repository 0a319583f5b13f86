"""How the threads of a block walk over the columns of all vectors: device functions."""

from __future__ import annotations

from typing import Any

from bcqfmt.kernels import ptx
from bcqfmt.kernels.device_functions.numbers import WIDEN
from bcqfmt.kernels.runtime.numba_cuda import cuda, inlined, types
from bcqfmt.kernels.runtime.unroll import static, unrolled

from .layout import BitLayout


def column_walker(layout: BitLayout, batch: int, kind: int, threads: int, reordered: bool, put: Any) -> Any:
    """A device function for ``threads`` threads: ``put(v, b, column, base, lane)`` for all columns, eight at a time.

    ``v``: columns ``column`` .. + 7 of vector ``b`` as float32, zeros past the segment; ``column`` may be past the
    last chunk, so that all lanes of a warp take part.
    """
    words, width, step = 8 if kind == 0 else 4, layout.width, threads * 8
    line, per_piece, rounds = 256 // words, 32 // words, -(-layout.chunks * 256 // step)
    together = min(rounds, 2)  # loads of several columns in flight at once
    turns, raw_words = -(-rounds // together), together * words
    ask, take = _eight_columns(kind, width, reordered)

    def walk(x: Any, perm: Any, base: Any, thread: Any, columns: Any, start: Any) -> None:
        lane = ptx.u32(thread & 31)
        quick = (columns & 7) == 0 and (start & 7) == 0
        raw = cuda.local.array(raw_words, types.uint32)
        after = cuda.local.array(raw_words, types.uint32)
        for i in static(together):
            ask(x, raw, i * words, ptx.u32(0), ptx.u32(thread * 8 + i * step), columns, start, quick)
        if quick and (thread & (line // 8 - 1)) == 0:  # the rest, so that it does not queue behind the weights
            for b in range(batch):
                for i in range(rounds):
                    column = ptx.u32(thread * 8 + i * step)
                    if column < width and (b > 0 or i >= together):
                        ptx.prefetch(x, ptx.u32((b * columns + start + column) // per_piece))
        for turn in range(turns):
            for b in range(batch):
                # the next columns are loaded before these are used
                next_turn, next_b = (turn, b + 1) if b + 1 < batch else (turn + 1, 0)
                for i in static(together):
                    column = ptx.u32(thread * 8 + (next_turn * together + i) * step)
                    ask(x, after, i * words, ptx.u32(next_b), column, columns, start, quick)
                for i in static(together):
                    column = ptx.u32(thread * 8 + (turn * together + i) * step)
                    v = cuda.local.array(8, types.float32)
                    take(x, perm, raw, i * words, v, ptx.u32(b), column, columns, start, quick)
                    put(v, b, column, base, lane)
                for w in static(raw_words):
                    raw[w] = after[w]

    return inlined(unrolled(walk))


def _eight_columns(kind: int, width: int, reordered: bool) -> Any:
    """Two device functions: load columns ``column`` .. + 7 of vector ``b``; convert them to float32.

    The first puts the words of 16-byte loads into ``raw`` from ``to`` on, or zeros; the second puts numbers into ``v``,
    with loads of its own where the columns are reordered, cut off at the segment's end, or not ``quick``:
    vectors and segments that begin at multiples of eight columns.
    """
    widen, words = WIDEN[kind], 8 if kind == 0 else 4

    def ask(x: Any, raw: Any, to: Any, b: Any, column: Any, columns: Any, start: Any, quick: Any) -> None:
        for w in static(words):
            raw[to + w] = ptx.u32(0)
        if quick and not reordered and column + 8 <= width:
            at = ptx.u32((b * columns + start + column) // (32 // words))
            for e in static(words // 4):
                four = ptx.ldcg128(x, ptx.u32(at + e))
                for w in static(4):
                    raw[to + 4 * e + w] = four[w]

    def take(
        x: Any, perm: Any, raw: Any, to: Any, v: Any, b: Any, column: Any, columns: Any, start: Any, quick: Any
    ) -> None:  # fmt: skip
        for k in static(8):
            word = raw[to + (k if kind == 0 else k // 2)]
            v[k] = widen(ptx.u32(word if kind == 0 or k % 2 == 0 else word >> 16))
        if reordered or not quick or column + 8 > width:
            for k in static(8):
                if column + k < width:
                    place = ptx.u32(start + column + k)
                    if reordered:
                        place = min(ptx.u32(perm[place]), ptx.u32(columns - 1))
                    found = x[ptx.u32(b * columns + place)]
                    v[k] = widen(ptx.u32(found))

    return inlined(unrolled(ask)), inlined(unrolled(take))
