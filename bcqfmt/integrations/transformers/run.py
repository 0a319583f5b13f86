"""Models in folders, BCQ or dense, run in this process: text from a prompt, and figures on a text.

Needs torch and transformers; `load` says so with BCQ-E306 if they are missing. A model's own code is never run.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from bcqfmt.errors import BcqError, error, escape
from bcqfmt.kernels.runtime.device import require_cuda
from bcqfmt.version import pip_install

__all__ = ["Figures", "Loaded", "evaluate", "generate", "load", "windows_of"]

Tick = Callable[[int], None]


class Loaded(NamedTuple):
    """A model and its tokenizer; ``folder`` for messages."""

    model: Any
    tokenizer: Any
    folder: Path


class Figures(NamedTuple):
    """Figures on a text; the last four are None without a reference. Divergence is KL(reference || model) in nats."""

    perplexity: float
    tokens: int
    seconds: float
    reference_perplexity: float | None = None
    divergence: float | None = None
    largest_divergence: float | None = None
    top1: float | None = None


def load(
    folder: Path, *, dtype: str = "auto", exact: bool = False, planes: int | None = None, device: str = "cpu"
) -> Loaded:
    """``folder``: config, weights, tokenizer. ``exact`` and ``planes`` are for BCQ folders, as in `set_mode`.

    ``dtype`` "auto": that of the checkpoint; but float32 on a processor that cannot multiply in it: all of the model is
    widened once, here. ``device``: torch's name of it. BCQ-E306 or BCQ-E551 where it is a GPU that cannot be used.
    """
    if folder.is_file():
        place = escape(f"{folder.parent}/")
        raise error(
            "BCQ-E302", str(folder), found="a file", expected="a model folder", hint=f"name its folder: {place}"
        )
    transformers, bridge = _imported()
    if device != "cpu":  # before any weight is loaded
        require_cuda()
    if not folder.is_dir():  # transformers would look for a hub id
        raise error("BCQ-E101", str(folder), found="no such folder", expected="a model folder")
    config = _loaded(transformers.AutoConfig, folder, "a config.json", "bcqfmt validate checks it")
    if dtype == "auto" and device == "cpu" and not _multiplies(config):
        dtype = "float32"
    hint = "copy the original model's tokenizer files"
    tokenizer = _loaded(transformers.AutoTokenizer, folder, "a tokenizer", hint)
    if tokenizer.get_vocab().keys() <= {*tokenizer.all_special_tokens, *tokenizer.get_added_vocab()}:
        # what transformers makes of no files
        raise error("BCQ-E102", folder.name, found="no tokenizer files", expected="a tokenizer", hint=hint)
    hint = "bcqfmt validate --deep checks it"
    model, info = _loaded(
        transformers.AutoModelForCausalLM, folder, "a model", hint, dtype=dtype, output_loading_info=True
    )
    if info["missing_keys"]:  # what transformers draws at random; its warning is switched off here
        names = sorted(info["missing_keys"])
        raise error(
            "BCQ-E602", folder.name, tensor=names[0], found=f"{len(names)} tensors of the model are not in the files",
            expected="all of them", hint="correct config.json, or get the complete checkpoint",
        )  # fmt: skip
    bridge.set_mode(model, exact=exact, planes=planes)
    return Loaded(_placed(model.eval(), device), tokenizer, folder)


def _multiplies(config: Any) -> bool:
    """Whether this processor has instructions for products in the dtype that a config names, if it names one."""
    import torch

    from bcqfmt.integrations.torch.processor import multiplies

    kind = getattr(config, "dtype", None)
    kind = getattr(torch, kind, None) if isinstance(kind, str) else kind
    return kind is None or multiplies(kind)


def _placed(model: Any, device: str) -> Any:
    try:
        return model.to(device)
    except (RuntimeError, AssertionError) as fault:
        reason = str(fault).strip().partition("\n")[0] or type(fault).__name__
        raise error("BCQ-E551", found=f"torch cannot use {escape(device)}: {escape(reason)}") from fault


def _loaded(kind: Any, folder: Path, what: str, hint: str, **options: Any) -> Any:
    """``kind.from_pretrained``, from this folder only; BCQ-E102 if it fails."""
    try:
        return kind.from_pretrained(folder, local_files_only=True, trust_remote_code=False, **options)
    except BcqError:
        raise
    except Exception as fault:  # loaders raise anything on bad files
        reason = str(fault).strip().partition("\n")[0] or type(fault).__name__
        raise error(
            "BCQ-E102", folder.name, found=escape(reason), expected=f"{what} that transformers knows", hint=hint
        ) from fault


def generate(loaded: Loaded, prompt: str, *, most: int = 64, tick: Tick | None = None) -> tuple[str, int, float]:
    """The likeliest continuation, one token after the other; text of the new tokens, their number, seconds.

    ``tick`` gets the number of tokens made since the last call.
    """
    import torch

    from bcqfmt.integrations.torch.processor import dense_products

    ids = loaded.tokenizer(prompt, return_tensors="pt")["input_ids"].to(loaded.model.device)
    if not ids.numel():
        raise error("BCQ-E302", found="a prompt without tokens", expected="some text")
    _check_length(loaded, ids.shape[1] + most, "--max-new-tokens counts, and so does the prompt")
    start = time.perf_counter()
    with torch.inference_mode(), dense_products(loaded.model.dtype):
        found = loaded.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=most, do_sample=False,
            pad_token_id=_padding(loaded), streamer=_Counter(tick),
        )  # fmt: skip
    seconds = time.perf_counter() - start
    new = found[0, ids.shape[1] :]
    whole, before = (loaded.tokenizer.decode(part, skip_special_tokens=True) for part in (found[0], ids[0]))
    text = whole.removeprefix(before) if whole.startswith(before) else loaded.tokenizer.decode(new)
    return text, len(new), seconds


def windows_of(loaded: Loaded, text: str, context: int = 512, most: int | None = None) -> list[list[int]]:
    """A text as windows of ``context`` tokens that do not overlap; ``most``: cut the text after that many tokens."""
    if context < 2:
        raise error("BCQ-E302", found=f"a context of {context} tokens", expected="at least 2")
    _check_length(loaded, context, "--context sets the tokens of a window")
    ids = loaded.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"][:most]
    windows = [ids[i : i + context] for i in range(0, len(ids), context)]
    windows = [window for window in windows if len(window) > 1]
    if not windows:
        raise error("BCQ-E302", found=f"a text of {len(ids)} tokens", expected="at least 2")
    return windows


def evaluate(
    loaded: Loaded, windows: list[list[int]], reference: Loaded | None = None, *, tick: Tick | None = None
) -> Figures:
    """Perplexity on the windows of a text, and the distance to a reference that has the same windows.

    In a window every token but the first is predicted from those before it.
    """
    import torch

    losses, others, divergences, agreeing, seconds, largest = [], [], [], 0, 0.0, 0.0
    with torch.inference_mode():
        for window in windows:
            ids = torch.tensor([window], device=loaded.model.device)
            start = time.perf_counter()
            found = _log_probabilities(loaded, ids)
            losses.append(-float(found.gather(1, ids[0, 1:, None]).sum()))  # which waits for a GPU
            seconds += time.perf_counter() - start
            if reference is not None:
                wanted = _log_probabilities(reference, ids)
                others.append(-float(wanted.gather(1, ids[0, 1:, None]).sum()))
                apart = (wanted.exp() * (wanted - found)).sum(-1)
                divergences.append(float(apart.sum()))
                largest = max(largest, float(apart.max()))
                agreeing += int((wanted.argmax(-1) == found.argmax(-1)).sum())
            if tick is not None:
                tick(len(window))
    count = sum(len(window) - 1 for window in windows)
    first = _perplexity(losses, count), count, seconds
    if reference is None:
        return Figures(*first)
    return Figures(*first, _perplexity(others, count), math.fsum(divergences) / count, largest, agreeing / count)


def _log_probabilities(loaded: Loaded, ids: Any) -> Any:
    """(tokens - 1, vocabulary) float64: of every next token."""
    from bcqfmt.integrations.torch.processor import dense_products

    with dense_products(loaded.model.dtype):
        logits = loaded.model(input_ids=ids, use_cache=False).logits[0, :-1]
    return logits.double().log_softmax(-1)


def _perplexity(losses: list[float], count: int) -> float:
    mean = math.fsum(losses) / count
    return math.exp(mean) if mean < 700 else math.inf


def _check_length(loaded: Loaded, length: int, hint: str) -> None:
    """BCQ-E302 for more tokens than a model has positions for."""
    limit = getattr(loaded.model.config.get_text_config(), "max_position_embeddings", None)
    if isinstance(limit, int) and length > limit:
        raise error("BCQ-E302", loaded.folder.name, found=f"{length} tokens", expected=f"at most {limit}", hint=hint)


def _padding(loaded: Loaded) -> int:
    known = (loaded.tokenizer.pad_token_id, loaded.tokenizer.eos_token_id)
    return next((number for number in known if number is not None), 0)


class _Counter:
    """What ``generate`` calls a streamer: it is given the prompt first, then every token."""

    def __init__(self, tick: Tick | None) -> None:
        self.tick, self.started = tick, False

    def put(self, value: Any) -> None:
        """Tokens."""
        if self.started and self.tick is not None:
            self.tick(value.numel())
        self.started = True

    def end(self) -> None:
        """No more of them."""


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
