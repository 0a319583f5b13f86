"""Rows 26 to 37: folders, their index and config.json, and files that change underneath."""

from __future__ import annotations

import os
import shutil
import socket
from pathlib import Path
from typing import Any

from bad_files.by_hand import (
    CONFIG,
    INDEX,
    MANIFEST,
    SINGLE,
    add_tensor,
    example,
    folder,
    frame,
    place,
    read_json,
    seal,
    sparse,
    split,
    write_json,
)
from bad_files.case import case, legal

NO_OTHERS = "the reader opens only model files and the manifest"
NO_CONFIG = "the reader has no need of config.json"
FILES_RULE = "every tensor is in one file, and the reader finds it by the files' own headers"


def reindex(target: Path, change: Any) -> Path:
    """Edit the index, and make the manifest agree."""
    index = read_json(target / INDEX)
    change(index)
    write_json(target / INDEX, index)
    return seal(target)


def shard(target: Path, number: int) -> Path:
    return sorted(target.glob("model-*.safetensors"))[number]


# -- rows 26 to 28: paths that lead out -------------------------------------------------------------------------

OUTSIDE = {
    "up": "../../outside.safetensors",
    "up-inside": "../checkpoint/model-00001-of-00003.safetensors",
    "absolute": "/etc/outside.safetensors",
    "drive": "C:\\outside.safetensors",
    "url": "https://example.org/outside.safetensors",
    "backslash": "..\\outside.safetensors",
    "subfolder": "sub/model.safetensors",
    "hidden": ".model.safetensors",
    "option": "-rf.safetensors",
    "not-safetensors": "model.bin",
    "empty": "",
    "nul": "model.safetensors\0.safetensors",
    "newline": "model.safetensors\n",
}


def _outside(row: int, id: str, name: str) -> None:
    @case(row, id, "BCQ-V502", 4, place=INDEX)
    def make(where: Path) -> Path:
        place(where, frame(*example()), "outside.safetensors")
        target = folder(where / "deeper", shards=True)
        return reindex(target, lambda index: index["weight_map"].update(extra=name))


for _id, _name in OUTSIDE.items():
    _outside(26, _id, _name)
_outside(27, "hub-request", "../../resolve/main/outside.safetensors")


@case(28, "shard", "BCQ-V507", 4, place="model-00002-of-")
def link_out(where: Path) -> Path:
    target = folder(where, shards=True)
    outside = where / "outside.safetensors"
    name = shard(target, 1).name
    (target / name).rename(outside)
    (target / name).symlink_to(outside)
    return target


@case(28, "single", "BCQ-V507", 4)
def single_link_out(where: Path) -> Path:
    target = folder(where)
    (target / SINGLE).rename(where / "outside.safetensors")
    (target / SINGLE).symlink_to("../outside.safetensors")
    return target


@case(28, "config", "BCQ-V507", 4, place=CONFIG, seen="validator", why=NO_CONFIG)
def config_link_out(where: Path) -> Path:
    target = folder(where)
    (target / CONFIG).rename(where / "outside.json")
    (target / CONFIG).symlink_to("../outside.json")
    return target


@case(28, "manifest", "BCQ-V507", 4, place=MANIFEST)
def manifest_link_out(where: Path) -> Path:
    target = folder(where)
    (target / MANIFEST).rename(where / "outside.json")
    (target / MANIFEST).symlink_to("../outside.json")
    return target


@case(28, "index", "BCQ-V507", 4, place=INDEX)
def index_link_out(where: Path) -> Path:
    target = folder(where, shards=True)
    (target / INDEX).rename(where / "outside.json")
    (target / INDEX).symlink_to("../outside.json")
    return target


@case(28, "side-file", "BCQ-V507", 4, place="LICENSE", seen="validator", why=NO_OTHERS)
def side_file_link_out(where: Path) -> Path:
    target = folder(where)
    (target / "LICENSE").write_text("free\n")
    seal(target)
    (target / "LICENSE").rename(where / "outside.txt")
    (target / "LICENSE").symlink_to("../outside.txt")
    return target


