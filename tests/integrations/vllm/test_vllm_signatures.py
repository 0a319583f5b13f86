"""The plugin's promises against the signatures of the vLLM versions that it was run in."""

from __future__ import annotations

import ast
import importlib.metadata
import inspect
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import bcqfmt
from bcqfmt.integrations import vllm as plugin
from vllm_plugin.signatures import VERSIONS, read_from, signatures, text_of
from vllm_plugin.stand_in import SIGNATURES, attributes_of, installed


@pytest.fixture(scope="module", params=VERSIONS)
def world(request: Any) -> Iterator[SimpleNamespace]:
    with installed(request.param) as found:
        plugin.register()
        yield found


@pytest.fixture
def config(world: SimpleNamespace) -> Any:
    return world.registered["bcq"].from_config({"quant_method": "bcq", "format_version": "1.0"})


def _entry(name: str) -> dict[str, Any]:
    return next(m["classes"][name] for m in SIGNATURES["modules"].values() if name in m["classes"])


def _ours(world: SimpleNamespace) -> dict[str, type]:
    method = sys.modules["bcqfmt.integrations.vllm.method"].BcqLinearMethod
    return {"QuantizationConfig": world.registered["bcq"], "QuantizeMethodBase": method, "LinearMethodBase": method}


def test_every_abstract_method_is_there_with_the_parameters_of_the_base(world: SimpleNamespace) -> None:
    for base, cls in _ours(world).items():
        assert not inspect.isabstract(cls)
        for name, about in _entry(base)["methods"].items():
            own = inspect.getattr_static(cls, name)
            if name not in vars(cls):
                assert not about["abstract"], f"{cls.__name__} lacks {name}"
                continue
            assert isinstance(own, classmethod | staticmethod) == (about["kind"] in ("classmethod", "staticmethod"))
            if base == "QuantizeMethodBase" and name in ("create_weights", "apply"):
                continue  # there (layer, *args); LinearMethodBase spells them out
            space: dict[str, Any] = {}
            exec(f"def theirs{about['signature']}: ...", space)
            wanted = inspect.signature(space["theirs"]).parameters
            found = inspect.signature(getattr(own, "__func__", own)).parameters
            for parameter in wanted.values():
                assert found[parameter.name].kind == parameter.kind, (cls.__name__, name, parameter.name)
                optional = found[parameter.name].default is not inspect.Parameter.empty
                assert optional == (parameter.default is not inspect.Parameter.empty)
            assert list(found)[: len(wanted)] == list(wanted)


def test_every_call_that_vllm_makes_fits(world: SimpleNamespace, config: Any) -> None:
    method = _ours(world)["LinearMethodBase"](())
    module = sys.modules[type(method).__module__]
    embedding, tied = module.BcqEmbeddingMethod(()), module.TiedHeadMethod()
    targets = {
        "create_weights": method.create_weights, "apply": method.apply, "tie_weights": method.tie_weights,
        "process_weights_after_loading": method.process_weights_after_loading,
        "get_quant_method": config.get_quant_method, "maybe_update_config": config.maybe_update_config,
        "apply_vllm_mapper": config.apply_vllm_mapper, "get_min_capability": config.get_min_capability,
        "get_supported_act_dtypes": config.get_supported_act_dtypes, "get_name": config.get_name,
        "weight_loader": method._loader(None, None, ""), "embedding": embedding.embedding,
    }  # fmt: skip
    seen = set()
    for module_name, entry in SIGNATURES["modules"].items():
        if "routed_experts" in module_name:
            continue  # experts are refused
        for about in [*entry["classes"].values(), *entry["functions"].values()]:
            for callee, count, names in about["calls"]:
                owner, _, name = callee.rpartition(".")
                if owner in ("self", "model", "module", "mapper", "quant_config.online_quantization_config"):
                    continue  # of vLLM's own
                inspect.signature(targets[name]).bind(*[None] * count, **dict.fromkeys(names))
                if "vocab_parallel_embedding" in module_name and hasattr(tied, name):
                    inspect.signature(getattr(tied, name)).bind(*[None] * count, **dict.fromkeys(names))
                seen.add(name)
    assert seen == set(targets) - {"get_name"}  # that one only experts ask for


def test_what_the_plugin_imports_and_looks_at_exists(world: SimpleNamespace) -> None:
    folder = Path(bcqfmt.__file__).parent / "integrations" / "vllm"
    looked_at = set()
    for file in sorted(folder.glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm"):
                entry = SIGNATURES["modules"][node.module]
                assert {alias.name for alias in node.names} <= {*entry["classes"], *entry["functions"]}
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "layer":
                looked_at.add(node.attr)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "getattr":
                looked_at.update(a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str))
    own = {"bcq", "register_parameter", "__dict__"}  # ours and torch's
    own |= {"tie_word_embeddings", "_commit_hash", "model_type"}  # of transformers' configs
    known = attributes_of("QKVParallelLinear") | attributes_of("ParallelLMHead") | own
    assert {"tp_rank", "tp_size", "num_kv_head_replicas", "shard_indices"} <= looked_at <= known
    assert "packed_modules_mapping" in attributes_of("QuantizationConfig")
    assert "apply_dict" in _entry("WeightsMapper")["methods"]


def test_the_entry_point_is_in_the_group_that_vllm_loads() -> None:
    group = SIGNATURES["modules"]["vllm.plugins"]["texts"]["DEFAULT_PLUGINS_GROUP"]
    project = (Path(__file__).parents[3] / "pyproject.toml").read_text(encoding="utf-8")
    assert f'[project.entry-points."{group}"]\nbcqfmt = "bcqfmt.integrations.vllm:register"' in project
    found = [point for point in importlib.metadata.entry_points(group=group) if point.name == "bcqfmt"]
    assert all(point.load() is plugin.register for point in found)


@pytest.mark.soak
@pytest.mark.parametrize("version", VERSIONS)
def test_the_signatures_are_those_of_the_published_wheel(tmp_path: Path, version: str) -> None:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    command += ["--platform", "manylinux_2_28_x86_64", "--python-version", "3.12", "--dest", str(tmp_path)]
    subprocess.run([*command, f"vllm=={version}"], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    committed = Path(__file__).parent / f"vllm-{version}.json"
    assert text_of(signatures(read_from(wheel), version)) == committed.read_text(encoding="utf-8")
