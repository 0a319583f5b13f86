"""A decoder layer that is run over the same rows several times, to one of its linear layers after the other.

A part of the layer whose weights do not change any more gives the same every time: what it gave is kept, and it is not
run again. Of a part that ends with a linear layer (attention, an MLP) what enters that layer is kept when it is
reached, and the part is run on from there. So all runs together cost what one does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

import torch

__all__ = ["Budget", "End", "LayerRun", "Seen", "ends_of"]

Tensor = torch.Tensor
Apply = Callable[[Tensor, torch.nn.Module], Tensor]  # rows, the layer: what it gives
Given = TypeVar("Given")


class Seen(NamedTuple):
    """What enters a linear layer, ``[tokens, in]`` float32, and what it gives, ``[tokens, out]``, where that is run."""

    entered: Tensor
    made: Tensor | None


class End(NamedTuple):
    """A part of a layer that gives what its last linear layer gives; rest: what else it gives, None for nothing."""

    part: str
    rest: tuple[Any, ...] | None


@contextlib.contextmanager
def ends_of(layer: torch.nn.Module) -> Iterator[dict[str, End]]:
    """Finds while the layer runs: linear layer -> the largest part that ends with it, both by their names in it."""
    found: dict[str, End] = {}
    latest: list[tuple[str, Tensor, Tensor]] = []  # of linear layers: name, what it gave, and a copy

    def hook(name: str) -> Callable[[torch.nn.Module, tuple[Any, ...], Any], None]:
        def leave(module: torch.nn.Module, given: tuple[Any, ...], made: Any) -> None:
            if isinstance(module, torch.nn.Linear):
                latest[:] = [(name, made, made.clone())]
                return
            first, rest = (made[0], made[1:]) if type(made) is tuple and made else (made, None)
            for child, own, copied in latest:  # changed by nothing, not even in place
                same = first is own and torch.equal(own, copied) and not _size(rest)
                if same and child.startswith(f"{name}."):
                    found[child] = End(name, rest)

        return leave

    hooks = [module.register_forward_hook(hook(name)) for name, module in layer.named_modules()]
    try:
        yield found
    finally:
        for one in hooks:
            one.remove()


class Budget:
    """Bytes that may still be kept."""

    def __init__(self, size: int) -> None:
        self.left = size


class LayerRun:
    """A layer, which of its linear layers are settled, and what parts have given, rows by rows."""

    def __init__(self, layer: torch.nn.Module, budget: Budget, ends: Mapping[str, End]) -> None:
        """``budget``: may be shared with others. ``ends``: see :func:`ends_of`."""
        self.layer, self._budget = layer, budget
        named = dict(layer.named_modules())
        self._ends = {named[name]: (named[end.part], end.rest) for name, end in ends.items()}
        self._settled: set[torch.nn.Module] = set()
        self._kept: dict[torch.nn.Module, list[Any]] = {}  # what parts gave
        self._entered: dict[torch.nn.Module, list[Any]] = {}  # what entered the linear layers that parts end with
        self._number = 0

    def settle(self, children: Iterable[torch.nn.Linear]) -> None:
        """The weights of these will not change."""
        self._settled.update(children)

    def inputs(self, child: torch.nn.Linear, rows: Iterable[Tensor], apply: Apply, *, last: bool) -> Iterator[Seen]:
        """What enters a linear layer; what comes after it is not run.

        last: there will be no other run, so nothing more is kept.
        """
        return self._each(rows, lambda some: self._reach(child, some, apply), None if last else child)

    def inputs_and_outputs(
        self, child: torch.nn.Linear, rows: Iterable[Tensor], apply: Apply, put: Callable[[Tensor], None]
    ) -> Iterator[Seen]:
        """:meth:`inputs` of a layer whose weights will not change, run to its end: what it gives goes to ``put``."""
        return self._each(rows, lambda some: self._reach(child, some, apply, put))

    def outputs(self, rows: Iterable[Tensor], apply: Apply) -> Iterator[Tensor]:
        """What the layer gives."""
        return self._each(rows, lambda some: apply(some, self.layer))

    def forget(self) -> None:
        """Nothing is kept any more."""
        for part in [*self._kept, *self._entered]:
            self._forget(part)

    def _reach(
        self, child: torch.nn.Linear, some: Tensor, apply: Apply, put: Callable[[Tensor], None] | None = None
    ) -> Seen:
        """What enters a linear layer; without ``put`` the run ends there."""
        held: list[Tensor] = []

        def keep(value: Tensor) -> None:
            held.append(value.reshape(-1, value.shape[-1]).float())

        def enter(module: torch.nn.Module, given: tuple[Any, ...]) -> None:
            keep(given[0])
            if put is None:
                raise _Reached

        hooks = [child.register_forward_pre_hook(enter), child.register_forward_hook(lambda _, given, made: keep(made))]
        try:
            made = apply(some, self.layer)
            if put is not None:
                put(made)
        except _Reached:
            pass
        finally:
            for hook in hooks:
                hook.remove()
        return Seen(held[0], held[1] if put is not None else None)

    def _each(
        self, rows: Iterable[Tensor], run: Callable[[Tensor], Given], child: torch.nn.Linear | None = None
    ) -> Iterator[Given]:
        """``run`` for all rows; what is found on the way to ``child`` is kept if the budget allows all of it."""
        parts = [] if child is None else [one for one in self._parts(self.layer) if one not in self._kept]
        ending, rest = (None, None) if child is None else self._ends.get(child, (None, None))
        entered: list[Any] = []
        hooks = []
        if child is not None and ending is not None and ending not in self._entered:
            parts = [one for one in parts if one not in set(ending.modules())]
            hooks.append(child.register_forward_pre_hook(lambda module, given: self._keep(entered, given[0])))
        found: dict[torch.nn.Module, list[Any]] = {one: [] for one in parts}
        hooks += [one.register_forward_hook(self._keeper(held)) for one, held in found.items()]
        try:
            for self._number, some in enumerate(rows):
                yield run(some)
        finally:
            for hook in hooks:
                hook.remove()
        for one, held in found.items():
            if self._complete(held):
                for inner in one.modules():
                    self._forget(inner)
                self._kept[one] = held
                one.forward = self._again(held)
        if child is not None and ending is not None and ending not in self._entered and self._complete(entered):
            self._entered[ending] = entered
            ending.forward = self._onward(child, rest, entered)

    def _keeper(self, held: list[Any]) -> Callable[[torch.nn.Module, tuple[Any, ...], Any], None]:
        return lambda module, given, made: self._keep(held, made)

    def _keep(self, held: list[Any], value: Any) -> None:
        if _size(value) <= self._budget.left and len(held) == self._number:
            held.append(value)
            self._budget.left -= _size(value)

    def _complete(self, held: list[Any]) -> bool:
        """Whether something was kept of all rows; else its budget is free again."""
        if len(held) == self._number + 1:
            return True
        self._budget.left += _size(held)
        return False

    def _onward(self, child: torch.nn.Module, rest: tuple[Any, ...] | None, held: list[Any]) -> Callable[..., Any]:
        def forward(*given: Any, **named: Any) -> Any:
            made = child(held[self._number])
            return made if rest is None else (made, *rest)

        return forward

    def _again(self, held: list[Any]) -> Callable[..., Any]:
        return lambda *given, **named: _copied(held[self._number])  # what uses it may write into it

    def _forget(self, part: torch.nn.Module) -> None:
        for held in (self._kept, self._entered):
            if part in held:
                self._budget.left += _size(held.pop(part))
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
