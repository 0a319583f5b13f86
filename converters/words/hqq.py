"""HQQ words to codes and back. The codes, row after row, are cut into equal slabs, one above the other in a word.

The fields of a word are far apart in the matrix and a slab is one shift of many words: numpy does that as fast as
memory allows, so there is no compiled loop here.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from bcqfmt.compiled.threads import each_share

from .arrays import Array, Codes, codes_in, words_in

_SLABS = {8: 1, 6: 1, 5: 1, 4: 2, 3: 10, 2: 4, 1: 8}  # the first slab is the most significant field
_PIECE = 1 << 16


def hqq_to_codes(packed: Array, bits: int, n: int, k: int, threads: int = 1) -> Codes:
    """HQQ weights, axis=1: uint8 [N*K/(g*slabs), g], for 3 bits int32 [ceil(N*K/(10*g)), g], to codes [N, K].

    5, 6 and 8 bits: a byte is a code. 3 bits: ten slabs, the lines of the last ones may be padding.
    """
    slabs = _slabs(bits)
    flat = words_in(packed, None, None, itemsize=4 if bits == 3 else 1).reshape(-1)
    spare = flat.size * slabs - n * k
    if spare < 0 or spare >= max(slabs * packed.shape[1], 1) or (spare and bits != 3):
        raise ValueError(f"HQQ: {list(packed.shape)} elements of {slabs} codes each do not hold {n} x {k} codes")
    codes = np.empty(n * k, np.uint8)
    kind = flat.dtype.type
    mask = kind(2**bits - 1 if slabs > 1 else 255)

    def work(slab: int, first: int, stop: int) -> None:
        out = codes[slab * flat.size :][first:stop]
        fields = flat[first : first + out.size] >> kind(bits * (slabs - 1 - slab))
        np.bitwise_and(fields, mask, out=out, casting="unsafe")

    _each_slab(work, slabs, flat.size, threads)
    return codes.reshape(n, k)


def codes_to_hqq(codes: Array, bits: int, group: int, threads: int = 1) -> Array:
    """The inverse of `hqq_to_codes`: uint8, for 3 bits int32 with zero padding; ``group`` is the length of a line."""
    flat = codes_in(codes).reshape(-1)
    slabs = _slabs(bits)
    lines, over = divmod(flat.size, group)
    if over or (bits != 3 and lines % slabs):
        raise ValueError(f"HQQ: {flat.size} codes are not {slabs} equal slabs of lines of {group}")
    packed = np.zeros((-(-lines // slabs), group), np.uint32 if bits == 3 else np.uint8)
    target = packed.reshape(-1)
    kind = target.dtype.type
    mask = np.uint8(2**bits - 1 if slabs > 1 else 255)

    def work(slab: int, first: int, stop: int) -> None:
        fields = (flat[slab * target.size :][first:stop] & mask).astype(kind)
        target[first : first + fields.size] |= fields << kind(bits * (slabs - 1 - slab))

    _each_slab(work, slabs, target.size, threads)
    return packed.view(np.int32) if bits == 3 else packed


def _slabs(bits: int) -> int:
    if bits not in _SLABS:
        raise ValueError(f"HQQ has no packing of {bits} bits")
    return _SLABS[bits]


def _each_slab(work: Callable[[int, int, int], None], slabs: int, size: int, threads: int) -> None:
    def share(first: int, stop: int) -> None:
        for start in range(first, stop, _PIECE):  # all slabs of a piece while it is in the cache
            for slab in range(slabs):
                work(slab, start, min(start + _PIECE, stop))

    each_share(share, size, _PIECE, threads)
