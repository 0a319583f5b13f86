"""``make peers``: one export of every kind into every reader of its layout; writes docs/peers.md and docs/peers.json.

Environments: one folder each under --environments, made with the pins in READERS unless they are there; llama.cpp runs
in the one of this project. Weights are compared bit for bit with the dense export of the checkpoint, logits with those
of transformers on it (``load.py``).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import safetensors.numpy

import bcqfmt
from bcqfmt.container.files import SourceFile
from bcqfmt.container.gguf.header import read_gguf
from bcqfmt.converters.convert.conversion import Conversion, ConvertOptions
from bcqfmt.converters.export import export
from bcqfmt.converters.export.gguf import export_gguf
from bcqfmt.converters.quantize.quantization import Quantization, QuantizeOptions
from bcqfmt.converters.source.checkpoint import open_source
from bcqfmt.converters.source.gguf_tokenizer import tokenizer_files

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "tests" / "data" / "peers"
TOKENIZER = SOURCES / "gptqmodel-gptq_v2-4b-g64-asym-desc_act" / "source"
DONOR = ROOT / "tests" / "data" / "gguf" / "q4_0.gguf"  # of a tokenizer that llama.cpp knows
PAGE = ROOT / "docs" / "peers.md"
LAYOUTS = ("dense", "compressed-tensors", "gptq", "awq", "gguf")
_PATH = re.compile(r"(/[\w.+-]+){2,}")
CELLS = PAGE.with_suffix(".json")
BEGIN, END = "<!-- matrix: begin -->\n", "<!-- matrix: end -->\n"


class Reader(NamedTuple):
    """A tool: its environment, how ``load.py`` calls it, the layouts it reads, what pip installs."""

    title: str
    environment: str
    call: str
    layouts: tuple[str, ...]
    needs: tuple[str, ...]


_GPTQMODEL = ("torch==2.13.0", "transformers==5.22.2", "gptqmodel==7.6.0", "optimum==2.3.0", "accelerate")
READERS = (
    Reader("transformers", "ct", "transformers", ("dense",), ()),
    Reader(
        "transformers", "ct", "transformers", ("compressed-tensors",),
        ("torch==2.13.0", "transformers==5.22.2", "compressed-tensors==0.20.0", "accelerate"),
    ),
    Reader("GPTQModel", "gptqmodel", "gptqmodel", ("gptq", "awq"), _GPTQMODEL),
    Reader("transformers with GPTQModel", "gptqmodel", "transformers", ("gptq", "awq"), _GPTQMODEL),
    Reader(
        "AutoAWQ", "autoawq", "autoawq", ("awq",),
        ("torch==2.13.0", "transformers==4.51.3", "accelerate", "zstandard", "datasets", "autoawq==0.2.9"),
    ),
    Reader("llama.cpp", "", "llama.cpp", ("gguf",), ("xllamacpp==2026.10.11549",)),
)  # fmt: skip


class Kind(NamedTuple):
    """A checkpoint: words for the page, and how its BCQ folder is made."""

    title: str
    source: str  # a folder of tests/data/peers, or a model type that is made up
    settings: dict[str, Any] | None = None  # of rtn, where the source is dense
    method: str = "rtn"
    exclude: tuple[str, ...] = ()
    include: tuple[str, ...] = ()


KINDS = (
    Kind("GPTQ 4 bit, symmetric", "autoround-auto_gptq-4b-g32-sym"),
    Kind("GPTQ 4 bit, asymmetric", "gptqmodel-gptq-4b-g32-asym"),
    Kind("GPTQ 2 bit, asymmetric", "gptqmodel-gptq-2b-g32-asym"),
    Kind("GPTQ 3 bit, asymmetric", "gptqmodel-gptq_v2-3b-g32-asym"),
    Kind("GPTQ 8 bit, rows", "gptqmodel-gptq-8b-g-1-sym"),
    Kind("GPTQ 4 bit, act order", "gptqmodel-gptq-4b-g32-sym-desc_act"),
    Kind("GPTQ 3 bit, act order", "gptqmodel-gptq-3b-g64-sym-desc_act"),
    Kind("GPTQ 4 and 8 bit, quantized head, a dense layer", "gptqmodel-gptq-mixed-g32-sym-dynamic"),
    Kind("GPTQ, BF16 scales", "autogptq-gptq-4b-g32-asym-bf16scales"),
    Kind("GPTQ 4 bit, zero points 16", "zero-16"),
    Kind("AWQ 4 bit", "autoawq-gemm-4b-g32-asym"),
    Kind("compressed-tensors 3 bit", "llmcompressor-pack_quantized-3b-g32-asym"),
    Kind("compressed-tensors 4 bit, BF16", "llmcompressor-pack_quantized-4b-g64-sym-bf16"),
    Kind("HQQ 4 bit", "hqq-hqq-4b-g64-asym-axis1"),
    Kind("own 4 bit of F16", "dense-fp16", {"group_size": 32}),
    Kind("own 4 bit of BF16", "dense-bf16", {"group_size": 32}),
    Kind("own 4 bit of F32", "f32", {"group_size": 32}),
    Kind("own 4 bit, groups of 24", "dense-fp16", {"group_size": 24}),
    Kind("own 4 bit, groups of 8", "dense-fp16", {"group_size": 8}),
    Kind("own 6 bit", "dense-fp16", {"bits": 6, "group_size": 32}),
    Kind("own 4 bit, all q_proj dense", "dense-fp16", {"group_size": 32}, exclude=(r".*\.q_proj\.weight",)),
    Kind("own 4 bit, head too", "dense-fp16", {"group_size": 32}, include=(r"lm_head\.weight",)),
    Kind("own 3 planes (bcq)", "dense-fp16", {"group_size": 32}, method="bcq"),
    Kind("Qwen2, biases", "qwen2", {"group_size": 32}),
    Kind("Qwen3-MoE", "qwen3_moe", {"group_size": 32}),
    Kind("Mixtral", "mixtral", {"group_size": 32}),
    Kind("Phi-3", "phi3", {"group_size": 32}),
    Kind("GPT-2", "gpt2", {"group_size": 32}, include=(r".*\.c_.*\.weight",)),
)


def made_up(kind: str, folder: Path) -> Path:
    """A small random model of an architecture, as transformers writes it; ``f32``: the dense Llama in F32; ``zero-16``:
    a GPTQ model with all zero points at 2^bits.
    """
    if kind == "zero-16":
        shutil.copytree(SOURCES / "autoround-auto_gptq-4b-g32-asym" / "source", folder)
        tensors = safetensors.numpy.load_file(folder / "model.safetensors")
        tensors |= {name: np.full_like(array, -1) for name, array in tensors.items() if name.endswith(".qzeros")}
        safetensors.numpy.save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return folder
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(1)
    if kind == "f32":
        AutoModelForCausalLM.from_pretrained(SOURCES / "dense-bf16" / "source", dtype=torch.float32).save_pretrained(
            folder
        )
        return folder
    sizes = {
        "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4,
        "vocab_size": 96, "num_key_value_heads": 2, "max_position_embeddings": 128,
        "n_embd": 128, "n_layer": 2, "n_head": 4, "n_positions": 128,
        "moe_intermediate_size": 64, "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 32,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False,
    }  # fmt: skip
    config = AutoConfig.for_model(kind, **sizes)
    AutoModelForCausalLM.from_config(config, dtype=torch.float16).save_pretrained(folder)
    return folder


def bcq_folder(kind: Kind, place: Path) -> Path:
    """The BCQ folder of a kind."""
    known = SOURCES / kind.source / "source"
    source = open_source(known if known.is_dir() else made_up(kind.source, place / "source"))
    if kind.settings is None:
        Conversion(source, ConvertOptions(zero_point="v1-nowrap" if kind.source == "zero-16" else "auto")).run(
            place / "bcq"
        )
    else:
        options = QuantizeOptions(
            method=kind.method, settings=kind.settings, exclude=kind.exclude, include=kind.include
        )  # fmt: skip
        Quantization(source, options).run(place / "bcq")
    return place / "bcq"


def exports(work: Path, kinds: list[Kind]) -> Iterator[dict[str, str]]:
    """Every kind in every layout; ``refusal`` where the exporter says no."""
    for i, kind in enumerate(kinds):
        place = work / str(i)
        place.mkdir()
        with bcqfmt.open(bcq_folder(kind, place)) as checkpoint:
            for layout in LAYOUTS:
                row = {
                    "export": kind.title,
                    "layout": layout,
                    "folder": str(place / layout),
                    "dense": str(place / "dense"),
                }
                try:
                    told = exported(checkpoint, place / layout, layout)
                except bcqfmt.BcqError as refusal:
                    yield {**row, "refusal": refusal.finding.found}
                else:
                    yield {**row, **told}


def exported(checkpoint: bcqfmt.Checkpoint, place: Path, layout: str) -> dict[str, str]:
    """Write an export, with a tokenizer if the checkpoint has none that the reader knows; its format and notes."""
    if layout == "gguf":
        for name, content in tokenizer_files(read_gguf(SourceFile(DONOR))).items():
            (checkpoint.path / name).write_bytes(content)
        place.mkdir()
        written = export_gguf(checkpoint, place / "model.gguf")
        return {"format": layout, "notes": "; ".join(written.notes)}
    done = export(checkpoint, place, layout)
    for name in ("tokenizer.json", "tokenizer_config.json"):  # GPTQModel loads no model without
        if not (place / name).exists():
            shutil.copy(TOKENIZER / name, place / name)
    return {"format": done.format, "notes": "; ".join(done.notes)}


def environment(reader: Reader, folder: Path) -> Path | str:
    """The Python of a reader's environment, made if it is not there; or why there is none."""
    if not reader.environment:
        return Path(sys.executable)
    python = folder / reader.environment / "bin" / "python"
    needs = next(r.needs for r in READERS if r.environment == reader.environment and r.needs)
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", folder / reader.environment], check=True)
        tools = [python, "-m", "pip", "install", "--quiet", "setuptools", "wheel"]
        subprocess.run(tools, check=True)
    probe = subprocess.run([python, "-m", "pip", "list", "--format=freeze"], capture_output=True, text=True, check=True)
    have = {line.split("==")[0].lower() for line in probe.stdout.splitlines()}
    if {need.split("==")[0] for need in needs} <= have:
        return python
    # AutoAWQ asks for triton, which its CPU path does not need
    plain, alone = [n for n in needs if "autoawq" not in n], [n for n in needs if "autoawq" in n]
    for more in ([*plain], ["--no-deps", *alone] if alone else []):
        command = [python, "-m", "pip", "install", "--quiet", "--no-build-isolation", *more]
        made = subprocess.run(command, capture_output=True, text=True, check=False) if more else None
        if made is not None and made.returncode:
            return f"not installed: {made.stderr.strip().splitlines()[-1][:200]}"
    return python


