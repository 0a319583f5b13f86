"""Words to codes ``uint8 [N, K]`` and back, a pair of functions for a layout (see `words`)."""

from __future__ import annotations

import numpy as np

from . import arrays, runs
from . import bit_programs as programs
from .arrays import Array, Codes, Words
from .bit_programs import Container
from .buffers import new_array
from .runs import Side


def stream_rows_to_codes(words: Array, bits: int, k: int, threads: int = 1) -> Codes:
    """LE(bits) along axis 0, [ceil(k*bits/32), N]: GPTQ weights; compressed-tensors zero points, [G, N] here."""
    words = arrays.words_in(words, arrays.length(k, bits), None)
    return _unpacked(runs.rows(words, programs.stream(bits), arrays.blocks_of(k)), k, threads)


def codes_to_stream_rows(codes: Array, bits: int, threads: int = 1) -> Words:
    """The inverse of `stream_rows_to_codes`."""
    codes = arrays.codes_in(codes)
    n, k = codes.shape
    words = new_array((arrays.length(k, bits), n), np.uint32)
    target = runs.rows(words, programs.stream(bits), arrays.blocks_of(k))
    runs.run(runs.codes(arrays.padded(codes)), target, threads=threads)
    return words


def stream_columns_to_codes(words: Array, bits: int, k: int, threads: int = 1) -> Codes:
    """LE(bits) along axis 1, [N, ceil(k*bits/32)]: compressed-tensors, AWQ GEMV; GPTQ zero points, [G, N] here."""
    words = arrays.words_in(words, None, arrays.length(k, bits))
    return _unpacked(runs.columns(words, programs.stream(bits), arrays.blocks_of(k)), k, threads)


def codes_to_stream_columns(codes: Array, bits: int, threads: int = 1) -> Words:
    """The inverse of `stream_columns_to_codes`."""
    return _to_columns(arrays.codes_in(codes), bits, programs.stream(bits), threads)


def planar_columns_to_codes(words: Array, bits: int, k: int | None = None, threads: int = 1) -> Codes:
    """gptq_p zero points [G, N*bits/32], N a multiple of 32, to codes [G, N]."""
    k = arrays.whole_blocks(words, bits, 1, k)
    words = arrays.words_in(words, None, arrays.length(k, bits))
    return _unpacked(runs.columns(words, programs.planar(bits), arrays.blocks_of(k)), k, threads)


def codes_to_planar_columns(codes: Array, bits: int, threads: int = 1) -> Words:
    """The inverse of `planar_columns_to_codes`."""
    return _to_columns(arrays.codes_in(codes, columns=32), bits, programs.planar(bits), threads)


def slots_to_codes(words: Array, bits: int, k: int, threads: int = 1) -> Codes:
    """floor(32/bits) whole codes per word along axis 1, [N, ceil(k/floor(32/bits))]: older compressed-tensors."""
    words = arrays.words_in(words, None, -(-k // _per_word(bits)))
    codes = arrays.new_codes(words.shape[0], k)
    runs.run(_slots(words, bits, k), _bytes(codes, bits), threads=threads)
    return arrays.cut(codes, k)


def codes_to_slots(codes: Array, bits: int, threads: int = 1) -> Words:
    """The inverse of `slots_to_codes`; bits above the slots are zero."""
    codes = arrays.codes_in(codes)
    n, k = codes.shape
    words = new_array((n, -(-k // _per_word(bits))), np.uint32)
    runs.run(_bytes(arrays.padded(codes), bits), _slots(words, bits, k), threads=threads)
    return words


def awq_gemm_to_codes(words: Array, threads: int = 1) -> Codes:
    """AWQ GEMM weights [K, N/8], interleaved nibbles, to codes [N, K]; zero points [G, N/8] to [N, G]."""
    words = arrays.words_in(words, None, None)
    k, lanes = words.shape
    codes = arrays.new_codes(8 * lanes, k)
    runs.run(runs.rows(words, programs.awq(), arrays.blocks_of(k)), runs.codes(codes).together(8), threads=threads)
    return arrays.cut(codes, k)


def codes_to_awq_gemm(codes: Array, threads: int = 1) -> Words:
    """The inverse of `awq_gemm_to_codes`; N is a multiple of 8."""
    codes = arrays.codes_in(codes, rows=8)
    n, k = codes.shape
    words = new_array((k, n // 8), np.uint32)
    target = runs.rows(words, programs.awq(), arrays.blocks_of(k))
    runs.run(runs.codes(arrays.padded(codes)).together(8), target, threads=threads)
    return words


def _unpacked(source: Side, k: int, threads: int) -> Codes:
    """Codes [lanes, k] of a layout."""
    codes = arrays.new_codes(source.lanes, k)
    runs.run(source, runs.codes(codes), threads=threads)
    return arrays.cut(codes, k)


def _to_columns(codes: Codes, bits: int, container: Container, threads: int) -> Words:
    n, k = codes.shape
    words = new_array((n, arrays.length(k, bits)), np.uint32)
    runs.run(runs.codes(arrays.padded(codes)), runs.columns(words, container, arrays.blocks_of(k)), threads=threads)
    return words


def _per_word(bits: int) -> int:
    arrays.length(0, bits)  # refuses bits out of range
    return 32 // bits


def _slots(words: Words, bits: int, k: int) -> Side:
    run = _per_word(bits) * programs.slots(bits).words
    return runs.columns(words, programs.slots(bits), -(-k // run))


def _bytes(codes: Codes, bits: int) -> Side:
    return runs.codes(codes, programs.byte_words(_per_word(bits) * programs.slots(bits).words // 4))
