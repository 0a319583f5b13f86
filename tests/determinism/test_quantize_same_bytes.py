"""Every method for dense weights: the same SHA-256 of every file, with any number of workers, in any environment."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bcqfmt.converters.methods.registry import METHODS
from bcqfmt.converters.quantize.stats import fingerprint, stats_tensors, write_stats
from bcqfmt.converters.source.checkpoint import open_source
from methods.quantized_trees import SETTINGS
from programs.verbs import ROOT, environment
from sources.conversions import tree
from sources.dense_samples import dense_folder

SHAPES = {"self_attn.q_proj": (96, 128), "self_attn.o_proj": (128, 128), "mlp.down_proj": (128, 192)}
THREADS = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = np.random.default_rng(0)
    tensors = {
        f"model.layers.{layer}.{name}.weight": (rng.normal(size=shape) * 0.05).astype(np.float16)
        for layer in range(2)
        for name, shape in SHAPES.items()
    }
    return dense_folder(tmp_path_factory.mktemp("dense") / "model", tensors)


@pytest.fixture(scope="module")
def stats(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = np.random.default_rng(1)
    arrays: dict[str, Any] = {}
    checkpoint = open_source(source)
    for name, tensor in checkpoint.tensors.items():
        width = tensor.shape[-1]
        seen = rng.normal(size=(300, width)) * np.exp(rng.normal(size=width))
        arrays |= stats_tensors(name, (seen**2).sum(0), (seen.T @ seen).astype(np.float32))
    record = {"model": fingerprint(checkpoint), "inputs": {name: [name] for name in checkpoint.tensors}}
    path = tmp_path_factory.mktemp("stats") / "stats.safetensors"
    write_stats(path, arrays, {**record, "rows": 1, "seq": 300, "tokens": 300, "seed": 0})
    return path


def quantized(source: Path, stats: Path, target: Path, workers: int, umask: int, **variables: str) -> dict[str, str]:
    """Every method, in a process of its own."""
    script = ROOT / "tests" / "support" / "methods" / "quantized_trees.py"
    done = subprocess.run(
        [sys.executable, "-P", script, source, stats, target, str(workers)],
        env={**environment(), **variables},
        umask=umask,
        capture_output=True,
        text=True,
        timeout=1800,  # it may compile everything
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return tree(target)


def test_every_method_with_other_workers_threads_and_surroundings(source: Path, stats: Path, tmp_path: Path) -> None:
    assert SETTINGS.keys() == METHODS.keys()
    one = dict.fromkeys(THREADS, "1")
    two = dict.fromkeys(THREADS, "2")
    here = quantized(source, stats, tmp_path / "a", 1, 0o022, **one, LC_ALL="C", TZ="UTC", PYTHONHASHSEED="0")
    there = quantized(
        source, stats, tmp_path / "b", 2, 0o077, **two, LC_ALL="tr_TR.UTF-8", TZ="Asia/Kathmandu", PYTHONHASHSEED="9"
    )
    assert here == there
    assert {path.split("/")[0] for path in here} == METHODS.keys()
    assert (tmp_path / "b/rtn/config.json").stat().st_mode & 0o777 == 0o600
