"""The batch script of docs/scaling.md, run by bash as Slurm would: array tasks in any order, one of them twice."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from programs.verbs import ROOT, environment, program
from sources.conversions import convert, gptq_folder, tree

SCRIPT = ROOT / "docs" / "examples" / "convert.sbatch"


def test_the_array_makes_the_same_folder(tmp_path: Path) -> None:
    source = gptq_folder(tmp_path / "model-gptq", layers=3)
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "srun").write_text('#!/bin/sh\nexec "$@"\n')
    (tools / "bcqfmt").write_text(f'#!/bin/sh\nexec "{sys.executable}" -P -m bcqfmt "$@"\n')
    for tool in tools.iterdir():
        tool.chmod(0o755)
    variables = {**environment(), "PATH": f"{tools}:{os.environ['PATH']}"}
    variables |= {"SLURM_ARRAY_TASK_COUNT": "2", "SLURM_CPUS_PER_TASK": "1"}
    target = tmp_path / "bcq"
    for task in ("2", "1", "2"):  # the last one as if requeued
        subprocess.run(
            ["bash", SCRIPT, source, target],
            env={**variables, "SLURM_ARRAY_TASK_ID": task},
            check=True,
            capture_output=True,
            timeout=120,
        )
    assert program("finalize", target, source).returncode == 0
    convert(source, tmp_path / "plain")
    assert tree(target) == tree(tmp_path / "plain")
