"""The AWQ layouts for one token at a time: GEMV and GEMV-fast, the latter also llm-awq's v2.

| variant | tensor | dtype | shape | content |
|---|---|---|---|---|
| gemv | qweight | I32 | [N, K/8] | codes, a bit stream along K |
| | qzeros | I32 | [N, Gp/8] | zero points, a bit stream along the groups |
| | scales | F16, BF16, F32 | [N, Gp] | |
| gemv_fast | qweight | I16 | [N/4, K] | codes of four rows, interleaved |
| | qzeros, in llm-awq scaled_zeros | F16, BF16, F32 | [Gp, N] | -(scale * zero point), rounded |
| | scales | F16, BF16, F32 | [Gp, N] | |

Gp is the number of groups G filled up with zeros, as the kernels want it. Shapes do not tell G, so the group size has
to come from the configuration. The fast kernel computes ``code * scale + zero`` with the *stored* zero and rounds once.
That is not ``scale * (code - zero point)``: a quarter of all values and more differ in the last place. So the weight
is ``offset``, its signed zeros included, and no integer zero point is made up.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from bcqfmt.container.dtypes import FLOATS
from bcqfmt.container.stored_tensor import StoredTensor
from bcqfmt.converters import words
from bcqfmt.converters.source.checkpoint import SourceCheckpoint
from bcqfmt.converters.source.quant_config import Settings
from bcqfmt.errors import error
from bcqfmt.weight.scheme import Segment, WeightSpec
from bcqfmt.weight.weight import BcqWeight

from .protocol import Converted, Module, Options, Rebuilder, Rule
from .tensors import columns_per_group, expect, gather, padded_groups
from .uniform import affine_weight, plain, segment_weight, zero_points_of

Array = npt.NDArray[Any]
TENSORS: Final = {"qweight": (("I32",), (2,)), "qzeros": (("I32",), (2,)), "scales": (FLOATS, (2,))}  # GEMM and GEMV


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
    return narrow and settings.method not in ("gptq", "auto-round", "intel/auto-round")


def gemv_module(source: SourceCheckpoint, settings: Settings, name: str) -> Module:
    """A module in the GEMV layout."""
    tensors = gather(source, name, TENSORS)
    n, k = tensors["qweight"].shape[0], 8 * tensors["qweight"].shape[1]
    size, padded = _groups(source, settings, name, k)
    why = f"for {n} x {k} in groups of {size} in the AWQ GEMV layout"
    expect(source, tensors["qzeros"], ("I32",), (n, padded // 8), why)
    expect(source, tensors["scales"], FLOATS, (n, padded), why)
    resolved = {"variant": "gemv", "bits": 4, "group_size": size, "n": n, "k": k, "padded": padded}
    return Module(name, "awq", tensors, resolved)


def gemv_fast_module(source: SourceCheckpoint, settings: Settings, name: str) -> Module:
    """A module in the GEMV-fast layout; AutoAWQ's qzeros are llm-awq's scaled_zeros."""
    zeros = "scaled_zeros" if f"{name}.scaled_zeros" in source.tensors else "qzeros"
    tensors = gather(source, name, {"qweight": (("I16",), (2,)), "scales": (FLOATS, (2,)), zeros: (FLOATS, (2,))})
    n, k = 4 * tensors["qweight"].shape[0], tensors["qweight"].shape[1]
    if k % 64:
        raise error(
            "BCQ-E604",
            source.home[f"{name}.qweight"],
            f"{name}.qweight",
            f"{k} columns",
            "a multiple of 64 in GEMV-fast",
        )
    size, padded = _groups(source, settings, name, k)
    why = f"for {n} x {k} in groups of {size} in the AWQ GEMV-fast layout"
    expect(source, tensors["scales"], FLOATS, (padded, n), why)
    expect(source, tensors[zeros], (tensors["scales"].dtype,), (padded, n), why)
    resolved = {"variant": "gemv_fast", "bits": 4, "group_size": size, "n": n, "k": k, "padded": padded, "zeros": zeros}
    return Module(name, "awq", tensors, resolved)


def convert_gemv(module: Module, options: Options) -> Converted:
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


def convert_gemv_fast(module: Module, options: Options) -> Converted:
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
        raise error(
            "BCQ-E608", source.folder.name, name, found, "32, 64, or 128 and more, and a divisor of the columns"
        )
    return size, padded_groups(columns, size)


def _without_padding(tensor: StoredTensor, shape: tuple[int, int]) -> StoredTensor:
    """The numbers of real groups; the padding is not part of the weight."""
    return StoredTensor(tensor.name, tensor.dtype, shape, make=lambda: tensor.array()[: shape[0], : shape[1]])


def _qweight(weight: BcqWeight, rule: Rule) -> Array:
    return words.planes_to_columns(weight.planes()[0], k=weight.shape[1])


def _qzeros(weight: BcqWeight, rule: Rule) -> Array:
    zeros = zero_points_of(weight).astype(np.uint8)
    padded = np.zeros((zeros.shape[0], rule["groups"]), np.uint8)
    padded[:, : zeros.shape[1]] = zeros
    return words.codes_to_stream_columns(padded, 4)


def _fast_qweight(weight: BcqWeight, rule: Rule) -> Array:
    return words.planes_to_gemv_fast(weight.planes()[0])


def _four_bits(spec: WeightSpec) -> bool:
    return plain(spec, bits=[4])


def _groups_stored(spec: WeightSpec, rule: Rule) -> list[int]:
    return [padded_groups(spec.columns, spec.scheme.segments[0].group_size)]


REBUILDERS: dict[str, Rebuilder] = {
    "awq.gemv.qweight": Rebuilder(_qweight, _four_bits),
    "awq.gemv.qzeros": Rebuilder(_qzeros, _four_bits, {"groups": _groups_stored}),
    "awq.gemv_fast.qweight": Rebuilder(
        _fast_qweight, lambda spec: plain(spec, "offset", [4]) and spec.out % 4 == 0 and spec.columns % 64 == 0
    ),
}
