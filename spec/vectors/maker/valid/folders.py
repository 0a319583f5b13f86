"""Valid folders: one file, shards, side files, the record of a source."""

from typing import Any

from maker.build import Lcg, Tensor, canonical, container, frame, place, sha256, tensor
from maker.catalogue import Valid, whole
from maker.encodings import some_affine, some_bcq
from maker.folder import INDEX, Files, Folder, Shard, line, listing, pretty
from maker.weights import Weight

from .affine import worked_example

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def norm() -> dict[str, Tensor]:
    """A dense tensor."""
    return {"norm.weight": tensor("BF16", [8], range(0x3F80, 0x3F88))}


def single() -> Folder:
    """The smallest folder."""
    return Folder({"model.safetensors": Shard([worked_example()], norm())})


def sharded() -> Folder:
    """Two shards that share a scheme and have one each of their own."""
    rng = Lcg(401)
    binary = Weight("b.weight", [2, 16], "F16", [some_bcq(rng, 2, 16, 2, 8, "F16", None)])
    plain = Weight("p.weight", [2, 16], "F16", [some_affine(rng, 2, 16, 4, 8, 8)])
    twin = worked_example()
    twin.name = "twin.weight"
    return Folder({SHARDS[0]: Shard([worked_example(), binary], norm()), SHARDS[1]: Shard([plain, twin])})


def crowded(items: int) -> tuple[Files, list[Any]]:
    """A folder of which the index has so many of the characters , [ {, and the step that makes them of a small one."""
    folder, piece = sharded(), ",[{"
    index = folder.index()
    index["metadata"].update(many=piece, some="")
    lacking = items - sum(map(pretty(index).count, b",[{"))
    index["metadata"]["some"] = "," * (lacking % 3)
    text, count = pretty(index), lacking // 3 + 1

    def tamper(files: Files) -> None:
        files[INDEX] = text.replace(piece.encode(), piece.encode() * count)

    content = folder.build(tamper)
    content[INDEX] = text
    return content, [{"repeat": {"path": INDEX, "text": piece, "count": count}}]


def source_files() -> Files:
    """A source checkpoint: a configuration, a nested text, one safetensors file."""
    tensors = {
        "w.words": tensor("I32", [2], [0x1234, -5]),
        "norm.weight": norm()["norm.weight"],
        "w.g_idx": tensor("I32", [8], [0] * 8),
    }
    entries, data = place(tensors, ["w.words", "norm.weight", "w.g_idx"])
    header = canonical({"__metadata__": {"format": "pt"}, **entries})
    return {
        "config.json": b'{"model_type": "example", "quantization_config": {"bits": 2}}',
        "extra/notes 1.txt": b"kept as it is\r\n",
        "model.safetensors": frame(header, data, pad=False),
    }


def record(source: Files) -> dict[str, Any]:
    """`source.json` for that checkpoint: one copied, one derived, one raw tensor."""
    kinds = {p: "safetensors" if p.endswith(".safetensors") else "verbatim" for p in source}
    return {
        "version": "1.0",
        "format": "example",
        "files": {p: {**entry, "kind": kinds[p]} for p, entry in listing(source).items()},
        "rules": [{"rule": "copy"}, {"rule": "raw"}, {"rule": "example-words", "bits": 2, "order": [0, 1]}],
        "tensors": {"model.safetensors": {"norm.weight": [0], "w.g_idx": [1], "w.words": [2, "w.weight"]}},
    }


def archive(source: Files) -> Files:
    """`bcq_source/` for that checkpoint."""
    model = source["model.safetensors"]
    length = 8 + int.from_bytes(model[:8], "little")
    kept = {"model.safetensors/w.g_idx": tensor("I32", [8], [0] * 8)}
    return {
        **{f"bcq_source/files/{p}": data for p, data in source.items() if not p.endswith(".safetensors")},
        "bcq_source/headers/model.safetensors.header": model[:length],
        "bcq_source/raw.safetensors": container(kept, {"format": "pt"}),
        "bcq_source/source.json": line(record(source)),
    }


def provenance() -> Folder:
    """A folder that can be turned back."""
    source = source_files()
    folder = single()
    folder.side = archive(source)
    folder.source = {"format": "example", "files": listing(source)}
    return folder


def bare_source() -> Folder:
    """A source with one more safetensors file, which has no tensors and no table of them."""
    empty = frame("{}", b"", pad=False)
    source = {**source_files(), "empty.safetensors": empty}
    folder = provenance()
    folder.side["bcq_source/headers/empty.safetensors.header"] = empty
    folder.side["bcq_source/source.json"] = line(record(source))
    return folder


GGUF_HEADER = "bcq_source/headers/model.gguf.header"


def gguf_record() -> dict[str, Any]:
    """`source.json` of a GGUF file: a renamed copy with its rows moved, a derived tensor, bytes between tensors."""
    return {
        "version": "1.0",
        "format": "gguf",
        "files": {"model.gguf": {"kind": "gguf", "size": 192, "sha256": sha256(b"a GGUF file")}},
        "rules": [{"rule": "copy", "heads": 2}, {"rule": "raw"}, {"rule": "gguf.example"}],
        "tensors": {
            "model.gguf": {"": [1], "blk.0.w.weight": [2, "w.weight"], "output_norm.weight": [0, "norm.weight"]}
        },
    }


def from_gguf() -> Folder:
    """A folder that was made of a GGUF file, whose header is read by converters only."""
    folder = single()
    kept = {"model.gguf/": tensor("U8", [3], [1, 2, 3])}
    folder.side = {
        GGUF_HEADER: b"GGUF" + bytes([3, 0, 0, 0]) + bytes(56),
        "bcq_source/raw.safetensors": container(kept, {"format": "pt"}),
        "bcq_source/source.json": line(gguf_record()),
    }
    files = {"model.gguf": {"size": 192, "sha256": sha256(b"a GGUF file")}}
    folder.source = {"format": "gguf", "files": files}
    return folder


