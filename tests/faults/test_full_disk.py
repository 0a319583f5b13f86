"""A disk that is too small by any amount: told, nothing partial left, and resumed once there is room."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from typing import Any

import pytest

from faults.fault_case import Case
from pages.soak_figures import record
from programs.verbs import ROOT, environment

SCRIPT = ROOT / "tests" / "support" / "faults" / "full_disk.py"


def namespaces() -> bool:
    """Whether this user may mount something for itself."""
    if shutil.which("unshare") is None or shutil.which("mount") is None:
        return False
    return subprocess.run(["unshare", "--mount", "mount", "-t", "tmpfs", "tmpfs", "/mnt"], check=False).returncode == 0


def sweep(case: Case, first: int, step: int) -> dict[str, Any]:
    words = ["unshare", "--mount", sys.executable, "-P", str(SCRIPT)]
    words += [str(case.source), str(case.source.parent / "plain"), str(case.size), str(first), str(step)]
    path = os.pathsep.join((str(ROOT), str(SCRIPT.parents[1])))
    settings = {**environment(), "PYTHONPATH": path}
    ran = subprocess.run(words, env=settings, capture_output=True, text=True, check=False, timeout=1800)
    assert ran.returncode == 0, ran.stderr[-3000:]
    found: dict[str, Any] = json.loads(ran.stdout)
    assert found["outcomes"].keys() == {"BCQ-E402", "complete"}
    return found


@pytest.mark.skipif(not namespaces(), reason="mounting a tmpfs needs root or a user namespace")
def test_a_few_sizes(small: Case) -> None:
    assert sweep(small, 3, 11)["sizes"] >= 3


@pytest.mark.soak
@pytest.mark.skipif(not namespaces(), reason="mounting a tmpfs needs root or a user namespace")
def test_every_size(twenty: Case) -> None:
    found = sweep(twenty, 1, 1)
    record(
        "enospc",
        shards=20,
        disk_sizes=found["sizes"],
        refused=found["outcomes"]["BCQ-E402"],
        partial_files=0,
        wrong_bytes=0,
        resumed_to_same_bytes="all",
    )
