"""What an export writes for each weight: tensors by the rules of the way back, or its values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from bcqfmt.checkpoint.shards import Unit
from bcqfmt.container.dtypes import numpy_dtype
from bcqfmt.container.stored_tensor import StoredTensor
from bcqfmt.converters.layouts.protocol import Rebuild, Rule
from bcqfmt.converters.layouts.rebuild import apply_rule
from bcqfmt.weight import decode
from bcqfmt.weight.weight import BcqWeight

from .weights import Uniform

__all__ = ["Recipe", "Shaped", "Target", "dense_unit"]

Shaped = dict[str, tuple[str, tuple[int, ...], Rule]]
_BLOCK = 1 << 22  # elements decoded together


class Recipe(NamedTuple):
    """Suffix -> dtype, shape and rule of every tensor that stands for a weight."""

    weight: Uniform
    tensors: Shaped

    def unit(self, known: Mapping[str, Rebuild]) -> Unit:
        """The tensors, computed when they are written; ``known``: rule -> function."""
        weight, found = self.weight.weight, {}
        for suffix, (dtype, shape, rule) in self.tensors.items():
            name = f"{self.weight.module}.{suffix}"
            found[name] = StoredTensor(name, dtype, shape, make=partial(apply_rule, weight, rule, known))
        return Unit(weight.name, found, False)


class Target(NamedTuple):
    """A layout decided upon: ``format`` as its readers call it, ``config`` for quantization_config and for the file
    ``config_file`` where tools want one, ``notes`` to tell the user."""

    format: str
    recipes: list[Recipe]
    config: dict[str, Any]
    config_file: str | None
    notes: list[str]


class _Values(StoredTensor):
    """The values of a weight, decoded a block of rows at a time."""

    __slots__ = ("_weight",)

    def __init__(self, weight: BcqWeight, dtype: str) -> None:
        super().__init__(weight.name, dtype, weight.shape, make=lambda: weight.dequantize(dtype))
        self._weight = weight

    def chunks(self, size: int = 0) -> Iterator[npt.NDArray[np.uint8]]:
        """The bytes in order; ``size`` is of no concern here."""
        weight = self._weight
        spec, parts = weight.spec, weight.parts()
        step = max(1, _BLOCK // spec.columns)
        for e in range(spec.stack):
            for start in range(0, spec.out, step):
                rows = (start, min(start + step, spec.out))
                block = np.empty((rows[1] - start, spec.columns), numpy_dtype(self.dtype))
                decode.decode_matrix(spec, parts, e, rows, (0, spec.columns), None, self.dtype, block)
                yield block.reshape(-1).view(np.uint8)


def dense_unit(weight: BcqWeight, dtype: str | None) -> Unit:
    """A weight as a dense tensor of its own name, in its logical dtype or another one."""
    return Unit(weight.name, {weight.name: _Values(weight, dtype or weight.dtype)}, False)
