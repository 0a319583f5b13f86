"""In which order tests run, and that nothing which collection makes is garbage: it is not searched for any."""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Generator
from itertools import count
from pathlib import Path

import pytest


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
