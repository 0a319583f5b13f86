"""One small source folder for every layout and rule, so that each rule occurs in some record."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from bcqfmt.container.gguf.types import TYPES
from bcqfmt.converters.gguf.kinds import KINDS
from sources import awq_samples as awq
from sources import compressed_samples as compressed
from sources.conversions import GPTQ, gptq_layer
from sources.gguf_files import Writer
from sources.peers import halves, made_up, words

N, K, GROUP = 64, 128, 32


def _gptq(folder: Path, rng: np.random.Generator) -> None:
    layer = gptq_layer(rng, N, K, GROUP)
    layer["g_idx"] = rng.permutation(layer["g_idx"])
    made_up(folder, {f"m.{suffix}": array for suffix, array in layer.items()}, GPTQ)


def _planar(folder: Path, rng: np.random.Generator) -> None:
    layer = gptq_layer(rng, N, K, GROUP, 3)
    settings = {**GPTQ, "bits": 3, "checkpoint_format": "gptq_p"}
    made_up(folder, {f"m.{suffix}": array for suffix, array in layer.items()}, settings)


def _gemm(folder: Path, rng: np.random.Generator) -> None:
    made_up(folder, awq.gemm(rng, N, K, GROUP), awq.config())


def _gemv(folder: Path, rng: np.random.Generator) -> None:
    made_up(folder, awq.gemv(rng, N, K, GROUP), awq.config("gemv"))


def _fast(folder: Path, rng: np.random.Generator) -> None:
    made_up(folder, awq.gemv_fast(rng, N, K, GROUP), awq.config("gemv_fast"))


def _packed(folder: Path, rng: np.random.Generator) -> None:
    tensors = compressed.made(rng, (N, K), 4, GROUP, True, True)
    tensors["m.weight_g_idx"] = rng.permutation(np.arange(K) // GROUP).astype(np.int32)
    settings = compressed.weights(4, GROUP, False, actorder="group")
    made_up(folder, tensors, compressed.config(compressed.group(settings)))


def _experts(folder: Path, rng: np.random.Generator) -> None:
    """A stack, three bits in slots, one scale for a row, no order (-1)."""
    tensors = compressed.made(rng, (2, N, K), 3, K, False, False)
    tensors["m.weight_scale"] = halves(rng, N, 1)
    tensors["m.weight_g_idx"] = np.full(K, -1, np.int32)
    settings = compressed.weights(3, None)
    made_up(folder, tensors, compressed.config(compressed.group(settings), version="0.15.0"))


def _bytes(folder: Path, rng: np.random.Generator) -> None:
    """One byte a number, one scale and zero point for the whole."""
    tensors = {
        "m.weight": rng.integers(-128, 128, (N, K)).astype(np.int8),
        "m.weight_scale": halves(rng, 1),
        "m.weight_zero_point": np.array([3], np.int8),
    }
    settings = compressed.weights(8, None, False, strategy="tensor")
    made_up(folder, tensors, compressed.config(compressed.group(settings), format="int-quantized"))


def _hqq(folder: Path, rng: np.random.Generator) -> None:
    rows = N * K // 64
    tensors: dict[str, Any] = {
        "m.W_q": rng.integers(0, 256, (rows // 2, 64)).astype(np.uint8),
        "m.scale": halves(rng, rows, 1),
        "m.zero": halves(rng, rows, 1),
        "m.nbits": np.array(4, np.int32),
        "m.group_size": np.array(64, np.int32),
        "m.axis": np.array(1, np.int32),
        "m.shape": np.array([N, K]),
    }
    made_up(folder, tensors, {"quant_method": "hqq"})


def _anybcq(folder: Path, rng: np.random.Generator) -> None:
    tensors: dict[str, Any] = {"m.qweight": words(rng, K // 32, 3, N)}
    for p in (2, 3):
        tensors[f"m.alpha_{p}"] = halves(rng, K // 64, p, N)
        tensors[f"m.beta_{p}"] = halves(rng, K // 64, N)
    made_up(folder, tensors)


def _gguf(folder: Path, rng: np.random.Generator) -> None:
    """A tensor of every type, every other one with rows that are put back; bytes between tensors."""
    writer = Writer().pair("general.architecture", "str", "llama").pair("llama.attention.head_count", "u32", 2)
    types = [(number, kind) for number, kind in TYPES.items() if kind.name in KINDS]
    for i, (number, kind) in enumerate(types):
        size = 8 * 256 // kind.elements * kind.nbytes
        # below 0x3C every two bytes are a finite half; zeros, because not every byte is one of TQ1_0
        data = bytes(size) if kind.name == "TQ1_0" else rng.integers(0, 0x3C, size).astype(np.uint8).tobytes()
        writer.tensor(f"blk.{i}.{'attn_q' if i % 2 else 'ffn_up'}.weight", [8, 256], number, data)
    writer.tensor("blk.0.attn_q.bias", [8], 0, np.arange(8, dtype="<f4").tobytes())
    writer.tail = b"more"
    folder.mkdir()
    (folder / "model.gguf").write_bytes(writer.bytes())


SOURCES: dict[str, Callable[[Path, np.random.Generator], None]] = {
    "gptq": _gptq,
    "gptq planar": _planar,
    "awq gemm": _gemm,
    "awq gemv": _gemv,
    "awq gemv_fast": _fast,
    "compressed packed": _packed,
    "compressed experts": _experts,
    "compressed bytes": _bytes,
    "hqq": _hqq,
    "anybcq": _anybcq,
    "gguf": _gguf,
}


def layout_source(name: str, folder: Path) -> Path:
    """A source folder in this layout, and a side file."""
    SOURCES[name](folder, np.random.default_rng(0))
    (folder / "tokenizer.json").write_text("{}")
    return folder
