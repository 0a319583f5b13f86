"""Small weights for the tests of the verbs, and the program run for real."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from click.testing import Result

import bcqfmt

ROOT = Path(__file__).resolve().parents[3]
UP = "model.layers.0.mlp.up_proj.weight"
DOWN = "model.layers.0.mlp.down_proj.weight"
NORM = "model.norm.weight"
Run = Callable[..., Result]


def affine(seed: int = 0, rows: int = 16, columns: int = 64, group_size: int = 32) -> bcqfmt.BcqWeight:
    rng = np.random.default_rng(seed)
    groups = (rows, columns // group_size)
    codes = rng.integers(0, 16, (rows, columns), dtype=np.uint8)
    zeros = rng.integers(0, 16, groups, dtype=np.uint8)
    zeros[0] = [0, 15]  # always four bits wide, never constant
    scale = rng.uniform(0.01, 0.1, groups).astype(np.float16)
    return bcqfmt.BcqWeight.from_affine(codes, scale, zeros, group_size=group_size, bits=4)


def binary(seed: int = 1) -> bcqfmt.BcqWeight:
    rng = np.random.default_rng(seed)
    bits = rng.integers(0, 2, (3, 8, 64), dtype=np.uint8)
    alpha = rng.uniform(0.1, 1, (3, 8, 2)).astype(np.float16)
    bias = rng.uniform(-1, 1, (8, 2)).astype(np.float16)
    sets: Any = {1: (alpha[:1], bias)}
    return bcqfmt.BcqWeight.from_bcq(bits, alpha, bias, group_size=32, scale_sets=sets)


def tensors(seed: int = 0) -> dict[str, Any]:
    return {UP: affine(seed), DOWN: binary(), NORM: np.linspace(-1, 2, 64, dtype=np.float32)}


def flip(path: Path, at: int = -5) -> None:
    """Change one bit of a file."""
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


def assert_clean(text: str) -> None:
    assert all(line.isprintable() for line in text.split("\n")), repr(text)


def command(*args: str | Path) -> list[str]:
    return [sys.executable, "-P", "-m", "bcqfmt", *map(str, args)]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def program(*args: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run the program itself, with pipes for stdout and stderr."""
    settings: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 120, **options}
    return subprocess.run(command(*args), env=environment(), check=False, **settings)
