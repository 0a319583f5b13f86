"""Valid files around the weights: dense tensors, versions, what readers skip, header styles."""

import json

from maker.build import BITS, Lcg, Tensor, canonical, frame, place, tensor
from maker.catalogue import Valid, lone
from maker.weights import descriptor, metadata, tensors_of

from .affine import worked_example

ALIKE = ["\u00e9", "e\u0301", "\u00c9", "stra\u00dfe", "strasse", "\u212a", "k", "\u0416", "\u0436", "\u0130", "i"]


def dense() -> list[Valid]:
    """Tensors that are not weights."""
    rng = Lcg(305)

    def some(dtype: str, shape: list[int]) -> Tensor:
        size = BITS[dtype]
        for d in shape:
            size *= d
        return Tensor(dtype, shape, bytes(rng.below(256 if dtype != "BOOL" else 2) for _ in range(size // 8)))

    named = {f"all.{dtype.lower()}": some(dtype, [3, 4]) for dtype in BITS}
    named["all.scalar"] = some("F32", [])
    named["all.empty"] = some("F16", [0, 7])
    named["all.empty_u8"] = some("U8", [3, 0])
    named["rank16"] = some("U8", [1] * 15 + [2])
    named['odd\x00name\x1b[31m/../\u202e\u00e9\U0001f600"\\'] = some("BF16", [2])
    named[""] = some("I16", [1])
    named["x" * 512] = some("U8", [1])
    named["bcq"] = some("U8", [1])
    named["a.bcq"] = some("U8", [1])
    return [
        lone(
            "dense",
            "a weight with dense tensors of every type, scalars, empty ones, odd names",
            [worked_example()],
            named,
        ),
        lone(
            "names-alike",
            "names that only Unicode's own rules would call equal: BCQ-V120 folds ASCII letters and nothing else",
            [worked_example()],
            dict.fromkeys(ALIKE, some("U8", [1])),
        ),
        lone("no-weights", "a file of dense tensors only", [], {"x": some("BF16", [3]), "y": some("I64", [2])}),
        lone("no-tensors", "no tensor at all", []),
    ]


def versions() -> list[Valid]:
    """What readers skip."""
    extra = {
        "a": [1, -9007199254740991, {"b": "\u00e9\u2028\U0001f600\x7f"}],
        "version": "2.0",
        "features": None,
        "t": True,
    }
    deep: object = 0
    for _ in range(14):  # the descriptor and `ignorable` itself are two more: 16 levels
        deep = [deep]
    weight = [worked_example()]
    text = {"note": "other keys of __metadata__ are ignored", "bcq": "1"}
    return [
        lone(
            "ignorable",
            "anything under `ignorable`, 16 levels deep, other keys of __metadata__",
            weight,
            ignorable={**extra, "deep": deep},
            extra=text,
        ),
        lone("minor-version", "version 1.7 without a new feature", weight, version="1.7"),
        lone("minor-version-long", "MINOR is a number, not a digit", weight, version="1.4294967296"),
    ]


def styles() -> list[Valid]:
    """Containers that other writers make: other orders, white space, escapes."""
    weight = worked_example()
    tensors = tensors_of(
        [weight],
        {
            "a": tensor("U8", [4], [1, 2, 3, 4]),
            "Z\u00e9": tensor("F32", [1], [1]),
            "e": tensor("U8", [0], []),
        },
    )
    entries, data = place(tensors, ["a", "Z\u00e9", "w.bcq_s0_planes", "e", "w.bcq_s0_scale"])
    shuffled = {k: dict(reversed(v.items())) for k, v in reversed(entries.items())}
    meta = metadata(descriptor([weight]))
    header = json.dumps({**shuffled, "__metadata__": meta}, indent=1, ensure_ascii=False).replace('"Z', '"\\u005A')
    kept = {n: t for n, t in tensors.items() if not n.startswith("w.")}
    comment = "header keys and tensors in another order, white space, raw UTF-8, an unneeded escape"
    loose = Valid("header-style", comment, frame(header.encode(), data), [weight], kept)
    padded = Valid(
        "header-padding",
        "more spaces after the header than needed",
        frame(canonical({**entries, "__metadata__": meta}) + " " * 4096, data),
        [weight],
        kept,
    )
    wide = canonical({**entries, "__metadata__": meta}).replace('"a":{', '"a":{' + " " * 5000)
    long = Valid("header-long-entry", "an entry of more than 5,000 bytes", frame(wide, data), [weight], kept)
    return [loose, padded, long]


def vectors() -> list[Valid]:
    """All of this module."""
    return [*dense(), *versions(), *styles()]
