"""The GPTQ layout of AutoGPTQ, GPTQModel, optimum and auto-round, with its variants.

| tensor | dtype | shape | content |
|---|---|---|---|
| qweight | I32 | [K*b/32, N] | codes, a bit stream along K for every column n (planar in `gptq_p`) |
| qzeros | I32 | [G, N*b/32] | zero fields, a bit stream along N for every group; zp - 1 (v1) or zp (v2) |
| scales | F16, BF16, F32 | [G, N] | |
| g_idx | I32 | [K] | group of every column; absent, trivial, scattered (act order) or negative |

The shapes name no width: b comes from the configuration and is checked against three shapes. Zero points read
differently from tool to tool (``gptq_zeros.py``). Group membership is what ``g_idx`` says, whatever ``desc_act`` says.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from bcqfmt.checkpoint.folder import CONFIG
from bcqfmt.container.dtypes import FLOATS
from bcqfmt.container.stored_tensor import StoredTensor
from bcqfmt.converters import words
from bcqfmt.converters.source.checkpoint import SourceCheckpoint
from bcqfmt.converters.source.quant_config import AUTO_ROUND, Settings, read_settings
from bcqfmt.converters.words.buffers import new_array
from bcqfmt.errors import error, escape
from bcqfmt.weight.packing import words_for
from bcqfmt.weight.scheme import WeightSpec
from bcqfmt.weight.weight import BcqWeight

from .awq import is_gemv
from .g_idx import group_index, permutation
from .gptq_zeros import choose_rule, decode_zeros, encode_zeros, rules_for
from .protocol import Converted, Module, Options, Rebuilder, Rule
from .tensors import columns_per_group, expect, gather
from .uniform import affine_weight, plain, zero_points_of

Array = npt.NDArray[Any]
_TENSORS: Final = {
    "qweight": (("I32",), (2,)),
    "qzeros": (("I32",), (2,)),
    "scales": (FLOATS, (2,)),
    "g_idx": (("I32", "I64"), (1,)),
}

_STRIP = 1 << 23  # bytes of planes that become words while they are in the cache


class Gptq:
    """`qweight` packed along the input dimension."""

    name = "gptq"

    def modules(self, source: SourceCheckpoint, options: Options) -> list[Module]:
        """Modules whose scales are as wide as qweight."""
        settings = read_settings(source)
        found = [self._module(source, settings, name) for name in _prefixes(source, settings)]
        if found:
            _compare_readings(source, settings, options.zero_point)
        for bits in sorted({module.settings["bits"] for module in found}):
            chosen = [module for module in found if module.settings["bits"] == bits]
            rule = _zero_rule(settings, bits, chosen, options)
            for module in chosen:
                module.settings["zero_point"] = rule
        return found

    def convert(self, module: Module, options: Options) -> Converted:
        """Planes from qweight when asked for; zeros, scales and g_idx now."""
        s, tensors = module.settings, module.tensors
        bits, n, k = s["bits"], s["n"], s["k"]
        perm = permutation(tensors["g_idx"].array(), k, s["group_size"], module.name) if "g_idx" in tensors else None
        qzeros = tensors["qzeros"].array().view(np.uint32)
        word = _only_word(qzeros)
        how = bits, n, s["planar"], s["zero_point"]
        zeros = _zero_points(qzeros, *how) if word is None else _same_zero_points(word, qzeros.shape, *how)

        proof: list[bool] = []

        def planes() -> Array:
            packed = tensors["qweight"].array()
            if s["planar"]:
                return words.planar_to_planes(packed, bits, k, options.threads, perm)
            return words.gptq_to_planes(packed, bits, k, options.threads, perm, proof)

        weight = affine_weight(
            module, (n, k), bits, s["group_size"], tensors["scales"], True, zeros, perm, planes, options
        )
        layout = {"bits": bits, **({"planar": True} if s["planar"] else {})}
        rules: dict[str, Rule] = {
            "qweight": {"rule": "gptq.qweight", **layout},
            "qzeros": {"rule": "gptq.qzeros", **layout, "zero_point": s["zero_point"]},
            "scales": {"rule": "part", "part": "s0_scale", "transpose": True},
        }
        if "g_idx" in tensors:
            rules["g_idx"] = {"rule": "g_idx"}
        return Converted(weight, rules, {"qweight": "s0_planes"}, {"qweight": proof})

    def rebuilders(self) -> Mapping[str, Rebuilder]:
        return _REBUILDERS

    def _module(self, source: SourceCheckpoint, settings: Settings, name: str) -> Module:
        tensors = gather(source, name, _TENSORS, ("g_idx",))
        own = settings.of(name)
        bits, group = own["bits"], own["group_size"]
        if bits is None or group is None:
            found = "no bits or group_size in any configuration"
            raise error("BCQ-E602", source.folder.name, name, found, "both", _correction(source, tensors))
        rows, n = tensors["qweight"].shape
        planar = settings.format == "gptq_p"
        allowed = (2, 3, 4, 5, 6, 7, 8) if planar else (2, 3, 4, 8)
        if bits not in allowed:
            raise error("BCQ-E608", source.folder.name, name, f"{bits} bits", f"one of {allowed} in this layout")
        k = tensors["g_idx"].shape[0] if "g_idx" in tensors else rows * 32 // bits
        g = columns_per_group(source, name, group, k)
        groups = -(-k // g)
        expected = {"qweight": (words_for(k, bits), n), "qzeros": (groups, words_for(n, bits)), "scales": (groups, n)}
        why = f"for {bits} bits, group size {group} and {k} x {n} in the GPTQ layout"
        for suffix, shape in expected.items():
            dtypes = FLOATS if suffix == "scales" else ("I32",)
            expect(source, tensors[suffix], dtypes, shape, why, _correction(source, tensors, (bits, g)))
        resolved = {
            "bits": bits,
            "group_size": g,
            "row": group == -1,
            "n": n,
            "k": k,
            "planar": planar and bits not in (2, 4, 8),
            "sym": own["sym"],
            "desc_act": own.get("desc_act"),
        }
        return Module(name, self.name, tensors, resolved)


def _correction(
    source: SourceCheckpoint, tensors: Mapping[str, StoredTensor], stated: tuple[int, int] | None = None
) -> str | None:
    """What the configuration should say, to judge by shapes; None where that is unknown, or ``stated`` already."""
    (rows, n), (groups, zero_words) = tensors["qweight"].shape, tensors["qzeros"].shape
    bits = max(1, zero_words * 32 // n)
    columns = rows * 32 // bits
    if words_for(n, bits) != zero_words or columns % groups or (bits, columns // groups) == stated:
        return None
    said = f'"bits": {bits}, "group_size": {columns // groups}'
    if source.quant:
        return f"correct {' and '.join(source.quant)}: the shapes are those of {said}"
    entry = f'"quantization_config": {{"quant_method": "gptq", {said}}}'
    return f"get the model's own configuration again, or write what the shapes tell into {CONFIG}: {entry}"


def _prefixes(source: SourceCheckpoint, settings: Settings) -> list[str]:
    """Modules with I32 qweight of two dimensions whose columns are those of scales, or that have no scales at all."""
    found = []
    for name, tensor in source.tensors.items():
        if name.endswith(".qweight") and tensor.dtype == "I32" and len(tensor.shape) == 2:
            scales = source.tensors.get(name.removesuffix("qweight") + "scales")
            prefix = name.removesuffix(".qweight")
            if is_gemv(source, settings, prefix):  # the same shapes can occur there
                continue
            if scales is None or (len(scales.shape) == 2 and scales.shape[1] == tensor.shape[1]):
                found.append(prefix)
    return found


def _zero_rule(settings: Settings, bits: int, modules: list[Module], options: Options) -> str:
    """One rule for all modules of a width; BCQ-E605 where symmetric zero points contradict the configuration."""
    version = _zero_version(settings)
    ones = False
    fields_seen: set[int] = set()
    ranges: dict[tuple[int, int, bool], tuple[int, int]] = {}
    for module in modules:
        s = module.settings
        low, high = _zero_range(module.tensors["qzeros"].array().view(np.uint32), bits, s["n"], s["planar"], ranges)
        ones = ones or high == 2**bits - 1
        if s["sym"]:
            fields_seen.update((low, high))
    rule = choose_rule(options.zero_point, version, bits, settings.tool, ones)
    middle = 2 ** (bits - 1)
    if options.zero_point == "auto" and rule != "v1-gptqmodel-3bit" and len(fields_seen) == 1:
        (field,) = fields_seen
        reading = "v2" if field == middle else "v1"
        if field in (middle, middle - 1) and (field == middle) != (rule == "v2"):
            found = f"symmetric zero fields are {field}: {reading}; the configuration says {escape(str(version))}"
            hint = "choose: --zero-point v2 or v1-nowrap; --against MODEL, the model before quantization, tries both"
            raise error("BCQ-E605", found=found, expected="zero points that fit the configuration", hint=hint)
    return rule


def _zero_range(
    qzeros: Array, bits: int, n: int, planar: bool, known: dict[tuple[int, int, bool], tuple[int, int]]
) -> tuple[int, int]:
    """The smallest and the largest zero field. Equal words, as in symmetric files, are unpacked once."""
    word = _only_word(qzeros)
    if word is not None and (word, n, planar) in known:
        return known[word, n, planar]
    fields = _zero_fields(qzeros if word is None else qzeros[:1], bits, n, planar)
    found = int(fields.min(initial=255)), int(fields.max(initial=0))
    if word is not None:
        known[word, n, planar] = found
    return found


def _compare_readings(source: SourceCheckpoint, settings: Settings, asked: str) -> None:
    """BCQ-E655 when zero points are read otherwise than the configuration says, because the user asked for it."""
    says_so = settings.method in AUTO_ROUND or settings.format in ("gptq", "gptq_v2", "gptq_p")
    version = _zero_version(settings)
    if asked != "auto" and says_so and version is not None and (asked == "v2") != (version == "gptq_v2"):
        source.warn("BCQ-E655", f"--zero-point {asked}; the configuration says {version}")


def _zero_version(settings: Settings) -> str | None:
    """``gptq`` (zero point minus one) or ``gptq_v2``; None where an old auto-round does not tell."""
    if settings.method in AUTO_ROUND:
        packing = settings.packing or ""
        if "gptq" in packing and "gptqmodel" not in packing:
            return "gptq"
        own = packing.replace("-", "_").startswith(("auto_round", "autoround"))
        if settings.method == "auto-round" or (own and "gptq" not in packing and "awq" not in packing):
            return "gptq_v2"
        tool, version = settings.tool or ("", ())
        by_autogptq = not packing and tool == "auto-round" and version < (0, 3)  # its exporter names no backend
        if settings.format is None and not by_autogptq:
            return None
    return "gptq_v2" if settings.format in ("gptq_v2", "gptq_p") else "gptq"


def _only_word(qzeros: Array) -> int | None:
    """The word, if all are the same."""
    return int(qzeros.flat[0]) if qzeros.size and (qzeros == qzeros.flat[0]).all() else None


def _zero_points(qzeros: Array, bits: int, n: int, planar: bool, rule: str) -> Array:
    """(N, G) from words (G, W)."""
    fields = _zero_fields(qzeros, bits, n, planar)
    return decode_zeros(qzeros, fields, bits, rule, lambda w: _zero_fields(w, bits, n, planar)).T


@lru_cache(8)
def _same_zero_points(word: int, shape: tuple[int, ...], bits: int, n: int, planar: bool, rule: str) -> int | Array:
    """Zero points of equal words, made once for all modules that have them; an integer where they are equal, too."""
    zeros = _zero_points(np.full(shape, word, np.uint32), bits, n, planar, rule)
    low, high = int(zeros.min()), int(zeros.max())
    return low if low == high else zeros


def _zero_fields(qzeros: Array, bits: int, n: int, planar: bool) -> Array:
    unpack = words.planar_columns_to_codes if planar else words.stream_columns_to_codes
    return unpack(qzeros, bits, n)


def _qweight(weight: BcqWeight, rule: Rule) -> Array:
    """Some rows of planes at a time, which are columns of words."""
    parts = weight.to_canonical().parts()
    perm = parts["perm"].array() if weight.scheme.perm else None
    back = words.planes_to_planar if rule.get("planar") else words.planes_to_gptq
    bits, (n, k) = rule["bits"], weight.shape
    found = new_array((words_for(k, bits), n), np.uint32)
    step = max(1, _STRIP // (words_for(k, 1) * bits * 256)) * 64  # cache lines of words
    for first in range(0, n, step):
        stop = min(first + step, n)
        planes = parts["s0_planes"].read((0, bits), (first, stop))
        back(planes, bits, k, perm=perm, out=found[:, first:stop])
        del planes  # the next ones take its memory
    return found


def _qzeros(weight: BcqWeight, rule: Rule) -> Array:
    zero, how = weight.scheme.segments[0].zero, (rule["bits"], bool(rule.get("planar")), rule["zero_point"])
    if isinstance(zero, int):
        return _same_words(zero, weight.spec.groups(0), weight.shape[-2], *how)
    return _zero_words(np.ascontiguousarray(zero_points_of(weight).T), *how)


def _zero_words(zeros: Array, bits: int, planar: bool, rule: str) -> Array:
    """Words (G, W) from zero points (G, N)."""
    pack = words.codes_to_planar_columns if planar else words.codes_to_stream_columns
    return encode_zeros(zeros, bits, rule, lambda fields: pack(fields.astype(np.uint8), bits))


@lru_cache(8)
def _same_words(zero: int, groups: int, n: int, bits: int, planar: bool, rule: str) -> Array:
    """Words (G, W) of equal zero points, as in symmetric files; made once for all modules that have them."""
    made = _zero_words(np.full((groups, n), zero, np.uint16), bits, planar, rule)
    made.flags.writeable = False
    return made


def _g_idx(weight: BcqWeight, rule: Rule) -> Array:
    perm = weight.parts()["perm"].array() if weight.scheme.perm else None
    return group_index(perm, weight.shape[1], weight.scheme.segments[0].group_size)


def _bits(spec: WeightSpec, rule: Rule) -> list[int]:
    return [spec.scheme.segments[0].bits]


_REBUILDERS: Final = {
    "gptq.qweight": Rebuilder(
        _qweight, plain, {"bits": _bits}, {"planar": lambda spec, _: [] if spec.columns % 32 else [True]}
    ),
    "gptq.qzeros": Rebuilder(
        _qzeros,
        plain,
        {"bits": _bits, "zero_point": lambda spec, _: rules_for(spec.scheme.segments[0].bits)},
        {"planar": lambda spec, _: [] if spec.out % 32 else [True]},
    ),
    "g_idx": Rebuilder(_g_idx, lambda spec: len(spec.shape) == 2),
}