@case(28, "to-itself", "BCQ-V503", 3, place="checkpoint", also=("BCQ-V507",))
def link_to_itself(where: Path) -> Path:
    target = folder(where)
    (target / SINGLE).unlink()
    (target / SINGLE).symlink_to(SINGLE)
    return target


def _hub_cache(where: Path) -> Path:
    entry = where / "models--someone--tiny"
    plain = folder(where, name="plain")
    snapshot, blobs = entry / "snapshots" / "0123abc", entry / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, file in enumerate(sorted(plain.iterdir())):
        file.rename(blobs / f"blob{number}")
        (snapshot / file.name).symlink_to(f"../../blobs/blob{number}")
    plain.rmdir()
    return snapshot


@legal(28, "hub-cache")
def hub_cache(where: Path) -> Path:
    """The one link that may leave the folder: from a snapshot to the blobs of the same cache entry."""
    return _hub_cache(where)


@case(28, "another-hub-entry", "BCQ-V507", 4)
def another_hub_entry(where: Path) -> Path:
    snapshot = _hub_cache(where)
    other = where / "models--someone--else" / "blobs"
    other.mkdir(parents=True)
    (snapshot / SINGLE).resolve().rename(other / "blob")
    (snapshot / SINGLE).unlink()
    (snapshot / SINGLE).symlink_to("../../../models--someone--else/blobs/blob")
    return snapshot


# -- row 29: not a regular file ---------------------------------------------------------------------------------


@case(29, "pipe", "BCQ-V508", 3)
def pipe(where: Path) -> Path:
    os.mkfifo(where / SINGLE)
    return where / SINGLE


@case(29, "pipe-in-folder", "BCQ-V508", 3, also=("BCQ-V604",))
def pipe_in_folder(where: Path) -> Path:
    target = folder(where)
    (target / SINGLE).unlink()
    os.mkfifo(target / SINGLE)
    return target


@case(29, "config-pipe", "BCQ-V508", 3, place=CONFIG, also=("BCQ-V604",), seen="validator", why=NO_CONFIG)
def config_pipe(where: Path) -> Path:
    target = folder(where)
    (target / CONFIG).unlink()
    os.mkfifo(target / CONFIG)
    return target


@case(29, "manifest-pipe", "BCQ-V508", 3, place=MANIFEST)
def manifest_pipe(where: Path) -> Path:
    target = folder(where)
    (target / MANIFEST).unlink()
    os.mkfifo(target / MANIFEST)
    return target


@case(29, "side-pipe", "BCQ-V604", 4, place="pipe", seen="validator", why=NO_OTHERS)
def side_pipe(where: Path) -> Path:
    target = folder(where)
    (target / "pipe").write_bytes(b"")
    seal(target)
    (target / "pipe").unlink()
    os.mkfifo(target / "pipe")
    return target


@legal(29, "side-pipe-not-named")
def side_pipe_not_named(where: Path) -> Path:
    """A pipe is no file of the folder; it is not opened either."""
    target = folder(where)
    os.mkfifo(target / "pipe")
    return target


@case(29, "device", "BCQ-V508", 3, place="zero")
def device(where: Path) -> Path:
    return Path("/dev/zero")


@case(29, "folder", "BCQ-V508", 3, also=("BCQ-V604",))
def folder_for_file(where: Path) -> Path:
    target = folder(where)
    (target / SINGLE).unlink()
    (target / SINGLE).mkdir()
    return target


@case(29, "socket", "BCQ-V508", 3)
def unix_socket(where: Path) -> Path:
    bound = socket.socket(socket.AF_UNIX)
    descriptor = os.open(where, os.O_RDONLY)
    try:
        bound.bind(f"/proc/self/fd/{descriptor}/{SINGLE}")  # a socket's path has 107 bytes at most
    finally:
        os.close(descriptor)
        bound.close()
    return where / SINGLE


