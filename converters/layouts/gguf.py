"""GGUF's blocks: one tensor a weight, scales and codes side by side in blocks that run along a row.

| types | BCQ |
|---|---|
| Q4_0, Q5_0, Q8_0, Q2_0, TQ1_0, TQ2_0 | affine, one zero point |
| Q4_1, Q5_1 | offset |
| Q1_0 | bcq; with a bias of -0 where a scale is zero, because ggml gives that zero the sign of the code |
| Q3_K, Q6_K | affine, second-order scales of 16 groups |
| Q2_K, Q4_K, Q5_K | offset, second-order scales and offsets of 16 or 8 groups |
| IQ4_NL, IQ4_XS | table; second-order scales of 8 groups in the latter |
| MXFP4, NVFP4 | table, scales of one byte; NVFP4's tensor `.scale` is a second-order scale of the whole matrix |

The logical dtype is F32: there ggml's arithmetic and the format's one rounding give the same bits.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from bcqfmt.container.gguf.types import TYPES
from bcqfmt.container.stored_tensor import StoredTensor
from bcqfmt.converters import words
from bcqfmt.converters.gguf.blocks import blocks_of, numbers_of, planes_of
from bcqfmt.converters.gguf.kinds import KINDS
from bcqfmt.converters.source.checkpoint import SourceCheckpoint
from bcqfmt.converters.source.gguf_rows import heads_fit, rows_back, rows_put_back
from bcqfmt.errors import error
from bcqfmt.weight.scheme import Scheme, SecondOrder, Segment, WeightSpec
from bcqfmt.weight.weight import BcqWeight

from .protocol import Converted, Module, Options, Rebuilder, Rule, Values
from .uniform import check_finite

__all__ = ["Gguf"]

Array = npt.NDArray[Any]
Fields = dict[str, Array]
_IQ4: Final = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_FP4: Final = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # twice E2M1
_TABLES: Final = {"IQ4_NL": (_IQ4, 0), "IQ4_XS": (_IQ4, 0), "MXFP4": (_FP4, -1), "NVFP4": (_FP4, -1)}
_ELEMENTS: Final = {kind.name: kind.elements for kind in TYPES.values()}  # of a block
_KEPT = 1 << 26  # bytes of small parts that are kept for their second use


class Gguf:
    """The layout."""

    name = "gguf"

    def __init__(self) -> None:
        self._small = _SmallParts()

    def modules(self, source: SourceCheckpoint, options: Options) -> list[Module]:
        """Every tensor of blocks; BCQ-E601 for types that have no exact place in the format."""
        found = []
        for name, blocks in source.blocks.items():
            if blocks.type not in KINDS:
                what = f"type {blocks.type}" + (", a vector codebook" if blocks.type.startswith("IQ") else "")
                hint = "convert another file of the model: Q, K, IQ4, MXFP4 and NVFP4 types are converted"
                raise error("BCQ-E601", source.home[name], name, what, f"one of {', '.join(KINDS)}", hint=hint)
            kind = KINDS[blocks.type]
            shape = (1,) * (2 - len(blocks.shape)) + blocks.shape
            shape = (math.prod(shape[:-2]), *shape[-2:]) if len(shape) > 2 else shape
            tensors = {"blocks": source.tensors[name]}
            if blocks.scale:
                tensors["scale"] = source.tensors[blocks.scale]
            settings = {
                "type": blocks.type,
                "shape": shape,
                "bits": kind.bits,
                "group_size": kind.group_size,
                "heads": blocks.heads,
                "order": blocks.order,
                "variant": blocks.type,
            }
            found.append(Module(blocks.weight.removesuffix(".weight"), self.name, tensors, settings))
        return found

    def convert(self, module: Module, options: Options) -> Converted:
        """The weight; its numbers are looked at now, and read again when the writer asks for them after many others."""
        name, shape = module.settings["type"], module.settings["shape"]
        numbers = _numbers(module, _rows(module))
        nonfinite = False
        for array in numbers.values():
            if array.dtype == np.float16:
                nonfinite = check_finite(array, "F16", module.tensors["blocks"].name, options) or nonfinite
        zero = bool((numbers["scale"] == 0).any()) if name == "Q1_0" else False
        segment = _segment(name, shape, zero, "scale" in module.tensors)
        scheme = Scheme(segments=(segment,), nonfinite=nonfinite)
        spec = WeightSpec(scheme=scheme, shape=shape, dtype="F32", widths=(shape[-1],))
        suffixes = [suffix for suffix in spec.parts() if suffix != "s0_planes"]
        self._small.keep(module, _small_parts(module, suffixes, numbers))

        def small_parts(rows: Array | None = None) -> Fields:
            found = self._small.kept(module)
            if found is None:
                numbers = _numbers(module, _rows(module) if rows is None else rows)
                found = self._small.keep(module, _small_parts(module, suffixes, numbers))
            return found

        def planes() -> Array:
            rows, settings = _rows(module), module.settings
            small_parts(rows)  # the proof needs them next
            return _stacked(planes_of(settings["type"], rows, settings["order"], options.threads), shape)

        parts = {}
        for suffix, part in spec.parts().items():
            make = planes if suffix == "s0_planes" else partial(_one_of, small_parts, suffix)
            parts[suffix] = StoredTensor(suffix, part.dtype, part.shape, make=make)
        rule: Rule = {"rule": f"gguf.{name.lower()}"}
        rule |= {"heads": module.settings["heads"]} if module.settings["heads"] else {}
        rule |= {"byte_order": "big"} if module.settings["order"] == ">" else {}
        rules: dict[str, Rule] = {"blocks": rule}
        if "scale" in module.tensors:
            rules["scale"] = {"rule": "part", "part": "s0_scale_scale", "shape": list(module.tensors["scale"].shape)}
        return Converted(BcqWeight(module.weight_name, spec, parts), rules, {"blocks": "s0_planes"})

    def rebuilders(self) -> Mapping[str, Rebuilder]:
        """A rule for every type."""
        optional: dict[str, Values] = {"heads": _heads, "byte_order": lambda *_: ["big"]}
        return {
            f"gguf.{name.lower()}": Rebuilder(partial(_rebuilt, name), partial(_fits, name), {}, optional)
            for name in KINDS
        }


def _heads(spec: WeightSpec, rule: Rule) -> list[int]:
    return [rule["heads"]] if heads_fit(rule["heads"], spec.stack * spec.out) else []


def _fits(name: str, spec: WeightSpec) -> bool:
    """Whether a weight is one that tensors of this type become."""
    plain = Scheme(segments=spec.scheme.segments[:1], nonfinite=spec.scheme.nonfinite)
    forms = [_segment(name, spec.shape, zero, scaled) for zero in (False, True) for scaled in (False, True)]
    return spec.scheme == plain and plain.segments[0] in forms and spec.columns % _ELEMENTS[name] == 0


def _segment(name: str, shape: tuple[int, ...], zero: bool, scaled: bool) -> Segment:
    """The segment of a type; ``zero``: a scale is zero, ``scaled``: a tensor next to it is a second-order scale."""
    kind = KINDS[name]
    common: dict[str, Any] = {"bits": kind.bits, "group_size": kind.group_size}
    if name == "Q1_0":
        return Segment(encoding="bcq", alpha="F16", bias="F16" if zero else None, **common)
    scale: str | SecondOrder = "F16"
    if kind.scale_bits:
        scale = SecondOrder(kind.scale_bits, 1, "F16", kind.scale_zero, kind.groups)
    elif name == "MXFP4":
        scale = "E8M0"
    elif name == "NVFP4" and scaled:
        scale = SecondOrder("UE4M3", shape[-2], "F32", 0, shape[-1] // kind.group_size)
    elif name == "NVFP4":
        scale = "UE4M3"
    if name in _TABLES:
        table, exponent = _TABLES[name]
        return Segment(encoding="table", scale=scale, table=table, table_exponent=exponent, **common)
    if kind.zero is not None:
        return Segment(encoding="affine", scale=scale, zero=kind.zero, **common)
    offset = SecondOrder(kind.scale_bits, 1, "F16", 0, kind.groups) if kind.scale_bits else "F16"
    return Segment(encoding="offset", scale=scale, offset=offset, **common)


# ----------------------------------------------------------------------------------------------- blocks to parts
def _rows(module: Module) -> Array:
    """The blocks uint8 [rows, row bytes], rows in the order of Hugging Face."""
    return rows_put_back(module.tensors["blocks"].array(), module.settings["heads"])


def _stacked(planes: Array, shape: tuple[int, ...]) -> Array:
    """Planes [bits, E*out, W] as a stack has them, [E, bits, out, W]."""
    if len(shape) == 2:
        return planes
    split = planes.reshape(len(planes), shape[0], shape[1], -1)
    return np.ascontiguousarray(split.swapaxes(0, 1))


class _SmallParts:
    """All parts but the planes of the weights that were asked for last: every one of them is used twice."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: OrderedDict[int, tuple[Module, Fields]] = OrderedDict()

    def kept(self, module: Module) -> Fields | None:
        """The parts by suffix, if they are there."""
        with self._lock:
            held = self._held.get(id(module))
            return None if held is None else held[1]

    def keep(self, module: Module, parts: Fields) -> Fields:
        """Hold them, and let the oldest go."""
        with self._lock:
            self._held[id(module)] = module, parts  # holding the module keeps its id from being used again
            while len(self._held) > 1 and sum(map(_nbytes, self._held.values())) > _KEPT:
                self._held.popitem(last=False)
        return parts


