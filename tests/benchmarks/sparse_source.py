"""A GPTQ checkpoint with the names and shapes of a 671B mixture of experts that takes no room: its data are holes.

Headers, index and configuration are real. Every zero field is 0 and every ``g_idx`` too, so it can be planned, not
converted; ``g_idx`` of zeros is in order, which is what the planner asks of it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

from sparse_folder import sparse_file

from bcqfmt.checkpoint.shards import shard_names
from bcqfmt.container.header import header_bytes, layout

HIDDEN, EXPERT, DENSE, VOCABULARY = 7168, 2048, 18432, 129280
LAYERS, FIRST, EXPERTS, HEADS = 61, 3, 256, 128
BITS, GROUP = 4, 128
Tensors = dict[str, tuple[str, tuple[int, ...]]]


def linear_layers(layers: int = LAYERS) -> Iterator[tuple[str, int, int]]:
    """Name, rows and columns of every quantized matrix."""
    for i in range(layers):
        layer = f"model.layers.{i}"
        yield f"{layer}.self_attn.q_a_proj", 1536, HIDDEN
        yield f"{layer}.self_attn.q_b_proj", HEADS * 192, 1536
        yield f"{layer}.self_attn.kv_a_proj_with_mqa", 576, HIDDEN
        yield f"{layer}.self_attn.kv_b_proj", HEADS * 256, 512
        yield f"{layer}.self_attn.o_proj", HIDDEN, HEADS * 128
        kinds = {"mlp": DENSE} if i < FIRST else {"mlp.shared_experts": EXPERT}
        if i >= FIRST:
            kinds |= {f"mlp.experts.{expert}": EXPERT for expert in range(EXPERTS)}
        for kind, inner in kinds.items():
            yield f"{layer}.{kind}.gate_proj", inner, HIDDEN
            yield f"{layer}.{kind}.up_proj", inner, HIDDEN
            yield f"{layer}.{kind}.down_proj", HIDDEN, inner


def dense_tensors(layers: int = LAYERS) -> Tensors:
    """What stays as it is: embeddings, head, norms, routers."""
    found: Tensors = dict.fromkeys(("model.embed_tokens.weight", "lm_head.weight"), ("BF16", (VOCABULARY, HIDDEN)))
    found["model.norm.weight"] = ("BF16", (HIDDEN,))
    for i in range(layers):
        layer = f"model.layers.{i}"
        widths = {"input_layernorm": HIDDEN, "post_attention_layernorm": HIDDEN}
        widths |= {"self_attn.q_a_layernorm": 1536, "self_attn.kv_a_layernorm": 512}
        found |= {f"{layer}.{name}.weight": ("BF16", (width,)) for name, width in widths.items()}
        if i >= FIRST:
            found[f"{layer}.mlp.gate.weight"] = ("BF16", (EXPERTS, HIDDEN))
            found[f"{layer}.mlp.gate.e_score_correction_bias"] = ("F32", (EXPERTS,))
    return found


def gptq_tensors(name: str, rows: int, columns: int) -> Tensors:
    """The four tensors of a module."""
    groups = columns // GROUP
    return {
        f"{name}.qweight": ("I32", (columns * BITS // 32, rows)),
        f"{name}.qzeros": ("I32", (groups, rows * BITS // 32)),
        f"{name}.scales": ("F16", (groups, rows)),
        f"{name}.g_idx": ("I32", (columns,)),
    }


def sparse_source(folder: Path, shards: int, layers: int = LAYERS) -> tuple[int, int, int]:
    """Fill ``folder``; the numbers of parameters, tensors and bytes."""
    modules = list(linear_layers(layers))
    dense = dense_tensors(layers)
    files: list[Tensors] = [{} for _ in range(shards)]
    for i, (name, rows, columns) in enumerate(modules):
        files[i * shards // len(modules)] |= gptq_tensors(name, rows, columns)
    for i, (name, tensor) in enumerate(dense.items()):
        files[i * shards // len(dense)][name] = tensor
    weight_map: dict[str, str] = {}
    total = 0
    for file, tensors in zip(shard_names(shards), files, strict=True):
        total += _shard(folder / file, tensors)
        weight_map |= dict.fromkeys(tensors, file)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    quant = {"quant_method": "gptq", "bits": BITS, "group_size": GROUP, "sym": True, "desc_act": False}
    quant |= {"checkpoint_format": "gptq", "meta": {"quantizer": ["gptqmodel:7.6.0"]}}
    config = {"model_type": "deepseek_v3", "tie_word_embeddings": False, "quantization_config": quant}
    (folder / "config.json").write_text(json.dumps(config))
    parameters = sum(rows * columns for _, rows, columns in modules) + sum(_count(shape) for _, shape in dense.values())
    return parameters, len(weight_map), total


def _shard(path: Path, tensors: Tensors) -> int:
    entries = layout(tensors)
    data = max(entry.end for entry in entries.values())
    sparse_file(path, header_bytes(entries, {"format": "pt"}), data)
    return data


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for side in shape:
        count *= side
    return count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shards", type=int, default=1500)
    parser.add_argument("--layers", type=int, default=LAYERS)
    options = parser.parse_args()
    options.folder.mkdir(parents=True)
    parameters, tensors, size = sparse_source(options.folder, options.shards, options.layers)
    print(f"{parameters:,} parameters, {tensors:,} tensors, {size:,} bytes")


if __name__ == "__main__":
    main()
