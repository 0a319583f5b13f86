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
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from bcqfmt.container.dtypes import FLOATS
from bcqfmt.container.stored_tensor import StoredTensor
from bcqfmt.converters.source.checkpoint import SourceCheckpoint
from bcqfmt.converters.source.quant_config import Settings, read_settings, version_of
from bcqfmt.errors import BcqError, error, escape

from .compressed_words import REBUILDERS, packings, per_matrix, planes_of, telling_bits, unpack_zeros, widened
from .g_idx import permutation
from .protocol import Converted, Module, Options, Rebuilder, Rule
from .tensors import columns_per_group, expect, gather, prefixes
from .uniform import affine_weight

Array = npt.NDArray[Any]
_STRATEGIES: Final = ("group", "channel", "tensor")
_FORMATS: Final = {
    "marlin-24": "packed for the sparse Marlin kernel",
    "sparse-24-bitmask": "2:4 sparsity behind a bit mask",
    "sparse-bitmask": "sparsity behind a bit mask",
}
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
                return planes_of(array, bits, shape[-1], s["packing"], order, options.threads)

            return per_matrix(one, stored.array(), perm, stacked=stacked)

        wide = (*shape[:-1], -(-shape[-1] // size))
        scale = widened(tensors["weight_scale"], wide)
        zeros = _zeros(module, wide)
        weight = affine_weight(module, shape, bits, size, scale, False, zeros, perm, planes, options)
        rules: dict[str, Rule] = {s["codes"]: {"rule": f"compressed.{s['codes']}", "packing": s["packing"]}}
        rules["weight_scale"] = {"rule": "part", "part": "s0_scale"}
        if tensors["weight_scale"].shape != wide:
            rules["weight_scale"] = {"rule": "compressed.scale", "shape": list(tensors["weight_scale"].shape)}
        if "weight_zero_point" in tensors:
            zero = tensors["weight_zero_point"]
            rules["weight_zero_point"] = {"rule": "compressed.zero_packed", "packing": s["packing"]}
            if zero.dtype == "I8":
                rules["weight_zero_point"] = {"rule": "compressed.zero_plain", "shape": list(zero.shape)}
        if "weight_shape" in tensors:
            rules["weight_shape"] = {"rule": "compressed.weight_shape", "dtype": tensors["weight_shape"].dtype}
        if "weight_g_idx" in tensors:
            g_idx = tensors["weight_g_idx"]
            rules["weight_g_idx"] = {"rule": "compressed.g_idx", "shape": list(g_idx.shape), "dtype": g_idx.dtype}
            if (g_idx.array() == -1).any():
                rules["weight_g_idx"]["fill"] = -1
        return Converted(weight, rules, {s["codes"]: "s0_planes"})

    def rebuilders(self) -> Mapping[str, Rebuilder]:
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


# ----------------------------------------------------------------------------------------- the configuration
class CtScheme(NamedTuple):
    """How the weights of a module are quantized; ``activations`` is passed on as it stands."""

    bits: int
    strategy: str
    group_size: int  # -1: the whole row
    symmetric: bool
    act_order: bool
    activations: dict[str, Any] | None


def library_version(settings: Settings) -> tuple[int, ...] | None:
    """The version of compressed-tensors that wrote the configuration; auto-round leaves it out."""
    stated = settings.raw.get("version")
    if not isinstance(stated, str):
        return None
    return version_of(stated) or None


def refuse_formats(source: SourceCheckpoint, settings: Settings) -> None:
    """Formats of the same library whose tensors bear the same names."""
    sparsity = settings.raw.get("sparsity_config")
    stated = [settings.raw.get("format"), sparsity.get("format") if isinstance(sparsity, dict) else None]
    stated += [group.get("format") for group in _groups(settings).values()]
    for kind in stated:
        if isinstance(kind, str) and kind in _FORMATS:
            found = f"compressed-tensors format {kind}, {_FORMATS[kind]}"
            raise error("BCQ-E601", source.folder.name, found=found, expected="pack-quantized or int-quantized")


class Targets:
    """The groups of a configuration, and whose they are.

    A target is a module's name, a pattern (``re:...``, matched from the start) or the name of a class (``Linear``).
    Classes are not in a checkpoint, so a group with such a target may stand for any module that no name or pattern
    claims; if several do, the tensors decide between them. The ``ignore`` list is of no use here for the same reason:
    what has packed tensors is quantized.
    """

    def __init__(self, source: SourceCheckpoint, settings: Settings) -> None:
        self._place, self._patterns = source.folder.name, settings.patterns
        self._groups = []
        for group in _groups(settings).values():
            targets = group.get("targets")
            texts = [target for target in targets if isinstance(target, str)] if isinstance(targets, list) else []
            patterns = [target.removeprefix("re:") for target in texts if target.startswith("re:")]
            self._groups.append((group, set(texts), patterns, any(target[:1].isupper() for target in texts)))

    def of(self, name: str) -> list[dict[str, Any]]:
        """The groups that may be a module's: the one whose name or pattern fits, else all that name a class."""
        named, matched, classes = [], [], []
        for group, texts, patterns, has_class in self._groups:
            self._patterns.spend(20 if has_class else 1)  # the tensors will be compared with it
            if name in texts:
                named.append(group)
            elif any(self._patterns.fits(pattern, name) for pattern in patterns):
                matched.append(group)
            elif has_class:
                classes.append(group)
        chosen = named[:1] or matched[:1] or classes
        if not chosen:
            found = "quantized tensors, and no group of the configuration that means them"
            raise error("BCQ-E602", self._place, name, found, "a target in config_groups")
        return chosen


def read_scheme(source: SourceCheckpoint, name: str, group: Mapping[str, Any]) -> CtScheme:
    """A group's weights; BCQ-E608 for what the layouts here cannot be."""
    weights, activations = group["weights"], group.get("input_activations")
    bits = weights.get("num_bits", 8)
    kind = str(weights.get("type", "int")).lower()
    if kind != "int" or isinstance(bits, bool) or not isinstance(bits, int) or not 1 <= bits <= 8:
        found = f"num_bits {escape(repr(bits), 40)} of type {escape(kind, 40)}"
        raise error("BCQ-E608", source.folder.name, name, found, "integers of 1 to 8 bits")
    size = weights.get("group_size")
    if size is not None and (isinstance(size, bool) or not isinstance(size, int)):
        raise error("BCQ-E602", source.folder.name, name, f"group_size {escape(repr(size), 40)}", "an integer")
    strategy = weights.get("strategy")
    if strategy is None:
        strategy = "tensor" if size is None else "group" if size > 0 else "channel"
    if strategy not in _STRATEGIES:
        found = f"strategy {escape(str(strategy), 40)}"
        raise error("BCQ-E608", source.folder.name, name, found, ", ".join(_STRATEGIES))
    if strategy == "group" and (size is None or size < 1):
        raise error("BCQ-E602", source.folder.name, name, f"strategy group, group_size {size}", "a positive group_size")
    order = weights.get("actorder")
    return CtScheme(
        bits=bits,
        strategy=strategy,
        group_size=size if strategy == "group" and size is not None else -1,
        symmetric=bool(weights.get("symmetric", True)),
        act_order=order is True or order in ("group", "dynamic"),
        activations=activations if isinstance(activations, dict) else None,
    )


def _groups(settings: Settings) -> dict[str, dict[str, Any]]:
    """Groups that quantize weights."""
    groups = settings.raw.get("config_groups")
    found = groups if isinstance(groups, dict) else {}
    return {k: v for k, v in found.items() if isinstance(v, dict) and isinstance(v.get("weights"), dict)}
