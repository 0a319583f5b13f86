"""A million mutated headers through the C reader under the sanitizers: libFuzzer with clang, else our own loop."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from programs import c_reader
from weights import samples

pytestmark = pytest.mark.soak

RUNS = 1_000_000
STOP = ("-std=c99", "-O1", "-g", "-fno-sanitize-recover=all")


def files() -> list[Path]:
    """Valid files first; libFuzzer also starts from those that break a rule."""
    return [path for kind in ("valid", "invalid") for path in sorted((samples.VECTORS / kind).glob("*.safetensors"))]


def run(*words: str | Path) -> str:
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, check=False, timeout=3600)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout + done.stderr


def test_a_million_mutated_headers(tmp_path: Path) -> None:
    program = tmp_path / "fuzz"
    if shutil.which("clang") is None:
        c_reader.compile_c("fuzz.c", program, *STOP, "-fsanitize=address,undefined")
        valid = [path for path in files() if path.parent.name == "valid"]
        assert run(program, str(RUNS), "3600", "6", tmp_path, *valid).startswith(f"{RUNS} runs of ")
        return
    sanitizers = "-fsanitize=fuzzer,address,undefined"
    c_reader.compile_c("fuzz.c", program, *STOP, sanitizers, "-DBCQ_LIBFUZZER", command="clang")
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for path in files():
        shutil.copy(path, corpus)
    words = [f"-runs={RUNS}", "-seed=6", "-max_len=16384", "-print_final_stats=1", f"-artifact_prefix={tmp_path}/"]
    assert f"Done {RUNS} runs" in run(program, *words, corpus)
