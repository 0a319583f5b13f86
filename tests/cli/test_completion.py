"""Shell completion: the script that is printed, and what it gets when it calls back."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bcqfmt.cli.command import VERBS
from programs.verbs import ROOT, Run, environment

SHELLS = ("bash", "zsh", "fish")
INSTRUCTION = "_BCQFMT_COMPLETE"


def completed(words: str, at: int, shell: str = "bash") -> list[str]:
    """The lines that the program answers with while this is being typed."""
    asked = {**environment(), INSTRUCTION: f"{shell}_complete", "COMP_WORDS": words, "COMP_CWORD": str(at)}
    call = [sys.executable, "-P", "-c", "from bcqfmt.cli.main import main; main()"]
    done = subprocess.run(call, env=asked, capture_output=True, text=True, timeout=60, check=True)
    return done.stdout.split()


@pytest.mark.parametrize(
    ("words", "at", "expected"),
    [
        ("bcqfmt ", 1, [f"plain,{name}" for name in VERBS]),
        ("bcqfmt va", 1, ["plain,validate"]),
        ("bcqfmt --ver", 1, ["plain,--version"]),
        ("bcqfmt convert --zero-point v1-w", 3, ["plain,v1-wrap"]),
        ("bcqfmt convert --max-sh", 2, ["plain,--max-shard-size"]),
        ("bcqfmt convert some", 2, ["file,some"]),  # a folder or a hub id: the shell looks for files
        ("bcqfmt validate some", 2, ["file,some"]),
        ("bcqfmt completion f", 2, ["plain,fish"]),
    ],
)
def test_what_is_offered(words: str, at: int, expected: list[str]) -> None:
    assert completed(words, at) == expected


@pytest.mark.parametrize("shell", SHELLS)
def test_the_script_calls_the_program_back(run: Run, shell: str) -> None:
    result = run("completion", shell)
    assert result.exit_code == 0
    assert f"{INSTRUCTION}={shell}_complete" in result.stdout


def test_the_shell_in_use(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHELL", "/usr/bin/fish")
    assert run("completion").stdout == run("completion", "fish").stdout
    monkeypatch.setenv("SHELL", "/bin/tcsh")
    result = run("completion")
    assert (result.exit_code, "bash, zsh, fish" in result.stderr) == (2, True)


@pytest.mark.parametrize("shell", SHELLS)
def test_shells_take_the_script(run: Run, tmp_path: Path, shell: str) -> None:
    found = shutil.which(shell)
    if found is None:
        pytest.skip(f"{shell} is not installed")
    script = tmp_path / "script"
    script.write_text(run("completion", shell).stdout)
    subprocess.run([found, "-n", script], check=True, timeout=60)


def test_bash_completes(tmp_path: Path) -> None:
    """A real bash reads the script and completes a verb."""
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("bash is not installed")
    start = tmp_path / "bcqfmt"
    start.write_text(f'#!/bin/sh\nexec "{sys.executable}" -P -c "from bcqfmt.cli.main import main; main()" "$@"\n')
    start.chmod(0o755)
    typed = (
        'eval "$(bcqfmt completion bash)"; COMP_WORDS=(bcqfmt fina); COMP_CWORD=1; _bcqfmt_completion bcqfmt;'
        ' echo "${COMPREPLY[@]}"; complete -p bcqfmt'
    )
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    settings = {**environment(), "PATH": path, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [bash, "--norc", "-c", typed], env=settings, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.splitlines()[0] == "finalize"
    assert "_bcqfmt_completion" in done.stdout
