"""The INT4 key-value cache in the simulator: its content to the bit, attention over it against float64."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from bcqfmt.container.dtypes import numpy_dtype
from bcqfmt.kernels.atom import attention as kv
from products import atom_reference
from simulated import sim_atom
from simulated.cuda_sim import simulate

LIMIT = {"F16": 1e-3, "BF16": 4e-3, "F32": 6e-4}


def vectors(*shape: int, kind: str = "F16", seed: int = 0) -> Any:
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(shape) * rng.uniform(0.2, 3, shape[:-1])[..., None] + 0.3).astype(numpy_dtype(kind))


def parts_of(k: Any, v: Any) -> tuple[Any, ...]:
    return (
        *atom_reference.cache_words(*atom_reference.quantize_kv(k)),
        *atom_reference.cache_words(*atom_reference.quantize_kv(v)),
    )


@pytest.mark.parametrize(("kind", "head_dim"), [("F16", 128), ("BF16", 64), ("F32", 256)])
def test_the_cache_to_the_bit(kind: str, head_dim: int) -> None:
    k, v = (vectors(2, 2, 3, head_dim, kind=kind, seed=s) for s in (1, 2))
    k[0, 0, 0] = 0.5  # constant: no range to divide
    v[0, 1, 2] = 0
    starts = np.array([4, 30], np.int32)
    found = simulate(sim_atom.write_cache, k, v, 32, starts)
    for part, wanted in zip(found, parts_of(k, v), strict=True):
        rest = np.ones(part.shape[:3], bool)
        for b, start in enumerate(starts):
            fits = min(3, 32 - start)
            assert (part[b, :, start : start + fits] == wanted[b, :, :fits]).all()
            rest[b, :, start : start + fits] = False
        assert (part[rest] == 0xFFFFFFFF).all(), "other tokens were touched"


def test_values_of_the_cache_are_near() -> None:
    x = vectors(5, 7, 128)
    codes, scale, offset = atom_reference.quantize_kv(x)
    back = codes * scale.astype(np.float64)[..., None] + offset.astype(np.float64)[..., None]
    assert (np.abs(back - x) <= scale.astype(np.float64)[..., None] * 0.51 + 2e-3).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e30])
def test_numbers_that_the_cache_cannot_hold(bad: float) -> None:
    k = vectors(1, 1, 2, 64, kind="F32")
    k[0, 0, 1, 5] = bad
    found = simulate(sim_atom.write_cache, k, k, 32, np.zeros(1, np.int32))
    assert found[1][0, 0, 1] == 0x7FFF7FFF
    assert found[1][0, 0, 0] == parts_of(k, k)[1][0, 0, 0]
    q = vectors(1, 1, 64, kind="F32")
    seen = simulate(sim_atom.attend, q, found, np.full(1, 2, np.int32), 1)
    assert np.isnan(seen.value).all()
    unseen = simulate(sim_atom.attend, q, found, np.full(1, 1, np.int32), 1)
    assert np.isfinite(unseen.value).all()


@pytest.mark.parametrize(("kind", "head_dim", "heads", "kv_heads", "tokens", "lengths", "splits"), [
    ("F16", 128, 4, 1, 64, [50], 1),
    ("BF16", 64, 2, 1, 160, [131], 1),
    ("F32", 64, 12, 1, 64, [37], 2),
    ("F16", 256, 1, 1, 32, [32], 1),
    ("F16", 64, 1, 1, 96, [0, 70], 3),
])  # fmt: skip
def test_attention(
    kind: str, head_dim: int, heads: int, kv_heads: int, tokens: int, lengths: list[int], splits: int
) -> None:
    batch = len(lengths)
    k, v = (vectors(batch, kv_heads, tokens, head_dim, kind=kind, seed=s) for s in (1, 2))
    q = vectors(batch, heads, head_dim, kind=kind, seed=3)
    counts = np.array(lengths, np.int32)
    parts = [part.copy() for part in parts_of(k, v)]
    for b, length in enumerate(lengths):  # beyond a sequence's end stands anything, NaNs among it
        for part in parts:
            part[b, :, length:] = 0xFFFFFFFF
    found = simulate(sim_atom.attend, q, tuple(parts), counts, splits)
    assert found.clean
    wanted = atom_reference.decode_attention(
        q, atom_reference.quantize_kv(k), atom_reference.quantize_kv(v), counts, head_dim**-0.5
    )
    error = np.linalg.norm(found.value.astype(np.float64) - wanted) / np.linalg.norm(wanted)
    assert error < LIMIT[kind]
    assert (found.value[counts == 0] == 0).all()


def test_one_loud_token_among_quiet_ones() -> None:
    """Scales of values that differ by powers of ten, scores far apart: nothing overflows, nothing vanishes."""
    k, v = vectors(1, 1, 64, 64, seed=1), vectors(1, 1, 64, 64, seed=2)
    v[0, 0, ::3] *= np.float16(1e-3)
    v[0, 0, 40] *= np.float16(1e3)
    k[0, 0, 7] *= np.float16(8)
    q = vectors(1, 2, 64, seed=3) * np.float16(4)
    counts = np.full(1, 64, np.int32)
    found = simulate(sim_atom.attend, q, parts_of(k, v), counts, 2, 0.3)
    wanted = atom_reference.decode_attention(
        q, atom_reference.quantize_kv(k), atom_reference.quantize_kv(v), counts, 0.3
    )
    assert np.linalg.norm(found.value - wanted) < 1e-3 * np.linalg.norm(wanted)


def test_the_oracle_attends() -> None:
    """The same by the textbook, one number at a time."""
    k, v, q = vectors(1, 1, 5, 64, seed=1), vectors(1, 1, 5, 64, seed=2), vectors(1, 2, 64, seed=3)
    keys, values = atom_reference.quantize_kv(k), atom_reference.quantize_kv(v)

    def number(part: tuple[Any, Any, Any], t: int, d: int) -> float:
        return float(part[0][0, 0, t, d]) * float(part[1][0, 0, t]) + float(part[2][0, 0, t])

    found = atom_reference.decode_attention(q, keys, values, np.array([4]), 0.125)
    for h in range(2):
        score = [0.125 * sum(float(q[0, h, d]) * number(keys, t, d) for d in range(64)) for t in range(4)]
        weight = [math.exp(s) for s in score]
        for d in range(64):
            wanted = sum(w * number(values, t, d) for t, w in enumerate(weight)) / sum(weight)
            assert math.isclose(found[0, h, d], wanted, rel_tol=1e-9)


@pytest.mark.parametrize("blocks", [1, 8, 132, 10000])
@pytest.mark.parametrize("capacity", [32, 128, 1024, 131072])
def test_splits(blocks: int, capacity: int) -> None:
    count = kv.splits_for(blocks, capacity)
    assert 1 <= count <= max(1, capacity // 128)
    assert count == 1 or blocks * (count - 1) < 4 * 132
