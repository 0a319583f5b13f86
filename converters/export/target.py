"""What an export asks of a weight, and the tensors that it writes for it.

Other tools' layouts hold one affine segment: :func:`uniform` gives its numbers or raises BCQ-E616 with the reason.
Nothing large is read for that; the tensors of a :class:`Recipe` are computed by the rules that also restore a source.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from bcqfmt.checkpoint.shards import Unit
from bcqfmt.container.dtypes import numpy_dtype
from bcqfmt.container.stored_tensor import StoredTensor
from bcqfmt.converters.layouts.g_idx import group_index
from bcqfmt.converters.layouts.protocol import Rebuilder, Rule
from bcqfmt.converters.layouts.rebuild import apply_rule
from bcqfmt.converters.layouts.uniform import zero_points_of
from bcqfmt.errors import BcqError, error
from bcqfmt.weight import decode
from bcqfmt.weight.scheme import PackedZero, SecondOrder
from bcqfmt.weight.weight import BcqWeight

Shaped = dict[str, tuple[str, tuple[int, ...], Rule]]
_BLOCK = 1 << 22  # elements decoded together


@dataclass(frozen=True, slots=True)
class Uniform:
    """An affine weight of one segment. ``low`` and ``high``: smallest and largest zero point; ``scattered``: the
    columns of a group do not lie side by side."""

    weight: BcqWeight
    module: str
    bits: int
    group_size: int
    low: int
    high: int
    scattered: bool

    @property
    def n(self) -> int:
        return self.weight.spec.out

    @property
    def k(self) -> int:
        return self.weight.spec.columns

    @property
    def groups(self) -> int:
        return self.weight.spec.groups(0)

    @property
    def scale(self) -> str:
        """Type of the scales, which is the logical dtype too."""
        return self.weight.dtype

    @property
    def symmetric(self) -> bool:
        """Every zero point is the middle code."""
        return self.low == self.high == 1 << (self.bits - 1)

    def fits(self, size: int) -> bool:
        """Whether a configuration that states this group size means this weight; -1 is a whole row."""
        return size == self.group_size or (size == -1 and self.group_size == self.k)


def not_lossless(weight: BcqWeight, found: str, expected: str, hint: str | None = None) -> BcqError:
    """BCQ-E616 for a weight."""
    return error("BCQ-E616", tensor=weight.name, found=found, expected=expected, hint=hint)


def uniform(weight: BcqWeight) -> Uniform:
    """The numbers of a weight whose every value is ``s * (code - zp)``; BCQ-E616 for any other."""
    scheme = weight.scheme
    if len(scheme.segments) != 1:
        kinds = ", ".join(f"{segment.bits} bit {segment.encoding}" for segment in scheme.segments)
        raise not_lossless(weight, f"{len(scheme.segments)} segments ({kinds})", "one segment")
    if scheme.outliers is not None and (count := weight.parts()["outlier_values"].shape[0]):
        raise not_lossless(weight, f"{count} outliers", "no outliers")
    (segment,) = scheme.segments
    if segment.encoding != "affine":
        more = f" with scale sets for {list(segment.precisions)} planes (multi-precision)" if segment.precisions else ""
        raise not_lossless(weight, f"encoding {segment.encoding}{more}", "affine: integer zero points")
    if isinstance(segment.scale, SecondOrder):
        raise not_lossless(weight, "second-order scales", "a floating-point scale for every group")
    if segment.scale != weight.dtype:
        found = f"values of type {weight.dtype} from scales of type {segment.scale}"
        raise not_lossless(weight, found, "values rounded to the type of the scales, as every reader rounds them")
    if not weight.name.endswith(".weight") or weight.name == ".weight":
        raise not_lossless(weight, "a name that does not end in .weight", "the weight of a module")
    zeros = zero_points_of(weight) if isinstance(segment.zero, PackedZero) else np.array([segment.zero])
    return Uniform(
        weight=weight,
        module=weight.name.removesuffix(".weight"),
        bits=segment.bits,
        group_size=segment.group_size,
        low=int(zeros.min()),
        high=int(zeros.max()),
        scattered=scattered(weight),
    )


def scattered(weight: BcqWeight) -> bool:
    """Whether ``perm`` takes a column to another group; an order within groups changes nothing for other tools."""
    if not weight.scheme.perm:
        return False
    columns, size = weight.spec.columns, weight.scheme.segments[0].group_size
    plain = group_index(None, columns, size)
    for perm in weight.parts()["perm"].array().reshape(-1, columns):
        if not np.array_equal(group_index(perm, columns, size), plain):
            return True
    return False


def best_group_size(weights: list[Uniform]) -> int:
    """The group size to state for all: the one that means most of them; a number rather than -1 where both do."""
    stated = {weight.group_size for weight in weights} | {-1}
    return max(stated, key=lambda size: (sum(weight.fits(size) for weight in weights), size))


class Recipe(NamedTuple):
    """Suffix -> dtype, shape and rule of every tensor that a weight becomes."""

    weight: Uniform
    tensors: Shaped

    def unit(self, known: Mapping[str, Rebuilder]) -> Unit:
        """The tensors, computed when they are written; ``known``: rules by name."""
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
        """The bytes in order, a block of rows at a time; ``size`` is ignored."""
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
    return Unit.of_dense(_Values(weight, dtype or weight.dtype))
