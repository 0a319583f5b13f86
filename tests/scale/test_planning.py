"""Planning a checkpoint of 671 billion parameters in 1,500 files of holes: time and memory (long: `make soak`)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from programs.verbs import ROOT, environment

SHARDS = 1500
_CHILD = """
import resource, sys
from bcqfmt.cli.main import cli
try:
    cli(["convert", sys.argv[1], sys.argv[2], "--dry-run", "--json"])
except SystemExit as end:
    assert not end.code, end.code
used = resource.getrusage(resource.RUSAGE_SELF)
from bcqfmt.system import peak_memory
sys.stderr.write(f"peak {peak_memory()} seconds {used.ru_utime + used.ru_stime:.3f}")
"""


def sparse(folder: Path, shards: int, layers: int = 61) -> Path:
    script = ROOT / "tests" / "benchmarks" / "sparse_source.py"
    paths = f"{ROOT}:{script.parent}"
    asked = [sys.executable, script, folder, "--shards", str(shards), "--layers", str(layers)]
    subprocess.run(asked, env={**environment(), "PYTHONPATH": paths}, check=True, capture_output=True)
    return folder


def planned(folder: Path) -> tuple[dict[str, Any], int, float]:
    """The plan, the peak memory and the processor time of the process."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", _CHILD, folder, folder.with_name("bcq")],
        env=environment(),
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    _, peak, _, seconds = done.stderr.rsplit(maxsplit=3)
    return json.loads(done.stdout), int(peak), float(seconds)


@pytest.mark.soak
def test_671_billion_parameters(tmp_path: Path) -> None:
    many, few, half = (
        sparse(tmp_path / "many", SHARDS),
        sparse(tmp_path / "few", 150),
        sparse(tmp_path / "half", SHARDS, 32),
    )
    occupied = sum(path.stat().st_blocks for path in many.iterdir()) * 512
    assert occupied < 100_000_000
    plan, peak, seconds = planned(many)
    assert plan["input_bytes"] - 352_507_410_176 < 50_000_000  # the data, then headers and index
    assert [(kind["layout"], kind["modules"]) for kind in plan["quantized"]] == [("gptq", 45_032)]
    assert seconds < 15
    assert peak < 512 * 2**20
    other, few_peak, _ = planned(few)
    assert other["shards"] == plan["shards"]  # the cut does not depend on the files of the source
    assert abs(peak - few_peak) <= 0.1 * peak  # flat in the number of files
    _, half_peak, _ = planned(half)
    assert half_peak < peak < 2 * half_peak  # and no worse than linear in the number of tensors
