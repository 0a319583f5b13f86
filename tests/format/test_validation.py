"""Validation: every finding, in order, fast and deep; every flipped bit; any bytes at all."""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import bcqfmt
from bcqfmt import BcqError, BcqWeight
from bcqfmt.codes import CODES
from bcqfmt.weight import checks
from weights import oracle, samples
from weights.strategies import examples, tensor


def codes(path: Path, deep: bool = True) -> list[str]:
    return [finding.code for finding in bcqfmt.validate(path, deep=deep).errors]


def folder_of(tmp_path: Path, **options: Any) -> Path:
    bcqfmt.save(tmp_path / "model", samples.tensors(), config=samples.CONFIG, files=samples.SIDE, **options)
    return tmp_path / "model"


# -- all findings ----------------------------------------------------------------------------------------------


def broken_file() -> bytes:
    """Three weights, each with another fault in its numbers, and a dense name that a part would have."""
    segment = {"encoding": "affine", "bits": 2, "group_size": 8, "scale": "F16", "zero": 1}
    stored = {**segment, "zero": {"bits": 3}}

    def weight(scheme: dict[str, Any], words: list[int], scale: int, zeros: list[int] | None = None) -> oracle.Plain:
        parts: dict[str, oracle.Raw] = {
            "s0_planes": ("I32", [2, 1, 1], words),
            "s0_scale": ("F16", [1, 2], [scale, 0x3C00]),
        }
        if zeros is not None:
            parts["s0_zero"] = ("I32", [1, 1], oracle.pack(zeros, 3))
        return oracle.Plain([1, 16], "F16", {"segments": [scheme]}, [16], parts)

    return oracle.file_bytes(
        {
            "padding.weight": weight(segment, [0x10000, 0], 0x3C00),
            "infinite.weight": weight(segment, [0, 0], 0x7C00),
            "zeros.weight": weight(stored, [0, 0], 0x3C00, [5, 1]),
        },
        {"x.bcq_s0_planes": ("U8", [1], b"a")},
    )


