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
from vllm_plugin.additions import eagle_draft, lora_adapter
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
    "whole": ("llama", {}, {"include": [*LINEAR, r".*embed_tokens\.weight", r"lm_head\.weight"]}, {}),
    "latent": ("deepseek_v3", {"num_key_value_heads": 4}, {}, {}),
    "linear attention": ("qwen3_5", {}, {}, {}),  # only loaded: the CPU engine has no operator for it
    "experts": ("mixtral", {}, {}, {}),
}
# what is served beside a model: folder, addition -> modules of a LoRA adapter, or the draft and its method
ADDITIONS = {
    "rtn, lora": r"model\.layers\..*_proj",
    "whole, lora": r"model\.layers\..*_proj|lm_head|model\.embed_tokens",
    "head, eagle": ("draft", "eagle"),
    "whole, eagle": ("draft", "eagle"),
    "head, quantized eagle": ("draft-bcq", "eagle"),
    "whole, draft": ("whole", "draft_model"),
}
# matrices of vLLM that are compared -> the weights of the file that they are made of; in which folders they are
READ = {
    "kv_b_proj": ["self_attn.kv_b_proj"],
    "in_proj_qkvz": ["linear_attn.in_proj_qkv", "linear_attn.in_proj_z"],
    "in_proj_ba": ["linear_attn.in_proj_b", "linear_attn.in_proj_a"],
}
HELD = {"latent": ["kv_b_proj"], "linear attention": ["in_proj_qkvz", "in_proj_ba"]}
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
    for name, modules in ADDITIONS.items():
        if isinstance(modules, str):
            lora_adapter(place / name, place / f"{name.partition(',')[0]}-dense", modules)
    bcq_model(place / "draft-bcq", eagle_draft(place / "draft", place / "rtn-source"))
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
    tasks = {name: _task(models / name) for name in FOLDERS}
    tasks["linear attention"]["prompts"] = []
    tasks["revision"] = _task("owner/name", revision=COMMIT)
    for name, addition in ADDITIONS.items():
        folder = models / name.partition(",")[0]
        if isinstance(addition, str):
            tasks[name] = {**_task(folder, enable_lora=True, max_lora_rank=8), "adapter": str(models / name)}
        else:
            draft = {"model": str(models / addition[0]), "method": addition[1], "num_speculative_tokens": 2}
            tasks[name] = _task(folder, speculative_config=draft)
    ranks = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    apart = {f"{name}, 2 ranks": _task(models / name, **ranks) for name in ("dense q", "tied")}
    apart["latent, expanded"] = tasks["latent"]
    apart["experts"] = tasks.pop("experts")
    found: dict[str, Any] = {}
    for number, group in enumerate([tasks, *({name: task} for name, task in apart.items())]):
        asked, told = work / f"{number}.json", work / f"{number}.answers.json"
        asked.write_text(json.dumps(list(group.values())))
        settings = {"HF_HUB_CACHE": str(models / "hub"), "VLLM_MLA_DISABLE": str(int("latent, expanded" in group))}
        vllm_environment.run(request.param, SUPPORT / "engine.py", asked, told, **settings)
        found |= dict(zip(group, json.loads(told.read_text()), strict=True))
    return {**found, "version": request.param}


def _task(model: object, **options: Any) -> dict[str, Any]:
    return {"model": str(model), "prompts": PROMPTS, "options": options}


REFUSED = {  # what an error says
    "experts": ("BCQ-E305 'model.layers.0.block_sparse_moe.experts.0.w1'", "export MODEL NEW --to dense"),
    "head, quantized eagle": ("BCQ-E305 ", "draft-bcq", "export DRAFT NEW --to dense"),
}
TESTED = [*FOLDERS, *ADDITIONS, "revision", "dense q, 2 ranks", "tied, 2 ranks", "latent, expanded"]


@pytest.mark.parametrize("name", TESTED)
def test_tokens_are_those_of_the_dense_model(answers: dict[str, Any], models: Path, name: str) -> None:
    found = answers[name]
    refused = REFUSED.get(name, ())
    if name == "latent" and answers["version"] == "0.26.0":
        refused = ("NotImplementedError: MLA is not supported on CPU.",)  # of vLLM, also for a dense model
    if name == "linear attention" and answers["version"] == "0.26.0":
        refused = ("TypeError: Invalid type of HuggingFace config.",)  # it has this model with images only
    if refused:
        assert all(part in found["error"] for part in refused)
        return
    assert "error" not in found, found["error"]
    folder = {"revision": "rtn"}.get(name, name.partition(",")[0])
    merged = models / f"{name}-merged"
    dense = merged if merged.exists() else models / f"{folder}-dense"
    model = load_model(dense, dtype=torch.float32)
    asked = [] if name == "linear attention" else PROMPTS
    for prompt, tokens, logprobs in zip(asked, found["tokens"], found["logprobs"], strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + tokens[:-1]])).logits[0, len(prompt) - 1 :]
        gap = logits.max(-1).values - logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        assert float(gap.max()) < 0.01  # the same token, or one that is as likely
        own = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(logprobs), own, rtol=0, atol=1e-2)
    for method, count in METHODS.get(name, {}).items():
        assert found["held"]["methods"][method] == count
    for leaf, products in found.get("held", {}).get("read", {}).items():
        for product, number in zip(products, range(2), strict=False):
            weights = [model.get_submodule(f"model.layers.{number}.{part}").weight for part in READ[leaf]]
            own = torch.cat(weights) @ torch.arange(weights[0].shape[1]).cos()
            torch.testing.assert_close(torch.tensor(product), own, rtol=0, atol=1e-2)
    assert set(found.get("held", {}).get("read", {})) == set(HELD.get(folder, ()))
    if name.endswith("eagle"):  # without its own, a draft takes the quantized head and table of the model
        assert found["held"]["shared"] == ["head", "table"]
    if name.endswith("draft"):  # the same model as its own draft
        assert found["accepted"] == found["drafted"] > 0
