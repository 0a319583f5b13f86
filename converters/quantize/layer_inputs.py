"""What is seen at the linear layers of a module while it runs: products of their inputs, gradients of their outputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from bcqfmt.container.stored_tensor import StoredTensor
from bcqfmt.converters.source.checkpoint import SourceCheckpoint

from .stats import stats_tensors

__all__ = ["MOST", "Gradients", "Inputs", "Weights", "add_products", "linears", "mirrored", "token_counts"]

Tensor = torch.Tensor
Weights = dict[str, npt.NDArray[np.float32]]  # weight -> [rows, seq], the mean over all tokens is 1

MOST = 50.0  # times the mean of its row that a token may count


def linears(source: SourceCheckpoint, module: torch.nn.Module, prefix: str) -> Iterator[tuple[str, torch.nn.Linear]]:
    """The linear layers of a module whose weights the source has, by the name it has for them."""
    for name, child in module.named_modules():
        weight = f"{prefix}{name}.weight"
        known = weight if weight in source.tensors else weight.partition(".")[2]  # saved without `model.`
        if isinstance(child, torch.nn.Linear) and known in source.tensors:
            yield known, child


def token_counts(weighting: str, given: npt.NDArray[np.float32] | None, x: Tensor, seq: int) -> Tensor | None:
    """What every token counts, ``[tokens]``, for an input ``[tokens, in]`` of rows of ``seq``; None: all the same.

    ``given``: the weights by loss, ``[rows, seq]``, where there are any. Parts of rows (experts) count as one.
    """
    if weighting == "none" or not len(x):
        return None
    power = x.square().sum(1).reshape((-1, seq) if len(x) % seq == 0 else (1, -1))
    if weighting == "tokens":
        mean = power.mean(1, keepdim=True)
        return (mean / torch.maximum(power, mean * 1e-6)).flatten()
    if given is None:
        return None
    counts = torch.from_numpy(given.copy()).to(x.device)
    size = counts * power
    return (counts * (MOST * size.mean(1, keepdim=True) / size.clamp_min(1e-30)).clamp_max(1.0)).flatten()


def add_products(total: Tensor, x: Tensor, weighted: Tensor) -> None:
    """total += x^T weighted, ``[in, in]`` float64, for inputs ``[tokens, in]`` times a number per token: symmetric.

    Blocks above the diagonal are left as they are: see :func:`mirrored`.
    """
    n = x.shape[1]
    step = max(96, n // 8)  # wide enough for the product's speed
    for start in range(0, n, step):
        run = slice(start, start + step)
        total[start:, run] += weighted[:, start:].T @ x[:, run]  # tall: OpenBLAS lets threads wait in wide ones


def mirrored(total: Tensor) -> Tensor:
    """The whole matrix of which :func:`add_products` has made the lower part."""
    return total.tril() + total.tril(-1).T


class Gradients:
    """Mean squared gradients at the outputs of a module's linear layers, token by token.

    A layer that sees other tokens than those of the text (an expert) has none.
    """

    def __init__(
        self, source: SourceCheckpoint, module: torch.nn.Module, prefix: str, shape: tuple[int, int]
    ) -> None:  # fmt: skip
        """``shape``: rows that are run at a time, and their tokens."""
        self._shape = shape
        self._now: dict[str, Tensor] = {}
        self._rows: dict[str, list[Tensor]] = {}
        self._hooks = [child.register_forward_hook(self._hook(name)) for name, child in linears(source, module, prefix)]

    def rows_done(self) -> None:
        """Keep what these rows gave."""
        for name, value in self._now.items():
            self._rows.setdefault(name, []).append(value)
        self._now = {}

    def results(self) -> Weights:
        """The mean of every layer is 1; the hooks go."""
        for hook in self._hooks:
            hook.remove()
        most = max(map(len, self._rows.values()), default=0)
        found = {name: torch.cat(rows).double() for name, rows in self._rows.items() if len(rows) == most}
        made = {name: value / value.mean() for name, value in found.items() if value.sum() > 0}
        return {name: value.float().cpu().numpy() for name, value in made.items()}

    def _hook(self, name: str) -> Callable[[torch.nn.Module, tuple[Any, ...], Tensor], None]:
        def keep(gradient: Tensor) -> None:
            self._now[name] = gradient.reshape(*self._shape, -1).float().square().mean(2)

        def look(module: torch.nn.Module, given: tuple[Any, ...], made: Tensor) -> None:
            if made.requires_grad and made.numel() == math.prod(self._shape) * made.shape[-1]:
                made.register_hook(keep)  # type: ignore[no-untyped-call]

        return look


class Inputs:
    """Statistics of the inputs of a module's linear layers.

    An input that several of them read is kept once; where tokens are weighted, its products are kept for each of them.
    """

    def __init__(
        self, source: SourceCheckpoint, module: torch.nn.Module, prefix: str, device: torch.device, weighting: str,
        weights: Weights, seq: int,
    ) -> None:  # fmt: skip
        self._seq = seq
        self._device, self._weighting, self._weights = device, weighting, weights
        self._row = 0
        self._squares: dict[str, Tensor] = {}
        self._products: dict[str, Tensor] = {}
        self._shared: dict[str, list[str]] = {}
        self._leader: dict[str, str] = {}
        self._seen: list[tuple[Tensor, str]] = []  # inputs of these rows: they stay alive, so no two share an address
        for name, child in linears(source, module, prefix):
            child.register_forward_pre_hook(self._hook(name))

    def rows_done(self, count: int) -> None:
        """Forget the tensors of some rows."""
        self._seen.clear()
        self._row += count

    def results(self) -> tuple[dict[str, StoredTensor], dict[str, list[str]]]:
        """Tensors by name, and for each input the weights that read it."""
        tensors: dict[str, StoredTensor] = {}
        inputs = {}
        for leader, squares in self._squares.items():
            names = sorted(self._shared[leader])
            inputs[names[0]] = names
            own = names if self._weighting == "loss" else [leader]
            first, *others = (mirrored(self._products[name]).float().cpu().numpy() for name in own)
            each = dict(zip(own[1:], others, strict=True))
            tensors |= stats_tensors(names[0], squares.cpu().numpy(), first, each)
        return tensors, inputs

    def _hook(self, weight: str) -> Callable[[torch.nn.Module, tuple[Any, ...]], None]:
        def look(module: torch.nn.Module, given: tuple[Any, ...]) -> None:
            x = given[0]
            leader = self._leader.get(weight)
            if leader is None:
                leader = next(
                    (name for other, name in self._seen if (other.data_ptr(), other.shape) == (x.data_ptr(), x.shape)),
                    weight,
                )
                self._leader[weight] = leader
                self._shared.setdefault(leader, []).append(weight)
            rows = x.reshape(-1, x.shape[-1]).float()
            if leader == weight:
                self._seen.append((x, weight))
                self._sum(self._squares, weight, rows.shape[1:]).add_(rows.double().square().sum(0))
            if leader == weight or self._weighting == "loss":
                counts = self._counts(weight, rows)
                total = self._sum(self._products, weight, 2 * rows.shape[1:])
                add_products(total, rows, rows if counts is None else rows * counts[:, None])

        return look

    def _counts(self, weight: str, x: Tensor) -> Tensor | None:
        rows = slice(self._row, self._row + len(x) // self._seq)
        given = self._weights[weight][rows] if weight in self._weights else None
        return token_counts(self._weighting, given, x, self._seq)

    def _sum(self, sums: dict[str, Tensor], weight: str, shape: tuple[int, ...]) -> Tensor:
        if weight not in sums:
            sums[weight] = torch.zeros(shape, dtype=torch.float64, device=self._device)
        return sums[weight]
