"""Folders at the edges of rules: as in edges.py, for the index, the configuration, the manifest and the record."""

from collections.abc import Callable
from typing import Any

from maker.build import Lcg, sha256, tensor
from maker.catalogue import Invalid
from maker.folder import Folder, Shard, line
from maker.valid.affine import worked_example
from maker.valid.edges import many_features
from maker.valid.folders import GGUF_HEADER, SHARDS, provenance, record, sharded, source_files
from maker.valid.structures import tile_segments
from maker.weights import Weight

from .folder import reconfigured, reindexed
from .manifest import manifest, written
from .source import HEADER, NOTES, SOURCE, gguf_sourced, sourced

Edit = Callable[[dict[str, Any]], Any]
LOW, HIGH = "0" * 64, "f" * 64
EMPTY = {"size": 0, "sha256": sha256(b"")}


def index() -> list[Invalid]:
    """V501 to V504 and V214: only the first or only the last tensor."""

    def mapped(name: str, file: Any) -> Any:
        return reindexed(lambda i: i["weight_map"].update({name: file}))

    def elsewhere(pick: Callable[[Any], str]) -> Any:
        return reindexed(lambda i: i["weight_map"].update({pick(i["weight_map"]): SHARDS[1]}))

    def dense_twin(name: str, shard: str) -> Any:
        folder = sharded()
        folder.shards[shard].dense = {name: tensor("F16", [2, 8], [0] * 16)}
        return folder.build()

    def weight_twice() -> Any:
        folder, rng = sharded(), Lcg(821)
        tiled = Weight("w.weight", [1, 64], "F16", tile_segments(rng, 1, 64, [[1, 2, 3]], 1, 1), True)
        folder.shards[SHARDS[1]].weights.append(tiled)
        return folder.build()

    q = "quantization_config"
    return [
        Invalid("V501", "first-file-name", "an integer as the first file name", mapped("!", 1)),
        Invalid("V501", "last-file-name", "an integer as the last file name", mapped("~", 1)),
        Invalid("V502", "first", "a space in the first file name", mapped("!", "a b.safetensors")),
        Invalid("V502", "last", "a space in the last file name", mapped("~", "a b.safetensors")),
        Invalid("V502", "leading-dot", "a file name that begins with a dot", mapped("~", ".model.safetensors")),
        Invalid("V502", "no-dot", "a file name that only ends like the type", mapped("~", "modelXsafetensors")),
        Invalid("V504", "first-elsewhere", "the first tensor is in the other file", elsewhere(min)),
        Invalid("V504", "last-elsewhere", "the last tensor is in the other file", elsewhere(max)),
        Invalid(
            "V214",
            "first-weight",
            "the first weight of a file and a tensor of another",
            dense_twin("b.weight", SHARDS[1]),
        ),
        Invalid(
            "V214", "last-weight", "the last weight of the last file and a tensor", dense_twin("twin.weight", SHARDS[0])
        ),
        Invalid("V214", "weight-twice", "a weight in two files, in parts of different names", weight_twice()),
        Invalid(
            "V512",
            "version-array",
            "format_version is an array",
            reconfigured(lambda c: c[q].update(format_version=["1.0"])),
        ),
    ]


def manifests() -> list[Invalid]:
    """V602 to V608 and V513."""
    model = "model.safetensors"
    cases: list[tuple[str, str, Edit]] = [
        ("files-array", "files is an array", lambda m: m.update(files=[])),
        ("file-key", "an unknown key of a file", lambda m: m["files"][model].update(mode=420)),
        ("digest-integer", "an integer as digest", lambda m: m["files"][model].update(sha256=1)),
        ("digest-63", "a digest of 63 digits", lambda m: m["files"][model].update(sha256=HIGH[1:])),
        ("digest-line-feed", "a line feed after a digest", lambda m: m["files"][model].update(sha256=HIGH + "\n")),
        ("path-nul", "a path with U+0000", lambda m: m["files"].update({"a\0b": EMPTY})),
        ("path-dot", "a path with `.`", lambda m: m["files"].update({"sub/./x": EMPTY})),
        ("path-slash", "a path that ends with a slash", lambda m: m["files"].update({"sub/": EMPTY})),
        ("path-dots-last", "a path that ends with `..`", lambda m: m["files"].update({"sub/..": EMPTY})),
        ("generator-name", "the generator's name is an integer", lambda m: m["generator"].update(name=1)),
        ("generator-version", "the generator's version is an integer", lambda m: m["generator"].update(version=1)),
        ("weight-file", "an integer as file of a weight", lambda m: m["weights"]["w.weight"].update(file=1)),
        ("source-format", "an integer as format of the source", lambda m: m.update(source={"format": 1, "files": {}})),
        (
            "source-file",
            "a file of the source without digest",
            lambda m: m.update(source={"format": "a", "files": {"a": {"size": 1}}}),
        ),
    ]

    def scheme(weight: str, like: str) -> Any:
        return manifest(lambda m: m["weights"][weight].update(scheme=m["weights"][like]["scheme"]), sharded())

    def file(**changes: Any) -> Any:
        return manifest(lambda m: m["files"][model].update(changes))

    def larger(m: dict[str, Any]) -> None:
        m["files"][model]["size"] += 1

    def versions(files: str, stated: str) -> Any:
        folder = Folder({model: Shard([worked_example()], version=files)}, version=files)
        return folder.build(edit=lambda m: m.update(version=stated))

    wide = "c.weight"
    return [
        *(Invalid("V602", what, comment, manifest(e), schema="manifest") for what, comment, e in cases),
        Invalid(
            "V602",
            "own-digest-form",
            "no digest of itself",
            written(lambda m: line({**m, "sha256": "x"})),
            schema="manifest",
        ),
        Invalid(
            "V602",
            "no-widths",
            "two segments, no widths",
            manifest(lambda m: m["weights"][wide].pop("widths"), many_features()),
        ),
        Invalid("V603", "low", "its own digest is too low", written(lambda m: line({**m, "sha256": LOW}))),
        Invalid("V603", "high", "its own digest is too high", written(lambda m: line({**m, "sha256": HIGH}))),
        Invalid("V605", "larger", "the last file, stated one byte larger", manifest(larger)),
        Invalid("V606", "low", "the last file, a digest that is too low", file(sha256=LOW)),
        Invalid("V606", "high", "the last file, a digest that is too high", file(sha256=HIGH)),
        Invalid("V608", "scheme-of-p", "a weight with the scheme of another", scheme("twin.weight", "p.weight")),
        Invalid("V608", "scheme-of-b", "a weight with the scheme of another", scheme("twin.weight", "b.weight")),
        Invalid(
            "V608",
            "widths",
            "other widths",
            manifest(lambda m: m["weights"][wide].update(widths=[16, 8]), many_features()),
        ),
        Invalid("V513", "manifest-older", "the manifest states 1.0, the file 1.7", versions("1.7", "1.0")),
        Invalid("V513", "manifest-newer", "the manifest states 1.7, the file 1.0", versions("1.0", "1.7")),
    ]


