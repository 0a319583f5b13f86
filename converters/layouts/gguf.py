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

NVFP4 with a scale of 480, a byte 0xFF for ggml that UE4M3 does not have, gets F16 scales.

The logical dtype is F32: there ggml's arithmetic and the format's one rounding give the same bits.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from bcqfmt.compiled.threads import each_share
from bcqfmt.container.dtypes import numpy_dtype
from bcqfmt.container.gguf.types import TYPES
from bcqfmt.container.stored_tensor import StoredTensor
from bcqfmt.converters.gguf.blocks import blocks_of, in_order, new_numbers, numbers_of, planes_of
from bcqfmt.converters.gguf.kinds import KINDS
from bcqfmt.converters.source.checkpoint import SourceCheckpoint
from bcqfmt.converters.source.gguf_rows import heads_fit, rows_back, rows_put_back
from bcqfmt.converters.words.buffers import new_array
from bcqfmt.errors import error
from bcqfmt.weight.scheme import Scheme, SecondOrder, Segment, WeightSpec
from bcqfmt.weight.weight import BcqWeight

from .protocol import Converted, Module, NonfiniteNumbers, Options, Rebuilder, Rule, Values
from .uniform import check_finite

Array = npt.NDArray[Any]
Fields = dict[str, Array]
_IQ4: Final = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_FP4: Final = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # twice E2M1
_TABLES: Final = {"IQ4_NL": (_IQ4, 0), "IQ4_XS": (_IQ4, 0), "MXFP4": (_FP4, -1), "NVFP4": (_FP4, -1)}
_UE4M3: Final = np.arange(128, dtype=np.uint8).view(numpy_dtype("F8_E4M3")).astype(np.float16)
_UE4M3[127] = 480  # no number of the format, but one of ggml
_ELEMENTS: Final = {kind.name: kind.elements for kind in TYPES.values()}  # of a block
_ANY_NUMBERS: Final = Options(allow_nonfinite=True)
_KEPT = 1 << 26  # bytes of numbers that are kept for their second use
_TILE = 1 << 22  # bytes of blocks at a time


class Gguf:
    """The layout."""

    name = "gguf"

    def __init__(self) -> None:
        self._shared = _Shared()

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
        """The weight; its numbers are looked at now, or with the planes if they may be read late.

        They are read again for their parts unless there is room to keep them. Blocks are read, packed and rebuilt some
        rows at a time, so that few of them are in memory.
        """
        name, shape = module.settings["type"], module.settings["shape"]
        late = options.read_late and name not in ("Q1_0", "NVFP4")  # whose description depends on more of them
        small = _SmallParts(self._shared, module, late)
        numbers = {} if late else small.keep(_numbers(module))
        nonfinite = _nonfinite(numbers, module, options)
        odd = name == "Q1_0" and bool((numbers["scale"] == 0).any())
        odd = odd or (name == "NVFP4" and numbers["scale"].dtype == np.float16)
        segment = _segment(name, shape, odd, "scale" in module.tensors)
        scheme = Scheme(segments=(segment,), nonfinite=nonfinite)
        spec = WeightSpec(scheme=scheme, shape=shape, dtype="F32", widths=(shape[-1],))
        proof: list[bool] = []

        def planes() -> Array:
            found = new_array(spec.parts()["s0_planes"].shape, np.uint32)
            matrices = found.reshape(spec.stack, -1, *found.shape[-2:])
            tiles = _tiles(shape, module.settings["heads"], module.tensors["blocks"].shape[1])
            fields = _new_numbers(module) if late else {}

            def pack(first: int, stop: int) -> None:
                for e, start, end in tiles[first:stop]:
                    rows = e * spec.out + start, e * spec.out + end
                    blocks = _read(module, *rows, proof if late else None)
                    planes_of(name, blocks, matrices[e][:, start:end], proof if late else None)
                    if late:
                        numbers_of(name, blocks, _rows(fields, *rows), proof)

            each_share(pack, len(tiles), 1, options.threads)
            if late and _nonfinite(small.keep(fields), module, _ANY_NUMBERS):
                raise NonfiniteNumbers
            return found

        parts = {}
        for suffix, part in spec.parts().items():
            make = planes if suffix == "s0_planes" else partial(small.part, suffix)
            parts[suffix] = StoredTensor(suffix, part.dtype, part.shape, make=make)
        rule: Rule = {"rule": f"gguf.{name.lower()}"}
        rule |= {"heads": module.settings["heads"]} if module.settings["heads"] else {}
        rule |= {"byte_order": "big"} if module.settings["order"] == ">" else {}
        rules: dict[str, Rule] = {"blocks": rule}
        if "scale" in module.tensors:
            rules["scale"] = {"rule": "part", "part": "s0_scale_scale", "shape": list(module.tensors["scale"].shape)}
        weight = BcqWeight(module.weight_name, spec, parts)
        return Converted(weight, rules, {"blocks": "s0_planes"}, {"blocks": proof})

    def rebuilders(self) -> Mapping[str, Rebuilder]:
        optional: dict[str, Values] = {"heads": _heads, "byte_order": lambda *_: ["big"]}
        return {
            f"gguf.{name.lower()}": Rebuilder(partial(_rebuilt, name), partial(_fits, name), {}, optional)
            for name in KINDS
        }


