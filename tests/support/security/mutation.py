"""Guards taken out of running code: a function's own source with one text replaced, compiled and put in its place."""

from __future__ import annotations

import contextlib
import inspect
import textwrap
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType
from typing import Any

Edit = tuple[Any, str, str]  # function, text of its source, what stands there instead


@contextlib.contextmanager
def without(*edits: Edit) -> Iterator[None]:
    """The functions as if they had been written without their guards, wherever they were imported to."""
    saved: list[tuple[FunctionType, CodeType]] = []
    try:
        for function, old, new in edits:
            saved.append((function, function.__code__))
            function.__code__ = mutated(function, old, new)
        yield
    finally:
        for function, code in reversed(saved):
            function.__code__ = code


def mutated(function: Callable[..., Any], old: str, new: str) -> CodeType:
    """The code of the function with ``old`` replaced; it must be there once."""
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(old) == 1, f"{old!r} occurs {source.count(old)} times in {function.__qualname__}"
    text = "from __future__ import annotations\n" + source.replace(old, new)
    module = compile(text, inspect.getfile(function), "exec", dont_inherit=True)
    (code,) = [
        constant
        for constant in module.co_consts
        if isinstance(constant, CodeType) and constant.co_name == function.__name__
    ]
    assert code.co_freevars == function.__code__.co_freevars
    assert code != function.__code__
    return code
