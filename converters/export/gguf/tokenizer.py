"""Key values of a tokenizer, from tokenizer.json and tokenizer_config.json: what `source/gguf_tokenizer` does, back.

Two kinds: byte-level BPE with merges, whose splitting rule must be one that has a name in GGUF; and SentencePiece's
BPE, where llama.cpp merges by scores of tokens: a token's score is minus the rank of the merge that makes it.
"""

from __future__ import annotations

import re
from typing import Any, Final

from bcqfmt.container.gguf.writer import pair
from bcqfmt.converters.source.gguf_tokenizer import NAMES, SPLITS

from .model import Unwritable

_NORMAL, _UNKNOWN, _CONTROL, _USER, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6  # types of tokens
_HEX = re.compile(r"<0x[0-9A-F]{2}>")
_SPACE: Final = "▁"
_OTHER: Final = (
    "only a GGUF file of the same model, which has it in a form of llama.cpp, can help: --like donor.gguf; if there is "
    "none, --to dense writes the model for transformers"
)
_NEVER: Final = -1e9  # score of a token that no merge makes


def tokenizer_pairs(made: dict[str, Any], settings: dict[str, Any], config: dict[str, Any], rows: int) -> list[bytes]:
    """Key values for tokenizer.json, tokenizer_config.json and config.json; ``rows`` of the embedding."""
    model = made.get("model")
    if not isinstance(model, dict) or model.get("type") != "BPE" or not isinstance(model.get("vocab"), dict):
        shown = model.get("type") if isinstance(model, dict) else None
        raise Unwritable(f"a tokenizer of type {shown}", "BPE, byte-level or of SentencePiece", _OTHER)
    kind, pre, prefix = _kind(made, model)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model.get("merges", [])]
    tokens, types = _tokens(made, model["vocab"], model.get("unk_token"), rows)
    found = [
        pair("tokenizer.ggml.model", "str", kind),
        pair("tokenizer.ggml.pre", "str", pre),
        pair("tokenizer.ggml.tokens", "str[]", tokens),
    ]
    if kind == "llama":
        found.append(pair("tokenizer.ggml.scores", "f32[]", _scores(tokens, types, merges)))
        found.append(pair("tokenizer.ggml.add_space_prefix", "bool", prefix))
    found.append(pair("tokenizer.ggml.token_type", "i32[]", types))
    if kind == "gpt2":
        found.append(pair("tokenizer.ggml.merges", "str[]", merges))
    ids = {token: i for i, token in enumerate(tokens)}
    roles = _roles(settings, config, model, ids)
    found += [pair(f"tokenizer.ggml.{key}_token_id", "u32", i) for key, i in roles.items()]
    first, last = _around(made.get("post_processor"), ids)
    found.append(pair("tokenizer.ggml.add_bos_token", "bool", first is not None and first == roles.get("bos")))
    found.append(pair("tokenizer.ggml.add_eos_token", "bool", last is not None and last == roles.get("eos")))
    template = settings.get("chat_template")
    return [*found, pair("tokenizer.chat_template", "str", template)] if isinstance(template, str) else found


def _kind(made: dict[str, Any], model: dict[str, Any]) -> tuple[str, str, bool]:
    """Model and splitting rule as GGUF names them, and whether a text gets a space before it."""
    steps = _steps(made.get("pre_tokenizer"), "pretokenizers")
    normal = _steps(made.get("normalizer"), "normalizers")
    if model.get("byte_fallback"):
        prefix, replaced = _spaces(normal, steps)
        if not replaced:
            raise Unwritable("a normalizer that is not SentencePiece's", f"spaces replaced by {_SPACE}")
        return "llama", "default", prefix
    plain = [_plain(step) for step in steps]
    for name, known in SPLITS.items():
        if plain == [_plain(step) for step in known]:
            return "gpt2", name, False
    raise Unwritable("a pre_tokenizer that has no name here", f"that of {', '.join(SPLITS)}, or SentencePiece's")


