"""Running a row as `bcqfmt eval --dtype float32 --exact` does, on the CPU or a GPU."""

from __future__ import annotations

import hashlib
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
from bcqfmt.integrations.transformers import run

__all__ = ["Bench", "sha256_of"]


class Bench:
    """A text in windows that do not overlap, and where models run on it."""

    def __init__(self, model: Path, text: Path, windows: int, device: str, threads: int) -> None:
        """``windows``: how many of ``CONTEXT`` tokens; 0: all, the last one shorter."""
        torch.set_num_threads(threads)
        most = windows * CONTEXT or None
        self._windows = run.windows_of(run.open_folder(model), text.read_text(encoding="utf-8"), CONTEXT, most)
        self._device, self._source = device, model

    def measured(self, row: Row, ready: Prepared) -> dict[str, Any]:
        """Perplexity, the loss of every window, sizes and times."""
        start = time.perf_counter()
        exact = ready.values == ready.folder  # a BCQ folder
        planes = row.planes or None
        loaded = run.load(ready.values, dtype="float32", exact=exact, planes=planes, device=self._device)
        if row.atom:
            from smollm2_atom import attach

            attach(loaded.model, ready.folder, row.atom, linears(self._source))
        found = run.evaluate(loaded, self._windows)
        seconds = {**ready.seconds, "run": time.perf_counter() - start}
        return {
            "perplexity": found.perplexity,
            "tokens": found.tokens,
            "losses": found.losses,
            "window_tokens": [len(window) - 1 for window in self._windows],
            **ready.sizes,
            "seconds": {key: round(value, 1) for key, value in seconds.items()},
            "machine": self._machine(),
        }

    def _machine(self) -> dict[str, str]:
        found = {"Python": sys.version.split()[0], "numpy": np.__version__, "torch": torch.__version__}
        where = "CPU" if self._device == "cpu" else torch.cuda.get_device_name()
        return {**found, "transformers": transformers.__version__, "bcqfmt": bcqfmt.__version__, "device": where}


def sha256_of(file: Path) -> str:
    """Of a file's bytes, in hexadecimal digits."""
    return hashlib.sha256(file.read_bytes()).hexdigest()
