"""How far the weights of a BCQ checkpoint are from those of the dense model that was quantized."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from bcqfmt.checkpoint.reader import Checkpoint
from bcqfmt.container.dtypes import FLOATS, float64_of
from bcqfmt.container.stored_tensor import StoredTensor
from bcqfmt.converters.methods.errors import Sums, square_sums
from bcqfmt.converters.quantize.dense import read_matrix
from bcqfmt.converters.source.checkpoint import SourceCheckpoint
from bcqfmt.errors import error
from bcqfmt.weight.weight import BcqWeight

_BLOCK = 1 << 22  # elements of a stack that are decoded at a time


def measure(
    checkpoint: Checkpoint, dense: SourceCheckpoint, threads: int = 1, tick: Callable[[int], None] | None = None
) -> dict[str, Sums]:
    """Sums of w^2 and of the squared error of every weight whose dense tensor, by name and shape, is in ``dense``.

    ``tick`` gets the bytes of every weight that is done. BCQ-E301 when not a single weight has a counterpart. A
    weight with values that are not finite has an infinite error.
    """
    found: dict[str, Sums] = {}
    missing = []
    for name, weight in checkpoint.weights():
        tensor = dense.tensors.get(name)
        if tensor is None or tensor.dtype not in FLOATS or tuple(tensor.shape) != weight.shape:
            missing.append(name)
        else:
            found[name] = _sums(weight, tensor, threads)
        if tick is not None:
            tick(weight.nbytes)
    if missing and not found:
        raise error(
            "BCQ-E301", dense.folder.name, missing[0], f"none of {len(missing)} weights is there as a dense tensor",
            "the dense model that was quantized", hint="give the model before it was quantized",
        )  # fmt: skip
    return found


def _sums(weight: BcqWeight, tensor: StoredTensor, threads: int) -> Sums:
    with np.errstate(invalid="ignore", over="ignore"):
        if len(weight.shape) == 2:
            power, noise = square_sums(read_matrix(tensor), weight, threads)
        else:
            power, noise = _stack_sums(weight, tensor)
    return Sums(power, noise if math.isfinite(noise) else math.inf, weight.size)


def _stack_sums(weight: BcqWeight, tensor: StoredTensor) -> tuple[float, float]:
    """A stack ``[E, out, in]``, some rows of all its matrices at a time."""
    experts, out, columns = weight.shape
    power, noise = [], []
    step = max(1, _BLOCK // (experts * columns))
    for start in range(0, out, step):
        stop = min(start + step, out)
        dense = np.stack([float64_of(tensor.read((e, e + 1), (start, stop))[0]) for e in range(experts)])
        off = float64_of(weight.dequantize(rows=(start, stop))) - dense
        power.append(float(np.square(dense).sum()))
        noise.append(float(np.square(off, out=off).sum()))
    return math.fsum(power), math.fsum(noise)
