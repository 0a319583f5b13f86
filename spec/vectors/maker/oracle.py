"""The values of a weight, computed from its plain numbers: section 8 without any stored bytes."""

from math import prod

from .build import little, number, round_once
from .weights import Segment, Weight


class NoValueError(Exception):
    """float-zero, offset and table have no value with fewer planes (section 8.1)."""


def number_at(seg: Segment, key: str, r: int, a: int, out: int) -> float:
    """s (key "scale") or o ("offset") of row r (counted over all matrices) and group a."""
    kind = seg.spec[key]
    if isinstance(kind, str):
        return number(kind, seg.numbers[key][r][a])
    blocks = -(-out // kind["rows"])
    b, column = r // out * blocks + r % out // kind["rows"], a // kind.get("groups", 1)
    scale, code = number(kind["scale"], seg.numbers[f"{key}_scale"][b][column]), seg.numbers[f"{key}_codes"][r][a]
    if "codes" in kind:
        return scale * number(kind["codes"], code)
    zero = kind["zero"]
    if isinstance(zero, str):
        stored = seg.numbers[f"{key}_zero"][b][column]
        zero = stored if zero == "packed" else number(zero, stored)
    return scale * (code - float(zero))


def summed(z: float, alphas: list[float], code: int, q: int) -> float:
    """The bcq formula over the first planes."""
    e = z
    for i, alpha in enumerate(alphas):
        e = e + alpha if code >> (q - 1 - i) & 1 else e - alpha
    return e


def element(seg: Segment, r: int, j: int, out: int, dtype: str, planes: int) -> float:
    """E of section 8 (8.1 where planes < q), before outliers and rounding."""
    spec, q = seg.spec, seg.spec["bits"]
    a, code, fewer = j // spec["group_size"], seg.codes[r][j], planes < q
    if spec["encoding"] == "bcq":
        name, use = "alpha", min(planes, q)
        own = f"_p{use}" if fewer and use in spec.get("precisions", []) else ""
        alphas = [number(spec["alpha"], seg.plane_numbers[name + own][i][r][a]) for i in range(use)]
        z = number(spec["bias"], seg.numbers["bias" + own][r][a]) if "bias" in spec else 0.0
        return summed(z, alphas, code, q)
    s = number_at(seg, "scale", r, a, out)
    if spec["encoding"] == "affine":
        zp = seg.numbers["zero"][r][a] if "zero" in seg.numbers else spec["zero"]
        if fewer:
            z = s * (((1 << q) - 1 - 2 * zp) * 0.5)
            return summed(z, [s * 2.0 ** (q - 2 - i) for i in range(planes)], code, q)
        return s * float(code - zp)
    if fewer:
        raise NoValueError
    if spec["encoding"] == "float-zero":
        difference = code - number(spec["zero"], seg.numbers["zero"][r][a])
        return s * number(dtype, round_once(difference, dtype))
    if spec["encoding"] == "table":
        return s * (spec["table"][code] * 2.0 ** spec.get("table_exponent", 0))
    return s * float(code) + number_at(seg, "offset", r, a, out)


def values(weight: Weight, planes: int = 8) -> bytes:
    """The raw bytes of the decoded weight."""
    out, inner = weight.shape[-2:]
    where = [(seg, j) for seg in weight.segments for j in range(seg.width)]
    result: list[int] = []
    for r in range(prod(weight.shape[:-1])):
        perm = weight.perm[r // out] if weight.perm is not None else range(inner)
        row = [0.0] * inner
        for stored, column in enumerate(perm):
            seg, j = where[stored]
            row[column] = element(seg, r, j, out, weight.dtype, planes)
        if weight.outliers is not None:
            for column, bits in weight.outliers.rows[r]:
                v = number(weight.outliers.dtype, bits)
                row[column] = row[column] + v if weight.outliers.mode == "add" else v
        result += [round_once(e, weight.dtype) for e in row]
    return little(weight.dtype, result)
