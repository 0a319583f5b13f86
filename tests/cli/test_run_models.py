"""`generate` and `eval` on BCQ and dense folders: text as it is made, chat, drawing, tasks, and early refusals."""

import importlib.machinery
import json
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from bcqfmt.cli import render
from bcqfmt.integrations.transformers import generation, tasks
from bcqfmt.integrations.transformers import run as models
from bcqfmt.version import pip_install
from programs.verbs import Run, command, environment

PROMPT = "abc"
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"


@pytest.fixture(scope="module")
def loaded(model: Path) -> models.Loaded:
    return models.load(model, dtype="float32")


def test_text_is_shown_while_it_is_made(run: Run, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pieces: list[str] = []
    real = render.stream
    monkeypatch.setattr(render, "stream", lambda text: (pieces.append(text), real(text)))
    options = ("--prompt", PROMPT, "--max-new-tokens", "12", "--dtype", "float32")
    shown = run("generate", model, *options)
    assert len(pieces) > 4
    assert pieces[0].startswith(PROMPT)
    assert len(pieces[0]) > len(PROMPT)  # not before the first token, which messages may precede
    value = json.loads(run("generate", model, *options, "--json").stdout)
    assert shown.stdout == render.safe(PROMPT + value["text"]) + "\n" == "".join(map(render.safe, pieces)) + "\n"


@pytest.mark.parametrize("word", ["naïve café", "日本語 text"])
def test_pieces_are_whole_characters(loaded: models.Loaded, word: str) -> None:
    ids = loaded.tokenizer(word, add_special_tokens=False)["input_ids"]
    shown: list[str] = []
    stream = generation._Stream(loaded.tokenizer, ids[:1], shown.append, None)
    torch = pytest.importorskip("torch")
    stream.put(torch.tensor([ids[:1]]))
    for token in ids[1:]:
        stream.put(torch.tensor([token]))
    whole = stream.finish(ids[1:])
    assert "".join(shown) == whole
    assert not any("\ufffd" in piece for piece in shown[:-1])


def test_drawing_is_the_same_for_the_same_seed(loaded: models.Loaded) -> None:
    def drawn(**options: Any) -> str:
        sampling = generation.Sampling(temperature=5.0, **options)
        return generation.generate(loaded, PROMPT, most=12, sampling=sampling).text

    greedy = generation.generate(loaded, PROMPT, most=12).text
    assert drawn(seed=3) == drawn(seed=3)
    assert len({drawn(seed=seed) for seed in range(4)}) > 1
    assert drawn(seed=3, top_k=1) == drawn(seed=3, top_p=1e-9) == greedy


def test_chat_uses_the_template(loaded: models.Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = loaded.opened
    with pytest.raises(ValueError, match="no chat template"):
        generation.prompt_tokens(opened, "hi", chat=True)
    monkeypatch.setattr(opened.tokenizer, "chat_template", TEMPLATE, raising=False)
    ids = generation.prompt_tokens(opened, "hi", chat=True, system="be brief")
    text = "<system>be brief<user>hi<assistant>"
    assert ids == opened.tokenizer(text, add_special_tokens=False)["input_ids"]
    monkeypatch.setattr(opened.tokenizer, "chat_template", "{{ raise_exception('no system') }}", raising=False)
    with pytest.raises(ValueError, match="fails: no system"):
        generation.prompt_tokens(opened, "hi", chat=True, system="be brief")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--top-p", "0.5"), "give a --temperature"),
        (("--system", "x"), "--system goes with --chat"),
        (("--max-new-tokens", "4096"), "expected at most 128"),
        (("--device", "tpu"), "none of mps, cpu, cuda"),
    ],
)
def test_options_that_cannot_be(run: Run, model: Path, words: tuple[str, ...], says: str) -> None:
    result = run("generate", model, "--prompt", PROMPT, *words)
    assert (result.exit_code, says in result.stderr) == (2, True)


def test_a_dense_folder_is_a_baseline(run: Run, model: Path, tmp_path: Path) -> None:
    dense, text = model.parent / "dense", tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog " * 3)
    options = ("--prompt", PROMPT, "--max-new-tokens", "6", "--json")
    found = [json.loads(run("generate", folder, *options).stdout) for folder in (dense, model)]
    assert found[0]["text"] == json.loads(run("generate", model, *options, "--exact").stdout)["text"]
    assert {value["dtype"] for value in found} == {"float32"}  # on a CPU, though float16 is stored
    alone = json.loads(run("eval", dense, "--text", text, "--context", "32", "--json").stdout)
    both = json.loads(run("eval", model, "--text", text, "--context", "32", "--reference", dense, "--json").stdout)
    assert alone["perplexity"] == both["reference_perplexity"]
    refused = run("generate", dense, "--prompt", PROMPT, "--exact")
    assert (refused.exit_code, "for BCQ folders" in refused.stderr) == (2, True)


