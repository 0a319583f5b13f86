"""The engine Ray (extra ``[ray]``): every shard a task on a cluster that is running already.

Ray decides where a task runs, by processors and memory, and runs it again elsewhere when its process or its machine is
lost. Nothing is sent but the task itself, which is a few names: source and target are folders that every machine sees
under the same path. Nothing depends on Ray being right: see `tasks`.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import re
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from bcqfmt.errors import BcqError, error, escape
from bcqfmt.version import pip_install

from .tasks import Task, fault_of, run_task, tasks_of

if TYPE_CHECKING:
    from bcqfmt.converters.jobs.pool import ShardDone, Tick
    from bcqfmt.converters.jobs.workspace import Workspace

    from .conversion import Conversion


_RETRIES = 5  # of a task whose process or machine was lost
_OWN = 150_000_000  # bytes that a Ray worker uses before it does anything
_REACH = 5.0  # seconds for the first answer of the cluster
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_POLL = 0.5  # seconds; an interrupt is noticed at least that often


class RayExecutor:
    """Shards on a Ray cluster.

    ``address``: HOST:PORT of the cluster, else the environment's RAY_ADDRESS, else the one on this machine.
    ``at_once``: no more tasks than this at a time. ``say``: gets lines about the cluster.
    """

    def __init__(
        self,
        address: str | None = None,
        at_once: int | None = None,
        retries: int = _RETRIES,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.address = address or os.environ.get("RAY_ADDRESS") or "auto"
        self.at_once, self.retries, self.say = at_once, retries, say
        self.reports: list[dict[str, Any]] = []
        self._asked = 0
        self._ray: Any = _import_ray()

    def work(self, conversion: Conversion, space: Workspace, tick: Tick, shard_done: ShardDone) -> None:
        """Run every shard as a task; what counts is the record that it leaves in the workspace."""
        tasks = [replace(task, memory=task.memory + _OWN) for task in tasks_of(conversion, space.target)]
        with contextlib.redirect_stdout(_Lines(self.say)), self._connected():
            self._check_room(tasks)
            for task, report in self._all(tasks):
                fault = fault_of(report)
                if fault is not None:
                    raise fault
                self.reports.append(report)
                record = space.adopt(task.file, conversion.plan)
                tick(task.nbytes)
                shard_done(task.file, record["size"])

    def summary(self) -> dict[str, Any]:
        """What the tasks told: how many, where, and the most memory that one was given and took."""
        return {
            "name": "ray",
            "tasks": len(self.reports),
            "nodes": len({report["ray_node"] for report in self.reports}),
            "task_memory_bytes": self._asked,
            "peak_task_rss_bytes": max((report["peak_rss_bytes"] for report in self.reports), default=0),
        }

    # -- the cluster --------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _connected(self) -> Iterator[None]:
        """Join the cluster, unless this process has; never start one."""
        if self._ray.is_initialized():
            yield
            return
        _reach(self.address)
        ours = _signals()
        try:
            self._ray.init(address=self.address, log_to_driver=False, logging_level="ERROR", configure_logging=False)
        except (OSError, RuntimeError, ValueError, AssertionError) as fault:
            raise _unreachable(self.address, f"{type(fault).__name__}: {escape(str(fault))}") from fault
        finally:
            ours()
        try:
            yield
        finally:
            self._ray.shutdown()

    def _check_room(self, tasks: list[Task]) -> None:
        """BCQ-E801 when no machine could ever take the largest task: it would wait for ever."""
        nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        nodes = [node for node in nodes if node.get("CPU", 0) >= 1]
        if not nodes:
            raise _unreachable(self.address, "a cluster without a processor for tasks")
        need, most = max(task.memory for task in tasks), int(max(node.get("memory", 0) for node in nodes))
        self._asked = need
        cores = sum(int(node["CPU"]) for node in nodes)
        machines = f"{len(nodes)} node{'s' if len(nodes) > 1 else ''}"
        self.say(f"ray: {machines} with {cores} CPUs; {len(tasks)} tasks of 1 CPU and {need / 1e6:.0f} MB")
        if need > most:
            found = f"the node with the most memory gives tasks {most:,} bytes"
            hint = "start a larger node, or give a node more: ray start --memory BYTES"
            raise error("BCQ-E801", found=found, expected=f"{need:,}, for the largest weight", hint=hint)

    # -- the tasks ----------------------------------------------------------------------------------------------

    def _all(self, tasks: list[Task]) -> Iterator[tuple[Task, dict[str, Any]]]:
        """(task, report) in the order in which they end. No task is left running after a failure."""
        ray = self._ray
        waiting = tasks[::-1]
        running: dict[Any, Task] = {}
        remote = ray.remote(num_cpus=1, max_retries=self.retries, retry_exceptions=False)(_task)
        try:
            while waiting or running:
                while waiting and len(running) < (self.at_once or len(tasks)):
                    task = waiting.pop()
                    named = {"name": f"bcqfmt {task.file}", "memory": task.memory, "scheduling_strategy": "SPREAD"}
                    running[remote.options(**named).remote(task)] = task
                ready, _ = ray.wait(list(running), num_returns=1, timeout=_POLL)
                for reference in ready:
                    task = running.pop(reference)
                    yield task, self._report(task, reference)
        finally:
            for reference in running:
                with contextlib.suppress(Exception):  # it may be done, or the cluster gone
                    ray.cancel(reference, force=True)

    def _report(self, task: Task, reference: Any) -> dict[str, Any]:
        faults = self._ray.exceptions
        try:
            report: dict[str, Any] = self._ray.get(reference)
        except faults.OutOfMemoryError as fault:
            found = f"a node ran out of memory {self.retries + 1} times; the task was given {task.memory:,} bytes"
            raise error("BCQ-E801", task.file, found=found, hint="run fewer tasks at a time: --workers N") from fault
        except faults.RayTaskError as fault:
            cause = getattr(fault, "cause", None) or fault
            kind = f"{type(cause).__name__}: {escape(str(cause))}"
            if isinstance(cause, ImportError):
                raise error("BCQ-E711", task.file, found=kind, expected="this bcqfmt on every node") from fault
            raise error("BCQ-E712", task.file, found=kind) from fault
        except faults.RayError as fault:
            found = f"{self.retries + 1} attempts ended with {type(fault).__name__}"
            raise error("BCQ-E712", task.file, found=found) from fault
        return report


class _Lines(io.TextIOBase):
    """A stdout for Ray, which prints there in colours about lost processes: plain lines, handed to ``say``."""

    def __init__(self, say: Callable[[str], None]) -> None:
        super().__init__()
        self._say, self._held = say, ""

    def write(self, text: str) -> int:
        """Pass on every line that is complete."""
        *lines, self._held = (self._held + text).split("\n")
        for line in lines:
            plain = _COLOURS.sub("", line).strip()
            if plain:
                self._say(f"ray: {escape(plain)}")
        return len(text)


def _task(task: Task) -> dict[str, Any]:
    """What runs on the cluster."""
    ray = _import_ray()
    return {**run_task(task), "ray_node": ray.get_runtime_context().get_node_id()}


def _import_ray() -> Any:
    try:
        importlib.import_module("ray.exceptions")
        return importlib.import_module("ray")
    except ImportError as fault:
        found = f"{fault.name or 'ray'} is not installed"
        raise error("BCQ-E306", found=found, hint=pip_install("ray")) from fault


def _reach(address: str) -> None:
    """BCQ-E710 for an address that does not answer: Ray itself would try for minutes."""
    if address == "local" or address.startswith("ray://"):
        found = "a cluster that would have to be started" if address == "local" else "an address for Ray Client"
        raise error("BCQ-E710", address, found=found, expected="HOST:PORT, from a machine that sees SRC and DST")
    host, colon, port = address.rpartition(":")
    if not colon:  # auto, or a name that Ray resolves
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), _REACH).close()
    except (OSError, ValueError, OverflowError) as fault:
        raise _unreachable(address, escape(str(fault))) from fault


def _unreachable(address: str, found: str) -> BcqError:
    return error("BCQ-E710", address, found=found, expected="a running cluster")


def _signals() -> Callable[[], None]:
    """Ray installs its own handler of SIGTERM; the result, when called, puts the present one back."""
    if threading.current_thread() is not threading.main_thread():
        return lambda: None
    before = signal.getsignal(signal.SIGTERM)

    def restored() -> None:
        if before is not None:
            signal.signal(signal.SIGTERM, before)

    return restored
