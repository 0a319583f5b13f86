"""The program as a whole: help, usage, errors, signals, closed pipes."""

import ast
import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import click
import numpy as np
import pytest

import bcqfmt
from bcqfmt.cli import render
from bcqfmt.cli.command import VERBS
from bcqfmt.cli.main import cli
from programs.verbs import Run, assert_clean, command, environment, program
from sources.conversions import gptq_folder


def test_version(run: Run) -> None:
    assert run("--version").stdout == f"bcqfmt {bcqfmt.__version__}\n"


@pytest.mark.parametrize("args", [("--version", "--json"), ("--json", "--version")])
def test_version_as_json(run: Run, args: tuple[str, str]) -> None:
    found = json.loads(run(*args).stdout)
    assert found["bcqfmt"] == bcqfmt.__version__
    assert found["format"] == "1.0"
    assert found["packages"]["numpy"] == np.__version__
    assert {"python", "platform"} <= found.keys()


def test_json_before_the_verb_is_refused(run: Run, folder: Path) -> None:
    """It would look as if the verb printed JSON, and it does not."""
    result = run("--json", "inspect", folder)
    assert result.exit_code == 2
    assert "--json goes after the verb" in json.loads(result.stdout)["error"]["found"]


@pytest.mark.parametrize("option", ["-h", "--help"])
def test_help_lists_the_verbs(run: Run, option: str) -> None:
    result = run(option)
    assert result.exit_code == 0
    for name, text in VERBS.items():
        assert re.search(rf"^  {name} +{re.escape(text)}$", result.stdout, re.MULTILINE)


@pytest.mark.parametrize("name", list(VERBS))
def test_every_verb_has_help_with_an_example(run: Run, name: str) -> None:
    for option in ("-h", "--help"):
        result = run(name, option)
        assert result.exit_code == 0
        assert f"Example:\n    bcqfmt {name}" in result.stdout
        assert "--debug" in result.stdout
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    assert command.help is not None
    assert command.help.startswith(VERBS[name])


@pytest.mark.parametrize("verb", ["", "convert"])
def test_help_loads_little(verb: str) -> None:
    code = (
        "import sys\nfrom bcqfmt.cli.main import cli\n"
        f"try:\n    cli.main({[verb, '--help'] if verb else ['--help']})\nexcept SystemExit: pass\n"
        "heavy = {'numpy', 'torch', 'safetensors', 'tqdm'} & sys.modules.keys()\n"
        "loaded = [name for name in sys.modules if name.startswith('bcqfmt.cli.')] + sorted(heavy)\n"
        "print(sorted(loaded), file=sys.stderr)"
    )
    done = subprocess.run(
        [*command()[:2], "-c", code], env=environment(), capture_output=True, text=True, timeout=60, check=True
    )
    loaded = ast.literal_eval(done.stderr)
    if not verb:
        assert loaded == ["bcqfmt.cli.command", "bcqfmt.cli.main", "bcqfmt.cli.render"]
    assert all(name.startswith("bcqfmt.cli.") for name in loaded)


def test_no_arguments_is_help_and_exit_2(run: Run) -> None:
    result = run()
    assert result.exit_code == 2
    assert "Verbs:" in result.stderr


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["inspct", "x"], "did you mean 'inspect'?"),
        (["frobnicate"], "there are inspect, validate"),
        (["inspect"], "Missing argument 'PATH'"),
        (["inspect", "a", "b"], "unexpected extra argument"),
        (["inspect", "a", "--wrong"], "--wrong"),
        (["validate", "a", "--max-findings", "-1"], "--max-findings"),
        (["validate", "a", "--max-findings", "x"], "--max-findings"),
        (["diff", "a"], "Missing argument 'B'"),
        (["export", "a", "b"], "Missing option '--to'. Choose from: gptq, awq, compressed-tensors, dense, gguf\n"),
        (["--wrong"], "--wrong"),
        (["\x1b[31m"], "\\x1b[31m"),
        (["inspect", "a", "--\x1b[31m\x07"], "\\x1b[31m\\x07"),
    ],
)
def test_usage_errors(run: Run, args: list[str], says: str) -> None:
    result = run(*args)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert says in result.stderr
    assert "error: " in result.stderr


def test_usage_errors_as_json(run: Run) -> None:
    found = json.loads(run("inspect", "--json").stdout)
    assert found["error"]["exit_code"] == 2


