"""RMSNorm, reordering and quantization in the simulator, fused and one by one: the same bits as the oracle."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from bcqfmt.container.dtypes import numpy_dtype
from bcqfmt.kernels.atom import operands as ao
from products import atom_reference
from simulated import sim_atom
from simulated.cuda_sim import simulate

KINDS = ("F16", "BF16", "F32")


def sample(tokens: int, groups: int, kind: str) -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(groups)
    gamma = rng.standard_normal(128 * groups).astype(numpy_dtype(kind))
    return sim_atom.activations(tokens, groups, kind), gamma, rng.permutation(128 * groups).astype(np.int32)


def expected(x: Any, perm: Any, clip: float, rule: str) -> tuple[Any, Any]:
    factors = {"factor": ao.step_factor(4, clip, rule), "outlier_factor": ao.step_factor(8, 1.0, rule)}
    return atom_reference.activation_words(*atom_reference.quantize_activations(x.astype(np.float32), perm, **factors))


def same(found: tuple[Any, Any], wanted: tuple[Any, Any]) -> bool:
    return np.array_equal(found[0].reshape(-1), wanted[0].reshape(-1)) and np.array_equal(
        found[1], wanted[1], equal_nan=True
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("tokens", "groups", "clip", "rule"), [(1, 2, 1.0, "absmax"), (9, 3, 0.9, "paper")])
def test_quantized_to_the_bit(kind: str, tokens: int, groups: int, clip: float, rule: str) -> None:
    x, _, perm = sample(tokens, groups, kind)
    found = simulate(sim_atom.quantize, x, perm, clip=clip, rule=rule)
    assert same(found, expected(x, perm, clip, rule))
    codes, scale = atom_reference.unpack_activations(*found, tokens)
    assert codes[:, :-128].min() >= -8
    assert codes[:, :-128].max() <= 7
    assert (scale > 0).sum() == scale.size - (perm.reshape(-1, 128) // 128 == 1).all(axis=1).sum()


@pytest.mark.parametrize("kind", KINDS)
def test_normalised_to_the_bit(kind: str) -> None:
    x, gamma, _ = sample(2, 3, kind)
    found = simulate(sim_atom.norm, x, gamma, 1e-5)
    assert found.clean
    assert found.value.tobytes() == atom_reference.rmsnorm(x, gamma, 1e-5).tobytes()


@pytest.mark.parametrize(("tokens", "groups", "kind"), [(1, 18, "F16"), *((3, 2, kind) for kind in KINDS)])
def test_fused_equals_the_chain(tokens: int, groups: int, kind: str) -> None:
    """18 groups: more columns than a turn of the threads takes, more groups than warps; whatever the type."""
    x, gamma, perm = sample(tokens, groups, kind)
    fused = simulate(sim_atom.quantize, x, perm, gamma, clip=0.9)
    chain = simulate(sim_atom.quantize, simulate(sim_atom.norm, x, gamma, 1e-5).value, perm, clip=0.9)
    assert same(fused, chain)
    assert same(fused, expected(atom_reference.rmsnorm(x, gamma, 1e-5), perm, 0.9, "absmax"))


@pytest.mark.parametrize("kind", KINDS)
def test_the_oracle_normalises(kind: str) -> None:
    x, gamma, _ = sample(4, 20, kind)
    wide = x.astype(np.float64)
    meant = wide / np.sqrt((wide**2).mean(axis=1, keepdims=True) + 1e-5) * gamma.astype(np.float64)
    error = np.linalg.norm(atom_reference.rmsnorm(x, gamma, 1e-5).astype(np.float64) - meant) / np.linalg.norm(meant)
    assert error < {"F16": 1e-3, "BF16": 6e-3, "F32": 1e-6}[kind]


def test_numbers_that_are_none() -> None:
    x = np.ones((4, 256), np.float32)
    x[0, 3], x[1, 200], x[2] = np.nan, np.inf, 1e-42
    x[3, :128] = 1e37
    perm = np.arange(256, dtype=np.int32)
    assert same(simulate(sim_atom.quantize, x, perm), expected(x, perm, 1.0, "absmax"))


def test_channels_that_do_not_exist_are_not_followed() -> None:
    codes, scale = simulate(sim_atom.hostile_perm, sim_atom.activations(2, 2, "F16"))
    assert np.isfinite(scale).all()
    assert codes.shape == (1, 2, 256)
