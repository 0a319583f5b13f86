"""The AWQ layouts, all of them 4 bit: GEMM, and for one token at a time GEMV and GEMV-fast (also llm-awq's v2).

| variant | tensor | dtype | shape | content |
|---|---|---|---|---|
| gemm | qweight | I32 | [K, N/8] | codes, eight columns of N in a word, in the order 0 2 4 6 1 3 5 7 |
| | qzeros | I32 | [G, N/8] | zero points as they are, in the same order |
| | scales | F16, BF16, F32 | [G, N] | not interleaved |
| gemv | qweight | I32 | [N, K/8] | codes, a bit stream along K |
| | qzeros | I32 | [N, Gp/8] | zero points, a bit stream along the groups |
| | scales | F16, BF16, F32 | [N, Gp] | |
| gemv_fast | qweight | I16 | [N/4, K] | codes of four rows, interleaved |
| | qzeros, in llm-awq scaled_zeros | F16, BF16, F32 | [Gp, N] | -(scale * zero point), rounded |
| | scales | F16, BF16, F32 | [Gp, N] | |

The variant is read off the shapes; a configuration that names another one contradicts them. auto-round writes GEMM
too, also symmetric (all zero points 8) and with negative scales. There is no g_idx in any of them.

Gp is the number of groups G filled up with zeros, as the kernels want it. Shapes do not tell G, so the group size has
to come from the configuration. The fast kernel computes ``code * scale + zero`` with the *stored* zero and rounds once.
That is not ``scale * (code - zero point)``: a quarter of all values and more differ in the last place. So the weight
is ``offset``, its signed zeros included, and no integer zero point is made up.
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
from bcqfmt.converters.source.quant_config import AUTO_ROUND, Settings, read_settings
from bcqfmt.errors import error, escape
from bcqfmt.weight.scheme import Segment, WeightSpec
from bcqfmt.weight.weight import BcqWeight

from .protocol import Converted, Module, Options, Rebuilder, Rule
from .tensors import columns_per_group, expect, gather, padded_groups, prefixes
from .uniform import affine_weight, plain, segment_weight, zero_points_of

Array = npt.NDArray[Any]
_TENSORS: Final = {"qweight": (("I32",), (2,)), "qzeros": (("I32",), (2,)), "scales": (FLOATS, (2,))}  # GEMM and GEMV
# what configurations call the variants; exllama and ipex are kernels that read the GEMM layout
_CALLED: Final = {
    "gemm": ("gemm", "exllama", "exllamav2", "ipex"),
    "gemv": ("gemv",),
    "gemv_fast": ("gemv_fast", "gemv-fast", "llm-awq"),
}


class Awq:
    """Four bits, codes packed along the output (GEMM) or along the input (GEMV)."""

    name = "awq"

    def modules(self, source: SourceCheckpoint, options: Options) -> list[Module]:
        """Modules whose qweight and scales have the outline of a variant."""
        settings = read_settings(source)
        makers = {"gemm": _gemm_module, "gemv": _gemv_module, "gemv_fast": _gemv_fast_module}
        found = []
        for name in prefixes(source, "qweight"):
            variant = _variant(source, settings, name)
            if variant is not None:
                _check_claims(source, settings, name, variant)
                found.append(makers[variant](source, settings, name))
        return found

    def convert(self, module: Module, options: Options) -> Converted:
        """Planes from qweight when asked for; zeros and scales now."""
        if module.settings["variant"] == "gemv":
            return _convert_gemv(module, options)
        if module.settings["variant"] == "gemv_fast":
            return _convert_gemv_fast(module, options)
        s, tensors = module.settings, module.tensors
        zeros = words.awq_gemm_to_codes(tensors["qzeros"].array().view(np.uint32))

        def planes() -> Array:
            return words.awq_to_planes(tensors["qweight"].array().view(np.uint32), threads=options.threads)

        weight = affine_weight(
            module, (s["n"], s["k"]), 4, s["group_size"], tensors["scales"], True, zeros, None, planes, options
        )
        rules: dict[str, Rule] = {
            "qweight": {"rule": "awq.qweight"},
            "qzeros": {"rule": "awq.qzeros"},
            "scales": {"rule": "part", "part": "s0_scale", "transpose": True},
        }
        return Converted(weight, rules, {"qweight": "s0_planes"})

    def rebuilders(self) -> Mapping[str, Rebuilder]:
        return _REBUILDERS


def _variant(source: SourceCheckpoint, settings: Settings, name: str) -> str | None:
    """Which variant the outline of the tensors is that of; None for other layouts."""
    qweight, scales = source.tensors[f"{name}.qweight"], source.tensors.get(f"{name}.scales")
    if len(qweight.shape) != 2:
        return None
    if qweight.dtype == "I16":
        return "gemv_fast"
    if qweight.dtype != "I32" or scales is None or len(scales.shape) != 2:
        return None
    if is_gemv(source, settings, name):
        return "gemv"
    return "gemm" if scales.shape[1] == 8 * qweight.shape[1] else None


def _check_claims(source: SourceCheckpoint, settings: Settings, name: str, variant: str) -> None:
    """The configuration's version and bits against what the tensors are."""
    stated = settings.format
    known = {called for names in _CALLED.values() for called in names}
    if stated in known and stated not in _CALLED[variant]:
        found = f"the tensors are in the layout {variant}, the configuration says {escape(str(stated))}"
        raise error("BCQ-E602", source.folder.name, name, found, "the same reading from both")
    bits = settings.of(name)["bits"]
    if bits not in (None, 4):
        raise error("BCQ-E608", source.folder.name, name, f"{bits} bits in the AWQ layout", "4, the only width it has")


