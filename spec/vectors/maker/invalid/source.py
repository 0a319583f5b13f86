"""Folders whose record of the source breaks one rule, BCQ-V701 to BCQ-V704."""

from collections.abc import Callable
from typing import Any

from maker.build import canonical, container, sha256, tensor
from maker.catalogue import Invalid
from maker.folder import Files, line, pretty
from maker.valid.folders import GGUF_HEADER, from_gguf, gguf_record, provenance, record, source_files

SOURCE, RAW = "bcq_source/source.json", "bcq_source/raw.safetensors"
HEADER = "bcq_source/headers/model.safetensors.header"
NOTES = "extra/notes 1.txt"
WRONG = sha256(b"another text")


def sourced(edit: Callable[[dict[str, Any]], Any] | None = None, **changes: bytes | None) -> Files:
    """A folder with another record of its source; the manifest fits. `changes`: under bcq_source/."""
    folder = provenance()
    described = record(source_files())
    if edit:
        edit(described)
    folder.side[SOURCE] = line(described)
    for path, data in changes.items():
        if data is None:
            del folder.side[path]
        else:
            folder.side[path] = data
    return folder.build()


def gguf_sourced(edit: Callable[[dict[str, Any]], Any] | None = None, **changes: bytes) -> Files:
    """The same for a folder that was made of a GGUF file."""
    folder = from_gguf()
    described = gguf_record()
    if edit:
        edit(described["tensors"]["model.gguf"])
    folder.side |= {SOURCE: line(described), **changes}
    return folder.build()


def gguf_rules() -> list[Invalid]:
    """V702 and V703 of GGUF files."""

    def missing(tensors: dict[str, Any]) -> None:
        tensors["output_norm.weight"] = [0, "v.weight"]

    return [
        Invalid("V702", "gguf-header", "no header of GGUF", gguf_sourced(None, **{GGUF_HEADER: b"GGML" + bytes(60)})),
        Invalid(
            "V703", "gguf-copy", "copy of a tensor that the folder lacks, under another name", gguf_sourced(missing)
        ),
    ]


def record_rules() -> list[Invalid]:
    """V701 and V702: source.json and the files that it names."""
    text = line(record(source_files()))
    header = provenance().side[HEADER]
    model, notes = "model.safetensors", f"bcq_source/files/{NOTES}"
    cases: list[tuple[str, str, Callable[[dict[str, Any]], Any]]] = [
        ("unknown-key", "an unknown key", lambda s: s.update(tool="x")),
        ("no-rules", "no rules", lambda s: s.pop("rules")),
        ("kind", "an unknown kind", lambda s: s["files"][NOTES].update(kind="link")),
        ("rule-twice", "two equal rules", lambda s: s["rules"].append({"rule": "copy"})),
        ("rule-no-name", "a rule without a name", lambda s: s["rules"].append({"bits": 4})),
        ("three-items", "[rule, T, more]", lambda s: s["tensors"][model].update({"w.words": [2, "w.weight", 0]})),
    ]

    def upward(s: dict[str, Any]) -> None:
        s["files"]["../up.txt"] = {"kind": "verbatim", "size": 0, "sha256": sha256(b"")}

    def cleared(s: dict[str, Any]) -> None:
        s["tensors"][model] = {}

    def fresh(data: bytes) -> bytes:
        return len(data).to_bytes(8, "little") + data

    return [
        *(Invalid("V701", what, comment, sourced(e), schema="source") for what, comment, e in cases),
        Invalid("V701", "version", "version 2.0", sourced(lambda s: s.update(version="2.0")), schema="source"),
        Invalid(
            "V701", "path-upward", "a path with `..`", sourced(upward, **{"bcq_source/up.txt": b""}), schema="source"
        ),
        Invalid("V701", "pretty", "white space", sourced(None, **{SOURCE: pretty(record(source_files()))})),
        Invalid("V701", "no-line-feed", "no line feed at the end", sourced(None, **{SOURCE: text[:-1]})),
        Invalid("V702", "file-missing", "a verbatim file is missing", sourced(None, **{notes: None})),
        Invalid("V702", "file-size", "another size", sourced(lambda s: s["files"][NOTES].update(size=1))),
        Invalid("V702", "file-digest", "another digest", sourced(lambda s: s["files"][NOTES].update(sha256=WRONG))),
        Invalid("V702", "header-missing", "an archived header is missing", sourced(None, **{HEADER: None})),
        Invalid("V702", "header-longer", "bytes after the header", sourced(None, **{HEADER: header + b" "})),
        Invalid(
            "V702", "header-array", "a header that is no object", sourced(cleared, **{HEADER: fresh(b"[]"), RAW: None})
        ),
    ]


