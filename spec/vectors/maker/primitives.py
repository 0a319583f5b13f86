"""Vectors without files: packed fields, rounding, canonical JSON."""

import math
import struct
from typing import Any

from .build import FORMATS, Lcg, canonical, packed, round_once

# number -> the bits of that type, found by hand
BY_HAND: dict[str, list[tuple[float, int]]] = {
    "F16": [
        (1 + 2.0**-11, 0x3C00),
        (1 + 3 * 2.0**-11, 0x3C02),
        (1 + 2.0**-11 + 2.0**-40, 0x3C01),
        (1 + 3 * 2.0**-11 - 2.0**-40, 0x3C01),
        (65504.0, 0x7BFF),
        (math.nextafter(65520.0, 0.0), 0x7BFF),
        (65520.0, 0x7C00),
        (-65520.0, 0xFC00),
        (2.0**-14, 0x0400),
        (2.0**-14 - 2.0**-25, 0x0400),
        (2.0**-14 - 2.0**-24, 0x03FF),
        (2.0**-24, 0x0001),
        (3 * 2.0**-25, 0x0002),
        (5 * 2.0**-25, 0x0002),
        (2.0**-25, 0x0000),
        (-(2.0**-25), 0x8000),
        (math.nextafter(2.0**-25, 1.0), 0x0001),
    ],
    "BF16": [
        (1 + 2.0**-8, 0x3F80),
        (1 + 3 * 2.0**-8, 0x3F82),
        (1 + 2.0**-8 + 2.0**-40, 0x3F81),
        (1 + 3 * 2.0**-8 - 2.0**-40, 0x3F81),
        (-1 - 2.0**-8 - 2.0**-52, 0xBF81),
        ((2 - 2.0**-7) * 2.0**127, 0x7F7F),
        ((2 - 2.0**-8) * 2.0**127, 0x7F80),
        (math.nextafter((2 - 2.0**-8) * 2.0**127, 0.0), 0x7F7F),
        (2.0**-126, 0x0080),
        (2.0**-126 - 2.0**-134, 0x0080),
        (2.0**-133, 0x0001),
        (2.0**-134, 0x0000),
        (3 * 2.0**-134, 0x0002),
        (math.nextafter(2.0**-134, 1.0), 0x0001),
        (-(2.0**-134) * (1 + 2.0**-40), 0x8001),
    ],
    "F32": [
        (1 + 2.0**-24, 0x3F800000),
        (1 + 3 * 2.0**-24, 0x3F800002),
        (1 + 2.0**-24 + 2.0**-52, 0x3F800001),
        (0.1, 0x3DCCCCCD),
        ((2 - 2.0**-23) * 2.0**127, 0x7F7FFFFF),
        ((2 - 2.0**-24) * 2.0**127, 0x7F800000),
        (math.nextafter((2 - 2.0**-24) * 2.0**127, 0.0), 0x7F7FFFFF),
        (2.0**-126 - 2.0**-150, 0x00800000),
        (2.0**-149, 0x00000001),
        (2.0**-150, 0x00000000),
        (3 * 2.0**-150, 0x00000002),
        (math.nextafter(2.0**-150, 1.0), 0x00000001),
        (-(2.0**-150), 0x80000000),
    ],
}
# raw binary64: zeros, infinities, NaNs of either sign and with payloads, the ends of the range
RAW = [
    0x0000000000000000,
    0x8000000000000000,
    0x7FF0000000000000,
    0xFFF0000000000000,
    0x7FF8000000000000,
    0xFFF8000000000000,
    0x7FF0000000000001,
    0xFFFFFFFFFFFFFFFF,
    0x7FF8000020000000,
    0x0000000000000001,
    0x8000000000000001,
    0x7FEFFFFFFFFFFFFF,
    0xFFEFFFFFFFFFFFFF,
    0x3FF0000000000000,
    0xBFF8000000000000,
]
TEXTS: list[Any] = [
    {},
    [],
    "",
    0,
    -1,
    9007199254740991,
    -9007199254740991,
    True,
    False,
    None,
    {"b": 1, "a": [1, {"d": None, "c": True}], "": "", "B": 2, "a b": 3, "aa": 4},
    {"\u00e9": 1, "z": 2, "\uffff": 3, "\U00010000": 4, "\x7f": 5},
    '"\\/\b\t\n\f\r\x00\x01\x1f\x7f ~\x80\u00e9\u2028\uffff\U0001f600\U0010ffff',
]


def rounding() -> list[dict[str, str]]:
    """binary64 -> F16, BF16 and F32."""
    for dtype, cases in BY_HAND.items():
        for hand, bits in cases:
            assert round_once(hand, dtype) == bits, (dtype, hand)
    patterns = [struct.unpack("<Q", struct.pack("<d", x))[0] for cases in BY_HAND.values() for x, _ in cases]
    rng = Lcg(501)
    patterns += [  # any significand, exponents where at least one type is normal, subnormal or overflows
        rng.below(2) << 63 | (1023 - 150 + rng.below(280)) << 52 | rng.below(1 << 26) << 26 | rng.below(1 << 26)
        for _ in range(24)
    ]
    result = []
    for pattern in dict.fromkeys(patterns + RAW):
        x: float = struct.unpack("<d", struct.pack("<Q", pattern))[0]
        entry = {"binary64": f"{pattern:016x}"}
        for dtype, form in FORMATS.items():
            bits = round_once(x, dtype)
            if dtype != "BF16" and math.isfinite(x) and bits & (1 << form[4] - 1) - 1 < form[2]:
                size = "<e" if dtype == "F16" else "<f"
                assert struct.pack(size, x) == bits.to_bytes(form[4] // 8, "little"), (dtype, x)
            entry[dtype] = f"{bits:0{form[4] // 4}x}"
        result.append(entry)
    return sorted(result, key=lambda e: e["binary64"])


def fields() -> list[dict[str, Any]]:
    """packed(b): fields -> words, each as eight hexadecimal digits, most significant first."""
    rng = Lcg(502)
    assert packed(3, [5, 3, 6]).hex() == "9d010000"  # section 6.1
    rows = [(3, [5, 3, 6])]
    for width in range(1, 10):
        top = (1 << width) - 1
        rows += [(width, [top]), (width, [0, top, 0, 1]), (width, [rng.below(top + 1) for _ in range(37)])]
    rows.append((1, [1] * 32))
    rows.append((9, [256, 0, 511, 1]))
    result = []
    for width, row in rows:
        data = packed(width, row)
        found = [f"{int.from_bytes(data[i : i + 4], 'little'):08x}" for i in range(0, len(data), 4)]
        result.append({"bits": width, "fields": row, "words": found})
    return result


def texts() -> list[dict[str, Any]]:
    """JSON values and their canonical text."""
    assert canonical(TEXTS[-1]) == (
        '"\\"\\\\/\\b\\t\\n\\f\\r\\u0000\\u0001\\u001f\\u007f ~\\u0080\\u00e9\\u2028\\uffff'
        '\\ud83d\\ude00\\udbff\\udfff"'
    )
    assert canonical(TEXTS[-2]) == '{"z":2,"\\u007f":5,"\\u00e9":1,"\\uffff":3,"\\ud800\\udc00":4}'
    return [{"value": value, "text": canonical(value)} for value in TEXTS]


def numbers() -> dict[str, Any]:
    """All primitive vectors."""
    return {"packed": fields(), "rounding": rounding(), "canonical_json": texts()}
