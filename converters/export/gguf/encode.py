"""The bytes of a weight as a tensor of GGUF, some rows at a time; every one is decoded again and compared.

The decoder is `converters/gguf/values.py`, ggml's arithmetic written plainly, which shares nothing with what is used
here to make the blocks; it is compared with the values that the format itself gives the weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from bcqfmt.container.dtypes import float64_of, numpy_dtype
from bcqfmt.container.gguf.types import DENSE
from bcqfmt.container.stored_tensor import StoredTensor
from bcqfmt.converters import words
from bcqfmt.converters.gguf.blocks import blocks_of
from bcqfmt.converters.gguf.kinds import KINDS
from bcqfmt.converters.gguf.values import values_of
from bcqfmt.converters.layouts.rebuild import apply_rule
from bcqfmt.converters.source.gguf_rows import rows_back
from bcqfmt.errors import error
from bcqfmt.weight import decode
from bcqfmt.weight.scheme import SecondOrder
from bcqfmt.weight.weight import BcqWeight

from .choice import Choice, half, known_rules, named_numbers

Array = npt.NDArray[Any]
Bytes = npt.NDArray[np.uint8]
Each = Callable[[Callable[[Any], Any], Iterable[Any]], Iterable[Any]]
_CHUNK: Final = 1 << 20  # elements at a time
_ZERO: Final = {"Q4_0": 8, "Q5_0": 16, "Q8_0": 128}


@dataclass(slots=True)
class Error:
    """How far the written values are from those of the weight: sums over all of them."""

    squares: float = 0.0  # of differences
    power: float = 0.0  # of values
    largest: float = 0.0

    def add(self, other: Error) -> None:
        """Count what another one counted."""
        self.squares += other.squares
        self.power += other.power
        self.largest = max(self.largest, other.largest)

    @property
    def relative(self) -> float:
        """Root mean square of the differences, relative to that of the values."""
        return float(np.sqrt(self.squares / self.power)) if self.power else float(self.squares > 0)


def encoded(weight: BcqWeight, choice: Choice, heads: int, counted: Error, each: Each = map) -> Iterator[Bytes]:
    """The bytes in order; BCQ-E613 if an exact type does not give the values back.

    ``heads``: rows to be moved. ``each``: `map`, or something like it that works on several pieces at a time.
    """
    spec = weight.spec
    step = max(1, _CHUNK // spec.columns)
    if heads:  # rows move within a head
        step = max(1, step // (spec.out // heads)) * (spec.out // heads)
    places = ((e, start) for e in range(spec.stack) for start in range(0, spec.out, step))

    def piece(place: tuple[int, int]) -> tuple[Bytes, Error]:
        e, rows = place[0], (place[1], min(place[1] + step, spec.out))
        values = np.empty((rows[1] - rows[0], spec.columns), np.float32)
        decode.decode_matrix(spec, weight.parts(), e, rows, (0, spec.columns), None, "F32", values)
        blocks = _blocks(weight, choice, e, rows, values)
        lost = _compared(weight, choice, e, blocks, values)
        moved = rows_back(blocks, heads * len(values) // spec.out)
        return np.ascontiguousarray(moved).reshape(-1).view(np.uint8), lost

    for made, lost in each(piece, places):
        counted.add(lost)
        yield made


def _blocks(weight: BcqWeight, choice: Choice, e: int, rows: tuple[int, int], values: Array) -> Array:
    """uint8 [rows, row bytes], or numbers [rows, columns] of a dense type."""
    if choice.how == "values":
        if choice.type not in DENSE:
            return _q8_0(values)
        dense = np.empty(values.shape, numpy_dtype(choice.type))  # rounded once, not twice
        decode.decode_matrix(weight.spec, weight.parts(), e, rows, (0, values.shape[1]), None, choice.type, dense)
        return dense
    numbers = decode.load_rows(weight.spec, weight.parts(), e, rows)
    if choice.how == "stored":
        return _stored(weight, choice.type, numbers)
    bits, zero = KINDS[choice.type].bits, _ZERO.get(choice.type, 0)
    codes = words.planes_to_codes(numbers.arrays["s0_planes"], weight.spec.columns)
    columns = np.arange(weight.spec.columns) // weight.scheme.segments[0].group_size
    if choice.how == "codes":
        zeros = decode.zero_of(numbers, 0)
        shift = np.asarray(zero - zeros, np.int16)
        codes = (codes + (shift if isinstance(zeros, float) else shift[:, columns])).astype(np.uint8)
    if "perm" in numbers.arrays:
        stored, codes = codes, np.empty_like(codes)
        codes[:, numbers.arrays["perm"]] = stored
    fields: dict[str, Array] = {"planes": words.codes_to_planes(np.ascontiguousarray(codes), bits)}
    for name, exact in named_numbers(numbers).items():
        fields[name] = half(exact)[:, columns[::32]]
    return blocks_of(choice.type, fields)


def _q8_0(values: npt.NDArray[np.float32]) -> Bytes:
    """Blocks of Q8_0, uint8 [N, row bytes], for values [N, K]: the largest of 32 becomes 127, the others the nearest.

    Codes are rounded to the scale as it is stored, not to the one before its rounding to F16.
    """
    blocks = values.reshape(len(values), -1, 32)
    with np.errstate(all="ignore"):
        scale = (np.abs(blocks).max(axis=-1) / np.float32(127)).astype(np.float16)
        codes = np.rint(blocks / scale.astype(np.float32)[..., None])
        codes = np.clip(np.nan_to_num(codes, nan=0.0), -127, 127).astype(np.int16) + 128
    planes = words.codes_to_planes(codes.astype(np.uint8).reshape(values.shape), 8)
    made: Bytes = blocks_of("Q8_0", {"planes": planes, "scale": scale})
    return made


def _stored(weight: BcqWeight, kind: str, numbers: decode.Numbers) -> Array:
    """By the rule that rebuilds a tensor of GGUF, on these rows alone."""
    (segment,) = weight.scheme.segments
    fewer = replace(weight.spec, shape=(numbers.rows, weight.spec.columns))
    if isinstance(segment.scale, SecondOrder) and segment.scale.rows > 1:  # NVFP4: one number for the whole matrix
        order = segment.scale._replace(rows=numbers.rows)
        fewer = replace(fewer, scheme=replace(weight.scheme, segments=(replace(segment, scale=order),)))
    parts = {n: StoredTensor.from_array(n, numbers.arrays[n], part.dtype) for n, part in fewer.parts().items()}
    return apply_rule(BcqWeight(weight.name, fewer, parts), {"rule": f"gguf.{kind.lower()}"}, known_rules())


def _compared(weight: BcqWeight, choice: Choice, e: int, blocks: Array, values: Array) -> Error:
    """How far the blocks are from the values; BCQ-E613 if there should be no difference."""
    found: Array = float64_of(blocks) if choice.type in DENSE else values_of(choice.type, blocks)
    if choice.type == "NVFP4" and "s0_scale_scale" in weight.parts():
        found = found * weight.parts()["s0_scale_scale"].array().reshape(-1)[e]
    if choice.exact:
        same = (found.view(np.uint32) == values.view(np.uint32)) | (np.isnan(found) & np.isnan(values))
        if not same.all():
            differ = f"{same.size - np.count_nonzero(same)} values of {choice.type} differ"
            raise error("BCQ-E613", tensor=weight.name, found=differ, expected="the values of the weight")
        return Error()
    with np.errstate(all="ignore"):
        wanted = values.astype(np.float64)
        lost = np.where(np.isfinite(wanted), found - wanted, 0.0)
    return Error(float((lost**2).sum()), float(np.nansum(wanted**2)), float(np.abs(lost).max(initial=0.0)))
