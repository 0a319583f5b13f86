"""The text of a calibration: read, tokenized, cut into rows, some of them drawn."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from bcqfmt.container.files import SourceFile
from bcqfmt.errors import error

__all__ = ["CalibrationText", "choose_rows", "read_text"]


class CalibrationText(NamedTuple):
    """A text and the SHA-256 of its bytes."""

    text: str
    sha256: str
    shown: str


def read_text(path: Path) -> CalibrationText:
    """A UTF-8 file; BCQ-E302 when it is not."""
    source = SourceFile(path)
    raw = source.read(0, source.size).tobytes()
    source.close()
    try:
        return CalibrationText(raw.decode("utf-8"), hashlib.sha256(raw).hexdigest(), path.name)
    except UnicodeDecodeError as fault:
        raise error("BCQ-E302", path.name, found=f"byte {fault.start} is not UTF-8", expected="a text file") from None


def choose_rows(
    given: CalibrationText, tokenize: Callable[[str], Sequence[int]], rows: int, seq: int, seed: int
) -> npt.NDArray[np.int64]:
    """``rows`` runs of ``seq`` tokens, ``[rows, seq]``: drawn with ``seed`` from those the text is cut into, in order.

    No token is used twice; BCQ-E630 where the text has too few.
    """
    tokens = np.asarray(tokenize(given.text), np.int64)
    count = tokens.size // seq
    if count < rows:
        raise error(
            "BCQ-E630",
            given.shown,
            found=f"{tokens.size} tokens, enough for {count} rows of {seq}",
            expected=f"{rows * seq} tokens for {rows} rows",
        )
    chosen = np.sort(np.random.default_rng(seed).choice(count, rows, replace=False))
    return np.asarray(tokens[: count * seq].reshape(count, seq)[chosen])