def test_three_faults_are_three_findings(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(broken_file())
    report = bcqfmt.validate(path, deep=True)
    found = [(f.code, f.tensor) for f in report.errors]
    assert found == [
        ("BCQ-V302", "x.bcq_s0_planes"),
        ("BCQ-V401", "padding.bcq_s0_planes"),
        ("BCQ-V404", "zeros.bcq_s0_zero"),
        ("BCQ-V405", "infinite.bcq_s0_scale"),
    ]
    assert not report.valid
    assert report.exit_code == 4
    assert codes(path, deep=False) == ["BCQ-V302"]


def test_one_weight_with_several_faults(tmp_path: Path) -> None:
    """Nothing stops at the first fault of a weight either, where the others can still be seen."""
    segment = {"encoding": "affine", "bits": 1, "group_size": 8, "scale": "F16", "zero": {"bits": 2}}
    scheme = {"segments": [segment], "perm": True, "outliers": {"mode": "add", "dtype": "F16", "segments": [0]}}
    parts: dict[str, oracle.Raw] = {
        "s0_planes": ("I32", [1, 1, 1], [0xFFFFFFFF]),
        "s0_scale": ("F16", [1, 2], [0x7C00, 0]),
        "s0_zero": ("I32", [1, 1], oracle.pack([3, 0], 2)),
        "perm": ("I32", [16], [0] * 16),
        "outlier_indptr": ("I32", [2], [0, 5]),
        "outlier_indices": ("U16", [1], [99]),
        "outlier_values": ("F16", [1], [0x7E00]),
    }
    path = tmp_path / "a.safetensors"
    path.write_bytes(oracle.file_bytes({"w.weight": oracle.Plain([1, 16], "F16", scheme, [16], parts)}))
    found = set(codes(path))
    assert found >= {"BCQ-V401", "BCQ-V404", "BCQ-V405", "BCQ-V406", "BCQ-V407"}


def test_faults_of_a_folder_are_all_there(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, max_shard_size=1500)
    shards = sorted(folder.glob("*.safetensors"))
    raw = bytearray(shards[0].read_bytes())
    raw[-1] ^= 1
    shards[0].write_bytes(bytes(raw))  # V606
    with shards[1].open("ab") as file:
        file.write(b"x")  # V115, V605
    (folder / "tokenizer.json").unlink()  # V604
    (folder / "config.json").write_text("{}")  # V512, V605
    report = bcqfmt.validate(folder, deep=True)
    found = {(f.code, f.file) for f in report.errors}
    assert {
        ("BCQ-V606", shards[0].name),
        ("BCQ-V115", shards[1].name),
        ("BCQ-V605", shards[1].name),
        ("BCQ-V604", "tokenizer.json"),
        ("BCQ-V512", "config.json"),
        ("BCQ-V605", "config.json"),
    } <= found
    numbers = [int(f.code[5:]) for f in report.errors]
    assert numbers == sorted(numbers)
    shallow = {(f.code, f.file) for f in bcqfmt.validate(folder).errors}
    assert shallow == {pair for pair in found if pair[0] != "BCQ-V606"}


def test_one_shard_of_several_is_no_model(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, max_shard_size=1500)
    (folder / "model.safetensors.index.json").unlink()
    for shard in sorted(folder.glob("*.safetensors"))[1:]:
        shard.unlink()
    report = bcqfmt.validate(folder)
    assert (report.exit_code, report.errors[0].code) == (3, "BCQ-V503")
    assert report.errors[0].found == "neither model.safetensors nor model.safetensors.index.json"


@pytest.mark.parametrize("finished", [True, False])
def test_an_index_that_names_no_file(finished: bool, tmp_path: Path) -> None:
    folder = folder_of(tmp_path, max_shard_size=1500)
    (folder / "model.safetensors.index.json").write_text('{"metadata": {}, "weight_map": {}}')
    if not finished:
        (folder / "bcq_manifest.json").unlink()
        for shard in folder.glob("*.safetensors"):
            shard.unlink()
    finding = bcqfmt.validate(folder).errors[0]
    assert (finding.code, finding.found) == ("BCQ-V503", "weight_map is empty: it names no model file")
    assert finished or codes(folder) == ["BCQ-V503"]
    with pytest.raises(BcqError) as caught:
        bcqfmt.open(folder)
    assert caught.value.finding == finding


def test_a_key_that_stands_twice_is_named(tmp_path: Path) -> None:
    folder, twice = folder_of(tmp_path, max_shard_size=1500), '{"metadata": {}, "weight\\u001b": 1, "weight\\u001b": 2}'
    for name in ("config.json", "model.safetensors.index.json", "bcq_manifest.json"):
        (folder / name).write_text(twice)
    found = {finding.file: finding.found for finding in bcqfmt.validate(folder).errors if "twice" in finding.found}
    names = {"config.json", "model.safetensors.index.json", "bcq_manifest.json"}
    assert found == dict.fromkeys(names, r"the key 'weight\x1b' stands twice")


@pytest.mark.parametrize(
    ("manifest", "found"),
    [("{}", "no version"), ('{"version": 1}', "no version that is a text"), ('{"version": "2.0"}', "version 2.0")],
)
def test_a_manifest_without_a_version_is_not_called_newer(tmp_path: Path, manifest: str, found: str) -> None:
    folder = folder_of(tmp_path)
    (folder / "bcq_manifest.json").write_text(manifest)
    finding = bcqfmt.validate(folder).errors[0]
    assert (finding.code, finding.found) == ("BCQ-V205", found)  # spec section 9.3: whatever is wrong with a version
    assert "a file without one is damaged" in CODES[finding.code].hint


def test_errors_come_before_warnings_and_notes(tmp_path: Path) -> None:
    odd = BcqWeight.from_affine(
        np.zeros((1, 8), int), np.array([[np.inf]], np.float16), 0, group_size=8
    ).allow_nonfinite()
    bcqfmt.save(tmp_path / "a.safetensors", {"w.weight": odd})
    report = bcqfmt.validate(tmp_path / "a.safetensors", deep=True)
    assert [f.code for f in report.findings] == ["BCQ-E503", "BCQ-E501"]
    header, data = oracle.split((tmp_path / "a.safetensors").read_bytes())
    header["__metadata__"]["format"] = "np"
    (tmp_path / "a.safetensors").write_bytes(oracle.framed(oracle.canonical(header).encode(), data))
    report = bcqfmt.validate(tmp_path / "a.safetensors", deep=True)
    assert [f.code for f in report.findings][:2] == ["BCQ-V202", "BCQ-E503"]
    kinds = [CODES[f.code].severity for f in report.findings]
    assert kinds == sorted(kinds, key=["error", "warning", "note"].index)


def test_a_lone_file_says_that_nothing_covers_its_content(tmp_path: Path) -> None:
    bcqfmt.save(tmp_path / "a.safetensors", samples.tensors())
    for deep in (False, True):
        report = bcqfmt.validate(tmp_path / "a.safetensors", deep=deep)
        assert [f.code for f in report.findings] == ["BCQ-E501"]
        assert report.valid
        assert report.exit_code == 0
    report = bcqfmt.validate(folder_of(tmp_path), deep=True)
    assert [(f.code, f.file) for f in report.findings] == [("BCQ-E504", "docs/card.md")]


def test_the_report_as_data(tmp_path: Path) -> None:
    report = bcqfmt.validate(folder_of(tmp_path), deep=True)
    data = json.loads(json.dumps(report.as_dict()))
    assert data["valid"] is True
    assert [(f["code"], f["severity"], f["file"]) for f in data["findings"]] == [("BCQ-E504", "note", "docs/card.md")]
    assert data["weights"] == sum(isinstance(t, BcqWeight) for t in samples.tensors().values()) == report.weights
    path = tmp_path / "a.safetensors"
    path.write_bytes(broken_file())
    data = json.loads(json.dumps(bcqfmt.validate(path, deep=True).as_dict()))
    assert [f["code"] for f in data["findings"]][:2] == ["BCQ-V302", "BCQ-V401"]
    assert set(data["findings"][0]) >= {"code", "severity", "title", "file", "tensor", "found", "expected", "hint"}


def test_fast_validation_reads_headers_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bcqfmt.save(tmp_path / "m", {"w.weight": samples.affine(256, 4096)})
    read = [0]
    real = os.preadv

    def counted(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        got = real(descriptor, buffers, offset)
        read[0] += got
        return got

    monkeypatch.setattr(os, "preadv", counted)
    assert bcqfmt.validate(tmp_path / "m").valid
    assert read[0] < 10_000
    assert (tmp_path / "m" / "model.safetensors").stat().st_size > 500_000


@pytest.mark.parametrize("rows", [1, 3, 10, 100])
@pytest.mark.parametrize("stack", [False, True])
def test_content_is_checked_block_by_block(monkeypatch: pytest.MonkeyPatch, rows: int, stack: bool) -> None:
    """Large parts are looked at in pieces; the last row of the last piece counts like the first."""
    monkeypatch.setattr(checks, "_ROWS", rows)
    lead = (2,) if stack else ()
    bits = np.random.default_rng(0).integers(0, 2, (*lead, 3, 5, 40))
    alpha = np.ones((*lead, 3, 5, 5), np.float32)
    clean = BcqWeight.from_bcq(bits, alpha, group_size=8)
    clean.check()
    for index in ((*((0,) if stack else ()), 0, 0, 0), (*((1,) if stack else ()), 2, 4, 4)):
        bad = alpha.copy()
        bad[index] = np.nan
        with pytest.raises(BcqError) as caught:
            BcqWeight.from_bcq(bits, bad, group_size=8).check()
        assert caught.value.code == "BCQ-V405"
        assert "x".join(map(str, index)) in caught.value.finding.found
        words = clean.parts()["s0_planes"].array().view(np.uint32).copy()
        words[(*index[:-1], -1)] |= np.uint32(1 << 31)
        parts = {**clean.parts(), "s0_planes": bcqfmt.StoredTensor.from_array("x", words, "I32")}
        with pytest.raises(BcqError) as caught:
            BcqWeight("", clean.spec, parts).check()
        assert caught.value.code == "BCQ-V401"


# -- truncation ------------------------------------------------------------------------------------------------


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    raw = (samples.VECTORS / "valid" / "worked-example.safetensors").read_bytes()
    path = tmp_path / "a.safetensors"
    for size in range(len(raw)):
        path.write_bytes(raw[:size])
        report = bcqfmt.validate(path, deep=True)
        assert not report.valid, size
        with pytest.raises(BcqError) as caught:
            bcqfmt.open(path)
        assert caught.value.code == report.errors[0].code
        assert caught.value.exit_code == 4
    path.write_bytes(raw)
    assert bcqfmt.validate(path).valid


# -- flipped bits ----------------------------------------------------------------------------------------------

CHUNKS, FLIPS = 2, 250


def provenance_folder(target: Path) -> Path:
    """The vector with provenance; it has every kind of file that a folder can have."""
    source = samples.VECTORS / "valid" / "folder-provenance"
    shutil.copytree(source, target)
    assert (target / "bcq_source" / "source.json").exists()
    return target


@pytest.mark.parametrize("chunk", range(CHUNKS))
@pytest.mark.parametrize("kind", ["vector", "saved"])
def test_every_flipped_bit_is_found(tmp_path: Path, chunk: int, kind: str) -> None:
    """500 flips over all files of the vector and 500 of a sharded folder, spread evenly; 10,000 in the soak."""
    if kind == "vector":
        folder = provenance_folder(tmp_path / "m")
    else:
        folder = tmp_path / "m"
        tensors = {"a.weight": samples.affine(2, 32), "b.weight": samples.rich(2), "c": np.arange(5, dtype=np.int16)}
        bcqfmt.save(folder, tensors, config={"a": 1.5}, files={"side/x.txt": b"side"}, max_shard_size=300)
        assert len(list(folder.glob("*.safetensors"))) == 3
    assert not bcqfmt.validate(folder, deep=True).findings
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    sizes = [path.stat().st_size for path in files]
    rng = random.Random(1000 + chunk)
    missed = []
    picks = rng.choices(range(len(files)), [size + 40 for size in sizes], k=FLIPS)
    for pick in picks:
        path, size = files[pick], sizes[pick]
        if not size:
            continue
        at, bit = rng.randrange(size), rng.randrange(8)
        with path.open("r+b") as file:
            file.seek(at)
            old = file.read(1)
            file.seek(at)
            file.write(bytes([old[0] ^ 1 << bit]))
        if bcqfmt.validate(folder, deep=True).valid:
            missed.append((path.name, at, bit))
        with path.open("r+b") as file:
            file.seek(at)
            file.write(old)
    assert not missed
    assert not bcqfmt.validate(folder, deep=True).findings


# -- any bytes -------------------------------------------------------------------------------------------------


def small_vectors() -> list[Path]:
    files = (samples.VECTORS / "valid").glob("*.safetensors")
    return sorted(path for path in files if path.stat().st_size < 30_000)


def look(path: Path) -> None:
    """Validate and read; only errors of ours may come out."""
    report = bcqfmt.validate(path, deep=True)
    assert all(f.code in CODES and f.code != "BCQ-E999" for f in report.findings)
    json.dumps(report.as_dict())
    try:
        with bcqfmt.open(path) as checkpoint:
            for _, weight in checkpoint.weights():
                weight.planes(first=1)
                weight.dequantize()
            for _, dense in checkpoint.dense():
                dense.array()
    except BcqError:
        pass
    else:
        if report.valid:
            return
    # what the reader refuses the validator refuses too
    assert report.errors


@given(st.data())
@examples(80)
def test_files_with_changed_bytes(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    raw = bytearray(data.draw(st.sampled_from(small_vectors())).read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        header = 8 + int.from_bytes(raw[:8], "little")
        top = data.draw(st.sampled_from((8, min(header, len(raw)), len(raw))))
        at = data.draw(st.integers(0, max(0, top - 1)))
        what = data.draw(st.sampled_from(("flip", "set", "delete", "insert", "cut")))
        if what == "flip":
            raw[at] ^= 1 << data.draw(st.integers(0, 7))
        elif what == "set":
            raw[at] = data.draw(st.sampled_from(b'\0\xff"{}[]:,09-\\u '))
        elif what == "delete":
            del raw[at : at + data.draw(st.integers(1, 9))]
        elif what == "insert":
            raw[at:at] = data.draw(st.binary(max_size=9))
        else:
            del raw[at + 8 :]
        if len(raw) < 8:
            break
    path = tmp_path_factory.mktemp("fuzz") / "a.safetensors"
    path.write_bytes(bytes(raw))
    look(path)


ODD: list[Any] = [
    None,
    True,
    False,
    0,
    1,
    -1,
    2,
    8,
    9,
    16,
    17,
    2**31 - 1,
    2**31,
    2**40,
    2**53 - 1,
    2**53,
    2**64,
    10**30,
    1.5,
    "",
    "F16",
    "F64",
    "packed",
    "affine",
    "bcq",
    "aligned64",
    "1.0",
    "1.1",
    "2.0",
    "\ud800",
    "\0",
    "../x",
    "x" * 600,
    [],
    [0],
    [1, 1],
    [0] * 20,
    {},
    {"bits": 1},
    {"bits": 0},
    {"a": {"a": {"a": {}}}},
]


def nodes(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of all values inside a JSON value."""
    found = [path]
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        found += nodes(inner, (*path, key))
    return found


def mutate(data: st.DataObject, value: Any) -> Any:
    """A JSON value with one of its inner values exchanged, removed or doubled."""
    value = json.loads(json.dumps(value))
    places = [path for path in nodes(value) if path] if isinstance(value, dict | list) else []
    if not places:
        return data.draw(st.sampled_from(ODD))
    *outer, key = data.draw(st.sampled_from(places))
    inside = value
    for step in outer:
        inside = inside[step]
    what = data.draw(st.sampled_from(("replace", "replace", "remove", "add", "number")))
    if what == "remove":
        del inside[key]
    elif what == "add" and isinstance(inside, dict):
        inside[data.draw(st.sampled_from(("x", "scale", "zero", "widths", "perm", "layout", "file", "\u00e9")))] = (
            inside[key]
        )
    elif what == "number" and isinstance(inside[key], int):
        inside[key] += data.draw(st.sampled_from((-1, 1, 8, 32)))
    else:
        inside[key] = data.draw(st.sampled_from(ODD))
    return value


def text_of(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)


@given(st.data())
@examples(120)
def test_files_with_changed_json(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Canonical JSON with other values in it gets past the outer checks; what lies behind must hold too."""
    header, body = oracle.split(data.draw(st.sampled_from(small_vectors())).read_bytes())
    described = json.loads(header["__metadata__"]["bcqfmt"])
    inner = data.draw(st.integers(0, 2))
    for _ in range(inner):
        described = mutate(data, described)
    header["__metadata__"]["bcqfmt"] = text_of(described)
    if not inner or data.draw(st.booleans()):
        header = mutate(data, header)
    path = tmp_path_factory.mktemp("fuzz") / "a.safetensors"
    path.write_bytes(oracle.framed(text_of(header).encode(), body))
    look(path)


FOLDER_TEXTS = ["config.json", "bcq_manifest.json", "model.safetensors.index.json", "bcq_source/source.json"]


@given(st.data())
@examples(80)
def test_folders_with_changed_json(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    import hashlib

    source = samples.VECTORS / "valid" / data.draw(st.sampled_from(("folder-shards", "folder-provenance")))
    folder = tmp_path_factory.mktemp("fuzz") / "m"
    shutil.copytree(source, folder)
    name = data.draw(st.sampled_from([name for name in FOLDER_TEXTS if (folder / name).exists()]))
    value = mutate(data, json.loads((folder / name).read_text()))
    if name == "bcq_manifest.json" and isinstance(value, dict) and data.draw(st.booleans()):
        value.pop("sha256", None)
        value["sha256"] = hashlib.sha256(text_of(value).encode()).hexdigest()
    (folder / name).write_text(text_of(value) + "\n")
    look(folder)


@given(st.binary(max_size=200))
@examples(60)
def test_any_bytes_at_all(tmp_path_factory: pytest.TempPathFactory, raw: bytes) -> None:
    path = tmp_path_factory.mktemp("fuzz") / "a.safetensors"
    for content in (raw, len(raw).to_bytes(8, "little") + raw, oracle.framed(b"{" + raw, b"")):
        path.write_bytes(content)
        look(path)


@given(st.data())
@examples(100)
def test_numbers_of_any_kind_in_the_parts(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Legal structure, arbitrary words: the reader delivers or refuses, it never fails."""
    seed = data.draw(st.integers(0, 2**32 - 1))
    rng = random.Random(seed)
    weight = data.draw(st.sampled_from([samples.rich(2), samples.affine(2, 40), samples.planes(2)]))
    parts = {}
    for suffix, part in weight.parts().items():
        size = oracle.BYTES[part.dtype]
        raw = part.tobytes()
        elements = [int.from_bytes(raw[i : i + size], "little") for i in range(0, len(raw), size)]
        for _ in range(rng.choice((0, 0, 1, 3))):
            if elements:
                elements[rng.randrange(len(elements))] = rng.getrandbits(8 * size) >> rng.choice(
                    (0, 0, 16, 8 * size - 3)
                )
        parts[suffix] = tensor(suffix, (part.dtype, list(part.shape), elements))
    changed = BcqWeight("w.weight", weight.spec, parts)
    for action in (
        changed.check,
        changed.dequantize,
        changed.planes,
        changed.alpha_z,
        lambda: changed.rows(0, 1),
        lambda: changed.columns(0, 16),
    ):
        try:
            action()
        except BcqError:
            continue


def test_a_folder_that_cannot_be_listed_is_one_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not one more for each file of the manifest."""
    folder = folder_of(tmp_path)
    real = os.scandir

    def refused(path: Any) -> Any:
        if Path(path).name == "docs":
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", refused)
    assert [finding.code for finding in bcqfmt.validate(folder, deep=True).findings] == ["BCQ-E102"]
