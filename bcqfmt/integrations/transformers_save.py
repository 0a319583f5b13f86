"""``save_pretrained`` of a model with BCQ layers: a BCQ folder, complete and checked, or nothing."""

from __future__ import annotations

import json
import re
import tempfile
from pathlib import Path
from typing import Any

from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict

from bcqfmt.errors import error
from bcqfmt.folder import CONFIG, INDEX, MANIFEST, SOURCE, file_list
from bcqfmt.integrations.torch_module import BcqModule
from bcqfmt.integrations.torch_module_parts import stored_of
from bcqfmt.stored import StoredTensor
from bcqfmt.weight import BcqWeight
from bcqfmt.writer import DEFAULT_SHARD_BYTES, save

__all__ = ["Saver"]

_GENERATION = "generation_config.json"
_LEFT_OUT = {CONFIG, INDEX, MANIFEST, _GENERATION, "README.md"}
_MOST = 64_000_000  # a side file that is larger is none
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


class Saver:
    """Stands in a model for ``save_pretrained``; copied and pickled with it."""

    def __init__(self, model: Any, source: Path | None) -> None:
        """``source``: the folder that the model was loaded from, whose tokenizer files are carried over."""
        self.model, self.source = model, source

    def __call__(
        self,
        save_directory: str | Path,
        is_main_process: bool = True,
        state_dict: Any = None,
        push_to_hub: bool = False,
        max_shard_size: int | str = DEFAULT_SHARD_BYTES,
        *,
        tokenizer: Any = None,
        **others: Any,
    ) -> None:
        """Write the model as a BCQ folder, in place of a BCQ folder that is there already.

        Files beside the model (tokenizer, templates) come from the folder it was loaded from, or from ``tokenizer``,
        anything that has a ``save_pretrained``. They must not be added later: the manifest lists every file.
        """
        model = self.model
        if getattr(model, "_hf_peft_config_loaded", False):  # adapters only: no BCQ weight is written
            type(model).save_pretrained(model, save_directory, is_main_process, state_dict, push_to_hub, **others)
            return
        wrong = "state_dict" if state_dict is not None else "push_to_hub" if push_to_hub else ""
        wrong = wrong or next((key for key in ("variant", "distributed_checkpoint") if others.get(key)), "")
        if wrong:
            found = f"{wrong} with a BCQ model"
            raise error("BCQ-E302", found=found, expected="the model as it is; model.push_to_hub() uploads it")
        if not is_main_process:
            return
        config, files = _texts(model)
        if tokenizer is not None:
            files.update(_saved(tokenizer))
        elif self.source is not None and self.source.is_dir():
            files.update({name: data for name, data in _beside(self.source).items() if name not in files})
        save(
            save_directory, _tensors(model), config=config, files=files, max_shard_size=_bytes(max_shard_size),
            overwrite=Path(save_directory).exists(),
        )  # fmt: skip


def _tensors(model: Any) -> dict[str, BcqWeight | StoredTensor]:
    """Weights under the names they came with, everything else under the names that transformers gives back to it."""
    weights: dict[str, BcqWeight] = {}
    parts: set[str] = set()
    for path, module in model.named_modules():
        if isinstance(module, BcqModule):
            name = getattr(module, "weight_name", f"{path}.weight")
            weights[name] = module.to_weight(name)
            parts.update(f"{path}.{part}" for part in module.names)
    state = {name: tensor for name, tensor in model.state_dict().items() if name not in parts}
    ignored = set(model._keys_to_ignore_on_save or ())
    state = {name: tensor for name, tensor in state.items() if name not in ignored}
    state = revert_weight_conversion(model, remove_tied_weights_from_state_dict(state, model))
    return {**weights, **{name: stored_of(name, tensor) for name, tensor in state.items()}}


def _texts(model: Any) -> tuple[dict[str, Any], dict[str, bytes]]:
    """config.json as transformers would write it, and generation_config.json."""
    model.config.architectures = [type(model).__name__]
    files = _saved(model.config)
    config: dict[str, Any] = json.loads(files.pop(CONFIG))
    config.pop("quantization_config", None)
    if model.can_generate() and getattr(model, "generation_config", None) is not None:
        files.update(_saved(model.generation_config))
    return config, files


def _saved(thing: Any) -> dict[str, bytes]:
    """What a ``save_pretrained`` writes, path -> content."""
    with tempfile.TemporaryDirectory() as folder:
        thing.save_pretrained(folder)
        place = Path(folder)
        return {name: (place / name).read_bytes() for name in file_list(place) if name != MANIFEST}


def _beside(folder: Path) -> dict[str, bytes]:
    """Small files of a folder that are neither model nor about it."""
    names = [n for n in file_list(folder) if n not in _LEFT_OUT and not n.endswith(".safetensors")]
    kept = [n for n in names if not n.startswith(f"{SOURCE}/") and (folder / n).stat().st_size <= _MOST]
    return {name: (folder / name).read_bytes() for name in kept}


def _bytes(size: int | str) -> int:
    match = re.fullmatch(r"(\d+)\s*([KMGT]?I?B)?", str(size).strip().upper())
    if match is None or (match[2] or "") not in _UNITS | {"B": 1}:
        raise error("BCQ-E302", found=f"max_shard_size {size!r}", expected="a number of bytes, or '5GB'")
    return int(match[1]) * (_UNITS | {"B": 1})[match[2] or ""]
