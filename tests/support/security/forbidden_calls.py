"""What the package must never do with a checkpoint, looked for in its source: unpickle, run code, trust remote code."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = ("bcqfmt", "converters", "kernels")

MODULES = {
    "pickle",
    "cPickle",
    "_pickle",
    "marshal",
    "shelve",
    "dill",
    "cloudpickle",
    "joblib",
    "yaml",
    "runpy",
    "code",
}
CALLS = {"eval", "exec", "compile", "__import__", "execfile"}
ATTRIBUTES = {("torch", "load"), ("np", "load"), ("numpy", "load"), ("pickle", "load"), ("pickle", "loads")}
ATTRIBUTES |= {("os", "system"), ("os", "popen"), ("pd", "read_pickle")}
LOADERS = {"from_pretrained", "from_config"}

# Where code is compiled that was written here: loops of our own kernels, unrolled.
ALLOWED = {
    ("kernels/runtime/unroll.py", "eval"),
    ("kernels/runtime/unroll.py", "exec"),
    ("kernels/runtime/unroll.py", "compile"),
}


def sources() -> dict[str, str]:
    """Path -> text of every module of the package."""
    found = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            if not path.is_symlink() and not any(parent.is_symlink() for parent in path.parents):
                found[path.relative_to(ROOT).as_posix()] = path.read_text()
    return found


def offences(path: str, text: str) -> list[str]:
    """What a module does that it must not, with the line."""
    found = []
    for node in ast.walk(ast.parse(text)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        elif isinstance(node, ast.Call):
            found += _call(path, node)
        found += [f"{path}:{node.lineno} imports {name}" for name in names if name.partition(".")[0] in MODULES]  # type: ignore[attr-defined]
    return found


def _call(path: str, node: ast.Call) -> list[str]:
    called = node.func
    if isinstance(called, ast.Name) and called.id in CALLS and (path, called.id) not in ALLOWED:
        return [f"{path}:{node.lineno} calls {called.id}"]
    if isinstance(called, ast.Attribute):
        owner = called.value
        if isinstance(owner, ast.Name) and (owner.id, called.attr) in ATTRIBUTES:
            return [f"{path}:{node.lineno} calls {owner.id}.{called.attr}"]
        if called.attr in LOADERS and not _closed(node):
            return [f"{path}:{node.lineno} calls {called.attr} without trust_remote_code=False"]
    if any(k.arg == "trust_remote_code" and not _is_false(k.value) for k in node.keywords):
        return [f"{path}:{node.lineno} may trust remote code"]
    return []


def _closed(node: ast.Call) -> bool:
    return any(keyword.arg == "trust_remote_code" and _is_false(keyword.value) for keyword in node.keywords)


def _is_false(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is False
