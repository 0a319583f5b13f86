"""The order of tests and the examples of property tests; what collection makes is not searched for garbage."""

from __future__ import annotations

import gc
import importlib.util
from collections import defaultdict
from collections.abc import Generator
from itertools import count
from pathlib import Path

import pytest

if importlib.util.find_spec("hypothesis"):  # tests of the GPU do without
    from hypothesis import HealthCheck, settings

    from weights.strategies import EXPLORE

    settings.register_profile(
        "bcqfmt",
        derandomize=EXPLORE == 1,  # the same examples every time, unless BCQ_EXPLORE asks for others
        database=None,
        deadline=None,
        max_examples=60 * EXPLORE,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture],
    )
    settings.load_profile("bcqfmt")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Folders take turns: files of one often compile the same, which processes at the same time would each do."""
    turns: defaultdict[Path, count[int]] = defaultdict(count)
    turn = {path: next(turns[path.parent]) for path in dict.fromkeys(item.path for item in items)}
    items.sort(key=lambda item: turn[item.path])
