"""Rows 21 to 25: metadata, names that attack the reader of a message, and files of other kinds."""

from __future__ import annotations

import gzip
import io
import json
import pickle
import struct
import zipfile
from pathlib import Path
from typing import Any

from bad_files.by_hand import (
    CONFIG,
    INDEX,
    MANIFEST,
    Json,
    described,
    entries,
    example,
    example_descriptor,
    example_tensors,
    folder,
    frame,
    place,
    read_json,
    seal,
    with_dense,
    write_json,
)
from bad_files.case import case, legal
from bad_files.container import changed, spelled

NO_CONFIG = "the reader has no need of config.json"
NO_OTHERS = "the reader opens only model files and the manifest"


def renamed(where: Path, name: str) -> Path:
    """The worked example with another name for its weight, ``name.weight``."""
    tensors = {key.replace("w.", f"{name}.", 1): tensor for key, tensor in example_tensors().items()}
    descriptor = example_descriptor()
    descriptor["weights"] = {f"{name}.weight": descriptor["weights"]["w.weight"]}
    return place(where, frame(*described(tensors, descriptor)))


# -- rows 21 to 24: metadata and names --------------------------------------------------------------------------


def _metadata(id: str, value: Any, *also: str) -> None:
    @case(21, id, "BCQ-V118", 4, also=also)
    def make(where: Path) -> Path:
        header, data = example()
        header["__metadata__"] = {**header["__metadata__"], "note": value} if id.startswith("value") else value
        return place(where, frame(header, data))


_metadata("value-number", 1)
_metadata("value-null", None)
_metadata("value-object", {"a": "b"})
_metadata("null", None, "BCQ-V201")
_metadata("array", [], "BCQ-V201")
_metadata("string", "pt", "BCQ-V201")

HOSTILE = {
    "escape": "a\x1b[31mred\x1b[0m",
    "title": "a\x1b]0;owned\x07",
    "newline": "a\nBCQ-V000 forged: all is well",
    "carriage-return": "a\rall is well      ",
    "bidi": "a\u202ethgir ot tfel\u202c",
    "nul": "a\0b",
    "c1": "a\x9b31m",
    "delete": "a\x7f\x08",
    "separator": "a\u2028b\u2029c",
    "tag": "a\U000e0041\ufeff",
}


def _hostile(id: str, name: str) -> None:
    @legal(22, f"dense-{id}")
    def dense(where: Path) -> Path:
        """Names of dense tensors are the source's business: carried, and shown escaped."""
        return place(where, with_dense(name))

    @case(22, f"weight-{id}", "BCQ-V213", 4)
    def weight(where: Path) -> Path:
        return renamed(where, name)


for _id, _name in HOSTILE.items():
    _hostile(_id, _name)


@case(22, "in-dtype", "BCQ-V110", 5)
def hostile_dtype(where: Path) -> Path:
    return changed(where, "w.bcq_s0_scale", dtype=HOSTILE["title"])


@case(22, "in-malformed-tensor", "BCQ-V109", 4)
def hostile_malformed(where: Path) -> Path:
    header, data = example()
    header[HOSTILE["newline"] + HOSTILE["escape"]] = 0
    return place(where, frame(header, data))


@case(22, "in-duplicate", "BCQ-V107", 4)
def hostile_duplicate(where: Path) -> Path:
    key = json.dumps(HOSTILE["escape"])
    return spelled(where, '"format":"pt"', f'"format":"pt",{key}:"",{key}:""')


@case(22, "in-version", "BCQ-V205", 5)
def hostile_version(where: Path) -> Path:
    return place(where, frame(*described(example_tensors(), {**example_descriptor(), "version": HOSTILE["escape"]})))


@case(22, "in-feature", "BCQ-V206", 5)
def hostile_feature(where: Path) -> Path:
    return place(where, frame(*described(example_tensors(), {**example_descriptor(), "features": [HOSTILE["title"]]})))


@case(22, "in-descriptor-key", "BCQ-V208", 4)
def hostile_key(where: Path) -> Path:
    return place(where, frame(*described(example_tensors(), {**example_descriptor(), HOSTILE["escape"]: 1})))


@case(22, "in-descriptor-text", "BCQ-V203", 4)
def hostile_text(where: Path) -> Path:
    return place(where, frame(*described(example_tensors(), HOSTILE["escape"])))


@case(22, "in-header-text", "BCQ-V106", 4)
def hostile_header(where: Path) -> Path:
    return spelled(where, '"format":"pt"', '"format":"\x1b[31m"')


@case(22, "in-index", "BCQ-V502", 4, place=INDEX)
def hostile_index(where: Path) -> Path:
    target = folder(where, shards=True)
    index = read_json(target / INDEX)
    index["weight_map"]["x"] = HOSTILE["escape"] + ".safetensors"
    write_json(target / INDEX, index)
    return seal(target)