def _heads(spec: WeightSpec, rule: Rule) -> list[int]:
    return [rule["heads"]] if len(spec.shape) == 2 and heads_fit(rule["heads"], spec.out) else []


def _fits(name: str, spec: WeightSpec) -> bool:
    """Whether a weight is one that tensors of this type become."""
    plain = Scheme(segments=spec.scheme.segments[:1], nonfinite=spec.scheme.nonfinite)
    forms = [_segment(name, spec.shape, odd, scaled) for odd in (False, True) for scaled in (False, True)]
    return spec.scheme == plain and plain.segments[0] in forms and spec.columns % _ELEMENTS[name] == 0


def _segment(name: str, shape: tuple[int, ...], odd: bool, scaled: bool) -> Segment:
    """The segment of a type; ``scaled``: a tensor next to it is a second-order scale.

    ``odd``: a scale of Q1_0 is zero, or one of NVFP4 is 480, which UE4M3 does not have.
    """
    kind = KINDS[name]
    common: dict[str, Any] = {"bits": kind.bits, "group_size": kind.group_size}
    if name == "Q1_0":
        return Segment(encoding="bcq", alpha="F16", bias="F16" if odd else None, **common)
    scale: str | SecondOrder = "F16"
    if kind.scale_bits:
        scale = SecondOrder(kind.scale_bits, 1, "F16", kind.scale_zero, kind.groups)
    elif name == "MXFP4":
        scale = "E8M0"
    elif name == "NVFP4" and scaled:
        scale = SecondOrder("UE4M3", shape[-2], "F32", 0, shape[-1] // kind.group_size)
    elif name == "NVFP4":
        scale = "F16" if odd else "UE4M3"
    if name in _TABLES:
        table, exponent = _TABLES[name]
        return Segment(encoding="table", scale=scale, table=table, table_exponent=exponent, **common)
    if kind.zero is not None:
        return Segment(encoding="affine", scale=scale, zero=kind.zero, **common)
    offset = SecondOrder(kind.scale_bits, 1, "F16", 0, kind.groups) if kind.scale_bits else "F16"
    return Segment(encoding="offset", scale=scale, offset=offset, **common)


# ----------------------------------------------------------------------------------------------- blocks to parts
def _tiles(shape: tuple[int, ...], heads: int, row_bytes: int) -> list[tuple[int, int, int]]:
    """Matrix, first row and the one after the last, in order: about ``_TILE`` bytes each, whole heads if rows move."""
    stack, out = math.prod(shape[:-2]), shape[-2]
    whole = out // heads if heads else 1
    count = max(1, round(out * row_bytes / _TILE))  # of about the same size
    step = -(-out // (whole * count)) * whole
    return [(e, start, min(start + step, out)) for e in range(stack) for start in range(0, out, step)]


def _read(module: Module, first: int, stop: int, proof: list[bool] | None = None) -> Array:
    """Blocks uint8 [rows, row bytes], little-endian, rows in the order of Hugging Face.

    ``proof``: gets whether these give back the bytes of the file, if they are others.
    """
    stored, name, order = module.tensors["blocks"], module.settings["type"], module.settings["order"]
    rows = new_array((stop - first, stored.shape[1]), np.uint8)
    stored.read_into(rows.reshape(-1), first * stored.shape[1])
    heads = module.settings["heads"] * len(rows) // stored.shape[0]
    blocks = in_order(name, rows_put_back(rows, heads), order)
    if proof is not None and blocks is not rows:
        proof.append(np.array_equal(rows_back(in_order(name, blocks, order), heads), rows))
    return blocks


def _numbers(module: Module) -> Fields:
    """All fields but the planes; BCQ-E604 for a scale of NVFP4 that the format cannot hold."""
    name, shape, stored = module.settings["type"], module.settings["shape"], module.tensors["blocks"]
    tiles = _tiles(shape, module.settings["heads"], stored.shape[1])
    fields = _new_numbers(module)
    for e, start, stop in tiles:
        rows = e * shape[-2] + start, e * shape[-2] + stop
        numbers_of(name, _read(module, *rows), _rows(fields, *rows))
    if name == "NVFP4":
        codes = fields["scale"]
        codes = np.where(codes == 0x7F, np.uint8(0), codes & 0x7F)  # as ggml reads them
        wide = bool((codes == 0x7F).any())
        if wide and "scale" in module.tensors:
            found = (
                f"the scale byte 0xFF, which ggml reads as 480, and a second scale in {module.tensors['scale'].name}"
            )
            expected = "UE4M3 up to 448 where there are two scales"
            raise error("BCQ-E604", tensor=stored.name, found=found, expected=expected)
        fields["scale"] = _UE4M3[codes] if wide else codes
    return fields


def _new_numbers(module: Module) -> Fields:
    return new_numbers(module.settings["type"], *module.tensors["blocks"].shape)


def _rows(fields: Fields, first: int, stop: int) -> Fields:
    """Some rows of all of them."""
    return {field: array[first:stop] for field, array in fields.items()}


def _nonfinite(numbers: Fields, module: Module, options: Options) -> bool:
    """Whether there are infinities or NaNs; BCQ-E609 if there are and they are not allowed."""
    halves = [array for array in numbers.values() if array.dtype == np.float16]
    return any(check_finite(array, "F16", module.tensors["blocks"].name, options) for array in halves)


class _Shared:
    """What the weights of a conversion share: bytes of numbers that may still be kept, and numbers read last."""

    def __init__(self) -> None:
        self.lock = threading.RLock()  # garbage collection may end a weight in a thread that holds it
        self.room = _KEPT
        self.last: deque[tuple[Module, Fields]] = deque(maxlen=4)  # more than shards are being written at a time


class _SmallParts:
    """The parts of a weight but for the planes: its numbers are kept while there is room, else read again.

    ``once``: every part is asked for only once.
    """

    def __init__(self, shared: _Shared, module: Module, once: bool) -> None:
        self._shared, self._module, self._once = shared, module, once
        self._kept: Fields = {}

    def keep(self, numbers: Fields) -> Fields:
        """Keep them if there is room, else only until those of a few other weights have been read."""
        size = sum(field.nbytes for field in numbers.values())
        with self._shared.lock:
            if size <= self._shared.room:
                self._shared.room -= size
                self._kept = dict(numbers)
            else:
                self._shared.last.append((self._module, numbers))
        return numbers

    def __del__(self) -> None:
        for field in list(self._kept):
            self._taken(field)

    def _taken(self, field: str) -> Array:
        """Numbers that need not be kept any longer."""
        with self._shared.lock:
            found = self._kept.pop(field)
            self._shared.room += found.nbytes
        return found

    def _numbers(self, field: str) -> Array:
        if field in self._kept:
            return self._taken(field) if self._once else self._kept[field]
        for module, numbers in list(self._shared.last):
            if module is self._module:
                return numbers[field]
        return self.keep(_numbers(self._module))[field]

    def part(self, suffix: str) -> Array:
        field = suffix.removeprefix("s0_")
        if field == "scale_scale" and "scale" in self._module.tensors:
            return self._module.tensors["scale"].array()
        if not KINDS[self._module.settings["type"]].scale_bits and field != "offset":
            scale = self._numbers("scale")  # also as the alpha of Q1_0 and the codes of NVFP4
            return np.full_like(scale, -0.0) if field == "bias" else scale
        return self._numbers(field)


# ----------------------------------------------------------------------------------------------- parts to blocks
def _rebuilt(name: str, weight: BcqWeight, rule: Rule) -> Iterator[Array]:
    """The blocks uint8 [rows, row bytes] in the order of the file, some rows at a time."""
    spec, heads, order = weight.spec, rule.get("heads", 0), ">" if rule.get("byte_order") == "big" else "<"
    stored = {suffix.removeprefix("s0_"): part.array() for suffix, part in weight.parts().items()}
    planes = stored.pop("planes").reshape(spec.stack, -1, spec.out, spec.columns // 32)
    if name == "NVFP4":
        stored.pop("scale_scale", None)
    if not KINDS[name].scale_bits:
        stored = {"scale" if field in ("alpha", "scale_codes") else field: array for field, array in stored.items()}
    if name == "NVFP4" and stored["scale"].dtype == np.float16:
        codes = np.searchsorted(_UE4M3, stored["scale"]).clip(max=127)
        stored["scale"] = np.where(codes == 127, 255, codes).astype(np.uint8)
    numbers = {field: array.reshape(spec.stack, spec.out, -1) for field, array in stored.items()}
    row_bytes = spec.columns // _ELEMENTS[name] * KINDS[name].nbytes
    for e, start, stop in _tiles(spec.shape, heads, row_bytes):
        fields = {field: array[e, start:stop] for field, array in numbers.items()}
        fields["planes"] = planes[e][:, start:stop]
        yield rows_back(blocks_of(name, fields, order), heads * (stop - start) // (spec.stack * spec.out))
