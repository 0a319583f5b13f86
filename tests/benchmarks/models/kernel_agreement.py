"""How far the kernels are from the dense model, on real text.

    python tests/benchmarks/models/kernel_agreement.py BCQ DENSE TEXT [--device cuda] [--json FILE]

DENSE is the dense export of the BCQ folder (``bcqfmt export BCQ DENSE --to dense``): its values, loaded and multiplied
the ordinary way. Taken are the first twenty passages of at least 128 tokens of a text (WikiText has one a line), each
cut to 128 tokens. All models predict every next token. Reported are the divergence of one model's predictions from
another's in nats per token, and how often both find the same token likeliest. *whole*: a passage at once, where the
kernels decode some rows at a time and multiply densely. *one by one*: token after token with a cache, where they work
from the planes.

What is compared, for activations of each dtype:

- *kernels*: the BCQ folder. The goal is its distance from *dense*.
- *dense*: the export loaded in that dtype; *dense float32*: loaded in float32, the most accurate of them.
- *wide sums*: dense, but the products that the kernels replace add up in float32 and are rounded once. Weights, inputs
  and outputs are those of *dense*, the order of the additions is another. Its distance
  from *dense* is what any other order of additions costs.
- *rounded logits*: dense float32 to the very end, then its logits are rounded to the dtype, as every model in it does.
- *unrounded*: dense float32 with the values as they are before section 8 of the specification rounds them to the
  weights' dtype. The kernels multiply with these.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

PASSAGES, TOKENS = 20, 128
WAYS = ("whole", "one by one")
DTYPES = ("float32", "float16", "bfloat16")
KL, TOP1 = 1e-4, 0.995


def main() -> int:
    """Measure and print; 1 if a goal is missed."""
    parser = argparse.ArgumentParser(description="Kernels against the dense model on passages of a text.")
    parser.add_argument("bcq", type=Path, help="a BCQ folder with its tokenizer")
    parser.add_argument("dense", type=Path, help="its dense export")
    parser.add_argument("text", type=Path, help="UTF-8, a passage a line")
    parser.add_argument("--dtype", action="append", choices=DTYPES, help="of activations; by default all three")
    parser.add_argument("--way", action="append", choices=WAYS, help="by default both")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of a passage; %(default)s")
    parser.add_argument("--device", default="cpu", help="torch's name of it; %(default)s")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    dtypes, ways = given.dtype or DTYPES, given.way or WAYS
    rows = measured(given.bcq, given.dense, given.text, dtypes, ways, device=given.device, tokens=given.tokens)
    for row in rows:
        print(line_of(row), flush=True)
    if given.json is not None:
        given.json.write_text(json.dumps({**about(given.device), "rows": rows}, indent=1) + "\n", encoding="utf-8")
    return int(any(row["goal"] and not row["met"] for row in rows))


def measured(
    bcq: Path, dense: Path, text: Path, dtypes: Sequence[str] = DTYPES, ways: Sequence[str] = WAYS, *,
    device: str = "cpu", tokens: int = TOKENS,
) -> list[dict[str, Any]]:  # fmt: skip
    """Figures of every comparison, one dtype after the other."""
    models, tokenizer = models_of(bcq, dense, dtypes, device)
    passages = passages_of(tokenizer, text, tokens)
    tallies = {key: Tally() for dtype in dtypes for key in comparisons(dtype, ways)}
    with torch.inference_mode():
        for ids in tqdm(passages, desc="passages", leave=False, disable=None):
            given = torch.tensor([ids], device=device)
            seen = {
                (name, way): logits_of(model, given, way)
                for way in ways
                for name, model in tqdm(models.items(), desc=way, leave=False, disable=None)
            }
            for way in ways:
                exact = seen["dense float32", way]
                seen |= {(f"rounded logits {dtype}", way): exact.to(getattr(torch, dtype)) for dtype in dtypes}
            for (_, found, wanted), tally in tallies.items():
                tally.add(seen[wanted], seen[found])
    return [row_of(*key, tally, len(passages)) for key, tally in tallies.items()]


def comparisons(dtype: str, ways: Sequence[str]) -> Iterator[tuple[str, Any, Any]]:
    """(dtype, what is measured, against what); both as (model, way)."""
    dense = f"dense {dtype}"
    for way in ways:
        yield dtype, (f"kernels {dtype}", way), (dense, way)
        if dtype == "float32":
            yield dtype, ("kernels float32", way), ("unrounded", way)
        else:
            yield dtype, (f"wide sums {dtype}", way), (dense, way)
            for name in (f"kernels {dtype}", dense, f"rounded logits {dtype}"):
                yield dtype, (name, way), ("dense float32", way)
    if len(ways) == len(WAYS):
        yield dtype, (dense, ways[1]), (dense, ways[0])
        yield dtype, (f"kernels {dtype}", ways[1]), (f"kernels {dtype}", ways[0])


class Tally:
    """Sums over tokens of one comparison."""

    def __init__(self) -> None:
        self.kl, self.largest, self.margin = 0.0, 0.0, 0.0
        self.differing, self.tied, self.tokens = 0, 0, 0

    def add(self, wanted: Tensor, found: Tensor) -> None:
        """Logits (tokens, vocabulary) of one passage."""
        wanted, found = (logits.double().log_softmax(-1) for logits in (wanted, found))
        apart = (wanted.exp() * (wanted - found)).sum(-1)
        self.kl, self.largest = self.kl + float(apart.sum()), max(self.largest, float(apart.max()))
        first, other = wanted.argmax(-1, keepdim=True), found.argmax(-1, keepdim=True)
        lost = (wanted.gather(-1, first) - wanted.gather(-1, other))[first != other]
        self.margin = max([self.margin, *lost.tolist()])
        self.differing, self.tied = self.differing + len(lost), self.tied + int((lost == 0).sum())
        self.tokens += len(apart)


def row_of(dtype: str, found: tuple[str, str], wanted: tuple[str, str], tally: Tally, passages: int) -> dict[str, Any]:
    """A row of the JSON file.

    ``tied``: of the differing tokens, those that share the first place in the second model; ``margin``: the most by
    which a token that lost the first place had held it there, in nats.
    """
    kl, top1 = tally.kl / tally.tokens, 1 - tally.differing / tally.tokens
    return {
        "activations": dtype, "found": found, "against": wanted,
        "goal": (found[0], wanted[0]) == (f"kernels {dtype}", f"dense {dtype}"), "met": kl <= KL and top1 >= TOP1,
        "kl": kl, "largest": tally.largest, "top1": top1, "differing": tally.differing, "tied": tally.tied,
        "margin": tally.margin, "tokens": tally.tokens, "passages": passages,
    }  # fmt: skip


def line_of(row: dict[str, Any]) -> str:
    """A row for people."""
    (found, way), (wanted, other) = row["found"], row["against"]
    compared = f"{found} against {wanted}, {way}" + ("" if way == other else f" against {other}")
    shown = f"KL {row['kl']:.2e} (largest {row['largest']:.1e})  top-1 {100 * row['top1']:.2f} %"
    shown += f" ({row['differing']} of {row['tokens']:,} differ, {row['tied']} tied)"
    return f"{compared:<72} {shown}" + (("  goal: " + ("met" if row["met"] else "missed")) if row["goal"] else "")


def results_of(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows that have a goal."""
    return [row for row in rows if row["goal"]]


