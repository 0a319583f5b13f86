"""The commands that come after a verb, complete and quoted: how the result is run, then how it is proved."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bcqfmt.errors import escape

from .command import command_line

PROMPT = "Once upon a time"
_GROUPS = (-1, 16, 32, 64, 128, 256, 512, 1024)  # of GPTQModel
_SERVED_GROUPS = (None, -1, 32, 64, 128)  # of vLLM's kernels
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")
_LOADERS = {
    "gptq": ("from gptqmodel import GPTQModel", "GPTQModel.load"),
    "awq": ("from gptqmodel import GPTQModel", "GPTQModel.load"),
    "compressed-tensors": ("from transformers import AutoModelForCausalLM", "AutoModelForCausalLM.from_pretrained"),
}


def run_it(folder: Path) -> dict[str, str]:
    """``run it``, and ``in Python``: commands for a folder that was just written; empty for one that writes no text."""
    from bcqfmt.checkpoint.folder import CONFIG
    from bcqfmt.inspect.kinds import look

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
    kind = look(folder).kind
    if kind == "quantized":
        how = config.get("quantization_config")
        return _run_quantized(folder, how if isinstance(how, dict) else {})
    found = {"run it": command_line("bcqfmt", "generate", folder, "--prompt", PROMPT)}
    if kind == "bcq":
        load = f"AutoModelForCausalLM.from_pretrained({str(folder)!r})"
        found["in Python"] = f"import bcqfmt.integrations.transformers, before {load}"
    return found


def _run_quantized(folder: Path, how: Mapping[str, Any]) -> dict[str, str]:
    """vLLM where it takes such weights, else the library that does."""
    method = str(how.get("quant_method", ""))
    if _served(method, how):
        return {"run it": command_line("vllm", "serve", folder)}
    if method not in _LOADERS or (method != "compressed-tensors" and how.get("group_size") not in _GROUPS):
        return {}
    first, load = _LOADERS[method]
    return {"in Python": f"{first}; {load}({str(folder)!r})  # vLLM does not take it, but the BCQ folder"}


def _served(method: str, how: Mapping[str, Any]) -> bool:
    """Whether vLLM 0.26 and later take it: GPTQ that is not symmetric, and most widths, they no longer do."""
    if method == "gptq":
        return how.get("bits") in (4, 8) and how.get("sym") is True and how.get("group_size") in _SERVED_GROUPS
    if method == "awq":
        gemm = str(how.get("version", "gemm")).lower() == "gemm"
        return gemm and how.get("bits") == 4 and how.get("group_size") in _SERVED_GROUPS
    if method == "compressed-tensors":
        groups = how.get("config_groups")
        each = list(groups.values()) if isinstance(groups, dict) else []
        kinds = [group.get("weights") if isinstance(group, dict) else None for group in each]
        return bool(kinds) and all(
            isinstance(one, dict)
            and one.get("num_bits") in (4, 8)
            and one.get("group_size") in _SERVED_GROUPS
            and one.get("actorder") != "group"
            for one in kinds
        )
    return method == "auto-round" and how.get("packing_format") in ("auto_round:auto_gptq", "auto_round:auto_awq")


def prove_it(src: str, dst: Path, *where: str, provenance: bool) -> str:
    """The command that proves a conversion; without ``provenance`` nothing rebuilds the source, digests are left."""
    if not provenance:
        return command_line("bcqfmt", "validate", "--deep", dst)
    return command_line("bcqfmt", "verify", src, dst, *where)


def step_lines(steps: Mapping[str, str]) -> list[str]:
    """The steps as lines of text."""
    return [f"{name}: {escape(text, 4096)}" for name, text in steps.items()]
