"""Folders that break one rule of sections 9.1 and 9.2: BCQ-V501 to BCQ-V508, V510 to V513, V214 between files."""

from collections.abc import Callable
from typing import Any

from maker.build import tensor
from maker.catalogue import Invalid
from maker.folder import INDEX, MANIFEST, Files, Folder, Shard, pretty
from maker.valid.affine import worked_example
from maker.valid.folders import SHARDS, crowded, norm, sharded, single

EXTRA = "extra.weight"


def reindexed(edit: Callable[[dict[str, Any]], Any], folder: Folder | None = None) -> Files:
    """A sharded folder with another index; everything else fits."""
    chosen = folder or sharded()

    def tamper(files: Files) -> None:
        index = chosen.index()
        edit(index)
        files[INDEX] = pretty(index)

    return chosen.build(tamper)


def reconfigured(edit: Callable[[dict[str, Any]], Any]) -> Files:
    """A folder with another config.json; everything else fits."""
    folder = single()

    def tamper(files: Files) -> None:
        config = folder.config()
        edit(config)
        files["config.json"] = pretty(config)

    return folder.build(tamper)


def replaced(path: str, data: bytes | None, folder: Folder | None = None) -> Files:
    """A folder with one file exchanged or taken away; everything else fits."""

    def tamper(files: Files) -> None:
        if data is None:
            del files[path]
        else:
            files[path] = data

    return (folder or single()).build(tamper)


def renamed(name: str) -> Folder:
    """The second shard, of dense tensors only, under another name."""
    return Folder({SHARDS[0]: Shard([worked_example()]), name: Shard([], norm())})


def shard_rules() -> list[Invalid]:
    """V501 to V506: the index and its files."""
    plain = {"wrong": "type"}
    crowd, steps = crowded(2_000_001)
    text = pretty(sharded().index()).lstrip()
    both = single()
    both.side = {INDEX: pretty(both.index())}
    double = sharded()
    double.shards[SHARDS[1]].dense = norm()

    twin = sharded()
    twin.shards[SHARDS[1]].dense = {"w.weight": tensor("F16", [2, 8], [0] * 16)}

    def first_shard(index: dict[str, Any]) -> None:
        index["weight_map"]["norm.weight"] = SHARDS[0]

    ghost = {"ghost.weight": "model-00003-of-00003.safetensors"}
    return [
        Invalid("V501", "not-json", "the index is cut", replaced(INDEX, b'{"metadata": {', sharded())),
        Invalid("V501", "too-many-items", "2,000,001 of the characters , [ {", crowd, setup=steps),
        Invalid("V501", "array", "the index is an array", replaced(INDEX, b"[]\n", sharded())),
        Invalid("V501", "duplicate-key", "a key twice", replaced(INDEX, b'{"metadata": {}, ' + text[1:], sharded())),
        Invalid("V501", "no-metadata", "no metadata", reindexed(lambda i: i.pop("metadata"))),
        Invalid("V501", "no-weight-map", "no weight_map", reindexed(lambda i: i.pop("weight_map"))),
        Invalid(
            "V501", "weight-map-array", "weight_map is an array", reindexed(lambda i: i.update(weight_map=[plain]))
        ),
        Invalid(
            "V501", "file-name-type", "an integer as file name", reindexed(lambda i: i["weight_map"].update({EXTRA: 1}))
        ),
        Invalid("V502", "space", "a space in a file name", renamed("model two.safetensors").build()),
        Invalid("V502", "subfolder", "a file in a folder of its own", renamed("sub/model.safetensors").build()),
        Invalid("V502", "ending", "another ending", renamed("model.bin").build()),
        Invalid(
            "V502",
            "line-feed",
            "a line feed after the name",
            reindexed(lambda i: i["weight_map"].update({"norm.weight": SHARDS[0] + "\n"})),
        ),
        Invalid("V503", "missing-file", "a file that is not there", reindexed(lambda i: i["weight_map"].update(ghost))),
        Invalid("V503", "no-model", "neither model.safetensors nor an index", Folder({}).build(lambda f: f.pop(INDEX))),
        Invalid(
            "V504",
            "tensor-not-named",
            "a tensor is not in weight_map",
            reindexed(lambda i: i["weight_map"].pop("norm.weight")),
        ),
        Invalid(
            "V504",
            "no-such-tensor",
            "weight_map names a tensor that no file has",
            reindexed(lambda i: i["weight_map"].update({EXTRA: SHARDS[0]})),
        ),
        Invalid(
            "V504",
            "wrong-file",
            "a tensor is in the other file",
            reindexed(lambda i: i["weight_map"].update({"norm.weight": SHARDS[1]})),
        ),
        Invalid("V505", "tensor-twice", "a dense tensor is in both files", reindexed(first_shard, double)),
        Invalid("V214", "dense-twin-in-other-file", "a weight in one file, a dense tensor in another", twin.build()),
        Invalid("V506", "index-and-single", "model.safetensors and an index that names it", both.build()),
    ]


