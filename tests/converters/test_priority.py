"""Threads that give way: they do, those that they start do, and nobody else does."""

from __future__ import annotations

import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from bcqfmt.converters.digests.priority import give_way


def niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no priority of their own there")
def test_a_thread_gives_way_and_those_it_starts() -> None:
    before = niceness()

    def below() -> tuple[int, int]:
        with ThreadPoolExecutor(1) as started:
            return niceness(), started.submit(niceness).result()

    with ThreadPoolExecutor(1, initializer=give_way) as pool:
        assert pool.submit(below).result() == (min(19, before + 5),) * 2
    assert niceness() == before
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(niceness).result() == before


@pytest.mark.skipif(sys.platform != "linux", reason="threads have no priority of their own there")
def test_there_is_a_lowest_priority() -> None:
    with ThreadPoolExecutor(1, initializer=give_way) as pool:
        for _ in range(5):
            pool.submit(give_way).result()
        assert pool.submit(niceness).result() == 19