def limits_of(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the dense model itself loses to another order of additions, and to rounding its logits."""
    return [row for row in rows if row["found"][0].startswith(("wide sums", "rounded logits"))]


def table_of(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as they stand on the page (Markdown)."""
    lines = ["| activations | compared | passages | KL | largest | same likeliest token | goal |", "|---" * 7 + "|"]
    for row in rows:
        (found, way), (wanted, other) = row["found"], row["against"]
        where = way if way == other else f"{way} against {other}"
        same = f"{100 * row['top1']:.2f} % ({row['differing']} of {row['tokens']:,} differ, {row['tied']} tied)"
        goal = ("met" if row["met"] else "**missed**") if row["goal"] else ""
        figures = f"{row['kl']:.1e} | {row['largest']:.1e} | {same} | {goal}"
        lines.append(f"| {row['activations']} | {found} against {wanted} | {where} | {figures} |")
    return "\n".join(lines)


def about(device: str) -> dict[str, Any]:
    """Where this was run."""
    cuda = device.startswith("cuda")
    name = torch.cuda.get_device_name() if cuda else platform.processor() or platform.machine()
    return {"device": name, "torch": torch.__version__.partition("+")[0], "python": platform.python_version()}


def models_of(bcq: Path, dense: Path, dtypes: Sequence[str], device: str) -> tuple[dict[str, Any], Any]:
    """Every model that is compared, by name, and the tokenizer."""
    from bcqfmt.integrations.torch.layers import BcqLinear
    from bcqfmt.integrations.transformers import run

    models: dict[str, Any] = {}
    for dtype in dict.fromkeys(("float32", *dtypes)):
        models[f"dense {dtype}"] = run.load(dense, dtype=dtype).model
        if dtype not in dtypes:
            continue
        loaded = run.load(bcq, dtype=dtype)
        models[f"kernels {dtype}"] = loaded.model
        layers = {name: held for name, held in loaded.model.named_modules() if isinstance(held, BcqLinear)}
        another = run.load(dense, dtype=dtype).model
        models["unrounded" if dtype == "float32" else f"wide sums {dtype}"] = another
        for name, layer in layers.items():
            if dtype == "float32":
                another.get_submodule(name).weight.data.copy_(layer.values(torch.float32))
            else:
                another.set_submodule(name, WideSums(another.get_submodule(name)))
    return {name: model.to(device) for name, model in models.items()}, loaded.tokenizer


class WideSums(nn.Module):
    """A linear layer that adds up in float32 and rounds the result once."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.register_buffer("weight", layer.weight.detach().float())
        self.register_buffer("bias", None if layer.bias is None else layer.bias.detach().float())

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) -> (..., out)."""
        return nn.functional.linear(x.float(), self.weight, self.bias).to(x.dtype)


def passages_of(tokenizer: Any, text: Path, tokens: int) -> list[list[int]]:
    """Tokens of the first passages that are long enough."""
    found: list[list[int]] = []
    for line in text.read_text(encoding="utf-8").splitlines():
        ids = tokenizer(line.strip(), add_special_tokens=False, verbose=False)["input_ids"]
        if len(ids) >= tokens:
            found.append(ids[:tokens])
        if len(found) == PASSAGES:
            break
    return found


def logits_of(model: Any, ids: Tensor, way: str) -> Tensor:
    """(tokens, vocabulary) for ids (1, tokens)."""
    if way == "whole":
        logits: Tensor = model(input_ids=ids, use_cache=False).logits[0]
        return logits
    rows, cache = [], None
    for i in range(ids.shape[1]):
        step = model(input_ids=ids[:, i : i + 1], past_key_values=cache, use_cache=True)
        cache = step.past_key_values
        rows.append(step.logits[0, -1])
    return torch.stack(rows)


if __name__ == "__main__":
    sys.exit(main())
