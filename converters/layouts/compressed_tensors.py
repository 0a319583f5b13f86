"""The layouts of compressed-tensors (llm-compressor, auto-round): packed words, and plain bytes.

| tensor | dtype | shape | content |
|---|---|---|---|
| weight_packed | I32 | [N, W] | codes, packed along K (``compressed_words.py``: two packings) |
| or weight | I8 | [N, K] | int-quantized and naive-quantized: a signed number a byte |
| weight_scale | F16, BF16, F32 | [N, G], [N, 1] or [1] | group, channel or tensor |
| weight_zero_point | I32 | [W, G] | packed along N; with plain bytes, or one for a tensor: I8, shaped like the scale |
| weight_shape | I64 | [2] or [3] | N, K or E, N, K; with weight_packed only |
| weight_g_idx | I32 | [K] | group of every column; any -1 in it means that there is no such order |

Numbers are signed, stored with 2^(b-1) added, which makes them codes and zero points as the format has them. Expert
stacks have one more dimension in front; scales and g_idx may lack it, then all experts share them. Plain bytes become
eight planes whatever their stated width is, because a byte can hold more than the width promises. How activations are
quantized (W8A8) is kept in the module's settings; scales of activations are carried as dense tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from bcqfmt.container.dtypes import FLOATS
from bcqfmt.container.stored_tensor import StoredTensor
from bcqfmt.converters import words
from bcqfmt.converters.source.checkpoint import SourceCheckpoint
from bcqfmt.converters.source.quant_config import Settings, read_settings
from bcqfmt.errors import BcqError, error

from .compressed_config import CtScheme, Targets, library_version, read_scheme, refuse_formats
from .compressed_words import REBUILDERS, packings, per_matrix, planes_of, telling_bits, unpack_zeros, widened
from .g_idx import permutation
from .protocol import Converted, Module, Options, Rebuilder, Rule
from .tensors import columns_per_group, expect, gather, prefixes
from .uniform import affine_weight

Array = npt.NDArray[Any]
_PLAIN: Final = {
    "weight": (("I8",), (2, 3)),
    "weight_scale": (FLOATS, (0, 1, 2, 3)),
    "weight_zero_point": (("I8",), (0, 1, 2, 3)),
    "weight_g_idx": (("I32", "I64"), (1, 2)),
}
_PACKED: Final = {
    "weight_packed": (("I32",), (2, 3)),
    "weight_shape": (("I64", "I32"), (1,)),
    **{suffix: kind for suffix, kind in _PLAIN.items() if suffix != "weight"},
    "weight_zero_point": (("I32", "I8"), (0, 1, 2, 3)),
}
_DENSE_SINCE: Final = (0, 18)
_NO_G_IDX_SINCE: Final = (0, 19)


class CompressedTensors:
    """Signed codes with one, N or N x G scales."""

    name = "compressed-tensors"

    def modules(self, source: SourceCheckpoint, options: Options) -> list[Module]:
        """Modules with weight_packed, or with weight of bytes and weight_scale."""
        names = prefixes(source, "weight_packed")
        plain = [
            name
            for name in prefixes(source, "weight")
            if source.tensors[f"{name}.weight"].dtype == "I8" and f"{name}.weight_scale" in source.tensors
        ]
        if not names and not plain:
            return []
        settings = read_settings(source)
        refuse_formats(source, settings)
        targets = Targets(source, settings)
        return [_module(source, settings, targets, name, "weight_packed") for name in names] + [
            _module(source, settings, targets, name, "weight") for name in plain
        ]

    def convert(self, module: Module, options: Options) -> Converted:
        """Planes from the packed words or bytes when asked for; zeros, scales and g_idx now."""
        s, tensors = module.settings, module.tensors
        shape, bits, size = tuple(s["shape"]), s["bits"], s["group_size"]
        stacked = len(shape) == 3
        perm = _permutation(module, shape, size)
        stored = tensors[s["codes"]]

        def planes() -> Array:
            def one(array: Array, order: Array | None) -> Array:
                if s["codes"] == "weight":  # a change of sign bit adds 128
                    return words.codes_to_planes(array.view(np.uint8) ^ np.uint8(128), 8, order, options.threads)
                return planes_of(array, bits, shape[-1], s["packing"], order, options.threads)

            return per_matrix(one, stored.array(), perm, stacked=stacked)

        wide = (*shape[:-1], -(-shape[-1] // size))
        scale = widened(tensors["weight_scale"], wide)
        zeros = _zeros(module, wide)
        weight = affine_weight(module, shape, bits, size, scale, False, zeros, perm, planes, options)
        rules: dict[str, Rule] = {s["codes"]: {"rule": f"compressed.{s['codes']}", "packing": s["packing"]}}
        rules["weight_scale"] = _narrow_rule(tensors["weight_scale"], "s0_scale", wide)
        if "weight_zero_point" in tensors:
            rules["weight_zero_point"] = _zero_rule(tensors["weight_zero_point"], s["packing"])
        if "weight_shape" in tensors:
            rules["weight_shape"] = {"rule": "compressed.weight_shape", "dtype": tensors["weight_shape"].dtype}
        if "weight_g_idx" in tensors:
            g_idx = tensors["weight_g_idx"]
            rules["weight_g_idx"] = {"rule": "compressed.g_idx", "shape": list(g_idx.shape), "dtype": g_idx.dtype}
            if (g_idx.array() == -1).any():
                rules["weight_g_idx"]["fill"] = -1
        return Converted(weight, rules, {s["codes"]: "s0_planes"})

    def rebuilders(self) -> Mapping[str, Rebuilder]:
        """Rule name -> how it rebuilds a tensor."""
        return REBUILDERS


# ------------------------------------------------------------------------------------------------------- finding
def _module(source: SourceCheckpoint, settings: Settings, targets: Targets, name: str, codes: str) -> Module:
    """The module by the first group of the configuration that its tensors fit."""
    stored = source.tensors[f"{name}.{codes}"]
    if stored.dtype == "U8":
        found = f"{codes} of type U8: a floating-point format of four bits"
        raise error("BCQ-E601", source.home[stored.name], name, found, "integers")
    tensors = gather(
        source, name, _PACKED if codes == "weight_packed" else _PLAIN, ("weight_zero_point", "weight_g_idx")
    )
    first: BcqError | None = None
    for group in targets.of(name):
        try:
            scheme = read_scheme(source, name, group)
            return Module(name, "compressed-tensors", tensors, _resolve(source, settings, name, tensors, codes, scheme))
        except BcqError as fault:
            first = first or fault
    assert first is not None  # there is a group, or Targets.of has raised
    raise first


def _resolve(
    source: SourceCheckpoint,
    settings: Settings,
    name: str,
    tensors: Mapping[str, StoredTensor],
    codes: str,
    scheme: CtScheme,
) -> dict[str, Any]:
    shape = _shape(source, tensors, codes)
    lead, (n, k) = shape[:-2], shape[-2:]
    bits = scheme.bits if codes == "weight_packed" else 8
    size = columns_per_group(source, name, scheme.group_size, k)
    groups = -(-k // size)
    why = f"for {'x'.join(map(str, shape))}, {bits} bits, strategy {scheme.strategy}, groups of {size}"
    packing = _packing(source, settings, name, tensors, shape, bits, why) if codes == "weight_packed" else "bytes"
    narrow = {(*lead, n, groups), (n, groups)} if scheme.strategy != "tensor" else {(1,), (*lead, 1, 1), ()}
    narrow |= {(n,)} if scheme.strategy == "channel" else set()
    _expect_one(source, tensors["weight_scale"], FLOATS, narrow, why)
    if "weight_zero_point" in tensors:
        zero = tensors["weight_zero_point"]
        if zero.dtype == "I32" and codes == "weight_packed":
            expect(source, zero, ("I32",), (*lead, packings(n, bits)[packing], groups), why)
        else:
            _expect_one(source, zero, ("I8",), narrow, why)
    elif not scheme.symmetric:
        raise error("BCQ-E603", source.home[f"{name}.{codes}"], name, "asymmetric, without weight_zero_point", "it")
    if "weight_g_idx" in tensors:
        _expect_one(source, tensors["weight_g_idx"], ("I32", "I64"), {(k,), (*lead, k)}, why)
    elif scheme.act_order and (library_version(settings) or (0,)) < _NO_G_IDX_SINCE:
        raise error("BCQ-E603", source.home[f"{name}.{codes}"], name, "actorder group, without weight_g_idx", "it")
    resolved = {"shape": list(shape), "bits": bits, "group_size": size, "row": scheme.group_size == -1}
    resolved |= {"codes": codes, "packing": packing}
    return {**resolved, **({"activations": scheme.activations} if scheme.activations else {})}


def _shape(source: SourceCheckpoint, tensors: Mapping[str, StoredTensor], codes: str) -> tuple[int, ...]:
    stored = tensors[codes]
    shape = stored.shape
    if "weight_shape" in tensors and codes == "weight_packed":
        stated = tensors["weight_shape"]
        expect(source, stated, ("I64", "I32"), (len(shape),), f"for {codes} {list(shape)}")
        shape = tuple(int(dim) for dim in stated.array())
    if len(shape) not in (2, 3) or min(shape) < 1 or shape[:-1] != stored.shape[:-1]:
        found = f"{list(stored.shape)} for a weight of shape {list(shape)}"
        raise error("BCQ-E604", source.home[stored.name], stored.name, found, "[N, ...] or [E, N, ...] in both")
    return shape


def _packing(
    source: SourceCheckpoint,
    settings: Settings,
    name: str,
    tensors: Mapping[str, StoredTensor],
    shape: tuple[int, ...],
    bits: int,
    why: str,
) -> str:
    """By the number of words, where that is not enough by the version, else by what must be zero."""
    stored, zero = tensors["weight_packed"], tensors.get("weight_zero_point")
    wide = packings(shape[-1], bits)
    fit = [packing for packing, count in wide.items() if count == stored.shape[-1]]
    if not fit:
        expect(source, stored, ("I32",), (*shape[:-1], wide["dense"]), why)
    if zero is not None and zero.dtype == "I32" and len(zero.shape) == len(shape):
        high = packings(shape[-2], bits)
        fit = [packing for packing in fit if high[packing] == zero.shape[-2]] or fit
    if len(fit) == 1:
        return fit[0]
    version = library_version(settings)
    if version is not None:
        return "dense" if version >= _DENSE_SINCE else "slots"
    chosen = telling_bits(stored.array(), bits, shape[-1])
    if chosen is None:
        found = f"{stored.shape[-1]} words a row, which both packings of {bits} bits have, and no version"
        raise error("BCQ-E602", source.folder.name, name, found, "a version in quantization_config")
    return chosen


def _expect_one(
    source: SourceCheckpoint, tensor: StoredTensor, dtypes: tuple[str, ...], shapes: set[tuple[int, ...]], why: str
) -> None:
    if tensor.shape not in shapes:
        expect(source, tensor, dtypes, max(shapes, key=len), why)
    expect(source, tensor, dtypes, tensor.shape, why)


# ---------------------------------------------------------------------------------------------------- converting
def _permutation(module: Module, shape: tuple[int, ...], size: int) -> Array | None:
    if "weight_g_idx" not in module.tensors:
        return None
    g_idx = module.tensors["weight_g_idx"].array()
    if (g_idx == -1).any():
        return None
    if len(shape) == 2:
        return permutation(g_idx, shape[-1], size, module.name)
    orders = [permutation(row, shape[-1], size, module.name) for row in np.broadcast_to(g_idx, (shape[0], shape[-1]))]
    if all(order is None for order in orders):
        return None
    return np.stack([np.arange(shape[-1], dtype=np.int32) if order is None else order for order in orders])


def _zeros(module: Module, wide: tuple[int, ...]) -> int | Array:
    bits, tensor = module.settings["bits"], module.tensors.get("weight_zero_point")
    if tensor is None:
        return int(2 ** (bits - 1))
    if tensor.dtype == "I8":
        return np.asarray(widened(tensor, wide).array().astype(np.int16) + np.int16(2 ** (bits - 1)))

    def one(array: Array) -> Array:
        return unpack_zeros(array, bits, wide[-2], module.settings["packing"])

    return per_matrix(one, tensor.array(), stacked=len(wide) == 3)


def _narrow_rule(tensor: StoredTensor, part: str, wide: tuple[int, ...]) -> Rule:
    if tensor.shape == wide:
        return {"rule": "part", "part": part}
    return {"rule": "compressed.scale", "shape": list(tensor.shape)}


def _zero_rule(tensor: StoredTensor, packing: str) -> Rule:
    if tensor.dtype == "I8":
        return {"rule": "compressed.zero_plain", "shape": list(tensor.shape)}
    return {"rule": "compressed.zero_packed", "packing": packing}
