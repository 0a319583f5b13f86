"""``save_pretrained`` of a model with BCQ layers: a BCQ folder, complete and checked, or nothing.

Transformers would drop the descriptors of the weights and write a folder that claims to be BCQ but is not. So its
``save_pretrained`` is wrapped, for all models: those that have nothing to do with BCQ go on to it, the others, with
their copies and the models inside them, come here.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import PreTrainedModel, remove_tied_weights_from_state_dict

from bcqfmt.checkpoint.folder import CONFIG, INDEX, MANIFEST, SOURCE, config_entries, entries, file_list
from bcqfmt.checkpoint.manifest import Manifest, parse_manifest, relative_path
from bcqfmt.checkpoint.reader import open as open_checkpoint
from bcqfmt.checkpoint.writer import DEFAULT_SHARD_BYTES, save
from bcqfmt.container.durable import output_path
from bcqfmt.container.files import read_json
from bcqfmt.container.stored_tensor import StoredTensor
from bcqfmt.errors import BcqError, Finding, error, escape
from bcqfmt.integrations.torch.layers import BcqModule
from bcqfmt.integrations.torch.parts import stored_of
from bcqfmt.limits import MAX_JSON_FILE_BYTES
from bcqfmt.weight.weight import BcqWeight

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_ORIGIN = "_bcq_origin"
_WRITTEN = {CONFIG, INDEX, MANIFEST, "generation_config.json"}
_MOST = 64_000_000  # larger files are not side files
_SHOWN = 6


class _Origin(NamedTuple):
    """The folder that a model was loaded from, and whether it is the whole model that was loaded."""

    source: Path | None
    whole: bool


def remember(model: Any, source: Path | None) -> None:
    """Mark a loaded model and the models in it; copies and pickles carry the marks along."""
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            module.__dict__[_ORIGIN] = _Origin(source, module is model or module is model.base_model)


def forget(model: Any) -> None:
    """Undo :func:`remember`."""
    for module in model.modules():
        module.__dict__.pop(_ORIGIN, None)


def wrap_save_pretrained() -> None:
    """Wrap transformers' ``save_pretrained``, once."""
    plain: Any = PreTrainedModel.save_pretrained
    if hasattr(plain, "bcq"):
        return

    @functools.wraps(plain)
    def save_pretrained(self: Any, *arguments: Any, **named: Any) -> Any:
        # with adapters no weight of the model is written
        own = _ours(self) and not getattr(self, "_hf_peft_config_loaded", False)
        return _save(self, *arguments, **named) if own else plain(self, *arguments, **named)

    save_pretrained.bcq = True  # type: ignore[attr-defined]
    PreTrainedModel.save_pretrained = save_pretrained  # type: ignore[method-assign]


def _ours(model: Any) -> bool:
    method = getattr(model.config, "quantization_config", None)
    method = method.get("quant_method") if isinstance(method, dict) else getattr(method, "quant_method", None)
    return method == "bcq" or any(isinstance(module, BcqModule) for module in model.modules())


def _save(
    model: Any,
    save_directory: str | Path,
    is_main_process: bool = True,
    state_dict: Any = None,
    push_to_hub: bool = False,
    max_shard_size: int | str = DEFAULT_SHARD_BYTES,
    *,
    tokenizer: Any = None,
    **others: Any,
) -> None:
    """Write a model as a BCQ folder; what it may replace, :func:`kept_files` says.

    Side files (tokenizer, templates) come from the folder that is replaced if it holds this model, or from
    the one that the model was loaded from, or from ``tokenizer``, anything that has a ``save_pretrained``.
    """
    wrong = "state_dict" if state_dict is not None else "push_to_hub" if push_to_hub else ""
    wrong = wrong or next((key for key in ("variant", "distributed_checkpoint") if others.get(key)), "")
    if wrong:
        found = f"{wrong} with a BCQ model"
        raise error("BCQ-E302", found=found, expected="the model as it is; model.push_to_hub() uploads it")
    origin = _origin(model)
    if not is_main_process:
        return
    target, size = output_path(save_directory), _bytes(max_shard_size)
    weights, rest = _tensors(model)
    files = kept_files(target, weights)
    if tokenizer is not None:
        files.update(_saved(tokenizer))
    elif origin.source is not None and origin.source.is_dir():
        files = {**side_files(origin.source), **files}
    config, texts = _texts(model)
    files.update(texts)
    save(target, {**weights, **rest}, config=config, files=files, max_shard_size=size, overwrite=target.exists())


