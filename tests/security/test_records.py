"""A record of the source is written by anyone: whatever it says, `restore` and `verify` end with a code, and soon."""

from __future__ import annotations

import copy
import itertools
import json
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import bcqfmt
from bcqfmt import BcqError
from bcqfmt.cli.main import cli
from bcqfmt.converters.convert import source_rebuilder
from bcqfmt.converters.convert.restore import restore
from bcqfmt.converters.layouts.registry import rebuilders
from fuzz.folder_mutations import canonical
from security.attacks import peak
from sources.conversions import convert, proved, tree
from sources.layout_sources import SOURCES, layout_source

RECORD = "bcq_source/source.json"
MB = 1_000_000
# of any type; larger than any memory; what a careless comparison takes for something else
WRONG: list[Any] = [
    None, True, False, -1, 0, 1, 5, 9, 33, 2**33, 2**53 - 1, "", "4", "x" * 5000, "../x", "s0_planes", "s9_scale",
    "perm", "v1-carry", "v3", "F64", "I64", "slots", "bytes", [], [0], [-1], [4_000_000_000], [2**52, 2], [64, 129],
    [1] * 40, [[1]], ["1"], [None], {}, {"a": 1}, {"rule": "part"},
]  # fmt: skip


MISSING = object()
KNOWN = rebuilders()


class Folder:
    """A converted folder whose record is replaced by others."""

    def __init__(self, source: Path, bcq: Path, scratch: Path) -> None:
        self.source, self.bcq, self.scratch = source, bcq, scratch
        self.raw = (bcq / RECORD).read_bytes()
        self.value = json.loads(self.raw)
        self.headers = {path: path.read_bytes() for path in (bcq / "bcq_source" / "headers").rglob("*.header")}

    def changed(self, change: Callable[[Any], object]) -> Any:
        """A copy of the record with a change."""
        value = copy.deepcopy(self.value)
        change(value)
        return value

    def ends(self, value: Any, what: object) -> int:
        """How `restore` ends with this record: the exit code of a refusal, or 0 with the very files of the source."""
        (self.bcq / RECORD).write_bytes(canonical(value))
        try:
            return self.restored(what)
        finally:
            (self.bcq / RECORD).write_bytes(self.raw)

    def restored(self, what: object) -> int:
        """The same for what is there now. Nothing is left behind."""
        refused: BcqError | None = None
        try:
            with bcqfmt.open(self.bcq) as checkpoint:
                restore(checkpoint, self.scratch / "out")
        except BcqError as fault:
            refused = fault
        except Exception as fault:
            raise AssertionError(what) from fault
        if refused is None:
            assert tree(self.scratch / "out") == tree(self.source), what
            shutil.rmtree(self.scratch / "out")
        assert sorted(path.name for path in self.scratch.iterdir()) == ["bcq", "source"], what
        assert refused is None or refused.finding.place, what
        assert refused is None or refused.exit_code in (3, 4, 5, 6), (what, refused)
        return 0 if refused is None else refused.exit_code

    def commands(self, value: Any) -> set[int]:
        """The exit codes of both verbs with this record."""
        (self.bcq / RECORD).write_bytes(canonical(value))
        verbs = [["restore", str(self.bcq), str(self.scratch / "out")], ["verify", str(self.source), str(self.bcq)]]
        try:
            results = [CliRunner().invoke(cli, words) for words in verbs]
        finally:
            (self.bcq / RECORD).write_bytes(self.raw)
        assert all("error: BCQ-" in result.stderr and "E999" not in result.stderr for result in results)
        assert sorted(path.name for path in self.scratch.iterdir()) == ["bcq", "source"]
        return {result.exit_code for result in results}


