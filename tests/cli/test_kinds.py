"""Every verb says what it was given, and which command fits: one detector for all of them."""

import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bcqfmt.inspect.kinds import look
from programs.verbs import ROOT, Run
from sources.peers import PEERS

GPTQ = ROOT / "bcqfmt" / "data" / "demo"
DENSE = PEERS / "dense-fp16" / "source"
_CONVERT = "convert it, without loss: bcqfmt convert"
GGUF = next((ROOT / "tests" / "data" / "gguf").rglob("*.gguf"))


@pytest.fixture
def things(tmp_path: Path, folder: Path) -> Path:
    """One of every kind, next to each other."""
    (tmp_path / "text.txt").write_text("some words")
    (tmp_path / "page.safetensors").write_text("<!DOCTYPE html>")
    (tmp_path / "pointer.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:1\n")
    (tmp_path / "model.bin").write_bytes(b"PK\x03\x04" + bytes(60))
    (tmp_path / "pickles").mkdir()
    (tmp_path / "pickles" / "pytorch_model.bin").write_bytes(b"\x80\x04")
    (tmp_path / "empty").mkdir()
    shutil.copytree(folder, tmp_path / "unfinished")
    (tmp_path / "unfinished" / "bcq_manifest.json").unlink()
    shutil.copytree(tmp_path / "unfinished", tmp_path / "stopped.partial")
    (tmp_path / "stopped.partial" / ".bcq_work").mkdir()
    (tmp_path / "begun.partial" / ".bcq_work").mkdir(parents=True)
    shutil.copytree(GGUF.parent, tmp_path / "ggufs.partial")
    (tmp_path / "cut.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:100])
    return tmp_path


@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        ("model", "bcq", "a BCQ folder"),
        ("model/model.safetensors", "bcq file", "a BCQ file"),
        ("model/config.json", "text", "a JSON file"),
        ("text.txt", "text", "a text"),
        ("page.safetensors", "page", "a web page or an error text"),
        ("pointer.safetensors", "lfs", "a git-lfs pointer"),
        ("model.bin", "pickle", "a pickled file"),
        ("pickles", "pickle", "a folder of pickled weights"),
        ("empty", "empty", "an empty folder"),
        ("unfinished", "unfinished", "a BCQ folder without bcq_manifest.json"),
        ("stopped.partial", "stopped", "the work folder of a run"),
        ("ggufs.partial", "gguf", "a folder of GGUF files"),
        ("cut.safetensors", "unclear", "a damaged safetensors file"),
        ("nothing", "missing", "nothing"),
    ],
)
def test_what_it_is(things: Path, name: str, kind: str, words: str) -> None:
    assert look(things / name)[:2] == (kind, words)


@pytest.mark.parametrize(
    ("path", "kind", "words"),
    [
        (GPTQ, "quantized", "a GPTQ folder"),
        (GPTQ / "model.safetensors", "quantized", "a GPTQ or AWQ file"),
        (DENSE, "dense", "a dense model's folder"),
        (GGUF, "gguf", "a GGUF file"),
        (PEERS / "hqq-hqq-4b-g64-asym-axis1" / "source", "quantized", "a HQQ folder"),
    ],
)
def test_what_real_models_are(path: Path, kind: str, words: str) -> None:
    assert look(path)[:2] == (kind, words)


