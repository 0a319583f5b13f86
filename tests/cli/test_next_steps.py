"""What a verb says at its end: complete commands that work when they are typed, running before proving."""

import json
import shlex
import shutil
from pathlib import Path

import pytest

from bcqfmt.cli.next_steps import run_it
from programs.verbs import Run
from sources.peers import PEERS, WITH_TOKENIZER
from sources.tiny_models import edit_config


def steps(text: str) -> dict[str, list[str]]:
    """The last lines of a verb's output, split as a shell would."""
    lines = [line.partition(": ") for line in text.splitlines()]
    return {name: shlex.split(rest)[1:] for name, _, rest in lines if name in ("run it", "prove it")}


def test_after_convert_restore_and_export(run: Run, tmp_path: Path) -> None:
    bcq = tmp_path / "my model"
    found = run("convert", WITH_TOKENIZER, bcq).stdout
    assert found.splitlines()[-2] == (
        f"in Python: import bcqfmt.integrations.transformers, before AutoModelForCausalLM.from_pretrained({str(bcq)!r})"
    )
    assert list(steps(found)) == ["run it", "prove it"]
    assert steps(found)["run it"][:2] == ["generate", str(bcq)]
    for words in steps(found).values():
        assert run(*words, *(["--max-new-tokens", "1"] if words[0] == "generate" else [])).exit_code == 0
    restored = steps(run("restore", bcq, tmp_path / "back again").stdout)
    assert run(*restored["prove it"]).exit_code == 0
    assert "run it" not in restored  # 4 bits, not symmetric: no vLLM takes such GPTQ
    dense = steps(run("export", bcq, tmp_path / "dense", "--to", "dense").stdout)
    assert dense["run it"] == ["generate", str(tmp_path / "dense"), "--prompt", "Once upon a time"]


@pytest.mark.parametrize("part", [[], ["--part", "1/1"]])
def test_without_provenance_digests_are_the_proof(run: Run, tmp_path: Path, part: list[str]) -> None:
    bcq = tmp_path / "bcq"
    told = run("convert", WITH_TOKENIZER, bcq, "--no-provenance", "--json", *part).stdout
    if part:
        told = run(*shlex.split(json.loads(told)["next"])[1:], "--json").stdout
    proof = shlex.split(json.loads(told)["next"])[1:]
    assert proof == ["validate", "--deep", str(bcq)]
    assert run(*proof).exit_code == 0
    again = run("finalize", bcq, WITH_TOKENIZER)
    assert f"hint: prove it: bcqfmt validate --deep {bcq}\n" in again.stderr


def test_after_quantize(run: Run, tmp_path: Path) -> None:
    found = steps(run("quantize", PEERS / "dense-fp16" / "source", tmp_path / "bcq", "--method", "rtn").stdout)
    assert run(*found["prove it"]).exit_code == 0
    assert "run it" not in found  # it has no tokenizer


GPTQMODEL = "from gptqmodel import GPTQModel; GPTQModel.load"
TRANSFORMERS = "from transformers import AutoModelForCausalLM; AutoModelForCausalLM.from_pretrained"


@pytest.mark.parametrize(
    ("name", "expected"),  # by what vLLM 0.26 and 0.32 take: TYPE_MAP of their GPTQ and their compressed-tensors
    [
        ("gptqmodel-gptq-4b-g32-sym-desc_act", "vllm"),
        ("gptqmodel-gptq-8b-g-1-sym", "vllm"),
        ("gptqmodel-gptq-4b-g32-asym", GPTQMODEL),
        ("gptqmodel-gptq-3b-g64-sym-desc_act", GPTQMODEL),
        ("autoawq-gemm-4b-g32-asym", "vllm"),
        ("autoawq-gemv-4b-g64-asym-rtn", GPTQMODEL),
        ("llmcompressor-pack_quantized-4b-g32-asym", "vllm"),
        ("llmcompressor-pack_quantized-3b-g32-asym", TRANSFORMERS),
        ("compressedtensors0.12-pack_quantized-4b-g32-sym-actorder_group", TRANSFORMERS),
        ("autoround-auto_round-4b-g32-asym", "vllm"),
        ("autoround-auto_round-3b-g32-asym", ""),
        ("hqq-hqq-4b-g64-asym-axis1", ""),
    ],
)
def test_quantized_folders_are_run_by_what_takes_them(tmp_path: Path, name: str, expected: str) -> None:
    place = tmp_path / "it's"
    shutil.copytree(PEERS / name / "source", place)
    (place / "tokenizer.json").touch()
    found = run_it(place)
    if expected == "vllm":
        assert found == {"run it": f"vllm serve {shlex.quote(str(place))}"}
    else:
        assert "".join(found.values()).startswith(f"{expected}({str(place)!r})" if expected else "")
        assert list(found) == ["in Python"] * bool(expected)


@pytest.mark.parametrize(("size", "expected"), [(16, GPTQMODEL), (8, "")])
def test_a_group_size_that_nothing_reads_is_run_by_nothing(tmp_path: Path, size: int, expected: str) -> None:
    shutil.copytree(PEERS / "gptqmodel-gptq-4b-g32-sym-desc_act" / "source", tmp_path / "m")
    (tmp_path / "m" / "tokenizer.json").touch()
    config = json.loads((tmp_path / "m" / "config.json").read_text())["quantization_config"]
    edit_config(tmp_path / "m", quantization_config={**config, "group_size": size})
    assert [text.partition("(")[0] for text in run_it(tmp_path / "m").values()] == [expected] * bool(expected)


@pytest.mark.parametrize("name", ["model.gguf", "folder"])
def test_gguf_is_run_by_llama(tmp_path: Path, name: str) -> None:
    place = tmp_path / name
    file = place if name.endswith(".gguf") else place / "model.gguf"
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(b"GGUF")
    assert run_it(place) == {"run it": f"llama-cli -m {file} -p 'Once upon a time'"}
