"""The memory of a conversion follows the largest weight, not the model (long: `make soak`)."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import bcqfmt
from bcqfmt.container.stored_tensor import StoredTensor
from bcqfmt.converters.convert.conversion import Conversion, ConvertOptions
from bcqfmt.converters.convert.restore import restore
from bcqfmt.converters.convert.shard import ReadOnce
from bcqfmt.converters.convert.verify import verify
from bcqfmt.converters.layouts.protocol import Module
from bcqfmt.converters.source.checkpoint import open_source
from bcqfmt.errors import BcqError
from sources.conversions import convert, gptq_folder, tree

K, N, GROUP = 4096, 11008, 128
LAYERS_PER_FILE = 22  # half a gigabyte
_CHILD = """
import sys
from bcqfmt.cli.main import cli
from bcqfmt.system import peak_memory
try:
    cli(["convert", sys.argv[1], sys.argv[2], "--workers", "2", *sys.argv[3:]])
except SystemExit as end:
    assert not end.code, end.code
print("peak", peak_memory())
"""


def checkpoint(path: Path, files: int) -> int:
    """``files`` files of 4-bit weights; the words are random, the same in every file."""
    path.mkdir()
    rng = np.random.default_rng(0)
    layer = {
        "qweight": rng.integers(-(2**31), 2**31, (K // 8, N), np.int32),
        "qzeros": np.full((K // GROUP, N // 8), 0x77777777, np.int32),
        "scales": rng.uniform(0.001, 0.01, (K // GROUP, N)).astype(np.float16),
    }
    weight_map: dict[str, str] = {}
    for file in range(files):
        name = f"model-{file + 1:05d}-of-{files:05d}.safetensors"
        first = file * LAYERS_PER_FILE
        names = [f"model.layers.{i}.mlp.up_proj" for i in range(first, first + LAYERS_PER_FILE)]
        save_file({f"{n}.{suffix}": array for n in names for suffix, array in layer.items()}, path / name)
        weight_map |= {f"{n}.{suffix}": name for n in names for suffix in layer}
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    quant = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True, "desc_act": False}
    (path / "config.json").write_text(json.dumps({"quantization_config": quant}))
    return sum(array.nbytes for array in layer.values())


@pytest.mark.soak
def test_peak_memory_does_not_follow_the_size_of_the_model(tmp_path: Path) -> None:
    """Shards as large as they are by default, and so small that both workers are busy whatever the size."""
    peaks: dict[tuple[str, ...], list[int]] = {(): [], ("--max-shard-size", "300MB"): []}
    for files in (2, 8, 24):  # 1, 4 and 12 GB
        source, target = tmp_path / f"source{files}", tmp_path / f"bcq{files}"
        largest = checkpoint(source, files)
        for options, found in peaks.items():
            command = [sys.executable, "-c", _CHILD, source, target, *options]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            peak = int(done.stdout.rpartition("peak ")[2])
            subprocess.run(["rm", "-rf", target], check=True)
            assert peak <= 2 * largest + 300_000_000, (files, options)
            found.append(peak)
        subprocess.run(["rm", "-rf", source], check=True)
    for found in peaks.values():
        assert max(found) <= 1.1 * min(found), peaks


def test_tensors_are_kept_only_while_their_module_is_converted() -> None:
    """Scales are read once more when they are written, at the end of a file: those of all its weights."""
    tensor = StoredTensor.from_array("m.scales", np.arange(6, dtype=np.float16), "F16")
    read_once = ReadOnce(Module("m", "gptq", {"scales": tensor}))
    reads = read_once.module.tensors["scales"]
    first = reads.array()
    assert np.shares_memory(first, reads.array())
    read_once.forget()
    assert not read_once._arrays
    assert reads.array().tobytes() == first.tobytes()
    assert not read_once._arrays


def test_side_files_are_never_in_memory_as_a_whole(tmp_path: Path) -> None:
    """A file of 100 MB beside the model, through convert, verify and restore."""
    source = gptq_folder(tmp_path / "source", layers=1)
    with (source / "large.bin.txt").open("wb") as file:
        file.truncate(100_000_000)  # sparse
    convert(source, tmp_path / "warm")  # what is loaded and compiled once does not count
    shutil.rmtree(tmp_path / "warm")
    tracemalloc.start()
    try:
        convert(source, tmp_path / "bcq")
        assert bcqfmt.validate(tmp_path / "bcq", deep=True).valid
        with bcqfmt.open(tmp_path / "bcq") as checkpoint:
            verify(open_source(source), checkpoint)
            restore(checkpoint, tmp_path / "restored")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 50_000_000
    assert tree(tmp_path / "restored") == tree(source)


@pytest.mark.parametrize("provenance", [True, False])
@pytest.mark.parametrize("name", ["tokenizer.json", "quantize_config.json"])
def test_a_side_file_that_changes_after_the_plan(tmp_path: Path, name: str, provenance: bool) -> None:
    """Also one that is not carried over: the configuration has been read from it."""
    source = gptq_folder(tmp_path / "source", layers=1)
    (source / "quantize_config.json").write_text("{}")
    conversion = Conversion(open_source(source), ConvertOptions(provenance=provenance))
    (source / name).write_text('{"a": 1}')
    with pytest.raises(BcqError, match="BCQ-E103") as caught:
        conversion.run(tmp_path / "bcq")
    assert caught.value.finding.file == name
    assert not (tmp_path / "bcq").exists()