def with_sides() -> Folder:
    """Side files of all sorts."""
    folder = single()
    folder.side = {
        "README.md": b"# A model card\n",
        "empty.txt": b"",
        "tokenizer.json": b'{"a":1.5}\r\n',
        "onnx/.hidden/all bytes.bin": bytes(range(256)),
        ".not-part-of-it": b"names that begin with a dot at the top are not listed\n",
        ".cache/x/y": b"nor is what lies in such a folder\n",
        "adapter.safetensors": b"not a model file: the index or the single file says what is\n",
    }
    folder.ignorable = {"note": ["kept", 1, None]}
    return folder


def with_unnamed() -> Folder:
    """Files that no digest covers: documentation, and data that its owner has added."""
    folder = single()
    folder.side = {"tokenizer.json": b"{}\n"}
    folder.unnamed = {
        "README.md": b"# A model card that its owner has edited\n",
        "LICENSE": b"\n",
        "assets/Logo.PNG": b"\x89PNG\r\n\x1a\n",
        "assets/.notes": b"hidden, and not at the top\n",
        "vocab.txt": b"data that nobody took into the manifest\n",
        "another.safetensors": b"neither the index nor its name makes it a model file\n",
        "~last.txt": b"sorted by code points\n",
    }
    return folder


def hub_cache(name: str, blobs: str, comment: str) -> Valid:
    """Links as a download cache makes them."""
    folder = single()
    files = folder.build()
    steps: list[Any] = []
    for path in ("config.json", "model.safetensors"):
        blob = f"{blobs}/{sha256(files[path])}"
        steps += [{"move": {"path": path, "to": blob}}, {"symlink": {"path": path, "target": blob}}]
    return whole(f"folder-{name}", comment, folder, "models--a--b/snapshots/0123456789abcdef", steps)


def loose() -> Valid:
    """What the limits of section 4 leave to config.json and the index."""
    folder = Folder({SHARDS[0]: Shard([worked_example()], norm())})
    plain, deep = pretty(folder.config()), b"[" * 99 + b"]" * 99
    more = b'{"nan": NaN, "inf": [Infinity, -Infinity], "e": 1e400, "big": ' + b"9" * 40 + b', "deep": ' + deep
    index = folder.index()
    index["metadata"] = {"total_size": 1.5e3, "other": None}
    folder.side = {"config.json": more + b", " + plain.lstrip()[1:], INDEX: pretty(index)}
    return whole(
        "folder-loose-json", "numbers of any kind, NaN, 100 levels in config.json; 1500.0 in the index", folder
    )


def lying() -> Valid:
    """Keys of quantization_config that readers ignore."""
    folder = single()
    config = folder.config()
    config["quantization_config"].update(features=["bcq", "no-such-feature"], bits=7, modules_to_not_convert=[1])
    folder.side = {"config.json": pretty(config)}
    return whole("folder-config-lies", "quantization_config states other features, which are ignored", folder)


def inner_side() -> Folder:
    """A folder with a folder in it."""
    folder = single()
    folder.side = {"sub/notes.txt": b"x"}
    return folder


def vectors() -> list[Valid]:
    """All of this module."""
    newer = Folder({"model.safetensors": Shard([worked_example()], norm(), "1.7")}, version="1.7")
    inner = single()
    inner.side = {"sub/config.json": b"{}\n", "copy.json": b"{}\n"}
    link: list[Any] = [{"remove": "copy.json"}, {"symlink": {"path": "copy.json", "target": "sub/config.json"}}]
    link.append({"symlink": {"path": "linked", "target": "sub"}})
    return [
        whole("folder-single", "one file", single()),
        whole("folder-shards", "two shards, an index, schemes shared between files", sharded()),
        whole(
            "folder-one-shard",
            "an index with one shard",
            Folder({"model-00001-of-00001.safetensors": Shard([worked_example()])}),
        ),
        whole(
            "folder-provenance",
            "bcq_source/ with verbatim files, a header, copied, derived and raw tensors",
            provenance(),
        ),
        whole("folder-provenance-bare", "a source file without tensors, which `tensors` leaves out", bare_source()),
        whole("folder-gguf", "the record of a GGUF file: renamed copies, bytes between tensors", from_gguf()),
        whole(
            "folder-side-files",
            "side files in folders, hidden ones, an empty one, a named model card; `ignorable` in the manifest",
            with_sides(),
        ),
        whole("folder-uncovered-files", "files that the manifest does not name break no rule", with_unnamed()),
        whole("folder-minor-version", "version 1.7 everywhere", newer),
        whole("folder-no-weights", "dense tensors only", Folder({"model.safetensors": Shard([], norm())})),
        whole(
            "folder-inner-link",
            "a link that stays in the folder; one to a folder, which holds no files",
            inner,
            None,
            link,
        ),
        whole(
            "folder-odd-members",
            "a pipe, a link that leads nowhere and one to a folder, an empty bcq_source/: none of them is a file",
            inner_side(),
            None,
            [
                {"fifo": "pipe"},
                {"symlink": {"path": "nowhere", "target": "gone/away.json"}},
                {"symlink": {"path": "sub/linked", "target": "."}},
                {"mkdir": "bcq_source"},
            ],
        ),
        lying(),
        loose(),
        hub_cache("hub-cache", "../../blobs", "links from snapshots/<revision>/ into blobs/ next to snapshots/"),
        hub_cache("hub-cache-shared", "../../../blobs/ab", "links into the blobs/ that cache entries share"),
    ]
