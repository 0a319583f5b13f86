"""Names of Hugging Face for the tensors of a GGUF file, and what llama.cpp's converter has done to their numbers.

llama.cpp stores the rows of q and k of the Llama family in another order: row h*d + 2i + t of GGUF is row
h*d + t*d/2 + i of Hugging Face (d rows a head, t = 0, 1). Other architectures keep theirs. It adds 1 to the
weights of norms of the Gemma family.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from bcqfmt.container.gguf.header import GgufHeader

_LAYER = re.compile(r"blk\.(0|[1-9][0-9]{0,5})\.([a-z0-9_]+)\.(weight|bias|scale)")
_HUGGING_FACE = re.compile(r"model\.layers\.(0|[1-9][0-9]{0,5})\.(.+)\.(weight|bias|scale)")
_TOP: Final = {"token_embd": "model.embed_tokens", "output": "lm_head", "output_norm": "model.norm"}
_ATTENTION: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
}
_MLP: Final = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_MIXTRAL: Final = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.w1",
    "ffn_up_exps": "block_sparse_moe.experts.w3",
    "ffn_down_exps": "block_sparse_moe.experts.w2",
}
_QK_NORM: Final = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_PHI3: Final = {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
_EXPERTS: Final = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
}
_AROUND: Final = {  # norms before and after
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
LAYERS: Final[dict[str, dict[str, str]]] = {
    "llama": {**_ATTENTION, **_MLP, **_MIXTRAL},
    "qwen2": {**_ATTENTION, **_MLP},
    "qwen3": {**_ATTENTION, **_MLP, **_QK_NORM},
    "qwen3moe": {**_ATTENTION, **_MLP, **_QK_NORM, **_EXPERTS},
    "phi3": {**_ATTENTION, **_MLP, **_PHI3},
    "gemma": {**_ATTENTION, **_MLP},
    "gemma2": {**_ATTENTION, **_MLP, **_AROUND},
    "gemma3": {**_ATTENTION, **_MLP, **_AROUND, **_QK_NORM},
}
_MOVED: Final = {"llama"}  # architectures whose rows of q and k are in another order
_RAISED: Final = {"gemma", "gemma2", "gemma3"}  # whose weights of norms are stored with 1 added


class Named(NamedTuple):
    """The name of a tensor, the number of heads whose rows have to be put back (0: none), what was added to it."""

    name: str
    heads: int = 0
    added: int = 0


def architecture(header: GgufHeader) -> str:
    """``general.architecture``; empty without one."""
    found = header.get("general.architecture")
    return found if isinstance(found, str) else ""


def namer(header: GgufHeader) -> Callable[[str, tuple[int, ...]], Named] | None:
    """A function from name and shape to the name of Hugging Face; None for an architecture that has no table.

    A tensor that the table does not know keeps its name, and so does one whose rows do not divide into the heads
    (:func:`contradiction` finds these before).
    """
    kind = architecture(header)
    table = LAYERS.get(kind)
    if table is None:
        return None

    def named(name: str, shape: tuple[int, ...]) -> Named:
        stem, _, end = name.rpartition(".")
        if stem in _TOP and end in ("weight", "bias"):
            return Named(f"{_TOP[stem]}.{end}", added=int(kind in _RAISED and stem == "output_norm"))
        found = _LAYER.fullmatch(name)
        if found is None or found[2] not in table:
            return Named(name)
        layer, part, end = found.groups()
        new = f"model.layers.{layer}.{table[part]}.{end}"
        if kind in _RAISED and part.endswith("_norm"):
            return Named(new, added=1)
        if kind not in _MOVED or part not in ("attn_q", "attn_k") or end == "scale":
            return Named(new)
        heads = _heads(header, kind, part, int(layer))
        rows = shape[0] if end == "bias" else shape[-2] if len(shape) == 2 else 0
        return Named(new, heads) if heads and rows and rows % (2 * heads) == 0 else Named(name)

    return named


def contradiction(header: GgufHeader, shapes: Mapping[str, tuple[int, ...]]) -> str:
    """Where numbers of the file and shapes of its tensors disagree, in words; empty where they do not.

    Then nobody can say which of them is right, nor how rows of q and k were moved.
    """
    kind = architecture(header)
    width, each = header.get(f"{kind}.embedding_length"), header.get(f"{kind}.attention.key_length")
    embedding = shapes.get("token_embd.weight", ())
    if isinstance(width, int) and len(embedding) == 2 and embedding[1] != width:
        return f"{kind}.embedding_length is {width}, token_embd.weight has {embedding[1]} columns"
    for name, shape in shapes.items():
        found = _LAYER.fullmatch(name)
        if found is None or found[2] not in ("attn_q", "attn_k") or found[3] == "scale":
            continue
        heads, all_heads = (_heads(header, kind, part, int(found[1])) for part in (found[2], "attn_q"))
        matrix, rows = found[3] == "weight", shape[0]
        size = each if isinstance(each, int) else width // all_heads if isinstance(width, int) and all_heads else 0
        fits = heads > 0 and rows % (2 * heads) == 0 and len(shape) == (2 if matrix else 1)
        if (kind in _MOVED and not fits) or (matrix and heads and size and rows != heads * size):
            stated = f"{heads} heads" + (f" of {size} rows" if size else "") if heads else "no number of heads"
            return f"'{name}' is {' x '.join(map(str, shape))}, the key values say {stated}"
    return ""


def stored_name(kind: str, name: str) -> str:
    """The way back: GGUF's name, in files of architecture ``kind``, of a tensor of Hugging Face; empty without one."""
    stem, _, end = name.rpartition(".")
    for old, new in _TOP.items():
        if stem == new and end in ("weight", "bias"):
            return f"{old}.{end}"
    found = _HUGGING_FACE.fullmatch(name)
    parts = {new: old for old, new in LAYERS.get(kind, {}).items()}
    return f"blk.{found[1]}.{parts[found[2]]}.{found[3]}" if found and found[2] in parts else ""


def _heads(header: GgufHeader, kind: str, part: str, layer: int) -> int:
    """Heads of q or k in a layer; 0 when the file does not say."""
    key = f"{kind}.attention.head_count"
    found: Any = header.get(key)
    if part == "attn_k":
        found = header.get(f"{key}_kv", found)
    if hasattr(found, "tolist"):
        found = found.tolist()
    if isinstance(found, list):
        found = found[layer] if layer < len(found) else 0
    return found if isinstance(found, int) and not isinstance(found, bool) and 0 < found < 1 << 20 else 0
