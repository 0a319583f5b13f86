"""The hurried compiler leaves nothing of Numba changed; that it makes the same PTX, `make kernels-check` sees."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest

from bcqfmt.kernels.runtime.compiling import hurried


def scope() -> Any:
    return __import__("numba.cuda.core.ir", fromlist=["Scope"]).Scope


def test_numba_and_the_collector_are_what_they_were() -> None:
    before, own = gc.get_threshold(), vars(scope()).get("__deepcopy__")

    def fails() -> None:
        with hurried():
            assert "__deepcopy__" in vars(scope())
            assert gc.get_threshold()[0] >= before[0]
            with hurried():
                pass
            assert "__deepcopy__" in vars(scope())  # the inner one leaves it to the outer one
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert (gc.get_threshold(), vars(scope()).get("__deepcopy__")) == (before, own)


def test_a_collector_that_is_off_stays_off() -> None:
    before = gc.get_threshold()
    gc.set_threshold(0)
    try:
        with hurried():
            assert gc.get_threshold()[0] == 0
    finally:
        gc.set_threshold(*before)


def test_nobody_else_compiles_meanwhile() -> None:
    from numba.cuda.core.compiler_lock import global_compiler_lock

    begun, ended = threading.Event(), list[str]()

    def other() -> None:
        begun.set()
        with global_compiler_lock:
            ended.append("other")

    with hurried():
        thread = threading.Thread(target=other)
        thread.start()
        begun.wait(10)
        thread.join(0.2)
        ended.append("first")
    thread.join(10)
    assert ended == ["first", "other"]


@pytest.mark.parametrize("missing", [ImportError, AttributeError])
def test_a_numba_that_is_built_otherwise(monkeypatch: pytest.MonkeyPatch, missing: type[Exception]) -> None:
    def found(name: str) -> Any:
        if missing is ImportError:
            raise ImportError(name)
        return object()

    monkeypatch.setattr("bcqfmt.kernels.runtime.compiling.importlib.import_module", found)
    with hurried():
        assert "__deepcopy__" not in vars(scope())