def ask(reader: Reader, rows: list[dict[str, str]], environments: Path, work: Path) -> list[dict[str, str]]:
    """What a reader makes of the exports in its layouts."""
    jobs = [row for row in rows if row["layout"] in reader.layouts and "refusal" not in row]
    python = environment(reader, environments)
    if isinstance(python, str):
        return [{**row, "reader": reader.title, "verdict": "not run", "detail": python} for row in jobs]
    (work / "jobs.json").write_text(json.dumps(jobs))
    command = [python, Path(__file__).with_name("load.py"), reader.call, work / "jobs.json", work / "results.json"]
    subprocess.run(command, check=True, env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"})
    found = json.loads((work / "results.json").read_text())
    return [{**row, "reader": reader.title, **result} for row, result in zip(jobs, found, strict=True)]


def page(found: dict[str, dict[str, str]]) -> str:
    """The matrix and what stands behind its words; ``found``: results by export, layout and reader."""
    columns = [(layout, reader.title) for layout in LAYOUTS for reader in READERS if layout in reader.layouts]
    pins = dict(need.split("==") for reader in READERS for need in reader.needs if "==" in need)
    versions = [
        f"{name} {pins[name]}"
        for name in ("compressed-tensors", "gptqmodel", "optimum", "autoawq", "xllamacpp", "torch")
    ]
    lines = [
        f"Run with transformers 5.22.2 (AutoAWQ: 4.51.3), {', '.join(versions)}, on {platform.machine()}.", "",
        "| checkpoint | " + " | ".join(f"{layout}: {title}" for layout, title in columns) + " |",
        "|---" * (len(columns) + 1) + "|",
    ]  # fmt: skip
    notes: dict[str, dict[str, list[str]]] = {}
    for kind in KINDS:
        cells = []
        for layout, title in columns:
            result = found[key(kind.title, layout, title)]
            cells.append(result["verdict"])
            if result["verdict"] != "equal":
                where = layout if result["verdict"] == "-" else f"{layout} in {title}: {result['verdict']}"
                notes.setdefault(kind.title, {}).setdefault(plain(result["detail"]), []).append(where)
        lines.append(f"| {kind.title} | " + " | ".join(cells) + " |")
    lines += ["", "What the readers said, and why an export was refused (`-`):", ""]
    for title, said in notes.items():
        texts = [f"{'; '.join(dict.fromkeys(where))} ({detail})" for detail, where in said.items()]
        lines.append(f"- **{title}**. {'. '.join(texts)}")
    return "\n".join(lines) + "\n"


def key(export_title: str, layout: str, reader: str) -> str:
    """The name of a cell."""
    return f"{export_title} / {layout} / {reader}"


def plain(text: str) -> str:
    """For Markdown."""
    return text.replace("|", "/").replace("<", "(").replace(">", ")").replace("*", r"\*")


def main() -> None:
    """Everything, or some kinds or readers: what is not asked again stays as it was."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--environments", type=Path, default=ROOT / ".venv" / "peers")
    parser.add_argument("--only", default="", help="kinds whose title has this")
    parser.add_argument("--reader", default="", help="readers whose title has this")
    arguments = parser.parse_args()
    arguments.environments.mkdir(parents=True, exist_ok=True)
    readers = [reader for reader in READERS if arguments.reader in reader.title]
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        rows = list(exports(work, [kind for kind in KINDS if arguments.only in kind.title]))
        results = [found for reader in readers for found in ask(reader, rows, arguments.environments, work)]
    known = json.loads(CELLS.read_text()) if CELLS.exists() else {}
    for row in results:
        known[key(row["export"], row["layout"], row["reader"])] = {
            "verdict": row["verdict"],
            "detail": _PATH.sub("FOLDER", row["detail"]),
        }
    for row in rows:
        for name in (key(row["export"], row["layout"], r.title) for r in READERS if row["layout"] in r.layouts):
            if "refusal" in row:
                known[name] = {"verdict": "-", "detail": row["refusal"]}
            elif name in known:
                known[name]["notes"] = row["notes"]
    CELLS.write_text(json.dumps(dict(sorted(known.items())), indent=1) + "\n")
    text = PAGE.read_text()
    before, after = text[: text.index(BEGIN) + len(BEGIN)], text[text.index(END) :]
    PAGE.write_text(before + page(known) + after)
    wrong = [name for name, cell in known.items() if cell["verdict"] == "wrong" and not cell["notes"]]
    if wrong:
        sys.exit(f"wrong without a note of the exporter: {wrong}")


if __name__ == "__main__":
    main()
