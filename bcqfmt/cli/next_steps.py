"""The commands that come after a verb, complete and quoted: how the result is run, then how it is proved."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from bcqfmt.checkpoint.folder import CONFIG
from bcqfmt.errors import escape
from bcqfmt.integrations.model_folder import is_bcq

from .command import command_line

__all__ = ["run_it", "step_lines"]

PROMPT = "Once upon a time"
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")
_OTHERS = ("gptq", "awq", "compressed-tensors", "auto-round")  # what vLLM serves


def run_it(folder: Path) -> dict[str, str]:
    """``run it``, and ``in Python``: commands for a folder that was just written; empty for one that writes no text."""
    gguf = sorted(folder.glob("*.gguf")) if folder.is_dir() else [folder] if folder.suffix == ".gguf" else []
    if gguf:
        return {"run it": command_line("llama-cli", "-m", gguf[0], "-p", PROMPT)}
    try:
        config = json.loads((folder / CONFIG).read_bytes())
    except (OSError, ValueError):
        return {}
    names = config.get("architectures") if isinstance(config, dict) else None
    causal = isinstance(names, list) and any(str(name).endswith(("ForCausalLM", "LMHeadModel")) for name in names)
    if not causal or not any((folder / name).exists() for name in _TOKENIZERS):
        return {}
    how = config.get("quantization_config")
    method = how.get("quant_method") if isinstance(how, dict) else None
    if method in _OTHERS:
        return {"run it": command_line("vllm", "serve", folder)}
    found = {"run it": command_line("bcqfmt", "generate", folder, "--prompt", PROMPT)}
    if is_bcq(folder):
        load = f"AutoModelForCausalLM.from_pretrained({str(folder)!r})"
        found["in Python"] = f"import bcqfmt.integrations.transformers, before {load}"
    return found


def step_lines(steps: Mapping[str, str]) -> list[str]:
    """The steps as lines of text."""
    return [f"{name}: {escape(text, 4096)}" for name, text in steps.items()]