def _gemm_module(source: SourceCheckpoint, settings: Settings, name: str) -> Module:
    tensors = gather(source, name, _TENSORS)
    k, n = tensors["qweight"].shape[0], 8 * tensors["qweight"].shape[1]
    stated = settings.of(name)["group_size"]
    if stated is None:  # then the scales tell, if they divide the columns
        groups = tensors["scales"].shape[0]
        if k % groups:
            found = f"no group_size in any configuration, and {groups} groups do not divide {k} columns"
            raise error("BCQ-E602", source.folder.name, name, found, "group_size in quant_config.json")
        stated = k // groups
    size = columns_per_group(source, name, stated, k)
    groups = -(-k // size)
    why = f"for {n} x {k} in groups of {size} in the AWQ GEMM layout"
    expect(source, tensors["qzeros"], ("I32",), (groups, n // 8), why)
    expect(source, tensors["scales"], FLOATS, (groups, n), why)
    resolved = {"variant": "gemm", "bits": 4, "group_size": size, "row": stated == -1}
    return Module(name, "awq", tensors, {**resolved, "n": n, "k": k})


def _fits(spec: WeightSpec) -> bool:
    return plain(spec, bits=[4]) and spec.out % 8 == 0


# ------------------------------------------------------------------------------------------- GEMV and GEMV-fast
def is_gemv(source: SourceCheckpoint, settings: Settings, name: str) -> bool:
    """Whether I32 tensors lie row after row. GPTQ tensors of equal outline are told apart by qzeros and the method."""
    qweight, qzeros, scales = (source.tensors.get(f"{name}.{s}") for s in ("qweight", "qzeros", "scales"))
    if qweight is None or scales is None or qweight.dtype != "I32" or len(qweight.shape) != 2:
        return False
    if len(scales.shape) != 2 or scales.shape[0] != qweight.shape[0] or scales.shape[1] % 8:
        return False
    if scales.shape != qweight.shape:
        return True
    # GPTQ with groups of 32/bits columns has one scale for each word: 2 bits differ in qzeros, 4 bits in nothing
    narrow = qzeros is None or qzeros.shape == (scales.shape[0], scales.shape[1] // 8)
    return narrow and settings.method not in ("gptq", *AUTO_ROUND)


def _gemv_module(source: SourceCheckpoint, settings: Settings, name: str) -> Module:
    """A module in the GEMV layout."""
    tensors = gather(source, name, _TENSORS)
    n, k = tensors["qweight"].shape[0], 8 * tensors["qweight"].shape[1]
    size, padded = _groups(source, settings, name, k)
    why = f"for {n} x {k} in groups of {size} in the AWQ GEMV layout"
    expect(source, tensors["qzeros"], ("I32",), (n, padded // 8), why)
    expect(source, tensors["scales"], FLOATS, (n, padded), why)
    resolved = {"variant": "gemv", "bits": 4, "group_size": size, "n": n, "k": k, "padded": padded}
    return Module(name, "awq", tensors, resolved)


def _gemv_fast_module(source: SourceCheckpoint, settings: Settings, name: str) -> Module:
    """A module in the GEMV-fast layout; AutoAWQ's qzeros are llm-awq's scaled_zeros."""
    zeros = "scaled_zeros" if f"{name}.scaled_zeros" in source.tensors else "qzeros"
    tensors = gather(source, name, {"qweight": (("I16",), (2,)), "scales": (FLOATS, (2,)), zeros: (FLOATS, (2,))})
    n, k = 4 * tensors["qweight"].shape[0], tensors["qweight"].shape[1]
    if k % 64:
        expected = "a multiple of 64 in GEMV-fast"
        raise error("BCQ-E604", source.home[f"{name}.qweight"], f"{name}.qweight", f"{k} columns", expected)
    size, padded = _groups(source, settings, name, k)
    why = f"for {n} x {k} in groups of {size} in the AWQ GEMV-fast layout"
    expect(source, tensors["scales"], FLOATS, (padded, n), why)
    expect(source, tensors[zeros], (tensors["scales"].dtype,), (padded, n), why)
    resolved = {"variant": "gemv_fast", "bits": 4, "group_size": size, "n": n, "k": k, "padded": padded, "zeros": zeros}
    return Module(name, "awq", tensors, resolved)


def _convert_gemv(module: Module, options: Options) -> Converted:
    """Zeros and scales lose their padding, which the rules put back."""
    s, tensors = module.settings, module.tensors
    n, k, size = s["n"], s["k"], s["group_size"]
    fields = words.stream_columns_to_codes(tensors["qzeros"].array().view(np.uint32), 4, s["padded"])

    def planes() -> Array:
        return words.columns_to_planes(tensors["qweight"].array().view(np.uint32), 4, threads=options.threads)

    groups = k // size
    scales = _without_padding(tensors["scales"], (n, groups))
    weight = affine_weight(module, (n, k), 4, size, scales, False, fields[:, :groups], None, planes, options)
    rules: dict[str, Rule] = {
        "qweight": {"rule": "awq.gemv.qweight"},
        "qzeros": {"rule": "awq.gemv.qzeros", "groups": s["padded"]},
        "scales": {"rule": "part", "part": "s0_scale", "shape": [n, s["padded"]]},
    }
    return Converted(weight, rules, {"qweight": "s0_planes"})


def _convert_gemv_fast(module: Module, options: Options) -> Converted:
    """An ``offset`` weight with the stored zeros as they are."""
    s, tensors = module.settings, module.tensors
    n, k, zeros = s["n"], s["k"], tensors[s["zeros"]]
    scales = tensors["scales"]
    segment = Segment(encoding="offset", bits=4, group_size=s["group_size"], scale=scales.dtype, offset=zeros.dtype)

    def planes() -> Array:
        return words.gemv_fast_to_planes(tensors["qweight"].array(), threads=options.threads)

    shape = (k // s["group_size"], n)
    floats = {"s0_scale": (scales, True), "s0_offset": (zeros, True)}
    floats = {part: (_without_padding(tensor, shape), turned) for part, (tensor, turned) in floats.items()}
    weight = segment_weight(module, segment, (n, k), floats, {}, None, planes, options)
    stored = [s["padded"], n]
    rules: dict[str, Rule] = {
        "qweight": {"rule": "awq.gemv_fast.qweight"},
        "scales": {"rule": "part", "part": "s0_scale", "transpose": True, "shape": stored},
        s["zeros"]: {"rule": "part", "part": "s0_offset", "transpose": True, "shape": stored},
    }
    return Converted(weight, rules, {"qweight": "s0_planes"})


def _groups(source: SourceCheckpoint, settings: Settings, name: str, columns: int) -> tuple[int, int]:
    """Group size and the number of groups with their padding."""
    stated = settings.of(name)["group_size"]
    if stated is None:
        found = "no group_size in any configuration, and padding hides it in the shapes"
        raise error("BCQ-E602", source.folder.name, name, found, "group_size in quant_config.json")
    size = columns_per_group(source, name, stated, columns)
    if columns % size or (size < 128 and size not in (32, 64)):
        found = f"groups of {size} in {columns} columns"
        expected = "32, 64, or 128 and more, and a divisor of the columns"
        raise error("BCQ-E608", source.folder.name, name, found, expected)
    return size, padded_groups(columns, size)


def _without_padding(tensor: StoredTensor, shape: tuple[int, int]) -> StoredTensor:
    """The numbers of real groups; the padding is not part of the weight."""
    return StoredTensor(tensor.name, tensor.dtype, shape, make=lambda: tensor.array()[: shape[0], : shape[1]])


def _gemv_qzeros(weight: BcqWeight, rule: Rule) -> Array:
    zeros = zero_points_of(weight).astype(np.uint8)
    padded = np.zeros((zeros.shape[0], rule["groups"]), np.uint8)
    padded[:, : zeros.shape[1]] = zeros
    return words.codes_to_stream_columns(padded, 4)


def _four_bits(spec: WeightSpec) -> bool:
    return plain(spec, bits=[4])


_REBUILDERS: Final = {
    "awq.qweight": Rebuilder(lambda weight, _: words.planes_to_awq(weight.planes()[0], k=weight.shape[1]), _fits),
    "awq.qzeros": Rebuilder(lambda weight, _: words.codes_to_awq_gemm(zero_points_of(weight).astype(np.uint8)), _fits),
    "awq.gemv.qweight": Rebuilder(
        lambda weight, _: words.planes_to_columns(weight.planes()[0], k=weight.shape[1]), _four_bits
    ),
    "awq.gemv.qzeros": Rebuilder(
        _gemv_qzeros,
        _four_bits,
        {"groups": lambda spec, _: [padded_groups(spec.columns, spec.scheme.segments[0].group_size)]},
    ),
    "awq.gemv_fast.qweight": Rebuilder(
        lambda weight, _: words.planes_to_gemv_fast(weight.planes()[0]),
        lambda spec: plain(spec, "offset", [4]) and spec.out % 4 == 0 and spec.columns % 64 == 0,
    ),
}
