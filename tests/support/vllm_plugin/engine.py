"""Run in an environment of `vllm_environment`: python vllm_engine.py TASKS.json ANSWERS.json

A task: ``model``, ``prompts`` (token ids), ``options`` of `LLM`. An answer: ``tokens``, ``logprobs``, ``methods`` (how
many layers each quantization method has, where the engine is in this process), or ``error``. Imports nothing of ours.
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
    from vllm.platforms import current_platform  # type: ignore[import-not-found, unused-ignore]

    llm = LLM(
        model=task["model"], skip_tokenizer_init=True, dtype="float32", max_model_len=96, max_num_seqs=4,
        max_num_batched_tokens=128, seed=0, enforce_eager=True, enable_prefix_caching=False, disable_log_stats=True,
        compilation_config={"mode": 0, "custom_ops": ["none"]}, **task.get("options", {}),
    )  # fmt: skip
    platform: Any = type(current_platform)
    if hasattr(platform, "register_triton_kernel_overrides"):  # fails if a process does it for a second model
        platform.register_triton_kernel_overrides = classmethod(lambda cls: None)
    ask = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, detokenize=False, logprobs=1)
    found = [one.outputs[0] for one in llm.generate([{"prompt_token_ids": p} for p in task["prompts"]], ask)]
    answer = {
        "tokens": [list(one.token_ids) for one in found],
        "logprobs": [[s[t].logprob for s, t in zip(one.logprobs, one.token_ids, strict=True)] for one in found],
    }
    if "options" not in task or "tensor_parallel_size" not in task["options"]:
        answer["methods"] = llm.apply_model(methods)[0]
    return answer


def methods(model: Any) -> dict[str, int]:
    """How many modules have which quantization method."""
    held = (getattr(module, "quant_method", None) for module in model.modules())
    return Counter(type(method).__name__ for method in held if method is not None)


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