@pytest.mark.parametrize(
    ("words", "exit_code", "says", "hint"),
    [
        (
            ["validate", GPTQ],
            5,
            "no BCQ checkpoint but a GPTQ folder",
            _CONVERT + " {} {}-bcq",
        ),
        (
            ["validate", GPTQ / "config.json"],
            5,  # as inspect
            "but a JSON file (BCQ-E203)",
            f"it is part of a GPTQ folder; {_CONVERT} {GPTQ} {GPTQ}-bcq",
        ),
        (
            ["validate", GPTQ / "model.safetensors"],
            5,
            "but a GPTQ or AWQ file",
            f"it is part of a GPTQ folder; {_CONVERT} {GPTQ} {GPTQ}-bcq",
        ),
        (["validate", GGUF], 5, "but a GGUF file", "convert it, without loss: bcqfmt convert {}"),
        (["inspect", GPTQ], 0, "not BCQ: gptq", _CONVERT + " {} {}-bcq"),
        (["inspect", DENSE], 0, "not BCQ", "quantize it: bcqfmt quantize {} {}-bcq --method rtn --bits 4"),
        (
            ["calibrate", "model", "--text", "text.txt"],
            2,
            "a BCQ folder",
            "write its values as a dense model first: bcqfmt export {} {}-dense --to dense",
        ),
        (["verify", "model", "model"], 2, "a BCQ folder", "the source comes first: bcqfmt verify SRC BCQ"),
        (["verify", "model", GPTQ], 2, "a BCQ folder", f"the source comes first: bcqfmt verify {GPTQ} {{}}\n"),
        *(
            (
                [verb, "model/model.safetensors", *more],
                5,
                "BCQ-E203",
                f"it is part of a BCQ folder, name that: bcqfmt {told}\n",
            )
            for verb, more, told in (
                ("seal", [], "seal model"),
                ("restore", ["out"], "restore model out"),
                ("export", ["out", "--to", "dense"], "export model out --to dense"),
                ("export", ["out.gguf", "--to", "gguf"], "export model out.gguf --to gguf"),
            )
        ),
        (["seal", "text.txt"], 5, "a text; expected a BCQ folder", "bcqfmt reads safetensors files"),
        (
            ["inspect", "text.txt"],
            5,
            "expected a BCQ folder, a BCQ file, a quantized model's folder, a dense model's folder or a GGUF file",
            "bcqfmt reads",
        ),
        (
            ["quantize", DENSE, "out", "--method", "gptq", "--stats", GPTQ],
            5,
            "expected a file that bcqfmt calibrate wrote",
            f"make them: bcqfmt calibrate {DENSE} --text FILE",
        ),
        (
            ["report", GPTQ],
            5,
            "a GPTQ folder; expected a BCQ folder",
            _CONVERT + " {} {}-bcq",
        ),
        (
            ["export", DENSE, "out", "--to", "gptq"],
            5,
            "a dense model's folder",
            "quantize it: bcqfmt quantize {} {}-bcq --",
        ),
        (["inspect", GPTQ / "config.json"], 5, "a JSON file", "it is part of a GPTQ folder, name that: bcqfmt inspect"),
        (["convert", "model.bin", "out"], 5, "a pickled file", "bcqfmt never opens pickles"),
        (["convert", "pointer.safetensors", "out"], 4, "a git-lfs pointer", "fetch the real file: git lfs pull"),
        (["convert", "page.safetensors", "out"], 4, "a web page", "download the file again"),
        (["convert", "text.txt", "out"], 5, "a text", "bcqfmt reads safetensors files, and GGUF"),
        (["generate", GPTQ, "--prompt", "x"], 5, "a GPTQ folder", _CONVERT + " {} {}-bcq"),
        (["generate", GGUF, "--prompt", "x"], 5, "a GGUF file", "convert it, without loss: bcqfmt convert"),
        (
            ["quantize", GGUF, "out", "--method", "rtn"],
            5,
            "a GGUF file",
            f"convert it, without loss: bcqfmt convert {{}} {GGUF.with_suffix('')}-bcq; to quantize its values",
        ),
        (
            ["quantize", DENSE, "out", "--method", "gptq", "--stats", "text.txt"],
            5,
            "a text; expected a file that bcqfmt calibrate wrote",
            f"make them: bcqfmt calibrate {DENSE} --text FILE",
        ),
        *(
            ([verb, "stopped.partial", *more], code, "BCQ-V601", "go on with the command that makes it, and --resume")
            for verb, code, more in (
                ("generate", 4, ["--prompt", "x"]),
                ("eval", 4, ["--text", "text.txt"]),
                ("inspect", 4, []),
                ("validate", 4, []),
                ("report", 4, []),
            )
        ),
        (["generate", "begun.partial", "--prompt", "x"], 4, "BCQ-V601", "go on with the command that makes it"),
        (["inspect", "begun.partial"], 4, "BCQ-V601", "go on with the command that makes it"),
        (["validate", "begun.partial"], 4, "BCQ-V601", "go on with the command that makes it"),
        (["convert", GPTQ, "text.txt/out"], 7, "text.txt is no folder", "choose another place"),
        (["demo", "--keep", "text.txt/out"], 7, "text.txt is no folder", "choose another folder"),
        (["export", "model", "text.txt/out", "--to", "dense"], 7, "text.txt is no folder", "choose another place"),
        (["export", "model", "model", "--to", "gptq"], 7, "it is the BCQ folder", "choose another place\n"),
        (["convert", GPTQ, GPTQ], 7, "it is the source", "choose another place, {}-bcq for example"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_the_thing_and_the_command_that_fits(
    run: Run, things: Path, monkeypatch: pytest.MonkeyPatch, words: list[object], exit_code: int, says: str, hint: str
) -> None:
    monkeypatch.chdir(things)
    result = run(*words)
    assert result.exit_code == exit_code, result.stderr
    assert says in result.output
    assert f"hint: {hint.replace('{}', str(words[1]))}" in result.output
    assert "BCQ-V102" not in result.output
    assert not (things / "out").exists()


def test_the_hint_works_when_it_is_obeyed(run: Run, things: Path) -> None:
    shutil.copytree(GPTQ, things / "my model")
    hint = run("report", things / "my model").stderr.partition("without loss: bcqfmt ")[2]
    assert hint == f"convert '{things}/my model' '{things}/my model-bcq'\n"
    assert run("convert", things / "my model", things / "my model-bcq").exit_code == 0


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("report", "x", "--out", "a.html"), "Did you mean '--html'?"),
        (("calibrate", "x", "--seq", "3"), "Did you mean '--context'?"),
        (("sweep", "x", "--groups", "3"), "Did you mean '--group-size'?"),
        (("sweep", "x", "--tokens", "3"), "Did you mean '--max-tokens'?"),
        (("convert", "x", "y", "--ovewrite"), "'--overwrite'"),
        (("export", "x", "y", "--format", "gptq"), "Did you mean '--to'?"),
        (("help", "inspct"), "did you mean 'inspect'?"),
        (("run", "x"), "did you mean 'generate'?"),
        (("help", "nosuch"), "there are inspect,"),
        (("-v",), "'--version'"),
    ],
)
def test_near_misses(run: Run, words: tuple[str, ...], says: str) -> None:
    result = run(*words)
    assert (result.exit_code, says in result.stderr) == (2, True)


