"""AWQ tensors with any words in them, and decoders of their own for the tests to compare with."""

from __future__ import annotations

from typing import Any

import numpy as np

from sources.peers import halves, words

ORDER = [0, 2, 4, 6, 1, 3, 5, 7]  # the column that nibble i of a word holds


def config(version: str | None = "gemm", group: int | None = 32, bits: int = 4) -> dict[str, Any]:
    stated = {"quant_method": "awq", "zero_point": True, "group_size": group, "bits": bits, "version": version}
    return {key: value for key, value in stated.items() if value is not None}


def gemm_codes(packed: Any) -> Any:
    """[R, N/8] -> (N, R), nibble by nibble."""
    fields = [(packed.view(np.uint32) >> np.uint32(4 * i)) & np.uint32(15) for i in range(8)]
    codes = np.empty((packed.shape[1], 8, packed.shape[0]), np.uint8)
    for i, column in enumerate(ORDER):
        codes[:, column] = fields[i].T
    return codes.reshape(-1, packed.shape[0])


def fast_codes(packed: Any) -> Any:
    """The closed form: nibble (k%32)//8 of qweight[n//4, 64*(k//64) + 16*(n%4) + 8*((k%64)//32) + k%8]."""
    rows, k = packed.shape
    n, c = np.meshgrid(np.arange(4 * rows), np.arange(k), indexing="ij")
    word = packed.view(np.uint16)[n // 4, 64 * (c // 64) + 16 * (n % 4) + 8 * ((c % 64) // 32) + c % 8]
    return (word >> (4 * ((c % 32) // 8)).astype(np.uint16)) & 15


def gemm(rng: np.random.Generator, n: int, k: int, group: int) -> dict[str, Any]:
    groups = -(-k // group)
    return {
        "m.qweight": words(rng, k, n // 8),
        "m.qzeros": words(rng, groups, n // 8),
        "m.scales": halves(rng, groups, n),
    }


def padded_groups(k: int, group: int) -> int:
    return 8 * {32: 4, 64: 2}.get(group, 1) * -(-k // group // 8 // {32: 4, 64: 2}.get(group, 1))


def gemv(rng: np.random.Generator, n: int, k: int, group: int) -> dict[str, Any]:
    """Sane padding: zero scales and zero fields behind the last group."""
    groups, padded = k // group, padded_groups(k, group)
    scales = np.zeros((n, padded), np.float16)
    scales[:, :groups] = halves(rng, n, groups)
    fields = np.zeros((n, padded), np.uint64)
    fields[:, :groups] = rng.integers(0, 16, (n, groups))
    shifts = np.arange(8, dtype=np.uint64) * np.uint64(4)
    qzeros = (fields.reshape(n, -1, 8) << shifts).sum(-1, dtype=np.uint64).astype(np.uint32).view(np.int32)
    return {"m.qweight": words(rng, n, k // 8), "m.qzeros": qzeros, "m.scales": scales}


def gemv_fast(rng: np.random.Generator, n: int, k: int, group: int, zeros: str = "qzeros") -> dict[str, Any]:
    groups, padded = k // group, padded_groups(k, group)
    tensors: dict[str, Any] = {"m.qweight": rng.integers(-(2**15), 2**15, (n // 4, k)).astype(np.int16)}
    for suffix in ("scales", zeros):
        numbers = np.zeros((padded, n), np.float16)
        numbers[:groups] = halves(rng, groups, n)
        tensors[f"m.{suffix}"] = numbers
    return tensors
