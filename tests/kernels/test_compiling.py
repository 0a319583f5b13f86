"""The hurried compiler: the same PTX, and nothing of Numba is left changed."""

from __future__ import annotations

import contextlib
import gc
import re
import threading
from typing import Any

import pytest

from bcqfmt.kernels import launch
from bcqfmt.kernels.compiling import hurried
from bcqfmt.kernels.cuda_rmsnorm import activation_kernel


def scope() -> Any:
    return __import__("numba.cuda.core.ir", fromlist=["Scope"]).Scope


def test_the_same_ptx(monkeypatch: pytest.MonkeyPatch) -> None:
    made = activation_kernel("F16", True, True)
    quick = named_alike(made.compile((9, 0)))
    monkeypatch.setattr(launch, "hurried", contextlib.nullcontext)
    assert named_alike(made.compile((9, 0))) == quick
    assert len(quick) > 10_000


def named_alike(text: str) -> str:
    """PTX without the numbers that Numba gives every compilation."""
    return re.sub(r"_ZN\w+|_cudapy_smem_\d+", "name", text)


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

    monkeypatch.setattr("bcqfmt.kernels.compiling.importlib.import_module", found)
    with hurried():
        assert "__deepcopy__" not in vars(scope())
