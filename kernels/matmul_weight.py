"""A weight on a GPU in the orders that products need, and which of them a product takes."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial
from typing import Any, NamedTuple

from bcqfmt.errors import BcqError
from bcqfmt.kernels import bits as bits_of
from bcqfmt.kernels import mixed as mixed_of
from bcqfmt.kernels.bits import BitOperand, bit_operand
from bcqfmt.kernels.bits.layout import layout_of
from bcqfmt.kernels.mixed import MixedOperand, mixed_operand, takes
from bcqfmt.kernels.operands import Operand
from bcqfmt.kernels.operands.device import DeviceOperand, to_device
from bcqfmt.kernels.runtime import device
from bcqfmt.kernels.runtime.launch import LIMIT
from bcqfmt.kernels.runtime.limits import KINDS, ROW_LIMIT
from bcqfmt.weight.scheme import SecondOrder
from bcqfmt.weight.weight import BcqWeight

__all__ = [
    "BATCH_LIMIT",
    "CROSSOVER",
    "LOOK_UP",
    "USUAL",
    "MatmulWeight",
    "Ready",
    "by_element",
    "in_eights",
    "path_of",
]

BATCH_LIMIT = 8  # vectors that one launch of the look-up kernel takes
# From this many vectors on, dequantize + matmul is faster, measured on an H200 with 4096 x 4096 and 11008 x 4096
# (docs/benchmarks/kernels.md). Whether of float32, how it is decoded (:func:`_decoded`): by how many vectors the fast
# product takes at once. Guessed: two and one in "words", one of 16 bits and four of float32 in the others.
_LONGER = {4: 28, 2: 5, 1: 3}
CROSSOVER = {
    (False, "words"): {8: 24, 4: 12, 2: 8, 1: 5},
    (False, "longer"): {8: 16, 4: 10, 2: 8, 1: 4},
    (False, "elements"): {8: 32, 4: 24, 2: 16, 1: 8},
    (True, "words"): {4: 28, 2: 8, 1: 5},
    (True, "longer"): _LONGER,
    (True, "elements"): _LONGER,
}
PAIRS = 20  # the same for 2/4 bits
MOST = 36  # whatever the weight; 2/4 bits of float32, guessed
# Look-ups are faster below: of float32; where decoding takes element by element; at 2 planes, else never.
LOOK_UP = (8, 4, 2)
# The fast product is compiled for these numbers of vectors only, which takes seconds for each: a prompt of another
# length is filled up with zeros, and the first one of every length does not have to wait for a compiler.
USUAL = (1, 2, 4, 8)


class Ready(NamedTuple):
    """A product that needs one launch a segment: ``start(x, y, addend)``, and the number of the GPU where all are."""

    place: int
    start: Callable[[Any, Any, Any], None]


class MatmulWeight:
    """A weight on a device in the orders that products need; each is uploaded when it is first used."""

    def __init__(self, operand: Operand, target: Any = None, weight: BcqWeight | None = None) -> None:
        """``target``: torch's device, by default the current GPU. ``weight``: what the operand was made of; without it
        there is no :func:`mixed_gemv`.
        """
        self.operand = operand
        self._target = target
        self._weight = weight
        self._ready: dict[tuple[int, str, bool], Ready | None] = {}

    @cached_property
    def linear(self) -> bool:
        """Whether float32 can hold the numbers that look-ups need; if not, only dequantizing is left."""
        try:
            return all(segment.alpha.size and segment.z.size for segment in self.operand.segments) and (
                self.operand.outliers is None or self.operand.outliers.added is not None
            )
        except BcqError:
            return False

    @cached_property
    def mixed(self) -> MixedOperand | None:
        """For :func:`mixed_gemv`; None unless it takes the weight (2/4 bits, second-order scales) and the GPU."""
        second = any(isinstance(s.scale, SecondOrder) for s in self._weight.scheme.segments) if self._weight else False
        if self._weight is None or not second or not self.linear or device.capability(self._place) < (9, 0):
            return None
        try:
            return mixed_operand(self._weight, self._target)
        except BcqError as refusal:
            if refusal.code != "BCQ-E553":
                raise
            return None

    @cached_property
    def bits(self) -> BitOperand | None:
        """For :func:`bit_gemv`; None where the GPU or the group size leave the look-up kernel alone."""
        known = self.linear and device.capability(self._place) >= (9, 0)
        if not known or any(layout_of(segment) is None for segment in self.operand.segments):
            return None
        return bit_operand(self.operand, self._target)

    @cached_property
    def look_up(self) -> DeviceOperand:
        """For :func:`lut_gemv`."""
        return to_device(self.operand, "lut-gemm", self._target)

    @cached_property
    def exact(self) -> DeviceOperand:
        """For :func:`dequantize`."""
        return to_device(self.operand, "canonical", self._target)

    @cached_property
    def _place(self) -> int | None:
        """The number of the GPU; None where no one said which: the current one."""
        number = str(self._target).rpartition(":")[2]
        return int(number) if number.isdigit() else None

    def several(self, dtype: str) -> int:
        """How many vectors of this type and width the fast kernel takes at once; 0 where it cannot hold one."""
        return 0 if self.bits is None or dtype not in KINDS else bits_of.most_of(self.bits, dtype, dtype)

    def ready(self, vectors: int, dtype: str, added: bool = False) -> Ready | None:
        """How that many vectors are multiplied, if that takes one launch a segment, and ``added`` if an addend goes
        with it; found once, for it takes longer than the product.
        """
        if vectors > BATCH_LIMIT:
            return None
        key = (vectors, dtype, added)
        if key not in self._ready:
            self._ready[key] = _ready(self, vectors, dtype, added)
        return self._ready[key]


def path_of(weight: MatmulWeight, vectors: int, dtype: str = "F16") -> str:
    """ "mixed", "bits", "look-up" or "dequantize": the kernel that :func:`matmul` takes for that many vectors."""
    if vectors >= MOST or not weight.linear:
        return "dequantize"
    if weight.mixed is not None and takes(weight.mixed, dtype):
        return "mixed" if vectors < PAIRS or dtype == "F32" else "dequantize"
    several = weight.several(dtype)
    if not several:
        return "look-up" if vectors < _look_ups(weight, dtype) else "dequantize"
    return "bits" if vectors < CROSSOVER[dtype == "F32", _decoded(weight.operand)][several] else "dequantize"


def _look_ups(weight: MatmulWeight, dtype: str) -> int:
    """The number of vectors for which look-ups are no longer faster than dequantize + matmul."""
    single, slow, two = LOOK_UP
    if dtype == "F32":
        return single
    if by_element(weight.operand):
        return slow
    return two if max(s.bits for s in weight.operand.segments) <= 2 else 1


def _decoded(operand: Operand) -> str:
    """ "words"; "longer", by groups that are no whole words or with columns to be put in order; or "elements"."""
    if by_element(operand):
        return "elements"
    return "longer" if operand.perm is not None or any(s.group_size % 32 for s in operand.segments) else "words"


def by_element(operand: Any) -> bool:
    """Whether a weight, here or on a device, is decoded to 16 bits element by element, or some of its segments are."""
    columns = operand.shape[1]
    return not all(in_eights(s, columns) for s in operand.segments) or (
        operand.perm is not None and 2 * columns > ROW_LIMIT
    )


def in_eights(segment: Any, columns: int) -> bool:
    """Whether a segment can be decoded 32 columns at a time: all in eights of columns, groups too."""
    return not (segment.group_size % 8 or segment.start % 8 or segment.width % 8 or columns % 8)


def _ready(weight: MatmulWeight, vectors: int, dtype: str, added: bool) -> Ready | None:
    if dtype not in KINDS or vectors < 1 or vectors * max(weight.operand.shape) > LIMIT:
        return None
    path = path_of(weight, vectors, dtype)
    start: Callable[[Any, Any, Any], None]
    if (
        path == "bits"
        and vectors in USUAL
        and (bits := weight.bits) is not None
        and bits_of.in_one(bits, vectors, dtype, dtype)
    ):
        place = device.place_of(bits.segments[0].planes)
        start = partial(bits_of.carry_out, bits, bits_of.plan_of(bits, vectors, dtype, dtype, added=added), vectors)
    elif path == "mixed" and not added and (mixed := weight.mixed) is not None and vectors <= takes(mixed, dtype):
        place = device.place_of(mixed.units)
        start = partial(_without, partial(mixed_of.carry_out, mixed, mixed_of.plan_of(mixed, vectors, dtype, dtype)))
    else:
        return None
    return Ready(place, start) if place >= 0 or device.simulated() else None


def _without(start: Callable[[Any, Any], None], x: Any, y: Any, addend: None) -> None:
    """A product that takes no addend."""
    start(x, y)
