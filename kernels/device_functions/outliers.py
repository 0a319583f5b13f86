"""Outliers in a fused product: packed entries, prefetched and added up by a warp for 16 rows.

Two lanes take a row; what a row has beyond twice the average is added up by the whole warp, so that a few full rows
delay the others as little as possible.

Entries are CSR by row (`operands.outliers`): a word of column and float16, or where float16 would lose something two
words, column and float32. The device functions here know nothing of the kernel around them: it keeps x in shared
memory, and has a warp for each of the tiles side by side that adds up outliers while others multiply. This warp walks
over tiles ``tile``, ``tile + step`` ... with what :func:`outlier_tiles` gives: it looks up where the outliers of a tile
begin and end two tiles ahead, and copies them one tile ahead.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from bcqfmt.kernels import ptx
from bcqfmt.kernels.runtime.limits import ROWS
from bcqfmt.kernels.runtime.numba_cuda import cuda, inlined, types
from bcqfmt.kernels.runtime.unroll import static, unrolled

from .vectors import element_at

_LEAST = 64  # entries of a row that its two lanes take, however few the others have


class OutlierTiles(NamedTuple):
    """Device functions for a whole warp, called in this order; ``kept`` is where outliers of a tile go, ``bar`` theirs.

    ``usual``: how many of a row its two lanes take, for ``count`` outliers in ``tiles``. ``bounds``: where the outliers
    of a lane's row begin and end, of the first tile and the second; both need only the weight. ``prefetch``: start the
    copy of those of the first tile, when its barrier is initialised. ``add_up``: sums of the tile for row ``lane & 15``
    of every vector into ``values``; x is at ``base``, ``xs_bytes`` a vector. Given and returned by all is where the
    warp stands.
    """

    usual: Any
    bounds: Any
    prefetch: Any
    add_up: Any


def outlier_tiles(batch: int, kind: int, size: int) -> OutlierTiles:
    """For ``batch`` vectors of a type and entries of ``size`` bytes."""
    each, copy_entries, added_up = 16 // size, _entry_copier(size), _summer(kind, size)
    with_rest = _rests(added_up)

    def usual_of(count: Any, tiles: Any) -> Any:
        return max(ptx.u32(count // (tiles * (ROWS // 2))), ptx.u32(_LEAST))

    def bounds(indptr: Any, entries: Any, count: Any, tile: Any, tiles: Any, step: Any, lane: Any) -> Any:
        begin, end, next_begin, next_end = ptx.u32(0), ptx.u32(0), ptx.u32(0), ptx.u32(0)
        after_last = ptx.u32((max(count, ptx.u32(1)) - 1) // each)
        if tile < tiles:
            row = ptx.u32(tile * ROWS + (lane >> 1))
            begin, end = indptr[row], indptr[ptx.u32(row + 1)]
            # where its outliers will be if all tiles have about as many: prefetch 4 KB around it to L2
            about = ptx.u32(ptx.f32(count) * (ptx.f32(tile) / ptx.f32(tiles)))
            ptx.prefetch(entries, min(ptx.u32(max(ptx.u32(about // each + lane * 8), ptx.u32(128)) - 128), after_last))
            if ptx.u32(tile + step) < tiles:
                row = ptx.u32(row + step * ROWS)
                next_begin, next_end = indptr[row], indptr[ptx.u32(row + 1)]
        return begin, end, next_begin, next_end

    def prefetch(entries: Any, count: Any, room: Any, kept: Any, bar: Any, lane: Any, begin: Any, end: Any) -> Any:
        begin, end = min(begin, count), min(end, count)
        first, last = ptx.shfl_u32(begin, ptx.u32(0)), ptx.shfl_u32(end, ptx.u32(31))
        if lane == 0 and first < last:
            copy_entries(entries, first, last, room, kept, bar)
        return max(begin, first), end, first  # rows that begin before the first would be read outside of the copy

    prefetch = inlined(prefetch)

    def add_up(
        values: Any, indptr: Any, entries: Any, count: Any, room: Any, base: Any, xs_bytes: Any, columns: Any,
        kept: Any, bar: Any, tile: Any, tiles: Any, step: Any, usual: Any, lane: Any,
        parity: Any, begin: Any, end: Any, first: Any, next_begin: Any, next_end: Any,
    ) -> Any:  # fmt: skip
        last = ptx.shfl_u32(end, ptx.u32(31))
        if first < last:
            ptx.mbarrier_wait(bar, parity)
            parity = ptx.u32(parity ^ 1)
        stop = min(end, ptx.u32(begin + usual))
        long = ptx.ballot(ptx.u32(stop < end))
        xs, b = base, ptx.u32(0)
        while b < batch:  # not unrolled: that would take minutes to compile
            start = ptx.u32(first // each * each)
            k = ptx.u32(begin + (lane & 1))
            value = added_up(entries, k, stop, ptx.u32(2), start, kept, room, xs, columns)
            ptx.syncwarp()
            value = ptx.f32(value + ptx.shfl_xor_f32(value, ptx.u32(1)))
            if long != 0:
                value = with_rest(value, long, entries, stop, end, start, kept, room, xs, columns, lane)
            value = ptx.shfl_f32(value, ptx.u32((lane & 15) * 2))
            for one in static(batch):
                if b == one:
                    values[one] = value
            xs, b = ptx.u32(xs + xs_bytes), ptx.u32(b + 1)
        # past the last tile there is nothing: both are 0
        begin, end, first = prefetch(entries, count, room, kept, bar, lane, next_begin, next_end)
        after, next_begin, next_end = ptx.u32(tile + step + step), ptx.u32(0), ptx.u32(0)
        if after < tiles:
            row = ptx.u32(after * ROWS + (lane >> 1))
            next_begin, next_end = indptr[row], indptr[ptx.u32(row + 1)]  # looked at a tile later
        return parity, begin, end, first, next_begin, next_end

    return OutlierTiles(inlined(usual_of), inlined(bounds), prefetch, inlined(unrolled(add_up)))


def _rests(added_up: Any) -> Any:
    """A device function: ``value`` of each lane's row and, for rows of lanes in ``long``, entries ``stop`` .. ``end``.

    Row by row, all lanes of the warp together.
    """

    def with_rest(
        value: Any, long: Any, entries: Any, stop: Any, end: Any, first: Any, slot: Any, room: Any, xs: Any,
        columns: Any, lane: Any,
    ) -> Any:  # fmt: skip
        row = ptx.u32(0)
        while row < ROWS:
            if ptx.u32(long >> (2 * row) & 1) != 0:
                k = ptx.u32(ptx.shfl_u32(stop, ptx.u32(2 * row)) + lane)
                last = ptx.shfl_u32(end, ptx.u32(2 * row))
                more = added_up(entries, k, last, ptx.u32(32), first, slot, room, xs, columns)
                ptx.syncwarp()
                for m in static(5):
                    more = ptx.f32(more + ptx.shfl_xor_f32(more, ptx.u32(16 >> m)))
                if ptx.u32(lane >> 1) == row:
                    value = ptx.f32(value + more)
            row = ptx.u32(row + 1)
        return value

    return inlined(unrolled(with_rest))


def _entry_copier(size: int) -> Any:
    """A device function: one lane copies entries ``first`` .. ``last`` (``size`` bytes each) of a warp's rows.

    At most ``room`` bytes; the copy starts at a multiple of 16 bytes. Nothing is copied where there is none.
    """
    each = 16 // size

    def copy_entries(entries: Any, first: Any, last: Any, room: Any, slot: Any, bar: Any) -> None:
        begin = ptx.u32(first // each)
        count = min(ptx.u32((last + (each - 1)) // each - begin), ptx.u32(room >> 4))
        ptx.mbarrier_expect(bar, ptx.u32(count * 16))
        ptx.bulk_copy(entries, begin, slot, ptx.u32(count * 16), bar)

    return inlined(copy_entries)


def _summer(kind: int, size: int) -> Any:
    """A device function: the sum of value times x over every ``step``-th entry from ``k`` to ``end``, in that order.

    Entries of ``size`` bytes (column and float16 in a word, or column and float32 in two) are in shared memory at
    ``slot``, from entry ``first`` on; those beyond its ``room`` bytes are read from global memory. ``xs``: x in
    shared memory, in original order. Four entries are in flight at a time: one at a time, latency would dominate.
    """
    element, short = element_at(kind), size == 4

    def entry_at(slot: Any, at: Any) -> Any:
        if short:
            word = ptx.lds32(ptx.u32(slot + at * 4), ptx.u32(0))
            return ptx.u32(word & 0xFFFF), ptx.hi_f16(word)
        words = ptx.lds64(ptx.u32(slot + at * 8), ptx.u32(0))
        return words[0], ptx.bits_f32(words[1])

    def entry_of(entries: Any, k: Any) -> Any:
        if short:
            word = ptx.ldg32(entries, k)
            return ptx.u32(word & 0xFFFF), ptx.hi_f16(word)
        words = ptx.ldg64(entries, k)
        return words[0], ptx.bits_f32(words[1])

    def four_at_a_time(entry: Any) -> Any:
        def added(
            where: Any, k: Any, stop: Any, step: Any, before: Any, xs: Any, columns: Any, total: Any
        ) -> Any:  # fmt: skip
            values = cuda.local.array(4, types.float32)
            places = cuda.local.array(4, types.uint32)
            for i in static(4):
                place, value = entry(where, ptx.u32(min(ptx.u32(k + i * step), ptx.u32(stop - 1)) - before))
                values[i], places[i] = value, min(place, columns)
            for i in static(4):
                more = ptx.fma_f32(values[i], element(xs, places[i]), total)
                if ptx.u32(k + i * step) < stop:
                    total = more
            return total

        return inlined(unrolled(added))

    near, far = four_at_a_time(inlined(entry_at)), four_at_a_time(inlined(entry_of))

    def added_up(
        entries: Any, k: Any, end: Any, step: Any, first: Any, slot: Any, room: Any, xs: Any, columns: Any
    ) -> Any:
        total = ptx.f32(0.0)
        there, start = min(end, ptx.u32(first + room // size)), k
        while k < there:
            total = near(slot, k, there, step, first, xs, columns, total)
            k = ptx.u32(k + 4 * step)
        while k > start and ptx.u32(k - step) >= there:  # back to the first entry that is not in shared memory
            k = ptx.u32(k - step)
        while k < end:
            total = far(entries, k, end, step, ptx.u32(0), xs, columns, total)
            k = ptx.u32(k + 4 * step)
        return total

    return inlined(unrolled(added_up))
