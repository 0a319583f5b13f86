"""The real llama.cpp (package xllamacpp), and gguf-py as the second opinion on what a file holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import xllamacpp

Float = npt.NDArray[np.float32]


class Llama:
    """A model in llama.cpp on one thread, keys and values kept in F32; texts are lists of token ids."""

    def __init__(self, path: Path, context: int = 128) -> None:
        params = xllamacpp.CommonParams()
        params.model.path = str(path)
        params.n_ctx, params.n_parallel = context, 1
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
        params.warmup, params.fit_params, params.cache_ram_mib, params.verbosity = False, False, 0, -1
        params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self.server: Any = xllamacpp.Server(params)

    def complete(self, prompt: list[int] | str, tokens: int, top: int = 1) -> list[dict[str, Any]]:
        """Greedily chosen tokens, each with its ``id`` and the ``top`` most likely ones."""
        request = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "logprobs": top, "ignore_eos": True}
        answer = self.server.handle_completions(request)
        found: list[dict[str, Any]] = answer["choices"][0]["logprobs"]["content"]
        return found

    def text(self, prompt: list[int] | str, tokens: int) -> list[int]:
        """The ids of a greedy continuation."""
        return [token["id"] for token in self.complete(prompt, tokens)]


def log_probabilities(llama: Llama, prompt: list[int]) -> npt.NDArray[np.float64]:
    """Of every token of the vocabulary to come next."""
    found = {token["id"]: token["logprob"] for token in llama.complete(prompt, 1, 1 << 17)[0]["top_logprobs"]}
    return np.array([found[i] for i in range(len(found))])


def values(path: Path) -> dict[str, tuple[str, Float]]:
    """Type and values of every tensor as gguf-py computes them."""
    reader: Any = gguf.GGUFReader(path)
    found = {}
    for tensor in reader.tensors:
        shape = tuple(int(size) for size in reversed(tensor.shape))
        numbers = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        found[tensor.name] = tensor.tensor_type.name, np.asarray(numbers, np.float32).reshape(shape)
    return found


def in_f32(path: Path, target: Path) -> Path:
    """A copy by gguf-py with all tensors in F32: llama.cpp rounds activations when it multiplies with others."""
    reader: Any = gguf.GGUFReader(path)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(target, architecture)
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        writer.add_key_value(name, field.contents(), field.types[0], field.types[-1] if len(field.types) > 1 else None)
    for name, (_, numbers) in values(path).items():
        writer.add_tensor(name, numbers)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def rotary_rows(matrix: Any, heads: int) -> Any:
    """Rows of q or k in the order of GGUF, one by one: row h*d + t*d/2 + i goes to h*d + 2i + t."""
    size = len(matrix) // heads
    moved = np.empty_like(matrix)
    for row in range(len(matrix)):
        head, inner = divmod(row, size)
        t, i = divmod(inner, size // 2)
        moved[head * size + 2 * i + t] = matrix[row]
    return moved
