"""A decoder layer that is run over the same rows several times, to one of its linear layers after the other.

A part of the layer whose weights do not change any more gives the same every time: what it gave is kept, and it is not
run again. So all runs together cost little more than one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

__all__ = ["Budget", "LayerRun"]

Tensor = torch.Tensor
Apply = Callable[[Tensor, torch.nn.Module], Tensor]  # rows, the layer: what it gives


class Budget:
    """Bytes that may still be kept."""

    def __init__(self, size: int) -> None:
        self.left = size


class LayerRun:
    """A layer, which of its linear layers are settled, and what parts have given, rows by rows."""

    def __init__(self, layer: torch.nn.Module, budget: Budget) -> None:
        """``budget``: may be shared with others."""
        self.layer, self._budget = layer, budget
        self._settled: set[torch.nn.Module] = set()
        self._kept: dict[torch.nn.Module, list[Any]] = {}
        self._number = 0

    def settle(self, children: Iterable[torch.nn.Linear]) -> None:
        """The weights of these will not change."""
        self._settled.update(children)

    def inputs(self, child: torch.nn.Linear, rows: Iterable[Tensor], apply: Apply, *, last: bool) -> Iterator[Tensor]:
        """What enters a linear layer, ``[tokens, in]`` float32; what comes after it is not run.

        last: there will be no other run, so nothing more is kept.
        """
        return self._each(rows, lambda some: self._reach(child, some, apply), [] if last else self._parts(self.layer))

    def inputs_and_outputs(
        self, child: torch.nn.Linear, rows: Iterable[Tensor], apply: Apply, put: Callable[[Tensor], None]
    ) -> Iterator[Tensor]:
        """:meth:`inputs` of a layer whose weights will not change: what it gives goes to ``put``."""
        return self._each(rows, lambda some: self._reach(child, some, apply, put), [])

    def outputs(self, rows: Iterable[Tensor], apply: Apply) -> Iterator[Tensor]:
        """What the layer gives."""
        return self._each(rows, lambda some: apply(some, self.layer), [])

    def forget(self) -> None:
        """Nothing is kept any more."""
        for part in list(self._kept):
            self._forget(part)

    def _reach(
        self, child: torch.nn.Linear, some: Tensor, apply: Apply, put: Callable[[Tensor], None] | None = None
    ) -> Tensor:
        """What enters a linear layer; without ``put`` the run ends there."""
        held: list[Tensor] = []

        def hook(module: torch.nn.Module, given: tuple[Any, ...]) -> None:
            held.append(given[0].reshape(-1, given[0].shape[-1]).float())
            if put is None:
                raise _Reached

        remove = child.register_forward_pre_hook(hook)
        try:
            made = apply(some, self.layer)
            if put is not None:
                put(made)
        except _Reached:
            pass
        finally:
            remove.remove()
        return held[0]

    def _each(
        self, rows: Iterable[Tensor], run: Callable[[Tensor], Tensor], parts: Iterable[torch.nn.Module]
    ) -> Iterator[Tensor]:
        """``run`` for all rows; what parts give that have not been kept yet is kept if the budget allows all of it."""
        found: dict[torch.nn.Module, list[Any]] = {part: [] for part in parts if part not in self._kept}
        hooks = [part.register_forward_hook(self._keeper(held)) for part, held in found.items()]
        try:
            for self._number, some in enumerate(rows):
                yield run(some)
        finally:
            for hook in hooks:
                hook.remove()
        for part, held in found.items():
            if len(held) != self._number + 1:
                self._budget.left += _size(held)
                continue
            for inner in part.modules():
                self._forget(inner)
            self._kept[part] = held
            part.forward = self._again(held)

    def _keeper(self, held: list[Any]) -> Callable[[torch.nn.Module, tuple[Any, ...], Any], None]:
        def keep(module: torch.nn.Module, given: tuple[Any, ...], made: Any) -> None:
            if _size(made) <= self._budget.left and len(held) == self._number:
                held.append(made)
                self._budget.left -= _size(made)

        return keep

    def _again(self, held: list[Any]) -> Callable[..., Any]:
        return lambda *given, **named: _copied(held[self._number])  # what uses it may write into it

    def _forget(self, part: torch.nn.Module) -> None:
        if part in self._kept:
            self._budget.left += _size(self._kept.pop(part))
            del part.forward

    def _parts(self, module: torch.nn.Module) -> Iterator[torch.nn.Module]:
        """The largest parts with linear layers, all of them settled."""
        for child in module.children():
            linear = [one for one in child.modules() if isinstance(one, torch.nn.Linear)]
            if linear and self._settled.issuperset(linear):
                yield child
            else:
                yield from self._parts(child)


class _Reached(Exception):
    """Ends a forward pass: nothing after it is needed."""


def _copied(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return type(value)(map(_copied, value))
    return value.clone() if isinstance(value, Tensor) else value


def _size(value: Any) -> int:
    """Bytes of a tensor, or of all in a list."""
    if isinstance(value, tuple | list):
        return sum(map(_size, value))
    return value.numel() * value.element_size() if isinstance(value, Tensor) else 0
