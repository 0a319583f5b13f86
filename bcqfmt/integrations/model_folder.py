"""What can be found out about running a model folder before torch is imported, which takes many seconds."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bcqfmt.checkpoint.folder import MANIFEST, read_config
from bcqfmt.container.files import refuse_pipes
from bcqfmt.errors import error, escape
from bcqfmt.kernels.runtime.device import require_cuda
from bcqfmt.version import pip_install

_TOKENIZER = ("*token*", "*vocab*", "*.model", "*.tiktoken", "tekken.json")  # what the files of any kind are called


def check_folder(folder: Path, *, device: str = "cpu", tokens: int = 0, hint: str = "") -> int | None:
    """A folder with a tokenizer, a device that may be there, and a model with positions for that many ``tokens``.

    How many it has, where it says so.

    ``hint`` is shown where those are too many (BCQ-E302). BCQ-E306 or BCQ-E551 for a device that cannot be used.
    """
    if folder.is_file():
        place = escape(f"{folder.parent}/")
        expected = "a model folder"
        raise error("BCQ-E302", str(folder), found="a file", expected=expected, hint=f"name its folder: {place}")
    if not folder.is_dir():  # transformers would look for a hub id
        raise error("BCQ-E101", str(folder), found="no such folder", expected="a model folder")
    if device.startswith("cuda") and is_bcq(folder):
        require_cuda()
    if device == "mps" and sys.platform != "darwin":
        raise error("BCQ-E551", found="mps is the GPU of a Mac, and this is none", expected="cpu or cuda")
    refuse_pipes(folder)
    if not any(next(folder.glob(name), None) for name in _TOKENIZER):
        hint_files = "copy the original model's tokenizer files"
        raise error("BCQ-E102", str(folder), found="no tokenizer files", expected="a tokenizer", hint=hint_files)
    config = read_config(folder, lambda finding: None) or {}  # transformers says what is wrong with it
    longest = longest_context(config)
    check_length(folder, longest, tokens, hint)
    return longest


def require_harness() -> None:
    """BCQ-E306 without the lm-evaluation-harness."""
    if importlib.util.find_spec("lm_eval") is None:
        raise error("BCQ-E306", found="lm_eval is not installed", hint=pip_install("eval"))


def check_length(folder: Path, longest: int | None, tokens: int, hint: str) -> None:
    """BCQ-E302 for more tokens than a model has positions for."""
    if longest is not None and tokens > longest:
        raise error("BCQ-E302", folder.name, found=f"{tokens} tokens", expected=f"at most {longest}", hint=hint)


def longest_context(config: Mapping[str, Any]) -> int | None:
    """``max_position_embeddings`` of a config.json, or of the language model in it; None where it is not stated."""
    inner = config.get("text_config")
    nested = inner.get("max_position_embeddings") if isinstance(inner, dict) else None
    found = config.get("max_position_embeddings", nested)
    return found if isinstance(found, int) else None


def is_bcq(folder: Path) -> bool:
    """Whether it is a finished BCQ folder."""
    return (folder / MANIFEST).exists()