def _nbytes(held: tuple[Module, Fields]) -> int:
    return sum(part.nbytes for part in held[1].values())


def _one_of(parts: Callable[[], Fields], suffix: str) -> Array:
    return parts()[suffix]


def _numbers(module: Module, rows: Array) -> Fields:
    """All fields but the planes; BCQ-E604 for a scale of NVFP4 that the format cannot hold."""
    fields = numbers_of(module.settings["type"], rows, module.settings["order"])
    if module.settings["type"] == "NVFP4":
        stored = fields["scale"]
        if (stored == 0xFF).any():
            found = "the scale byte 0xFF, which ggml reads as 480"
            raise error("BCQ-E604", tensor=module.tensors["blocks"].name, found=found, expected="UE4M3 up to 448")
        fields["scale"] = np.where(stored == 0x7F, np.uint8(0), stored & 0x7F)  # as ggml reads them
    return fields


def _small_parts(module: Module, suffixes: list[str], numbers: Fields) -> Fields:
    """The parts with these suffixes as they are stored."""
    kind, found = KINDS[module.settings["type"]], {}
    for suffix in suffixes:
        field = suffix.removeprefix("s0_")
        if field == "scale_scale" and "scale" in module.tensors:
            found[suffix] = module.tensors["scale"].array()
        elif field == "bias":
            found[suffix] = np.full_like(numbers["scale"], -0.0)
        elif field.endswith("_codes") and kind.scale_bits:
            found[suffix] = words.codes_to_stream_columns(numbers[field], kind.scale_bits)
        else:
            found[suffix] = numbers["scale" if field in ("alpha", "scale_codes") else field]
    return found


