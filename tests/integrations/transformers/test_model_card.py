"""The snippets of a model card run as they stand: as a conversion wrote them, in its folder, and from a hub.

torch and transformers are the real ones. vLLM is not installed here: its snippet runs against names and signatures read
from the sources of vLLM 0.32.0 (``vllm_signatures``), which shows that it is a program, not that vLLM runs the model.
"""

import inspect
import re
import shutil
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bcqfmt.converters import hub as client
from bcqfmt.converters.jobs.model_card import with_name
from hub.server import HubServer, loopback_hub
from sources.conversions import convert
from sources.tiny_models import bcq_model, dense_model, quiet
from vllm_plugin.stand_in import SIGNATURES, _function

DEMO = Path(__file__).parents[3] / "bcqfmt" / "data" / "demo"
REPO = "me/tiny"


def snippets(folder: Path) -> dict[str, str]:
    """What a reader would copy, by the library that it begins with."""
    found = re.findall(r"^```python\n(.*?)^```$", (folder / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    kinds = ("AutoModelForCausalLM", "vllm", "BcqLinear")
    return {next(kind for kind in kinds if kind in text): text for text in found}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint of GPTQModel that was converted, and a dense model that was quantized."""
    place = tmp_path_factory.mktemp("cards")
    convert(DEMO, place / "converted")
    dense = dense_model(place / "dense")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, dense / name)
    return {"converted": place / "converted", "quantized": bcq_model(place / "quantized", dense)}


def run(text: str, capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    with quiet():
        exec(compile(text, "README.md", "exec"), {"__name__": "card"})
    return capsys.readouterr().out


@pytest.mark.parametrize("kind", ["converted", "quantized"])
def test_in_the_folder(
    folders: dict[str, Path], kind: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folders[kind])
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    found = snippets(folders[kind])
    assert len(found) == 3
    assert re.match("Once upon a time.+", run(found["AutoModelForCausalLM"], capsys))
    assert "proj.weight torch.Size([1, " in run(found["BcqLinear"], capsys)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    with loopback_hub(monkeypatch, tmp_path / "home", logged_in=True) as server:
        yield server


@pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
def test_from_the_hub(
    folders: dict[str, Path],
    hub: HubServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The card as it lies in the repository, after a push; nothing of the folder is at hand."""
    shutil.copytree(folders["converted"], tmp_path / "bcq")
    client.push(tmp_path / "bcq", REPO, card=with_name)
    (tmp_path / "page").mkdir()
    (tmp_path / "page" / "README.md").write_bytes(hub.repos[REPO].commits[hub.repos[REPO].refs["main"]]["README.md"])
    monkeypatch.chdir(tmp_path / "page")
    found = snippets(tmp_path / "page")
    assert all(f'name = "{REPO}"' in text for text in found.values())
    assert re.match("Once upon a time.+", run(found["AutoModelForCausalLM"], capsys))
    assert "proj.weight torch.Size([1, " in run(found["BcqLinear"], capsys)


def test_the_snippet_for_vllm_uses_names_that_vllm_has(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    modules = SIGNATURES["modules"]
    assert modules["vllm"]["texts"] == {
        "LLM": ".entrypoints.llm:LLM", "SamplingParams": ".sampling_params:SamplingParams",
    }  # fmt: skip
    methods = modules["vllm.entrypoints.llm"]["classes"]["LLM"]["methods"]
    fields = modules["vllm.sampling_params"]["classes"]["SamplingParams"]["attributes"]
    asked: list[dict[str, Any]] = []

    def answering(name: str, answer: Any) -> Any:
        shape = inspect.signature(_function(name, methods[name]))

        def call(*given: Any, **named: Any) -> Any:
            asked.append(dict(shape.bind(*given, **named).arguments))
            return answer

        return call

    class SamplingParams:
        def __init__(self, **given: Any) -> None:
            assert given.keys() <= set(fields)

    said = types.SimpleNamespace(outputs=[types.SimpleNamespace(text="there was")])
    llm = type("LLM", (), {"__init__": answering("__init__", None), "generate": answering("generate", [said])})
    world = types.ModuleType("vllm")
    vars(world).update(LLM=llm, SamplingParams=SamplingParams)
    monkeypatch.setitem(sys.modules, "vllm", world)
    assert run(snippets(folders["quantized"])["vllm"], capsys) == "there was\n"
    assert [call.get("model", call.get("prompts")) for call in asked] == [".", "Once upon a time"]
