"""The oldest transformers that is promised, in a process of its own: the tests of loading and saving once more."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

OLDEST = ("transformers==5.16.0", "huggingface-hub>=1.31,<2", "tokenizers>=0.23.1,<0.24", "httpx")
TESTS = (
    "test_transformers.py", "test_transformers_missing.py", "test_transformers_moe.py", "test_transformers_save.py",
    "test_transformers_save_over.py", "test_transformers_save_parts.py",
)  # fmt: skip


@pytest.mark.soak
def test_with_the_oldest_transformers(tmp_path: Path) -> None:
    here = Path(__file__).resolve().parent
    packages = tmp_path / "packages"
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", packages, OLDEST[0]], check=True
    )
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--upgrade", "--target", packages, *OLDEST[1:]], check=True
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *(str(here / name) for name in TESTS)]
    paths = os.pathsep.join([str(packages), os.environ.get("PYTHONPATH", "")])
    found = subprocess.run(
        command,
        check=False,
        cwd=here.parents[2],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
    )
    assert found.returncode == 0, found.stdout[-3000:]
