"""The plugin in a real vLLM on a GPU: small folders against transformers, the Llama-2-7B shape beside vLLM itself.

    python tests/benchmarks/vllm_serving.py small WORK [NAME]          # small folders, eager and with CUDA graphs
    python tests/benchmarks/vllm_serving.py speed WORK bcq4            # or bcq3, float16, gptq, compressed
    python tests/benchmarks/vllm_serving.py table WORK                 # what has been measured, as a table

Weights are random: values do not change how long anything takes. float16, GPTQ and compressed-tensors models are not
even written, vLLM makes them up (``load_format="dummy"``). Every run appends a line of JSON to WORK/results.jsonl.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_SETTINGS = {
    "VLLM_PLUGINS": "bcqfmt,bcq_bundle", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1", "VLLM_HOST_IP": "127.0.0.1", "VLLM_LOOPBACK_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_USE_DEEP_GEMM": "0", "TOKENIZERS_PARALLELISM": "false",
}  # fmt: skip
for _name, _value in _SETTINGS.items():  # before vLLM is imported
    os.environ.setdefault(_name, _value)

GIB = 1 << 30
SEQUENCES, PROMPT, TOKENS, KEPT = (1, 4, 16, 64), 512, 128, 24 * GIB
SHAPE = {  # Llama-2-7B
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 32000,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": False,
    "bos_token_id": 1, "eos_token_id": 2, "dtype": "float16",
}  # fmt: skip
LINEARS = {
    "self_attn.q_proj": (4096, 4096), "self_attn.k_proj": (4096, 4096), "self_attn.v_proj": (4096, 4096),
    "self_attn.o_proj": (4096, 4096), "mlp.gate_proj": (11008, 4096), "mlp.up_proj": (11008, 4096),
    "mlp.down_proj": (4096, 11008),
}  # fmt: skip
_FOUR = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128, "dynamic": False}
PEERS: dict[str, Any] = {
    "float16": None,
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True, "lm_head": False},
    "compressed": {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": _FOUR, "input_activations": None,
                                      "output_activations": None}},
        "ignore": ["lm_head"],
    },
}  # fmt: skip
GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64]}
LINEAR = r"model\.layers\..*_proj\.weight"
SMALL: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {  # kind, config, options of the quantization
    "rtn4": ("llama", {}, {}),
    "bcq3": ("llama", {}, {"method": "bcq", "settings": {"bits": 3, "group_size": 128}}),
    "mixed24": ("llama", {}, {"method": "mixed24", "settings": {}}),
    "biases": ("qwen2", {}, {}),
    "dense-q": ("llama", {}, {"exclude": [r".*q_proj.*"]}),
    "head": ("llama", {}, {"include": [LINEAR, r"lm_head\.weight"]}),
    "tied-embedding": ("llama", {"tie_word_embeddings": True}, {"include": [LINEAR, r".*embed_tokens\.weight"]}),
}
WIDE = {
    "vocab_size": 512, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 4, "max_position_embeddings": 512,
}  # fmt: skip
PROMPTS = [[1, 5, 7, 9, 11], [2, 3], [1, 20, 30, 40, 50, 60, 33, 12, 5], [4]]


def keep(work: Path, line: dict[str, Any]) -> None:
    """Print a result and append it."""
    print(json.dumps(line), flush=True)
    with (work / "results.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


# -- models -------------------------------------------------------------------------------------------------------


def seven(work: Path, kind: str) -> Path:
    """A folder of the Llama-2-7B shape; of the peers config.json alone."""
    place = work / kind
    if (place / "config.json").exists():
        return place
    if kind in PEERS:
        place.mkdir(parents=True)
        quantized = {} if PEERS[kind] is None else {"quantization_config": PEERS[kind]}
        (place / "config.json").write_text(json.dumps({**SHAPE, **quantized}), encoding="utf-8")
        return place
    import numpy as np

    import bcqfmt

    random, bits = np.random.default_rng(0), int(kind[-1])
    dense = {
        "model.embed_tokens.weight": random.normal(0, 0.02, (32000, 4096)).astype(np.float16),
        "lm_head.weight": random.normal(0, 0.02, (32000, 4096)).astype(np.float16),
        "model.norm.weight": np.ones(4096, np.float16),
    }
    tensors: dict[str, Any] = dict(dense)
    for name, (rows, columns) in LINEARS.items():  # one layer is packed, all 32 have its bits
        groups = columns // 128
        if bits == 4:
            codes = random.integers(0, 16, (rows, columns), np.uint8)
            scale = random.uniform(0.001, 0.005, (rows, groups)).astype(np.float16)
            made = bcqfmt.BcqWeight.from_affine(codes, scale, np.full_like(scale, 8, np.uint8), group_size=128, bits=4)
        else:
            signs = random.integers(0, 2, (bits, rows, columns), np.uint8)
            alpha = random.uniform(0.001, 0.01, (bits, rows, groups)).astype(np.float16)
            made = bcqfmt.BcqWeight.from_bcq(signs, alpha, group_size=128)
        tensors |= {f"model.layers.{n}.{name}.weight": made for n in range(32)}
    for n in range(32):
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{n}.{name}.weight"] = np.ones(4096, np.float16)
    bcqfmt.save(place, tensors, config=SHAPE)
    return place


def small(work: Path, name: str) -> tuple[Path, Path]:
    """A small BCQ folder, and its values as a dense one."""
    sys.path.append(str(Path(__file__).resolve().parents[1] / "support"))
    from sources.tiny_models import as_dense, bcq_model, dense_model, edit_config

    kind, config, options = SMALL[name]
    bcq, dense = work / "small" / name, work / "small" / f"{name}-dense"
    if not dense.exists():
        bcq_model(bcq, dense_model(work / "small" / f"{name}-source", kind, **{**WIDE, **config}), **options)
        as_dense(dense, bcq)
        if name == "head":
            edit_config(bcq, tie_word_embeddings=True)
    return bcq, dense


# -- running ------------------------------------------------------------------------------------------------------


def engine(model: Path, mode: str, **options: Any) -> Any:
    """An engine in this process."""
    from vllm import LLM  # type: ignore[import-not-found, unused-ignore]

    more = {"eager": {"enforce_eager": True}, "graphs": {"compilation_config": GRAPHS}, "full": {}}[mode]
    return LLM(
        model=str(model), skip_tokenizer_init=True, dtype="float16", seed=0, enable_prefix_caching=False,
        disable_log_stats=True, **more, **options,
    )  # fmt: skip


def generate(llm: Any, prompts: Sequence[Sequence[int]], tokens: int, **options: Any) -> tuple[list[Any], float, int]:
    """Outputs, seconds, kernels that were compiled inside the requests."""
    import torch
    from vllm import SamplingParams

    from bcqfmt.kernels.runtime.cubins import compile_listener

    compiled: list[str] = []
    ask = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False, **options)
    with compile_listener(lambda name, place: compiled.append(name)):
        torch.cuda.synchronize()
        began = time.perf_counter()
        found = llm.generate([{"prompt_token_ids": list(p)} for p in prompts], ask, use_tqdm=False)
        taken = time.perf_counter() - began
    return [one.outputs[0] for one in found], taken, len(compiled)


def speed(work: Path, kind: str, mode: str) -> None:
    """1 to 64 sequences at once: tokens a second, prompts included, and of the decoding alone."""
    import random

    import torch

    model = seven(work, kind)
    began = time.perf_counter()
    llm = engine(
        model, mode, load_format="dummy" if kind in PEERS else "auto", max_model_len=1024, max_num_seqs=64,
        max_num_batched_tokens=8192, kv_cache_memory_bytes=KEPT, gpu_memory_utilization=0.9,
    )  # fmt: skip
    line: dict[str, Any] = {"kind": kind, "mode": mode, "load_s": round(time.perf_counter() - began, 1)}
    line["memory_gib"] = round((torch.cuda.memory_allocated() - KEPT) / GIB, 2)
    line["peak_gib"] = round((torch.cuda.max_memory_allocated() - KEPT) / GIB, 2)
    chance = random.Random(0)
    for count in SEQUENCES:
        prompts = [[chance.randrange(3, 32000) for _ in range(PROMPT)] for _ in range(count)]
        _, first, compiled = generate(llm, prompts, TOKENS)
        whole = min(first, *(generate(llm, prompts, TOKENS)[1] for _ in range(2)))
        prefill = min(generate(llm, prompts, 1)[1] for _ in range(3))
        line[f"{count}"] = {
            "tokens_per_s": round(count * TOKENS / whole, 1),
            "decode_per_s": round(count * (TOKENS - 1) / (whole - prefill), 1),
            "prefill_s": round(prefill, 4),
            "first_s": round(first, 2),
            "compiled_in_requests": compiled,
        }
    keep(work, line)


def agree(work: Path, name: str, mode: str, offload: float) -> None:
    """Tokens of a small folder, read by transformers on the dense export: would it have chosen them?"""
    import torch
    from transformers import AutoModelForCausalLM

    bcq, dense = small(work, name)
    line: dict[str, Any] = {"small": name, "mode": mode, "offload": offload}
    try:
        more = {"cpu_offload_gb": offload} if offload else {}
        llm = engine(bcq, mode, max_model_len=256, max_num_seqs=8, max_num_batched_tokens=512,
                     gpu_memory_utilization=0.1, **more)  # fmt: skip
        _, first, line["compiled_in_requests"] = generate(llm, PROMPTS[:1], 32)
        found, taken, _ = generate(llm, PROMPTS, 32)
        line |= {"first_s": round(first, 2), "tokens_per_s": round(len(PROMPTS) * 32 / taken, 1)}
        model = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float16).to("cuda").eval()
        gaps = []
        for prompt, one in zip(PROMPTS, found, strict=True):
            tokens = torch.tensor(list(one.token_ids), device="cuda")
            with torch.inference_mode():
                given = torch.tensor([[*prompt, *one.token_ids[:-1]]], device="cuda")
                logits = model(given).logits[0, len(prompt) - 1 :].float()
            gaps += (logits.max(-1).values - logits.gather(1, tokens[:, None])[:, 0]).tolist()
        line |= {"same": sum(gap == 0 for gap in gaps) / len(gaps), "largest_gap": round(max(gaps), 4)}
        line["good"] = max(gaps) < 0.05
    except Exception as fault:  # noqa: BLE001 - a line of the report
        traceback.print_exc()
        line |= {"good": False, "error": str(fault)[:300]}
    keep(work, line)
    if not line["good"]:
        raise SystemExit(1)


def table(work: Path) -> None:
    """The last result of every kind."""
    lines = [json.loads(text) for text in (work / "results.jsonl").read_text(encoding="utf-8").splitlines()]
    for line in lines:
        if "small" in line:
            print(line)
    print(
        "| weights | memory, peak GiB | " + " | ".join(f"{n} sequences: tokens/s, decoding" for n in SEQUENCES) + " |"
    )
    print("|---" * (2 + len(SEQUENCES)) + "|")
    for kind, line in {line["kind"]: line for line in lines if "kind" in line}.items():
        cells = [f"{line[str(n)]['tokens_per_s']:,.0f}, {line[str(n)]['decode_per_s']:,.0f}" for n in SEQUENCES]
        print(f"| {kind} | {line['memory_gib']}, {line['peak_gib']} | " + " | ".join(cells) + " |")


def _apart(work: Path, name: str, mode: str, offload: float) -> bool:
    command = [sys.executable, __file__, "agree", str(work), name, "--mode", mode, "--offload", str(offload)]
    return not subprocess.run(command, check=False).returncode


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("small", "agree", "speed", "table"))
    parser.add_argument("work", type=Path)
    parser.add_argument("name", nargs="?", help="of a small folder, or bcq4, bcq3, float16, gptq, compressed")
    parser.add_argument("--mode", choices=("eager", "graphs", "full"), default="graphs")
    parser.add_argument("--offload", type=float, default=0.0, help="GB of weights that vLLM may keep on the host")
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    if given.what == "table":
        table(given.work)
    elif given.what == "speed":
        speed(given.work, given.name, given.mode)
    elif given.what == "agree":
        agree(given.work, given.name, given.mode, given.offload)
    else:  # a process each: vLLM gives its memory back when it ends
        runs = [(name, mode, 0.0) for name in SMALL for mode in ("eager", "graphs")] + [("rtn4", "eager", 1.0)]
        runs = [run for run in runs if given.name in (None, run[0])]
        bad = [run for run in runs if not _apart(given.work, *run)]
        print("all good" if not bad else f"NOT GOOD: {bad}")
        raise SystemExit(bool(bad))


if __name__ == "__main__":
    main()
