"""Memory of large arrays is reused: never while a view of it exists, never more than was needed at once."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import bcqfmt
from bcqfmt.converters.words import buffers
from bcqfmt.converters.words.buffers import new_array, reused, wait_for_room

Array = np.ndarray[Any, Any]
MEGA = 1 << 20


def place(array: Array) -> int:
    return int(array.ctypes.data)


def test_memory_is_reused_when_the_last_view_is_gone() -> None:
    with reused():
        first = new_array((3, MEGA), np.uint32)
        at, view = place(first), first[1, 5:7]
        del first
        second = new_array((2, MEGA), np.uint32)
        assert place(second) != at
        del view
        third = new_array((MEGA * 3,), np.int32)
        assert place(third) == at
        assert third.flags.c_contiguous
        assert third.flags.writeable
        assert place(third) % 64 == 0
    assert buffers._store.free == []


def test_of_several_blocks_the_last_one_given_back_is_reused() -> None:
    with reused():
        arrays = [new_array((2, MEGA), np.uint8) for _ in range(3)]
        places = [place(array) for array in arrays]
        for chosen in (1, 2, 0):
            arrays[chosen] = new_array((1,), np.uint8)
        again = [new_array((2, MEGA), np.uint8) for _ in range(3)]
        assert [place(array) for array in again] == [places[0], places[2], places[1]]


def test_outside_and_when_small_it_is_a_plain_array() -> None:
    assert new_array((4, MEGA), np.uint8).base is None
    with reused():
        assert new_array((100,), np.uint8).base is None


def test_an_array_may_live_longer_than_the_block() -> None:
    with reused():
        array = new_array((MEGA,), np.uint16)
        array[:] = 7
    again = new_array((MEGA,), np.uint16)
    again[:] = 8
    assert (array == 7).all()
    del array
    assert buffers._store.free == []
    assert buffers._store.used == 0


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 12)), max_size=40))
@settings(max_examples=60, deadline=None)
def test_live_arrays_never_overlap_and_the_store_stays_small(steps: list[tuple[bool, int]]) -> None:
    alive: list[tuple[Array, int]] = []
    array: Array | None = None
    most = 0
    with reused():
        for number, (take, size) in enumerate(steps):
            if take or not alive:
                array = new_array((size, MEGA // 4), np.uint32)
                array[:, :: MEGA // 64] = number
                alive.append((array, number))
            else:
                alive.pop(size % len(alive))
            for array, content in alive:
                assert (array[:, :: MEGA // 64] == content).all()
            most = max(most, sum(array.nbytes + 64 for array, _ in alive))
            held = buffers._store.used + sum(block.size for block in buffers._store.free)
            assert held <= buffers._OVERSIZE * most
        array = None
        alive.clear()
        assert buffers._store.used == 0


def test_tensors_are_read_into_it(tmp_path: Path) -> None:
    content = np.random.default_rng(0).integers(0, 2**16, (512, 3000), np.uint16)
    bcqfmt.save(tmp_path / "x.safetensors", {"a": content, "b": content[:2]})
    with bcqfmt.open(tmp_path / "x.safetensors") as checkpoint, reused():
        for name, expected in (("a", content), ("b", content[:2])):
            tensor = checkpoint[name].allocated_by(new_array)  # type: ignore[union-attr]
            assert np.array_equal(tensor.array(), expected)
            assert np.array_equal(tensor.read((1, 2)), expected[1:2])
            assert np.array_equal(np.concatenate(list(tensor.chunks(1 << 21))).view(np.uint16), expected.reshape(-1))
        array = checkpoint["a"].allocated_by(new_array).array()  # type: ignore[union-attr]
        assert buffers._store.used >= array.nbytes


class Stop(Exception):
    pass


def test_waiting_for_room() -> None:
    calls: list[int] = []

    def check_stop() -> None:
        calls.append(1)
        if len(calls) == 3:
            raise Stop

    with reused():
        wait_for_room(100 * MEGA, MEGA, check_stop)  # nothing is alive: there will never be more room
        array = new_array((MEGA,), np.uint8)
        wait_for_room(MEGA, 3 * MEGA, check_stop)
        assert not calls
        with pytest.raises(Stop):
            wait_for_room(MEGA, 2 * MEGA, check_stop)
        calls.clear()
        holder = [array]
        del array
        later = threading.Timer(0.05, holder.clear)
        later.start()
        wait_for_room(MEGA, 2 * MEGA, lambda: None)
        assert not holder
        later.join()


def test_waiting_ends_when_nothing_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffers, "_LONGEST_WAIT", 2)
    with reused():
        array = new_array((MEGA,), np.uint8)
        wait_for_room(MEGA, MEGA, lambda: None)
        assert array.size == MEGA
