"""What all uniform layouts share: codes, scales and zeros of a module become one BCQ weight.

Scales and zeros are small and read now; planes are computed when the writer asks for them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import numpy as np
import numpy.typing as npt

from bcqfmt.container.dtypes import EXPONENT, FLOATS
from bcqfmt.container.stored_tensor import StoredTensor
from bcqfmt.errors import error
from bcqfmt.weight.build import declared_zero
from bcqfmt.weight.packing import unpack, words_for
from bcqfmt.weight.scheme import PackedZero, Scheme, SecondOrder, Segment, WeightSpec
from bcqfmt.weight.weight import BcqWeight

from .protocol import Module, Options

Array = npt.NDArray[Any]


def affine_weight(
    module: Module,
    shape: tuple[int, ...],
    bits: int,
    group_size: int,
    scale: StoredTensor,
    transposed: bool,
    zeros: int | Array,
    perm: Array | None,
    planes: Callable[[], Array],
    options: Options,
) -> BcqWeight:
    """``s * (code - zp)``: scale (out, G), or (G, out) when ``transposed``; zeros an integer or (out, G)."""
    declared, arrays = declared_zero(zeros, bits)
    row = bool(module.settings.get("row"))
    segment = Segment(encoding="affine", bits=bits, group_size=group_size, row=row, scale=scale.dtype, zero=declared)
    return segment_weight(module, segment, shape, {"s0_scale": (scale, transposed)}, arrays, perm, planes, options)


def segment_weight(
    module: Module,
    segment: Segment,
    shape: tuple[int, ...],
    floats: dict[str, tuple[StoredTensor, bool]],
    arrays: dict[str, Array],
    perm: Array | None,
    planes: Callable[[], Array],
    options: Options,
) -> BcqWeight:
    """A weight of one segment; ``floats``: part -> (source tensor, whether it lies (G, out) there)."""
    nonfinite = False
    for part, (tensor, _) in floats.items():
        if tensor.dtype not in FLOATS:
            found = f"{part} of type {tensor.dtype}"
            raise error("BCQ-E604", tensor=tensor.name, found=found, expected="F16, BF16 or F32")
        nonfinite = check_finite(tensor.array(), tensor.dtype, tensor.name, options) or nonfinite
    if perm is not None:
        arrays["perm"] = perm
    scheme = Scheme(segments=(segment,), perm=perm is not None, nonfinite=nonfinite)
    dtype = floats["s0_scale"][0].dtype if "s0_scale" in floats else next(iter(floats.values()))[0].dtype
    spec = WeightSpec(scheme=scheme, shape=shape, dtype=dtype, widths=(shape[-1],))
    parts = {name: StoredTensor.from_array(name, array, "I32") for name, array in arrays.items()}
    plane_shape = (*shape[:-2], segment.bits, shape[-2], words_for(shape[-1], 1))
    parts["s0_planes"] = StoredTensor("s0_planes", "I32", plane_shape, make=planes)
    wanted = spec.parts()
    for part, (tensor, transposed) in floats.items():
        parts[part] = StoredTensor(
            part, tensor.dtype, wanted[part].shape, make=_turned(tensor, transposed, wanted[part].shape)
        )
    return BcqWeight(module.weight_name, spec, parts)


def plain(
    spec: WeightSpec, encoding: str = "affine", bits: Collection[int] = range(1, 9), *, stack: bool = False
) -> bool:
    """Whether a weight is one segment of this encoding with first-order scales; a matrix, or maybe a stack of them."""
    segment = spec.scheme.segments[0]
    return (
        len(spec.scheme.segments) == 1
        and segment.encoding == encoding
        and segment.bits in bits
        and not isinstance(segment.scale, SecondOrder)
        and (stack or len(spec.shape) == 2)
    )


def zero_points_of(weight: BcqWeight) -> Array:
    """Zero points of a one-segment affine weight, ``([E,] out, G)`` uint16."""
    zero, groups = weight.scheme.segments[0].zero, weight.spec.groups(0)
    if isinstance(zero, PackedZero):
        return unpack(weight.parts()["s0_zero"].array(), zero.bits, groups)
    assert isinstance(zero, int)
    return np.full((*weight.shape[:-1], groups), zero, np.uint16)


def _turned(tensor: StoredTensor, transposed: bool, shape: tuple[int, ...]) -> Callable[[], Array]:
    def make() -> Array:
        array = tensor.array()
        return array.swapaxes(-1, -2)[..., : shape[-1]] if transposed else array[..., : shape[-1]].reshape(shape)

    return make


def check_finite(values: Array, dtype: str, name: str, options: Options) -> bool:
    """Whether there are infinities or NaNs; BCQ-E609 if there are and they are not allowed."""
    kind, exponent = EXPONENT[dtype]
    bits = values.view(kind)  # numpy is slow with F16
    signed = bits.view(f"i{bits.itemsize}")
    # all ones in the exponent: the largest patterns of either sign
    if signed.max(initial=0) < exponent and bits.max(initial=0) < 1 << 8 * bits.itemsize - 1 | exponent:
        return False
    wrong = bits & kind(exponent) == exponent
    if not options.allow_nonfinite:
        where = "x".join(str(i) for i in np.unravel_index(int(np.argmax(wrong)), values.shape))
        raise error(
            "BCQ-E609",
            tensor=name,
            found=f"{int(np.count_nonzero(wrong))} infinities or NaNs, the first at {where}",
            expected="finite numbers",
        )
    return True
