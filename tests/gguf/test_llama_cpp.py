"""Exported files in the real llama.cpp: the text and the probabilities that transformers has from the same values.

llama.cpp rounds activations to 8 bits when it multiplies with quantized weights; transformers does not. A copy of the
file in F32, made by gguf-py, takes that away: its text and its probabilities are those of transformers. The text of the
file itself may part from theirs only where two tokens are closer than what that rounding changes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import bcqfmt
from bcqfmt.container.files import SourceFile
from bcqfmt.container.gguf.header import read_gguf
from bcqfmt.converters.export.gguf import GgufExport, export_gguf
from bcqfmt.converters.source.gguf_tokenizer import tokenizer_files
from programs.llama_cpp import Llama, in_f32, log_probabilities
from sources import tiny_models
from sources.conversions import convert
from sources.gguf_files import DATA
from sources.peers import PEERS

PROMPT = [1, 20, 9, 30, 7, 41]
TEXT = [1, *(np.random.default_rng(4).integers(3, 60, 31).tolist())]
END = 2
NOISE = 1e-5  # of natural logarithms of probabilities, both programs computing in F32


def with_tokenizer(folder: Path) -> Path:
    for name, content in tokenizer_files(read_gguf(SourceFile(DATA / "q4_0.gguf"))).items():
        (folder / name).write_bytes(content)
    return folder


def from_peer(kind: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        convert(PEERS / kind / "source", folder / "bcq")
        return with_tokenizer(folder / "bcq")

    return make


def from_tiny(kind: str, **config: Any) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        dense = tiny_models.dense_model(folder / "source", kind, **config)
        return with_tokenizer(tiny_models.bcq_model(folder / "bcq", dense))

    return make


def from_gguf(name: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        convert(DATA / name, folder / "bcq")
        return folder / "bcq"

    return make


LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0}
LLAMA3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 32}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
PARTIAL = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
LOCAL = {"full_attention": {**LINEAR, "rope_theta": 1e6}}  # gemma3: every sixth layer
LOCAL |= {"sliding_attention": {"rope_type": "default", "rope_theta": 5000.0}}
MODELS: dict[str, Callable[[Path], Path]] = {
    "GPTQ 4 bits asymmetric": from_peer("gptqmodel-gptq-4b-g32-asym"),
    "AWQ": from_peer("autoawq-gemm-4b-g32-asym"),
    "compressed-tensors BF16": from_peer("llmcompressor-pack_quantized-4b-g64-sym-bf16"),
    "qwen2, biases": from_tiny("qwen2"),
    "llama, tied": from_tiny("llama", tie_word_embeddings=True),
    "llama 3 frequencies": from_tiny("llama", rope_parameters=LLAMA3),
    "linear rotations": from_tiny("llama", rope_parameters=LINEAR),
    "yarn rotations": from_tiny("qwen2", rope_parameters=YARN),
    "mixtral": from_tiny("mixtral"),
    "qwen3": from_tiny("qwen3"),
    "mistral": from_tiny("mistral"),
    "phi3": from_tiny("phi3", rope_parameters=PARTIAL),
    "gemma": from_tiny("gemma"),
    "gemma2": from_tiny("gemma2"),
    "gemma3": from_tiny("gemma3", rope_parameters=LOCAL),
    "qwen3moe": from_tiny("qwen3_moe", norm_topk_prob=True),
    "GGUF Q4_0": from_gguf("q4_0.gguf"),
}


class Transformers:
    """The dense export in F32."""

    def __init__(self, folder: Path) -> None:
        with tiny_models.quiet():
            self.model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def log_probabilities(self, ids: list[int]) -> Any:
        """For every position the token to come next, float64 [len(ids), vocabulary]."""
        with torch.inference_mode():
            logits = self.model(input_ids=torch.tensor([ids])).logits[0]
        return torch.log_softmax(logits.double(), -1).numpy()


def exported(bcq: Path, folder: Path) -> tuple[GgufExport, Path, Transformers]:
    with bcqfmt.open(bcq) as checkpoint:
        done = export_gguf(checkpoint, folder / "model.gguf")
    return done, folder / "model.gguf", Transformers(tiny_models.as_dense(folder / "dense", bcq, "float32"))


def partings(text: list[int], reference: Transformers) -> dict[int, float]:
    """Where transformers would have taken another token: its place, and by how much less likely the one taken is."""
    assert len(text) == 64
    wanted = reference.log_probabilities(PROMPT + text)[len(PROMPT) - 1 : -1]
    wanted[:, END] = -np.inf  # llama.cpp was told to go on
    gaps = wanted.max(axis=1) - wanted[np.arange(64), text]
    return {int(i): float(gaps[i]) for i in np.flatnonzero(gaps > NOISE)}


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_llama_cpp_and_transformers_say_the_same(make: Callable[[Path], Path], tmp_path: Path) -> None:
    done, path, reference = exported(make(tmp_path), tmp_path)
    assert done.exact
    assert any("sliding_window" in note for note in done.notes) == (make is MODELS["mistral"])
    llama, plain = Llama(path), Llama(in_f32(path, tmp_path / "f32.gguf"))
    assert partings(plain.text(PROMPT, 64), reference) == {}
    text = llama.text(PROMPT, 64)
    for i, gap in partings(text, reference).items():
        before = PROMPT + text[:i]
        rounded = np.abs(log_probabilities(llama, before) - log_probabilities(plain, before)).max()
        assert gap < 2 * rounded, f"token {i} of 64: a gap of {gap:.4f}, and rounding changes {rounded:.4f}"

    wanted = reference.log_probabilities(TEXT)
    found = np.stack([log_probabilities(plain, TEXT[: i + 1]) for i in range(len(TEXT))])
    gelu = [MODELS[kind] for kind in ("gemma", "gemma2", "gemma3")]
    coarse = make in gelu  # ggml looks it up in a table of F16 numbers
    assert np.abs(found - wanted).max() < (2e-3 if coarse else 2e-5)
    perplexities = [np.exp(-p[np.arange(len(TEXT) - 1), TEXT[1:]].mean()) for p in (found, wanted)]
    assert perplexities[0] == pytest.approx(perplexities[1], rel=3e-4 if coarse else 1e-6)


def test_llama_cpp_splits_words_as_the_folders_tokenizer_does(tmp_path: Path) -> None:
    """A text as a prompt and its ids as a prompt lead to the same next token with the same probability."""
    bcq = from_peer("gptqmodel-gptq-4b-g32-asym")(tmp_path)
    _, path, _ = exported(bcq, tmp_path)
    with tiny_models.quiet():
        tokenizer: Any = transformers.AutoTokenizer.from_pretrained(bcq)
    llama = Llama(path)
    for text in ("the and an", "a", "thin band", "hear the bird"):
        ids = tokenizer(text)["input_ids"]
        assert llama.complete(text, 1, 8) == llama.complete(ids, 1, 8), (text, ids)
