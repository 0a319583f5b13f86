"""The plugin in the real vLLM (`vllm_environment`), on small models: what it generates against transformers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from sources.tiny_models import as_dense, bcq_model, dense_model, edit_config
from sources.tiny_models import load as load_model
from vllm_plugin import environment as vllm_environment
from vllm_plugin.signatures import VERSIONS

pytestmark = pytest.mark.soak
SUPPORT = Path(__file__).parents[2] / "support" / "vllm_plugin"
PROMPTS = [[1, 5, 7, 9], [2, 3], [1, 20, 30, 40, 50, 60, 33, 12, 5]]
WIDE = {"hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 4, "num_key_value_heads": 2}
COMMIT = "0123456789abcdef0123456789abcdef01234567"
LINEAR = [r"model\.layers\..*_proj\.weight"]
# name -> kind of model, config, options of the quantization, what is changed in config.json afterwards
FOLDERS: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "rtn": ("llama", {}, {}, {}),
    "biases": ("qwen2", {}, {}, {}),
    "bcq": ("llama", {}, {"method": "bcq", "settings": {"bits": 3, "group_size": 64}}, {}),
    "dense q": ("llama", {}, {"exclude": [r".*q_proj.*"]}, {}),
    "head": ("llama", {}, {"include": [*LINEAR, r"lm_head\.weight"]}, {"tie_word_embeddings": True}),
    "embedding": ("llama", {}, {"include": [*LINEAR, r".*embed_tokens\.weight"]}, {}),
    "tied": ("llama", {"tie_word_embeddings": True}, {"include": [*LINEAR, r".*embed_tokens\.weight"]}, {}),
    "tied qwen": ("qwen2", {"tie_word_embeddings": True}, {"include": [*LINEAR, r".*embed_tokens\.weight"]}, {}),
    "experts": ("mixtral", {}, {}, {}),
}
METHODS = {"dense q": {"BcqLinearMethod": 8}, "embedding": {"BcqEmbeddingMethod": 1}, "tied": {"TiedHeadMethod": 1}}


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``name`` (BCQ), ``name-dense``; ``hub``: a cache of owner/name with the model at a commit that is not main's."""
    place = tmp_path_factory.mktemp("models")
    for name, (kind, config, options, edited) in FOLDERS.items():
        source = dense_model(place / f"{name}-source", kind, **{**WIDE, **config})
        bcq_model(place / name, source, **options)
        as_dense(place / f"{name}-dense", place / name)
        edit_config(place / name, **edited)
    entry = place / "hub" / "models--owner--name"
    shutil.copytree(place / "rtn", entry / "snapshots" / COMMIT)
    shutil.copytree(place / "embedding", entry / "snapshots" / COMMIT[::-1])  # another manifest
    (entry / "refs").mkdir()
    (entry / "refs" / "main").write_text(COMMIT[::-1])
    return place


@pytest.fixture(scope="session", params=VERSIONS)
def answers(request: Any, models: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """In one process of vLLM, but for several ranks, and for experts, which need groups that others do not make."""
    work = tmp_path_factory.mktemp("vllm")
    tasks = {name: {"model": str(models / name), "prompts": PROMPTS} for name in FOLDERS}
    tasks["revision"] = {"model": "owner/name", "prompts": PROMPTS, "options": {"revision": COMMIT}}
    ranks = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    apart = {f"{name}, 2 ranks": {**tasks[name], "options": ranks} for name in ("dense q", "tied")}
    apart["experts"] = tasks.pop("experts")
    found: dict[str, Any] = {}
    for number, group in enumerate([tasks, *({name: task} for name, task in apart.items())]):
        asked, told = work / f"{number}.json", work / f"{number}.answers.json"
        asked.write_text(json.dumps(list(group.values())))
        engine = SUPPORT / "engine.py"
        vllm_environment.run(request.param, engine, asked, told, HF_HUB_CACHE=str(models / "hub"))
        found |= dict(zip(group, json.loads(told.read_text()), strict=True))
    return found


@pytest.mark.parametrize("name", [*FOLDERS, "revision", "dense q, 2 ranks", "tied, 2 ranks"])
def test_tokens_are_those_of_the_dense_model(answers: dict[str, Any], models: Path, name: str) -> None:
    found = answers[name]
    if name == "experts":
        assert "BCQ-E305 'model.layers.0.block_sparse_moe.experts.0.w1'" in found["error"]
        assert "export MODEL NEW --to dense" in found["error"]
        return
    assert "error" not in found, found["error"]
    folder = {"revision": "rtn"}.get(name, name.partition(",")[0])
    model = load_model(models / f"{folder}-dense", dtype=torch.float32)
    for prompt, tokens, logprobs in zip(PROMPTS, found["tokens"], found["logprobs"], strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + tokens[:-1]])).logits[0, len(prompt) - 1 :]
        gap = logits.max(-1).values - logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        assert float(gap.max()) < 0.01  # the same token, or one that is as likely
        own = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(logprobs), own, rtol=0, atol=1e-2)
    for method, count in METHODS.get(name, {}).items():
        assert found["methods"][method] == count
