"""The AWQ layouts, all of them 4 bit: GEMM here, GEMV and GEMV-fast in ``awq_gemv.py``.

| tensor (GEMM) | dtype | shape | content |
|---|---|---|---|
| qweight | I32 | [K, N/8] | codes, eight columns of N in a word, in the order 0 2 4 6 1 3 5 7 |
| qzeros | I32 | [G, N/8] | zero points as they are, in the same order |
| scales | F16, BF16, F32 | [G, N] | not interleaved |

The variant is read off the shapes; a configuration that names another one contradicts them. auto-round writes GEMM
too, also symmetric (all zero points 8) and with negative scales. There is no g_idx in any of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from bcqfmt.container.dtypes import FLOATS
from bcqfmt.converters import words
from bcqfmt.converters.source.checkpoint import SourceCheckpoint
from bcqfmt.converters.source.quant_config import Settings, read_settings
from bcqfmt.errors import error, escape
from bcqfmt.weight.scheme import WeightSpec
from bcqfmt.weight.weight import BcqWeight

from . import awq_gemv
from .protocol import Converted, Module, Options, Rebuilder, Rule
from .tensors import columns_per_group, expect, gather, prefixes
from .uniform import affine_weight, plain, zero_points_of

Array = npt.NDArray[Any]
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
        makers = {"gemm": _gemm_module, "gemv": awq_gemv.gemv_module, "gemv_fast": awq_gemv.gemv_fast_module}
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
            return awq_gemv.convert_gemv(module, options)
        if module.settings["variant"] == "gemv_fast":
            return awq_gemv.convert_gemv_fast(module, options)
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
        """Rule name -> how it rebuilds a tensor."""
        return {
            "awq.qweight": Rebuilder(_qweight, _fits),
            "awq.qzeros": Rebuilder(_qzeros, _fits),
            **awq_gemv.REBUILDERS,
        }


def _variant(source: SourceCheckpoint, settings: Settings, name: str) -> str | None:
    """Which variant the outline of the tensors is that of; None for other layouts."""
    qweight, scales = source.tensors[f"{name}.qweight"], source.tensors.get(f"{name}.scales")
    if len(qweight.shape) != 2:
        return None
    if qweight.dtype == "I16":
        return "gemv_fast"
    if qweight.dtype != "I32" or scales is None or len(scales.shape) != 2:
        return None
    if awq_gemv.is_gemv(source, settings, name):
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
    tensors = gather(source, name, awq_gemv.TENSORS)
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


def _qweight(weight: BcqWeight, rule: Rule) -> Array:
    return words.planes_to_awq(weight.planes()[0], k=weight.shape[1])


def _qzeros(weight: BcqWeight, rule: Rule) -> Array:
    return words.codes_to_awq_gemm(zero_points_of(weight).astype(np.uint8))
