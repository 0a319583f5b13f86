"""Which rows and columns of the weights of a checkpoint one layer of one rank holds; knows neither vLLM nor torch.

A layer of vLLM is one matrix or several above each other (``qkv_proj``: q, k, v), its *pieces*. A file has them as
weights of their own, or some of them together in one weight ("fused on disk"). Of every piece a rank holds a range of
rows; in a row-parallel layer, a range of columns and all rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from bcqfmt.errors import error

_QKV = {"q": 0, "k": 1, "v": 2}  # names that vLLM gives the pieces of a fused layer


class Slice(NamedTuple):
    """Piece ``piece`` of a layer is these rows and columns of a weight, each (start, stop)."""

    piece: int
    rows: tuple[int, int]
    columns: tuple[int, int]


def slices_of(
    layer: Any, shape: Sequence[int], columns: int, sizes: Sequence[int], *, shared: bool, shard: Any = None
) -> list[Slice]:
    """What a layer takes of a weight of ``shape`` (out, in).

    ``columns``: of this rank. ``sizes``: rows of every piece on this rank. ``shared``: rows are split among the ranks.
    ``shard``: which piece the weight is, as vLLM says it ("q", 1), several of them ((0, 1)), or None for all.
    BCQ-E305 unless the weight has the rows that this asks for.
    """
    out, width = shape
    rank = int(getattr(layer, "tp_rank", 0))
    start = rank * columns if columns < width else 0
    across = (start, start + columns)
    tokens = getattr(layer, "shard_indices", None)
    if tokens is not None:  # a head: rows are shared out by token, and the last rank holds fewer than the others
        _check_rows(out, int(layer.org_vocab_size), shard)
        return [Slice(0, (int(tokens.org_vocab_start_index), int(tokens.org_vocab_end_index)), across)]
    taken: list[Slice] = []
    offset = 0
    for piece in pieces_of(shard, len(sizes)):
        size, copies = sizes[piece], _copies(layer, piece)
        first = offset + (rank // copies * size if shared else 0)
        taken.append(Slice(piece, (first, first + size), across))
        offset += _whole(layer, piece, size, shared)
    _check_rows(out, offset, shard)
    return taken


def weights_of_pieces(layer: Any, rows: Sequence[int | None], sizes: Sequence[int], *, shared: bool) -> list[int]:
    """For every piece of a layer, the number of the weight that holds it; weights follow one another as pieces do.

    ``rows`` of every weight, None where they are not known; ``sizes``, ``shared``: see :func:`slices_of`. BCQ-E305
    where the rows do not tell it.
    """
    if len(rows) == len(sizes):
        return list(range(len(sizes)))
    if len(rows) == 1:
        return [0] * len(sizes)
    whole = [_whole(layer, piece, size, shared) for piece, size in enumerate(sizes)]
    known = [sum(whole) - sum(r or 0 for r in rows) if count is None else count for count in rows]
    found, left = [], list(known)
    for size in whole:
        number = next((n for n, count in enumerate(left) if count), len(left) - 1)
        left[number] -= size
        found.append(number)
    if any(left) or list(rows).count(None) > 1:
        shown = ", ".join("?" if count is None else str(count) for count in rows)
        expected = f"pieces of {', '.join(map(str, whole))} rows"
        raise error("BCQ-E305", found=f"weights of {shown} rows", expected=expected)
    return found


def pieces_of(shard: Any, count: int) -> Sequence[int]:
    """The numbers of the pieces that vLLM means by a shard id: None for all, "q", 1, (0, 1)."""
    found = range(count) if shard is None else shard if isinstance(shard, tuple) else (_QKV.get(shard, shard),)
    if not all(isinstance(piece, int) and 0 <= piece < count for piece in found):
        raise error("BCQ-E305", found=f"piece {shard!r} of a layer of {count}", expected="one that the layer has")
    return found


def _whole(layer: Any, piece: int, size: int, shared: bool) -> int:
    """Rows of a piece in the file, ``size`` of them on this rank."""
    return size * int(getattr(layer, "tp_size", 1)) // _copies(layer, piece) if shared else size


def _copies(layer: Any, piece: int) -> int:
    """Neighbouring ranks that hold the same rows: keys and values of few heads among many ranks."""
    return int(getattr(layer, "num_kv_head_replicas", 1)) if piece else 1


def _check_rows(out: int, wanted: int, shard: Any) -> None:
    if out != wanted:
        which = "" if shard is None else f" for piece {shard!r}"
        raise error("BCQ-E305", found=f"a weight of {out} rows{which}", expected=f"{wanted} rows")
