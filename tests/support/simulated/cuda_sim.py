"""Functions run in a child process that has Numba's CUDA simulator.

Numba reads NUMBA_ENABLE_CUDASIM once, when it is imported, so the process of the tests cannot have it. One child per
test process is started when it is first needed and serves until the end: ``simulate(sim_kernels.lut_gemv, weight, x)``.
Another one looks for races: ``races(sim_kernels.lut_gemv, weight, x)``.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import os
import pickle
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

_WATCHED = "races"  # the word for a child that looks for them
_HANG = 300.0  # seconds after which a case counts as hung; the longest takes a few


class SimulationError(Exception):
    """What went wrong in the child: the name of the exception, then its text and notes."""

    def __init__(self, kind: str, text: str, trace: str) -> None:
        super().__init__(f"{kind}: {text}\n{trace}")
        self.kind, self.text = kind, text


class _Child:
    def __init__(self, *words: str) -> None:
        environment = {**os.environ, "NUMBA_ENABLE_CUDASIM": "1"}
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            env=environment,
        )  # fmt: skip

    def ask(self, request: Any) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        guard = threading.Timer(_HANG, self.process.kill)
        guard.start()
        try:
            pickle.dump(request, self.process.stdin)
            self.process.stdin.flush()
            return pickle.load(self.process.stdout)
        finally:
            guard.cancel()

    def close(self) -> None:
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()
        self.process.wait()


_children: dict[tuple[str, ...], _Child] = {}  # by the words of their command lines


def simulate(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """``function(*arguments, **options)`` in the simulator; the function is found by its module and name there."""
    return _asked((), function, arguments, options)


def races(function: Callable[..., Any], *arguments: Any, **options: Any) -> list[str]:
    """The races in shared memory that a call of the function in the simulator has (`simulator.races`)."""
    told: list[str] = _asked((_WATCHED,), function, arguments, options)
    return told


def _asked(words: tuple[str, ...], function: Callable[..., Any], arguments: Any, options: Any) -> Any:
    if words not in _children:
        _children[words] = _Child(*words)
        atexit.register(_children[words].close)
    try:
        outcome = _children[words].ask((function.__module__, function.__qualname__, arguments, options))
    except (EOFError, BrokenPipeError):
        del _children[words]
        raise SimulationError("Killed", f"no answer from {function.__qualname__}", "") from None
    if outcome[0] == "value":
        return outcome[1]
    raise SimulationError(*outcome[1:])


def _serve() -> None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from bcqfmt.kernels.runtime import simulation
    from simulator import hook
    from simulator import races as watch

    watched = sys.argv[1:] == [_WATCHED]
    if watched:
        watch.install(hook.INSTRUCTIONS)
    simulation.simulator = hook
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # a stray print goes to stderr, not between the answers
    while True:
        try:
            module, name, arguments, options = pickle.load(requests)
        except EOFError:
            return
        try:
            if module not in sys.modules:
                importlib.import_module(module)
                gc.freeze()  # what was imported is never garbage
            watch.found()  # what a call that failed has left
            found = getattr(sys.modules[module], name)(*arguments, **options)
            answer: tuple[Any, ...] = ("value", watch.found() if watched else found)
        except Exception as fault:  # noqa: BLE001 - handed to the test that asked
            kind = getattr(fault, "code", type(fault).__name__)
            text = "; ".join([str(fault), *getattr(fault, "__notes__", ())])
            answer = ("fault", kind, text, traceback.format_exc())
        pickle.dump(answer, answers)
        answers.flush()


if __name__ == "__main__":
    _serve()
