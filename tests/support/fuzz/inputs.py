"""The inputs that fuzzers begin with, and one mutation of any bytes whatever."""

from __future__ import annotations

import random
from pathlib import Path

from fuzz.header_mutations import mutated_file

VECTORS = Path(__file__).resolve().parents[3] / "spec" / "vectors"
LONGEST = 20_000  # bytes of an input: what is longer tells nothing more and is slow


def first_inputs() -> list[bytes]:
    """Every vector that is a small file, the valid ones first, and a few of no format at all."""
    paths = [path for kind in ("valid", "invalid") for path in sorted((VECTORS / kind).glob("*.safetensors"))]
    found = [data for path in paths if len(data := path.read_bytes()) <= LONGEST]
    return [*found, b"", b"\0" * 8, b"\x02" + b"\0" * 7 + b"{}", b"PK\x03\x04", b"<html>"]


def mutate(data: bytes, rng: random.Random) -> bytes:
    """One change: mostly one that knows headers and descriptors, otherwise of plain bytes."""
    if rng.random() < 0.85:
        try:
            return mutated_file(data, rng)[:LONGEST]
        except Exception:  # noqa: BLE001 - no header to speak of: whatever that makes of the mutations
            pass
    return mutate_bytes(data, rng)[:LONGEST]


def mutate_bytes(data: bytes, rng: random.Random) -> bytes:
    """Bits flipped, bytes put in, taken out, doubled, or the length changed."""
    changed = bytearray(data or b"\0")
    at = rng.randrange(len(changed))
    roll = rng.randrange(6)
    if roll == 0:
        changed[at] ^= 1 << rng.randrange(8)
    elif roll == 1:
        changed[at] = rng.choice(b'\0\xff"{}[]:,09-\\u \x80\xed')
    elif roll == 2:
        del changed[at : at + rng.randrange(1, 9)]
    elif roll == 3:
        changed[at:at] = rng.randbytes(rng.randrange(1, 9))
    elif roll == 4:
        end = at + rng.randrange(1, 64)
        changed[at:at] = changed[at:end]
    else:
        changed[:8] = rng.choice((0, 1, 2**31, 2**63, len(data), max(0, len(data) - 8))).to_bytes(8, "little")
    return bytes(changed)
