"""Tasks of the lm-evaluation-harness, run on a model that is loaded here, through the harness's Python interface."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bcqfmt.errors import BcqError, error, escape
from bcqfmt.version import pip_install

from .run import Loaded

_QUIET = ("lm_eval", "lm-eval", "datasets", "fsspec", "filelock")


class Score(NamedTuple):
    """One metric of one task; ``deviation`` is the standard error, None where the harness gives none."""

    task: str
    metric: str
    value: float
    deviation: float | None


class Tasks(NamedTuple):
    """Tasks that the harness knows; ``manager`` is its own."""

    names: list[str]
    manager: Any

    def run(self, loaded: Loaded, *, limit: int | None = None, shots: int | None = None, batch: int = 1) -> list[Score]:
        """The scores, in the order of the tasks. ``limit``: documents of each; ``shots``: examples before a question.

        Both are the task's own where they are None. BCQ-E102 where the harness fails: a data set that it cannot get.
        """
        import lm_eval
        from lm_eval.models.huggingface import HFLM

        try:
            with _quiet():
                model = HFLM(pretrained=loaded.model, tokenizer=loaded.tokenizer, batch_size=batch)
                found = lm_eval.simple_evaluate(
                    model=model, tasks=self.names, task_manager=self.manager, limit=limit, num_fewshot=shots,
                    log_samples=False, bootstrap_iters=1000,
                )  # fmt: skip
        except Exception as fault:  # tasks are programs of their authors, and fetch their data
            raise _failed(fault, ", ".join(self.names)) from fault
        return [score for task, row in found["results"].items() for score in _scores(task, row)]


def find_tasks(names: Sequence[str], folder: Path | None = None) -> Tasks:
    """The tasks of these names, before any model is loaded; ``folder``: of tasks that are not the harness's own.

    BCQ-E306 without the harness, BCQ-E302 for a name that it does not know.
    """
    try:
        with _quiet():
            from lm_eval.models import huggingface  # noqa: F401 - it needs more than the harness itself
            from lm_eval.tasks import TaskManager
    except ImportError as fault:
        found = f"{fault.name or 'lm_eval'} is not installed"
        raise error("BCQ-E306", found=found, hint=pip_install("eval")) from None
    if folder is not None and not folder.is_dir():
        raise error("BCQ-E101", str(folder), found="no such folder", expected="a folder of tasks (YAML files)")
    try:
        with _quiet():
            manager = TaskManager(include_path=None if folder is None else str(folder))
            unknown = [name for name in names if not manager.match_tasks([name])]
    except Exception as fault:
        raise _failed(fault, str(folder)) from fault
    if unknown:
        hint = "`lm_eval ls tasks` lists those of the harness; --task-folder adds a folder of your own"
        raise error("BCQ-E302", found=f"no task '{escape(unknown[0])}'", expected="a task of the harness", hint=hint)
    return Tasks(list(names), manager)


def _scores(task: str, row: dict[str, Any]) -> list[Score]:
    """``acc,none`` and ``acc_stderr,none`` of the harness as one score; another filter than none stays in the name."""
    made = []
    for key, value in row.items():
        metric, comma, chosen = key.partition(",")
        if not comma or metric.endswith("_stderr") or isinstance(value, str):
            continue
        spread = row.get(f"{metric}_stderr,{chosen}")
        shown = metric if chosen == "none" else key
        deviation = float(spread) if isinstance(spread, (int, float)) else None
        made.append(Score(task, shown, float(value), deviation))
    return made


def _failed(fault: Exception, what: str) -> BcqError:
    reason = str(fault).strip().partition("\n")[0] or type(fault).__name__
    hint = "tasks fetch their data once; check the network and the task's own files"
    return error("BCQ-E102", escape(what), found=f"the harness stops: {escape(reason)}", hint=hint)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without the harness's own log lines: errors come as exceptions."""
    before = {name: logging.getLogger(name).level for name in _QUIET}
    try:
        for name in _QUIET:
            logging.getLogger(name).setLevel(logging.ERROR)
        yield
    finally:
        for name, level in before.items():
            logging.getLogger(name).setLevel(level)