def _origin(model: Any) -> _Origin:
    """What is remembered of a model; BCQ-E305 for one that is not, or no longer, a BCQ model."""
    origin = getattr(model, _ORIGIN, None)
    layers = any(isinstance(module, BcqModule) for module in model.modules())
    if origin is not None and origin.whole and layers:
        found: _Origin = origin
        return found
    if origin is not None and not origin.whole:
        what, hint = f"a piece of a BCQ model ({type(model).__name__})", "save the model that was loaded"
    elif layers:
        what = "BCQ layers in a model that was not loaded from a BCQ folder"
        hint = "bcqfmt.save(folder, bcqfmt.integrations.torch.tensors_of(model), config=...) writes a BCQ folder"
    else:
        what = "a configuration that says bcq in a model without BCQ layers"
        hint = "to save it as it is: del model.config.quantization_config"
    raise error("BCQ-E305", found=what, expected="a model loaded from a BCQ folder", hint=hint)


def _tensors(model: Any) -> tuple[dict[str, BcqWeight], dict[str, StoredTensor]]:
    """Weights under the names they came with, everything else under the names that transformers gives back to it."""
    weights: dict[str, BcqWeight] = {}
    parts: set[str] = set()
    away = [name for name, tensor in model.state_dict().items() if tensor.device.type == "meta"]
    if away:
        found = f"{len(away)} tensors that are not in memory (device_map)"
        hint = "load it without device_map, then save it"
        raise error("BCQ-E305", tensor=away[0], found=found, expected="a model that is in memory", hint=hint)
    base = f"{model.base_model_prefix}."
    for path, module in model.named_modules():
        if isinstance(module, BcqModule):
            name = getattr(module, "weight_name", f"{path}.weight")
            if model.base_model is model and not path.startswith(base):
                name = name.removeprefix(base)  # as transformers names all else in a model without a head
            weights[name] = module.to_weight(name)
            parts.update(f"{path}.{part}" for part in module.names)
    state = {name: tensor for name, tensor in model.state_dict().items() if name not in parts}
    ignored = set(model._keys_to_ignore_on_save or ())
    state = {name: tensor for name, tensor in state.items() if name not in ignored}
    state = revert_weight_conversion(model, remove_tied_weights_from_state_dict(state, model))
    return weights, {name: stored_of(name, tensor) for name, tensor in state.items()}


def _texts(model: Any) -> tuple[dict[str, Any], dict[str, bytes]]:
    """config.json as transformers would write it, and generation_config.json."""
    files = _saved(model.config)
    config: dict[str, Any] = json.loads(files.pop(CONFIG))
    for key in config_entries(()):
        config.pop(key, None)
    config["architectures"] = [type(model).__name__]
    config["dtype"] = str(model.dtype).removeprefix("torch.")
    if model.can_generate() and getattr(model, "generation_config", None) is not None:
        files.update(_saved(model.generation_config))
    return config, files


def _saved(thing: Any) -> dict[str, bytes]:
    """What a ``save_pretrained`` writes, path -> content."""
    with tempfile.TemporaryDirectory() as folder:
        thing.save_pretrained(folder)
        place = Path(folder)
        return {name: (place / name).read_bytes() for name in file_list(place) if name != MANIFEST}