def test_near_ties_are_told_before_bugs(run: Run, model: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog " * 3)
    options = ("--text", text, "--context", "32", "--reference", model.parent / "dense", "--planes", "1")
    assert "--dtype float32 tells" in run("eval", model, *options, "--dtype", "float16").stdout
    assert "--dtype float32 tells" not in run("eval", model, *options, "--dtype", "float32").stdout


def test_mps_runs_a_decoded_model(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There are no kernels for it: torch gets dense weights, here as far as this can be tried without a Mac."""
    from bcqfmt.integrations.torch.layers import BcqModule

    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(models, "_try_device", lambda device: None)
    monkeypatch.setattr(models, "_placed", lambda made, device: made)
    made = models.load(model, device="mps", dtype="float32").model
    assert not any(isinstance(module, BcqModule) for module in made.modules())


def test_what_can_be_refused_at_once_is(model: Path, tmp_path: Path) -> None:
    """Before torch is imported, which takes many seconds: device, context, output."""
    (tmp_path / "text.txt").write_text("words")
    (tmp_path / "stats.safetensors").write_text("here")
    lines = [
        ["generate", model, "--prompt", "x", "--device", "cuda" if sys.platform == "darwin" else "mps"],
        ["eval", model, "--text", tmp_path / "text.txt", "--context", "4096"],
        ["calibrate", model.parent / "dense", "--text", tmp_path / "text.txt", "--out", tmp_path / "stats.safetensors"],
        ["calibrate", model.parent / "dense", "--text", tmp_path / "text.txt", "--out", "new", "--context", "4096"],
    ]
    code = (
        "import json, sys\nfrom bcqfmt.cli.main import cli\ncodes = []\n"
        "for words in json.loads(sys.argv[1]):\n"
        "    try:\n        cli.main(words)\n    except SystemExit as end:\n        codes.append(end.code)\n"
        "print(codes, 'torch' in sys.modules)"
    )
    asked = json.dumps([[str(word) for word in words] for words in lines])
    done = subprocess.run(
        [*command()[:2], "-c", code, asked], env=environment(), capture_output=True, text=True, timeout=300, check=True,
        cwd=tmp_path,
    )  # fmt: skip
    assert done.stdout == "[5, 2, 7, 2] False\n", done.stderr


# ------------------------------------------------------------------------------------------------------------ tasks
class Manager:
    """The harness's own, as far as it is used here."""

    def __init__(self, include_path: str | None = None) -> None:
        self.include_path = include_path

    def match_tasks(self, names: list[str]) -> list[str]:
        return [name for name in names if name == "colors"]


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A stand-in for lm_eval: records what it is asked, and answers as version 0.4 does."""
    asked: dict[str, Any] = {}

    def simple_evaluate(**options: Any) -> dict[str, Any]:
        asked.update(options)
        row = {"alias": "colors", "acc,none": 0.6, "acc_stderr,none": 0.2, "f1,strict": 0.5, "f1_stderr,strict": "N/A"}
        return {"results": {"colors": row}}

    modules = {name: types.ModuleType(name) for name in ("lm_eval", "lm_eval.tasks", "lm_eval.models")}
    modules["lm_eval.models.huggingface"] = types.ModuleType("lm_eval.models.huggingface")
    for name, module in modules.items():
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        monkeypatch.setitem(sys.modules, name, module)
    modules["lm_eval"].simple_evaluate = simple_evaluate  # type: ignore[attr-defined]
    modules["lm_eval.tasks"].TaskManager = Manager  # type: ignore[attr-defined]
    modules["lm_eval.models"].huggingface = modules["lm_eval.models.huggingface"]  # type: ignore[attr-defined]
    modules["lm_eval.models.huggingface"].HFLM = dict  # type: ignore[attr-defined]
    return asked


def test_tasks_of_the_harness(run: Run, model: Path, tmp_path: Path, harness: dict[str, Any]) -> None:
    options = ("--tasks", "colors", "--limit", "5", "--num-fewshot", "2", "--task-folder", tmp_path)
    result = run("eval", model, *options)
    assert result.exit_code == 0, result.stderr
    assert [line.split() for line in result.stdout.splitlines()[2:]] == [
        ["colors", "acc", "0.6000", "0.2000"],
        ["colors", "f1,strict", "0.5000"],
    ]
    assert (harness["tasks"], harness["limit"], harness["num_fewshot"]) == (["colors"], 5, 2)
    assert harness["task_manager"].include_path == str(tmp_path)
    assert harness["model"]["pretrained"].config.quantization_config.quant_method == "bcq"
    unknown = run("eval", model, "--tasks", "colours")
    assert (unknown.exit_code, "no task 'colours'" in unknown.stderr) == (2, True)
    assert run("eval", model).exit_code == 2
    assert run("eval", model, "--text", tmp_path / "x", "--limit", "3").exit_code == 2


def test_without_the_harness_it_says_what_to_install(run: Run, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    result = run("eval", model, "--tasks", "arc_easy")
    assert (result.exit_code, f"hint: {pip_install('eval')}" in result.stderr) == (2, True)


def test_a_local_task_in_the_real_harness(
    loaded: models.Loaded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it is installed. The scores are those of a second computation: the likelier of two words."""
    pytest.importorskip("lm_eval.models.huggingface")
    import torch

    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    documents = [{"question": f"{i} the sky is", "choices": [" blue", " green"], "answer": i % 2} for i in range(8)]
    data = tmp_path / "colors.jsonl"
    data.write_text("".join(json.dumps(document) + "\n" for document in documents))
    task = {
        "task": "bcqfmt_colors", "dataset_path": "json", "dataset_kwargs": {"data_files": str(data)},
        "test_split": "train", "output_type": "multiple_choice", "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}", "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }  # fmt: skip
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks" / "colors.yaml").write_text(json.dumps(task))  # JSON is YAML

    def likelihood(context: str, word: str) -> float:
        before, whole = (loaded.tokenizer(text)["input_ids"] for text in (context, context + word))
        with torch.inference_mode():
            found = loaded.model(torch.tensor([whole])).logits[0].log_softmax(-1)
        return sum(float(found[i - 1, whole[i]]) for i in range(len(before), len(whole)))

    right = 0
    for document in documents:
        scores = [likelihood(str(document["question"]), word) for word in document["choices"]]  # type: ignore[attr-defined]
        right += scores.index(max(scores)) == document["answer"]
    found = tasks.find_tasks(["bcqfmt_colors"], tmp_path / "tasks").run(loaded)
    assert [(score.task, score.metric, score.value) for score in found] == [("bcqfmt_colors", "acc", right / 8)]
