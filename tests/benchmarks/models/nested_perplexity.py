"""Perplexity of nested planes (`multi`) and of planes of their own (`bcq`) on a small model that was never quantized.

    python tests/benchmarks/models/nested_perplexity.py MODEL

Calibration and test text are sampled from the model itself. Prints the perplexity at 2, 3 and 4 planes, groups of 64.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers

from bcqfmt.converters.methods.protocol import Job
from bcqfmt.converters.methods.registry import build_method
from bcqfmt.converters.quantize.calibration import calibrate
from bcqfmt.converters.quantize.calibration_work import read_text
from bcqfmt.converters.quantize.stats import StatsFile
from bcqfmt.converters.source.checkpoint import open_source

SEQUENCES, TOKENS = 96, 400  # of either text
ROWS, SEQ = 64, 256
PLANES = (2, 3, 4)
KINDS = ({"weighting": "activations"}, {"rounding": "gptq"})


def main() -> int:
    """Measure and print."""
    folder = Path(sys.argv[1])
    transformers.utils.logging.set_verbosity_error()
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
    torch.manual_seed(0)
    with TemporaryDirectory() as work:
        file = Path(work) / "text.txt"
        file.write_text(sampled(model, tokenizer), encoding="utf-8")
        given: dict[str, Any] = {"rows": ROWS, "seq": SEQ, "weighting": "tokens"}
        stats = calibrate(open_source(folder), read_text(file), Path(work) / "stats.safetensors", **given)
        tokens = torch.tensor(tokenizer(sampled(model, tokenizer)).input_ids)[: ROWS * SEQ].reshape(ROWS, SEQ)
        measure(model, tokens, stats)
    return 0


def sampled(model: Any, tokenizer: Any) -> str:
    """Text of the model's own, every token drawn as it is predicted."""
    first = torch.full((SEQUENCES, 1), 1 if tokenizer.bos_token_id is None else tokenizer.bos_token_id)
    given = {"do_sample": True, "temperature": 1.0, "top_k": 0, "min_new_tokens": TOKENS, "max_new_tokens": TOKENS}
    with torch.no_grad():
        return "\n".join(tokenizer.batch_decode(model.generate(first, **given), skip_special_tokens=True))


def measure(model: Any, tokens: torch.Tensor, stats: StatsFile) -> None:
    """A line for the dense model and for every kind of planes."""
    held = {n: p for n, p in model.named_parameters() if "layers" in n and p.ndim == 2}
    dense = {name: parameter.detach().numpy().copy() for name, parameter in held.items()}

    def made(method: str, **settings: Any) -> dict[str, Any]:
        built = build_method(method, {"group_size": 64, **settings})
        return {n: built.quantize(Job(n, weight, "F32", stats.of(n))).weight for n, weight in dense.items()}

    def perplexity(weights: dict[str, Any], planes: int) -> float:
        for name, weight in weights.items():
            held[name].data.copy_(torch.from_numpy(weight.dequantize("float32", planes=planes)))
        with torch.no_grad():
            likely = model(tokens).logits[:, :-1].log_softmax(-1).gather(2, tokens[:, 1:, None])
        return math.exp(-float(likely.mean()))

    print(f"dense: {perplexity({}, 0):.2f}")
    for kind in KINDS:
        shown = {"alone": [perplexity(made("bcq", bits=p, **kind), p) for p in PLANES]}
        for nested in ("seed", "joint"):
            weights = made("multi", nested=nested, **kind)
            shown[nested] = [perplexity(weights, p) for p in PLANES]
        for name, found in shown.items():
            print(f"{kind}, {name}: " + ", ".join(f"{one:.2f}" for one in found), flush=True)


if __name__ == "__main__":
    sys.exit(main())
