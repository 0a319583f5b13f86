"""Exploring (q, g): every combination of method, bits and group size tried on a model; size, error, Pareto front."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy.typing as npt

from bcqfmt.converters.methods.errors import Sums
from bcqfmt.converters.methods.registry import find_method
from bcqfmt.converters.quantize.choice import Choice, choose
from bcqfmt.converters.quantize.dense import judge, refuse_quantized
from bcqfmt.converters.quantize.preflight import LazyStats, check_shapes, check_stats
from bcqfmt.converters.quantize.stats import StatsFile
from bcqfmt.converters.quantize.weight import quantize_tensor
from bcqfmt.converters.source.checkpoint import SourceCheckpoint

from .svg import Mark, Series, scatter, standalone

Tensors = Iterable[tuple[str, npt.NDArray[Any]]]
Evaluate = Callable[[Tensors], float]


@dataclass(frozen=True, slots=True)
class Combination:
    """One combination to try; ``group_size`` as users write it, a number or ``row``."""

    method: str
    bits: int
    group_size: str


@dataclass(slots=True)
class Point:
    """What a combination gives: bytes of the weights and of everything, error, perplexity where a text is given."""

    method: str
    bits: int
    group_size: str
    weight_bytes: int
    model_bytes: int
    bits_per_weight: float
    mse: float | None
    relative: float | None
    sqnr_db: float | None
    perplexity: float | None = None
    front: bool = False

    @property
    def loss(self) -> float:
        """What should be small: perplexity if it is known, else the relative error."""
        chosen = self.relative if self.perplexity is None else self.perplexity
        return math.inf if chosen is None else chosen

    def as_dict(self) -> dict[str, Any]:
        """For JSON output; an infinite perplexity is null."""
        found = asdict(self)
        if self.perplexity is not None and not math.isfinite(self.perplexity):
            found["perplexity"] = None
        return found


class Sweep:
    """A model and the combinations to try on it; all of them are checked before the first one runs."""

    def __init__(
        self,
        source: SourceCheckpoint,
        combinations: Sequence[Combination],
        settings: Mapping[str, Any],
        *,
        stats: StatsFile | None = None,
        include: Sequence[str] = (),
        exclude: Sequence[str] = (),
        threads: int = 1,
    ) -> None:
        """``settings``: more settings, for every method that has them; BCQ-E620 for one that none has."""
        refuse_quantized(source)
        self.source, self.stats, self.threads = source, stats, threads
        verdicts = judge(source)
        self._tries: list[tuple[Combination, Choice]] = []
        known = {one.method: {setting.name for setting in find_method(one.method).parameters()} for one in combinations}
        known_settings = set().union(*known.values())
        unknown = {name: value for name, value in settings.items() if name not in known_settings}
        for one in combinations:
            own = {name: value for name, value in settings.items() if name in known[one.method]}
            given = {**own, **unknown, "bits": one.bits, "group_size": one.group_size}
            choice = choose(verdicts, one.method, given, None, include, exclude)
            check_shapes(source, choice)
            check_stats(source, choice, stats, text=False)  # the text of a sweep is for perplexity
            self._tries.append((one, choice))
        self.weights = list(self._tries[0][1].weights)
        self.dense_bytes = sum(t.nbytes for name, t in source.tensors.items() if name not in set(self.weights))

    @property
    def tries(self) -> int:
        return len(self._tries)

    def run(self, evaluate: Evaluate | None = None, tick: Callable[[int], None] | None = None) -> Iterator[Point]:
        """A point per combination, in order; ``tick`` gets the source bytes quantized since the last call.

        ``evaluate`` gets the dequantized weights of a combination, one at a time, and returns a perplexity.
        """
        for one, choice in self._tries:
            yield self._point(one, choice, evaluate, tick)

    def _point(
        self, one: Combination, choice: Choice, evaluate: Evaluate | None, tick: Callable[[int], None] | None
    ) -> Point:
        total, nbytes = [Sums(0.0, 0.0, 0)], [0]

        def quantized() -> Iterator[tuple[str, npt.NDArray[Any]]]:
            for name in self.weights:
                tensor = self.source.tensors[name]
                stats = LazyStats.of(self.stats, name)
                made = quantize_tensor(tensor, choice.method_of(name), stats, self.threads)
                total[0] += made.sums
                nbytes[0] += made.weight.nbytes
                if tick is not None:
                    tick(tensor.nbytes)
                if evaluate is not None:
                    yield name, made.weight.dequantize()

        perplexity = None if evaluate is None else evaluate(quantized())
        if evaluate is None:
            for _ in quantized():
                pass
        figures = total[0].figures()
        return Point(
            one.method, one.bits, one.group_size, nbytes[0], nbytes[0] + self.dense_bytes,
            nbytes[0] * 8 / total[0].size, figures["mse"], figures["relative"], figures["sqnr_db"], perplexity,
        )  # fmt: skip


def mark_front(points: Sequence[Point]) -> None:
    """Set ``front`` on those that no other point beats: none that is as small has less loss."""
    best = math.inf
    for point in sorted(points, key=lambda point: (point.weight_bytes, point.loss)):
        point.front = point.loss < best
        best = min(best, point.loss)


def plot(name: str, points: Sequence[Point], dense: float | None = None) -> bytes:
    """The points as an SVG file: bits per weight against loss, a line per method and q, the front over them."""
    known = [point for point in points if math.isfinite(point.loss) and point.loss > 0]
    if not known:
        return standalone(scatter(name, [], ("bits per weight", ""), heading=True))
    what = "relative error (%)" if known[0].perplexity is None else "perplexity"
    factor = 100.0 if known[0].perplexity is None else 1.0
    series: dict[tuple[str, int], list[Mark]] = {}
    for point in sorted(known, key=lambda point: point.bits_per_weight):
        tip = f"{point.method} q={point.bits} g={point.group_size}: {point.bits_per_weight:.3f} bits, {what} "
        mark = Mark(point.bits_per_weight, point.loss * factor, tip + f"{point.loss * factor:.4g}")
        series.setdefault((point.method, point.bits), []).append(mark)
    front = sorted((point for point in known if point.front), key=lambda point: point.bits_per_weight)
    title = f"{name}: size and {what}" + ("" if dense is None else f" (dense: {dense:.4g})")
    lines = [Series(f"{method} q={bits}", marks, True) for (method, bits), marks in sorted(series.items())]
    best = [Mark(point.bits_per_weight, point.loss * factor) for point in front]
    return standalone(scatter(title, lines, ("bits per weight", what), front=best, log_y=True, heading=True))
