"""Text from a prompt: the likeliest token every time, or drawn; shown while it is made."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from bcqfmt.errors import BcqError, error, escape

from .run import Loaded, Opened, Tick, no_numbers

Show = Callable[[str], None]


class Sampling(NamedTuple):
    """How tokens are drawn: never at temperature 0, where the likeliest one is taken."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0

    def options(self) -> dict[str, Any]:
        """Settings of transformers' ``generate``."""
        if not self.temperature:
            return {"do_sample": False}
        return {"do_sample": True, "temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}


class Generated(NamedTuple):
    """The new text, its number of tokens, and the seconds that they took."""

    text: str
    tokens: int
    seconds: float


def prompt_tokens(
    opened: Opened, prompt: str, *, most: int = 64, chat: bool = False, system: str | None = None
) -> list[int]:
    """The tokens of a prompt; BCQ-E302 where they and ``most`` new ones are more than the model has positions for.

    ``chat``: as a user's message in the chat template of the tokenizer, after the ``system`` message if there is one.
    """
    if chat:
        messages = [{"role": "system", "content": system}] if system is not None else []
        text = _templated(opened, [*messages, {"role": "user", "content": prompt}])
        ids = opened.tokenizer(text, add_special_tokens=False)["input_ids"]
    else:
        ids = opened.tokenizer(prompt)["input_ids"]
    if not ids:
        raise error("BCQ-E302", found="a prompt without tokens", expected="some text", hint="give a prompt with words")
    opened.check_length(len(ids) + most, "--max-new-tokens counts, and so does the prompt")
    return list(ids)


def _templated(opened: Opened, messages: list[dict[str, str]]) -> str:
    if not getattr(opened.tokenizer, "chat_template", None):
        raise _no_template(opened, "its tokenizer has no chat template", "leave --chat out: it continues the text then")
    try:
        return str(opened.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    except Exception as fault:  # a template is a program of the model's author
        reason = str(fault).strip().partition("\n")[0] or type(fault).__name__
        hint = "leave --system out; not every template has a place for it" if len(messages) > 1 else "leave --chat out"
        raise _no_template(opened, f"its chat template fails: {escape(reason)}", hint) from fault


def _no_template(opened: Opened, found: str, hint: str) -> BcqError:
    return error("BCQ-E302", opened.folder.name, found=found, expected="one for a conversation", hint=hint)


def generate(
    loaded: Loaded,
    prompt: str | list[int],
    *,
    most: int = 64,
    sampling: Sampling = Sampling(),  # noqa: B008 - it is never changed
    show: Show | None = None,
    tick: Tick | None = None,
) -> Generated:
    """Continue ``prompt``, a text or its tokens.

    ``show`` gets the text in pieces as it is made, ``tick`` the number of tokens since the last call. BCQ-E632 where
    the model gives no numbers to choose a token by.
    """
    import torch

    from bcqfmt.integrations.torch.processor import dense_products

    torch.manual_seed(sampling.seed)
    tokens = prompt_tokens(loaded.opened, prompt, most=most) if isinstance(prompt, str) else prompt
    ids = torch.tensor([tokens], device=loaded.model.device)
    stream = _Stream(loaded.tokenizer, tokens, show, tick)
    known = (loaded.tokenizer.pad_token_id, loaded.tokenizer.eos_token_id)
    padding = next((number for number in known if number is not None), 0)
    start = time.perf_counter()
    settings = _only_settings(loaded.model, {**sampling.options(), "pad_token_id": padding})
    with torch.inference_mode(), dense_products(loaded.model.dtype), settings:
        found = loaded.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=most, streamer=stream,
            logits_processor=[_Checked(loaded, len(tokens))],
        )  # fmt: skip
    seconds = time.perf_counter() - start
    new = found[0, len(tokens) :].tolist()
    return Generated(stream.finish(new), len(new), seconds)


@contextlib.contextmanager
def _only_settings(model: Any, options: dict[str, Any]) -> Iterator[None]:
    """``generate`` follows ``options`` alone; of the model's generation_config.json only the bos and eos tokens count.

    As an argument of ``generate`` they would be filled up with the model's own.
    """
    import transformers

    config: Any = transformers.GenerationConfig
    before = model.generation_config
    ends = {name: getattr(before, name, None) for name in ("bos_token_id", "eos_token_id")}
    model.generation_config = config(**ends, **options)
    try:
        yield
    finally:
        model.generation_config = before


class _Checked:
    """What ``generate`` calls a processor of logits: of NaN it would take any token as the likeliest."""

    def __init__(self, loaded: Loaded, prompt: int) -> None:
        self.loaded, self.prompt = loaded, prompt

    def __call__(self, ids: Any, scores: Any) -> Any:
        """``scores``, (1, vocabulary), unchanged."""
        highest = float(scores.max())
        if not math.isfinite(highest):
            raise no_numbers(self.loaded, f"{highest} among the scores of token {ids.shape[1] - self.prompt + 1}")
        return scores


class _Stream:
    """What ``generate`` calls a streamer: it is given the prompt first, then every token.

    Decoded is the whole, prompt and all, and the prompt's text is taken off: a token's own text may lack its space. A
    character that is not complete yet ends in U+FFFD and waits for the next token.
    """

    def __init__(self, tokenizer: Any, prompt: list[int], show: Show | None, tick: Tick | None) -> None:
        self.tokenizer, self.prompt, self.show, self.tick = tokenizer, prompt, show, tick
        self.before = self._decoded(prompt)
        self.new: list[int] = []
        self.shown = ""
        self.started = False

    def put(self, value: Any) -> None:
        """Tokens, those of the prompt first."""
        if not self.started:
            self.started = True
            return
        if self.tick is not None:
            self.tick(value.numel())
        self.new += value.flatten().tolist()
        if self.show is not None:
            self._bring(self._text(self.new).rstrip("\ufffd"))

    def end(self) -> None:
        """No more of them."""

    def finish(self, new: list[int]) -> str:
        """Show what is left; the whole text."""
        text = self._text(new)
        if self.show is not None and not text.startswith(self.shown):  # a later token changed what was shown
            self.show("\n")
            self.shown = ""
        self._bring(text)
        return text

    def _bring(self, text: str) -> None:
        if self.show is not None and len(text) > len(self.shown) and text.startswith(self.shown):
            self.show(text[len(self.shown) :])
            self.shown = text

    def _text(self, new: list[int]) -> str:
        whole = self._decoded([*self.prompt, *new])
        return whole.removeprefix(self.before) if whole.startswith(self.before) else self._decoded(new)

    def _decoded(self, tokens: list[int]) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))
