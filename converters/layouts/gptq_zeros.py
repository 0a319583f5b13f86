"""Integer zero points of GPTQ files: five ways to read the same bits, each with its exact inverse.

| rule | zero point of a stored field f |
|---|---|
| `v2` | f |
| `v1-nowrap` | f + 1, which may be 2^b |
| `v1-wrap` | (f + 1) mod 2^b |
| `v1-carry` | the field of word + 0x1111... (one in every field), carries running through the word |
| `v1-gptqmodel-3bit` | the field of word + a private constant per word of a 96-bit block |

The v1 rules agree wherever no field has all bits set.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from bcqfmt.errors import error

Array = npt.NDArray[Any]
RULES: Final = ("v2", "v1-nowrap", "v1-wrap", "v1-carry", "v1-gptqmodel-3bit")
# GPTQModel before 7.0 subtracted these from words 0, 1, 2 of every block of three; 0 and 2 are swapped from what one in
# every field would be.
_SWAPPED: Final = (0x24924924, 0x92492492, 0x49249249)


def rules_for(bits: int) -> list[str]:
    """The rules that zero points of this width can have."""
    known = {"v1-carry": 32 % bits == 0, "v1-gptqmodel-3bit": bits == 3}
    return [rule for rule in RULES if known.get(rule, True)]


def rules_of(widths: Collection[int]) -> list[str]:
    """The rules that a checkpoint with zero points of all these widths can be read by (see :func:`choose_rule`)."""
    return [
        rule
        for rule in RULES
        if all(rule in rules_for(bits) or (rule == "v1-gptqmodel-3bit" and 3 in widths) for bits in widths)
    ]


def decode_zeros(words: Array, fields: Array, bits: int, rule: str, unpack: Any) -> Array:
    """Zero points (G, N) uint16 from words (G, W) uint32 and their fields (G, N); ``unpack(words)`` gives fields."""
    if rule == "v2":
        return fields.astype(np.uint16)
    if rule == "v1-nowrap":
        return fields.astype(np.uint16) + np.uint16(1)
    if rule == "v1-wrap":
        return (fields.astype(np.uint16) + np.uint16(1)) & np.uint16(2**bits - 1)
    shifted: Array = unpack(words + _constants(words.shape[-1], bits, rule))
    return shifted.astype(np.uint16)


def encode_zeros(zeros: Array, bits: int, rule: str, pack: Any) -> Array:
    """The inverse: zero points (G, N) to words (G, W) uint32; ``pack(fields)`` gives words."""
    mask = np.uint16(2**bits - 1)
    if rule in ("v1-nowrap", "v1-wrap"):
        words: Array = pack((zeros.astype(np.uint16) - np.uint16(1)) & mask)
        return words
    words = pack(zeros.astype(np.uint16) & mask)
    return words if rule == "v2" else words - _constants(words.shape[-1], bits, rule)


def choose_rule(
    asked: str, version: str | None, bits: int, tool: tuple[str, tuple[int, ...]] | None, ones: bool
) -> str:
    """The rule for a checkpoint: asked for, or known for the tool, or immaterial; else an error that names the option.

    ``version``: ``gptq``, ``gptq_v2`` or None, where nothing tells; ``tool``: name and version; ``ones``: whether some
    field has all bits set.
    """
    if asked != "auto":
        if asked == "v1-gptqmodel-3bit" and bits != 3:
            return "v1-carry"
        return asked
    if version == "gptq_v2":
        return "v2"
    if version is None:
        legal = rules_for(bits) if ones else ["v2", "v1-nowrap"]
        found = "a configuration that does not say whether zero points are stored as they are or minus one"
    else:
        known = _known_rule(tool, bits)
        if known is not None:
            return known
        if not ones:
            return "v1-nowrap"
        legal = [rule for rule in rules_for(bits) if rule != "v2"]
        found = f"stored {bits}-bit zero fields with all bits set, which tools read differently"
    hint = f"choose: --zero-point {' or '.join(legal)}; --against MODEL, the model before quantization, tries all"
    raise error("BCQ-E605", found=found, expected=f"one of {', '.join(legal)}", hint=hint)


def _known_rule(tool: tuple[str, tuple[int, ...]] | None, bits: int) -> str | None:
    """The table of tool, version and bits."""
    if tool is None:
        return None
    name, version = tool
    if name == "gptqmodel":
        if bits != 3:
            return "v1-carry" if version >= (0, 9) else None
        return "v1-wrap" if version >= (7,) else "v1-gptqmodel-3bit"
    if name == "auto-round":
        # up to 0.15 it let zero borrow from the next field (3 bit: modulo 8), later it clips: this is what was meant
        return "v1-carry" if bits != 3 else "v1-wrap"
    return None


def _constants(words: int, bits: int, rule: str) -> npt.NDArray[np.uint32]:
    if rule == "v1-gptqmodel-3bit":
        return np.resize(np.array(_SWAPPED, np.uint32), words)
    one = sum(1 << (bits * i) for i in range(32 // bits)) if 32 % bits == 0 else 0
    if not one:
        found = f"rule {rule} with {bits} bits"
        hint = f"choose: --zero-point {' or '.join(rules_for(bits))}"
        raise error("BCQ-E605", found=found, expected="2, 4 or 8 bits, whose fields do not straddle words", hint=hint)
    return np.full(words, one, np.uint32)
