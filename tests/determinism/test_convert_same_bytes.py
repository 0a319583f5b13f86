"""Workers, parts, engines, locale and machine do not show: the same SHA-256 of every file of the result."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bcqfmt.converters.convert.conversion import Conversion, ConvertOptions
from bcqfmt.converters.source.checkpoint import open_source
from bcqfmt.errors import BcqError
from programs.verbs import command, environment
from sources.conversions import convert, gptq_folder, tree
from sources.peers import PEERS

SIZE = 15_000  # bytes per shard: several layers make several shards
SHARDS = 4
LAYOUTS = {
    "awq": "autoawq-gemm-4b-g32-asym",
    "compressed-tensors": "compressedtensors0.12-pack_quantized-4b-g32-sym-actorder_group",
    "gptq": "gptqmodel-gptq-4b-g32-sym-sharded",
    "gptq, act order": "gptqmodel-gptq-3b-g64-sym-desc_act",
    "gptq, raw zeros": "autoround-auto_gptq-4b-g128-asym-ragged",
    "hqq": "hqq-hqq-3b-g64-asym-axis1",
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight layers, and side files whose names and texts are not ASCII."""
    folder = gptq_folder(tmp_path_factory.mktemp("deterministic") / "model-gptq", layers=8)
    (folder / "README.md").write_text("---\nlicense: mit\nlanguage:\n- tr\n---\nİı Größe, 模型\n", encoding="utf-8")
    (folder / "special_tokens_ß.json").write_text('{"eos_token": "»"}', encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def plain(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """One worker, in this process, in one go."""
    target = tmp_path_factory.mktemp("plain") / "bcq"
    convert(source, target, max_shard_size=SIZE)
    assert len(list(target.glob("model-*.safetensors"))) == SHARDS
    return tree(target)


@pytest.fixture(autouse=True)
def untouched(source: Path) -> Iterator[None]:
    before = tree(source)
    yield
    assert tree(source) == before


def started(source: Path, target: Path, umask: int = -1, **variables: str) -> subprocess.CompletedProcess[bytes]:
    """The program itself, in an environment of its own."""
    kept = {key: value for key, value in environment().items() if not key.startswith(("LC_", "LANG"))}
    return subprocess.run(
        command("convert", source, target, "--max-shard-size", str(SIZE), "--workers", "2"),
        env={**kept, **variables},
        umask=umask,
        cwd=target.parent,
        capture_output=True,
        timeout=120,
        check=False,
    )


def process(source: Path, target: Path, umask: int = -1, **variables: str) -> dict[str, str]:
    """What the program makes in such an environment."""
    done = started(source, target, umask, **variables)
    assert done.returncode == 0, done.stderr
    return tree(target)


# ------------------------------------------------------------------------------------------------ how many, and where
@pytest.mark.parametrize("workers", [2, 3, 8])
def test_workers(source: Path, plain: dict[str, str], tmp_path: Path, workers: int) -> None:
    convert(source, tmp_path / "bcq", max_shard_size=SIZE, workers=workers)
    assert tree(tmp_path / "bcq") == plain


@pytest.mark.parametrize("kind", LAYOUTS.values(), ids=LAYOUTS)
def test_workers_with_every_layout(tmp_path: Path, kind: str) -> None:
    for workers in (1, 3):
        convert(PEERS / kind / "source", tmp_path / str(workers), max_shard_size=60_000, workers=workers)
    assert tree(tmp_path / "1") == tree(tmp_path / "3")


@pytest.mark.parametrize("count", [1, 2, 3, SHARDS + 3])
def test_parts(source: Path, plain: dict[str, str], tmp_path: Path, count: int) -> None:
    for index in range(count, 0, -1):  # in no particular order
        convert(source, tmp_path / "bcq", max_shard_size=SIZE, part=(index, count))
    Conversion(open_source(source), ConvertOptions(max_shard_size=SIZE)).close(tmp_path / "bcq")
    assert tree(tmp_path / "bcq") == plain
    assert [path.name for path in tmp_path.iterdir()] == ["bcq"]


def test_parts_at_the_same_time(source: Path, plain: dict[str, str], tmp_path: Path) -> None:
    asked = ("convert", source, tmp_path / "bcq", "--max-shard-size", str(SIZE), "--part")
    running = [subprocess.Popen(command(*asked, f"{i}/2"), env=environment(), stderr=subprocess.PIPE) for i in (1, 2)]
    for one in running:
        _, said = one.communicate(timeout=120)
        assert one.returncode == 0, said
    Conversion(open_source(source), ConvertOptions(max_shard_size=SIZE)).close(tmp_path / "bcq")
    assert tree(tmp_path / "bcq") == plain


def test_another_copy_of_the_source(source: Path, plain: dict[str, str], tmp_path: Path) -> None:
    """Another place, other times, files made in another order."""
    copy = tmp_path / "elsewhere" / source.name
    copy.mkdir(parents=True)
    for number, path in enumerate(sorted(source.iterdir(), reverse=True)):
        shutil.copyfile(path, copy / path.name)
        os.utime(copy / path.name, (number, number))
    convert(copy, tmp_path / "bcq", max_shard_size=SIZE)
    assert tree(tmp_path / "bcq") == plain


# -------------------------------------------------------------------------------------------------------- environment
# Locale, time zone, order of sets and umask at once: what has no effect together has none alone.
ENVIRONMENTS: dict[str, tuple[int, dict[str, str]]] = {
    "C": (0o002, {"LC_ALL": "C", "TZ": "America/St_Johns", "PYTHONHASHSEED": "0"}),
    "Turkish, whose i has no dot": (
        0o077,
        {"LC_ALL": "tr_TR.UTF-8", "LANG": "tr_TR.UTF-8", "TZ": "Asia/Kathmandu", "PYTHONHASHSEED": "4294967295"},
    ),
}


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_locale_zone_order_of_sets_and_umask(source: Path, plain: dict[str, str], tmp_path: Path, name: str) -> None:
    """The bytes are the same; the modes are what the umask leaves."""
    umask, variables = ENVIRONMENTS[name]
    assert process(source, tmp_path / "bcq", umask, **variables) == plain
    modes: dict[bool, set[int]] = {True: set(), False: set()}
    for path in (tmp_path / "bcq", *(tmp_path / "bcq").rglob("*")):
        modes[path.is_dir()].add(path.stat().st_mode & 0o777)
    assert modes == {False: {0o666 & ~umask}, True: {0o777 & ~umask}}


def test_a_locale_that_is_not_utf8(source: Path, plain: dict[str, str], tmp_path: Path) -> None:
    """The same bytes where all names are ASCII; where one is not, nothing rather than other bytes."""
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = started(source, tmp_path / "bcq", **ascii_only)
    assert (done.returncode, list(tmp_path.iterdir())) == (3, [])
    assert b"BCQ-E102 special_tokens_" in done.stderr
    assert b"hint: set PYTHONUTF8=1" in done.stderr
    renamed = tmp_path / source.name
    shutil.copytree(source, renamed)
    (renamed / "special_tokens_ß.json").unlink()
    convert(renamed, tmp_path / "here", max_shard_size=SIZE)
    assert process(renamed, tmp_path / "bcq", **ascii_only) == tree(tmp_path / "here")


def test_names_that_are_no_text(source: Path, tmp_path: Path) -> None:
    copy = tmp_path / source.name
    shutil.copytree(source, copy)
    Path(os.fsdecode(os.fsencode(copy) + b"/tokenizer-\xff.json")).write_text("{}")
    with pytest.raises(BcqError) as caught:
        convert(copy, tmp_path / "bcq")
    assert (caught.value.code, caught.value.exit_code) == ("BCQ-E102", 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == [source.name]


def test_nothing_of_the_machine_is_written_down(source: Path, tmp_path: Path) -> None:
    """No time, no path, no name of the machine or of the user in any file."""
    target = tmp_path / "bcq"
    convert(source, target, max_shard_size=SIZE)
    words: dict[str, Any] = {"source": source.parent, "target": tmp_path, "machine": os.uname().nodename}
    for path in target.rglob("*"):
        data = path.read_bytes() if path.is_file() else b""
        assert [key for key, word in words.items() if str(word).encode() in data] == [], path
