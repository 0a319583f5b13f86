"""What is checked of a dense source and of calibration statistics before the first weight is quantized."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy.typing as npt

from bcqfmt.converters.jobs.plan import Plan
from bcqfmt.converters.jobs.pool import Stop, run_all
from bcqfmt.converters.jobs.source_files import hash_source
from bcqfmt.converters.jobs.workspace import Workspace
from bcqfmt.converters.methods.protocol import InputStats
from bcqfmt.converters.source.checkpoint import SourceCheckpoint
from bcqfmt.errors import BcqError, error, escape, in_file

from .choice import Choice
from .dense import check_finite
from .stats import StatsFile

_LAYER = re.compile(r"\d+")
TRAINED = ("gptq", "rtn", "bcq")  # methods whose scales are free numbers, for --train-scales


class LazyStats(InputStats):
    """Statistics of a weight's input whose Hessian, often larger than the weight, is read when a method asks for it."""

    __slots__ = ("_file", "_held", "_name")
    _file: StatsFile
    _held: npt.NDArray[Any] | None
    _name: str

    def __init__(self, file: StatsFile, name: str, seen: InputStats) -> None:
        """``seen``: the same without the Hessian."""
        values = {"square_sum": seen.square_sum, "tokens": seen.tokens, "shared": seen.shared}
        for key, value in {**values, "_file": file, "_name": name, "_held": None}.items():
            object.__setattr__(self, key, value)

    @property
    def hessian(self) -> npt.NDArray[Any] | None:
        """``[in, in]``, read once."""
        if self._held is None:
            found = self._file.of(self._name)
            object.__setattr__(self, "_held", None if found is None else found.hessian)
        return self._held

    @classmethod
    def of(cls, file: StatsFile | None, name: str) -> LazyStats | None:
        """None where there is no file, or nothing on this weight in it."""
        seen = None if file is None else file.of(name, hessian=False)
        return None if file is None or seen is None else cls(file, name, seen)


def check_shapes(source: SourceCheckpoint, choice: Choice) -> None:
    """BCQ-E621 for a weight whose shape its method cannot take."""
    for name in choice.weights:
        rows, columns = source.tensors[name].shape[-2:]
        try:
            choice.method_of(name).check_shape(name, (rows, columns))
        except BcqError as fault:
            raise in_file(fault, source.home[name]) from None


def check_stats(
    source: SourceCheckpoint, choice: Choice, stats: StatsFile | None, *, data: bool = True, text: bool = True
) -> None:
    """BCQ-E623 in the words of the method that cannot do without, BCQ-E624 for statistics of another model.

    ``data``: also compare samples of the numbers, for which the source has to be here. ``text``: whether the caller
    could calibrate on a text as well.
    """
    if stats is not None and data:
        stats.check(source)
    for name in choice.weights:
        reason = choice.method_of(name).needs_stats()
        if reason is not None and (stats is None or name not in stats.inputs):
            given = "" if stats is None else "the statistics have nothing on this weight; "
            found = f"{given}{reason.rstrip('.')}"
            expected, hint = "--text FILE or --stats FILE" if text else "--stats FILE", None
            if stats is not None:
                expected, hint = "statistics of it", _leave_out(name)
            elif not text:
                hint = "make them: bcqfmt calibrate MODEL --text FILE; then add --stats stats.safetensors"
            raise error("BCQ-E623", source.home[name], name, found, expected, hint)
    if stats is None:
        return
    for name in choice.weights:
        seen, columns = stats.of(name, hessian=False), source.tensors[name].shape[-1]
        if seen is not None and seen.square_sum.shape != (columns,):
            found = f"statistics of {seen.square_sum.size} channels"
            raise error("BCQ-E624", stats.path.name, name, found, f"{columns}, as the weight has")


def check_covered(source: SourceCheckpoint, choice: Choice, layers: Sequence[Sequence[str]]) -> None:
    """BCQ-E623 for a weight whose method needs statistics and that is in none of the decoder ``layers``."""
    seen = {name for names in layers for name in names}
    places = {_LAYER.sub("#", name, count=1) for name in seen}
    for name in choice.weights:
        reason = choice.method_of(name).needs_stats()
        if reason is None or name in seen:
            continue
        found, hint = "it is no linear layer of a decoder layer", _leave_out(name)
        if _LAYER.sub("#", name, count=1) in places:
            found = f"config.json has num_hidden_layers = {len(layers)}, and it belongs to none of these"
            hint = f"correct num_hidden_layers if the model has more, else {hint}"
        raise error("BCQ-E623", source.home[name], name, f"{found}; {reason.rstrip('.')}", "statistics of it", hint)


def _leave_out(name: str) -> str:
    return f"leave it dense: --exclude {escape(name, 512)}; or give it a method without statistics, rtn, by a rule"


def check_trained(source: SourceCheckpoint, choice: Choice) -> None:
    """BCQ-E302 for a weight whose method has no numbers that could be trained."""
    for name in choice.weights:
        method = choice.method_of(name).name
        if method not in TRAINED:
            found = f"--train-scales with method {escape(method)}"
            raise error(
                "BCQ-E302", source.home[name], name, found, " or ".join(TRAINED), "choose one of these, or leave it out"
            )


def check_source(
    source: SourceCheckpoint, names: Iterable[str], space: Workspace, plan: Plan, workers: int, stop: Stop
) -> None:
    """Digests of the source files, and no NaN in any weight: found now, not hours later."""

    def finite(name: str) -> None:
        stop.check()
        check_finite(source.tensors[name], source.home[name])

    jobs: list[Callable[[], None]] = [
        partial(hash_source, source, plan, space, i, path, stop.check) for i, path in enumerate(source.models)
    ]
    if space.done("source-checked", plan) is None:
        jobs += [partial(finite, name) for name in names]
    run_all(jobs, workers, stop)
    space.finish("source-checked", plan, {})
