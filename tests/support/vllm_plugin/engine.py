"""Run in an environment of `vllm_environment`: python vllm_engine.py TASKS.json ANSWERS.json

A task: ``model``, ``prompts`` (token ids; none: it is only loaded), ``options`` of `LLM`, ``adapter`` (a folder of
LoRA). An answer: ``tokens``, ``logprobs``, and, where the engine is in this process, what is ``held`` by it; or
``error``. Imports nothing of ours.
"""

from __future__ import annotations

import gc
import json
import sys
import traceback
from collections import Counter
from pathlib import Path
from typing import Any


def run(task: dict[str, Any]) -> dict[str, Any]:
    """One model, greedily."""
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found, unused-ignore]
    from vllm.lora.request import LoRARequest  # type: ignore[import-not-found, unused-ignore]
    from vllm.platforms import current_platform  # type: ignore[import-not-found, unused-ignore]
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner  # type: ignore[import-not-found, unused-ignore]

    GPUModelRunner._dummy_sampler_run = lambda *_, **__: None  # random sampling has operators that are not here
    options = {
        "skip_tokenizer_init": True, "dtype": "float32", "max_model_len": 96, "max_num_seqs": 4, "seed": 0,
        "max_num_batched_tokens": 128, "enforce_eager": True, "enable_prefix_caching": False,
        "compilation_config": {"mode": 0, "custom_ops": ["none"]}, "disable_log_stats": False, **task["options"],
    }  # fmt: skip
    llm = LLM(model=task["model"], **options)
    platform: Any = type(current_platform)
    if hasattr(platform, "register_triton_kernel_overrides"):  # fails if a process does it for a second model
        platform.register_triton_kernel_overrides = classmethod(lambda cls: None)
    ask = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, detokenize=False, logprobs=1)
    lora = LoRARequest("adapter", 1, task["adapter"]) if "adapter" in task else None
    prompts = [{"prompt_token_ids": prompt} for prompt in task["prompts"]]
    made = llm.generate(prompts, ask, lora_request=lora) if prompts else []
    found = [one.outputs[0] for one in made]
    answer = {
        "tokens": [list(one.token_ids) for one in found],
        "logprobs": [[s[t].logprob for s, t in zip(one.logprobs, one.token_ids, strict=True)] for one in found],
    }
    if "tensor_parallel_size" not in options:
        answer["held"] = llm.collective_rpc(held)[0]
        counts = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
        answer["drafted"], answer["accepted"] = (
            counts.get(f"vllm:spec_decode_num_{kind}_tokens") for kind in ("draft", "accepted")
        )
    return answer


def held(worker: Any) -> dict[str, Any]:
    """``methods``: how many modules have each quantization method; ``shared``: parts of the draft that are the model's.

    ``read``: some matrices as vLLM itself reads those of quantized layers, by what its names end in, times a vector.
    """
    import torch
    from vllm.model_executor.layers.quantization.utils.quant_utils import (  # type: ignore[import-not-found, unused-ignore]
        get_and_maybe_dequant_weights,
    )

    model: Any = worker.model_runner.get_model()
    modules = dict(model.named_modules())
    methods = (getattr(module, "quant_method", None) for module in modules.values())
    read: dict[str, list[list[float]]] = {}
    for name, module in modules.items():
        leaf = name.rpartition(".")[2]
        if leaf in ("kv_b_proj", "in_proj_qkvz", "in_proj_ba"):
            matrix = get_and_maybe_dequant_weights(module)
            read.setdefault(leaf, []).append((matrix @ torch.arange(matrix.shape[1]).cos()).tolist())
    draft: Any = getattr(getattr(worker.model_runner, "drafter", None), "model", None)
    pairs = {}
    if draft is not None:
        pairs = {"head": (draft.lm_head, model.lm_head), "table": (draft.model.embed_tokens, model.model.embed_tokens)}
    return {
        "methods": Counter(type(method).__name__ for method in methods if method is not None),
        "read": read,
        "shared": [name for name, (own, other) in pairs.items() if own is other],
    }


def main() -> None:
    """Every task, whatever became of the one before it."""
    answers = []
    for task in json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")):
        try:
            answers.append(run(task))
        except Exception as fault:  # noqa: BLE001 - the tests look at what it says
            answers.append({"error": "".join(traceback.format_exception(fault))})
        gc.collect()
        Path(sys.argv[2]).write_text(json.dumps(answers), encoding="utf-8")


if __name__ == "__main__":
    main()