# -- rows 30 to 34: the index -----------------------------------------------------------------------------------


@case(30, "missing-shard", "BCQ-V503", 3, place=INDEX, also=("BCQ-V604",))
def missing_shard(where: Path) -> Path:
    target = folder(where, shards=True)
    shard(target, 1).unlink()
    return target


@case(30, "all-missing", "BCQ-V503", 3, place=INDEX, also=("BCQ-V604",))
def all_missing(where: Path) -> Path:
    target = folder(where, shards=True)
    for file in target.glob("model-*"):
        file.unlink()
    return target


@case(30, "link-to-nothing", "BCQ-V503", 3, place=INDEX, also=("BCQ-V604", "BCQ-E101"))
def link_to_nothing(where: Path) -> Path:
    """A download that stopped: the snapshot's link is there, the blob is not."""
    target = folder(where, shards=True)
    path = shard(target, 1)
    path.unlink()
    path.symlink_to("blob-that-never-came")
    return target


@case(31, "index-leaves-out", "BCQ-V504", 4, place=INDEX, seen="validator", why=FILES_RULE)
def index_leaves_out(where: Path) -> Path:
    target = folder(where, shards=True)
    add_tensor(shard(target, 0), "forgotten")
    return seal(target)


@case(31, "index-invents", "BCQ-V504", 4, place=INDEX, seen="validator", why=FILES_RULE)
def index_invents(where: Path) -> Path:
    target = folder(where, shards=True)
    return reindex(target, lambda index: index["weight_map"].update(invented=shard(target, 0).name))


@case(31, "index-swaps", "BCQ-V504", 4, place=INDEX, seen="validator", why=FILES_RULE)
def index_swaps(where: Path) -> Path:
    target = folder(where, shards=True)
    files = sorted(file.name for file in target.glob("model-*"))

    def change(index: Any) -> None:
        moved = next(name for name, file in index["weight_map"].items() if file == files[0])
        index["weight_map"][moved] = files[1]

    return reindex(target, change)


@case(32, "dense-twice", "BCQ-V505", 4, place="model-00002-of-")
def dense_twice(where: Path) -> Path:
    target = folder(where, shards=True)
    add_tensor(shard(target, 0), "twice", b"this")
    add_tensor(shard(target, 1), "twice", b"that")
    return reindex(target, lambda index: index["weight_map"].update(twice=shard(target, 0).name))


@case(32, "weight-twice", "BCQ-V505", 4, place="model-00004-of-", also=("BCQ-V214", "BCQ-V608"))
def weight_twice(where: Path) -> Path:
    target = folder(where, shards=True)
    holder = next(file for file in sorted(target.glob("model-*")) if ".bcq_" in str(split(file)[0].keys()))
    shutil.copy(holder, target / "model-00004-of-00003.safetensors")

    def change(index: Any) -> None:
        last = next(reversed([name for name, file in index["weight_map"].items() if file == holder.name]))
        index["weight_map"][last] = "model-00004-of-00003.safetensors"

    return reindex(target, change)


@case(33, "file-and-index", "BCQ-V506", 2, place="checkpoint")
def file_and_index(where: Path) -> Path:
    target = folder(where, shards=True)
    place(target, frame(*example()))
    return seal(target)


def _index(id: str, text: str | bytes) -> None:
    @case(34, id, "BCQ-V501", 4, place=INDEX)
    def make(where: Path) -> Path:
        target = folder(where, shards=True)
        (target / INDEX).write_bytes(text if isinstance(text, bytes) else text.encode())
        return seal(target)