@pytest.mark.parametrize("verb", ["inspect", "validate"])
def test_missing_path(run: Run, verb: str, tmp_path: Path) -> None:
    result = run(verb, tmp_path / "no\x1bthing")
    assert result.exit_code == 3
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert lines[0].startswith("error: BCQ-E101 ")
    assert lines[1] == "hint: check the spelling"
    found = json.loads(run(verb, tmp_path / "nothing", "--json").stdout)["error"]
    assert (found["code"], found["exit_code"], found["hint"]) == ("BCQ-E101", 3, "check the spelling")


@pytest.mark.parametrize("verb", ["inspect", "validate"])
def test_path_too_long(run: Run, verb: str) -> None:
    assert run(verb, "x" * 5000).exit_code == 3


@pytest.mark.parametrize(
    ("content", "code", "exit_code"),
    [
        (b"", "BCQ-V101", 4),
        (b"version https://git-lfs.github.com/spec/v1\n", "BCQ-E201", 4),
        (b"<!DOCTYPE html>\x1b[31m", "BCQ-E202", 4),
        (b"PK\x03\x04" + bytes(60), "BCQ-E203", 5),
        (b"\xff" * 64, "BCQ-V102", 4),
        (b"\x08\0\0\0\0\0\0\0{}      ", "BCQ-V201", 5),
    ],
)
def test_broken_files(run: Run, tmp_path: Path, content: bytes, code: str, exit_code: int) -> None:
    path = tmp_path / "broken.safetensors"
    path.write_bytes(content)
    checked = run("validate", path)
    assert (checked.exit_code, code in checked.stdout) == (exit_code, True)
    shown = run("inspect", path)
    if code == "BCQ-V201":  # an ordinary safetensors file
        assert shown.exit_code == 0
    else:
        assert (shown.exit_code, code in shown.stderr) == (exit_code, True)


def test_folder_without_a_model(run: Run, tmp_path: Path) -> None:
    assert run("inspect", tmp_path).exit_code == 3
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    assert run("inspect", tmp_path).exit_code == 5


def broken(*args: object, **options: object) -> None:
    raise RuntimeError("out of \x1b[31mcheese")


