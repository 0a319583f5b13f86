"""The few functions of Ray that are used, in one process: tasks run while the driver waits, the last one first.

``lose[name] = n``: the first n attempts at that task end as with a killed process, having left half a file behind.
``fails[name] = exception``: the task raises it.
"""

from __future__ import annotations

import types
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any


class RayError(Exception):
    """Ray's base class."""


class RayTaskError(RayError):
    """What a task raised, wrapped."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(f"Traceback of another machine\n{cause}")
        self.cause = cause


class WorkerCrashedError(RayError):
    """The process is gone."""


class OutOfMemoryError(RayError):
    """The process was ended for its memory."""


class FakeRay(types.ModuleType):
    """Stands in for the module ``ray``."""

    def __init__(self, memory: int = 8 << 30, nodes: int = 2) -> None:
        super().__init__("ray")
        self.exceptions = types.ModuleType("ray.exceptions")
        for fault in (RayError, RayTaskError, WorkerCrashedError, OutOfMemoryError):
            setattr(self.exceptions, fault.__name__, fault)
        self.memory, self.count = memory, nodes
        self.lose: dict[str, int] = {}
        self.fails: dict[str, Exception] = {}
        self.death: type[RayError] = WorkerCrashedError
        self.attempts: Counter[str] = Counter()
        self.asked: dict[str, dict[str, Any]] = {}
        self.most = 0
        self.before_wait: Callable[[], None] = lambda: None
        self.joined: list[dict[str, Any]] = []
        self.cancelled: list[str] = []
        self._joined = False

    # -- the cluster
    def init(self, **options: Any) -> None:
        self.joined.append(options)
        self._joined = True

    def is_initialized(self) -> bool:
        return self._joined

    def shutdown(self) -> None:
        self._joined = False

    def nodes(self) -> list[dict[str, Any]]:
        dead = {"Alive": False, "Resources": {"CPU": 99.0, "memory": 1e15}}
        return [dead] + [{"Alive": True, "Resources": {"CPU": 1.0, "memory": float(self.memory)}}] * self.count

    def get_runtime_context(self) -> Any:
        return types.SimpleNamespace(get_node_id=lambda: f"node{sum(self.attempts.values()) % self.count}")

    # -- tasks
    def remote(self, **options: Any) -> Callable[[Callable[[Any], Any]], _Remote]:
        return lambda function: _Remote(self, function, options)

    def wait(self, references: Sequence[_Reference], num_returns: int, timeout: float) -> tuple[list[_Reference], None]:
        assert num_returns == 1
        assert timeout
        self.most = max(self.most, len(references))
        self.before_wait()
        references[-1].run()
        return [references[-1]], None

    def get(self, reference: _Reference) -> Any:
        if isinstance(reference.outcome, RayError):
            raise reference.outcome
        return reference.outcome

    def cancel(self, reference: _Reference, force: bool) -> None:
        assert force
        self.cancelled.append(reference.task.file)


class _Remote:
    def __init__(self, ray: FakeRay, function: Callable[[Any], Any], options: dict[str, Any]) -> None:
        self.ray, self.function, self.given = ray, function, options

    def options(self, **more: Any) -> _Remote:
        return _Remote(self.ray, self.function, {**self.given, **more})

    def remote(self, task: Any) -> _Reference:
        self.ray.asked[task.file] = self.given
        return _Reference(self, task)


class _Reference:
    def __init__(self, remote: _Remote, task: Any) -> None:
        self.remote, self.task = remote, task
        self.outcome: Any = None

    def run(self) -> None:
        ray, task = self.remote.ray, self.task
        for _ in range(self.remote.given["max_retries"] + 1):
            ray.attempts[task.file] += 1
            if ray.attempts[task.file] <= ray.lose.get(task.file, 0):
                half = Path(f"{task.target}.partial") / ".0123456789abcdef.tmp"
                half.write_bytes(b"half of it")
                self.outcome = ray.death()
                continue
            if task.file in ray.fails:
                self.outcome = RayTaskError(ray.fails[task.file])
                return
            self.outcome = self.remote.function(task)
            return
