"""Times of tinygemm, LUT-GEMM and Marlin, in a process of their own that is ended if it takes too long."""

from __future__ import annotations

import json
import multiprocessing
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .chosen import SHAPES
from .peers import marlin, published, tinygemm
from .weights import random_vectors, random_weight

__all__ = ["NAMES", "of_row", "peer_times"]

NAMES = ("tinygemm", "lut_gemm", "marlin")
_MOST = 60  # seconds
_PLANES = (4, 3, 2)


def peer_times(
    marlin_library: str | None, lut_gemm_library: str | None, counts: Sequence[int], place: Path
) -> dict[str, float]:
    """What was found within a minute, by `_key`; Marlin with these numbers of vectors. ``place``: for a file."""
    place.write_text("{}")
    process = multiprocessing.get_context("spawn").Process(
        target=_time, args=(marlin_library, lut_gemm_library, counts, place)
    )
    process.start()
    process.join(_MOST)
    if process.exitcode != 0:
        sys.stderr.write("a peer did not answer or failed: it is left out from there on\n")
        process.kill()
        process.join()
    found: dict[str, float] = json.loads(place.read_text())
    place.unlink()
    return found


def of_row(found: dict[str, float], row: dict[str, Any]) -> dict[str, float]:
    """The peers that multiply the weight of a row, which has formula, bits, rows and vectors."""
    keys = {name: _key(name, row["formula"], row["bits"], row["rows"], row["vectors"]) for name in NAMES}
    return {name: found[key] for name, key in keys.items() if key in found}


def _key(name: str, formula: str, q: int, rows: int, count: int) -> str:
    return f"{name} {formula} {q} {rows} {count}"


def _time(marlin_library: str | None, lut_gemm_library: str | None, counts: Sequence[int], place: Path) -> None:
    found: dict[str, float] = {}

    def keep(name: str, formula: str, q: int, rows: int, count: int, microseconds: float) -> None:
        found[_key(name, formula, q, rows, count)] = microseconds
        place.write_text(json.dumps(found))  # what is timed is kept if the process is ended

    for rows, columns in SHAPES:
        weight = random_weight("affine", 4, rows, columns, 128)
        keep("tinygemm", "affine", 4, rows, 1, tinygemm(weight, random_vectors(1, columns)).microseconds)
    for rows, columns in SHAPES if lut_gemm_library else ():
        for q in _PLANES:
            weight = random_weight("bcq", q, rows, columns, 128)
            taken = published(str(lut_gemm_library), weight, random_vectors(1, columns)).microseconds
            keep("lut_gemm", "bcq", q, rows, 1, taken)
    for rows, columns in SHAPES if marlin_library else ():
        for count in counts:
            taken = marlin(str(marlin_library), rows, columns, random_vectors(count, columns)).microseconds
            keep("marlin", "affine", 4, rows, count, taken)
