"""Folders whose manifest breaks one rule, BCQ-V601 to BCQ-V609."""

from collections.abc import Callable
from typing import Any

from maker.build import sha256
from maker.catalogue import Invalid
from maker.folder import INDEX, MANIFEST, Files, Folder, line, pretty, seal
from maker.valid.folders import SHARDS, provenance, sharded, single

WRONG = sha256(b"another text")
EMPTY = {"size": 0, "sha256": sha256(b"")}


def manifest(edit: Callable[[dict[str, Any]], Any], folder: Folder | None = None) -> Files:
    """A folder with another manifest that is sealed all the same."""
    return (folder or single()).build(edit=edit)


def written(write: Callable[[dict[str, Any]], bytes]) -> Files:
    """A folder whose manifest is written in another way."""
    folder = single()
    files = folder.files()
    return {**files, MANIFEST: write(seal(folder.manifest(files)))}


def other_scheme(m: dict[str, Any]) -> Any:
    """A scheme like the first, with another zero point."""
    return {"segments": [{**m["schemes"][0]["segments"][0], "zero": 0}]}


def rename(m: dict[str, Any], name: str) -> None:
    """Gives the only weight another name."""
    m["weights"][name] = m["weights"].pop("w.weight")


def form_rules() -> list[Invalid]:
    """V601 to V603, and V205 and V206 for the manifest: its form."""
    unfinished = single().files()
    upper = WRONG.upper()
    cases: list[tuple[str, str, Callable[[dict[str, Any]], Any]]] = [
        ("unknown-key", "an unknown key", lambda m: m.update(created="today")),
        ("no-generator", "no generator", lambda m: m.pop("generator")),
        ("generator-key", "an unknown key in generator", lambda m: m["generator"].update(url="")),
        ("size-negative", "the size -1", lambda m: m["files"]["config.json"].update(size=-1)),
        ("digest-upper-case", "a digest in upper case", lambda m: m["files"]["config.json"].update(sha256=upper)),
        ("weight-no-file", "a weight without file", lambda m: m["weights"]["w.weight"].pop("file")),
        ("weight-digest", "a digest of a weight", lambda m: m["weights"]["w.weight"].update(sha256=WRONG)),
        ("path-upward", "a path with `..`", lambda m: m["files"].update({"sub/../x": EMPTY})),
        ("path-backslash", "a path with a backslash", lambda m: m["files"].update({"sub\\x": EMPTY})),
        ("path-absolute", "an absolute path", lambda m: m["files"].update({"/etc/passwd": EMPTY})),
        ("source-key", "an unknown key in source", lambda m: m.update(source={"format": "a", "files": {}, "b": 1})),
    ]
    texts: list[tuple[str, str, Callable[[dict[str, Any]], bytes]]] = [
        ("pretty", "white space", pretty),
        ("no-line-feed", "no line feed at the end", lambda m: line(m)[:-1]),
        ("two-line-feeds", "two line feeds at the end", lambda m: line(m) + b"\n"),
        ("not-json", "not JSON", lambda m: line(m)[1:]),
        ("duplicate-key", "a key twice", lambda m: b'{"features":[],' + line(m)[1:]),
    ]
    unfit: list[tuple[str, str, Callable[[dict[str, Any]], Any], Folder]] = [
        ("feature-missing", "a feature in use is not named", lambda m: m["features"].remove("bcq"), sharded()),
        ("feature-not-in-use", "a feature that no scheme has", lambda m: m["features"].append("perm"), single()),
        ("scheme-unused", "a scheme that no weight has", lambda m: m["schemes"].append(other_scheme(m)), single()),
        (
            "weight-name",
            "a name that no weight can have",
            lambda m: m["weights"].update({"a b": m["weights"].pop("w.weight")}),
            single(),
        ),
        ("widths", "widths of a single segment", lambda m: m["weights"]["w.weight"].update(widths=[8]), single()),
        ("scheme-position", "no such scheme", lambda m: m["weights"]["w.weight"].update(scheme=9), sharded()),
    ]
    return [
        Invalid("V205", "manifest", "version 2.0 in the manifest", manifest(lambda m: m.update(version="2.0"))),
        Invalid(
            "V206",
            "manifest",
            "an unknown feature in the manifest",
            manifest(lambda m: m["features"].append("lattice")),
        ),
        Invalid("V601", "no-manifest", "an unfinished folder", unfinished),
        *(Invalid("V602", what, comment, manifest(e), schema="manifest") for what, comment, e in cases),
        *(Invalid("V602", what, comment, written(w)) for what, comment, w in texts),
        *(Invalid("V602", what, comment, manifest(e, folder)) for what, comment, e, folder in unfit),
        Invalid("V603", "own-digest", "another digest of itself", written(lambda m: line({**m, "sha256": WRONG}))),
    ]


