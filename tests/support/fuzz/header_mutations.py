"""Files that are slightly wrong, made from a right one: the same ones for the same seed."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

# values that sit at a limit of the format, or look like one that fits
NUMBERS = (
    "-1", "0", "-0", "1", "2", "7", "8", "9", "16", "17", "31", "32", "33", "64", "255", "256", "4096", "65537",
    "2147483647", "2147483648", "4294967296", "281474976710655", "281474976710656", "9007199254740991",
    "9007199254740992", "18446744073709551616", "1" + "0" * 40, "1.0", "1e3", "01", "true", "null", '"8"', "NaN", "[]",
)  # fmt: skip
TEXTS = (
    '"F16"', '"BF16"', '"F32"', '"I32"', '"U16"', '"F6_E2M3"', '"affine"', '"bcq"', '"offset"', '"float-zero"',
    '"table"', '"E8M0"', '"UE4M3"', '"codes"', '"groups"', '"super-groups"', '"table_exponent"',
    '"aligned64"', '"packed"', '"add"', '"replace"', '""', '"\\ud800"', '"\\u00e9"', '"e\\u0301"', '"K"', '"\\u212a"',
    '"\\u0000"', '"perm"', '"stack"', '"1.0"', '"1.7"', '"2.0"', '"pt"', '"__metadata__"', "{}", "[]", "1", "false",
)  # fmt: skip
TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|-?[0-9]+|true|false|null|[\[\]{},:]')


def mutated_text(text: str, rng: random.Random) -> str:
    """A JSON text with one to three tokens replaced, doubled, dropped or exchanged."""
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        tokens = list(TOKEN.finditer(text))
        if not tokens:
            return text
        token = rng.choice(tokens)
        start, end = token.span()
        roll = rng.random()
        if roll < 0.35 and token[0][0] in "-0123456789":
            new = rng.choice(NUMBERS) if rng.random() < 0.6 else str(int(token[0]) + rng.choice((-1, 1, 8, -8)))
        elif roll < 0.45 and token[0][0] == '"':
            new = rng.choice(TEXTS)
        elif roll < 0.55:
            new = ""
        elif roll < 0.65:
            new = token[0] * 2
        elif roll < 0.75:
            new = rng.choice(tokens)[0]
        elif roll < 0.85:
            new = token[0] + rng.choice((" ", "\n", "\t", "\0", ",", "]", "}", '"'))
        elif roll < 0.95 and token[0][0] == '"' and len(token[0]) > 2:
            at = rng.randrange(1, len(token[0]) - 1)
            odd = rng.choice(("é", "\\u00e9", "\\n", "\n", "A", "\\", "\x7f", "\\ud83d\\ude00", "😀", "", "."))
            new = token[0][:at] + odd + token[0][at + rng.randrange(2) :]
        else:
            other = rng.choice(tokens)
            new, (first, last) = other[0], other.span()
            if last <= start:
                text = text[:first] + token[0] + text[last:start] + new + text[end:]
                continue
        text = text[:start] + new + text[end:]
    return text


def with_header(text: bytes, data: bytes, rng: random.Random) -> bytes:
    """A file of a header and data, mostly padded and with the right length."""
    if rng.random() < 0.9:
        text += b" " * (-len(text) % 8)
    length = len(text) if rng.random() < 0.95 else rng.choice((0, 1, len(text) - 1, len(text) + 8, 2**31, 2**63))
    return length.to_bytes(8, "little") + text + data


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key or position) inside a JSON value."""
    found: list[tuple[Any, Any]] = []
    stack = [value]
    while stack:
        item = stack.pop()
        keys = list(item) if isinstance(item, dict) else range(len(item)) if isinstance(item, list) else []
        for key in keys:
            found.append((item, key))
            stack.append(item[key])
    return found


def mutate_value(value: Any, rng: random.Random) -> None:
    """One place of a JSON value replaced, dropped, doubled or renamed."""
    all_places = places(value)
    if not all_places:
        return
    container, key = rng.choice(all_places)
    old = container[key]
    roll = rng.random()
    if roll < 0.5:
        container[key] = _replacement(old, rng)
    elif roll < 0.65:
        del container[key]
    elif roll < 0.8:
        other, other_key = rng.choice(all_places)
        container[key] = other[other_key] if not isinstance(other[other_key], (dict, list)) else old
    elif isinstance(container, list):
        container.append(old)
    else:
        container[str(key) + rng.choice(("", "x", ".weight", "_bcq_", ".", "..", " ", "é"))] = container.pop(key)


def _replacement(old: Any, rng: random.Random) -> Any:
    if isinstance(old, bool) or old is None:
        return rng.choice((True, False, None, 1, 0))
    if isinstance(old, int):
        near = old + rng.choice((-1, 1, 2, 8, -8))
        return rng.choice((near, near, rng.randrange(20), rng.choice((2**31 - 1, 2**31, 2**40, 2**53 - 1, 2**53, -1))))
    if isinstance(old, str):
        return json.loads(rng.choice(TEXTS))
    return rng.choice(({}, [], 0, "F16", {"bits": rng.randrange(10)}, [rng.randrange(4)], [0, 1], [1, 2, 3]))


def mutated_descriptor(text: str, rng: random.Random) -> str:
    """A header whose descriptor was changed inside its string, mostly as a value and canonical again."""
    header: dict[str, Any] = json.loads(text)
    metadata = header.get("__metadata__")
    if not isinstance(metadata, dict) or not isinstance(metadata.get("bcqfmt"), str):
        return mutated_text(text, rng)
    if rng.random() < 0.2:
        metadata["bcqfmt"] = mutated_text(metadata["bcqfmt"], rng)
    else:
        value = json.loads(metadata["bcqfmt"])
        mutate_value(value, rng)
        metadata["bcqfmt"] = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return json.dumps(header, ensure_ascii=False)


def mutated_entries(text: str, rng: random.Random) -> str:
    """A header in which one or two values, names or keys are others."""
    header = json.loads(text)
    for _ in range(rng.choice((1, 1, 2))):
        mutate_value(header, rng)
    return json.dumps(header)


def mutated_file(source: bytes, rng: random.Random) -> bytes:
    """One mutation of a file: of its header, of its descriptor, of its data, or of its length."""
    length = int.from_bytes(source[:8], "little")
    head, data = source[8 : 8 + length], source[8 + length :]
    roll = rng.random()
    if roll < 0.75:
        change = mutated_text if roll < 0.15 else mutated_entries if roll < 0.4 else mutated_descriptor
        text = change(head.decode().rstrip(" "), rng)
        return with_header(text.encode("utf-8", "surrogatepass"), data, rng)
    if roll < 0.9 and data:
        changed = bytearray(data)
        for _ in range(rng.choice((1, 1, 2, 8))):
            changed[rng.randrange(len(changed))] = rng.choice((0, 1, 0x7C, 0x7F, 0x80, 0xFF, rng.randrange(256)))
        return source[: 8 + length] + bytes(changed)
    if roll < 0.95:
        return source[: rng.randrange(len(source))]
    at = rng.randrange(len(source))
    return source[:at] + bytes([rng.randrange(256)]) + source[at + rng.randrange(2) :]


def seeds(paths: list[Path], limit: int) -> list[bytes]:
    """The files that are small enough to be mutated quickly."""
    found = [path.read_bytes() for path in paths]
    return [data for data in found if len(data) <= limit]
