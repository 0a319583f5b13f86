"""Checkpoints of other tools: the real tiny ones under tests/data/peers, and made-up ones with any words in them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401 - with it numpy, and so safetensors, knows bfloat16
import numpy as np
import numpy.typing as npt
import pytest
import safetensors.numpy
from hypothesis import HealthCheck, settings

from bcqfmt.converters.layouts.protocol import Converted, Layout, Module, Options
from bcqfmt.converters.layouts.rebuild import apply_rule
from bcqfmt.converters.source.checkpoint import SourceCheckpoint, open_source
from bcqfmt.errors import BcqError
from weights.strategies import EXPLORE

PEERS = Path(__file__).resolve().parents[2] / "data" / "peers"
WITH_TOKENIZER = PEERS / "gptqmodel-gptq_v2-4b-g64-asym-desc_act" / "source"  # a model that can write text
OPTIONS = Options()
Array = npt.NDArray[Any]

# the same examples every time, unless BCQ_EXPLORE asks for others
any_words = settings(
    derandomize=EXPLORE == 1,
    database=None,
    deadline=None,
    max_examples=40 * EXPLORE,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture],
)


def peer(kind: str) -> SourceCheckpoint:
    """A real checkpoint."""
    return open_source(PEERS / kind / "source")


def references(kind: str, stem: str = "reference") -> tuple[dict[str, str], dict[str, Array]]:
    """SHA-256 of every dequantized weight, and some of the weights themselves, by the tool's own code."""
    lines = (PEERS / kind / f"{stem}.sha256").read_text().splitlines()
    sums = {name: digest for digest, name in (line.split() for line in lines)}
    return sums, safetensors.numpy.load_file(PEERS / kind / f"{stem}.safetensors")


def made_up(
    folder: Path, tensors: Mapping[str, Array], quantization: Mapping[str, Any] | None = None, **config: Any
) -> SourceCheckpoint:
    """A checkpoint of these tensors; a folder that is there already is overwritten."""
    folder.mkdir(exist_ok=True, parents=True)
    safetensors.numpy.save_file(
        {name: np.ascontiguousarray(a) for name, a in tensors.items()}, folder / "model.safetensors"
    )
    stated = {} if quantization is None else {"quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **stated, **config}))
    return open_source(folder)


def only_module(layout: Layout, source: SourceCheckpoint) -> Module:
    """The one module that the layout finds."""
    (module,) = layout.modules(source, OPTIONS)
    return module


def refusal(layout: Layout, source: SourceCheckpoint, options: Options = OPTIONS) -> BcqError:
    """The error that finding or converting the modules ends with."""
    with pytest.raises(BcqError) as caught:
        _convert_everything(layout, source, options)
    assert str(caught.value)
    return caught.value


def _convert_everything(layout: Layout, source: SourceCheckpoint, options: Options) -> None:
    for module in layout.modules(source, options):
        for part in layout.convert(module, options).weight.parts().values():
            part.array()


def not_rebuilt(layout: Layout, module: Module, converted: Converted) -> list[str]:
    """Tensors of the module whose rule does not give their bytes again; the weight's content is checked too."""
    converted.weight.check()
    assert set(converted.rules) == set(module.tensors)
    assert set(converted.heavy) <= set(module.tensors)
    assert set(converted.heavy.values()) <= set(converted.weight.parts())
    json.dumps(converted.rules)
    wrong = []
    for suffix, tensor in module.tensors.items():
        rebuilt = apply_rule(converted.weight, converted.rules[suffix], layout.rebuilders())
        if np.ascontiguousarray(rebuilt).tobytes() != tensor.tobytes() or rebuilt.shape != tensor.shape:
            wrong.append(suffix)
    return wrong


def check_peer(layout: Layout, kind: str, stem: str = "reference") -> list[Module]:
    """Every module found, every value that of the tool, every tensor rebuilt byte for byte."""
    source = peer(kind)
    sums, arrays = references(kind, stem)
    modules = layout.modules(source, OPTIONS)
    assert {module.weight_name for module in modules} == set(sums)
    for module in modules:
        converted = layout.convert(module, OPTIONS)
        values = converted.weight.dequantize()
        assert hashlib.sha256(values.tobytes()).hexdigest() == sums[module.weight_name], module.name
        if module.weight_name in arrays:
            assert values.tobytes() == arrays[module.weight_name].tobytes()
        assert not_rebuilt(layout, module, converted) == []
    return modules


def words(rng: np.random.Generator, *shape: int) -> npt.NDArray[np.int32]:
    """Random words; all 2^32 of them may occur."""
    return rng.integers(0, 2**32, shape, dtype=np.uint64).astype(np.uint32).view(np.int32)


def halves(rng: np.random.Generator, *shape: int) -> npt.NDArray[np.float16]:
    """Random finite float16 bits: negative, zero and subnormal ones among them."""
    bits = rng.integers(0, 0x7C00, shape, dtype=np.uint16) | (rng.integers(0, 2, shape, dtype=np.uint16) << 15)
    return bits.astype(np.uint16).view(np.float16)


def stream(row: Array, bits: int, count: int) -> list[int]:
    """Codes of a little-endian bit stream, by arithmetic on one long integer."""
    number = sum(int(word) << (32 * i) for i, word in enumerate(np.asarray(row).view(np.uint32)))
    return [(number >> (bits * j)) & (2**bits - 1) for j in range(count)]


def slots(row: Array, bits: int, count: int) -> list[int]:
    """Codes of words that hold whole codes only."""
    per = 32 // bits
    return [(int(np.uint32(row.view(np.uint32)[j // per])) >> (bits * (j % per))) & (2**bits - 1) for j in range(count)]


def affine_values(codes: Array, scale: Array, zeros: Array, group: Array) -> Array:
    """RN(s * (q - z)) with ``group`` the group of every column; scale and zeros (N, G)."""
    with np.errstate(over="ignore"):
        exact = scale.astype(np.float64)[:, group] * (codes.astype(np.float64) - zeros.astype(np.float64)[:, group])
        return exact.astype(scale.dtype)
