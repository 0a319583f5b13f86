"""Convert, restore and export of a GGUF file, killed at random changes of the disk: no partial files, same bytes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import bcqfmt
from bcqfmt.converters.convert.restore import restore
from pages.soak_figures import record
from programs.verbs import ROOT, environment
from sources.conversions import convert
from sources.gguf_files import DATA

SUPPORT = ROOT / "tests" / "support"
KILLS = 200
SHARD = 20_000  # bytes: several shards


def ran(script: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """A program of tests/support/faults."""
    settings = {**environment(), "PYTHONPATH": os.pathsep.join((str(ROOT), str(SUPPORT)))}
    words = [sys.executable, "-P", str(SUPPORT / "faults" / script), *map(str, arguments)]
    done = subprocess.run(words, env=settings, capture_output=True, text=True, timeout=3600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done


@pytest.mark.soak
def test_killed_two_hundred_times_each(tmp_path: Path) -> None:
    source, converted, restored = DATA / "q4_k_m.gguf", tmp_path / "plain", tmp_path / "restored"
    convert(source, converted, max_shard_size=SHARD)
    assert len(list(converted.glob("model-*.safetensors"))) > 3
    with bcqfmt.open(converted) as checkpoint:
        restore(checkpoint, restored)
    exported = tmp_path / "exported.gguf"
    to_gguf = ["--to", "gguf", "--like", source]
    asked = {
        "convert": (source, converted, ["--max-shard-size", SHARD, "--workers", "2"]),
        "restore": (converted, restored, []),
        "export": (converted, exported, to_gguf),
    }
    unfinished = {}
    for verb, (origin, plain, options) in asked.items():
        counted = ran("interrupted.py", 9, 0, verb, origin, tmp_path / "count" / f"{verb}.gguf", *options)
        if verb == "export":
            (tmp_path / "count" / "export.gguf").rename(exported)
        calls = counted.stderr.rpartition("calls ")[2].strip()
        found = json.loads(
            ran("killed_many.py", origin, plain, SHARD, calls, KILLS, verb, *options).stdout.splitlines()[-1]
        )
        assert found["kills"] == KILLS
        unfinished[verb] = found["left_unfinished"]
        assert unfinished[verb] > KILLS // 3
    record("sigkill_gguf", verbs=list(unfinished), kills_each=KILLS, left_unfinished=unfinished, byte_identical="all")
