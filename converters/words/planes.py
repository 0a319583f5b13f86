"""Words and codes to planes ``uint32 [bits, N, ceil(K/32)]`` and back, in one pass (see `words`).

``perm``: stored column j is the original column ``perm[j]``. ``k``: K, by default as many codes as fit in the words;
bits after the last code are zero in the result. Where planes are given, ``bits`` is only checked.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from bcqfmt.compiled.threads import each_share

from . import arrays, runs
from . import bit_programs as programs
from .arrays import Array, Codes, Order, Words
from .buffers import new_array
from .runs import Side
from .straight import UNITS, straight_rows


def codes_to_planes(codes: Array, bits: int, perm: Array | None = None, threads: int = 1) -> Words:
    """Codes [N, K] in their original order."""
    codes = arrays.codes_in(codes)
    return _to_planes(runs.codes(arrays.padded(codes)), bits, codes.shape[1], perm, threads)


def planes_to_codes(planes: Array, k: int, perm: Array | None = None, threads: int = 1) -> Codes:
    """The inverse of `codes_to_planes`: columns in their original order."""
    planes, k = arrays.planes_in(planes, k)
    codes = arrays.new_codes(planes.shape[1], k)
    _from_planes(planes, runs.codes(codes), k, perm, threads)
    return arrays.cut(codes, k)


def gptq_to_planes(
    words: Array,
    bits: int,
    k: int | None = None,
    threads: int = 1,
    perm: Array | None = None,
    proof: list[bool] | None = None,
) -> Words:
    """GPTQ weights [ceil(K*bits/32), N]: LE(bits) along axis 0.

    ``proof``: gets whether the planes give back the words, where straight code can compare them on the way.
    """
    k = words.shape[0] * 32 // bits if k is None else k
    words = arrays.words_in(words, arrays.length(k, bits), None)
    if perm is None and _straight(bits, words.shape[1], k):
        planes = arrays.new_planes(bits, words.shape[1], k)
        _run_straight(words, planes, True, threads, proof)
        return planes
    return _to_planes(runs.rows(words, programs.stream(bits), arrays.blocks_of(k)), bits, k, perm, threads)


def planes_to_gptq(
    planes: Array, bits: int | None = None, k: int | None = None, threads: int = 1, perm: Array | None = None,
    out: Words | None = None,
) -> Words:  # fmt: skip
    """The inverse of `gptq_to_planes`; ``out``: some columns of an array, to be filled."""
    planes, k = arrays.planes_in(planes, k, bits)
    bits, n, _ = planes.shape
    words = new_array((arrays.length(k, bits), n), np.uint32) if out is None else out
    if perm is None and _straight(bits, n, k):
        _run_straight(words, planes, False, threads)
        return words
    _from_planes(planes, runs.rows(words, programs.stream(bits), arrays.blocks_of(k)), k, perm, threads)
    return words


def columns_to_planes(
    words: Array, bits: int, k: int | None = None, threads: int = 1, perm: Array | None = None
) -> Words:
    """compressed-tensors and AWQ GEMV weights [N, ceil(K*bits/32)]: LE(bits) along axis 1."""
    k = words.shape[1] * 32 // bits if k is None else k
    words = arrays.words_in(words, None, arrays.length(k, bits))
    return _to_planes(runs.columns(words, programs.stream(bits), arrays.blocks_of(k)), bits, k, perm, threads)


def planes_to_columns(
    planes: Array, bits: int | None = None, k: int | None = None, threads: int = 1, perm: Array | None = None
) -> Words:
    """The inverse of `columns_to_planes`."""
    planes, k = arrays.planes_in(planes, k)
    bits, n, _ = planes.shape
    words = new_array((n, arrays.length(k, bits)), np.uint32)
    _from_planes(planes, runs.columns(words, programs.stream(bits), arrays.blocks_of(k)), k, perm, threads)
    return words


def planar_to_planes(
    words: Array, bits: int, k: int | None = None, threads: int = 1, perm: Array | None = None
) -> Words:
    """gptq_p weights [K*bits/32, N]."""
    k = arrays.whole_blocks(words, bits, 0, k)
    words = arrays.words_in(words, None, None)
    return _to_planes(runs.rows(words, programs.planar(bits), arrays.blocks_of(k)), bits, k, perm, threads)


def planes_to_planar(
    planes: Array, bits: int | None = None, k: int | None = None, threads: int = 1, perm: Array | None = None,
    out: Words | None = None,
) -> Words:  # fmt: skip
    """The inverse of `planar_to_planes`; ``out``: as in `planes_to_gptq`."""
    planes, k = arrays.planes_in(planes, k, bits, multiple=32)
    bits, n, _ = planes.shape
    words = new_array((arrays.length(k, bits), n), np.uint32) if out is None else out
    _from_planes(planes, runs.rows(words, programs.planar(bits), arrays.blocks_of(k)), k, perm, threads)
    return words


def awq_to_planes(words: Array, threads: int = 1) -> Words:
    """AWQ GEMM weights [K, N/8], 4 bits."""
    words = arrays.words_in(words, None, None)
    k, lanes = words.shape
    planes = arrays.new_planes(4, 8 * lanes, k)
    runs.run(runs.rows(words, programs.awq(), arrays.blocks_of(k)), runs.planes(planes).together(8), threads=threads)
    return planes


def planes_to_awq(planes: Array, k: int | None = None, threads: int = 1) -> Words:
    """The inverse of `awq_to_planes`; N is a multiple of 8."""
    planes, k = arrays.planes_in(planes, k, 4)
    n = planes.shape[1]
    if n % 8:
        raise ValueError(f"planes of {n} rows; AWQ words hold multiples of 8")
    words = new_array((k, n // 8), np.uint32)
    runs.run(runs.planes(planes).together(8), runs.rows(words, programs.awq(), arrays.blocks_of(k)), threads=threads)
    return words


def gemv_fast_to_planes(words: Array, threads: int = 1) -> Words:
    """AWQ GEMV-fast and llm-awq v2: int16 [N/4, K], K a multiple of 64."""
    words = arrays.gemv_fast_in(words)
    k = 8 * words.shape[1]
    return _to_planes(runs.columns(words, programs.gemv_fast(), k // 32), 4, k, None, threads)


def planes_to_gemv_fast(planes: Array, k: int | None = None, threads: int = 1) -> npt.NDArray[np.int16]:
    """The inverse of `gemv_fast_to_planes`; N is a multiple of 4."""
    planes, k = arrays.planes_in(planes, k, 4, multiple=64)
    n = planes.shape[1]
    if n % 4:
        raise ValueError(f"planes of {n} rows; GEMV-fast words hold multiples of 4")
    words = new_array((n, k // 8), np.uint32)
    runs.run(runs.planes(planes), runs.columns(words, programs.gemv_fast(), k // 32), threads=threads)
    return arrays.gemv_fast_out(words)


def anybcq_to_planes(words: Array, threads: int = 1) -> Words:
    """AnyBCQ [K/32, B, N]: planes already, in another order of axes; plane i stays plane i."""
    words = arrays.words_in(words, None, None, None)
    blocks, bits, n = words.shape
    source = runs.rows(words.reshape(blocks * bits, n), programs.plane_words(bits), blocks)
    return _to_planes(source, bits, 32 * blocks, None, threads)


def planes_to_anybcq(planes: Array, threads: int = 1) -> Words:
    """The inverse of `anybcq_to_planes`."""
    planes, _ = arrays.planes_in(planes, None)
    bits, n, blocks = planes.shape
    words = new_array((blocks * bits, n), np.uint32)
    runs.run(runs.planes(planes), runs.rows(words, programs.plane_words(bits), blocks), threads=threads)
    return words.reshape(blocks, bits, n)


def _to_planes(source: Side, bits: int, k: int, perm: Array | None, threads: int) -> Words:
    """Planes [bits, lanes, ceil(k/32)] of a layout."""
    planes = arrays.new_planes(bits, source.lanes, k)
    _run(source, runs.planes(planes), bits, k, arrays.permutation(perm, k), threads)
    return planes


def _from_planes(planes: Words, target: Side, k: int, perm: Array | None, threads: int) -> None:
    """The inverse: fill the words of a layout."""
    _run(runs.planes(planes), target, len(planes), k, arrays.inverse(perm, k), threads)


def _straight(bits: int, n: int, k: int) -> bool:
    """Whether straight code does it: bits that divide a word, nothing to be cleared after the last code."""
    return bits in (2, 4, 8) and n >= UNITS and k >= 32 * UNITS and k % 32 == 0


def _run_straight(words: Words, planes: Words, to_planes: bool, threads: int, proof: list[bool] | None = None) -> None:
    """LE(bits) words [K*bits/32, N] to planes, or back; see `straight_rows`."""
    bits, n, blocks = planes.shape
    memory, row = arrays.flat(words)
    loop = straight_rows(bits, to_planes, proof is not None)
    wrong: list[int] = []

    def work(first: int, stop: int) -> None:
        wrong.append(loop(memory, planes.reshape(-1), row, n * blocks, blocks, blocks, first, stop))

    each_share(work, n, 64, threads)
    if proof is not None:
        proof.append(not any(wrong))


def _run(source: Side, target: Side, bits: int, k: int, order: Order | None, threads: int) -> None:
    if order is None:
        runs.run(source, target, k % 32, threads)
    else:
        runs.run_in_order(source, target, bits, order, threads)
