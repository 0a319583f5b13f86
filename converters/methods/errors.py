"""How far a quantized weight is from the dense one, measured on the values that a reader gets.

Every code of a group has one value, so few values need decoding. A *probe* is a weight with the numbers of a segment
and, in place of its codes, every code that there is: the normative decoder says what each of them is worth, a compiled
loop looks the values up. Where groups are too short for that to pay, or outliers change single elements, all values are
decoded.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from bcqfmt.compiled.threads import each_share
from bcqfmt.container.dtypes import float64_of
from bcqfmt.converters.words import planes_to_codes
from bcqfmt.weight.build import wrap
from bcqfmt.weight.packing import pack_planes
from bcqfmt.weight.scheme import Scheme, WeightSpec
from bcqfmt.weight.weight import BcqWeight

from .loops.errors import group_errors

F32 = npt.NDArray[np.float32]

_BLOCK = 1 << 20  # elements compared at a time: a few times 8 MB, whatever the weight's size


class Sums(NamedTuple):
    """Sum of w^2 and of the squared error, and how many elements there are."""

    power: float
    noise: float
    size: int

    def figures(self) -> dict[str, float | None]:
        """``mse``, ``relative`` error (of the Frobenius norms) and ``sqnr_db``; None where it is infinite."""
        relative = math.sqrt(self.noise / self.power) if self.power else (math.inf if self.noise else 0.0)
        sqnr = 10 * math.log10(self.power / self.noise) if self.noise and self.power else math.inf
        found = {"mse": self.noise / self.size, "relative": relative, "sqnr_db": sqnr}
        return {name: value if math.isfinite(value) else None for name, value in found.items()}

    def __add__(self, other: Any) -> Sums:
        return Sums(self.power + other.power, self.noise + other.noise, self.size + other.size)


def square_sums(weight: F32, quantized: BcqWeight, threads: int = 1) -> tuple[float, float]:
    """Sum of w^2 and of (w - decoded)^2, ``weight`` ``([E,] out, in)``: as :func:`decoded_square_sums`, but faster."""
    scheme = quantized.scheme
    pays = all(2 ** (segment.bits + 1) <= segment.group_size for segment in scheme.segments)
    if not pays or scheme.outliers is not None or scheme.aligned64 or weight.ndim != 2:
        return decoded_square_sums(weight, quantized)
    rows, columns = weight.shape
    order = quantized.parts()["perm"].array() if scheme.perm else np.arange(columns, dtype=np.int32)
    power, noise = np.zeros(rows), np.zeros(rows)
    start = 0
    for k, (segment, width) in enumerate(quantized.segments):
        levels = _levels(quantized, k)
        codes = planes_to_codes(quantized.parts()[f"s{k}_planes"].array(), width, threads=threads)
        own = order[start : start + width]

        def work(first: int, stop: int, a: Any = (own, codes, levels, segment.group_size)) -> None:
            group_errors(weight, a[0], a[1], a[2], a[3], power, noise, first, stop)

        each_share(work, rows, 8, threads)
        start += width
    return math.fsum(power), math.fsum(noise)


def decoded_square_sums(weight: F32, quantized: BcqWeight, planes: int | None = None) -> tuple[float, float]:
    """Sum of w^2 and sum of (w - decoded)^2 in float64, block by block of rows; ``weight`` is ``([E,] out, in)``.

    The values compared are those of ``quantized.dequantize(planes=planes)``, rounded to the logical dtype.
    """
    if weight.shape != quantized.shape:
        raise ValueError(f"a weight of shape {list(weight.shape)} compared with one of {list(quantized.shape)}")
    power, noise = [], []
    step = max(1, _BLOCK // (quantized.spec.stack * quantized.spec.columns))
    for start in range(0, quantized.spec.out, step):
        rows = (start, min(start + step, quantized.spec.out))
        dense = float64_of(weight[..., rows[0] : rows[1], :])
        decoded = float64_of(quantized.dequantize(rows=rows, planes=planes))
        power.append(float(np.square(dense).sum()))
        decoded -= dense
        noise.append(float(np.square(decoded, out=decoded).sum()))
    return math.fsum(power), math.fsum(noise)


def _levels(quantized: BcqWeight, k: int) -> F32:
    """What every code of every group of segment ``k`` is worth, float32 [out, G, L] (exact: the types are no wider)."""
    segment, spec = quantized.scheme.segments[k], quantized.spec
    groups, count = spec.groups(k), max(8, 2**segment.bits)
    every = np.tile(np.arange(count, dtype=np.uint8) % 2**segment.bits, groups)
    planes = pack_planes(every[None], segment.bits)
    scheme = Scheme(segments=(replace(segment, group_size=count, precisions=()),), nonfinite=quantized.scheme.nonfinite)
    probe = WeightSpec(scheme=scheme, shape=(spec.out, groups * count), dtype=spec.dtype, widths=(groups * count,))
    arrays: dict[str, npt.NDArray[Any]] = {
        suffix: quantized.parts()[f"s{k}_{suffix[3:]}"].array() for suffix in probe.parts() if suffix != "s0_planes"
    }
    arrays["s0_planes"] = np.broadcast_to(planes, (planes.shape[0], spec.out, planes.shape[2]))
    values = BcqWeight("", probe, wrap(probe, arrays)).dequantize()
    return np.ascontiguousarray(values.astype(np.float32)).reshape(spec.out, groups, count)
