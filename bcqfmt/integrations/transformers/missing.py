"""Tensors that a model has and a checkpoint has not: transformers draws them at random and warns, we refuse."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bcqfmt.checkpoint.folder import CONFIG
from bcqfmt.errors import error, escape
from bcqfmt.integrations.torch.layers import BcqModule

__all__ = ["listen", "refuse_missing"]

_HOOK = "_adjust_missing_and_unexpected_keys"
_SHOWN = 4
_UNHEARD = "?"


def listen(model: Any) -> list[str]:
    """A list that will hold what is missing when the model has been loaded, tied weights and the like taken off.

    Transformers tells quantizers nothing about it; the last to see it is a method of the model.
    """
    found = [_UNHEARD]
    own = getattr(model, _HOOK)

    def hear(info: Any) -> None:
        own(info)
        found[:] = sorted(info.missing_keys)

    model.__dict__[_HOOK] = hear
    return found


def refuse_missing(model: Any, missing: list[str], source: Path | None) -> None:
    """BCQ-E602 for a model that lacks tensors; ``missing``: what :func:`listen` gave.

    A head may be new where another class is loaded than the one that was saved, a classifier over a language model.
    """
    del model.__dict__[_HOOK]
    assert missing != [_UNHEARD], f"transformers no longer calls {_HOOK}"
    names, base = model.config.architectures, f"{model.base_model_prefix}."
    if names and type(model).__name__ not in names and model.base_model is not model:
        parts = [f"{path}." for path, module in model.named_modules() if isinstance(module, BcqModule)]
        missing = [name for name in missing if name.startswith((base, *parts))]
    if missing:
        more = " ..." if len(missing) > _SHOWN else ""
        raise error(
            "BCQ-E602", CONFIG if source is None else f"{source.name}/{CONFIG}",
            found=f"{len(missing)} tensors of the model are not in the files: "
            f"{escape(', '.join(missing[:_SHOWN]))}{more}",
            expected="all of them",
            hint="correct config.json (the number of layers, biases), or get the complete checkpoint",
        )  # fmt: skip