@case(22, "in-manifest-path", "BCQ-V602", 4, place=MANIFEST)
def hostile_manifest(where: Path) -> Path:
    def change(manifest: Json) -> None:
        manifest["files"]["../" + HOSTILE["escape"]] = {"size": 0, "sha256": "0" * 64}

    return seal(folder(where), change)


@case(22, "in-config", "BCQ-V512", 4, place=CONFIG, seen="validator", why=NO_CONFIG)
def hostile_config(where: Path) -> Path:
    target = folder(where)
    write_json(target / CONFIG, {"quantization_config": {"quant_method": HOSTILE["escape"]}})
    return seal(target)


@case(22, "in-file-name", "BCQ-V101", 4, place="x\\x1b[31m\\n.safetensors")
def hostile_file_name(where: Path) -> Path:
    return place(where, b"", "x\x1b[31m\n.safetensors")


@case(22, "in-side-file-name", "BCQ-V604", 4, place="x\\x1b[31m", seen="validator", why=NO_OTHERS)
def hostile_side_file(where: Path) -> Path:
    target = folder(where)
    (target / "x\x1b[31m").write_bytes(b"")
    seal(target)
    (target / "x\x1b[31m").unlink()
    return target


@legal(22, "side-file-name-not-named")
def hostile_side_file_not_named(where: Path) -> Path:
    target = folder(where)
    (target / "x\x1b[31m").write_bytes(b"")
    return target


@case(22, "file-name-not-text", "BCQ-V609", 4, place="bcq_source/", also=("BCQ-V701",), seen="validator", why=NO_OTHERS)
def file_name_not_text(where: Path) -> Path:
    """A name that is no UTF-8 reaches Python as a lone surrogate, which no terminal takes."""
    target = folder(where)
    (target / "bcq_source").mkdir()
    (target / "bcq_source" / "x\udcff").write_bytes(b"")
    return target


for _id, _name in {"slash": "a/b", "dot-dot": "../../etc/passwd", "empty": "", "512-bytes": "n" * 512}.items():

    def _make(where: Path, name: str = _name) -> Path:
        return place(where, with_dense(name))

    legal(23, f"dense-{_id}")(_make)


@case(23, "10-kilobytes", "BCQ-V119", 4)
def long_name(where: Path) -> Path:
    return place(where, with_dense("n" * 10_000))


@case(23, "513-bytes-wide", "BCQ-V119", 4)
def long_wide_name(where: Path) -> Path:
    return place(where, with_dense("é" * 256 + "n"))


@case(23, "weight-dot-dot", "BCQ-V213", 4)
def weight_dot_dot(where: Path) -> Path:
    return renamed(where, "w.")


@case(24, "case", "BCQ-V120", 4)
def names_by_case(where: Path) -> Path:
    tensors = {**example_tensors(), "Norm.a": ("U8", [1], b"a"), "norm.A": ("U8", [1], b"b")}
    return place(where, frame(*described(tensors, example_descriptor())))


@case(24, "case-beside-others", "BCQ-V120", 4)
def names_by_one_letter(where: Path) -> Path:
    tensors = {**example_tensors(), "caf\u00e9A": ("U8", [1], b"a"), "caf\u00e9a": ("U8", [1], b"b")}
    return place(where, frame(*described(tensors, example_descriptor())))


# -- row 25: other kinds of files -------------------------------------------------------------------------------


def _zipped(name: str, content: bytes) -> bytes:
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as written:
        written.writestr(name, content)
    return archive.getvalue()


OTHERS = {
    "gzip": gzip.compress(frame(*example()), mtime=0),
    "zip": _zipped("archive/data.pkl", pickle.dumps({"a": 1})),
    "npz": _zipped("a.npy", b"\x93NUMPY\x01\x00" + bytes(100)),
    "npy": b"\x93NUMPY\x01\x00v\x00{'descr': '<f4', 'fortran_order': False, 'shape': (1,)}" + b" " * 60 + b"\n\0\0\0\0",
    "pickle-2": pickle.dumps({"a": list(range(100))}, protocol=2),
    "pickle-4": pickle.dumps({"a": list(range(100))}, protocol=4),
    "gguf": b"GGUF" + struct.pack("<IQQ", 3, 0, 0) + bytes(40),
}
for _id, _content in OTHERS.items():

    def _other(where: Path, content: bytes = _content) -> Path:
        return place(where, content)

    case(25, _id, "BCQ-E203", 5)(_other)


@case(25, "plain-safetensors", "BCQ-V201", 5)
def plain_safetensors(where: Path) -> Path:
    """A checkpoint that was never converted: nothing is wrong with it, it is only not ours."""
    return place(where, frame(*entries({"a": ("F32", [2], bytes(8))})))