def claim_rules() -> list[Invalid]:
    """V604 to V606, V608 and V609: what the manifest says of the folder."""

    def fewer(files: Files, path: str) -> Files:
        return {p: data for p, data in files.items() if p != path}

    sided = single()
    sided.side = {"notes.txt": b"12345678\n", "README.md": b"# A model card\n"}
    built = sided.build()
    w = "w.weight"

    def one_weight(m: dict[str, Any]) -> None:
        del m["weights"]["twin.weight"]

    def other_zero(m: dict[str, Any]) -> None:
        m["schemes"][0]["segments"][0]["zero"] = 3

    def permuted(m: dict[str, Any]) -> None:
        m["schemes"][0]["perm"] = True
        m["features"].append("perm")

    def ghost(m: dict[str, Any]) -> None:
        m["weights"]["ghost.weight"] = m["weights"][w]

    return [
        Invalid("V604", "missing-file", "a listed file is missing", fewer(built, "notes.txt")),
        Invalid("V604", "missing-model-card", "a listed model card is missing", fewer(built, "README.md")),
        Invalid(
            "V604",
            "listed-itself",
            "the manifest lists itself",
            manifest(lambda m: m["files"].update({MANIFEST: EMPTY})),
        ),
        Invalid(
            "V604",
            "hidden-listed",
            "a listed file begins with a dot",
            manifest(lambda m: m["files"].update({".hidden": EMPTY})),
        ),
        Invalid(
            "V605",
            "size",
            "another size, the right digest",
            manifest(lambda m: m["files"]["config.json"].update(size=1)),
        ),
        Invalid(
            "V606",
            "digest",
            "another digest of a file",
            manifest(lambda m: m["files"]["config.json"].update(sha256=WRONG)),
        ),
        Invalid("V605", "longer-file", "a side file grew", {**built, "notes.txt": b"123456789\n"}),
        Invalid("V606", "changed-file", "one bit of a side file changed", {**built, "notes.txt": b"12345679\n"}),
        Invalid("V606", "changed-model-card", "a listed card changed", {**built, "README.md": b"# a model card\n"}),
        Invalid("V608", "feature", "another scheme, with another feature", manifest(permuted)),
        Invalid("V608", "weight-renamed", "another name of the weight", manifest(lambda m: rename(m, "v.weight"))),
        Invalid("V608", "scheme", "another zero point", manifest(other_zero)),
        Invalid("V608", "weight-missing", "a weight is missing", manifest(one_weight, sharded())),
        Invalid("V608", "weight-extra", "a weight that no file has", manifest(ghost)),
        Invalid(
            "V608",
            "file",
            "the weight is in the other file",
            manifest(lambda m: m["weights"][w].update(file=SHARDS[1]), sharded()),
        ),
        Invalid("V608", "dtype", "another logical dtype", manifest(lambda m: m["weights"][w].update(dtype="BF16"))),
        Invalid("V608", "shape", "another shape", manifest(lambda m: m["weights"][w].update(shape=[8, 2]))),
        *(
            Invalid("V609", what, f"{comment} is not named", manifest(lambda m, p=path: m["files"].pop(p), folder()))
            for what, comment, path, folder in (
                ("config", "config.json", "config.json", single),
                ("model-file", "the model file", "model.safetensors", single),
                ("shard", "a shard", SHARDS[1], sharded),
                ("index", "the index", INDEX, sharded),
                ("source-record", "the record of the source", "bcq_source/source.json", provenance),
                ("source-file", "an archived file", "bcq_source/files/extra/notes 1.txt", provenance),
            )
        ),
    ]


def vectors() -> list[Invalid]:
    """All of this module."""
    return [*form_rules(), *claim_rules()]
