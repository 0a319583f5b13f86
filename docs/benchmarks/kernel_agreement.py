"""How far the kernels are from the dense model, on real text: ``kernel_agreement.py BCQ DENSE TEXT [--json FILE]``.

DENSE is the dense export of the BCQ folder (``bcqfmt export BCQ DENSE --to dense``): the same values, loaded and
multiplied the ordinary way. The first twenty passages of at least 64 tokens of a text (WikiText has one a line), each
cut to 64 tokens. Both models predict every next token. Reported are the divergence of the kernels' predictions,
KL(dense || kernels) in nats per token, and how often both find the same token likeliest. *whole*: a passage at once,
where the kernels decode some rows at a time and multiply densely. *one by one*: token after token with a cache, where
they look sums up in tables.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

PASSAGES, TOKENS = 20, 64
WAYS = ("whole", "one by one")


def main() -> int:
    """Measure and print; 1 if a goal is missed."""
    parser = argparse.ArgumentParser(description="Kernels against the dense model on passages of a text.")
    parser.add_argument("bcq", type=Path, help="a BCQ folder with its tokenizer")
    parser.add_argument("dense", type=Path, help="its dense export")
    parser.add_argument("text", type=Path, help="UTF-8, a passage a line")
    parser.add_argument("--dtype", action="append", help="of activations; by default float32, float16 and bfloat16")
    parser.add_argument("--reference-dtype", help="another one for the dense model")
    parser.add_argument("--way", action="append", choices=WAYS)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    rows = []
    for dtype in given.dtype or ["float32", "float16", "bfloat16"]:
        for row in measured(given.bcq, given.dense, given.text, dtype, given.reference_dtype, given.way or WAYS):
            rows.append(row)
            shown = f"KL {row['kl']:.2e} (largest {row['largest']:.2e})  top-1 {100 * row['top1']:.2f} %"
            print(
                f"{dtype:<9} {row['way']:<11} {shown}  {row['tokens']} tokens of {row['passages']} passages", flush=True
            )
    if given.json is not None:
        given.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return int(any(row["kl"] > 1e-4 or row["top1"] < 0.995 for row in rows))


def measured(
    bcq: Path, dense: Path, text: Path, dtype: str, reference_dtype: str | None = None, ways: Sequence[str] = WAYS
) -> Iterator[dict[str, Any]]:
    """Figures of both ways to run the models."""
    import torch

    from bcqfmt.integrations import transformers_run as run

    models = [run.load(dense, dtype=reference_dtype or dtype), run.load(bcq, dtype=dtype)]
    passages = passages_of(models[1].tokenizer, text)
    for way in ways:
        total, largest, same, count = 0.0, 0.0, 0, 0
        with torch.inference_mode():
            for ids in tqdm(passages, desc=f"{dtype}, {way}", leave=False):
                wanted, found = (predictions(loaded.model, torch.tensor([ids]), way) for loaded in models)
                apart = (wanted.exp() * (wanted - found)).sum(-1)
                total, largest = total + float(apart.sum()), max(largest, float(apart.max()))
                same += int((wanted.argmax(-1) == found.argmax(-1)).sum())
                count += len(apart)
        yield {
            "activations": dtype, "way": way, "kl": total / count, "largest": largest, "top1": same / count,
            "tokens": count, "passages": len(passages),
        }  # fmt: skip


def passages_of(tokenizer: Any, text: Path) -> list[list[int]]:
    """Tokens of the first passages that are long enough."""
    found: list[list[int]] = []
    for line in text.read_text(encoding="utf-8").splitlines():
        ids = tokenizer(line.strip(), add_special_tokens=False, verbose=False)["input_ids"]
        if len(ids) >= TOKENS:
            found.append(ids[:TOKENS])
        if len(found) == PASSAGES:
            break
    return found


def predictions(model: Any, ids: Any, way: str) -> Any:
    """(tokens, vocabulary) float64: logarithms of the probabilities of every next token."""
    import torch

    if way == "whole":
        return model(input_ids=ids, use_cache=False).logits[0].double().log_softmax(-1)
    rows, cache = [], None
    for i in range(ids.shape[1]):
        step = model(input_ids=ids[:, i : i + 1], past_key_values=cache, use_cache=True)
        cache = step.past_key_values
        rows.append(step.logits[0, -1].double().log_softmax(-1))
    return torch.stack(rows)


if __name__ == "__main__":
    sys.exit(main())
