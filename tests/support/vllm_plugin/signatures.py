"""What vLLM's sources say about the doors that our plugin uses, read with `ast`: nothing of vLLM is imported or run.

python tests/support/vllm_plugin/signatures.py FOLDER_OR_WHEEL 0.32.0 > tests/integrations/vllm/vllm-0.32.0.json
"""

from __future__ import annotations

import ast
import json
import re
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

VERSIONS = ("0.26.0", "0.32.0")
_LAYERS = "vllm.model_executor.layers"
# module -> the classes and functions that matter there
WANTED: dict[str, tuple[str, ...]] = {
    f"{_LAYERS}.quantization": ("register_quantization_config",),
    f"{_LAYERS}.quantization.base_config": ("QuantizeMethodBase", "QuantizationConfig", "resolve_quant_method"),
    f"{_LAYERS}.linear": (
        "LinearMethodBase", "UnquantizedLinearMethod", "LinearBase", "ReplicatedLinear", "ColumnParallelLinear",
        "MergedColumnParallelLinear", "QKVParallelLinear", "RowParallelLinear",
    ),
    f"{_LAYERS}.vocab_parallel_embedding": ("VocabParallelEmbedding", "ParallelLMHead"),
    f"{_LAYERS}.fused_moe.routed_experts": ("RoutedExperts",),
    "vllm.model_executor.models.utils": ("WeightsMapper", "AutoWeightsLoader"),
    "vllm.model_executor.models.interfaces": ("SupportsQuant",),
    "vllm.model_executor.model_loader.utils": ("process_weights_after_loading", "configure_quant_config"),
    "vllm.transformers_utils.repo_utils": ("get_hf_file_bytes",),
    "vllm.config.vllm": ("VllmConfig", "get_current_vllm_config_or_none"),
    "vllm.plugins": ("load_general_plugins",),
    "vllm": ("LLM", "SamplingParams"),
    "vllm.entrypoints.llm": ("LLM",),
    "vllm.sampling_params": ("SamplingParams",),
}  # fmt: skip
LATER = {"resolve_quant_method"}  # not in the first of the versions
# calls of these are recorded wherever they stand in the above
CALLS = {
    "create_weights", "apply", "tie_weights", "process_weights_after_loading", "get_quant_method", "get_name",
    "maybe_update_config", "apply_vllm_mapper", "get_min_capability", "get_supported_act_dtypes", "from_config",
    "weight_loader", "embedding",
}  # fmt: skip
# of these, only how they call us
CALLERS = ("VllmConfig", "AutoWeightsLoader", "SupportsQuant")
# of these, only what programs of users need: their bases are not ours to know
USED = ("LLM", "SamplingParams")
Read = Callable[[str], str]


def read_from(place: Path) -> Read:
    """A function path -> text over an unpacked source folder or a wheel."""
    if place.is_dir():
        return lambda path: (place / path).read_text(encoding="utf-8")
    archive = zipfile.ZipFile(place)
    return lambda path: archive.read(path).decode("utf-8")


def signatures(read: Read, version: str) -> dict[str, Any]:
    """Version, modules, classes, functions, calls."""
    modules = {name: _module(read, name, wanted) for name, wanted in WANTED.items()}
    return {"vllm": version, "modules": modules}


def text_of(found: dict[str, Any]) -> str:
    """JSON with a line for everything that is a leaf or nearly one."""
    text = json.dumps(found, indent=1, sort_keys=True)
    return re.sub(r"[\[{]\n[^\[\]{}]*[\]}]", lambda match: re.sub(r"\s*\n\s*", " ", match[0]), text) + "\n"


