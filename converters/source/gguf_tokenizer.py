"""Tokenizer files for a GGUF file: tokenizer.json and tokenizer_config.json, as the library `tokenizers` reads them.

GGUF keeps tokens, their types, merges or scores, and the name of the regular expression that splits words; it keeps no
normalizer. So this is a reconstruction, for the splitting rules listed here. The chat template is copied, never run.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any, Final

import numpy as np

from bcqfmt import limits
from bcqfmt.container.gguf.header import GgufHeader

_UNKNOWN, _CONTROL, _USER = 2, 3, 4  # types of tokens
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_BYTES: Final = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_DIGITS: Final = {"type": "Digits", "individual_digits": True}


def _split(digits: str) -> list[dict[str, Any]]:
    pattern = {"Regex": _WORDS % digits}
    return [
        {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False},
        {**_BYTES, "use_regex": False},
    ]


SPLITS: Final[dict[str, list[dict[str, Any]]]] = {
    "gpt-2": [_BYTES],
    "default": [_BYTES],
    "smollm": [_DIGITS, _BYTES],
    "qwen2": _split(""),
    "deepseek-r1-qwen": _split(""),
    "llama-bpe": _split("{1,3}"),
}
_COMPOSED: Final = {"qwen2", "deepseek-r1-qwen"}  # whose text is brought to NFC first
NAMES: Final = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def tokenizer_files(header: GgufHeader) -> dict[str, bytes]:
    """Path -> content; empty when the file has no tokenizer, or one that is not known here or too large."""
    model, tokens = _word(header, "model"), _strings(header, "tokens")
    if not tokens or len(set(tokens)) != len(tokens):
        return {}
    made: dict[str, Any] | None = None
    if model == "gpt2" and _word(header, "pre") in SPLITS:
        made = _byte_level(header, tokens)
    elif model == "llama" and len(_numbers(header, "scores")) == len(tokens):
        made = _sentence_piece(header, tokens)
    if made is None:
        return {}
    special = {name: tokens[i] for name, key in NAMES.items() if (i := _id(header, key, tokens)) is not None}
    settings: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    settings |= special
    template = header.get("tokenizer.chat_template")
    settings |= {"chat_template": template} if isinstance(template, str) else {}
    return {"tokenizer.json": _text(made), "tokenizer_config.json": _text(settings)}


def _byte_level(header: GgufHeader, tokens: list[str]) -> dict[str, Any]:
    """Byte-level BPE with its merges."""
    split = _word(header, "pre")
    merges = [merge.split(" ", 1) for merge in _strings(header, "merges") if " " in merge]
    return {
        **_around(header, tokens, default_bos=False),
        "normalizer": {"type": "NFC"} if split in _COMPOSED else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": SPLITS[split]},
        "decoder": _BYTES,
        "model": _bpe(tokens, merges, ignore_merges=split == "llama-bpe"),
    }


def _sentence_piece(header: GgufHeader, tokens: list[str]) -> dict[str, Any] | None:
    """SentencePiece's BPE: two pieces merge where a token is both together, the one with the best score first.

    None where the merges would be no JSON file that anyone reads.
    """
    scores = _numbers(header, "scores")
    merges: list[tuple[float, str, str]] = []
    size = 0
    for token, score, cuts in zip(tokens, scores, _cuts(tokens), strict=True):
        size += len(token) * len(cuts)
        if size > limits.MAX_JSON_FILE_BYTES:  # runs of one letter, as many as a header holds, would make a terabyte
            return None
        merges += [(-score, token[:i], token[i:]) for i in cuts]
    merges.sort(key=lambda merge: merge[0])  # stable: equal scores stay in the order of the tokens
    prefix = [{"type": "Prepend", "prepend": "▁"}] if _flag(header, "add_space_prefix", True) else []
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    unknown = _id(header, "unknown", tokens)
    model = _bpe(tokens, [[left, right] for _, left, right in merges], byte_fallback=True, fuse_unk=True)
    return {
        **_around(header, tokens, default_bos=True),
        "normalizer": {
            "type": "Sequence",
            "normalizers": [*prefix, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}],
        },
        "pre_tokenizer": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                *strip,
            ],
        },
        "model": {**model, "unk_token": None if unknown is None else tokens[unknown]},
    }


def _cuts(tokens: list[str]) -> Iterator[list[int]]:
    """For every token, all places where it falls into two tokens; in time and memory of the order of all letters."""
    begins, ends = _longest_beginnings(tokens), _longest_beginnings(token[::-1] for token in tokens)
    for token in tokens:
        right = set(_lengths(ends, token[::-1]))
        yield [i for i in reversed(_lengths(begins, token)) if len(token) - i in right]


def _longest_beginnings(tokens: Iterable[str]) -> dict[str, str]:
    """Token -> the longest other token that it begins with, or an empty text."""
    found: dict[str, str] = {}
    around = [""]  # in sorted order, tokens follow what they begin with
    for token in sorted(tokens):
        while not token.startswith(around[-1]):
            around.pop()
        found[token] = around[-1]
        around.append(token)
    return found


def _lengths(begins: dict[str, str], token: str) -> list[int]:
    """Of all other tokens that it begins with, longest first."""
    found = []
    while token := begins[token]:
        found.append(len(token))
    return found


def _around(header: GgufHeader, tokens: list[str], default_bos: bool) -> dict[str, Any]:
    """What all tokenizers have: the tokens that are never split, and what is put before and after a text."""
    kinds = _numbers(header, "token_type")
    added = [
        {
            "id": i,
            "content": token,
            "special": kind != _USER,
            **dict.fromkeys(("single_word", "lstrip", "rstrip"), False),
        }
        for i, (token, kind) in enumerate(zip(tokens, kinds, strict=False))
        if kind in (_UNKNOWN, _CONTROL, _USER)
    ]
    first = [_id(header, "bos", tokens)] if _flag(header, "add_bos_token", default_bos) else []
    last = [_id(header, "eos", tokens)] if _flag(header, "add_eos_token", False) else []
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{**token, "normalized": False} for token in added],
        "post_processor": _template(tokens, [i for i in first if i is not None], [i for i in last if i is not None]),
    }


def _template(tokens: list[str], first: list[int], last: list[int]) -> dict[str, Any] | None:
    if not first and not last:
        return None

    def text(name: str, kind: int) -> list[dict[str, Any]]:
        before = [{"SpecialToken": {"id": tokens[i], "type_id": kind}} for i in first]
        after = [{"SpecialToken": {"id": tokens[i], "type_id": kind}} for i in last]
        return [*before, {"Sequence": {"id": name, "type_id": kind}}, *after]

    special = {tokens[i]: {"id": tokens[i], "ids": [i], "tokens": [tokens[i]]} for i in (*first, *last)}
    return {
        "type": "TemplateProcessing",
        "single": text("A", 0),
        "pair": [*text("A", 0), *text("B", 1)],
        "special_tokens": special,
    }


def _bpe(tokens: list[str], merges: list[list[str]], **options: bool) -> dict[str, Any]:
    settings = {"fuse_unk": False, "byte_fallback": False, "ignore_merges": False, **options}
    vocabulary = {token: i for i, token in enumerate(tokens)}
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        **settings,
        "vocab": vocabulary,
        "merges": merges,
    }


def _id(header: GgufHeader, key: str, tokens: list[str]) -> int | None:
    """The id of a token with a role, if the file names one that exists."""
    found = header.get(f"tokenizer.ggml.{key}_token_id")
    return found if type(found) is int and 0 <= found < len(tokens) else None


def _word(header: GgufHeader, key: str) -> str:
    found = header.get(f"tokenizer.ggml.{key}", "default")
    return found if isinstance(found, str) else ""


def _flag(header: GgufHeader, key: str, default: bool) -> bool:
    found = header.get(f"tokenizer.ggml.{key}", default)
    return found if isinstance(found, bool) else default


def _strings(header: GgufHeader, key: str) -> list[str]:
    """An array of strings; empty when it is something else."""
    found = header.get(f"tokenizer.ggml.{key}")
    return found if isinstance(found, list) else []


def _numbers(header: GgufHeader, key: str) -> list[Any]:
    """An array of numbers; empty when it is something else."""
    found = header.get(f"tokenizer.ggml.{key}")
    return found.tolist() if isinstance(found, np.ndarray) else []


def _text(value: Any) -> bytes:
    return (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode()
