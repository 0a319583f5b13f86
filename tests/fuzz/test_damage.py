"""Damage in finished folders: `validate --deep` finds every flipped bit that a digest covers; cut files are refused."""

from __future__ import annotations

import random
import shutil
from collections import Counter
from pathlib import Path

import pytest

import bcqfmt
from bcqfmt.errors import BcqError
from fuzz.inputs import VECTORS
from pages.soak_figures import record
from sources.conversions import convert, gptq_folder


def converted(scratch: Path) -> Path:
    """A folder of every kind of file: shards, index, config, manifest, card, archived source, side files."""
    source = gptq_folder(scratch / "source", layers=4, n=32, k=64)
    (source / "extra").mkdir()
    (source / "extra" / "notes.txt").write_text("a side file")
    convert(source, scratch / "bcq", max_shard_size=3000)
    assert len(list((scratch / "bcq").glob("model-*.safetensors"))) == 4
    return scratch / "bcq"


def flips(folder: Path, count: int, seed: int) -> Counter[str]:
    """Flip single bits, spread evenly over all bytes but those of the model card; the code each was found by."""
    before = bcqfmt.validate(folder, deep=True)
    assert {(finding.code, finding.file) for finding in before.findings} <= {("BCQ-E504", "README.md")}
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)
    files = [path for path in files if path != folder / "README.md"]
    sizes = [path.stat().st_size for path in files]
    rng = random.Random(seed)
    found: Counter[str] = Counter()
    for path in rng.choices(files, sizes, k=count):
        whole = path.read_bytes()
        at, bit = rng.randrange(len(whole)), rng.randrange(8)
        damaged = bytearray(whole)
        damaged[at] ^= 1 << bit
        path.write_bytes(damaged)
        errors = bcqfmt.validate(folder, deep=True).errors
        assert errors, f"bit {bit} of byte {at} of {path.relative_to(folder)} was flipped unseen"
        found[errors[0].code] += 1
        path.write_bytes(whole)
    assert bcqfmt.validate(folder, deep=True).findings == before.findings
    return found


def test_some_bits(tmp_path: Path) -> None:
    assert sum(flips(converted(tmp_path), 60, 1).values()) == 60


@pytest.mark.soak
def test_ten_thousand_bits(tmp_path: Path) -> None:
    found = flips(converted(tmp_path), 5000, 2)
    shutil.copytree(VECTORS / "valid" / "folder-provenance", tmp_path / "vector")
    found += flips(tmp_path / "vector", 5000, 3)
    record("bit_flips", flipped=10_000, found=sum(found.values()), by_rule=dict(sorted(found.items())))


def cuts(path: Path, scratch: Path, rng: random.Random, in_data: int) -> int:
    """Cut a file after every byte of its header and at places in its data; refused by reader and validator."""
    raw = path.read_bytes()
    header = 8 + int.from_bytes(raw[:8], "little")
    ends = [*range(min(header, len(raw))), *(rng.randrange(header, len(raw)) for _ in range(in_data))]
    place = scratch / "cut.safetensors"
    for end in ends:
        place.write_bytes(raw[:end])
        assert not bcqfmt.validate(place).valid, (path.name, end)
        try:
            bcqfmt.open(place)
        except BcqError as fault:
            code = fault.exit_code
        assert code == 4, (path.name, end)
    return len(ends)


def test_a_file_cut_in_its_header(tmp_path: Path) -> None:
    assert cuts(VECTORS / "valid" / "worked-example.safetensors", tmp_path, random.Random(0), 20) > 200


@pytest.mark.soak
def test_every_vector_cut_everywhere(tmp_path: Path) -> None:
    rng, total, files = random.Random(1), 0, 0
    for path in sorted((VECTORS / "valid").glob("*.safetensors")):
        raw = path.read_bytes()
        if len(raw) > 8 + int.from_bytes(raw[:8], "little"):
            total += cuts(path, tmp_path, rng, 100)
            files += 1
    record("truncation", files=files, cuts=total, refused=total)
