"""Conversions that are killed, interrupted, starved or fed with what they must refuse: what is left, what goes on."""

from __future__ import annotations

import errno
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bcqfmt.converters.convert.conversion import Conversion, ConvertOptions
from bcqfmt.converters.jobs.workspace import Workspace
from bcqfmt.converters.source.checkpoint import open_source
from bcqfmt.errors import BcqError
from programs.verbs import ROOT, command, environment
from sources.conversions import GPTQ, convert, gptq_folder, gptq_layer, proved, tree
from sources.peers import Array, made_up, words

SIZE = 15_000  # bytes per shard: several layers make several shards
SCRIPT = ROOT / "tests" / "support" / "faults" / "interrupted.py"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gptq_folder(tmp_path_factory.mktemp("fault") / "model-gptq", layers=8)


@pytest.fixture(scope="module")
def plain(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What an uninterrupted run makes."""
    target = tmp_path_factory.mktemp("plain") / "bcq"
    convert(source, target, max_shard_size=SIZE)
    assert len(list(target.glob("model-*.safetensors"))) == 4
    return tree(target)


@pytest.fixture(autouse=True)
def untouched(source: Path) -> Iterator[None]:
    """No fault may change the source."""
    before = tree(source)
    yield
    assert tree(source) == before


def interrupted(source: Path, target: Path, number: int, at: int, *more: str) -> subprocess.CompletedProcess[str]:
    asked = ["convert", str(source), str(target), "--max-shard-size", str(SIZE), "--workers", "2", *more]
    return subprocess.run(
        [sys.executable, "-P", str(SCRIPT), str(int(number)), str(at), *asked],
        env={**environment(), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def resumed(source: Path, target: Path, plain: dict[str, str]) -> None:
    """Go on, unless it was complete already; the same bytes and no other file."""
    if target.exists():
        assert not target.with_name(f"{target.name}.partial").exists()
    else:
        convert(source, target, max_shard_size=SIZE, resume=True)
    assert tree(target) == plain
    assert [path.name for path in target.parent.iterdir()] == [target.name]


@pytest.fixture(scope="module")
def calls(source: Path, tmp_path_factory: pytest.TempPathFactory) -> int:
    """How many times a whole run changes the disk."""
    done = interrupted(source, tmp_path_factory.mktemp("count") / "bcq", signal.SIGKILL, 0)
    assert done.returncode == 0, done.stderr
    return int(done.stderr.rpartition("calls ")[2])


def killed(source: Path, folder: Path, plain: dict[str, str], at: int) -> None:
    target = folder / "bcq"
    done = interrupted(source, target, signal.SIGKILL, at)
    assert done.returncode in (-signal.SIGKILL, 0)
    if target.exists():  # complete, or not there
        assert tree(target) == plain
    for shard in folder.glob("bcq.partial/model-*.safetensors"):
        assert plain[shard.name] == tree(shard.parent)[shard.name]
    resumed(source, target, plain)


@pytest.mark.parametrize("tenth", [pytest.param(n, marks=[pytest.mark.soak] if n % 3 else []) for n in range(10)])
def test_killed_at_any_moment_then_resumed(
    source: Path, plain: dict[str, str], calls: int, tmp_path: Path, tenth: int
) -> None:
    at = calls - 1 if tenth == 9 else random.Random(tenth).randint(1 + calls * tenth // 10, calls * (tenth + 1) // 10)
    killed(source, tmp_path, plain, at)


def test_interrupted_then_resumed(source: Path, plain: dict[str, str], calls: int, tmp_path: Path) -> None:
    """From the keyboard; tests/faults/test_signals.py has SIGTERM."""
    start = time.monotonic()
    done = interrupted(source, tmp_path / "bcq", signal.SIGINT, calls // 2)
    assert done.returncode == 130, done.stderr
    assert "BCQ-E901" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "bcq").exists()
    assert time.monotonic() - start < 60
    with pytest.raises(BcqError, match=r"BCQ-E401.*an unfinished conversion; expected --resume"):
        convert(source, tmp_path / "bcq", max_shard_size=SIZE)
    resumed(source, tmp_path / "bcq", plain)


def test_two_runs_at_once(source: Path, plain: dict[str, str], tmp_path: Path) -> None:
    refused: list[BcqError] = []

    def intrude(_: int) -> None:
        for options in ({}, {"resume": True}, {"overwrite": True}, {"part": (1, 2)}):
            if len(refused) < 4:
                with pytest.raises(BcqError) as caught:
                    convert(source, tmp_path / "bcq", max_shard_size=SIZE, **options)
                refused.append(caught.value)

    first = Conversion(open_source(source), ConvertOptions(max_shard_size=SIZE))
    first.run(tmp_path / "bcq", intrude)
    assert [(fault.code, fault.exit_code) for fault in refused] == [("BCQ-E403", 7)] * 4
    assert tree(tmp_path / "bcq") == plain


def test_a_lock_file_without_its_process_is_no_obstacle(source: Path, plain: dict[str, str], tmp_path: Path) -> None:
    space = Workspace(tmp_path / "bcq", resume=False, overwrite=False)
    space.release()
    resumed(source, tmp_path / "bcq", plain)


def test_a_refused_plan_changes_nothing(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where nothing was done yet."""

    def interrupted(*given: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Conversion, "_work", interrupted)
        with pytest.raises(KeyboardInterrupt):
            convert(source, tmp_path / "bcq", max_shard_size=SIZE)
    before = tree(tmp_path / "bcq.partial")
    with pytest.raises(BcqError, match=r"BCQ-E401.*with other options"):
        convert(source, tmp_path / "bcq", max_shard_size=2 * SIZE, resume=True)
    assert tree(tmp_path / "bcq.partial") == before
    assert ".bcq_work/plan.json" in before


# -------------------------------------------------------------------------------------------------- the disk fails
def failing(original: Callable[..., Any], at: int, number: int) -> Callable[..., Any]:
    """Fails at the ``at``-th call, or with 0 always."""
    count = [0]

    def call(*args: Any, **options: Any) -> Any:
        count[0] += 1
        if at in (0, count[0]):
            raise OSError(number, os.strerror(number))
        return original(*args, **options)

    return call


@pytest.mark.parametrize("name", ["write", "fsync", "replace", "posix_fallocate", "rename"])
@pytest.mark.parametrize(("at", "number"), [(1, errno.ENOSPC), (4, errno.EIO), (12, errno.EDQUOT), (30, errno.ENOSPC)])
def test_disk_full_or_broken(
    source: Path,
    plain: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    at: int,
    number: int,
) -> None:
    target = tmp_path / "bcq"
    with monkeypatch.context() as patch:
        patch.setattr(os, name, failing(getattr(os, name), at, number))
        try:
            convert(source, target, max_shard_size=SIZE)
            fault = None
        except BcqError as caught:
            fault = caught
    if fault is None:  # there are not that many calls
        assert tree(target) == plain
        return
    assert (fault.code, fault.exit_code) == ("BCQ-E402", 7)
    assert os.strerror(number) in str(fault)
    assert not target.exists()
    assert list(tmp_path.rglob(".*.tmp")) == []
    resumed(source, target, plain)


def test_short_writes_are_completed(
    source: Path, plain: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: real(descriptor, data[: max(1, len(data) // 3)]))
    convert(source, tmp_path / "bcq", max_shard_size=SIZE)
    assert tree(tmp_path / "bcq") == plain


def test_read_only_target(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BcqError) as caught:
        convert(source, tmp_path / "file" / "bcq")
    assert (caught.value.code, caught.value.exit_code) == ("BCQ-E402", 7)
    monkeypatch.setattr(os, "mkdir", failing(os.mkdir, 0, errno.EROFS))
    with pytest.raises(BcqError, match="Read-only file system") as caught:
        convert(source, tmp_path / "bcq")
    assert caught.value.exit_code == 7
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_too_small_a_disk_is_refused_first(source: Path, tmp_path: Path) -> None:
    limit = "import shutil, collections; U = collections.namedtuple('U', 'total used free');"
    limit += "shutil.disk_usage = lambda path: U(10, 9, 1)\nfrom bcqfmt.cli.main import main; main()"
    asked = [*command()[:2], "-c", limit, "convert", str(source), str(tmp_path / "bcq"), "--json"]
    done = subprocess.run(asked, env=environment(), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 9, done.stderr
    assert json.loads(done.stdout)["error"]["code"] == "BCQ-E802"
    assert re.search(r"1 bytes free; expected [0-9,]+ bytes", done.stderr)
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------------------------------------- the source changes
def shorten(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 100)


def append(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"more")


def replace(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(path.read_bytes())
    other.replace(path)


def rewrite(path: Path) -> None:
    time.sleep(0.02)
    path.write_bytes(path.read_bytes())


@pytest.mark.parametrize("change", [shorten, append, replace, rewrite])
@pytest.mark.parametrize("later", [False, True])
def test_source_changes_while_converting(tmp_path: Path, change: Callable[[Path], None], later: bool) -> None:
    source = gptq_folder(tmp_path / "source")
    ticks: list[int] = []

    def tick(_: int) -> None:
        ticks.append(1)
        if len(ticks) == (14 if later else 1):
            change(source / "model.safetensors")

    conversion = Conversion(open_source(source), ConvertOptions(max_shard_size=SIZE))
    with pytest.raises(BcqError) as caught:
        conversion.run(tmp_path / "bcq", tick)
    assert (caught.value.code, caught.value.exit_code) == ("BCQ-E103", 3)
    assert not (tmp_path / "bcq").exists()


def test_source_changes_before_resuming(tmp_path: Path) -> None:
    source = gptq_folder(tmp_path / "source")
    stop_early(source, tmp_path / "bcq")
    rewrite(source / "model.safetensors")
    with pytest.raises(BcqError) as caught:
        convert(source, tmp_path / "bcq", max_shard_size=SIZE, resume=True)
    assert (caught.value.code, caught.value.exit_code) == ("BCQ-E103", 3)
    stop_early(source, tmp_path / "other")
    (source / "tokenizer.json").write_text("[]")
    with pytest.raises(BcqError, match="BCQ-E401"):
        convert(source, tmp_path / "other", max_shard_size=SIZE, resume=True)


def stop_early(source: Path, target: Path) -> None:
    """An interrupt after the first shard."""

    def stop(file: str, size: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Conversion(open_source(source), ConvertOptions(max_shard_size=SIZE)).run(target, None, stop)
    assert not target.exists()


@pytest.mark.parametrize("other", [{"max_shard_size": 20_000}, {"provenance": False}, {"zero_point": "v1-nowrap"}])
def test_resuming_with_other_options_is_refused(
    source: Path, plain: dict[str, str], tmp_path: Path, other: dict[str, Any]
) -> None:
    stop_early(source, tmp_path / "bcq")
    with pytest.raises(BcqError) as caught:
        convert(source, tmp_path / "bcq", **{"max_shard_size": SIZE, **other}, resume=True)
    assert (caught.value.code, caught.value.exit_code) == ("BCQ-E401", 7)
    resumed(source, tmp_path / "bcq", plain)


def test_damaged_shards_are_done_again(source: Path, plain: dict[str, str], tmp_path: Path) -> None:
    stop_early(source, tmp_path / "bcq")
    shard = min((tmp_path / "bcq.partial").glob("model-*.safetensors"))  # the other worker may have finished one too
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    (tmp_path / "bcq.partial" / "bcq_source").mkdir()
    (tmp_path / "bcq.partial" / "bcq_source" / ".0123456789abcdef.tmp").write_text("left by a killed run")
    resumed(source, tmp_path / "bcq", plain)


def test_folders_and_files_of_the_source_that_are_named_like_temporary_ones(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*given: Any) -> None:
        raise KeyboardInterrupt

    copy, target = tmp_path / "source", tmp_path / "made/bcq"
    shutil.copytree(source, copy)
    for name in (".cfg.tmp", ".0123456789abcdef.tmp"):
        (copy / name).mkdir()
        (copy / name / ".notes.tmp").write_text("mine")
    convert(copy, tmp_path / "whole", max_shard_size=SIZE)
    with monkeypatch.context() as patch:
        patch.setattr("bcqfmt.converters.jobs.finalize.manifest_bytes", stop)
        with pytest.raises(KeyboardInterrupt):
            convert(copy, target, max_shard_size=SIZE)
    resumed(copy, target, tree(tmp_path / "whole"))


def test_a_folder_that_is_not_ours_is_left_alone(source: Path, tmp_path: Path) -> None:
    (tmp_path / "bcq.partial").mkdir()
    (tmp_path / "bcq.partial" / "thesis.txt").write_text("mine")
    for options in ({}, {"resume": True}, {"overwrite": True}):
        with pytest.raises(BcqError, match="BCQ-E401"):
            convert(source, tmp_path / "bcq", **options)
    assert (tmp_path / "bcq.partial" / "thesis.txt").read_text() == "mine"


def test_overwriting(source: Path, plain: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "bcq").mkdir()
    (tmp_path / "bcq" / "old").write_text("")
    (tmp_path / ".bcq.old").mkdir()  # left by a run that was killed between two renames
    (tmp_path / ".bcq.old" / "bcq_manifest.json").write_text("{}")
    with pytest.raises(BcqError, match="BCQ-E401"):
        convert(source, tmp_path / "bcq", max_shard_size=SIZE)
    with pytest.raises(BcqError, match="no checkpoint"):
        convert(source, tmp_path / "bcq", max_shard_size=SIZE, overwrite=True)
    assert (tmp_path / "bcq" / "old").exists()
    (tmp_path / "bcq" / "bcq_manifest.json").write_text("{}")
    convert(source, tmp_path / "bcq", max_shard_size=SIZE, overwrite=True)
    assert tree(tmp_path / "bcq") == plain
    assert [path.name for path in tmp_path.iterdir()] == ["bcq"]


# ------------------------------------------------------------------------------- rows 43 to 54 of the bad-input table
Change = Callable[[dict[str, Array], dict[str, Any]], None]


def entry(suffix: str, value: Any, at: Any = (0,)) -> Change:
    def change(layer: dict[str, Array], settings: dict[str, Any]) -> None:
        layer[suffix][at] = value

    return change


def stated(**values: Any) -> Change:
    return lambda layer, settings: settings.update(values)


def without(*suffixes: str) -> Change:
    def change(layer: dict[str, Array], settings: dict[str, Any]) -> None:
        for suffix in suffixes:
            del layer[suffix]

    return change


def shaped(**arrays: Array) -> Change:
    return lambda layer, settings: layer.update(arrays)


def both(*changes: Change) -> Change:
    def change(layer: dict[str, Array], settings: dict[str, Any]) -> None:
        for one in changes:
            one(layer, settings)

    return change


RNG = np.random.default_rng(3)
WORDS = {"qweight": words(RNG, 128, 8), "qzeros": words(RNG, 4, 8), "scales": np.ones((4, 64), np.float16)}
EIGHTS = np.full((4, 8), 0x88888888, np.uint32).view(np.int32)
ONES = np.full((4, 8), -1, np.int32)
BAD = {
    "43 no qzeros": (without("qzeros"), "BCQ-E603", 4),
    "43 no scales": (without("scales"), "BCQ-E603", 4),
    "43 nothing but qweight": (without("scales", "qzeros", "g_idx"), "BCQ-E603", 4),
    "44 AWQ tensors, GPTQ configuration": (both(without("g_idx"), shaped(**WORDS)), "BCQ-E602", 4),
    "44 another width than stated": (stated(bits=8), "BCQ-E604", 4),
    "44 another group size than stated": (stated(group_size=64), "BCQ-E604", 4),
    "44 qweight of three dimensions": (shaped(qweight=words(RNG, 4, 4, 64)), "BCQ-E604", 4),
    "45 five bits": (stated(bits=5), "BCQ-E608", 5),
    "45 sixteen bits": (stated(bits=16), "BCQ-E608", 5),
    "45 a word for bits": (stated(bits="four"), "BCQ-E602", 4),
    "45 no bits": (stated(bits=None), "BCQ-E602", 4),
    "46 group size 0": (stated(group_size=0), "BCQ-E608", 5),
    "46 group size -2": (stated(group_size=-2), "BCQ-E608", 5),
    "46 group size beyond the columns": (stated(group_size=256), "BCQ-E604", 4),
    "47 symmetric zeros of the other version": (
        both(shaped(qzeros=EIGHTS), stated(sym=True, checkpoint_format="gptq")),
        "BCQ-E605",
        4,
    ),
    "48 all bits set, tool unknown": (
        both(shaped(qzeros=ONES), stated(checkpoint_format="gptq", meta={})),
        "BCQ-E605",
        4,
    ),
    "49 NaN": (entry("scales", np.nan, (1, 5)), "BCQ-E609", 4),
    "49 infinity": (entry("scales", -np.inf, (3, 63)), "BCQ-E609", 4),
    "52 group too large": (entry("g_idx", 4), "BCQ-E606", 4),
    "52 group too negative": (entry("g_idx", -5), "BCQ-E606", 4),
    "52 group huge": (entry("g_idx", 2**31 - 1), "BCQ-E606", 4),
    "53 g_idx too short": (shaped(g_idx=np.zeros(96, np.int32)), "BCQ-E604", 4),
    "53 g_idx too long": (shaped(g_idx=np.zeros(160, np.int32)), "BCQ-E604", 4),
    "54 unbalanced groups": (entry("g_idx", 3), "BCQ-E607", 5),
    "54 all in one group": (entry("g_idx", 1, slice(None)), "BCQ-E607", 5),
}
FINE = {
    "45 a module of its own": stated(bits=3, dynamic={"layer": {"bits": 4}}),
    "46 one group": both(
        stated(group_size=512),
        shaped(qzeros=words(RNG, 1, 8), scales=np.ones((1, 64), np.float16), g_idx=np.zeros(128, np.int32)),
    ),
    "48 all bits set, rule known": both(shaped(qzeros=ONES), stated(checkpoint_format="gptq")),
    "50 scale zero": entry("scales", 0, (0, 0)),
    "50 scale negative": entry("scales", -0.5, (0, slice(None))),
    "50 scale subnormal": entry("scales", 6e-8, (0, slice(None))),
    "52 negative groups": entry("g_idx", -4, slice(0, 32)),
    "54 scattered groups": entry("g_idx", [1, 0], [0, 32]),
    "no g_idx": without("g_idx"),
}


def bad_source(folder: Path, change: Change) -> Path:
    layer, settings = gptq_layer(np.random.default_rng(4), 64, 128, 32), dict(GPTQ)
    change(layer, settings)
    made_up(folder, {f"layer.{suffix}": np.array(array) for suffix, array in layer.items()}, settings)
    return folder


@pytest.mark.parametrize("row", BAD)
def test_bad_content_is_refused(row: str, tmp_path: Path) -> None:
    change, code, exit_code = BAD[row]
    source = bad_source(tmp_path / "source", change)
    before = tree(source)
    with pytest.raises(BcqError) as caught:
        convert(source, tmp_path / "bcq")
    assert (caught.value.code, caught.value.exit_code) == (code, exit_code), str(caught.value)
    assert caught.value.hint
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
    assert tree(source) == before


def test_hints_about_a_configuration_work_when_obeyed(tmp_path: Path) -> None:
    def refused(name: str, **values: Any) -> tuple[str, str]:
        with pytest.raises(BcqError) as caught:
            convert(bad_source(tmp_path / name, stated(**values)), tmp_path / "bcq")
        return str(caught.value), caught.value.hint

    right = 'correct config.json: the shapes are those of "bits": 4, "group_size": 32'
    for i, values in enumerate([{"bits": 8}, {"bits": 3}, {"group_size": 64}, {"bits": None}, {"group_size": None}]):
        assert refused(f"wrong{i}", **values)[1] == right
    for i, values in enumerate(
        [{"bits": "four"}, {"sym": 1}, {"dynamic": {"layer": {"bits": "4"}}}, {"dynamic": {"layer": 4}}]
    ):
        assert refused(f"typed{i}", **values)[0].startswith("BCQ-E602 config.json: ")


def test_without_any_configuration_the_hint_has_the_entry(tmp_path: Path) -> None:
    source = bad_source(tmp_path / "source", stated())
    (source / "config.json").write_text("{}")
    for layout in ("auto", "gptq"):
        with pytest.raises(BcqError) as caught:
            convert(source, tmp_path / "bcq", layout=layout)
        assert (caught.value.code, "--from" in caught.value.hint) == ("BCQ-E602", False)
    (source / "config.json").write_text("{" + caught.value.hint.partition("config.json: ")[2] + "}")
    convert(source, tmp_path / "bcq", zero_point="v2")
    proved(source, tmp_path / "bcq", tmp_path)


def test_the_layout_can_be_named_where_the_method_is_wrong(tmp_path: Path) -> None:
    source = bad_source(tmp_path / "source", stated(quant_method="awq"))
    with pytest.raises(BcqError) as caught:
        convert(source, tmp_path / "bcq")
    assert (caught.value.code, caught.value.hint.split()[-2:]) == ("BCQ-E602", ["--from", "gptq"])
    convert(source, tmp_path / "bcq", layout="gptq")
    proved(source, tmp_path / "bcq", tmp_path)
    with pytest.raises(BcqError) as caught:
        convert(source, tmp_path / "other", layout="awq")
    assert (caught.value.code, caught.value.hint) == ("BCQ-E604", "leave out --from, or name another layout")


@pytest.mark.parametrize("row", FINE)
def test_odd_content_converts(row: str, tmp_path: Path) -> None:
    source = bad_source(tmp_path / "source", FINE[row])
    convert(source, tmp_path / "bcq")
    proved(source, tmp_path / "bcq", tmp_path)


def test_nonfinite_scales_are_kept_when_asked_for(tmp_path: Path) -> None:
    source = bad_source(tmp_path / "source", BAD["49 NaN"][0])
    convert(source, tmp_path / "bcq", allow_nonfinite=True)
    proved(source, tmp_path / "bcq", tmp_path)


@pytest.mark.parametrize("rule", ["v2", "v1-nowrap", "v1-wrap", "v1-carry"])
def test_a_zero_point_rule_can_be_chosen(rule: str, tmp_path: Path) -> None:
    source = bad_source(tmp_path / "source", BAD["48 all bits set, tool unknown"][0])
    convert(source, tmp_path / "bcq", zero_point=rule)
    proved(source, tmp_path / "bcq", tmp_path)


def test_a_zero_point_rule_is_kept_where_no_rule_rebuilds_the_zeros(tmp_path: Path) -> None:
    """36 rows of 4 bits: the last word has bits that no zero point has, so all words are archived as they are."""
    layer = gptq_layer(np.random.default_rng(6), 32, 128, 32)
    layer |= {"qweight": np.tile(layer["qweight"], (1, 2))[:, :36], "scales": np.tile(layer["scales"], (1, 2))[:, :36]}
    tensors = {f"layer.{name}": array for name, array in (layer | {"qzeros": np.full((4, 5), -1, np.int32)}).items()}
    source = made_up(tmp_path / "source", tensors, GPTQ | {"sym": False}).folder
    convert(source, tmp_path / "bcq", zero_point="v1-wrap")
    assert proved(source, tmp_path / "bcq", tmp_path).archived
    with pytest.raises(BcqError, match="it is there already"):
        convert(source, tmp_path / "bcq", zero_point="v1-nowrap", resume=True)
    convert(source, tmp_path / "bcq", zero_point="v1-wrap", resume=True)


def test_all_incomplete_modules_are_named(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    tensors: dict[str, Array] = {}
    for number in range(9):
        layer = gptq_layer(rng, 64, 128, 32)
        for suffix in {0: ["qzeros"], 1: ["scales", "qzeros"]}.get(number % 3, []):
            del layer[suffix]
        tensors |= {f"layers.{number}.{suffix}": array for suffix, array in layer.items()}
    with pytest.raises(BcqError) as caught:
        convert(made_up(tmp_path / "source", tensors, GPTQ).folder, tmp_path / "bcq")
    assert (caught.value.code, caught.value.exit_code) == ("BCQ-E603", 4)
    named = "layers.0, layers.1, layers.3, layers.4, layers.6 ..."
    assert f"qweight without qzeros; 6 modules are incomplete: {named}" in str(caught.value)
    only = {name: array for name, array in tensors.items() if name.startswith(("layers.1.", "layers.2."))}
    with pytest.raises(BcqError, match="qweight without qzeros, scales; expected"):
        convert(made_up(tmp_path / "one", only, GPTQ).folder, tmp_path / "bcq")


@pytest.mark.parametrize(
    ("asked", "stated", "warned"),
    [
        ("v2", "gptq_v2", False),
        ("v2", "gptq", True),
        ("v1-carry", "gptq", False),
        ("v1-nowrap", "gptq_v2", True),
        ("auto", "gptq_v2", False),
        ("v2", None, False),
    ],
)
def test_a_reading_that_contradicts_the_configuration_is_told(
    tmp_path: Path, asked: str, stated: str | None, warned: bool
) -> None:
    source = gptq_folder(tmp_path / "source", layers=2, checkpoint_format=stated)
    conversion = convert(source, tmp_path / "bcq", zero_point=asked)
    found = [(finding.code, finding.severity) for finding in conversion.warnings]
    assert found == ([("BCQ-E655", "warning")] if warned else [])
    if warned:
        assert conversion.warnings[0].found == f"--zero-point {asked}; the configuration says {stated}"
    proved(source, tmp_path / "bcq", tmp_path)


# --------------------------------------------------------------------------------------- nothing left to be resumed
def test_resuming_what_is_complete_changes_nothing(source: Path, plain: dict[str, str], tmp_path: Path) -> None:
    target = tmp_path / "bcq"
    convert(source, target, max_shard_size=SIZE)
    before = {path: path.stat().st_mtime_ns for path in target.rglob("*")}
    for workers in (1, 2):
        conversion = Conversion(open_source(source), ConvertOptions(max_shard_size=SIZE, resume=True, workers=workers))
        assert conversion.is_complete(target)
        assert conversion.run(target)
    assert {path: path.stat().st_mtime_ns for path in target.rglob("*")} == before
    assert tree(target) == plain
    assert [path.name for path in tmp_path.iterdir()] == ["bcq"]


@pytest.mark.parametrize("provenance", [True, False])
def test_resuming_with_another_reading_of_zero_points_is_refused(provenance: bool, tmp_path: Path) -> None:
    source, target = gptq_folder(tmp_path / "source", layers=2), tmp_path / "bcq"
    convert(source, target, zero_point="v1-nowrap", provenance=provenance)
    before = tree(target)
    for other in ("v1-wrap", "v1-carry", "v2", "auto"):
        with pytest.raises(BcqError, match="it is there already") as caught:
            convert(source, target, zero_point=other, provenance=provenance, resume=True)
        assert caught.value.code == "BCQ-E401"
    convert(source, target, zero_point="v1-nowrap", provenance=provenance, resume=True)
    assert tree(target) == before


@pytest.mark.parametrize(
    "other",
    [
        {"max_shard_size": SIZE * 2},
        {"provenance": False},
        {"zero_point": "v1-nowrap"},
        {"resume": False},
        "another source",
        "another side file",
        "another program",
        "a damaged manifest",
    ],
    ids=str,
)
def test_resuming_onto_something_else_is_refused(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: Any
) -> None:
    target, origin = tmp_path / "bcq", source
    convert(source, target, max_shard_size=SIZE)
    if isinstance(other, str):
        origin = tmp_path / "origin"
        shutil.copytree(source, origin)
    if other == "another source":
        gptq_folder(tmp_path / "made", layers=8, n=32)
        (tmp_path / "made" / "model.safetensors").replace(origin / "model.safetensors")
    elif other == "another side file":
        (origin / "tokenizer.json").write_text("{ }")
    elif other == "another program":
        monkeypatch.setattr("bcqfmt.converters.jobs.plan.__version__", "0.0.0")
    elif other == "a damaged manifest":
        (target / "bcq_manifest.json").write_text("{")
    before = tree(target)
    options = {"max_shard_size": SIZE, "resume": True, **(other if isinstance(other, dict) else {})}
    with pytest.raises(BcqError, match="it is there already") as caught:
        convert(origin, target, **options)
    assert (caught.value.code, caught.value.exit_code) == ("BCQ-E401", 7)
    assert tree(target) == before
