"""Quantizing block by block: every layer is fitted to what the quantized layers before it give it.

A decoder layer is held twice, as the source has it and with the weights quantized so far. Its linear layers are taken
input by input, in the order in which the layer runs. Over all rows of text two sums are taken: H = sum x' x'^T, x' the
input that the quantized part makes, and C = sum (x - x') x'^T, x the input in the dense model. What is quantized, with
H as its statistics, is W + W C (H + lambda I)^-1: of all matrices it makes of x' what is nearest to W x. Some
rows of text, two layers and the sums of one input are in memory. Imported on demand only: torch and transformers.

Nested planes are read at several precisions, and each has inputs of its own: those that the layers before make when
read at it. So there is a quantized layer, and H and C, for every precision.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch

from bcqfmt.converters.methods.protocol import InputStats, Reading
from bcqfmt.converters.source.checkpoint import SourceCheckpoint
from bcqfmt.weight.weight import BcqWeight

from .calibration import Runner, device_of, model_and_tokens
from .calibration_work import CalibrationWork, TextOptions
from .layer_inputs import linears, token_counts
from .stats import fingerprint
from .weight import Measured

__all__ = ["Blocks"]

Tensor = torch.Tensor
One = Callable[[str, Mapping[int, Reading]], Measured]  # name, readings by planes; 0: all planes

_DAMPENING = 0.05  # of the mean diagonal, for the target: inputs that hardly occur keep the weight they have


class _Sums(NamedTuple):
    """Of one weight: squares float64 ``[in]`` without token weights; hessian and cross float64 ``[in, in]`` with."""

    squares: Tensor
    hessian: Tensor
    cross: Tensor


class Blocks:
    """The decoder layers of a model on a text, in a work folder of their own; a context manager."""

    def __init__(
        self, source: SourceCheckpoint, given: TextOptions, folder: Path, say: Callable[[str], None],
        lower: Sequence[int] = (),
    ) -> None:  # fmt: skip
        """``folder``: where inputs of layers are kept, so that an interrupted run can go on.

        ``lower``: planes of nested weights at which they are read besides all of them.
        """
        model, tokens = model_and_tokens(source, given.text, given.rows, given.seq, 0)
        device = device_of(given.device)
        plan = {"model": fingerprint(source), **given.blocks(), "device": device.type}
        self.source, self.say, self._weighting = source, say, given.weighting
        self._tokens, self._readings = tokens.size, (0, *lower)
        self.work = CalibrationWork(folder, plan)
        with torch.no_grad():
            self.runner = Runner(source, model, tokens, self.work, device, given.weighting)
            if given.weighting == "loss":
                self.runner.weigh(say)
        self.count = len(self.runner.real)

    def names(self) -> list[list[str]]:
        """The weights of every layer."""
        return [[name for name, _ in self._linears(stage)] for stage in range(self.count)]

    @torch.no_grad()
    def quantize(self, stage: int, chosen: Sequence[str], one: One) -> list[Measured]:
        """The chosen weights of a layer, quantized by ``one``, input by input."""
        self.say(f"layer {stage + 1} of {self.count}")
        layer = self.runner.load_layer(stage)
        dense, groups = copy.deepcopy(layer), self._groups(stage)
        layers = {planes: copy.deepcopy(layer) if planes else layer for planes in self._readings}
        named = {planes: dict(self._linears(stage, each)) for planes, each in layers.items()}
        twins = dict(self._linears(stage, dense))
        counts = self.work.read_weights(stage) if self._weighting == "loss" else {}
        made = []
        for group in groups:
            wanted = [name for name in group if name in chosen]
            if not wanted:
                continue
            sums = {
                planes: self._sums(
                    stage, planes, (each, dense), (named[planes][group[0]], twins[group[0]]), wanted, counts
                )
                for planes, each in layers.items()
            }
            for name in wanted:
                readings = {planes: self._reading(twins[name], sums[planes][name], group) for planes in layers}
                measured = one(name, readings)
                for planes in layers:
                    _put(named[planes][name], measured.weight, planes)
                made.append(measured)
        self.runner.unload(layer)
        return made

    @torch.no_grad()
    def advance(self, stage: int, weights: Mapping[str, BcqWeight]) -> None:
        """What enters the next layer, of the dense model and of the quantized one; nothing if it is there already."""
        runner, following = self.runner, stage + 1
        layer = runner.load_layer(stage)
        if not self.work.rows_file(following).exists():
            self.work.rows_into(following, (runner.apply(stage, row).cpu().numpy() for row in runner.rows(stage)))
        for planes in self._readings:
            if self.work.rows_file(following, _kind(planes)).exists():
                continue
            for name, child in self._linears(stage, layer):
                if name in weights:
                    _put(child, weights[name], planes)
            made = (runner.apply(stage, row).cpu().numpy() for row in self._quantized_rows(stage, planes))
            self.work.rows_into(following, made, _kind(planes))
        runner.unload(layer)
        for kind in ("hidden", *map(_kind, self._readings)):
            self.work.rows_file(stage, kind).unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.work.__exit__(kind, value, trace)

    def _linears(self, stage: int, layer: torch.nn.Module | None = None) -> Iterator[tuple[str, torch.nn.Linear]]:
        return linears(self.source, layer or self.runner.real[stage], self.runner.prefix(stage))

    def _quantized_rows(self, stage: int, planes: int = 0) -> Iterator[Tensor]:
        return self.runner.rows(stage, _kind(planes) if stage else "hidden", keep=True)

    def _reading(self, twin: torch.nn.Linear, found: _Sums, group: list[str]) -> Reading:
        hessian = found.hessian.float().cpu().numpy()
        stats = InputStats(found.squares.cpu().numpy(), hessian, self._tokens, tuple(sorted(group)))
        return Reading(stats, _target(twin.weight, found))

    def _groups(self, stage: int) -> list[list[str]]:
        """Weights that read the same input, in the order in which the layer runs."""
        seen: list[tuple[Tensor, list[str]]] = []  # tensors stay alive, so no two share an address

        def look(name: str) -> Callable[[Any, tuple[Any, ...]], None]:
            def hook(module: Any, given: tuple[Any, ...]) -> None:
                x = given[0]
                for other, names in seen:
                    if (other.data_ptr(), other.shape) == (x.data_ptr(), x.shape):
                        names.append(name)
                        return
                seen.append((x, [name]))

            return hook

        hooks = [child.register_forward_pre_hook(look(name)) for name, child in self._linears(stage)]
        self.runner.apply(stage, next(self._quantized_rows(stage)))
        for hook in hooks:
            hook.remove()
        return [names for _, names in seen]

    def _sums(
        self, stage: int, planes: int, layers: tuple[torch.nn.Module, torch.nn.Module],
        pair: tuple[torch.nn.Module, torch.nn.Module], wanted: list[str], counts: Mapping[str, npt.NDArray[np.float32]],
    ) -> dict[str, _Sums]:  # fmt: skip
        """Sums over all rows at one input; the same for all weights that read it unless tokens count differently.

        layers, pair: a decoder layer and its linear layer at that input, quantized and dense.
        """
        found: dict[str, _Sums] = {}
        own = wanted if self._weighting == "loss" else wanted[:1]
        rows = zip(self._quantized_rows(stage, planes), self.runner.rows(stage, keep=True), strict=True)
        for number, (mine, theirs) in enumerate(rows):
            span = slice(number * len(mine), (number + 1) * len(mine))
            x = self._input(stage, layers[0], pair[0], mine)
            other = self._input(stage, layers[1], pair[1], theirs)
            squares = x.square().sum(0, dtype=torch.float64)
            apart = other - x if other.shape == x.shape else torch.zeros_like(x)
            for name in own:
                given = counts[name][span] if name in counts else None
                weights = token_counts(self._weighting, given, x, mine.shape[1])
                weighted = x if weights is None else x * weights[:, None]
                more = _Sums(squares, (x.T @ weighted).double(), (apart.T @ weighted).double())
                found[name] = _Sums(*map(torch.add, found[name], more)) if name in found else more
        return {name: found[name if name in found else wanted[0]] for name in wanted}

    def _input(self, stage: int, layer: torch.nn.Module, child: torch.nn.Module, row: Tensor) -> Tensor:
        """What enters a linear layer of a decoder layer, ``[tokens, in]``; what comes after it is not run."""
        held: list[Tensor] = []

        def hook(module: torch.nn.Module, given: tuple[Any, ...]) -> None:
            held.append(given[0].reshape(-1, given[0].shape[-1]).float())
            raise _Reached

        remove = child.register_forward_pre_hook(hook)
        try:
            self.runner.apply(stage, row, layer)
        except _Reached:
            pass
        finally:
            remove.remove()
        return held[0]


class _Reached(Exception):
    """Ends a forward pass: nothing after it is needed."""


def _kind(planes: int) -> str:
    """The file of what enters a layer when those before it are read at that many planes; 0: all."""
    return f"quantized{planes or ''}"


def _put(child: torch.nn.Linear, weight: BcqWeight, planes: int) -> None:
    """The values of a weight, read at that many planes where it has so many precisions."""
    known = any(planes in segment.precisions for segment in weight.scheme.segments)
    child.weight.copy_(torch.from_numpy(weight.dequantize("float32", planes=planes if known else None)))


def _target(weight: Tensor, sums: _Sums) -> npt.NDArray[np.float32]:
    """What is to be quantized, ``[out, in]``."""
    own = weight.double()
    if not sums.cross.any():
        return np.ascontiguousarray(weight.cpu().numpy())
    matrix = sums.hessian.clone()
    diagonal = matrix.diagonal()
    diagonal += _DAMPENING * diagonal.mean()
    own = own + torch.linalg.solve(matrix, (own @ sums.cross).T).T
    made = own if own.isfinite().all() else weight
    return np.ascontiguousarray(made.float().cpu().numpy())
