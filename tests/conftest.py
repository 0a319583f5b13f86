"""Which tests run in the same process, for every folder."""

from __future__ import annotations

from pathlib import Path

import pytest

_HERE = Path(__file__).resolve().parent
# Their tests need the same compiled loops. Spread over processes, each of these would compile them at the same moment.
_TOGETHER = ("methods/", "quantize/", "cli/test_quantize.py")


@pytest.hookimpl(tryfirst=True)  # xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(_HERE) and item.get_closest_marker("xdist_group") is None:
            name = item.path.relative_to(_HERE).as_posix()
            if name.startswith(_TOGETHER):
                item.add_marker(pytest.mark.xdist_group(name))
