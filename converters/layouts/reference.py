"""Values of a source straight from its tensors: what the tools' own arithmetic gives, for ``verify`` to compare with.

Written from the descriptions of the layouts alone, slowly and plainly. It shares nothing with the word packers, the
converters or the decoder, so that a mistake made there does not repeat itself here. Bit streams are unpacked by
numpy's own ``unpackbits``; values are exact in double precision and rounded once where the tools round once:

| layout | value |
|---|---|
| GPTQ, AWQ GEMM and GEMV, compressed-tensors | RN(s * (q - zp)) |
| AWQ GEMV-fast | RN(q * s + z), z as stored |
| HQQ | RN(RN(q - z) * s) |
| GGUF | ggml's own operations in F32 (`converters.gguf.values`) |
"""

from __future__ import annotations

from typing import Any

import ml_dtypes  # noqa: F401 - numpy knows bfloat16 with it
import numpy as np
import numpy.typing as npt

from bcqfmt.converters.gguf.values import values_of

from .protocol import Module

Array = npt.NDArray[Any]
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # column of nibble i
_PLANES = {3: (2, 1), 5: (4, 1), 6: (4, 2), 7: (4, 2, 1)}  # how gptq_p cuts a width, low bits first
_SWAPPED = (0x24924924, 0x92492492, 0x49249249)  # GPTQModel before 7.0, 3 bits


def reference_rows(module: Module, rows: int | None = None) -> Array | None:
    """Values of the first ``rows`` rows, ``([E,] rows, K)``; None where values are defined by the format alone."""
    if module.layout == "gptq":
        return _gptq(module, rows)
    if module.layout == "awq":
        return {"gemm": _gemm, "gemv": _gemv, "gemv_fast": _gemv_fast}[module.settings["variant"]](module, rows)
    if module.layout == "compressed-tensors":
        return _compressed(module, rows)
    if module.layout == "hqq":
        return _hqq(module, rows)
    if module.layout == "gguf":
        return _gguf(module, rows)
    return None


