"""Tests that need a GPU: run by ``make test-gpu`` (pytest tests/gpu), skipped over by every other run.

``make test-gpu-sanitizer`` runs some of them under the four tools of compute-sanitizer: every operator once, and wrong
indices.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
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
    from bcqfmt.kernels.runtime import device

    device.require_cuda()
    return device.capability()


@pytest.fixture
def without_waiting() -> Callable[[], AbstractContextManager[None]]:
    """``with without_waiting():`` - whatever waits for the device in there fails."""
    import torch

    @contextmanager
    def forbidden() -> Iterator[None]:
        with warnings.catch_warnings():
            # torch says so once, of the mode itself
            warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype feature", UserWarning)
            torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")

    return forbidden
