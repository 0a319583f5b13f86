"""Tokens per second of real models on a GPU, one sequence: a dense folder and BCQ folders of it, CUDA graphs for all.

    python tests/benchmarks/models/tokens_of_folders.py DENSE BCQ ... [--compile] [--out FILE.json]

Every folder is loaded by transformers in float16. The prompt is read at once into a cache of fixed length; then a step
of the model (one token in, the likeliest next one out, which is the next step's input) is captured in a CUDA graph and
replayed. Timed are 64 steps behind the prompt, the median of 7 rounds counts. The text that the replays write is
compared with what ``model.generate`` writes without a graph. ``--compile`` gives the step to torch.compile first, which
fuses what lies between the products.

SmolLM2 and its BCQ folders, as in tokens_per_second.md:

    python tests/benchmarks/models/smollm2_folder.py smollm2
    bcqfmt quantize smollm2 smollm2-4 --method rtn --bits 4 --group-size 64      # and 3, and 2

``--device cpu`` takes the same steps without a graph, to see that it works.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

np.__dict__.setdefault("row_stack", np.vstack)  # numba-cuda asks for it when it is imported, numpy 2.5 has it no more

PROMPT = "<|im_start|>user\nWhat is gravity?<|im_end|>\n<|im_start|>assistant\n"
LENGTH, STEPS, ROUNDS = 512, 64, 7


class Writer:
    """A model, its cache behind the prompt, and the step that writes one token more."""

    def __init__(self, model: Any, ids: Any, *, fuse: bool) -> None:
        import torch
        import transformers

        self.model, self.last = model, ids.shape[1] - 1
        self.forward = torch.compile(model.forward, fullgraph=True) if fuse else model.forward
        self.cache = transformers.StaticCache(config=model.config, max_cache_len=LENGTH)
        self.places = torch.arange(LENGTH, device=ids.device)
        self.position = torch.zeros(1, dtype=torch.long, device=ids.device)
        self.token, self.begun_with = ids[:, -1:].clone(), ids[:, -1:].clone()
        seen = self.places <= self.places[: self.last, None]
        model(ids[:, :-1], attention_mask=seen[None, None], past_key_values=self.cache)

    def begin(self) -> None:
        """Back to the end of the prompt, whose last token comes next."""
        self.position.fill_(self.last)
        self.token.copy_(self.begun_with)
        for layer in self.cache.layers:
            layer.cumulative_length.fill_(self.last)

    def step(self) -> None:
        """``token`` and ``position`` become those of the next step."""
        seen = (self.places <= self.position)[None, None, None]
        logits = self.forward(
            self.token, attention_mask=seen, position_ids=self.position[None], past_key_values=self.cache
        ).logits
        self.token.copy_(logits[:, -1].argmax(-1, keepdim=True))
        self.position.add_(1)


def replays(writer: Writer) -> Any:
    """The step in a CUDA graph; on a CPU the step itself."""
    import torch

    if writer.token.device.type == "cpu":
        return writer.step
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for _ in range(3):  # compiles
            writer.begin()
            writer.step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    writer.begin()
    with torch.cuda.graph(graph, stream=stream):
        writer.step()
    return graph.replay


def written(writer: Writer, step: Any, count: int) -> list[int]:
    """The tokens of ``count`` steps."""
    writer.begin()
    found = []
    for _ in range(count):
        step()
        found.append(int(writer.token))
    return found


def seconds_per_step(writer: Writer, step: Any) -> float:
    """Median over the rounds."""
    import torch

    on_gpu = writer.token.device.type == "cuda"
    times = []
    for _ in range(ROUNDS if on_gpu else 1):
        writer.begin()
        if on_gpu:
            torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(STEPS):
            step()
        if on_gpu:
            torch.cuda.synchronize()
        times.append((time.perf_counter() - begin) / STEPS)
    return statistics.median(times)


def measured(folder: Path, device: str, fuse: bool) -> dict[str, Any]:
    """One folder."""
    import torch

    from bcqfmt.integrations.torch import BcqLinear
    from bcqfmt.integrations.transformers import generation, run

    begin = time.perf_counter()
    loaded = run.load(folder, dtype="float16", device=device)
    ids = loaded.tokenizer(PROMPT, return_tensors="pt")["input_ids"].to(device)
    with torch.inference_mode():
        writer = Writer(loaded.model, ids, fuse=fuse)
        step = replays(writer)
        tokens = written(writer, step, STEPS)
        taken = seconds_per_step(writer, step)
        generation.generate(loaded, PROMPT, most=2)
        plain, count, seconds = generation.generate(loaded, PROMPT, most=STEPS)
    text = loaded.tokenizer.decode(tokens, skip_special_tokens=True)
    same = next((i for i, (a, b) in enumerate(zip(text, plain, strict=False)) if a != b), min(len(text), len(plain)))
    layers = [module for module in loaded.model.modules() if isinstance(module, BcqLinear | torch.nn.Linear)]
    head = loaded.model.get_output_embeddings()
    size = sum(t.numel() * t.element_size() for m in layers if m is not head for t in m.state_dict().values())
    kinds = {m.extra_repr() for m in layers if isinstance(m, BcqLinear)}
    return {
        "folder": folder.name, "milliseconds": taken * 1e3, "tokens_per_second": 1 / taken,
        "generate_tokens_per_second": count / seconds, "linear_bytes": size, "text": text,
        "characters_as_generate": same, "of": len(plain), "bcq_layers": sum(isinstance(m, BcqLinear) for m in layers),
        "layers": sorted(kinds)[:1], "seconds_in_all": time.perf_counter() - begin,
    }  # fmt: skip


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description="Tokens per second of a dense folder and BCQ folders of it.")
    parser.add_argument("folders", type=Path, nargs="+", help="the dense one first")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--compile", action="store_true", help="torch.compile before the graph")
    parser.add_argument("--out", type=Path, help="write the figures here as JSON")
    given = parser.parse_args()
    import torch
    import transformers

    about = {
        "device": torch.cuda.get_device_name(0) if given.device == "cuda" else platform.machine(),
        "torch": torch.__version__, "transformers": transformers.__version__, "python": platform.python_version(),
        "compiled": given.compile, "cache": LENGTH, "steps": STEPS, "rounds": ROUNDS,
    }  # fmt: skip
    rows: list[dict[str, Any]] = []
    for folder in given.folders:
        row = measured(folder, given.device, given.compile)
        row["speedup"] = rows[0]["milliseconds"] / row["milliseconds"] if rows else 1.0
        rows.append(row)
        print(
            f"{row['folder']:<16} {row['milliseconds']:8.3f} ms {row['tokens_per_second']:8.1f} tokens/s "
            f"{row['speedup']:5.2f}x  {row['linear_bytes'] / 1e6:7.1f} MB in {row['bcq_layers']} BCQ layers; generate "
            f"{row['generate_tokens_per_second']:.0f} tokens/s, {row['characters_as_generate']} of {row['of']} "
            f"characters the same",
            flush=True,
        )
        if given.out is not None:  # after every folder: loading and compiling take longer than measuring
            given.out.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    print(f"\n{rows[0]['text']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
