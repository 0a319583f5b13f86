"""Perplexity of a dense model on a text, with tensors of the caller in place of its own (torch, transformers)."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from bcqfmt.errors import error

from . import run


class Perplexity(NamedTuple):
    """exp(mean negative log-likelihood) over ``tokens`` predicted tokens."""

    value: float
    tokens: int


class TextModel:
    """A causal language model in float32 on the CPU, and a text in windows of ``context`` tokens (`run.evaluate`)."""

    def __init__(self, folder: Path, text: str, *, context: int = 512, most_tokens: int | None = None) -> None:
        """``folder``: a local model folder with config, weights and tokenizer. ``most_tokens``: cut the text there."""
        self._loaded = run.load(folder, dtype="float32")
        self._windows = run.windows_of(self._loaded.opened, text, context, most_tokens)
        model = self._loaded.model
        self._tensors: dict[str, Any] = {**dict(model.named_buffers()), **dict(model.named_parameters())}

    @property
    def names(self) -> set[str]:
        """Names of the tensors that can be swapped."""
        return set(self._tensors)

    def swap(self, tensors: Iterable[tuple[str, npt.NDArray[Any]]]) -> None:
        """Put arrays of the same shapes in the place of the model's tensors, one after the other."""
        import torch

        for name, array in tensors:
            target = self._tensors.get(name)
            if target is None or tuple(target.shape) != array.shape:
                found = "no such tensor in the loaded model" if target is None else f"shape {list(target.shape)}"
                folder = self._loaded.opened.folder.name
                raise error("BCQ-E301", folder, name, found, f"a tensor of shape {list(array.shape)}")
            with torch.no_grad():
                target.copy_(torch.from_numpy(np.ascontiguousarray(array, np.float32)))

    def perplexity(self) -> Perplexity:
        """Run the text through the model as it is now."""
        found = run.evaluate(self._loaded, self._windows)
        return Perplexity(found.perplexity, found.tokens)