def _bytes(size: int | str) -> int:
    match = re.fullmatch(r"(\d+)\s*([KMGT]?I?B)?", str(size).strip().upper())
    if match is None or (match[2] or "") not in _UNITS | {"B": 1}:
        raise error("BCQ-E302", found=f"max_shard_size {size!r}", expected="a number of bytes, or '5GB'")
    return int(match[1]) * (_UNITS | {"B": 1})[match[2] or ""]


# -------------------------------------------------------------- side files: kept, and those that must not be lost
def side_files(folder: Path) -> dict[str, bytes]:
    """Small files of a folder that are neither model nor about it, path -> content: the tokenizer, for one."""
    names = [n for n in file_list(folder) if n not in _WRITTEN | {"README.md"} and not n.endswith(".safetensors")]
    small = [n for n in names if not n.startswith(f"{SOURCE}/") and (folder / n).stat().st_size <= _MOST]
    return {name: (folder / name).read_bytes() for name in small}


def kept_files(target: Path, weights: Mapping[str, BcqWeight]) -> dict[str, bytes]:
    """Side files of a folder that is about to be replaced, path -> content.

    Where the folder holds these very weights, saved before, all of it stays; of another model's folder nothing does.
    BCQ-E401, naming them, for files that would be lost: not written by bcqfmt, or too large to be kept.
    """
    if target.is_symlink() or not target.is_dir():
        return {}  # new; or the writer refuses it
    names = sorted(entries(target, hidden=True))
    manifest = _manifest(target)
    listed = {} if manifest is None else manifest.files
    if manifest is not None and _holds(target, manifest, weights):
        ours = {name for name in listed if name.endswith(".safetensors") or name.startswith(f"{SOURCE}/")} | _WRITTEN
        found = [name for name in names if name not in ours]
        lost = [name for name in found if not _keepable(target, name)]
    else:
        ours = _WRITTEN if manifest is not None else set()
        found = []
        lost = [name for name in names if name not in ours and not _unchanged(target, name, listed)]
    if lost:
        more = f" and {len(lost) - _SHOWN} more" if len(lost) > _SHOWN else ""
        raise error(
            "BCQ-E401", str(target), found=f"files that saving would delete: {escape(', '.join(lost[:_SHOWN]))}{more}",
            expected="a new or empty folder, or a BCQ folder with its own files only",
            hint="save into a new folder, or move these files away; save_pretrained(..., tokenizer=) takes a tokenizer",
        )  # fmt: skip
    return {name: (target / name).read_bytes() for name in found}


def _keepable(folder: Path, name: str) -> bool:
    """Whether the writer takes it as a side file."""
    path = folder / name
    plain = relative_path(name) and not name.startswith(".") and not name.endswith(".safetensors")
    return plain and path.is_file() and not path.is_symlink() and path.stat().st_size <= _MOST


def _unchanged(folder: Path, name: str, listed: Mapping[str, tuple[int, str]]) -> bool:
    """Whether it is the file that the manifest lists; of weights, which may be large, the size tells."""
    if name not in listed or (folder / name).is_symlink():
        return False
    size, digest = listed[name]
    path = folder / name
    if path.stat().st_size != size:
        return False
    return size > _MOST or hashlib.sha256(path.read_bytes()).hexdigest() == digest


def _manifest(folder: Path) -> Manifest | None:
    """The manifest, if nothing is wrong with it."""
    faults: list[Finding] = []
    try:
        found = parse_manifest(read_json(folder / MANIFEST, MAX_JSON_FILE_BYTES, MANIFEST, "BCQ-V602"), faults.append)
    except (BcqError, OSError):
        return None
    return None if faults else found


def _holds(folder: Path, manifest: Manifest, weights: Mapping[str, BcqWeight]) -> bool:
    """Whether a folder holds these weights: all of them by what they are, the first and the last by their bytes."""
    if not weights or {n: record.spec for n, record in manifest.weights.items()} != {
        n: weight.spec for n, weight in weights.items()
    }:
        return False
    try:
        with open_checkpoint(folder) as there:
            return all(there.weight(n).digest() == weights[n].digest() for n in {min(weights), max(weights)})
    except BcqError:
        return False