@pytest.fixture(autouse=True)
def _known_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking for installed layouts takes longer than all the rest."""
    monkeypatch.setattr(source_rebuilder, "rebuilders", lambda: KNOWN)


# one of so many, spread over all; every one in `make soak`
shares = pytest.mark.parametrize("share", [13, pytest.param(1, marks=pytest.mark.soak)])


@pytest.fixture(scope="module", params=SOURCES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Folder:
    scratch = tmp_path_factory.mktemp("records")
    source = layout_source(request.param, scratch / "source")
    convert(source, scratch / "bcq")
    proved(source, scratch / "bcq", scratch)
    return Folder(source, scratch / "bcq", scratch)


def test_every_rule_occurs(tmp_path: Path) -> None:
    seen = {"part"}
    for name in SOURCES:
        convert(layout_source(name, tmp_path / "s"), tmp_path / "b")
        seen |= {rule["rule"] for rule in json.loads((tmp_path / "b" / RECORD).read_text())["rules"]}
        shutil.rmtree(tmp_path / "s")
        shutil.rmtree(tmp_path / "b")
    assert seen >= rebuilders().keys() | {"part", "copy"}


@shares
def test_every_parameter_of_every_rule(folder: Folder, share: int) -> None:
    """Another type, another value, missing, or one that the rule does not have."""
    cases = [
        (i, key, wrong)
        for i, rule in enumerate(folder.value["rules"])
        for key in [*sorted(rule.keys() - {"rule"}), "surplus"]
        for wrong in [*WRONG, MISSING]
        if wrong is not MISSING or key in rule
    ]
    ends = []
    for i, key, wrong in cases[::share]:
        value = folder.changed(lambda record, i=i: record["rules"][i].pop(key, None))  # noqa: B023 - called here
        if wrong is not MISSING:
            value["rules"][i][key] = wrong
        ends.append(folder.ends(value, (folder.value["rules"][i], key, wrong)))
    assert ends.count(4) > 0.8 * len(ends), "what no converter writes is malformed"


@shares
def test_every_rule_in_the_place_of_every_other(folder: Folder, share: int) -> None:
    """With the parameters that it has elsewhere: for another kind of weight it is refused, or makes other bytes."""
    known, given = rebuilders(), {"bits": 4, "packing": "dense", "zero_point": "v2", "groups": 32, "part": "s0_scale"}
    given |= {"shape": [64, 4], "dtype": "I32"}
    others = [{"rule": name, **{key: given[key] for key in known[name].required}} for name in known]
    others += [{"rule": name} for name in ("copy", "raw", "made.up", "part")]
    cases = [(i, other) for i in range(len(folder.value["rules"])) for other in others]
    for i, other in cases[::share]:
        folder.ends(folder.changed(lambda record, i=i, other=other: record["rules"].__setitem__(i, other)), (i, other))


def places(value: Any) -> Iterator[tuple[str | int, ...]]:
    """The way to every value inside."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (key,)
        yield from ((key, *way) for way in places(inner))


def put(value: Any, way: tuple[str | int, ...], wrong: Any) -> None:
    for key in way[:-1]:
        value = value[key]
    value[way[-1]] = wrong


@shares
def test_every_place_of_a_record(folder: Folder, share: int) -> None:
    """Sizes, digests, kinds, positions of rules, names of weights, whole tables."""
    ways = [way for way in places(folder.value) if way[0] not in ("version", "format", "rules")]
    wrongs = (None, -1, 7, 2**53 - 1, "verbatim", "safetensors", [], [0], [0, "m.weight"], [99], {})
    for way, wrong in list(itertools.product(ways, wrongs))[::share]:
        folder.ends(folder.changed(lambda record, way=way, wrong=wrong: put(record, way, wrong)), (way, wrong))


@shares
def test_every_place_of_an_archived_header(folder: Folder, share: int) -> None:
    (path, raw), *_ = folder.headers.items()
    if raw.startswith(b"GGUF"):
        places_of = list(itertools.product(range(len(raw)), (0x01, 0x80, 0xFF)))[:: 5 * share]
        changed = [raw[:i] + bytes([raw[i] ^ flip]) + raw[i + 1 :] for i, flip in places_of]
        refused_headers(folder, path, [*changed, b"", raw[:7], raw[:-1], raw + b"\0", bytes(64)])
        return
    header = json.loads(raw[8:])
    wrongs = [None, -1, 0, 2**63, "", "F64", "I4", [], [0, 0], [2**40], [8, 0], [0, 2**53 - 1], {}, {"dtype": "U8"}]
    ways = [way for way in places(header) if way[0] != "__metadata__"]
    texts = []
    for way, wrong in list(itertools.product(ways, wrongs))[::share]:
        value = copy.deepcopy(header)
        put(value, way, wrong)
        text = json.dumps(value).encode()
        text += b" " * max(0, len(raw) - 8 - len(text))
        texts.append(struct.pack("<Q", len(text)) + text)
    texts += [b"", raw[:7], raw[:-1], raw + b"\0", raw[:8] + b"[]" + raw[10:], b"\xff" * 8 + raw[8:], bytes(64)]
    refused_headers(folder, path, texts)