def _spaces(normal: list[dict[str, Any]], steps: list[dict[str, Any]]) -> tuple[bool, bool]:
    """Whether a space is put before a text, and whether spaces become SentencePiece's sign."""
    prefix = replaced = False
    for step in (*normal, *steps):
        if step.get("type") == "Prepend" and step.get("prepend") == _SPACE:
            prefix = True
        elif step.get("type") == "Replace" and step.get("content") == _SPACE:
            replaced = True
        elif step.get("type") == "Metaspace":
            prefix, replaced = step.get("prepend_scheme", "always") != "never", True
    return prefix, replaced


def _steps(value: Any, key: str) -> list[dict[str, Any]]:
    """The steps of a Sequence, or the one step that there is."""
    if not isinstance(value, dict):
        return []
    return [step for step in value.get(key, []) if isinstance(step, dict)] if key in value else [value]


def _plain(step: dict[str, Any]) -> dict[str, Any]:
    """A step without what changes no token."""
    found = {key: value for key, value in step.items() if key != "trim_offsets"}
    return {"use_regex": True, **found} if step.get("type") == "ByteLevel" else found


def _tokens(made: dict[str, Any], vocabulary: dict[str, int], unknown: Any, rows: int) -> tuple[list[str], list[int]]:
    """Every token by its id, as many as the embedding has rows, and their types."""
    added = [token for token in made.get("added_tokens", []) if isinstance(token, dict)]
    ids = {**vocabulary, **{token["content"]: token["id"] for token in added}}
    if any(not 0 <= i < rows for i in ids.values()) or len(set(ids.values())) != len(ids):
        found = f"{len(ids)} tokens with ids up to {max(ids.values(), default=0)}"
        raise Unwritable(found, f"ids below {rows}, the rows of the embedding, each once")
    tokens, types = [f"[PAD{i}]" for i in range(rows)], [_UNUSED] * rows
    special = {token["content"]: _CONTROL if token.get("special") else _USER for token in added}
    for token, i in ids.items():
        tokens[i] = token
        types[i] = _UNKNOWN if token == unknown else special.get(token, _BYTE if _HEX.fullmatch(token) else _NORMAL)
    return tokens, types


def _scores(tokens: list[str], types: list[int], merges: list[str]) -> list[float]:
    rank: dict[str, int] = {}
    for i, merge in enumerate(merges):
        rank.setdefault(merge.replace(" ", "", 1), i)
    reached = [kind != _NORMAL or len(token) == 1 for token, kind in zip(tokens, types, strict=True)]
    return [
        -float(rank[token]) if token in rank else 0.0 if single else _NEVER
        for token, single in zip(tokens, reached, strict=True)
    ]


def _roles(
    settings: dict[str, Any], config: dict[str, Any], model: dict[str, Any], ids: dict[str, int]
) -> dict[str, int]:
    """The tokens with a role: by the tokenizer's own settings, else by those of the model."""
    found = {}
    for name, key in NAMES.items():
        stated = settings.get(name)
        token = stated.get("content") if isinstance(stated, dict) else stated
        if key == "unknown" and token is None:
            token = model.get("unk_token")
        number = config.get(f"{name}_id")
        number = number[0] if isinstance(number, list) and number else number
        if isinstance(token, str) and token in ids:
            found[key] = ids[token]
        elif type(number) is int and 0 <= number < len(ids):
            found[key] = number
    return found


def _around(value: Any, ids: dict[str, int]) -> tuple[int | None, int | None]:
    """The tokens that are put before and after every text."""
    for step in _steps(value, "processors"):
        single = step.get("single")
        if step.get("type") == "TemplateProcessing" and isinstance(single, list) and single:
            ends = [item.get("SpecialToken", {}).get("id") for item in (single[0], single[-1])]
            first, last = (ids.get(token) if isinstance(token, str) else None for token in ends)
            return first, last
    return None, None
