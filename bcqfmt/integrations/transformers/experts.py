"""Experts whose matrices are BCQ weights, in the place of the parameters (E, out, in) that models index.

A model's own code runs: it takes ``gate_up_proj[e]`` and multiplies. What it gets is an :class:`ExpertMatrix`, which
torch's ``linear`` passes to this module; any other function of torch gets the decoded matrix. A function that takes
all experts at once (``grouped_mm`` of transformers) runs in exact mode, with all of a layer decoded:
:class:`ExpertsForward`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bcqfmt.errors import error
from bcqfmt.integrations.torch.layers import BcqModule, BcqStack


class ExpertMatrix:
    """One matrix (out, in), in one piece or several above each other; torch functions take it as a tensor."""

    def __init__(self, pieces: Sequence[tuple[BcqModule, int]]) -> None:
        """``pieces``: (module, index in its stack), from the first row to the last."""
        self.pieces = list(pieces)

    def dense(self, dtype: torch.dtype | None = None) -> Tensor:
        """The values, in the logical dtype or rounded once more to ``dtype``."""
        rows = torch.cat([module.values(index=index) for module, index in self.pieces])
        return rows if dtype is None else rows.to(dtype)

    def product(self, x: Tensor) -> Tensor:
        """``x W^T`` for x (..., in)."""
        if any(module.exact for module, _ in self.pieces):
            return nn.functional.linear(x, self.dense(x.dtype))
        return torch.cat([module.product(x, index=index) for module, index in self.pieces], -1)

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Called by torch for any of its functions that meets one of these."""
        named = dict(kwargs or {})
        if function is nn.functional.linear and isinstance(args[1] if len(args) > 1 else None, ExpertMatrix):
            bias = args[2] if len(args) > 2 else named.get("bias")
            if bias is None or not any(module.exact for module, _ in args[1].pieces):
                y = args[1].product(args[0])
                return y if bias is None else y + bias
        kind = next((a.dtype for a in (*args, *named.values()) if isinstance(a, Tensor)), None)
        plain = [a.dense(kind) if isinstance(a, ExpertMatrix) else a for a in args]
        return function(*plain, **{k: a.dense(kind) if isinstance(a, ExpertMatrix) else a for k, a in named.items()})


class ExpertStack(BcqStack):
    """A stack (E, out, in) that is indexed like a parameter."""

    def __getitem__(self, index: Any) -> ExpertMatrix:
        """Matrix ``index``, a number or a tensor with one."""
        return ExpertMatrix([(self, _number(index, self.spec.stack))])

    @property
    def pieces(self) -> list[BcqModule]:
        return [self]

    def dense(self, dtype: torch.dtype | None = None) -> Tensor:
        """All values (E, out, in), in the logical dtype or rounded once more to ``dtype``."""
        return torch.stack([self[e].dense(dtype) for e in range(self.spec.stack)])


class ExpertList:
    """Matrices of E experts, each in layers or stacks that several share, indexed like a parameter (E, out, in)."""

    def __init__(self, rows: Sequence[Sequence[tuple[BcqModule, int]]]) -> None:
        """``rows``: for every expert what makes its matrix: (module, index in its stack), the first rows first."""
        self.rows = [list(row) for row in rows]

    def __getitem__(self, index: Any) -> ExpertMatrix:
        """Matrix ``index``, a number or a tensor with one."""
        return ExpertMatrix(self.rows[_number(index, len(self.rows))])

    @property
    def pieces(self) -> list[BcqModule]:
        return list(dict.fromkeys(module for row in self.rows for module, _ in row))

    def dense(self, dtype: torch.dtype | None = None) -> Tensor:
        """All values (E, out, in), in the logical dtype or rounded once more to ``dtype``."""
        return torch.stack([self[e].dense(dtype) for e in range(len(self.rows))])


class ExpertsForward:
    """Replaces ``forward`` of a module of experts; copied and pickled with it.

    The kernels take one expert after the other, whatever ``experts_implementation`` is. In exact mode that
    setting is used: an implementation that takes all experts at once gets them decoded, as in the dense model.
    """

    def __init__(self, experts: Any) -> None:
        """``experts``: a module of a class that transformers chooses implementations for; :attr:`leaves` are added."""
        self.experts = experts
        self.leaves: list[str] = []

    def __call__(self, hidden_states: Tensor, *arguments: Any, **named: Any) -> Any:
        experts = self.experts
        stacks = {leaf: getattr(experts, leaf) for leaf in self.leaves}
        held = {leaf: stack for leaf, stack in stacks.items() if isinstance(stack, ExpertList | ExpertStack)}
        shown: dict[str, Any]
        exact = any(piece.exact for stack in held.values() for piece in stack.pieces)
        if not held or (exact and experts.config._experts_implementation not in (None, "eager")):
            shown = {leaf: stack.dense(hidden_states.dtype) for leaf, stack in held.items()}
        else:
            shown = {"config": _Overridden(experts.config, {"_experts_implementation": "eager"})}
        return type(experts).forward(_Overridden(experts, shown), hidden_states, *arguments, **named)


class _Overridden:
    """An object with some attributes replaced."""

    def __init__(self, plain: Any, shown: dict[str, Any]) -> None:
        self.__dict__.update(shown)
        self._plain = plain

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plain, name)


def _number(index: Any, count: int) -> int:
    if isinstance(index, slice | tuple) or (isinstance(index, Tensor) and index.numel() != 1):
        raise error("BCQ-E305", found="several experts in one product", expected="one expert after the other (eager)")
    number = int(index)
    if not -count <= number < count:
        raise IndexError(f"expert {number} of {count}")
    return number % count
