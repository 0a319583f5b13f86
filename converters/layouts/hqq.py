"""HQQ's layout, as ``save_to_safetensors`` and transformers write it: floating-point zeros, and groups along a row.

| tensor | dtype | shape | content |
|---|---|---|---|
| W_q | U8, I32 for 3 bits | [R/p, g] | codes of the groups, p slabs of rows above each other in a word |
| scale, zero | F16, BF16, F32 | [R, 1] | R = N*K/g groups, row after row of the matrix |
| nbits, group_size, axis | I32 | [] | |
| shape | I64 | [2] | N, K |
| packing, compute_dtype | U8 | [n] | text, a character a byte |
| view_as_float, quant_scale, quant_zero | U8 | [] | flags |

Three bits lie in I32 words, ten to a word with the top two bits unused, and rows are filled up to a multiple of ten.
Five and six bits take a byte each. The value is rounded twice, RN(RN(code - zero) * scale), in the type of the scale,
which is what ``float-zero`` means. Only W_q, scale and zero become parts; every other tensor, bias included, is carried
as it is. The text tensors are compared with lists of known words: HQQ itself runs them through ``eval``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy.typing as npt

from bcqfmt.container.dtypes import FLOATS
from bcqfmt.container.stored_tensor import StoredTensor
from bcqfmt.converters import words
from bcqfmt.converters.source.checkpoint import SourceCheckpoint
from bcqfmt.errors import error, escape
from bcqfmt.weight.scheme import Segment, WeightSpec
from bcqfmt.weight.weight import BcqWeight

from .protocol import Converted, Module, Options, Rebuilder, Rule
from .tensors import columns_per_group, expect, gather, prefixes
from .uniform import plain, segment_weight

Array = npt.NDArray[Any]
_PACKING: Final = {1: "1bit_u8", 2: "2bit_u8", 3: "3bit_32", 4: "4bit_u8", 5: "8bit_u8", 6: "8bit_u8", 8: "8bit_u8"}
_SLABS: Final = {1: 8, 2: 4, 3: 10, 4: 2, 5: 1, 6: 1, 8: 1}
_TYPES: Final = {"torch.float16": "F16", "torch.bfloat16": "BF16", "torch.float32": "F32"}
_TEXT: Final = 64  # no text of the layout is longer


class Hqq:
    """Axis 1 only, groups that divide a row."""

    name = "hqq"

    def modules(self, source: SourceCheckpoint, options: Options) -> list[Module]:
        """Modules with a tensor W_q."""
        return [self._module(source, name) for name in prefixes(source, "W_q")]

    def convert(self, module: Module, options: Options) -> Converted:
        """Planes from W_q when asked for; scales and zeros now."""
        s, tensors = module.settings, module.tensors
        n, k, size, bits = s["n"], s["k"], s["group_size"], s["bits"]
        rows = n * k // size
        scale, zero = tensors["scale"], tensors["zero"]
        segment = Segment(
            encoding="float-zero", bits=bits, group_size=size, row=s["row"], scale=scale.dtype, zero=zero.dtype
        )

        def planes() -> Array:
            codes = words.hqq_to_codes(tensors["W_q"].array(), bits, n, k, options.threads)
            if bits in (5, 6) and int(codes.max()) >= 2**bits:  # a byte can hold what a code cannot
                found = f"code {int(codes.max())}"
                expected = f"0..{2**bits - 1} at {bits} bits"
                raise error("BCQ-E604", tensor=tensors["W_q"].name, found=found, expected=expected)
            return words.codes_to_planes(codes, bits, threads=options.threads)

        floats = {"s0_scale": (_by_row(scale, n), False), "s0_zero": (_by_row(zero, n), False)}
        weight = segment_weight(module, segment, (n, k), floats, {}, None, planes, options)
        rules: dict[str, Rule] = {
            "W_q": {"rule": "hqq.W_q"},
            "scale": {"rule": "part", "part": "s0_scale", "shape": [rows, 1]},
            "zero": {"rule": "part", "part": "s0_zero", "shape": [rows, 1]},
        }
        return Converted(weight, rules, {"W_q": "s0_planes"})

    def rebuilders(self) -> Mapping[str, Rebuilder]:
        return {"hqq.W_q": Rebuilder(_w_q, _fits)}

    def _module(self, source: SourceCheckpoint, name: str) -> Module:
        needed = gather(source, name, _TENSORS, _OPTIONAL)
        _refuse(source, name, needed)
        bits = _number(source, needed["nbits"])
        if bits not in _PACKING:
            raise error("BCQ-E608", source.folder.name, name, f"{bits} bits", f"one of {', '.join(map(str, _PACKING))}")
        n, k = _matrix(source, needed["shape"])
        stated = _number(source, needed["group_size"]) if "group_size" in needed else -1
        size = columns_per_group(source, name, stated, k)
        if k % size:
            found = f"groups of {size} in rows of {k}, so that they run over the ends of rows"
            raise error("BCQ-E608", source.folder.name, name, found, "a group size that divides the columns")
        rows, slabs = n * k // size, _SLABS[bits]
        why = f"for {n} x {k}, {bits} bits and groups of {size} in the HQQ layout"
        if rows % slabs and bits != 3:
            raise error("BCQ-E604", source.home[f"{name}.W_q"], name, f"{rows} groups", f"a multiple of {slabs} {why}")
        expect(source, needed["W_q"], ("I32" if bits == 3 else "U8",), (-(-rows // slabs), size), why)
        for suffix in ("scale", "zero"):
            expect(source, needed[suffix], FLOATS, (rows, 1), why)
        _check_texts(source, name, needed, bits)
        tensors = {suffix: needed[suffix] for suffix in ("W_q", "scale", "zero")}
        return Module(name, self.name, tensors, {"bits": bits, "group_size": size, "row": stated == -1, "n": n, "k": k})


_INTEGER: Final = (("U8", "I32", "I64", "BOOL"), (0, 1))
_TENSORS: Final = {
    "W_q": (("U8", "I32", *FLOATS), (2,)),  # with view_as_float, which is refused by name
    "scale": (FLOATS, (2,)),
    "zero": (FLOATS, (2,)),
    "nbits": ((*_INTEGER[0], "F32"), _INTEGER[1]),
    "axis": _INTEGER,
    "shape": (("I64",), (1,)),
    "group_size": _INTEGER,
    "packing": (("U8",), (1,)),
    "compute_dtype": (("U8",), (1,)),
    "view_as_float": _INTEGER,
    "quant_scale": _INTEGER,
    "quant_zero": _INTEGER,
}
_OPTIONAL: Final = ("group_size", "packing", "compute_dtype", "view_as_float", "quant_scale", "quant_zero")


def _refuse(source: SourceCheckpoint, name: str, tensors: Mapping[str, StoredTensor]) -> None:
    """What HQQ can write and the format cannot hold, or what HQQ itself has given up."""
    reasons = {
        "view_as_float": "codes stored under a floating-point type (view_as_float)",
        "quant_scale": "scales that are quantized themselves (quant_scale)",
        "quant_zero": "zeros that are quantized themselves (quant_zero)",
    }
    for suffix, reason in reasons.items():
        if suffix in tensors and _number(source, tensors[suffix]):
            raise error("BCQ-E601", source.home[f"{name}.W_q"], name, f"HQQ with {reason}", "plain HQQ")
    if tensors["nbits"].dtype == "F32":  # HQQ writes 1.58 so, and whole numbers as integers
        found = "HQQ with a fraction of a bit (1.58)"
        raise error("BCQ-E601", source.home[f"{name}.W_q"], name, found, "a whole number of bits")
    axis = _number(source, tensors["axis"])
    if axis != 1:
        found = f"HQQ with axis {axis}: groups are not runs along the input"
        raise error("BCQ-E601", source.home[f"{name}.W_q"], name, found, "axis 1")


def _check_texts(source: SourceCheckpoint, name: str, tensors: Mapping[str, StoredTensor], bits: int) -> None:
    if "packing" in tensors:
        packing = _text(source, tensors["packing"])
        if packing != _PACKING[bits]:
            found = f"packing {escape(packing)} with {bits} bits"
            raise error("BCQ-E602", source.folder.name, name, found, _PACKING[bits])
    kinds = {tensors["scale"].dtype, tensors["zero"].dtype}
    if "compute_dtype" in tensors:
        stated = _text(source, tensors["compute_dtype"])
        if stated not in _TYPES:
            found = f"compute_dtype {escape(stated)}"
            raise error("BCQ-E602", source.folder.name, name, found, f"one of {', '.join(_TYPES)}")
        kinds.add(_TYPES[stated])
    if len(kinds) > 1:  # HQQ would cast them on loading, and the value would be another one
        found = f"scale, zero and compute_dtype of types {', '.join(sorted(kinds))}"
        raise error("BCQ-E602", source.folder.name, name, found, "the same type for all")


def _number(source: SourceCheckpoint, tensor: StoredTensor) -> int:
    if tensor.shape not in ((), (1,)):
        raise error("BCQ-E604", source.home[tensor.name], tensor.name, f"shape {list(tensor.shape)}", "one integer")
    return int(tensor.array().reshape(-1)[0])


def _matrix(source: SourceCheckpoint, tensor: StoredTensor) -> tuple[int, int]:
    expect(source, tensor, ("I64",), (2,), "for the shape of a matrix")
    n, k = (int(dim) for dim in tensor.array())
    if n < 1 or k < 1:
        raise error("BCQ-E604", source.home[tensor.name], tensor.name, f"shape {n} x {k}", "positive dimensions")
    return n, k


def _text(source: SourceCheckpoint, tensor: StoredTensor) -> str:
    if tensor.shape[0] > _TEXT:
        found = f"shape {list(tensor.shape)}"
        expected = f"at most {_TEXT} characters, a byte each"
        raise error("BCQ-E604", source.home[tensor.name], tensor.name, found, expected)
    return tensor.tobytes().decode("latin-1")


def _by_row(tensor: StoredTensor, n: int) -> StoredTensor:
    """[R, 1] as [N, G]."""
    shape = (n, tensor.shape[0] // n)
    return StoredTensor(tensor.name, tensor.dtype, shape, make=lambda: tensor.array().reshape(shape))


def _fits(spec: WeightSpec) -> bool:
    size, bits = spec.scheme.segments[0].group_size, spec.scheme.segments[0].bits
    whole = spec.columns % size == 0 and (bits == 3 or spec.out * spec.groups(0) % _SLABS.get(bits, 1) == 0)
    return plain(spec, "float-zero", _SLABS) and whole


def _w_q(weight: BcqWeight, rule: Rule) -> Array:
    segment = weight.scheme.segments[0]
    codes = words.planes_to_codes(weight.planes()[0], weight.shape[1])
    return words.codes_to_hqq(codes, segment.bits, segment.group_size)
