"""The small conversion that every fault befalls, and the one of twenty shards."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from faults.fault_case import Case, dense_case, small_case, twenty_shards
from sources.conversions import tree


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    """No fault may change the source."""
    case = small_case(tmp_path_factory.mktemp("small"))
    before = tree(case.source)
    yield case
    assert tree(case.source) == before


@pytest.fixture(scope="session")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    case = dense_case(tmp_path_factory.mktemp("dense"))
    before = tree(case.source)
    yield case
    assert tree(case.source) == before


@pytest.fixture(scope="session")
def twenty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    case = twenty_shards(tmp_path_factory.mktemp("twenty"))
    before = tree(case.source)
    yield case
    assert tree(case.source) == before
