"""The arithmetic of the instructions against brute force, and the mended simulator that runs kernels on them."""

from __future__ import annotations

import ast
import math
import random
import struct
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from bcqfmt.kernels import ptx
from simulated import sim_ptx
from simulated.cuda_sim import SimulationError, simulate
from simulator import arithmetic, hook
from weights import oracle


@pytest.fixture(autouse=True)
def overflows_are_results() -> Iterator[None]:
    """As in the simulator: numpy warns about what the instructions define."""
    with np.errstate(all="ignore"):
        yield


words = st.integers(0, 2**32 - 1)
halves = st.integers(0, 0xFFFF).filter(lambda h: h & 0x7C00 != 0x7C00)
singles = st.floats(width=32, allow_nan=False, allow_infinity=False)
doubles = st.floats(allow_nan=False, allow_infinity=False)


@hypothesis.given(words, words, words)
def test_words(a: int, b: int, c: int) -> None:
    pool = struct.pack("<II", a, b)
    picked = [(pool[c >> 4 * i & 7], c >> 4 * i & 8) for i in range(4)]
    expected = bytes((0xFF if byte > 127 else 0) if sign else byte for byte, sign in picked)
    assert arithmetic.prmt(a, b, c) == int.from_bytes(expected, "little")
    majority = sum(1 << i for i in range(32) if (a >> i & 1) + (b >> i & 1) + (c >> i & 1) >= 2)
    assert arithmetic.lop3(a, b, c, 0xE8) == majority
    assert arithmetic.lop3(a, b, c, 0xCA) == sum((b >> i & 1 if a >> i & 1 else c >> i & 1) << i for i in range(32))
    assert arithmetic.lop3(a, b, c, 0x96) == a ^ b ^ c
    stream = f"{b:032b}{a:032b}"
    assert arithmetic.funnel_right(a, b, c) == int(stream[32 - c % 32 : 64 - c % 32], 2)


@hypothesis.given(words, words, words)
def test_pairs_of_halves(a: int, b: int, c: int) -> None:
    pairs = [[oracle.number(w & 0xFFFF, "F16"), oracle.number(w >> 16, "F16")] for w in (a, b, c)]
    hypothesis.assume(all(math.isfinite(x) for pair in pairs for x in pair))
    for name, exact in {
        "hfma2": lambda x, y, z: Fraction(x) * Fraction(y) + Fraction(z),
        "hadd2": lambda x, y, _: Fraction(x) + Fraction(y),
        "hsub2": lambda x, y, _: Fraction(x) - Fraction(y),
        "hmul2": lambda x, y, _: Fraction(x) * Fraction(y),
    }.items():
        found = getattr(arithmetic, name)(*((a, b, c) if name == "hfma2" else (a, b)))
        for half in (0, 1):
            value = exact(*(pair[half] for pair in pairs))
            if value:  # the sign of a zero is not a fraction's business
                assert found >> 16 * half & 0xFFFF == _rounded(value, "F16"), name


@hypothesis.given(words, words, words)
def test_pairs_of_bfloat16(a: int, b: int, c: int) -> None:
    pairs = [[oracle.number(w & 0xFFFF, "BF16"), oracle.number(w >> 16, "BF16")] for w in (a, b, c)]
    hypothesis.assume(all(math.isfinite(x) for pair in pairs for x in pair))
    found = arithmetic.bfma2(a, b, c)
    for half in (0, 1):
        x, y, z = (Fraction(pair[half]) for pair in pairs)
        if x * y + z and abs(x * y + z) < 2**127:
            assert found >> 16 * half & 0xFFFF == _rounded(x * y + z, "BF16")


def _rounded(value: Fraction, dtype: str) -> int:
    """Ties to even, by trying the neighbours."""
    guess = oracle.rounded(float(value), dtype)
    width = 16 if dtype != "F32" else 32
    sign = guess & 1 << (width - 1)
    near = {sign | max(0, (guess & ~sign) + d) for d in (-1, 0, 1)}
    finite = [g for g in near if math.isfinite(oracle.number(g, dtype))]
    best = min(finite, key=lambda g: (abs(Fraction(oracle.number(g, dtype)) - value), g & 1))
    return guess if not math.isfinite(oracle.number(guess, dtype)) else best


@hypothesis.given(doubles, singles, singles, singles)
def test_one_rounding(x: float, a: float, b: float, c: float) -> None:
    assert arithmetic.f64_to_f16(x) == oracle.rounded(x, "F16")
    assert arithmetic.f64_to_bf16(x) == oracle.rounded(x, "BF16")
    assert arithmetic.f32_bits(arithmetic.f64_to_f32(x)) == oracle.rounded(x, "F32")
    assert arithmetic.pack_bf16(a, b) == oracle.rounded(b, "BF16") << 16 | oracle.rounded(a, "BF16")
    assert arithmetic.pack_f16(a, b) == oracle.rounded(b, "F16") << 16 | oracle.rounded(a, "F16")
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    if exact and abs(exact) < 2**127:
        assert arithmetic.f32_bits(arithmetic.fma_f32(a, b, c)) == _rounded(exact, "F32")