def test_an_import_of_our_own_that_fails_is_a_bug(monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    monkeypatch.delattr("bcqfmt.inspect.kinds.look")
    result = run("generate", "x", "--prompt", "x")
    assert (result.exit_code, "BCQ-E999" in result.stderr) == (1, True)


@pytest.mark.parametrize("place", ["before", "after"])
def test_bugs_become_one_line(monkeypatch: pytest.MonkeyPatch, run: Run, place: str) -> None:
    import importlib

    from click.testing import CliRunner

    monkeypatch.setattr(importlib.import_module("bcqfmt.cli.verbs.inspect"), "summarize", broken)
    result = run("inspect", "x")
    assert result.exit_code == 1
    assert result.stderr.startswith("error: BCQ-E999: unexpected error: RuntimeError: out of \\x1b[31mcheese")
    args = ["--debug", "inspect", "x"] if place == "before" else ["inspect", "x", "--debug"]
    debugged = CliRunner().invoke(cli, args)
    assert debugged.exit_code == 1
    assert "Traceback" in debugged.stderr
    assert_clean(debugged.stderr)


def test_errors_without_a_traceback(tmp_path: Path) -> None:
    done = program("inspect", tmp_path / "nothing")
    assert (done.returncode, done.stdout) == (3, "")
    assert "Traceback" not in done.stderr
    traced = program("--debug", "inspect", tmp_path / "nothing")
    assert traced.returncode == 3
    assert "Traceback" in traced.stderr


def many(folder: Path) -> Path:
    """A checkpoint whose listing is longer than the buffer of a pipe."""
    path = folder / "many"
    bcqfmt.save(path, {f"{'x' * 200}.{i}": np.zeros(1, np.int8) for i in range(2000)})
    return path


def test_closed_pipe_is_quiet_and_keeps_the_verdict(tmp_path: Path) -> None:
    path = many(tmp_path)
    bcqfmt.save(tmp_path / "none", {"x": np.zeros(1, np.int8)})
    for args, code in (
        (["diff", str(path), str(tmp_path / "none"), "--max-rows", "5000"], 6),
        (["diff", str(path), str(path)], 0),
        (["--help"], 0),
    ):
        reader, writer = os.pipe()
        os.close(reader)
        done = subprocess.run(
            command(*args), env=environment(), stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60, check=False
        )
        os.close(writer)
        assert done.stderr == ""
        assert done.returncode == code, args


def test_closed_stdout(folder: Path) -> None:
    done = subprocess.run(
        ["sh", "-c", 'exec "$@" >&-', "sh", *command("inspect", folder)],
        env=environment(), capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_full_disk(folder: Path) -> None:
    for options in ([], ["--json"]):
        with Path("/dev/full").open("w") as full:
            done = program("inspect", folder, *options, capture_output=False, stdout=full, stderr=subprocess.PIPE)
        assert done.returncode == 7
        assert "BCQ-E402" in done.stderr
        assert "Traceback" not in done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_messages_that_cannot_be_written_change_nothing(tmp_path: Path) -> None:
    source = gptq_folder(tmp_path / "source", layers=1)
    with Path("/dev/full").open("w") as full:
        for args, code in ((["convert", source, tmp_path / "bcq"], 0), (["validate", "nothing"], 3), (["inspct"], 2)):
            done = program(*args, capture_output=False, stdout=subprocess.PIPE, stderr=full)
            assert done.returncode == code, args
    assert bcqfmt.validate(tmp_path / "bcq").valid


def test_working_folder_that_was_removed(tmp_path: Path, folder: Path) -> None:
    gone = 'mkdir "$0" && cd "$0" && rmdir "$0" && exec "$@"'
    for args in (["inspect", "."], ["convert", folder, "out"]):
        words = ["sh", "-c", gone, str(tmp_path / "gone"), *command(*args)]
        done = subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 3, done.stderr
        assert done.stderr.startswith("error: BCQ-E102 .: cannot be read: the working folder was removed\nhint: ")


SLOW = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
signal.signal(signal.SIGHUP, signal.SIG_DFL)
import bcqfmt.inspect.summary
def summarize(path, modules=False):
    print("ready", flush=True)
    time.sleep(60)
bcqfmt.inspect.summary.summarize = summarize
sys.argv = ["bcqfmt", "inspect", "x"]
from bcqfmt.cli.main import main
main()
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_signals(number: signal.Signals, code: int) -> None:
    with slow(SLOW) as child:
        child.send_signal(number)
        _, errors = child.communicate(timeout=30)
    assert child.returncode == code
    assert "BCQ-E901" in errors
    assert "Traceback" not in errors


def test_hangup_stays_ignored() -> None:
    """As under nohup."""
    with slow(SLOW.replace("SIG_DFL", "SIG_IGN")) as child:
        child.send_signal(signal.SIGHUP)
        time.sleep(0.2)
        assert child.poll() is None
        child.terminate()
        assert "stopped by SIGTERM" in child.communicate(timeout=30)[1]


def slow(script: str) -> subprocess.Popen[str]:
    """The program, at work."""
    words = [*command()[:2], "-c", script]
    child = subprocess.Popen(words, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    time.sleep(0.1)
    return child


def test_names_on_a_terminal_without_unicode(tmp_path: Path) -> None:
    bcqfmt.save(tmp_path / "m", {"größe.重み": np.zeros(3, np.float32)})
    plain = {**environment(), "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(
        command("inspect", tmp_path / "m", "--tensor", "größe.重み"),
        env={**plain, "PYTHONUTF8": "0"}, capture_output=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert b"gr\\xf6\\xdfe" in done.stdout


def test_output_in_a_file_has_no_colour_and_is_not_cut(folder: Path) -> None:
    done = program("inspect", folder, "--modules")
    assert done.returncode == 0
    assert_clean(done.stdout)
    assert "..." not in done.stdout


def test_table_gives_way_on_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(render, "_terminal_width", lambda: 60)
    lines = render.table(("name", "size"), [("model.layers.0." + "重" * 60 + ".weight", "123"), ("b", "4")])
    assert max(map(render._width, lines)) <= 60
    assert "..." in lines[1]
    assert lines[1].endswith("123")
    monkeypatch.setattr(render, "_terminal_width", lambda: 40)
    names = [f"model.layers.0.mlp.{kind}_proj.weight" for kind in ("up", "gate", "down")]
    assert len(set(render.table(("name", "size"), [(name, "1") for name in names]))) == 4  # still told apart
    monkeypatch.setattr(render, "_terminal_width", lambda: None)
    assert "..." not in render.table(("name", "size"), [("x" * 300, "1")])[1]


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.00 kB"),
        (999_995, "1.00 MB"),
        (123_456_789, "123.46 MB"),
        (10**22, "10000.00 EB"),
    ],
)
def test_sizes(number: int, text: str) -> None:
    assert render.size(number) == text
