"""Tests that need a GPU: run by ``make test-gpu`` (pytest tests/gpu), skipped over by every other run.

On any GPU since sm_80: marked tests need sm_90. With ``BCQFMT_CAPABILITY=8.0`` the others run as on a GPU of that
capability, from PTX that the driver compiles. ``make test-gpu-sanitizer`` runs some under the four tools of
compute-sanitizer: every operator once, and wrong indices.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import numpy as np
import pytest

_HERE = Path(__file__).resolve().parent


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    asked = [Path(argument.split("::")[0]).resolve() for argument in config.args]
    return None if any(path == _HERE or _HERE in path.parents for path in asked) else True


@pytest.fixture(scope="session", autouse=True)
def gpu() -> tuple[int, int]:
    """What kernels are compiled for. Fails, never skips: who asks for these tests wants them run."""
    if not hasattr(np, "row_stack"):
        setattr(np, "row_stack", np.vstack)  # noqa: B010 - numba-cuda 0.30 asks for the old name
    from bcqfmt.kernels.runtime import device

    device.require_cuda()
    return device.capability()


@pytest.fixture(autouse=True)
def _only_where_it_runs(request: pytest.FixtureRequest, gpu: tuple[int, int]) -> None:
    if gpu != (9, 0) and request.node.get_closest_marker("sm_90"):
        pytest.skip(f"needs sm_90; this is sm_{gpu[0]}{gpu[1]}")


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
