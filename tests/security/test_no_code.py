"""Nothing in a checkpoint is ever unpickled, imported or run: in the source of the package, and while it works."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from programs.verbs import ROOT
from security.forbidden_calls import offences, sources
from sources.conversions import gptq_folder

SOURCES = sources()
LOADERS = [path for path, text in SOURCES.items() if "trust_remote_code=False" in text]


def test_the_package_has_no_way_to_run_code_of_a_checkpoint() -> None:
    assert len(SOURCES) > 150
    found = [offence for path, text in SOURCES.items() for offence in offences(path, text)]
    assert not found


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "from pickle import loads",
        "import yaml",
        "import torch; torch.load(path)",
        "import numpy as np; np.load(path, allow_pickle=True)",
        "exec(text)",
        "eval(text)",
        "__import__(name)",
        "import runpy",
        "import os; os.system(text)",
        "AutoModel.from_pretrained(folder)",
        "AutoModel.from_pretrained(folder, trust_remote_code=True)",
        "load(folder, trust_remote_code=asked)",
    ],
)
def test_such_a_line_would_be_noticed(line: str) -> None:
    assert offences(
        "converters/source/checkpoint.py", f"{SOURCES['converters/source/checkpoint.py']}\n\ndef f():\n    {line}\n"
    )


@pytest.mark.parametrize("path", LOADERS)
def test_trust_in_remote_code_would_be_noticed(path: str) -> None:
    """Every single place that says False."""
    text, said = SOURCES[path], "trust_remote_code=False"
    at = text.find(said)
    while at >= 0:
        for instead in ("trust_remote_code=True", "revision=None"):
            assert offences(path, text[:at] + instead + text[at + len(said) :]), (path, at)
        at = text.find(said, at + 1)


WATCH = """
import json, sys
seen, bad, folder = [], [], sys.argv[1]

def hook(event, args):
    if event == "open" and str(args[0]).startswith(folder):
        seen.append(str(args[0]))
        if str(args[0]).endswith((".bin", ".pt", ".pkl")):
            bad.append([event, str(args[0])])
    elif event == "import" and folder in str(args[1]):
        bad.append([event, str(args[1])])
    elif event == "compile" and folder in str(args[1]):
        bad.append([event, str(args[1])])
    elif event == "pickle.find_class" and not own_cache():
        bad.append([event, str(args)])
    elif event in ("os.system", "subprocess.Popen", "os.exec", "os.posix_spawn"):
        bad.append([event, str(args)[:200]])

def own_cache():
    # numba keeps the package's compiled loops, pickled, in a cache of its own: no part of a checkpoint
    frame = sys._getframe()
    while frame is not None and not frame.f_code.co_filename.endswith("numba/core/caching.py"):
        frame = frame.f_back
    return frame is not None

from bcqfmt.cli.main import cli
from click.testing import CliRunner
cli.get_command(None, "convert"), cli.get_command(None, "restore"), cli.get_command(None, "report")
import bcqfmt.converters.convert.conversion, bcqfmt.converters.convert.restore, bcqfmt.compiled.loops
from bcqfmt.converters.layouts.registry import layouts
layouts()
sys.addaudithook(hook)
source, out = folder + "/source", folder + "/bcq"
codes = []
for words in (["inspect", source], ["convert", source, out], ["validate", "--deep", out], ["inspect", "--modules", out],
              ["verify", source, out], ["restore", out, folder + "/back"], ["report", out], ["diff", out, out]):
    codes.append(CliRunner().invoke(cli, words).exit_code)
print(json.dumps({"codes": codes, "bad": bad, "seen": len(seen)}))
"""


def test_while_it_works_nothing_of_the_checkpoint_is_run(tmp_path: Path) -> None:
    """An audit hook of the interpreter sees every open, import, compilation, unpickling and new process."""
    source = gptq_folder(tmp_path / "source", layers=1, n=32, k=64)
    evil = f"import pathlib; pathlib.Path({str(tmp_path / 'mark')!r}).touch()\n"
    for name in ("modeling_evil.py", "configuration_evil.py", "sitecustomize.py", "conftest.py", "numpy.py"):
        (source / name).write_text(evil)
    for name in ("pytorch_model.bin", "optimizer.pt", "x.pkl"):
        (source / name).write_bytes(b"cposix\nsystem\n(S'touch mark'\ntR.")
    config = json.loads((source / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "modeling_evil.Evil", "AutoConfig": "configuration_evil.Evil"}
    (source / "config.json").write_text(json.dumps(config))
    settings = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": "1"}
    words = [sys.executable, "-c", WATCH, str(tmp_path)]
    ran = subprocess.run(words, cwd=source, env=settings, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout.splitlines()[-1])
    assert found["codes"] == [0] * 8
    assert found["seen"] > 20
    assert found["bad"] == []
    assert not (tmp_path / "mark").exists()