def tensor_rules() -> list[Invalid]:
    """V703 and V704: every tensor of the source has a rule that can be followed."""
    model = "model.safetensors"

    def tensors(**changes: Any) -> Callable[[dict[str, Any]], Any]:
        def edit(s: dict[str, Any]) -> None:
            for name, rule in changes.items():
                s["tensors"][model][name] = rule
                if rule is None:
                    del s["tensors"][model][name]

        return edit

    def renamed(s: dict[str, Any]) -> None:
        s["tensors"][model]["other.weight"] = s["tensors"][model].pop("norm.weight")

    header = canonical({"other.weight": {"dtype": "BF16", "shape": [8], "data_offsets": [0, 16]}}).encode()
    words = tensor("I32", [8], [0] * 8)
    meta = {"format": "pt"}
    raw = {f"{model}/w.g_idx": words}
    two = {**raw, f"{model}/more": words}

    def copied(s: dict[str, Any]) -> None:
        s["tensors"][model] = {"other.weight": [0]}

    head = len(header).to_bytes(8, "little") + header
    derived = tensors(**{"w.g_idx": [2, "w.weight"]})
    return [
        Invalid("V703", "not-listed", "a tensor of the header has no rule", sourced(tensors(**{"w.words": None}))),
        Invalid("V703", "not-in-header", "a rule for a tensor that the header lacks", sourced(tensors(more=[0]))),
        Invalid("V703", "metadata", "a rule for __metadata__", sourced(tensors(__metadata__=[0]))),
        Invalid("V703", "renamed", "a rule under another name", sourced(renamed)),
        Invalid(
            "V703", "rule-position", "a rule that does not exist", sourced(tensors(**{"w.words": [3, "w.weight"]}))
        ),
        Invalid(
            "V703",
            "copy-of-nothing",
            "copy of a tensor that the folder lacks",
            sourced(copied, **{HEADER: head, RAW: None}),
        ),
        Invalid(
            "V703",
            "no-such-weight",
            "derived from a weight that the folder lacks",
            sourced(tensors(**{"w.words": [2, "v.weight"]})),
        ),
        Invalid(
            "V703",
            "copy-names-weight",
            "a weight with copy",
            sourced(tensors(**{"norm.weight": [0, "w.weight"]})),
        ),
        Invalid("V703", "raw-names-weight", "a weight with raw", sourced(tensors(**{"w.g_idx": [1, "w.weight"]}))),
        Invalid("V703", "derived-of-nothing", "a derived rule without a weight", sourced(tensors(**{"w.words": [2]}))),
        Invalid("V704", "raw-missing", "raw.safetensors is missing", sourced(None, **{RAW: None})),
        Invalid("V704", "raw-not-needed", "no tensor has the rule raw", sourced(derived, **{RAW: container({}, meta)})),
        Invalid(
            "V704",
            "trailing-byte",
            "a byte after the tensors of raw.safetensors",
            sourced(None, **{RAW: container(raw, meta) + b"x"}),
        ),
        Invalid(
            "V704", "tensor-missing", "raw.safetensors lacks the tensor", sourced(None, **{RAW: container({}, meta)})
        ),
        Invalid("V704", "tensor-extra", "raw.safetensors has one more", sourced(None, **{RAW: container(two, meta)})),
        Invalid(
            "V704",
            "tensor-name",
            "the name without the path",
            sourced(None, **{RAW: container({"w.g_idx": words}, meta)}),
        ),
    ]


def vectors() -> list[Invalid]:
    """All of this module."""
    return [*record_rules(), *tensor_rules(), *gguf_rules()]
