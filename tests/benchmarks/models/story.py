"""Perplexity of a small model that was never quantized before, such as stories260K, by method and bits.

    python tests/benchmarks/models/story.py MODEL

Calibration and test text are sampled from the model itself. Groups of 64. Prints two tables: every method at 4, 3 and 2
bits, and nested planes (`multi`) beside planes of their own (`bcq`).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers

import bcqfmt
from bcqfmt.converters.quantize.calibration import calibrate
from bcqfmt.converters.quantize.calibration_work import TextOptions, read_text
from bcqfmt.converters.quantize.quantization import Quantization, QuantizeOptions
from bcqfmt.converters.source.checkpoint import open_source

SEQUENCES, TOKENS = 96, 400  # of either text
ROWS, SEQ = 64, 256
BITS = (4, 3, 2)
GPTQ = {"rounding": "gptq"}
PUBLISHED = {"clip": "none", "static_groups": False, "act_order": False}
METHODS = {  # method, settings, how it is calibrated
    "rtn": ("rtn", {}, ""),
    "rtn, layer by layer": ("rtn", {}, "text"),
    "gptq as published": ("gptq", PUBLISHED, "none"),
    "gptq, layer by layer": ("gptq", {}, "text"),
    "gptq, layer by layer, trained": ("gptq", {}, "train"),
    "bcq": ("bcq", {}, ""),
    "bcq, weighted": ("bcq", {"weighting": "activations"}, "none"),
    "bcq, gptq, layer by layer": ("bcq", GPTQ, "text"),
    "bcq, gptq, layer by layer, trained": ("bcq", GPTQ, "train"),
}
NESTED = {"`--weighting activations`": {"weighting": "activations"}, "`--rounding gptq`": GPTQ}


class Story:
    """A model, two texts of its own and what is quantized with one of them."""

    def __init__(self, folder: Path, work: Path) -> None:
        self.source, self.work = open_source(folder), work
        self.model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
        torch.manual_seed(0)
        file = work / "text.txt"
        file.write_text(self.sampled(), encoding="utf-8")
        self.text = read_text(file)
        self.tokens = torch.tensor(self.tokenizer(self.sampled()).input_ids)[: ROWS * SEQ].reshape(ROWS, SEQ)
        self.stats = {
            kind: calibrate(self.source, self.text, work / f"{kind}.safetensors", rows=ROWS, seq=SEQ, weighting=kind)
            for kind in ("none", "tokens")
        }

    def sampled(self) -> str:
        """Text of the model's own, every token drawn as it is predicted."""
        first = torch.full((SEQUENCES, 1), self.tokenizer.bos_token_id or 1)
        given = {"do_sample": True, "temperature": 1.0, "top_k": 0, "min_new_tokens": TOKENS, "max_new_tokens": TOKENS}
        with torch.no_grad():
            return "\n".join(self.tokenizer.batch_decode(self.model.generate(first, **given), skip_special_tokens=True))

    def made(self, method: str, settings: dict[str, Any], how: str) -> Any:
        """A quantized checkpoint; ``how``: text, train, the weighting of statistics, or nothing."""
        given = TextOptions(self.text, ROWS, SEQ, "cpu", "loss", 2 if how == "train" else 0)
        options = QuantizeOptions(
            method=method, settings=settings, text=given if how in ("text", "train") else None,
            stats=self.stats.get(how), overwrite=True, workers=2, name="story",
        )  # fmt: skip
        Quantization(self.source, options).run(self.work / "made")
        return bcqfmt.open(self.work / "made")

    def perplexity(self, checkpoint: Any = None, **planes: int) -> float:
        """Of the test text; ``planes``: how many are read."""
        held = dict(self.model.named_parameters())
        for name, weight in checkpoint.weights() if checkpoint else ():
            held[name].data.copy_(torch.from_numpy(weight.dequantize("float32", **planes)))
        with torch.no_grad():
            likely = self.model(self.tokens).logits[:, :-1].log_softmax(-1).gather(2, self.tokens[:, 1:, None])
        return math.exp(-float(likely.mean()))


def lines(story: Story) -> Iterator[str]:
    """Both tables."""
    yield f"| dense: {story.perplexity():.2f} | {' | '.join(f'{bits} bits' for bits in BITS)} |"
    yield "|---" * (len(BITS) + 1) + "|"
    for text, (method, settings, how) in METHODS.items():
        made = [
            story.perplexity(story.made(method, {"group_size": 64, "bits": bits, **settings}, how)) for bits in BITS
        ]
        yield f"| {text} | {' | '.join(f'{one:.2f}' for one in made)} |"
    yield ""
    yield f"| at {', '.join(map(str, BITS))} planes | {' | '.join(NESTED)} |"
    yield "|---" * (len(NESTED) + 1) + "|"
    kinds = [{"group_size": 64, **kind} for kind in NESTED.values()]
    alone = [[story.perplexity(story.made("bcq", {"bits": bits, **kind}, "tokens")) for bits in BITS] for kind in kinds]
    yield _cells("planes of their own", alone)
    for nested in ("seed", "joint"):
        files = (story.made("multi", {"nested": nested, **kind}, "tokens") for kind in kinds)
        yield _cells(f"`--nested {nested}`", [[story.perplexity(file, planes=bits) for bits in BITS] for file in files])


def _cells(text: str, found: list[list[float]]) -> str:
    return f"| {text} | {' | '.join(', '.join(f'{one:.2f}' for one in each) for each in found)} |"


def main() -> int:
    """Measure and print."""
    transformers.utils.logging.set_verbosity_error()
    with TemporaryDirectory() as work:
        for line in lines(Story(Path(sys.argv[1]), Path(work))):
            print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
