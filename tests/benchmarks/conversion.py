"""Conversion, verification and restoration of a large GPTQ folder, compared with a plain copy and one SHA-256."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
from folders import folder_bytes, folder_files
from measure import MIB, Result, interleave, rounded, run_child, spread
from safetensors.numpy import save_file

import bcqfmt
from bcqfmt.converters.convert.conversion import Conversion, ConvertOptions
from bcqfmt.converters.convert.restore import restore
from bcqfmt.converters.convert.verify import verify
from bcqfmt.converters.source.checkpoint import open_source

K, N, GROUP, LAYERS_PER_SHARD = 4096, 11008, 128, 11
GOALS = {"convert": 0.4, "verify": 0.45, "restore": 0.55}  # of the throughput of `cp` and `sync`


def gptq_folder(path: Path, layers: int) -> int:
    """Random 4-bit weights of 11008 x 4096 in the GPTQ layout, sharded; the bytes of the folder."""
    path.mkdir(parents=True)
    rng = np.random.default_rng(0)
    shards = -(-layers // LAYERS_PER_SHARD)
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        tensors = {}
        for layer in range(shard * LAYERS_PER_SHARD, min(layers, (shard + 1) * LAYERS_PER_SHARD)):
            prefix = f"model.layers.{layer}.mlp.up_proj"
            tensors[f"{prefix}.qweight"] = rng.integers(-(2**31), 2**31, (K // 8, N), np.int32)
            tensors[f"{prefix}.qzeros"] = np.full((K // GROUP, N // 8), 0x77777777, np.int32)
            tensors[f"{prefix}.scales"] = rng.uniform(0.001, 0.01, (K // GROUP, N)).astype(np.float16)
            tensors[f"{prefix}.g_idx"] = (np.arange(K) // GROUP).astype(np.int32)
        name = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        save_file(tensors, path / name)
        weight_map.update(dict.fromkeys(tensors, name))
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    quant = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True, "desc_act": False}
    quant |= {"checkpoint_format": "gptq", "meta": {"quantizer": ["gptqmodel:7.6.0"]}}
    (path / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": quant}))
    return folder_bytes(path)


def convert(quick: bool, work: Path) -> list[Result]:
    """Two workers, hashing and fsync included."""
    source, target, back, copy = (work / name for name in ("source", "bcq", "back", "copy"))
    size = gptq_folder(source, 4 if quick else 88)
    shard = ConvertOptions(workers=2, max_shard_size=size // 4)

    def remove(folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        os.sync()  # the time that freeing the space takes is not measured

    def copied() -> None:
        subprocess.run(f"cp -r --reflink=never '{source}' '{copy}' && sync -f '{copy}'", shell=True, check=True)

    def hashed() -> None:
        for file in folder_files(source):
            bcqfmt.container.files.hash_file(bcqfmt.container.files.SourceFile(file))

    def converted() -> None:
        Conversion(open_source(source), shard).run(target)

    def verified() -> None:
        verify(open_source(source), bcqfmt.open(target))

    def restored() -> None:
        restore(bcqfmt.open(target), back)

    things = {  # everything is written anew; taking the old away is not timed with it
        "remove copy": partial(remove, copy),
        "copy": copied,
        "sha256": hashed,
        "remove bcq": partial(remove, target),
        "convert": converted,
        "verify": verified,
        "remove back": partial(remove, back),
        "restore": restored,
    }
    times = interleave(things, 2 if quick else 5)

    def speed(name: str) -> str:
        return f"{size / 1e6 / times.median(name):.0f} MB/s"

    results = []
    for name, goal in GOALS.items():
        ratios = [1 / ratio for ratio in times.ratios(name, "copy")]
        results.append(
            Result(
                f"`{name}` of {size / 1e9:.2f} GB of 4-bit GPTQ, throughput relative to `cp` and `sync`",
                f"{spread(ratios)} x; {speed(name)}, {times.cores(name):.1f} cores busy; "
                f"copy {speed('copy')}, one SHA-256 {speed('sha256')}",
                f"at least {goal} x",
                statistics.median(ratios) >= goal,
                {"ratios": rounded(ratios)},
            )
        )
    grown = folder_bytes(target) / size
    provenance = sum(file.stat().st_size for file in (target / "bcq_source").rglob("*") if file.is_file()) / size
    results.append(
        Result(
            "size of the folder, and of `bcq_source/` in it, relative to the source",
            f"{grown:.4f} x, {100 * provenance:.3f} %",
            "at most 1.02 x and 1 %",
            grown <= 1.02 and provenance <= 0.01,
        )
    )
    return results + _commands(source, work)


def _commands(source: Path, work: Path) -> list[Result]:
    """The command as a process: start-up, and peak memory against the largest module."""
    helped = [run_child(["-m", "bcqfmt", "convert", "--help"]).seconds for _ in range(9)]
    child = run_child(["-m", "bcqfmt", "convert", str(source), str(work / "cli"), "--workers", "2"])
    largest = K * N // 2 + K // GROUP * N * 2
    limit = 2 * largest + 300_000_000
    return [
        Result(
            "`bcqfmt convert --help`, a whole process",
            f"{1000 * statistics.median(helped):.0f} ms",
            "at most 300 ms",
            statistics.median(helped) <= 0.3,
        ),
        Result(
            "`bcqfmt convert`, peak memory of the process",
            f"{child.peak / MIB:.0f} MiB",
            f"at most twice the largest weight and 300 MB: {limit / MIB:.0f} MiB",
            child.peak <= limit,
        ),
    ]


if __name__ == "__main__":
    sys.exit("run by run.py")
