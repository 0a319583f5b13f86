"""Models in folders, BCQ or dense, run in this process: what is checked before they are loaded, and figures on a text.

Needs torch and transformers; BCQ-E306 says so where they are missing. A model's own code is never run.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from bcqfmt.container.files import named
from bcqfmt.errors import BcqError, error, escape, in_file
from bcqfmt.integrations.model_folder import check_folder, check_length, is_bcq
from bcqfmt.version import pip_install

Tick = Callable[[int], None]


class Opened(NamedTuple):
    """A folder before its weights are loaded: its configuration (of transformers) and its tokenizer."""

    folder: Path
    config: Any
    tokenizer: Any

    def check_length(self, tokens: int, hint: str) -> None:
        """BCQ-E302 for more tokens than the model has positions for."""
        longest = getattr(self.config.get_text_config(), "max_position_embeddings", None)
        check_length(self.folder, longest if isinstance(longest, int) else None, tokens, hint)


class Loaded(NamedTuple):
    """A model, and the folder that it is from. ``note``: why its dtype is not the stored one, or nothing."""

    model: Any
    opened: Opened
    note: str = ""

    @property
    def tokenizer(self) -> Any:
        return self.opened.tokenizer


class Figures(NamedTuple):
    """Figures on a text; the last four are None without a reference. Divergence is KL(reference || model) in nats.

    ``losses``: of every window, minus the logarithms of the probabilities of its tokens, added up.
    """

    perplexity: float
    tokens: int
    seconds: float
    losses: list[float]
    reference_perplexity: float | None = None
    divergence: float | None = None
    largest_divergence: float | None = None
    top1: float | None = None


def open_folder(folder: Path, *, device: str = "cpu") -> Opened:
    """Configuration and tokenizer of a model folder; BCQ-E551 where torch cannot use the device."""
    check_folder(folder, device=device)
    folder = named(folder)
    transformers, _ = _imported()
    _try_device(device)
    config = _loaded(transformers.AutoConfig, folder, "a config.json", "bcqfmt validate checks it")
    hint = "copy the original model's tokenizer files"
    tokenizer = _loaded(transformers.AutoTokenizer, folder, "a tokenizer", hint)
    if tokenizer.get_vocab().keys() <= {*tokenizer.all_special_tokens, *tokenizer.get_added_vocab()}:
        # what transformers makes of no files
        raise error("BCQ-E102", folder.name, found="no tokenizer files", expected="a tokenizer", hint=hint)
    return Opened(folder, config, tokenizer)


def load(
    folder: Path | Opened,
    *,
    dtype: str = "auto",
    exact: bool = False,
    planes: int | None = None,
    device: str = "cpu",
) -> Loaded:
    """``folder``: config, weights, tokenizer. ``exact`` and ``planes`` are for BCQ folders, as in `set_mode`.

    ``dtype``: of the activations. ``auto`` is the stored one, but float32 on a CPU. ``device``: torch's name of it. On
    ``mps``, for which there are no kernels, BCQ weights are decoded while the model is loaded.
    """
    opened = folder if isinstance(folder, Opened) else open_folder(folder, device=device)
    transformers, bridge = _imported()
    chosen, note = _fitting(dtype, device, opened.config)
    hint = "bcqfmt validate --deep checks it"
    model, info = _loaded(
        transformers.AutoModelForCausalLM, opened.folder, "a model", hint, dtype=chosen, output_loading_info=True
    )
    if info["missing_keys"]:  # what transformers draws at random; its warning is switched off here
        names = sorted(info["missing_keys"])
        raise error(
            "BCQ-E602", opened.folder.name, tensor=names[0],
            found=f"{len(names)} tensors of the model are not in the files", expected="all of them",
            hint="correct config.json, or get the complete checkpoint",
        )  # fmt: skip
    try:
        bridge.set_mode(model, exact=exact, planes=planes)
    except BcqError as fault:
        raise in_file(fault, opened.folder.name) from None
    if device == "mps" and is_bcq(opened.folder):
        model = model.dequantize() or model
    return Loaded(_placed(model.eval(), device), opened, note)


def _fitting(dtype: str, device: str, config: Any) -> tuple[str, str]:
    """The dtype to load a model in, and a note where it is not the one that is stored.

    On most processors torch is many times slower in 16 bits: 88 times in float16 and 25 times in bfloat16 for one
    vector on a Neoverse-N1, although that has instructions for float16. So float32 is the rule there.
    """
    import torch

    stored = getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None)
    stored = getattr(torch, stored, None) if isinstance(stored, str) else stored
    if dtype != "auto" or device != "cpu" or stored is None or stored.itemsize >= 4:
        return dtype, ""
    name = str(stored).removeprefix("torch.")
    return "float32", f"float32, which is faster on a CPU than the stored {name}; --dtype {name} takes less memory"


def _try_device(device: str) -> None:
    """BCQ-E551 unless torch can put a tensor there."""
    if device == "cpu":
        return
    import torch

    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as fault:
        raise _unusable(device, fault) from fault


def _placed(model: Any, device: str) -> Any:
    try:
        return model.to(device)
    except (RuntimeError, AssertionError) as fault:
        raise _unusable(device, fault) from fault


def _unusable(device: str, fault: Exception) -> BcqError:
    reason = str(fault).strip().partition("\n")[0] or type(fault).__name__
    return error("BCQ-E551", found=f"torch cannot use {escape(device)}: {escape(reason)}")


def _loaded(kind: Any, folder: Path, what: str, hint: str, **options: Any) -> Any:
    """``kind.from_pretrained``, from this folder only; BCQ-E102 if it fails."""
    try:
        return kind.from_pretrained(folder, local_files_only=True, trust_remote_code=False, **options)
    except BcqError:
        raise
    except Exception as fault:  # loaders raise anything on bad files
        reason = str(fault).strip().partition("\n")[0] or type(fault).__name__
        expected = f"{what} that transformers knows"
        raise error("BCQ-E102", folder.name, found=escape(reason), expected=expected, hint=hint) from fault


def windows_of(
    opened: Opened, text: str, context: int = 512, most: int | None = None, shown: str = ""
) -> list[list[int]]:
    """A text as windows of ``context`` tokens that do not overlap; ``most``: cut the text after that many tokens.

    ``shown``: the name of the text in a message.
    """
    if context < 2:
        hint = "give a larger context"
        raise error("BCQ-E302", found=f"a context of {context} tokens", expected="at least 2", hint=hint)
    opened.check_length(context, "--context sets the tokens of a window")
    ids = opened.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"][:most]
    windows = [ids[i : i + context] for i in range(0, len(ids), context)]
    windows = [window for window in windows if len(window) > 1]
    if not windows:
        hint = "give a longer text" if most is None else "give a longer text, or more of its tokens"
        raise error("BCQ-E302", shown, found=f"a text of {len(ids)} tokens", expected="at least 2", hint=hint)
    return windows


def evaluate(
    loaded: Loaded, windows: list[list[int]], reference: Loaded | None = None, *, tick: Tick | None = None
) -> Figures:
    """Perplexity on the windows of a text, and the distance to a reference that has the same windows.

    In a window every token but the first is predicted from those before it. BCQ-E632 for a model that gives NaN.
    """
    import torch

    losses, others, divergences, agreeing, seconds, largest = [], [], [], 0, 0.0, 0.0
    with torch.inference_mode():
        for number, window in enumerate(windows, 1):
            ids = torch.tensor([window], device=loaded.model.device)
            start = time.perf_counter()
            found = _log_probabilities(loaded, ids)
            losses.append(-float(found.gather(1, ids[0, 1:, None]).sum()))  # which waits for a GPU
            seconds += time.perf_counter() - start
            _check(loaded, losses[-1], number)
            if reference is not None:
                wanted = _log_probabilities(reference, ids)
                others.append(-float(wanted.gather(1, ids[0, 1:, None]).sum()))
                _check(reference, others[-1], number)
                apart = (wanted.exp() * (wanted - found)).sum(-1)
                divergences.append(float(apart.sum()))
                furthest = float(apart.max())
                if not furthest <= largest:  # NaN too
                    largest = furthest
                agreeing += int((wanted.argmax(-1) == found.argmax(-1)).sum())
            if tick is not None:
                tick(len(window))
    count = sum(len(window) - 1 for window in windows)
    first = _perplexity(losses, count), count, seconds, losses
    if reference is None:
        return Figures(*first)
    return Figures(*first, _perplexity(others, count), math.fsum(divergences) / count, largest, agreeing / count)


def no_numbers(loaded: Loaded, found: str) -> BcqError:
    """BCQ-E632: where the scores of a model have NaN or infinity."""
    narrow = str(loaded.model.dtype) == "torch.float16"
    hint = "float16 ends at 65504: try --dtype bfloat16 or float32" if narrow else None
    return error("BCQ-E632", loaded.opened.folder.name, found=found, hint=hint)


def _check(loaded: Loaded, loss: float, window: int) -> None:
    if math.isnan(loss):
        raise no_numbers(loaded, f"NaN in window {window}")


def _log_probabilities(loaded: Loaded, ids: Any) -> Any:
    """(tokens - 1, vocabulary) float64: of every next token; on mps, which has no float64, float32."""
    from bcqfmt.integrations.torch.processor import dense_products

    with dense_products(loaded.model.dtype):
        logits = loaded.model(input_ids=ids, use_cache=False).logits[0, :-1]
    wide = logits.float() if logits.device.type == "mps" else logits.double()
    return wide.log_softmax(-1)


def _perplexity(losses: list[float], count: int) -> float:
    mean = math.fsum(losses) / count
    return math.exp(mean) if mean < 700 else math.inf


def _imported() -> tuple[Any, Any]:
    """transformers, and our bridge to it; its messages and bars are switched off, so that those of a verb are seen."""
    try:
        import transformers

        import bcqfmt.integrations.transformers as bridge
    except ImportError as fault:
        raise error("BCQ-E306", found=f"{fault.name} is not installed", hint=pip_install("transformers")) from None
    quiet: Any = transformers.utils.logging
    quiet.set_verbosity_error()
    quiet.disable_progress_bar()
    return transformers, bridge


class TextModel:
    """A causal language model in float32 on the CPU, and a text in windows of ``context`` tokens (:func:`evaluate`)."""

    def __init__(
        self, folder: Path, text: str, *, context: int = 512, most_tokens: int | None = None, shown: str = ""
    ) -> None:
        """``folder``: a local model folder with config, weights and tokenizer. ``most_tokens``: cut the text there.

        ``shown``: the name of the text in a message.
        """
        self._loaded = load(folder, dtype="float32")
        self._windows = windows_of(self._loaded.opened, text, context, most_tokens, shown)
        model = self._loaded.model
        self._tensors: dict[str, Any] = {**dict(model.named_buffers()), **dict(model.named_parameters())}

    @property
    def names(self) -> set[str]:
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

    def figures(self) -> Figures:
        """Run the text through the model as it is now."""
        return evaluate(self._loaded, self._windows)