def member_rules() -> list[Invalid]:
    """V507, V508 and V513, and what a link that leads nowhere lacks: links, pipes, versions."""
    sided = single()
    sided.side = {"tokenizer.json": b"{}\n"}

    def linked(path: str, target: str) -> list[Any]:
        return [{"move": {"path": path, "to": target}}, {"symlink": {"path": path, "target": target}}]

    def piped(path: str) -> list[Any]:
        return [{"remove": path}, {"fifo": path}]

    def one_link(path: str, target: str) -> list[Any]:
        return [{"symlink": {"path": path, "target": target}}]

    away = "../outside.safetensors"
    blob = "../blobs/0123456789abcdef"
    mixed = sharded()
    mixed.shards[SHARDS[1]].version = "1.1"
    same = single().build()
    return [
        Invalid(
            "V507",
            "model-link",
            "the model file is a link out of the folder",
            same,
            setup=linked("model.safetensors", away),
        ),
        Invalid(
            "V507",
            "side-link",
            "a side file is a link out of the folder",
            sided.build(),
            setup=linked("tokenizer.json", "../outside.json"),
        ),
        Invalid(
            "V507",
            "blobs-link",
            "a link into blobs/ where there is no snapshots/",
            sided.build(),
            setup=linked("tokenizer.json", blob),
        ),
        Invalid("V507", "folder-link", "a link to a folder outside", same, setup=one_link("more", "..")),
        Invalid("V507", "dangling-link", "a link that leads nowhere, outside", same, setup=one_link("more", "../gone")),
        Invalid("V507", "circle", "two links to each other", same, setup=one_link("a", "b") + one_link("b", "a")),
        Invalid(
            "V503",
            "dangling-link",
            "model.safetensors is a link that leads nowhere",
            replaced("model.safetensors", None),
            setup=one_link("model.safetensors", "gone"),
        ),
        Invalid(
            "V510",
            "dangling-link",
            "config.json is a link that leads nowhere",
            replaced("config.json", None),
            setup=one_link("config.json", "gone"),
        ),
        Invalid(
            "V601",
            "dangling-link",
            "the manifest is a link that leads nowhere",
            same,
            setup=[{"remove": MANIFEST}, *one_link(MANIFEST, "gone")],
        ),
        Invalid("V508", "model-pipe", "the model file is a pipe", same, setup=piped("model.safetensors")),
        Invalid("V508", "config-pipe", "config.json is a pipe", same, setup=piped("config.json")),
        Invalid("V508", "manifest-pipe", "the manifest is a pipe", same, setup=piped("bcq_manifest.json")),
        Invalid("V508", "index-pipe", "the index is a pipe", sharded().build(), setup=piped(INDEX)),
        Invalid("V513", "two-versions", "files of 1.0 and 1.1", mixed.build()),
        Invalid(
            "V513",
            "manifest",
            "a manifest of 1.1 for a file of 1.0",
            single().build(edit=lambda m: m.update(version="1.1")),
        ),
    ]


def config_rules() -> list[Invalid]:
    """V510 to V512: config.json."""
    text = pretty(single().config())
    size = 16_000_001 - len(text)
    long = replaced("config.json", text + b" " * size)
    long["config.json"] = text
    key = b'{"a": 1, "a": 1, ' + text.lstrip()[1:]
    deep = b'{"a": ' + b"[" * 100 + b"]" * 100 + b", " + text.lstrip()[1:]
    q = "quantization_config"
    return [
        Invalid("V510", "no-config", "no config.json", replaced("config.json", None)),
        Invalid("V511", "not-json", "config.json is cut", replaced("config.json", text[:-3])),
        Invalid("V511", "array", "config.json is an array", replaced("config.json", b"[" + text + b"]")),
        Invalid("V511", "duplicate-key", "a key twice", replaced("config.json", key)),
        Invalid(
            "V511",
            "lone-surrogate",
            "an escaped surrogate without its partner",
            replaced("config.json", text.replace(b"example", b"\\ud800")),
        ),
        Invalid("V511", "too-deep", "101 levels", replaced("config.json", deep)),
        Invalid("V511", "not-utf8", "the byte ff", replaced("config.json", text.replace(b"example", b"\xff"))),
        Invalid(
            "V511",
            "too-long",
            "16,000,001 bytes, mostly spaces",
            long,
            setup=[{"append_spaces": {"path": "config.json", "count": size}}],
        ),
        Invalid("V512", "absent", "no quantization_config", reconfigured(lambda c: c.pop(q))),
        Invalid("V512", "not-object", "a string", reconfigured(lambda c: c.update({q: "bcq"}))),
        Invalid("V512", "method", "another quant_method", reconfigured(lambda c: c[q].update(quant_method="gptq"))),
        Invalid(
            "V512",
            "version",
            "another version than the file",
            reconfigured(lambda c: c[q].update(format_version="1.1")),
        ),
        Invalid("V512", "no-version", "no format_version", reconfigured(lambda c: c[q].pop("format_version"))),
    ]


def vectors() -> list[Invalid]:
    """All of this module."""
    return [*shard_rules(), *member_rules(), *config_rules()]
