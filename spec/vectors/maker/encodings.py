"""Short ways to write down segments: one function per encoding."""

from typing import Any

from .build import BYTE_FLOATS, Lcg, Rows
from .weights import Segment


def first(dtype: str, rows: Rows) -> tuple[Any, dict[str, Rows]]:
    """A scale of first order."""
    return dtype, {"scale": rows}


def second(bits: int, rows: int, codes: Rows, scale: tuple[str, Rows], zero: tuple[str, Rows]) -> Any:
    """A scale of second order; `zero` is ("packed", codes) or (dtype, raw bits)."""
    spec = {"bits": bits, "rows": rows, "scale": scale[0], "zero": zero[0]}
    return spec, {"scale_codes": codes, "scale_scale": scale[1], "scale_zero": zero[1]}


def some_numbers(rng: Lcg, rows: int, G: int, kind: Any, key: str = "scale") -> Any:
    """Pseudo-random numbers of any kind, for the rows of one matrix: (kind, tables)."""

    def made(dtype: str, count: int, width: int) -> Rows:
        if dtype in BYTE_FLOATS:
            return rng.rows(count, width, 256 if dtype == "E8M0" else 127)
        return rng.floats(dtype, count, width)

    if isinstance(kind, str):
        return kind, {key: made(kind, rows, G)}
    shared = groups(rows, kind["rows"]), groups(G, kind.get("groups", 1))
    tables = {f"{key}_scale": made(kind["scale"], *shared)}
    if "codes" in kind:
        return kind, {**tables, f"{key}_codes": made(kind["codes"], rows, G)}
    tables[f"{key}_codes"] = rng.rows(rows, G, 1 << kind["bits"])
    if kind["zero"] == "packed":
        tables[f"{key}_zero"] = rng.rows(*shared, 1 << kind["bits"])
    elif isinstance(kind["zero"], str):
        tables[f"{key}_zero"] = made(kind["zero"], *shared)
    return kind, tables


def table(
    q: int, g: int, codes: Rows, scale: tuple[Any, dict[str, Rows]], levels: list[int], exponent: int = 0
) -> Segment:
    """table: a number for every code."""
    spec = {"encoding": "table", "bits": q, "group_size": g, "scale": scale[0], "table": levels}
    if exponent:
        spec["table_exponent"] = exponent
    return Segment(spec, codes, scale[1])


def affine(q: int, g: int, codes: Rows, scale: tuple[Any, dict[str, Rows]], zero: int | Rows) -> Segment:
    """affine, with one zero point for the whole segment or a table of them."""
    numbers = dict(scale[1])
    kind: Any = zero
    if not isinstance(zero, int):
        kind = {"bits": max(map(max, zero)).bit_length()}
        numbers["zero"] = zero
    spec = {"encoding": "affine", "bits": q, "group_size": g, "scale": scale[0], "zero": kind}
    return Segment(spec, codes, numbers)


def shifted(
    encoding: str,
    q: int,
    g: int,
    codes: Rows,
    scale: tuple[Any, dict[str, Rows]],
    other: tuple[Any, Any],
) -> Segment:
    """float-zero and offset: a scale and one more number per group."""
    key = "zero" if encoding == "float-zero" else "offset"
    spec = {"encoding": encoding, "bits": q, "group_size": g, "scale": scale[0], key: other[0]}
    return Segment(spec, codes, {**scale[1], **(other[1] if isinstance(other[1], dict) else {key: other[1]})})


def bcq(
    q: int,
    g: int,
    codes: Rows,
    alpha: tuple[str, list[Rows]],
    bias: tuple[str, Rows] | None = None,
    sets: dict[int, tuple[list[Rows], Rows | None]] | None = None,
) -> Segment:
    """bcq, with scale sets of their own for the precisions in `sets`."""
    spec: dict[str, Any] = {"encoding": "bcq", "bits": q, "group_size": g, "alpha": alpha[0]}
    seg = Segment(spec, codes, {}, {"alpha": alpha[1]})
    if bias is not None:
        spec["bias"] = bias[0]
        seg.numbers["bias"] = bias[1]
    for p, (alphas, own) in (sets or {}).items():
        spec.setdefault("precisions", []).append(p)
        seg.plane_numbers[f"alpha_p{p}"] = alphas
        if own is not None:
            seg.numbers[f"bias_p{p}"] = own
    return seg


def groups(n: int, g: int) -> int:
    """G, the number of groups."""
    return -(-n // g)


def some_affine(rng: Lcg, rows: int, n: int, q: int, g: int, zero: int | None, dtype: str = "F16") -> Segment:
    """Pseudo-random affine; `zero` None stores zero points, 0 and 2^q among them."""
    G = groups(n, g)
    zeros = rng.rows(rows, G, (1 << q) + 1)
    zeros[0][0], zeros[-1][-1] = 1 << q, 0
    scale = first(dtype, rng.floats(dtype, rows, G))
    return affine(q, g, rng.rows(rows, n, 1 << q), scale, zeros if zero is None else zero)


def some_bcq(rng: Lcg, rows: int, n: int, q: int, g: int, alpha: str, bias: str | None) -> Segment:
    """Pseudo-random bcq; the plane scales have either sign."""
    G = groups(n, g)
    alphas = [rng.floats(alpha, rows, G) for _ in range(q)]
    z = (bias, rng.floats(bias, rows, G)) if bias else None
    return bcq(q, g, rng.rows(rows, n, 1 << q), (alpha, alphas), z)


def some_second(rng: Lcg, rows: int, G: int, bits: int, g2: int, scale: str, zero: str) -> Any:
    """Pseudo-random second-order scales for the rows of one matrix."""
    blocks = -(-rows // g2)
    limit = 1 << bits
    zeros = rng.rows(blocks, G, limit) if zero == "packed" else rng.floats(zero, blocks, G)
    return second(bits, g2, rng.rows(rows, G, limit), (scale, rng.floats(scale, blocks, G)), (zero, zeros))
