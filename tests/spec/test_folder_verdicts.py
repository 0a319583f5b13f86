"""Folders with one thing wrong, or none: the package and the decoder accept the same ones."""

from __future__ import annotations

import importlib.util
import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

import bcqfmt
from bcqfmt import BcqError
from fuzz.folder_mutations import mutate_folder
from weights import samples
from weights.strategies import EXPLORE

DECODER = Path(__file__).resolve().parents[2] / "spec" / "decoder.py"
spec = importlib.util.spec_from_file_location("bcq_decoder_for_folders", DECODER)
assert spec is not None
assert spec.loader is not None
decoder: Any = importlib.util.module_from_spec(spec)
spec.loader.exec_module(decoder)

FOLDERS = 150 * EXPLORE
SEED = 21 if EXPLORE == 1 else random.SystemRandom().randrange(2**32)
TARGETS = ("gone", "../gone", "..", ".", "config.json", "model.safetensors", "bcq_source", "/etc", "../../blobs/x")


def mutate_members(folder: Path, rng: random.Random) -> None:
    """A file becomes a pipe, a link or a folder; or one of these appears beside the files."""
    path = rng.choice(sorted(path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()))
    if rng.random() < 0.5:
        path.unlink()
    else:
        path = path.parent / rng.choice(("new", "b.json", "bcq_source"))
    if os.path.lexists(path):
        return
    kind = rng.randrange(4)
    if kind == 0:
        os.mkfifo(path)
    elif kind == 1:
        path.mkdir()
    else:
        path.symlink_to(rng.choice((*TARGETS, path.name)))


def judged(folder: Path) -> tuple[str, set[str]]:
    """The decoder's rule, empty where it reads, and the package's."""
    try:
        decoder.read_folder(folder)
        rule = ""
    except decoder.Refused as refusal:
        rule = refusal.rule
    try:
        return rule, {finding.code for finding in bcqfmt.validate(folder, deep=True).errors}
    except BcqError as fault:
        return rule, {fault.code}


def test_both_accept_the_same_folders(tmp_path: Path) -> None:
    rng = random.Random(SEED)
    valid = [entry["path"] for entry in samples.vector_index()["valid"] if entry["kind"] == "folder"]
    met: set[str] = set()
    same = 0
    for i in range(FOLDERS):
        folder = tmp_path / str(i) / "model"
        path = "valid/folder-provenance" if i % 3 == 0 else rng.choice(valid)
        shutil.copytree(samples.VECTORS / path, folder)
        if i % 3 != 1:
            mutate_folder(folder, rng)
        if i % 3 != 2:
            mutate_members(folder, rng)
        rule, rules = judged(folder)
        assert bool(rule) == bool(rules), (SEED, i, path, rule, rules)
        met.add(rule)
        same += not rule or rule in rules
        shutil.rmtree(folder.parent)
    assert "" in met
    assert len(met) > 15
    assert same >= 0.95 * FOLDERS


@pytest.mark.parametrize(
    ("name", "rule", "first"),
    [
        ("config.json", "BCQ-V511", "BCQ-V511"),
        ("bcq_manifest.json", "BCQ-V602", "BCQ-V602"),
        ("bcq_source/source.json", "BCQ-V701", "BCQ-V605"),  # of another size than the manifest says
    ],
)
def test_too_many_values_in_a_text(tmp_path: Path, name: str, rule: str, first: str) -> None:
    """Refused before it is parsed: neither reader says that the text is no JSON at all."""
    folder = shutil.copytree(samples.VECTORS / "valid" / "folder-provenance", tmp_path / "model")
    (folder / name).write_bytes(b'{"a":"' + b",[{" * 666_667)
    found, codes = judged(folder)
    assert (found, rule in codes) == (first, True)
    details = [finding.found for finding in bcqfmt.validate(folder, deep=True).errors if finding.code == rule]
    assert any("2000002 of the characters" in detail for detail in details)
