"""Sources that are wrong in one place: every layout, every tensor and every key of the configuration.

A source is a valid one of a layout with one tensor or one value replaced. Some of the replacements are harmless, most
are not; none may lead to anything but a result or an error with a code.
"""

from __future__ import annotations

import copy
import json
import math
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sources import awq_samples
from sources import compressed_samples as ct
from sources.conversions import GPTQ, gptq_layer
from sources.peers import halves, words

Tensor = tuple[str, list[int], bytes]  # type, shape, content
_NAMES = {"int8": "I8", "uint8": "U8", "int16": "I16", "int32": "I32", "int64": "I64", "float16": "F16"}
_BYTES = {"F64": 8, "F16": 2, "BF16": 2, "F8_E4M3": 1, "BOOL": 1, "I8": 1, "U8": 1, "I16": 2, "U32": 4, "I64": 8}
_BYTES |= {"I32": 4, "F32": 4, "C64": 8}
_VALUES = (
    "null", "true", "0", "-1", "1", "3", "5", "16", "33", "2147483648", "9007199254740993", "1e400", "4.0", "NaN", '""',
    '"4"', '"x"', "[]", "[[4]]", "{}", '{"a": {"b": 4}}', "1" * 4000, "1" * 5000, '"\\ud800"', '"' + "9" * 5000 + '"',
)  # fmt: skip
_PATTERNS = (
    "(((((a*)*)*)*)*)*b",
    "(" * 3000 + ")" * 3000,
    "a{99999999999}",
    "(?P<n>m)(?P=n)",
    "(a|a)*" * 20,
    "[",
    "\\",
    ".*",
)
_ADDED = (
    *({"dynamic": {pattern: {"bits": 4}}} for pattern in _PATTERNS),
    *({"extra_config": {pattern: {"bits": 4}}} for pattern in _PATTERNS),
    *({key: {".*": value}} for key in ("dynamic", "extra_config") for value in (5, None, [], "x", {"bits": [4]})),
    *({key: {".*": {"bits": bits}}} for key in ("dynamic", "extra_config") for bits in (0, 3, 4.0, "4", None, 1e9)),
    *({"meta": {"quantizer": value}} for value in (["gptqmodel:" + "9" * 5000], "gptqmodel:", {"a": 1}, [[]], 7)),
    *({"meta": value} for value in (None, [], "x", 5)),
    *({"autoround_version": value} for value in ("9" * 5000, 5, None)),
    *({"packing_format": value} for value in ("auto_round:gptq", 5)),
    *({"config_groups": value} for value in ({"g": {"targets": [f"re:{p}"], "weights": {}}} for p in _PATTERNS)),
    *({"config_groups": value} for value in ([], {"a": None}, {"a": {"weights": 5}}, {"a": {"weights": {}}})),
    *({"sparsity_config": value} for value in ([], {"format": []}, "x")),
    *({"modules_to_not_convert": value} for value in (5, [5], {"a": 5})),
)


class Source(NamedTuple):
    """A source: ``what`` is wrong with it, its tensors, and its config.json as text."""

    what: str
    tensors: dict[str, Tensor]
    config: str

    def write(self, folder: Path) -> Path:
        """The folder, with a file beside the model."""
        folder.mkdir(parents=True)
        header, offset = {}, 0
        for name, (dtype, shape, data) in self.tensors.items():
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + len(data)]}
            offset += len(data)
        text = json.dumps(header).encode()
        data = b"".join(data for _, _, data in self.tensors.values())
        (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)
        (folder / "config.json").write_text(self.config)
        (folder / "tokenizer.json").write_text("{}")
        return folder


def _hqq(rng: np.random.Generator) -> dict[str, Any]:
    numbers = {"nbits": 4, "group_size": 16, "axis": 1}
    texts = {"packing": "4bit_u8", "compute_dtype": "torch.float16"}
    return {
        "m.W_q": rng.integers(0, 256, (16, 16)).astype(np.uint8),
        "m.scale": halves(rng, 32, 1),
        "m.zero": halves(rng, 32, 1),
        "m.shape": np.array([16, 32], np.int64),
        **{f"m.{key}": np.array(value, np.int32) for key, value in numbers.items()},
        **{f"m.{key}": np.frombuffer(value.encode(), np.uint8) for key, value in texts.items()},
        "m.view_as_float": np.array(0, np.uint8),
    }


def _anybcq(rng: np.random.Generator) -> dict[str, Any]:
    tensors: dict[str, Any] = {"m.qweight": words(rng, 2, 3, 8)}
    for p in (2, 3):
        tensors |= {f"m.alpha_{p}": halves(rng, 4, p, 8), f"m.beta_{p}": halves(rng, 4, 8)}
    return tensors


def _gptq(rng: np.random.Generator) -> dict[str, Any]:
    return {f"m.{suffix}": array for suffix, array in gptq_layer(rng, 32, 64, 32).items()}


def _plain(rng: np.random.Generator) -> dict[str, Any]:
    zeros = rng.integers(-8, 8, (16, 1)).astype(np.int8)
    scale = halves(rng, 16, 1)
    return {
        "m.weight": rng.integers(-128, 128, (16, 32)).astype(np.int8),
        "m.weight_scale": scale,
        "m.weight_zero_point": zeros,
    }


