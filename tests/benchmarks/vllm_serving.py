"""The plugin in a real vLLM on a GPU: small folders against transformers, the Llama-2-7B shape beside vLLM itself.

    python tests/benchmarks/vllm_serving.py small WORK [NAME]          # small folders, eager and with CUDA graphs
    python tests/benchmarks/vllm_serving.py speed WORK bcq4            # or bcq4-one, bcq3, float16, gptq, ...
    python tests/benchmarks/vllm_serving.py compile WORK bcq4,rtn4     # their kernels beforehand, in many processes
    python tests/benchmarks/vllm_serving.py table WORK                 # what has been measured, as a table

Weights are random: values do not change how long anything takes. float16, GPTQ and compressed-tensors models are not
even written, vLLM makes them up (``load_format="dummy"``). "bcq4-one": weights in one layout. "marlin":
compressed-tensors in bfloat16 without Machete, the kernel that vLLM takes on a Hopper GPU. Every run appends lines of
JSON to WORK/results.jsonl as they come.

With ``--turn FILE`` a run makes FILE.ready when its engine stands, and measures when FILE.go exists: several engines
can start at the same time, and one is measured while the others wait.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import dataclasses
import json
import multiprocessing
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
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
SEQUENCES, PROMPT, TOKENS, CACHED = (1, 4, 16, 64), 512, 128, 21 * GIB >> 5  # of a layer, for 64 sequences
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
PEERS["marlin"] = PEERS["compressed"]
GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
LINEAR = r"model\.layers\..*_proj\.weight"
SMALL: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {  # kind, config, options of the quantization
    "rtn4": ("llama", {}, {}),
    "bcq3-g128": ("llama", {}, {"method": "bcq", "settings": {"bits": 3, "group_size": 128}}),
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


def linear(name: str, bits: int) -> Any:
    """A random weight of the 7B shape: affine with 4 bits, else bcq; groups of 128."""
    import numpy as np

    import bcqfmt

    random, (rows, columns) = np.random.default_rng(0), LINEARS[name]
    groups = columns // 128
    if bits == 4:
        codes = random.integers(0, 16, (rows, columns), np.uint8)
        scale = random.uniform(0.001, 0.005, (rows, groups)).astype(np.float16)
        return bcqfmt.BcqWeight.from_affine(codes, scale, np.full_like(scale, 8, np.uint8), group_size=128, bits=4)
    signs = random.integers(0, 2, (bits, rows, columns), np.uint8)
    alpha = random.uniform(0.001, 0.01, (bits, rows, groups)).astype(np.float16)
    return bcqfmt.BcqWeight.from_bcq(signs, alpha, group_size=128)


def seven(work: Path, kind: str, layers: int) -> Path:
    """A folder of the Llama-2-7B shape with this many layers; of the peers config.json alone."""
    place, shape = work / f"{kind}-{layers}", {**SHAPE, "num_hidden_layers": layers}
    if (place / "config.json").exists():
        return place
    if kind in PEERS:
        place.mkdir(parents=True)
        quantized = {} if PEERS[kind] is None else {"quantization_config": PEERS[kind]}
        (place / "config.json").write_text(json.dumps({**shape, **quantized}), encoding="utf-8")
        return place
    import numpy as np

    import bcqfmt

    table = np.tile(np.random.default_rng(0).normal(0, 0.02, (1000, 4096)).astype(np.float16), (32, 1))
    tensors: dict[str, Any] = {
        "model.embed_tokens.weight": table, "lm_head.weight": table, "model.norm.weight": np.ones(4096, np.float16)
    }  # fmt: skip
    for name in LINEARS:  # one layer is packed, all have its bits
        made = linear(name, int(kind[-1]))
        tensors |= {f"model.layers.{n}.{name}.weight": made for n in range(layers)}
    for n in range(layers):
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{n}.{name}.weight"] = np.ones(4096, np.float16)
    bcqfmt.save(place, tensors, config=shape)
    return place


def small(work: Path, name: str) -> tuple[Path, Path]:
    """A small BCQ folder, and its values as a dense one."""
    kind, config, options = SMALL[name]
    bcq, dense = work / "small" / name, work / "small" / f"{name}-dense"
    if not dense.exists():
        sys.path.append(str(Path(__file__).resolve().parents[1] / "support"))
        from sources.tiny_models import as_dense, bcq_model, dense_model, edit_config

        bcq_model(bcq, dense_model(work / "small" / f"{name}-source", kind, **{**WIDE, **config}), **options)
        as_dense(dense, bcq)
        if name == "head":
            edit_config(bcq, tie_word_embeddings=True)
    return bcq, dense


# -- running ------------------------------------------------------------------------------------------------------


def engine(model: Path, mode: str, **options: Any) -> Any:
    """An engine in this process."""
    from vllm import LLM  # type: ignore[import-not-found, unused-ignore]

    sizes = [size for size in (1, 2, 4, 8, 16, 32, 64) if size <= options["max_num_seqs"]]
    graphs = {**GRAPHS, "cudagraph_capture_sizes": sizes}
    more = {"eager": {"enforce_eager": True}, "graphs": {"compilation_config": graphs}, "full": {}}[mode]
    return LLM(
        model=str(model), skip_tokenizer_init=True, seed=0, enable_prefix_caching=False, disable_log_stats=True,
        gpu_memory_utilization=0.02, **more, **options,
    )  # fmt: skip


@contextlib.contextmanager
def memory_of_loading(found: dict[str, Any]) -> Iterator[None]:
    """While an engine is made: what weights take on the GPU after they were loaded, and the most while they were."""
    import torch
    from vllm.v1.worker.gpu_worker import Worker  # type: ignore[import-not-found, unused-ignore]

    load = Worker.load_model

    def watched(self: Any, *given: Any, **options: Any) -> None:
        torch.cuda.reset_peak_memory_stats()
        load(self, *given, **options)
        found["weights_gib"] = round(torch.cuda.memory_allocated() / GIB, 2)
        found["loading_gib"] = round(torch.cuda.max_memory_allocated() / GIB, 2)

    Worker.load_model = watched
    try:
        yield
    finally:
        Worker.load_model = load


def kernels_of(model: Any) -> list[str]:
    """What multiplies with the weights of a model."""
    found = set()
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        kernel = getattr(getattr(module, "scheme", None), "kernel", None) or getattr(method, "kernel", None)
        if hasattr(module, "output_size") and method is not None:
            found.add(type(kernel or method).__name__)
    return sorted(found)


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


def speed(work: Path, given: argparse.Namespace) -> None:
    """1 to 64 sequences at once: tokens a second, prompts included, and of the decoding alone."""
    import random

    import torch

    from bcqfmt.integrations.torch.layers import BcqModule

    kind, layers, cached = given.name, given.layers, CACHED * given.layers
    if given.keep:  # of weights that vLLM holds: the stored planes, too
        BcqModule.release = lambda *_: None  # type: ignore[assignment, method-assign]
    if kind.endswith("-one"):
        os.environ["BCQFMT_GPU_LAYOUTS"] = "one"
    if kind == "marlin":
        os.environ["VLLM_DISABLED_KERNELS"] = "MacheteLinearKernel"
    known: dict[str, Any] = {"kind": kind + " (planes kept)" * given.keep, "layers": layers, "mode": given.mode}
    known["dtype"] = given.dtype or ("bfloat16" if kind == "marlin" else "float16")
    model = seven(work, kind.removesuffix("-one"), layers)
    if given.after is not None:
        import vllm  # type: ignore[import-not-found, unused-ignore]  # noqa: F401

        while not given.after.exists():
            time.sleep(0.05)
    line, began = dict(known), time.perf_counter()
    with memory_of_loading(line):
        llm = engine(
            model, given.mode, dtype=known["dtype"], load_format="dummy" if kind in PEERS else "auto",
            max_model_len=1024, max_num_seqs=64, max_num_batched_tokens=8192, kv_cache_memory_bytes=cached,
        )  # fmt: skip
    line["start_s"] = round(time.perf_counter() - began, 1)
    line["kernels"] = llm.apply_model(kernels_of)[0]
    line["standing_gib"] = round((torch.cuda.memory_allocated() - cached) / GIB, 2)
    keep(work, line)
    if given.turn is not None:
        Path(f"{given.turn}.ready").touch()
        while not Path(f"{given.turn}.go").exists():
            time.sleep(0.02)
    chance = random.Random(0)
    torch.cuda.reset_peak_memory_stats()
    for count in SEQUENCES:
        prompts = [[chance.randrange(3, 32000) for _ in range(PROMPT)] for _ in range(count)]
        _, first, compiled = generate(llm, prompts, TOKENS)
        whole = min(generate(llm, prompts, TOKENS)[1] for _ in range(given.repeats))
        prefill = min(generate(llm, prompts, 1)[1] for _ in range(given.repeats))
        line = {
            **known,
            "sequences": count,
            "tokens_per_s": round(count * TOKENS / whole, 1),
            "decode_per_s": round(count * (TOKENS - 1) / (whole - prefill), 1),
            "prefill_s": round(prefill, 4),
            "first_s": round(first, 2),
            "compiled_in_requests": compiled,
        }
        keep(work, line)
    keep(work, {**known, "running_gib": round((torch.cuda.max_memory_allocated() - cached) / GIB, 2)})


def compile_one(task: tuple[Path, str, int, int]) -> float:
    """A product of some vectors with a weight of a folder, several times above itself: its kernels are cached then."""
    import torch

    import bcqfmt
    from bcqfmt.integrations.torch import BcqLinear

    (folder, name, times, count), began = task, time.perf_counter()
    with bcqfmt.open(folder) as checkpoint:
        weight = checkpoint.weight(name)
        spec = dataclasses.replace(weight.spec, shape=(times * weight.spec.out, weight.spec.columns))
        layer = BcqLinear(spec, device="meta")
        layer.fill({suffix: torch.cat([part] * times, -2).cuda() for suffix, part in weight.to_torch().items()})
    layer(torch.zeros(count, layer.in_features, dtype=torch.float16, device="cuda"))
    return time.perf_counter() - began


def compile_kernels(work: Path, names: list[str]) -> None:
    """The kernels that folders need, several at the same time; vLLM would compile one after the other."""
    import bcqfmt

    began, products = time.perf_counter(), []
    for kind in names:
        folder = small(work, kind)[0] if kind in SMALL else seven(work, kind, 1)
        with bcqfmt.open(folder) as checkpoint:
            widest = {weight.spec.columns: name for name, weight in checkpoint.weights()}  # one of every width
        layers = [(name, 1) for name in widest.values()]
        if kind not in SMALL:  # vLLM has q, k and v above each other, and gate and up
            layers += [("model.layers.0.self_attn.q_proj.weight", 3), ("model.layers.0.mlp.gate_proj.weight", 2)]
        products += [(folder, *layer) for layer in layers]
    tasks = [(*product, count) for count in (128, 64, 300, 32, 16, 8, 4, 2, 1) for product in products]
    workers, spawn = len(os.sched_getaffinity(0)), multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(workers, mp_context=spawn) as pool:
        taken = list(pool.map(compile_one, tasks))
    keep(
        work,
        {"compiled": names, "tasks": len(tasks), "sum_s": round(sum(taken)), "s": round(time.perf_counter() - began)},
    )


def gaps_of(dense: Path, tokens: list[list[int]]) -> list[float]:
    """For every token after a prompt, by how much transformers prefers another one."""
    import torch
    from transformers import AutoModelForCausalLM

    place = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float16).to(place).eval()
    gaps: list[float] = []
    for prompt, found in zip(PROMPTS, tokens, strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *found[:-1]]], device=place)).logits[0, len(prompt) - 1 :].float()
        chosen = logits.gather(1, torch.tensor(found, device=place)[:, None])[:, 0]
        gaps += (logits.max(-1).values - chosen).tolist()
    return gaps


def agree(work: Path, name: str, mode: str, offload: float) -> None:
    """Tokens of a small folder, read by transformers on the dense export, in a process without vLLM."""
    bcq, dense = small(work, name)
    line: dict[str, Any] = {"small": name, "mode": mode, "offload": offload}
    try:
        more = {"cpu_offload_gb": offload} if offload else {}
        llm = engine(bcq, mode, dtype="float16", max_model_len=256, max_num_seqs=8, max_num_batched_tokens=512,
                     kv_cache_memory_bytes=GIB, **more)  # fmt: skip
        _, first, line["compiled_in_requests"] = generate(llm, PROMPTS[:1], 32)
        found, taken, _ = generate(llm, PROMPTS, 32)
        line |= {"first_s": round(first, 2), "tokens_per_s": round(len(PROMPTS) * 32 / taken, 1)}
        line["tokens"] = [list(one.token_ids) for one in found]
        with concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as apart:
            gaps = apart.submit(gaps_of, dense, line["tokens"]).result()
        line |= {"same": sum(gap == 0 for gap in gaps) / len(gaps), "largest_gap": round(max(gaps), 4)}
        line["good"] = max(gaps) < 0.05
    except Exception as fault:  # noqa: BLE001 - a line of the report
        traceback.print_exc()
        line |= {"good": False, "error": str(fault)[:300]}
    keep(work, line)
    if not line["good"]:
        raise SystemExit(1)


def table(work: Path) -> None:
    """The last results of every kind."""
    kinds: dict[str, dict[Any, Any]] = {}
    for text in (work / "results.jsonl").read_text(encoding="utf-8").splitlines():
        line = json.loads(text)
        if "kind" not in line:
            print({name: value for name, value in line.items() if name != "tokens"})
            continue
        named = f"{line['kind']}, {line['dtype']}, {line['layers']} layers, {line['mode']}"
        kinds.setdefault(named, {}).update({line["sequences"]: line} if "sequences" in line else line)
    heads = [
        "weights",
        "kernels",
        "GiB: loading, weights, running",
        *(f"{n} sequences: tokens/s, decoding" for n in SEQUENCES),
    ]
    print(f"| {' | '.join(heads)} |\n{'|---' * len(heads)}|")
    for kind, line in kinds.items():
        memory = ", ".join(str(line.get(f"{name}_gib", "-")) for name in ("loading", "weights", "running"))
        cells = [
            f"{line[n]['tokens_per_s']:,.0f}, {line[n]['decode_per_s']:,.0f}" if n in line else "-" for n in SEQUENCES
        ]
        print(f"| {' | '.join([kind, ', '.join(line.get('kernels', [])), memory, *cells])} |")


def _apart(work: Path, name: str, mode: str, offload: float) -> bool:
    command = [sys.executable, __file__, "agree", str(work), name, "--mode", mode, "--offload", str(offload)]
    return not subprocess.run(command, check=False).returncode


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("small", "agree", "speed", "compile", "table"))
    parser.add_argument("work", type=Path)
    parser.add_argument(
        "name",
        nargs="?",
        help="of a small folder, or bcq4, bcq4-one, bcq3, float16, gptq, compressed, marlin; for compile several",
    )
    parser.add_argument("--mode", choices=("eager", "graphs", "full"), default="graphs")
    parser.add_argument("--offload", type=float, default=0.0, help="GB of weights that vLLM may keep on the host")
    parser.add_argument("--layers", type=int, default=32, help="of the 7B shape")
    parser.add_argument("--dtype", help="of the 7B shape; by default float16, for marlin bfloat16")
    parser.add_argument("--repeats", type=int, default=2, help="of every measurement, after a first one")
    parser.add_argument("--keep", action="store_true", help="the stored planes are kept, to compare")
    parser.add_argument("--after", type=Path, help="import vLLM, and start when there is this file", metavar="FILE")
    parser.add_argument("--turn", help="measure when there is FILE.go", metavar="FILE")
    given = parser.parse_args()
    if given.what in ("agree", "speed", "compile") and given.name is None:
        parser.error(f"{given.what} needs a name")
    given.work.mkdir(parents=True, exist_ok=True)
    if given.what == "table":
        table(given.work)
    elif given.what == "speed":
        speed(given.work, given)
    elif given.what == "compile":
        compile_kernels(given.work, given.name.split(","))
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