_index("no-metadata", '{"weight_map": {"a": "model-00001-of-00003.safetensors"}}')
_index("no-weight-map", '{"metadata": {"total_size": 1}}')
_index("array", "[]")
_index("not-json", "model-00001-of-00003.safetensors\n")
_index("empty", "")
_index("not-utf-8", b'{"metadata": {}, "weight_map": {"\xff": "a"}}')
_index("numbers-for-names", '{"metadata": {}, "weight_map": {"a": 1}}')
_index("map-is-a-list", '{"metadata": {}, "weight_map": ["a"]}')
_index("metadata-is-null", '{"metadata": null, "weight_map": {}}')
_index("key-twice", '{"metadata": {}, "weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}')
_index("deep", '{"metadata": {}, "weight_map": ' + "[" * 100_000 + "]" * 100_000 + "}")


@case(34, "two-gigabytes", "BCQ-V501", 4, place=INDEX, also=("BCQ-V605",))
def huge_index(where: Path) -> Path:
    target = folder(where, shards=True)
    sparse(target / INDEX, 2 << 30, b"{")
    return target


# -- rows 35 and 36: config.json, pickles -----------------------------------------------------------------------


@case(35, "missing", "BCQ-V510", 3, place=CONFIG, seen="validator", why=NO_CONFIG)
def config_missing(where: Path) -> Path:
    target = folder(where)
    (target / CONFIG).unlink()
    return seal(target)


def _config(id: str, text: bytes) -> None:
    @case(35, id, "BCQ-V511", 4, place=CONFIG, seen="validator", why=NO_CONFIG)
    def make(where: Path) -> Path:
        target = folder(where)
        (target / CONFIG).write_bytes(text)
        return seal(target)


_config("not-json", b"vocab_size = 4\n")
_config("empty", b"")
_config("array", b"[]\n")
_config("key-twice", b'{"vocab_size": 4, "vocab_size": 5}')
_config("not-utf-8", b'{"note": "\xff"}')
_config("deep", b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}")


@case(35, "two-gigabytes", "BCQ-V511", 4, place=CONFIG, also=("BCQ-V605",), seen="validator", why=NO_CONFIG)
def huge_config(where: Path) -> Path:
    target = folder(where)
    sparse(target / CONFIG, 2 << 30, b'{"a": "')
    return target


@case(36, "pickle-only", "BCQ-E105", 5, place="checkpoint")
def pickle_only(where: Path) -> Path:
    target = where / "checkpoint"
    target.mkdir()
    (target / "pytorch_model.bin").write_bytes(b"\x80\x04N.")
    (target / CONFIG).write_text("{}\n")
    return target


@case(36, "nothing", "BCQ-E104", 3, place="checkpoint")
def nothing(where: Path) -> Path:
    target = where / "checkpoint"
    target.mkdir()
    (target / CONFIG).write_text("{}\n")
    return target


@case(36, "unfinished", "BCQ-V601", 4, place="checkpoint")
def unfinished(where: Path) -> Path:
    target = folder(where)
    (target / MANIFEST).unlink()
    return target


# -- row 37: the file changes while it is read ------------------------------------------------------------------

HEADER_ONLY = "what only looks at the header is done before the change"


def _changing(what: str, looks: int) -> None:
    seen, why = ("headers", "") if looks < 3 else ("values", HEADER_ONLY)

    @case(37, f"{what}-after-look-{looks}", "BCQ-E103", 3, disturb=(what, looks), seen=seen, why=why)
    def make(where: Path) -> Path:
        return place(where, frame(*example()))


for _looks in (1, 2, 3):
    for _what in ("shrinks", "grows", "emptied", "touched"):
        _changing(_what, _looks)


@case(37, "replaced", "", 0, place="", disturb=("replaced", 1))
def replaced(where: Path) -> Path:
    """A new file takes the name: what is open stays the old one, whole and consistent."""
    return place(where, frame(*example()))


@case(37, "removed", "BCQ-E103", 3, disturb=("removed", 3), seen="validator", why="what is open stays readable")
def removed(where: Path) -> Path:
    return place(where, frame(*example()))
