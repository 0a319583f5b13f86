"""Tests that need a GPU: run by ``make test-gpu`` (pytest tests/gpu), skipped over by every other run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

_HERE = Path(__file__).resolve().parent


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    asked = [Path(argument.split("::")[0]).resolve() for argument in config.args]
    return None if any(path == _HERE or _HERE in path.parents for path in asked) else True


@pytest.fixture(scope="session", autouse=True)
def gpu() -> Any:
    """Fails, never skips: who asks for these tests wants them run."""
    if not hasattr(np, "row_stack"):
        setattr(np, "row_stack", np.vstack)  # noqa: B010 - numba-cuda 0.30 asks for the old name
    from bcqfmt.kernels import device

    device.require_cuda()
    return device.capability()