# ----------------------------------------------------------------------------------------------- parts to blocks
def _rebuilt(name: str, weight: BcqWeight, rule: Rule) -> Array:
    """The blocks uint8 [rows, row bytes] in the order of the file."""
    segment, parts, kind = weight.scheme.segments[0], weight.parts(), KINDS[name]
    groups, rows = weight.spec.groups(0), weight.spec.stack * weight.spec.out
    fields: Fields = {}
    for suffix, part in parts.items():
        field, array = suffix.removeprefix("s0_"), part.array()
        if field == "planes":
            fields[field] = array if array.ndim == 3 else np.ascontiguousarray(array.swapaxes(0, 1))
            fields[field] = fields[field].view(np.uint32).reshape(segment.bits, rows, -1)
        elif field.endswith("_codes") and kind.scale_bits:
            packed = np.ascontiguousarray(array).view(np.uint32).reshape(rows, -1)
            fields[field] = words.stream_columns_to_codes(packed, kind.scale_bits, groups)
        elif field in ("alpha", "scale_codes"):
            fields["scale"] = array.reshape(rows, groups)
        elif field != "bias" and not (name == "NVFP4" and field == "scale_scale"):
            fields[field] = array.reshape(rows, -1)
    blocks = blocks_of(name, fields, ">" if rule.get("byte_order") == "big" else "<")
    return rows_back(blocks, rule.get("heads", 0))