def _module(read: Read, name: str, wanted: tuple[str, ...]) -> dict[str, Any]:
    base = name.replace(".", "/")
    try:
        tree = ast.parse(read(f"{base}.py"))
    except (FileNotFoundError, KeyError):
        tree = ast.parse(read(f"{base}/__init__.py"))
    found: dict[str, Any] = {"classes": {}, "functions": {}, "texts": {}}
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name in wanted:
            found["classes"][node.name] = _class(node)
        elif isinstance(node, ast.FunctionDef) and node.name in wanted:
            found["functions"][node.name] = {**_function(node), "calls": _calls(node)}
        elif name == "vllm.plugins" and isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            names = [target.id for target in node.targets if isinstance(target, ast.Name)]
            found["texts"].update({one: node.value.value for one in names if isinstance(node.value.value, str)})
    if name == "vllm":  # its names are looked up in a table: name -> module:name
        tables = [node for node in ast.walk(tree) if isinstance(node, ast.Dict)]
        pairs = [pair for table in tables for pair in zip(table.keys, table.values, strict=True)]
        places = {key.value: ast.literal_eval(value) for key, value in pairs if isinstance(key, ast.Constant)}
        found["texts"] = {one: places[one] for one in wanted if one in places}
    missing = set(wanted) - {*found["classes"], *found["functions"], *found["texts"]} - LATER
    if missing:
        raise SystemExit(f"{name} has no {', '.join(sorted(missing))}")
    return found


def _class(node: ast.ClassDef) -> dict[str, Any]:
    functions = [child for child in node.body if isinstance(child, ast.FunctionDef)]
    calls = _calls(node)
    if node.name in CALLERS:
        return {"calls": calls}
    if node.name in USED:
        public = [child for child in functions if child.name in ("__init__", "generate")]
        return {"methods": {one.name: _function(one) for one in public}, "attributes": sorted(_own(node)), "calls": []}
    return {
        "bases": [ast.unparse(base) for base in node.bases],
        "methods": {child.name: _function(child) for child in functions},
        "attributes": sorted({*_own(node), *(name for child in functions for name in _assigned(child))}),
        "calls": calls,
    }


def _own(node: ast.ClassDef) -> Iterator[str]:
    for child in node.body:
        for target in child.targets if isinstance(child, ast.Assign) else [getattr(child, "target", None)]:
            if isinstance(target, ast.Name):
                yield target.id


def _assigned(function: ast.FunctionDef) -> Iterator[str]:
    for node in ast.walk(function):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        for target in targets:
            for one in target.elts if isinstance(target, ast.Tuple) else [target]:
                if isinstance(one, ast.Attribute) and isinstance(one.value, ast.Name) and one.value.id == "self":
                    yield one.attr


def _function(node: ast.FunctionDef) -> dict[str, Any]:
    decorators = {ast.unparse(decorator) for decorator in node.decorator_list}
    kind = next((k for k in ("classmethod", "staticmethod", "property") if k in decorators), "method")
    return {"kind": kind, "abstract": "abstractmethod" in decorators, "signature": f"({_plain(node.args)})"}


def _plain(given: ast.arguments) -> str:
    """Parameters without their types; a default is either there (None) or not."""
    for one in [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]:
        if one is not None:
            one.annotation = None
    none = ast.Constant(None)
    given.defaults = [none] * len(given.defaults)
    given.kw_defaults = [None if default is None else none for default in given.kw_defaults]
    return ast.unparse(given)


def _calls(scope: ast.AST) -> list[list[Any]]:
    """[callee, number of positional arguments, names of the others] of every call that matters, each once."""
    seen: set[tuple[str, int, tuple[str, ...]]] = set()
    for node in ast.walk(scope):
        if not isinstance(node, ast.Call):
            continue
        callee = ast.unparse(node.func)
        if re.split(r"\.", callee)[-1] in CALLS and not callee.startswith("super()"):
            starred = any(isinstance(a, ast.Starred) for a in node.args) or any(k.arg is None for k in node.keywords)
            if not starred:
                seen.add((callee, len(node.args), tuple(str(k.arg) for k in node.keywords)))
    return [[callee, count, list(names)] for callee, count, names in sorted(seen)]


if __name__ == "__main__":
    sys.stdout.write(text_of(signatures(read_from(Path(sys.argv[1])), sys.argv[2])))
