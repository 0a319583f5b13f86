"""One checkpoint by another tool's quantizer, for a row of `smollm2.py`; run by the Python that has the tool.

    smollm2_peers.py MODEL TEXT OUT --tool gptq|awq|autoround|gptqmodel --bits 3 --group-size 64 [--device cuda]

gptq and awq: llm-compressor (`pip install llmcompressor`), layer by layer, errors of quantized layers passed on; it
takes group sizes that divide every input, 64 for SmolLM2. gptqmodel: `pip install gptqmodel`, the same; the page's rows
were made with torch 2.11 and transformers 5.17, though it asks for later ones. autoround: `pip install auto-round`, 200
iterations, or 50 with `--light`. Weights asymmetric, the head left out, everything else at its default. The text is cut
and drawn as by `bcqfmt calibrate`. The line that starts with `{"version"` tells the version and the seconds.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers


def main() -> int:
    asked = _asked()
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(asked.model, local_files_only=True)
    ids = np.array(tokenizer(asked.text.read_text(encoding="utf-8"), add_special_tokens=False)["input_ids"])
    count = ids.size // asked.context
    chosen = np.sort(np.random.default_rng(0).choice(count, asked.rows, replace=False))
    rows = ids[: count * asked.context].reshape(count, asked.context)[chosen]
    start = time.perf_counter()
    kinds = {"autoround": (_auto_round, "auto-round"), "gptqmodel": (_gptq_model, "gptqmodel")}
    make, package = kinds.get(asked.tool, (_llm_compressor, "llmcompressor"))
    make(asked, tokenizer, rows)
    found = {"version": f"{package} {importlib.metadata.version(package)}", "seconds": time.perf_counter() - start}
    print(f"\n{json.dumps(found)}", flush=True)
    return 0


def _llm_compressor(asked: argparse.Namespace, tokenizer: Any, rows: Any) -> None:
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from datasets import Dataset
    from llmcompressor import oneshot

    kind = {"num_bits": asked.bits, "type": "int", "symmetric": False, "strategy": "group"}
    weights = QuantizationArgs(**kind, group_size=asked.group_size)
    given: dict[str, Any] = {
        "config_groups": {"all": QuantizationScheme(targets=["Linear"], weights=weights)},
        "ignore": ["lm_head"],
    }
    if asked.tool == "gptq":
        from llmcompressor.modifiers.quantization import GPTQModifier

        recipe: Any = GPTQModifier(**given, **({"actorder": "static"} if asked.act_order else {}))
    else:
        from llmcompressor.modifiers.awq import AWQModifier

        recipe = AWQModifier(**given)
    dtype = torch.float16 if asked.tool == "gptq" and asked.device == "cuda" else torch.float32  # awq: NaN in float16
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(asked.model, dtype=dtype)
    data = Dataset.from_dict({"input_ids": rows.tolist(), "attention_mask": np.ones_like(rows).tolist()})
    oneshot(
        model=model, processor=tokenizer, dataset=data, recipe=recipe, max_seq_length=asked.context,
        num_calibration_samples=len(rows), shuffle_calibration_samples=False,
    )  # fmt: skip
    model.save_pretrained(asked.out, save_compressed=True)
    tokenizer.save_pretrained(asked.out)


def _auto_round(asked: argparse.Namespace, tokenizer: Any, rows: Any) -> None:
    from auto_round import AutoRound

    model: Any = transformers.AutoModelForCausalLM.from_pretrained(asked.model, dtype=torch.float16)
    batches = [torch.from_numpy(rows[i : i + 8]) for i in range(0, len(rows), 8)]
    tuner = AutoRound(
        model, tokenizer, bits=asked.bits, group_size=asked.group_size, sym=False, nsamples=len(rows),
        seqlen=asked.context, dataset=batches, device_map=0 if asked.device == "cuda" else "cpu",
        enable_torch_compile=False, iters=50 if asked.light else 200, lr=5e-3 if asked.light else None,
    )  # fmt: skip
    tuner.quantize_and_save(str(asked.out), format="auto_round:auto_gptq")
    for deeper in asked.out.glob("*/config.json"):  # some versions add a folder of their own
        for file in deeper.parent.iterdir():
            file.rename(asked.out / file.name)


def _gptq_model(asked: argparse.Namespace, tokenizer: Any, rows: Any) -> None:
    from gptqmodel import GPTQModel, QuantizeConfig

    kind = {"bits": asked.bits, "group_size": asked.group_size, "sym": False, "device": asked.device}
    model = GPTQModel.load(str(asked.model), QuantizeConfig(**kind, offload_to_disk=False))
    given = [{"input_ids": row, "attention_mask": [1] * len(row)} for row in rows.tolist()]
    model.quantize(given, batch_size=8)
    model.save(str(asked.out))


def _asked() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tool", required=True, choices=("gptq", "awq", "autoround", "gptqmodel"))
    parser.add_argument("--bits", type=int, required=True)
    parser.add_argument("--group-size", type=int, required=True)
    parser.add_argument("--act-order", action="store_true", help="gptq: large channels first")
    parser.add_argument("--light", action="store_true", help="autoround: its recipe `light`, 50 iterations")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--context", type=int, default=512)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
