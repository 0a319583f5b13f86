"""Which type of GGUF holds a weight: exactly, or if that is allowed the nearest one.

| weight | type |
|---|---|
| as tensors of a type become on their way in | that type |
| affine, ``code - zero point`` in -8..7, -16..15, -128..127 | Q4_0, Q5_0, Q8_0 |
| offset, up to 4 or 5 bits | Q4_1, Q5_1 |
| others, rounded | scales and offsets to F16; else new codes in Q8_0; else dense |

The exact ones need scales (and offsets) that are F16 numbers, groups of a multiple of 32 columns, and no act order.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from bcqfmt.container.stored_tensor import StoredTensor
from bcqfmt.converters.export.target import scattered
from bcqfmt.converters.gguf.kinds import KINDS
from bcqfmt.converters.layouts.protocol import Rebuilder
from bcqfmt.converters.layouts.registry import rebuilders
from bcqfmt.weight import decode
from bcqfmt.weight.weight import BcqWeight

Float = npt.NDArray[np.float64]
_BLOCK: Final = 32
_RANGES: Final = (("Q4_0", 8), ("Q5_0", 16), ("Q8_0", 128))  # -n .. n-1
_CLOSE: Final = 2.0**-10  # F16 has 11 bits: an error above this is an overflow or a number below its normal ones


class Choice(NamedTuple):
    """``how``: "stored", all fields as they are; "codes", "offset": other planes, the same products; "values": new
    codes for the values. ``found`` and ``expected``: why it is not exact; both empty if it is."""

    type: str
    how: str
    found: str = ""
    expected: str = ""

    @property
    def exact(self) -> bool:
        return not self.found


def choose(weight: BcqWeight, own: str = "") -> Choice:
    """The type; ``own``: the type of the tensor that the weight was made of, if it came from GGUF."""
    if stored := _stored_type(weight, own):
        return Choice(stored, "stored")
    if reason := _misfit(weight):
        return _by_values(weight, *reason)
    kind, how, reason = _affine(weight) if weight.scheme.segments[0].encoding == "affine" else _offset(weight)
    numbers, lost = _lost_in_half(weight)
    found, expected = reason or numbers or ("", "")
    return Choice(kind, how, found, expected) if kind and lost <= _CLOSE else _by_values(weight, found, expected)


def _stored_type(weight: BcqWeight, own: str) -> str:
    """The type whose tensors become such weights; empty for none."""
    known = known_rules()
    # TQ1_0 has no code 3, which nothing but its own tensors promise.
    names = [own, *(name for name in KINDS if name != "TQ1_0")] if own else [n for n in KINDS if n != "TQ1_0"]
    for name in names:
        if known[f"gguf.{name.lower()}"].fits(weight.spec):
            bias = weight.parts().get("s0_bias")  # Q1_0 has none; a zero of either sign changes no other value
            return name if bias is None or not bias.array().any() else ""
    return ""


@cache
def known_rules() -> dict[str, Rebuilder]:
    """Those that rebuild tensors of a source; looking for plugins takes a while."""
    return dict(rebuilders())


def _misfit(weight: BcqWeight) -> tuple[str, str] | None:
    """What no type can hold whatever its numbers are: found and expected."""
    scheme, columns = weight.scheme, weight.spec.columns
    if columns % _BLOCK:
        return f"{columns} columns", "a multiple of 32, the block of every type"
    if len(scheme.segments) != 1:
        return f"{len(scheme.segments)} segments", "one"
    if scheme.outliers is not None and (count := weight.parts()["outlier_values"].shape[0]):
        return f"{count} outliers", "none"
    (segment,) = scheme.segments
    if segment.encoding in ("bcq", "table"):
        what = "scales of single planes (bcq)" if segment.encoding == "bcq" else "a table of values"
        return what, "codes times a scale, or one of the tables of GGUF in its own groups"
    if segment.group_size % _BLOCK and segment.group_size < columns:
        return f"groups of {segment.group_size} columns", "a multiple of 32"
    if scattered(weight):
        return "act order: the columns of a group lie apart", "groups of neighbouring columns"
    return None


def _affine(weight: BcqWeight) -> tuple[str, str, tuple[str, str] | None]:
    """Type, how, and what is wrong with it."""
    top = (1 << weight.scheme.segments[0].bits) - 1
    low = high = 0.0
    for numbers in _small_numbers(weight):
        zeros = np.asarray(decode.zero_of(numbers, 0))
        low, high = min(low, float(-zeros.max())), max(high, float(top - zeros.min()))
    for name, limit in _RANGES:
        if -limit <= low and high < limit:
            return name, "codes", None
    return "", "", (f"codes less zero points in {low:.0f}..{high:.0f}", "-128..127 at most, the codes of Q8_0")


def _offset(weight: BcqWeight) -> tuple[str, str, tuple[str, str] | None]:
    segment = weight.scheme.segments[0]
    if segment.bits > 5:
        return "", "", (f"{segment.bits} bits with offsets", "5 at most, the codes of Q5_1")
    reason = None
    if segment.encoding == "float-zero":
        reason = "floating-point zero points", "integers, or offsets that are added"
    return "Q4_1" if segment.bits < 5 else "Q5_1", "offset", reason


def _lost_in_half(weight: BcqWeight) -> tuple[tuple[str, str] | None, float]:
    """What is wrong with scales and offsets as F16 numbers, and the largest relative error that makes."""
    worst = 0.0
    wrong = ""
    for numbers in _small_numbers(weight):
        for what, exact in named_numbers(numbers).items():
            with np.errstate(all="ignore"):
                lost = np.abs(half(exact).astype(np.float64) - exact)
                largest = np.abs(exact).max(initial=0.0) if what == "offset" else np.abs(exact)
                relative = np.where(lost == 0, 0.0, lost / largest)
            relative = np.where(np.isfinite(exact), relative, 0.0)  # infinities and NaNs are themselves in F16
            found = float(np.nan_to_num(relative, nan=1.0, posinf=1.0).max(initial=0.0))
            wrong = what if found > worst else wrong
            worst = max(worst, found)
    return ((f"{wrong}s that are no F16 numbers", f"F16 {wrong}s") if worst else None), worst


def named_numbers(numbers: decode.Numbers) -> dict[str, Float]:
    """Scales, and offsets where values have them, float64 [rows, G]."""
    segment = numbers.spec.scheme.segments[0]
    scale = decode.scale_of(numbers, 0)
    if segment.encoding == "affine":
        return {"scale": scale}
    second = decode.zero_of(numbers, 0)
    with np.errstate(all="ignore"):
        return {"scale": scale, "offset": np.asarray(second if segment.encoding == "offset" else -scale * second)}


def _small_numbers(weight: BcqWeight) -> Iterator[decode.Numbers]:
    """Everything but the planes, one matrix at a time."""
    parts: dict[str, StoredTensor] = {n: p for n, p in weight.parts().items() if not n.endswith("_planes")}
    for e in range(weight.spec.stack):
        yield decode.load_rows(weight.spec, parts, e, (0, weight.spec.out))


def half(numbers: Float) -> npt.NDArray[np.float16]:
    """Rounded to F16."""
    with np.errstate(all="ignore"):
        return numbers.astype(np.float16)


def _by_values(weight: BcqWeight, found: str, expected: str) -> Choice:
    kind = "Q8_0" if weight.spec.columns % _BLOCK == 0 else weight.dtype
    return Choice(kind, "values", found, expected)