def test_the_double_rounding_of_the_specification() -> None:
    assert arithmetic.f64_to_bf16(1 + 2**-8 + 2**-40) == 0x3F81
    assert arithmetic.f64_to_bf16(math.nan) == arithmetic.f64_to_f16(math.nan) == 0x7FFF
    assert arithmetic.f64_to_bf16(math.inf) == 0x7F80
    assert arithmetic.f64_to_bf16(-1e300) == 0xFF80


def test_tensor_cores() -> None:
    """Against plain matrices, the fragments gathered one element at a time as the PTX manual lays them out."""
    rng = random.Random(0)
    left = [[rng.randint(-128, 127) for _ in range(32)] for _ in range(16)]
    right = [[rng.randint(-128, 127) for _ in range(8)] for _ in range(32)]
    sums = [[rng.randint(-1000, 1000) for _ in range(8)] for _ in range(16)]
    a, b, c, expected = (np.zeros((32, n), np.int64) for n in (4, 2, 4, 4))
    for lane in range(32):
        group, member = lane >> 2, lane & 3
        for i in range(16):
            row = group if i < 4 or 8 <= i < 12 else group + 8
            column = member * 4 + (i & 3) + (16 if i >= 8 else 0)
            a[lane, i // 4] |= (left[row][column] & 255) << 8 * (i & 3)
        for i in range(8):
            b[lane, i // 4] |= (right[member * 4 + (i & 3) + (16 if i >= 4 else 0)][group] & 255) << 8 * (i & 3)
        for i in range(4):
            row, column = group + (8 if i >= 2 else 0), member * 2 + (i & 1)
            c[lane, i] = sums[row][column]
            expected[lane, i] = sums[row][column] + sum(left[row][k] * right[k][column] for k in range(32))
    assert np.array_equal(arithmetic.mma_s8_warp(a.astype(np.uint32), b.astype(np.uint32), c), expected)
    found = simulate(
        sim_ptx.run,
        "mma_s8",
        a.astype(np.uint32),
        b.astype(np.uint32),
        c.astype(np.int32),
        np.zeros((32, 4), np.int32),
        threads=32,
    )
    assert np.array_equal(found[3], expected)


@pytest.mark.parametrize("dtype", ["F16", "BF16"])
def test_tensor_cores_with_floats(dtype: str) -> None:
    rng = random.Random(1)
    left = [[rng.randint(-8, 8) / 4 for _ in range(16)] for _ in range(16)]
    right = [[rng.randint(-8, 8) / 4 for _ in range(8)] for _ in range(16)]
    a, b = np.zeros((32, 4), np.uint32), np.zeros((32, 2), np.uint32)
    expected = np.zeros((32, 4))
    for lane in range(32):
        group, member = lane >> 2, lane & 3
        for i in range(8):
            row, column = group + (8 if i // 2 % 2 else 0), member * 2 + (i & 1) + (8 if i >= 4 else 0)
            a[lane, i // 2] |= np.uint32(oracle.rounded(left[row][column], dtype) << 16 * (i & 1))
        for i in range(4):
            b[lane, i // 2] |= np.uint32(
                oracle.rounded(right[member * 2 + (i & 1) + (8 if i >= 2 else 0)][group], dtype) << 16 * (i & 1)
            )
        for i in range(4):
            row, column = group + (8 if i >= 2 else 0), member * 2 + (i & 1)
            expected[lane, i] = 1 + sum(left[row][k] * right[k][column] for k in range(16))
    ones, none = np.ones((32, 4), np.float32), np.zeros((32, 4), np.float32)
    found = simulate(sim_ptx.run, "mma_float", a, b, ones, none, none, threads=32)
    assert np.array_equal(found[3 if dtype == "F16" else 4], expected)


def test_exchanges_between_lanes() -> None:
    given = np.random.default_rng(0).integers(0, 2**32 - 8, 64, dtype=np.uint32)
    y = simulate(sim_ptx.run, "exchanges", given, np.zeros((10, 64), np.uint32))[1]
    lane, warp = np.arange(64) % 32, np.arange(64) // 32 * 32
    number = (given & 0xFFFF).astype(np.float32).view(np.uint32)
    assert np.array_equal(y[0], given[warp + (lane * 7 + 3) % 32])
    assert np.array_equal(y[1], given[warp + (lane ^ 5)])
    assert np.array_equal(y[2], number[warp + 31 - lane])
    assert np.array_equal(y[3], number[warp + (lane ^ 16)])
    votes = [sum(1 << i for i in range(32) if given[w + i] & 4) for w in (0, 32)]
    assert np.array_equal(y[4], np.repeat(votes, 32))
    assert np.array_equal(y[5], (given & np.arange(64, dtype=np.uint32)) | (~given & y[0]))
    rows = np.stack([given, given + 1, given + 2, number], axis=1)  # 64 rows of 16 bytes
    for m in range(4):
        assert np.array_equal(y[6 + m], rows[warp + 8 * m + lane // 4, lane % 4])


def test_copies() -> None:
    given = np.random.default_rng(0).integers(0, 2**31, 256, dtype=np.uint32)
    _, y, counter = simulate(sim_ptx.run, "copies", given, np.zeros(4 * 256, np.uint32), np.zeros(1, np.uint32))
    quads = given.reshape(64, 4)
    assert np.array_equal(y[:256], given)
    assert np.array_equal(y[256:512].reshape(64, 4), quads[::-1])
    half = y[512:768].reshape(64, 4)
    assert np.array_equal(half[1::2, :2], quads[1::2, :2])  # eight bytes copied, the rest zero
    assert not half[::2, :2].any()
    assert np.array_equal(half[:, 2:], quads[:, 2:])
    for start in (768, 832, 896):
        assert np.array_equal(y[start : start + 64], given[:64])
    assert sorted(y[960:1024]) == sorted([*range(41), *range(23)])
    assert counter[0] == 23


def test_a_phase_ends_with_the_last_arrival_and_the_last_byte() -> None:
    words = np.arange(1, 17, dtype=np.uint32)
    found = simulate(sim_ptx.run, "arrivals", words, np.zeros(64, np.uint32))[1].reshape(2, 32)
    for phase in range(2):
        assert found[phase, :8].tolist() == words[8 * phase :][:8].tolist()
        assert found[phase, 9:11].tolist() == [phase + 1] * 2


@pytest.mark.parametrize("name", sorted(sim_ptx.PURE))
def test_instructions_inside_a_kernel(name: str) -> None:
    rng = np.random.default_rng(len(name))
    result, *kinds = sim_ptx.PURE[name].split()
    given = []
    for kind in kinds:
        if kind in ("u32", "i32"):
            given.append(rng.integers(1, 2**31, 40).astype(sim_ptx.NUMPY[kind]))
        else:
            given.append((rng.normal(size=40) * 2.0 ** rng.integers(-20, 12, 40)).astype(sim_ptx.NUMPY[kind]))
    found = simulate(sim_ptx.run_pure, name, *given)
    for i in range(40):
        arguments = [column[i].item() if column.dtype.kind != "f" else column[i] for column in given]
        expected = sim_ptx.NUMPY[result](getattr(arithmetic, name)(*arguments))
        assert found[i].tobytes() == expected.tobytes()


def test_a_barrier_that_some_threads_never_reach_is_an_error() -> None:
    with pytest.raises(SimulationError, match="barrier that some threads never reach"):
        simulate(sim_ptx.run, "divergent", np.zeros(1, np.uint32))
    assert simulate(sim_ptx.run, "early_exit", np.zeros(64, np.uint32))[0].tolist() == [1] * 40 + [0] * 24


@pytest.mark.parametrize("at", [64, 2**31, 2**32 - 1])
def test_writes_out_of_bounds_are_errors(at: int) -> None:
    with pytest.raises(SimulationError, match=r"IndexError.*write at.*thread \(3, 0, 0\)"):
        simulate(sim_ptx.run, "writes_at", np.zeros(64, np.uint32), at)
    assert simulate(sim_ptx.run, "writes_at", np.zeros(64, np.uint32), 63)[0][63] == 1


@pytest.mark.parametrize("at", [256, 2, 2**30])
def test_shared_addresses_out_of_bounds_or_unaligned_are_errors(at: int) -> None:
    with pytest.raises(SimulationError, match="IndexError"):
        simulate(sim_ptx.run, "shared_at", np.zeros(1, np.uint32), at, threads=32)
    assert simulate(sim_ptx.run, "shared_at", np.zeros(1, np.uint32), 252, threads=32)[0][0] == 7


def test_every_instruction_is_simulated_and_has_a_line_in_the_table() -> None:
    instructions = Path(ptx.__file__).with_name("instructions.py")
    device = _assigned(instructions)
    assert device <= hook.INSTRUCTIONS.keys()
    table = ast.get_docstring(ast.parse(instructions.with_name("__init__.py").read_text())) or ""
    for name in device:
        stem = name.removesuffix("_f32").removesuffix("_f64").removesuffix("_u32").removesuffix("_keep")
        assert name in table or f"{stem}_" in table or stem in table, name


def _assigned(path: Path) -> set[str]:
    """Public names that a module defines."""
    found: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        targets: list[Any] = [node] if isinstance(node, ast.FunctionDef) else getattr(node, "targets", [])
        for target in targets:
            for item in ast.walk(target) if isinstance(node, ast.Assign) else [target]:
                name = getattr(item, "id", getattr(item, "name", "_"))
                found.add(name)
    return {name for name in found if not name.startswith("_")}
