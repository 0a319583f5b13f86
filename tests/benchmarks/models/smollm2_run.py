"""Running a row: windows of the text through transformers, in float32, on the CPU or a GPU."""

from __future__ import annotations

import hashlib
import math
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from smollm2_prepare import Prepared, linears
from smollm2_rows import CONTEXT, Row

import bcqfmt

__all__ = ["Bench", "sha256_of"]

BATCH = {"cpu": 1, "cuda": 32}  # windows at a time


class Bench:
    """A text in windows that do not overlap, and where models run on it."""

    def __init__(self, model: Path, text: Path, windows: int, device: str, threads: int) -> None:
        """``windows``: how many of ``CONTEXT`` tokens; 0: all, the last one shorter."""
        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision("highest")  # float32 products, not TF32
        torch.backends.cudnn.allow_tf32 = False
        tokenizer = transformers.AutoTokenizer.from_pretrained(model, local_files_only=True)
        ids = tokenizer(text.read_text(encoding="utf-8"), add_special_tokens=False, verbose=False)["input_ids"]
        ids = ids[: windows * CONTEXT] if windows else ids
        self._windows = [ids[i : i + CONTEXT] for i in range(0, len(ids), CONTEXT) if len(ids[i : i + CONTEXT]) > 1]
        self._device, self._source = torch.device(device), model

    def measured(self, row: Row, ready: Prepared) -> dict[str, Any]:
        """Perplexity, the loss of every window, sizes and times."""
        start = time.perf_counter()
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(
            ready.values, dtype=torch.float32, local_files_only=True
        )
        if row.planes:
            held = dict(model.named_parameters())
            for name, weight in bcqfmt.open(ready.folder).weights():
                values = weight.dequantize("float16", planes=row.planes)
                held[name].data.copy_(torch.from_numpy(values.astype(np.float32)))
        model.to(self._device).eval()
        if row.atom:
            from smollm2_atom import attach

            attach(model, ready.folder, row.atom, linears(self._source))
        losses, tokens = self._losses(model)
        mean = math.fsum(losses) / sum(tokens)
        seconds = {**ready.seconds, "run": time.perf_counter() - start}
        return {
            "perplexity": math.exp(mean) if mean < 700 else math.inf,
            "tokens": sum(tokens),
            "losses": losses,
            "window_tokens": tokens,
            **ready.sizes,
            "seconds": {key: round(value, 1) for key, value in seconds.items()},
            "machine": self._machine(),
        }

    def _losses(self, model: Any) -> tuple[list[float], list[int]]:
        """Summed negative log-likelihood and predicted tokens, per window."""
        whole = [window for window in self._windows if len(window) == CONTEXT]
        step = BATCH[self._device.type]
        batches = [whole[i : i + step] for i in range(0, len(whole), step)]
        batches += [[window] for window in self._windows[len(whole) :]]
        losses: list[float] = []
        with torch.inference_mode():
            for batch in batches:
                ids = torch.tensor(batch, device=self._device)
                logits = model(input_ids=ids, use_cache=False).logits[:, :-1].flatten(0, 1)
                found = torch.nn.functional.cross_entropy(logits, ids[:, 1:].flatten(), reduction="none")
                losses += found.double().reshape(len(batch), -1).sum(1).tolist()
        return losses, [len(window) - 1 for window in self._windows]

    def _machine(self) -> dict[str, str]:
        found = {"Python": sys.version.split()[0], "numpy": np.__version__, "torch": torch.__version__}
        where = torch.cuda.get_device_name() if self._device.type == "cuda" else "CPU"
        return {**found, "transformers": transformers.__version__, "bcqfmt": bcqfmt.__version__, "device": where}


def sha256_of(file: Path) -> str:
    """Of a file's bytes, in hexadecimal digits."""
    return hashlib.sha256(file.read_bytes()).hexdigest()