def test_help_and_version_are_verbs_too(run: Run) -> None:
    assert run("help").stdout == run("--help").stdout
    assert run("help", "seal").stdout == run("seal", "--help").stdout
    assert run("version").stdout == run("--version").stdout
    assert run("version", "--json").stdout == run("--version", "--json").stdout


@pytest.mark.parametrize(
    "words",
    [["inspect", "{}"], ["validate", "{}"], ["convert", "{}", "out"], ["seal", "{}"], ["report", "{}"]],
    ids=lambda words: words[0],
)
def test_a_pipe_in_place_of_a_model_file_blocks_no_verb(run: Run, tmp_path: Path, words: list[str]) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    os.mkfifo(tmp_path / "model" / "model.safetensors")
    with interrupted_after(10):
        made = run(*(word.format(tmp_path / "model") for word in words))
    assert made.exit_code in (3, 4, 5), made.stderr
    assert look(tmp_path / "model")[:2] == ("unclear", "a folder whose model file cannot be read")


@contextmanager
def interrupted_after(seconds: int) -> Iterator[None]:
    """An error instead of a test that never ends."""

    def stop(number: int, frame: object) -> None:
        raise AssertionError(f"it waits for more than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def test_links_in_a_circle_are_nothing_that_can_be_read(run: Run, tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    for words in (["restore", tmp_path / "loop", tmp_path / "out"], ["report", tmp_path / "loop", "--html", "x.html"]):
        made = run(*words)
        assert made.exit_code in (3, 4, 5), made.stderr
        assert "BCQ-E999" not in made.stderr
