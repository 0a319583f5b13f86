"""The memory of a quantization follows the largest weight: 4 times its FP16 bytes and 500 MB (long: `make soak`)."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from sources.dense_samples import dense_folder

# VmHWM and not ru_maxrss, which a child process has from its parent
_CHILD = """
import sys
from bcqfmt.cli.main import cli
try:
    cli(["quantize", sys.argv[1], sys.argv[2], "--workers", "2", "--method", *sys.argv[3:]])
except SystemExit as end:
    assert not end.code, end.code
print(open("/proc/self/status").read())
"""


@pytest.mark.soak
@pytest.mark.parametrize(
    ("rows", "method"),
    [
        (8192, "rtn"),
        (8192, "rtn --bits 8 --group-size 32"),
        (8192, "bcq --rounds 2"),
        (4096, "multi --rounds 2 --starts 1"),
        (8192, "mixed24"),
        (8192, "mixed24 --outliers 0 --layout aligned64"),
    ],
)
def test_peak_memory_follows_the_largest_weight(tmp_path: Path, rows: int, method: str) -> None:
    rng = np.random.default_rng(0)
    large = (rng.standard_normal((rows, 8192), np.float32) * 0.02).astype(np.float16)
    tensors = {f"model.layers.{i}.q_proj.weight": np.roll(large, i) for i in range(2)}
    tensors |= {f"model.layers.{i}.k_proj.weight": np.roll(large, i)[:1024].copy() for i in range(2)}
    source = dense_folder(tmp_path / "model", tensors)
    asked = [sys.executable, "-c", _CHILD, source, tmp_path / "bcq", *method.split()]
    done = subprocess.run(asked, capture_output=True, text=True, check=True)
    found = re.search(r"VmHWM:\s+(\d+) kB", done.stdout)
    assert found is not None
    assert int(found[1]) * 1024 <= 4 * large.nbytes + 500_000_000, f"{int(found[1]) / 1024:.0f} MiB"