def records() -> list[Invalid]:
    """V701 to V703."""
    model, text = "model.safetensors", line(record(source_files()))
    header = provenance().side[HEADER]

    def recipe(name: str, value: Any) -> Edit:
        return lambda s: s["tensors"][model].update({name: value})

    def listed(path: str, table: Any) -> Edit:
        return lambda s: s["tensors"].update({path: table})

    def stated(path: str, **changes: Any) -> Any:
        return sourced(lambda s: s["files"][path].update(changes))

    def one_more(s: dict[str, Any]) -> None:
        s["files"][NOTES]["size"] += 1

    def length(n: int) -> Any:
        return sourced(None, **{HEADER: n.to_bytes(8, "little") + header[8:]})

    cases: list[tuple[str, str, Edit]] = [
        ("format", "format is an integer", lambda s: s.update(format=1)),
        ("ignorable", "ignorable is an array", lambda s: s.update(ignorable=[])),
        ("rules-object", "rules is an object", lambda s: s.update(rules={})),
        ("rules-first", "the first rule is no object", lambda s: s["rules"].insert(0, "copy")),
        ("rules-last", "the last rule is no object", lambda s: s["rules"].append("copy")),
        ("rules-first-name", "the first rule has no name", lambda s: s["rules"].insert(0, {"bits": 4})),
        ("rule-name", "the name of a rule is an integer", lambda s: s["rules"].append({"rule": 1})),
        ("tensors-array", "tensors is an array", lambda s: s.update(tensors=[])),
        ("tables-first", "the first table is an array", listed("a.safetensors", [])),
        ("tables-last", "the last table is an array", listed("z.safetensors", [])),
        ("path-first", "the first path of tensors leads upward", listed("../a.safetensors", {})),
        ("path-last", "the last path of tensors leads upward", listed("z/../a.safetensors", {})),
        ("recipe-integer", "the first tensor has an integer", recipe("norm.weight", 0)),
        ("recipe-empty", "the first tensor has an empty array", recipe("norm.weight", [])),
        ("recipe-negative", "the rule -1", recipe("norm.weight", [-1])),
        ("recipe-string", "a rule by its name", recipe("norm.weight", ["copy"])),
        ("recipe-weight", "an integer as weight", recipe("w.words", [2, 5])),
    ]
    return [
        *(Invalid("V701", what, comment, sourced(e), schema="source") for what, comment, e in cases),
        Invalid("V701", "two-line-feeds", "two line feeds at the end", sourced(None, **{SOURCE: text + b"\n"})),
        Invalid("V702", "first-file", "the first file has another digest", stated("config.json", sha256=HIGH)),
        Invalid("V702", "digest-low", "a digest that is too low", stated(NOTES, sha256=LOW)),
        Invalid("V702", "digest-high", "a digest that is too high", stated(NOTES, sha256=HIGH)),
        Invalid("V702", "file-larger", "stated one byte larger", sourced(one_more)),
        Invalid("V702", "header-7-bytes", "an archived header of 7 bytes", sourced(None, **{HEADER: header[:7]})),
        Invalid("V702", "header-shorter", "an archived header, stated one byte longer", length(len(header) - 7)),
        Invalid("V702", "header-top-byte", "the highest byte of N is not zero", length(len(header) - 8 + 2**56)),
        Invalid("V702", "gguf-lower-case", "gguf for GGUF", gguf_sourced(None, **{GGUF_HEADER: b"gguf" + bytes(60)})),
        Invalid("V703", "verbatim", "tensors of a verbatim file", sourced(listed("config.json", {}))),
        Invalid("V703", "no-such-file", "tensors of a file that is not listed", sourced(listed("z.safetensors", {}))),
        Invalid(
            "V703",
            "one-more",
            "a tensor that the header lacks, with a weight",
            sourced(recipe("more", [2, "w.weight"])),
        ),
    ]


def vectors() -> list[Invalid]:
    """All of this module."""
    return [*index(), *manifests(), *records()]