def refused_headers(folder: Folder, path: Path, texts: list[bytes]) -> None:
    """None of them is taken for the archived header."""
    try:
        for text in texts:
            path.write_bytes(text)
            assert folder.restored(text) in (3, 4, 5, 6)
    finally:
        path.write_bytes(folder.headers[path])


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    scratch = tmp_path_factory.mktemp("plain")
    source = layout_source("compressed experts", scratch / "source")
    convert(source, scratch / "bcq")
    return Folder(source, scratch / "bcq", scratch)


@pytest.mark.parametrize(
    "path",
    ["a/" * 1900 + "b", "x" * 256, ("y" * 200 + "/") * 9 + "z", "config.json/x", "CONFIG.JSON", "tokenizer.JSON/a"],
)
def test_paths_that_cannot_be_written(plain: Folder, path: str) -> None:
    """Also those that Python could create and not remove again."""
    value = plain.changed(lambda record: record["files"].update({path: record["files"]["tokenizer.json"]}))
    assert plain.ends(value, path) == 5
    assert plain.commands(value) == {5}


def test_no_size_is_trusted(plain: Folder) -> None:
    """A tensor of -1s as large as the record likes: nothing of it is in the folder, so nothing bounds it."""
    (path, raw), *_ = plain.headers.items()
    header = json.loads(raw[8:])
    count = 10 * MB
    begin, end = header["m.weight_g_idx"]["data_offsets"]
    more = 4 * count - (end - begin)
    header["m.weight_g_idx"] = {"dtype": "I32", "shape": [count], "data_offsets": [begin, begin + 4 * count]}
    for name, entry in header.items():
        if name not in ("__metadata__", "m.weight_g_idx") and entry["data_offsets"][0] >= end:
            entry["data_offsets"] = [offset + more for offset in entry["data_offsets"]]
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text)

    def change(record: Any) -> None:
        rule = next(rule for rule in record["rules"] if rule["rule"] == "compressed.g_idx")
        rule["shape"] = [count]
        record["files"]["model.safetensors"]["size"] += more + len(text) + 8 - len(raw)

    try:
        assert peak(lambda: plain.ends(plain.changed(change), "large")) < 4 * MB
        assert plain.commands(plain.changed(change)) == {4}
    finally:
        path.write_bytes(raw)


@pytest.mark.parametrize("left_out", [{"a": "pickle"}, {"a": None, "b\n": [1]}, [], 7, "x", {"\x1b[31m": "\x1b[0m"}])
def test_what_was_left_out_can_be_anything(plain: Folder, left_out: Any) -> None:
    value = plain.changed(lambda record: record.update(ignorable={"left_out": left_out}))
    (plain.bcq / RECORD).write_bytes(canonical(value))
    try:
        result = CliRunner().invoke(cli, ["restore", str(plain.bcq), str(plain.scratch / "out")])
        assert result.exit_code == 0, result.output
        assert "\x1b" not in result.output
        assert ("left out" in result.output) == (isinstance(left_out, dict))
    finally:
        (plain.bcq / RECORD).write_bytes(plain.raw)
        shutil.rmtree(plain.scratch / "out", ignore_errors=True)


def test_a_rule_that_gives_another_size_is_refused_as_a_rule(plain: Folder) -> None:
    """Legal for the weight, but made for another of its tensors: the record is wrong, not the data."""

    def exchange(record: Any) -> None:
        for tensors in record["tensors"].values():
            packed, scale = (next(n for n in tensors if n.endswith(end)) for end in ("weight_packed", "weight_scale"))
            tensors[packed][0] = tensors[scale][0]

    assert plain.ends(plain.changed(exchange), "exchanged") == 4


def test_an_archived_file_that_is_missing_is_named_as_validate_names_it(plain: Folder) -> None:
    for place in sorted((plain.bcq / "bcq_source").rglob("*.*")):
        if not place.is_file() or place.name in ("source.json", "raw.safetensors"):
            continue
        data = place.read_bytes()
        place.unlink()
        with bcqfmt.open(plain.bcq) as checkpoint, pytest.raises(BcqError) as caught:
            restore(checkpoint, plain.scratch / "out")
        place.write_bytes(data)
        assert caught.value.code == "BCQ-V702", place
        assert not (plain.scratch / "out").exists()
