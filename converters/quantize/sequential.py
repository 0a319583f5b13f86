"""Quantizing block by block: every layer is fitted to what the quantized layers before it give it.

A decoder layer is held twice, as the source has it and with the weights quantized so far. Its linear layers are taken
input by input, in the order in which the layer runs. Over all rows of text two sums are taken: H = sum x' x'^T, x' the
input that the quantized part makes, and C = sum (x - x') x'^T, x the input in the dense model. What is quantized, with
H as its statistics, is W + W C (H + lambda I)^-1: of all matrices it makes of x' what is nearest to W x. Two layers,
the sums of one input and up to 1.2 GB of inputs are in memory. Imported on demand only: torch and transformers.

Nested planes are read at several precisions, and each has inputs of its own: those that the layers before make when
read at it. So there is a quantized layer, and H and C, for every precision.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch

from bcqfmt.converters.methods.protocol import InputStats, Reading
from bcqfmt.converters.source.checkpoint import SourceCheckpoint
from bcqfmt.system import return_freed_memory
from bcqfmt.weight.weight import BcqWeight

from .calibration import Model, Runner, device_of, model_and_tokens
from .calibration_work import CalibrationWork, TextOptions
from .layer_inputs import add_products, linears, mirrored, token_counts
from .layer_run import Budget, End, LayerRun, Seen, ends_of
from .stats import fingerprint
from .weight import Measured

__all__ = ["Blocks", "Prepared"]

Tensor = torch.Tensor
One = Callable[[str, Mapping[int, Reading]], Measured]  # name, readings by planes; 0: all planes

_BUDGET = 9 << 27  # bytes of what parts of a layer gave that are kept while the layer is worked on
_DAMPENING = 0.05  # of the mean diagonal, for the target: inputs that hardly occur keep the weight they have


class _Sums:
    """Of one input: squares float64 ``[in]`` without token weights; hessian and cross float64 with them.

    cross: C^T, ``[in, in]``; of a weight with fewer rows than columns the sum of x' (W x)^T, ``[in, out]``, which takes
    less: W C is its transpose less W H, and W x is what the dense layer gives.
    """

    def __init__(self, weight: Tensor, alone: bool) -> None:
        """``weight``: one that reads the input, of the dense layer; alone: no other does."""
        rows, n = weight.shape
        self.short = alone and rows < n
        self.moved = False  # whether x' ever was another than x
        zeros = partial(torch.zeros, dtype=torch.float64, device=weight.device)
        self.squares, self._lower, self.cross = zeros(n), zeros(n, n), zeros(n, rows if self.short else n)

    def add(self, x: Tensor, weights: Tensor | None, dense: Seen, twin: torch.nn.Linear) -> None:
        """Some tokens: their inputs ``[tokens, in]``, what they count, and what the dense layer saw."""
        weighted = x if weights is None else x * weights[:, None]
        self.squares += (torch.ones(1, len(x), device=x.device) @ x.square())[0]
        add_products(self._lower, x, weighted)
        known = dense.entered.shape == x.shape  # an expert may have got other tokens
        self.moved |= known and not torch.equal(dense.entered, x)
        if not self.short:
            self.cross += weighted.T @ (dense.entered - x) if known else 0.0
        elif known and dense.made is not None:
            bias = dict(twin.named_parameters()).get("bias", 0.0)
            self.cross += weighted.T @ (dense.made - bias)
        else:
            self.cross += weighted.T @ ((dense.entered if known else x) @ twin.weight.T)

    def hessian(self) -> Tensor:
        """H, ``[in, in]``."""
        return mirrored(self._lower)


class Prepared(NamedTuple):
    """What is found out before any work: the model, its text, where it runs, the weights of every decoder layer."""

    model: Model
    tokens: npt.NDArray[np.int64]
    device: torch.device
    names: list[list[str]]

    @classmethod
    def of(cls, source: SourceCheckpoint, given: TextOptions, *, dry_run: bool = False) -> Self:
        """Refuses what cannot be run on a text; ``dry_run``: nothing will be run."""
        device = device_of(given.device)
        model, tokens = model_and_tokens(source, given.text, given.rows, given.seq, 0, dry_run=dry_run)
        return cls(model, tokens, device, model.weight_names(source))


class Blocks:
    """The decoder layers of a model on a text, in a work folder of their own; a context manager."""

    def __init__(
        self, source: SourceCheckpoint, given: TextOptions, prepared: Prepared, folder: Path,
        say: Callable[[str], None], lower: Sequence[int] = (),
    ) -> None:  # fmt: skip
        """``folder``: where inputs of layers are kept, so that an interrupted run can go on.

        ``lower``: planes of nested weights at which they are read besides all of them.
        """
        model, tokens, device, _ = prepared
        plan = {"model": fingerprint(source), **given.blocks(), "device": device.type}
        self.source, self.say, self._weighting = source, say, given.weighting
        self._tokens, self._readings = tokens.size, (0, *lower)
        self._stage, self._runs = -1, dict[int | None, LayerRun]()  # the layer at hand
        self.work = CalibrationWork(folder, plan)
        with torch.no_grad():
            self.runner = Runner(source, model, tokens, self.work, device, given.weighting)
            if given.weighting == "loss":
                self.runner.weigh(say)
        self.count = len(self.runner.real)

    @torch.no_grad()
    def quantize(self, stage: int, chosen: Sequence[str], one: One) -> list[Measured]:
        """The chosen weights of a layer, quantized by ``one``, input by input."""
        self.say(f"layer {stage + 1} of {self.count}")
        self._leave()
        self.runner.load_layer(stage)
        with ends_of(self.runner.real[stage]) as ends:
            groups = self._groups(stage)
        self._runs = self._begun(stage, ends)
        named = {key: dict(self._linears(stage, run.layer)) for key, run in self._runs.items()}
        counts = self.work.read_weights(stage) if self._weighting == "loss" else {}
        made = []
        for group in groups:
            wanted = [name for name in group if name in chosen]
            sums = {
                key: self._sums(stage, key, named, group, wanted, counts, group is groups[-1])
                for key in self._readings
                if wanted
            }
            return_freed_memory()  # what was kept of the layer's parts
            for name in wanted:
                readings = {key: self._reading(named[None][name].weight, sums[key][name], group) for key in sums}
                measured = one(name, readings)
                for key in sums:
                    _put(named[key][name], measured.weight, key)
                made.append(measured)
            for each, run in self._runs.items():
                run.settle(named[each][name] for name in group)
        return made

    @torch.no_grad()
    def advance(self, stage: int, weights: Mapping[str, BcqWeight]) -> None:
        """What enters the next layer, of the dense model and of the quantized one; nothing if it is there already."""
        if self._stage != stage:  # it was quantized by a run that was interrupted
            self._leave()
            self.runner.load_layer(stage)
            self._runs = self._begun(stage, {})
            for key in self._readings:
                for name, child in self._linears(stage, self._runs[key].layer):
                    if name in weights:
                        _put(child, weights[name], key)
        for each, run in self._runs.items():
            if not self.work.rows_file(stage + 1, _kind(each)).exists():
                made = run.outputs(self._rows(stage, each), partial(self.runner.apply, stage))
                self.work.rows_into(stage + 1, (rows.cpu().numpy() for rows in made), _kind(each))
        for each in self._runs:
            self.work.rows_file(stage, _kind(each)).unlink(missing_ok=True)
        self._leave()

    def __enter__(self) -> Self:
        self._onednn = _use_onednn(False)  # the BLAS is faster: on ARM oneDNN packs the weights at every product
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        _use_onednn(self._onednn)
        self.work.__exit__(kind, value, trace)

    def _begun(self, stage: int, ends: Mapping[str, End]) -> dict[int | None, LayerRun]:
        """The layer, which is loaded, for every key: None is the dense one, then come the readings."""
        self._stage, layer = stage, self.runner.real[stage]
        budget, keys = Budget(_BUDGET), (None, *self._readings)
        return {key: LayerRun(layer if key == 0 else copy.deepcopy(layer), budget, ends) for key in keys}

    def _leave(self) -> None:
        """Forget the layer at hand."""
        for run in self._runs.values():
            run.forget()
        if self._stage >= 0:
            self.runner.unload(self.runner.real[self._stage])
        self._stage, self._runs = -1, {}
        return_freed_memory()

    def _linears(self, stage: int, layer: torch.nn.Module | None = None) -> Iterator[tuple[str, torch.nn.Linear]]:
        return linears(self.source, layer or self.runner.real[stage], self.runner.prefix(stage))

    def _rows(self, stage: int, key: int | None) -> Iterator[Tensor]:
        """What enters a layer; all read the text."""
        return self.runner.rows(stage, _kind(key) if stage else "hidden", keep=True)

    def _reading(self, weight: Tensor, found: _Sums, group: list[str]) -> Reading:
        hessian = found.hessian()
        known = hessian.float().cpu().numpy()
        stats = InputStats(found.squares.cpu().numpy(), known, self._tokens, tuple(sorted(group)))
        return Reading(stats, _target(weight, found, hessian))

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
        self.runner.apply(stage, next(self._rows(stage, 0)))
        for hook in hooks:
            hook.remove()
        return [names for _, names in seen]

    def _sums(
        self, stage: int, key: int, named: Mapping[int | None, Mapping[str, torch.nn.Linear]], group: list[str],
        wanted: list[str], counts: Mapping[str, npt.NDArray[np.float32]], last: bool,
    ) -> dict[str, _Sums]:  # fmt: skip
        """Sums over all rows at one input; the same for all weights that read it unless tokens count differently."""
        own = wanted if self._weighting == "loss" else wanted[:1]
        twins = {name: named[None][name] for name in own}
        found = {name: _Sums(twin.weight, len(wanted) == 1) for name, twin in twins.items()}
        inputs = zip(*(self._inputs(stage, one, named[one][group[0]], last) for one in (key, None)), strict=True)
        seq, row = self.runner.tokens.shape[1], 0
        for seen, dense in inputs:
            span = slice(row, row + self.runner.step)
            row += self.runner.step
            for name, twin in twins.items():
                given = counts[name][span] if name in counts else None
                weights = token_counts(self._weighting, given, seen.entered, seq)
                found[name].add(seen.entered, weights, dense, twin)
        return {name: found[name if name in found else wanted[0]] for name in wanted}

    def _inputs(self, stage: int, key: int | None, child: torch.nn.Linear, last: bool) -> Iterator[Seen]:
        """What enters a linear layer, some rows at a time; last: it is the layer's last input.

        At that one the dense layer is run to its end, and what it gives is kept for the next.
        """
        over = last and (stage + 1 == self.count or self.work.rows_file(stage + 1, _kind(key)).exists())
        run, rows, apply = self._runs[key], self._rows(stage, key), partial(self.runner.apply, stage)
        if not last or over or key is not None:
            yield from run.inputs(child, rows, apply, last=over)
            return
        with self.work.rows_output(stage + 1, _kind(key)) as put:
            yield from run.inputs_and_outputs(child, rows, apply, lambda made: put(made.cpu().numpy()))


def _use_onednn(use: bool) -> bool:
    """Let torch use oneDNN for products, or not; gives what was set before."""
    set_flags: Any = torch.backends.mkldnn.set_flags
    return bool(set_flags(use)[0])


def _kind(key: int | None) -> str:
    """The kind of a file of what enters a layer: of the dense model, or read at that many planes, 0: all."""
    return "hidden" if key is None else f"quantized{key or ''}"


def _put(child: torch.nn.Linear, weight: BcqWeight, planes: int) -> None:
    """A weight into a layer, read at that many planes; all of them if it has no such precision (0: all)."""
    known = any(planes in segment.precisions for segment in weight.scheme.segments)
    child.weight.copy_(torch.from_numpy(weight.dequantize("float32", planes=planes if known else None)))


def _target(weight: Tensor, sums: _Sums, hessian: Tensor) -> npt.NDArray[np.float32]:
    """What is to be quantized, ``[out, in]``."""
    own = weight.double()
    if not sums.moved:
        return np.ascontiguousarray(weight.cpu().numpy())
    pull = sums.cross.T - own @ hessian if sums.short else own @ sums.cross.T
    diagonal = hessian.diagonal()
    diagonal += _DAMPENING * diagonal.mean()
    own = own + torch.linalg.solve(hessian, pull.T).T
    made = own if own.isfinite().all() else weight
    return np.ascontiguousarray(made.float().cpu().numpy())