# ------------------------------------------------------------------------------------------------------- layouts
def _gptq(module: Module, rows: int | None) -> Array:
    s, tensors = module.settings, module.tensors
    bits, k, n = s["bits"], s["k"], rows or s["n"]
    unpack = _planar if s["planar"] else _stream
    qweight = tensors["qweight"].array()[:, :n]
    codes = unpack(np.ascontiguousarray(qweight.T), bits, k)
    qzeros = tensors["qzeros"].array().view(np.uint32)[:, : -(-n // 32) * bits]  # the words of the first n fields
    rule = s["zero_point"]
    if rule == "v1-gptqmodel-3bit":
        qzeros = qzeros + np.resize(np.array(_SWAPPED, np.uint32), qzeros.shape[1])
    elif rule == "v1-carry":
        ones = np.uint32(sum(1 << shift for shift in range(0, 32, bits)))
        qzeros = qzeros + ones
    zeros = unpack(qzeros, bits, n)
    if rule == "v1-nowrap":
        zeros = zeros + 1
    elif rule == "v1-wrap":
        zeros = (zeros + 1) % 2**bits
    g_idx = tensors["g_idx"].array() if "g_idx" in tensors else np.arange(k) // s["group_size"]
    scales = tensors["scales"].array()[:, :n]
    return _scaled(codes, scales.T[:, g_idx], zeros.T[:, g_idx])


def _gemm(module: Module, rows: int | None) -> Array:
    s, tensors = module.settings, module.tensors

    def nibbles(words: Array) -> Array:
        found = np.empty((words.shape[0], words.shape[1], 8), np.int64)
        for i, column in enumerate(_AWQ_ORDER):
            found[:, :, column] = (words.view(np.uint32) >> np.uint32(4 * i)) & 15
        return found.reshape(words.shape[0], -1)

    wanted = rows or s["n"]
    words = -(-wanted // 8)
    codes = nibbles(np.ascontiguousarray(tensors["qweight"].array()[:, :words]))[:, :wanted].T
    zeros = nibbles(tensors["qzeros"].array())[:, :wanted].T
    group = np.arange(s["k"]) // s["group_size"]
    return _scaled(codes, tensors["scales"].array()[:, :wanted].T[:, group], zeros[:, group])


def _gemv(module: Module, rows: int | None) -> Array:
    s, tensors = module.settings, module.tensors
    wanted, group = rows or s["n"], np.arange(s["k"]) // s["group_size"]
    codes = _stream(tensors["qweight"].read((0, wanted)), 4, s["k"])
    zeros = _stream(tensors["qzeros"].read((0, wanted)), 4, s["padded"])
    return _scaled(codes, tensors["scales"].read((0, wanted))[:, group], zeros[:, group])


def _gemv_fast(module: Module, rows: int | None) -> Array:
    s, tensors = module.settings, module.tensors
    row, k = np.arange(rows or s["n"])[:, None], np.arange(s["k"])[None, :]
    qweight = tensors["qweight"].read((0, -(-row.size // 4))).view(np.uint16)
    word = qweight[row // 4, 64 * (k // 64) + 16 * (row % 4) + 8 * ((k % 64) // 32) + k % 8]
    codes = (word >> (4 * ((k % 32) // 8)).astype(np.uint16)) & 15
    group = np.arange(s["k"]) // s["group_size"]
    scale, zero = (tensors[name].array()[:, : row.size].T[:, group] for name in ("scales", s["zeros"]))
    with np.errstate(all="ignore"):
        return _sum_rounded(codes * scale.astype(np.float64), zero.astype(np.float64), scale.dtype)


def _compressed(module: Module, rows: int | None) -> Array:
    s, tensors = module.settings, module.tensors
    *lead, n, k = s["shape"]
    experts = lead[0] if lead else 1
    wanted, bits, half = rows or n, s["bits"], 2 ** (s["bits"] - 1)
    groups = -(-k // s["group_size"])
    stored = tensors[s["codes"]].array()
    scales = np.broadcast_to(_with_groups(tensors["weight_scale"].array(), n), (*lead, n, groups))
    found = []
    for e in range(experts):
        pick = (e,) if lead else ()
        if s["codes"] == "weight":
            codes = stored[pick][:wanted].astype(np.int64) + 128
        else:
            unpack = _slots if s["packing"] == "slots" else _stream
            codes = unpack(np.ascontiguousarray(stored[pick][:wanted]), bits, k)
        zeros = np.full((n, groups), half)
        if "weight_zero_point" in tensors:
            zero = tensors["weight_zero_point"].array()
            if zero.dtype == np.int8:
                zeros = np.broadcast_to(_with_groups(zero, n), (*lead, n, groups))[pick].astype(np.int64) + half
            else:
                unpack = _slots if s["packing"] == "slots" else _stream
                zeros = unpack(np.ascontiguousarray(zero[pick].T), bits, n).T
        group = np.arange(k) // s["group_size"]
        if "weight_g_idx" in tensors and not (tensors["weight_g_idx"].array() == -1).any():
            order = tensors["weight_g_idx"].array()
            group = order[e] if order.ndim == 2 else order
        found.append(_scaled(codes, scales[pick][:wanted, group], zeros[:wanted, group]))
    return np.stack(found) if lead else found[0]


def _hqq(module: Module, rows: int | None) -> Array:
    s, tensors = module.settings, module.tensors
    bits, n, k, size = s["bits"], s["n"], s["k"], s["group_size"]
    packed = tensors["W_q"].array()
    slabs = {1: 8, 2: 4, 3: 10, 4: 2}.get(bits, 1)
    stacked = [(packed >> (bits * i if slabs > 1 else 0)) & (2**bits - 1 if slabs > 1 else 255) for i in range(slabs)]
    codes = np.concatenate(stacked[::-1])[: n * k // size].reshape(n, k)[: rows or n].astype(np.float64)
    group = np.arange(k) // size
    scale, zero = (tensors[name].array().reshape(n, -1)[: rows or n, group] for name in ("scale", "zero"))
    with np.errstate(all="ignore"):
        difference = _sum_rounded(codes, -zero.astype(np.float64), scale.dtype)
        return _rounded(difference.astype(np.float64) * scale.astype(np.float64), scale.dtype)


def _gguf(module: Module, rows: int | None) -> Array:
    s = module.settings
    *lead, n, k = s["shape"]
    wanted, blocks = np.arange(rows or n), module.tensors["blocks"].array()
    if s["heads"]:  # row t*d/2 + i of a head of d rows lies at 2i + t
        d = n // s["heads"]
        wanted = wanted // d * d + 2 * (wanted % (d // 2)) + wanted % d // (d // 2)
    picked = blocks.reshape(*lead, n, -1)[..., wanted, :]
    values = values_of(s["type"], picked.reshape(-1, blocks.shape[1]), s["order"]).reshape(*lead, len(wanted), k)
    if "scale" in module.tensors:
        values = values * module.tensors["scale"].array().reshape(*lead, 1, 1)
    return values


# ------------------------------------------------------------------------------------------------- codes in words
def _stream(words: Array, bits: int, count: int) -> Array:
    """Rows of words to rows of codes: code j is bits [j*bits, (j+1)*bits) of the row, lowest first."""
    flat = np.ascontiguousarray(words).view(np.uint8).reshape(words.shape[0], -1)
    single = np.unpackbits(flat, axis=1, bitorder="little", count=bits * count)
    fields = single.reshape(words.shape[0], count, bits)
    return _joined([fields[:, :, i] for i in range(bits)])


def _slots(words: Array, bits: int, count: int) -> Array:
    """Rows of words to rows of codes, as many whole codes as a word takes."""
    shifts = np.arange(32 // bits, dtype=np.uint32) * np.uint32(bits)
    codes = (words.view(np.uint32)[:, :, None] >> shifts) & np.uint32(2**bits - 1)
    return codes.reshape(words.shape[0], -1)[:, :count].astype(np.int64)


def _planar(words: Array, bits: int, count: int) -> Array:
    """gptq_p: blocks of 32 codes, the low bits of all of them first."""
    blocks = np.ascontiguousarray(words).view(np.uint32).reshape(-1, bits)
    total, word, shift = np.zeros((blocks.shape[0], 32), np.int64), 0, 0
    for width in _PLANES.get(bits, (bits,)):
        part = _slots(blocks[:, word : word + width], width, 32)
        total |= part << shift
        word, shift = word + width, shift + width
    return total.reshape(words.shape[0], -1)[:, :count]


def _joined(planes: list[Array]) -> Array:
    total = np.zeros(planes[0].shape, np.uint8)  # codes have at most eight bits
    for i, plane in enumerate(planes):
        total |= plane << np.uint8(i)
    return total.astype(np.int64)


def _with_groups(numbers: Array, n: int) -> Array:
    """One number for a tensor or a row as a column of them."""
    if numbers.ndim >= 2:
        return numbers
    return numbers.reshape(-1, 1) if numbers.size == n else numbers.reshape(1, 1)


# ----------------------------------------------------------------------------------------------------- arithmetic
def _scaled(codes: Array, scale: Array, zeros: Array) -> Array:
    """RN(s * (q - zp)): the product has at most 33 bits, so it is exact before it is rounded."""
    with np.errstate(all="ignore"):
        return _rounded(scale.astype(np.float64) * (codes.astype(np.float64) - zeros.astype(np.float64)), scale.dtype)


def _rounded(exact: Array, dtype: Any) -> Array:
    """One rounding to nearest even. To bfloat16 by way of float32, rounded to odd so that nothing rounds twice."""
    if dtype in (np.dtype(np.float16), np.dtype(np.float32)):
        return exact.astype(dtype)
    single = exact.astype(np.float32)
    return _to_odd(single, exact - single.astype(np.float64)).astype(dtype)


def _sum_rounded(a: Array, b: Array, dtype: Any) -> Array:
    """RN(a + b) with the error of the sum taken into account."""
    total = a + b
    rest = total - a
    error = (a - (total - rest)) + (b - rest)
    return _rounded(_to_odd(total, error), dtype)


def _to_odd(value: Array, error: Array) -> Array:
    """Where a rounding was inexact: the neighbour on the side of the exact value whose last bit is one."""
    bits: Array = value.view(np.uint32 if value.dtype == np.float32 else np.uint64)
    even = (bits % 2 == 0) & (error != 0) & np.isfinite(error) & np.isfinite(value)
    towards = np.where(error > 0, np.inf, -np.inf).astype(value.dtype)
    return np.where(even, np.nextafter(value, towards), value)
