"""AnyBCQ's layout: bit planes already, nested, with numbers of their own for every precision.

| tensor | dtype | shape | content |
|---|---|---|---|
| qweight | I32 | [K/32, B, N] | bit k mod 32 of a word is the sign of plane b: 1 plus, 0 minus |
| alpha_{p} | F16 | [G, p, N] | scales of the first p planes, p = 2..B |
| beta_{p} | F16 | [G, N] | bias at precision p |
| q_bias | F16 | [G, N] | never initialised, never read: carried as it is, NaN and all |

Planes, alphas and betas are kept bit for bit. *Values* are those of the specification: one sum, rounded once. AnyBCQ's
kernel rounds to half precision after every plane, so its values may differ in the last places; the record says so.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy.typing as npt

from bcqfmt.container.dtypes import FLOATS
from bcqfmt.container.stored_tensor import StoredTensor
from bcqfmt.converters import words
from bcqfmt.converters.source.checkpoint import SourceCheckpoint
from bcqfmt.errors import error
from bcqfmt.weight.scheme import Segment, WeightSpec

from .protocol import Converted, Module, Options, Rebuilder, Rule
from .tensors import Kinds, expect, gather
from .uniform import plain, segment_weight

Array = npt.NDArray[Any]
_ALPHA = re.compile(r"(.+)\.alpha_([1-9][0-9]?)")


class AnyBcq:
    """Nested planes of ``Linear`` layers; becomes ``bcq`` with ``precisions``."""

    name = "anybcq"

    def modules(self, source: SourceCheckpoint, options: Options) -> list[Module]:
        """Modules with a three-dimensional qweight and a tensor alpha_{p}."""
        precisions: dict[str, list[int]] = {}
        for tensor in source.tensors:
            match = _ALPHA.fullmatch(tensor)
            if match and f"{match[1]}.qweight" in source.tensors:
                precisions.setdefault(match[1], []).append(int(match[2]))
        return [self._module(source, name, sorted(found)) for name, found in precisions.items()]

    def convert(self, module: Module, options: Options) -> Converted:
        """Planes when asked for; alphas and betas now."""
        s, tensors = module.settings, module.tensors
        n, k, bits = s["n"], s["k"], s["bits"]
        alpha, beta = tensors[f"alpha_{bits}"], tensors[f"beta_{bits}"]
        segment = Segment(
            encoding="bcq",
            bits=bits,
            group_size=s["group_size"],
            alpha=alpha.dtype,
            bias=beta.dtype,
            precisions=tuple(p for p in s["precisions"] if p != bits),
        )
        floats: dict[str, tuple[StoredTensor, bool]] = {}
        rules: dict[str, Rule] = {"qweight": {"rule": "anybcq.qweight"}}
        for p in (bits, *segment.precisions):
            part = "" if p == bits else f"_p{p}"
            floats[f"s0_alpha{part}"] = (_turned(tensors[f"alpha_{p}"]), False)
            floats[f"s0_bias{part}"] = (tensors[f"beta_{p}"], True)
            rules[f"alpha_{p}"] = {"rule": "anybcq.alpha", "part": f"s0_alpha{part}"}
            rules[f"beta_{p}"] = {"rule": "part", "part": f"s0_bias{part}", "transpose": True}

        def planes() -> Array:
            return words.anybcq_to_planes(tensors["qweight"].array(), options.threads)

        weight = segment_weight(module, segment, (n, k), floats, {}, None, planes, options)
        return Converted(weight, rules, {"qweight": "s0_planes"})

    def rebuilders(self) -> Mapping[str, Rebuilder]:
        return {
            "anybcq.qweight": Rebuilder(lambda weight, _: words.planes_to_anybcq(weight.planes()[0]), _fits),
            "anybcq.alpha": Rebuilder(
                lambda weight, rule: weight.parts()[rule["part"]].array().transpose(2, 0, 1),
                _fits,
                {"part": lambda spec, _: [part for part in spec.parts() if part.startswith("s0_alpha")]},
            ),
        }

    def _module(self, source: SourceCheckpoint, name: str, precisions: list[int]) -> Module:
        kinds: Kinds = {f"{kind}_{p}": (FLOATS, (r,)) for p in precisions for kind, r in (("alpha", 3), ("beta", 2))}
        tensors = gather(source, name, {"qweight": (("I32",), (3,)), **kinds})
        qweight = tensors["qweight"]
        blocks, bits, n = qweight.shape
        k = 32 * blocks
        if bits > 8:
            raise error("BCQ-E608", source.folder.name, name, f"{bits} planes", "at most 8")
        if precisions[-1] != bits:
            found = f"{bits} planes and numbers for precisions {', '.join(map(str, precisions))}"
            raise error("BCQ-E603", source.home[qweight.name], name, found, f"alpha_{bits} and beta_{bits}")
        size = _group_size(source, name, tensors[f"alpha_{bits}"], k)
        why = f"for {n} x {k}, {bits} planes and groups of {size} in the AnyBCQ layout"
        for p in precisions:
            expect(source, tensors[f"alpha_{p}"], (tensors[f"alpha_{bits}"].dtype,), (k // size, p, n), why)
            expect(source, tensors[f"beta_{p}"], (tensors[f"beta_{bits}"].dtype,), (k // size, n), why)
        _check_configuration(source, name, bits, size)
        resolved = {
            "bits": bits,
            "group_size": size,
            "n": n,
            "k": k,
            "precisions": precisions,
            "values": "specification",
        }
        return Module(name, self.name, tensors, resolved)


def _group_size(source: SourceCheckpoint, name: str, alpha: StoredTensor, columns: int) -> int:
    """What the number of groups makes of the columns; AnyBCQ has full groups only."""
    groups = alpha.shape[0]
    if columns % groups:
        found = f"{groups} groups"
        raise error("BCQ-E604", source.home[alpha.name], alpha.name, found, f"a divisor of {columns} columns")
    if columns // groups < 8:
        raise error("BCQ-E608", source.folder.name, name, f"groups of {columns // groups} columns", "8 and more")
    return columns // groups


def _check_configuration(source: SourceCheckpoint, name: str, bits: int, size: int) -> None:
    stated = source.config.get("anybcq")
    if not isinstance(stated, dict):
        return
    for key, value in (("parent_precision", bits), ("group_size", size)):
        if stated.get(key) not in (None, value, -1):
            found = f"{key} is {stated[key]!r} in config.json, {value} in the tensors"
            raise error("BCQ-E602", source.folder.name, name, found, "the same reading from both")


def _turned(tensor: StoredTensor) -> StoredTensor:
    """[G, p, N] as [p, N, G]."""
    groups, p, n = tensor.shape
    return StoredTensor(tensor.name, tensor.dtype, (p, n, groups), make=lambda: tensor.array().transpose(1, 2, 0))


def _fits(spec: WeightSpec) -> bool:
    return plain(spec, "bcq")