def _packed(rng: np.random.Generator) -> dict[str, Any]:
    return {**ct.made(rng, (16, 64), 4, 32, True, True), "m.weight_g_idx": (np.arange(64) // 32).astype(np.int32)}


def _experts(rng: np.random.Generator) -> dict[str, Any]:
    return ct.made(rng, (2, 8, 64), 3, 32, True, False)


def _dense(rng: np.random.Generator) -> dict[str, Any]:
    names = ("model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.experts.w1", "model.embed_tokens.weight")
    shapes = ((16, 64), (2, 16, 64), (16, 64))
    return {name: rng.standard_normal(shape).astype(np.float16) for name, shape in zip(names, shapes, strict=True)}


_PACKED = ct.config(ct.group(ct.weights(symmetric=False)))
BASES: dict[str, tuple[Callable[[np.random.Generator], dict[str, Any]], dict[str, Any]]] = {
    "gptq": (_gptq, GPTQ),
    "gptq_p": (lambda rng: {f"m.{s}": a for s, a in gptq_layer(rng, 32, 64, 32, 6).items()},
               {**GPTQ, "bits": 6, "checkpoint_format": "gptq_p"}),
    "awq gemm": (lambda rng: awq_samples.gemm(rng, 32, 64, 32), awq_samples.config()),
    "awq gemv": (lambda rng: awq_samples.gemv(rng, 16, 256, 64), awq_samples.config("gemv", 64)),
    "awq gemv-fast": (lambda rng: awq_samples.gemv_fast(rng, 16, 256, 64), awq_samples.config("gemv_fast", 64)),
    "compressed-tensors": (_packed, _PACKED),
    "compressed-tensors, experts": (_experts, ct.config(ct.group(ct.weights(3)))),
    "compressed-tensors, bytes": (_plain, ct.config(ct.group(ct.weights(8, None, False), "re:m"))),
    "hqq": (_hqq, {"quant_method": "hqq", "quant_config": {"weight_quant_params": {"nbits": 4, "axis": 1}}}),
    "dense": (_dense, {}),
    "anybcq": (_anybcq, {"quant_method": "anybcq", "anybcq": {"parent_precision": 3, "group_size": 16}}),
}  # fmt: skip


def sound(layout: str) -> Source:
    """The source with nothing wrong."""
    make, quantization = BASES[layout]
    arrays = {**make(np.random.default_rng(0)), "norm.weight": np.ones(8, np.float16)}
    tensors = {
        name: (_NAMES[a.dtype.name], list(a.shape), np.ascontiguousarray(a).tobytes()) for name, a in arrays.items()
    }
    own = {"anybcq": quantization["anybcq"]} if "anybcq" in quantization else {}
    config = {"model_type": "llama", "quantization_config": quantization, **own}
    return Source(layout, tensors, json.dumps(config))


def malformed() -> Iterator[Source]:
    """All of them, some thousands, always in the same order."""
    for layout in BASES:
        base = sound(layout)
        yield from _wrong_tensors(base)
        yield from _wrong_values(base)


def _wrong_tensors(base: Source) -> Iterator[Source]:
    for name, tensor in base.tensors.items():
        for what, wrong in _variants(*tensor):
            changed = dict(base.tensors)
            if wrong is None:
                del changed[name]
            else:
                changed[name] = wrong
            yield base._replace(what=f"{base.what}: {name} {what}", tensors=changed)


def _variants(dtype: str, shape: list[int], data: bytes) -> Iterator[tuple[str, Tensor | None]]:
    yield "missing", None
    for other in (other for other in _BYTES if other != dtype):
        yield f"of type {other}", _filled(other, shape)
        if _BYTES[other] == _BYTES[dtype]:
            yield f"called {other}", (other, shape, data)
    shapes = [
        [],
        [0],
        [0, 0],
        [1],
        [1, 1],
        [2, 1, 1, 1],
        shape[::-1],
        shape[:-1],
        [*shape, 1],
        [1, *shape],
        [math.prod(shape)],
    ]
    for axis in range(len(shape)):
        shapes += [
            [*shape[:axis], dim, *shape[axis + 1 :]]
            for dim in (0, 1, shape[axis] + 1, shape[axis] - 1, 2 * shape[axis])
        ]
    for other_shape in shapes:
        if other_shape != shape:
            yield f"of shape {other_shape}", _filled(dtype, other_shape)
    for byte in (0x00, 0x7F, 0x80, 0xFF):
        yield f"of bytes {byte:02x}", _filled(dtype, shape, byte)


def _filled(dtype: str, shape: list[int], byte: int = 1) -> Tensor:
    return dtype, shape, bytes([byte]) * (math.prod(shape) * _BYTES[dtype])


def _wrong_values(base: Source) -> Iterator[Source]:
    config = json.loads(base.config)
    for path in _paths(config):
        where = ".".join(map(str, path))
        for value in _VALUES:
            yield base._replace(what=f"{base.what}: {where} = {value[:30]}", config=_with(config, path, value))
        yield base._replace(what=f"{base.what}: without {where}", config=_with(config, path, None))
    for added in _ADDED:
        stated = {**config, "quantization_config": {**config["quantization_config"], **added}}
        yield base._replace(what=f"{base.what}: with {str(added)[:80]}", config=json.dumps(stated))


def _paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from _paths(inner, (*path, key))


def _with(config: dict[str, Any], path: tuple[Any, ...], value: str | None) -> str:
    """The text of a configuration with the value at ``path`` replaced by a JSON text, or left out."""
    changed = copy.deepcopy(config)
    inner: Any = changed
    for key in path[:-1]:
        inner = inner[key]
    if value is None:
        del inner[path[-1]]
        return json.dumps(changed)
    inner[path[-1]] = "@@"
    return json.dumps(changed).replace('"@@"', value)
