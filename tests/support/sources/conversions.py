"""Converting in tests: sources made with numpy, what a folder holds, and conversions that are run and proved."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import Any

import numpy as np

import bcqfmt
from bcqfmt.converters.convert.conversion import Conversion, ConvertOptions
from bcqfmt.converters.convert.restore import restore
from bcqfmt.converters.convert.verify import Certificate, verify
from bcqfmt.converters.source.checkpoint import open_source
from sources.peers import Array, made_up, words

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": False}
GPTQ |= {"checkpoint_format": "gptq_v2", "meta": {"quantizer": ["gptqmodel:7.6.0"]}}


def tree(folder: Path) -> dict[str, str]:
    """path -> SHA-256 of every file below a folder; of a file itself with the path ``.``."""
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in [folder, *sorted(folder.rglob("*"))]
        if path.is_file()
    }


def convert(source: Path, target: Path, **options: Any) -> Conversion:
    """Run a conversion in this process."""
    conversion = Conversion(open_source(source), ConvertOptions(**options))
    conversion.run(target)
    return conversion


def proved(source: Path, target: Path, scratch: Path, rows: int | None = None) -> Certificate:
    """Validate deeply, verify, restore: everything as it must be."""
    report = bcqfmt.validate(target, deep=True)
    assert report.valid, report.errors[0].text()
    with bcqfmt.open(target) as checkpoint:
        certificate = verify(open_source(source), checkpoint, rows=rows)
        digests = restore(checkpoint, scratch / "restored")
    assert tree(scratch / "restored") == digests == certificate.digests == tree(source)
    shutil.rmtree(scratch / "restored")
    return certificate


def gptq_layer(rng: np.random.Generator, n: int, k: int, group: int, bits: int = 4) -> dict[str, Array]:
    """Random words of one module, ``g_idx`` in order."""
    groups = -(-k // group)
    return {
        "qweight": words(rng, k * bits // 32, n),
        "qzeros": words(rng, groups, n * bits // 32),
        "scales": rng.uniform(1e-4, 1e-2, (groups, n)).astype(np.float16),
        "g_idx": (np.arange(k) // group).astype(np.int32),
    }


def gptq_folder(folder: Path, layers: int = 4, n: int = 64, k: int = 128, **quantization: Any) -> Path:
    """A checkpoint of some layers, a dense tensor each."""
    rng = np.random.default_rng(0)
    settings = {**GPTQ, **quantization}
    tensors: dict[str, Array] = {}
    for layer in range(layers):
        for suffix, array in gptq_layer(rng, n, k, settings["group_size"], settings["bits"]).items():
            tensors[f"model.layers.{layer}.proj.{suffix}"] = array
        tensors[f"model.layers.{layer}.norm.weight"] = rng.standard_normal(k).astype(np.float16)
    made_up(folder, tensors, settings)
    (folder / "tokenizer.json").write_text("{}")
    return folder
