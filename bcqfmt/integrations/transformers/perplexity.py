"""Perplexity of a model on a text, with tensors of the caller in place of its own; needs torch and transformers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from bcqfmt.errors import error, escape

__all__ = ["Perplexity", "TextModel"]


class Perplexity(NamedTuple):
    """exp(mean negative log-likelihood) over ``tokens`` predicted tokens."""

    value: float
    tokens: int


class TextModel:
    """A causal language model and a text, cut into windows of ``context`` tokens that do not overlap.

    In a window every token but the first is predicted from those before it. The arithmetic is float32 on the CPU; a
    model's own code is never run.
    """

    def __init__(self, folder: Path, text: str, *, context: int = 512, most_tokens: int | None = None) -> None:
        """``folder``: a local model folder with config, weights and tokenizer. ``most_tokens``: cut the text there."""
        if context < 2:
            raise error("BCQ-E302", found=f"a context of {context} tokens", expected="at least 2")
        self._torch, model_class, tokenizer_class = _world()
        try:
            tokenizer = tokenizer_class.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except Exception as fault:
            raise _unusable(folder, "its tokenizer cannot be loaded", fault) from fault
        ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"][:most_tokens]
        self._windows = [ids[i : i + context] for i in range(0, len(ids), context) if len(ids[i : i + context]) > 1]
        if not self._windows:
            raise error("BCQ-E302", found=f"a text of {len(ids)} tokens", expected="at least 2")
        try:
            self._model = model_class.from_pretrained(
                folder, dtype=self._torch.float32, local_files_only=True, trust_remote_code=False
            ).eval()
        except Exception as fault:
            raise _unusable(folder, "it cannot be loaded by transformers", fault) from fault
        self._parameters: dict[str, Any] = {**dict(self._model.named_buffers()), **dict(self._model.named_parameters())}
        self._folder = folder

    @property
    def names(self) -> set[str]:
        """Names of the tensors that can be swapped."""
        return set(self._parameters)

    def swap(self, tensors: Iterable[tuple[str, npt.NDArray[Any]]]) -> None:
        """Put arrays of the same shapes in the place of the model's tensors, one after the other."""
        torch = self._torch
        for name, array in tensors:
            target = self._parameters.get(name)
            if target is None or tuple(target.shape) != array.shape:
                found = "no such tensor in the loaded model" if target is None else f"shape {list(target.shape)}"
                raise error("BCQ-E301", self._folder.name, name, found, f"a tensor of shape {list(array.shape)}")
            with torch.no_grad():
                target.copy_(torch.from_numpy(np.ascontiguousarray(array, np.float32)))

    def perplexity(self, tick: Callable[[int], None] | None = None) -> Perplexity:
        """Run the text through the model as it is now; ``tick`` is told the tokens done since the last call."""
        torch, losses, count = self._torch, [], 0
        with torch.inference_mode():
            for window in self._windows:
                ids = torch.tensor([window])
                logits = self._model(input_ids=ids, use_cache=False).logits[0, :-1].float()
                losses.append(torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum").item())
                count += len(window) - 1
                if tick is not None:
                    tick(len(window))
        mean = math.fsum(losses) / count
        return Perplexity(math.exp(mean) if mean < 700 else math.inf, count)


def _world() -> tuple[Any, Any, Any]:
    """torch, and the classes of transformers; quiet, so that a verb's own messages can be seen."""
    try:
        import torch
        import transformers
    except ImportError as fault:
        raise error(
            "BCQ-E306", found=f"{fault.name} is not installed", hint="pip install 'bcqfmt[transformers]'"
        ) from None
    quiet: Any = transformers.utils.logging
    quiet.set_verbosity_error()
    quiet.disable_progress_bar()
    return torch, transformers.AutoModelForCausalLM, transformers.AutoTokenizer


def _unusable(folder: Path, what: str, fault: Exception) -> Exception:
    reason = str(fault).partition("\n")[0] or type(fault).__name__
    return error("BCQ-E102", folder.name, found=f"{what}: {escape(reason)}", expected="a model that transformers knows")
