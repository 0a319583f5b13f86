"""Rows 55 to 68: what a BCQ file says and what its parts hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bad_files.by_hand import (
    CONFIG,
    MANIFEST,
    SINGLE,
    Json,
    Tensor,
    add_tensor,
    describe_again,
    described,
    example,
    example_descriptor,
    example_tensors,
    f16,
    folder,
    frame,
    i32,
    place,
    read_json,
    seal,
    sparse_weight,
    split,
    write_json,
)
from bad_files.case import case, legal

IN_DATA = "it lies in the data, of which a look at the header reads nothing"
NO_EFFECT = "it changes no value"
DIGESTS = "digests are the validator's business"
NO_CONFIG = "the reader has no need of config.json"
FALLBACK = "the manifest describes the file; the reader warns"
BY_FILES = "the reader goes by the descriptors of the files"

IDENTITY = list(range(32))


# -- row 55: perm -----------------------------------------------------------------------------------------------


def _perm(id: str, entry: int) -> None:
    @case(55, id, "BCQ-V406", 4, seen="values", why=IN_DATA)
    def make(where: Path) -> Path:
        return place(where, sparse_weight(perm=[*IDENTITY[:31], entry]))


_perm("twice", 0)
_perm("too-large", 32)
_perm("negative", -1)
_perm("far-out", 2**31 - 1)


# -- rows 56 to 58: outliers ------------------------------------------------------------------------------------


def _indptr(id: str, *indptr: int) -> None:
    @case(56, id, "BCQ-V407", 4, seen="values", why=IN_DATA)
    def make(where: Path) -> Path:
        return place(where, sparse_weight(indptr=indptr))


_indptr("falls", 0, 2, 1, 2, 3)
_indptr("beyond-nnz", 0, 1, 1, 2, 4)
_indptr("far-beyond-nnz", 0, 1, 1, 2, 2**31 - 1)
_indptr("negative", -1, 1, 1, 2, 3)
_indptr("starts-late", 1, 1, 1, 2, 3)
_indptr("ends-early", 0, 1, 1, 2, 2)


def _indices(
    id: str, indptr: tuple[int, ...], indices: tuple[int, ...], seen: str = "values", why: str = IN_DATA
) -> None:
    @case(57, id, "BCQ-V408", 4, seen=seen, why=why)
    def make(where: Path) -> Path:
        return place(where, sparse_weight(indptr=indptr, indices=indices))


_indices("beyond-in", (0, 1, 1, 2, 3), (3, 32, 31))
_indices("far-beyond-in", (0, 1, 1, 2, 3), (3, 65535, 31))
_indices("unsorted", (0, 2, 2, 2, 3), (9, 3, 31))
_indices("twice", (0, 2, 2, 2, 3), (3, 3, 31))


@case(57, "negative", "BCQ-V408", 4, seen="values", why=IN_DATA)
def negative_column(where: Path) -> Path:
    """Only matrices of more than 65536 columns have signed indices."""
    columns = 65_568
    tensors: dict[str, Tensor] = {
        "w.bcq_outlier_indices": ("I32", [1], i32(-1)),
        "w.bcq_outlier_indptr": ("I32", [2], i32(0, 1)),
        "w.bcq_s0_planes": ("I32", [1, 1, columns // 32], bytes(columns // 8)),
        "w.bcq_outlier_values": ("F16", [1], f16(1)),
        "w.bcq_s0_scale": ("F16", [1, 1], f16(1)),
    }
    segment = {"encoding": "affine", "bits": 1, "group_size": columns, "scale": "F16", "zero": 0}
    scheme = {"segments": [segment], "outliers": {"mode": "replace", "dtype": "F16", "segments": [0]}}
    weights = {"w.weight": {"scheme": 0, "shape": [1, columns], "dtype": "F16"}}
    descriptor = {"version": "1.0", "features": ["outliers"], "schemes": [scheme], "weights": weights}
    return place(where, frame(*described(tensors, descriptor)))


@case(58, "more-than-an-eighth", "BCQ-V410", 9)
def too_many_outliers(where: Path) -> Path:
    """Sixteen of 128 are allowed."""
    return place(where, sparse_weight(indptr=(0, 17, 17, 17, 17), indices=tuple(range(17))))


@legal(58, "an-eighth")
def many_outliers(where: Path) -> Path:
    return place(where, sparse_weight(indptr=(0, 16, 16, 16, 16), indices=tuple(range(16))))


# -- rows 59 to 62 ----------------------------------------------------------------------------------------------


@case(59, "plane", "BCQ-V401", 4, seen="validator", why=NO_EFFECT)
def plane_padding(where: Path) -> Path:
    header, data = example()
    return place(where, frame(header, data[:1] + b"\x01" + data[2:]))


@case(59, "zeros", "BCQ-V401", 4, seen="validator", why=NO_EFFECT)
def zero_padding(where: Path) -> Path:
    descriptor = example_descriptor()
    descriptor["schemes"][0]["segments"][0]["zero"] = {"bits": 2}
    tensors = {**example_tensors(), "w.bcq_s0_zero": ("I32", [2, 1], i32(1, 2 + 4))}
    ordered = {name: tensors[name] for name in ("w.bcq_s0_planes", "w.bcq_s0_zero", "w.bcq_s0_scale")}
    return place(where, frame(*described(ordered, descriptor)))


def _shape(row: int, id: str, shape: list[int]) -> None:
    @case(row, id, "BCQ-V210", 5)
    def make(where: Path) -> Path:
        descriptor = example_descriptor()
        descriptor["weights"]["w.weight"]["shape"] = shape
        if len(shape) == 3:
            descriptor["features"] = ["stack"]
        return place(where, frame(*described(example_tensors(), descriptor)))


_shape(60, "row-beyond-2-to-31", [2**31, 8])
_shape(60, "column-beyond-2-to-31", [2, 2**31])
_shape(60, "beyond-2-to-40-bits", [2**31 - 1, 2**10])
_shape(60, "stack-beyond-2-to-40-bits", [2**31 - 1, 2**31 - 1, 2**31 - 1])
_shape(60, "beyond-2-to-53-bits", [2**53 - 1, 2**53 - 1])
_shape(60, "no-rows", [0, 8])
_shape(61, "four-dimensions", [1, 1, 2, 8])
_shape(61, "one-dimension", [16])


@legal(61, "stack")
def stack(where: Path) -> Path:
    """Three dimensions are a stack of experts."""
    planes, scale = example_tensors().values()
    tensors: dict[str, Tensor] = {
        "experts.up_bcq_s0_planes": ("I32", [3, 2, 2, 1], planes[2] * 3),
        "experts.up_bcq_s0_scale": ("F16", [3, 2, 1], scale[2] * 3),
    }
    descriptor = example_descriptor()
    descriptor["weights"] = {"experts.up": {"scheme": 0, "shape": [3, 2, 8], "dtype": "F16"}}
    descriptor["features"] = ["stack"]
    return place(where, frame(*described(tensors, descriptor)))


@legal(62, "tied-and-extra")
def tied_and_extra(where: Path) -> Path:
    """A head that is tied to the embedding, and tensors that no layer of the model class names: carried as they are."""
    target = folder(where)
    for name in ("lm_head.weight", "model.layers.61.eh_proj.weight", "mtp.fc.weight", "model.layers.0.rotary.inv_freq"):
        add_tensor(target / SINGLE, name)
    return seal(target)


# -- rows 63 and 64 ---------------------------------------------------------------------------------------------


@case(63, "flipped-bit", "BCQ-V606", 6, seen="validator", why=DIGESTS)
def flipped_bit(where: Path) -> Path:
    target = folder(where)
    raw = bytearray((target / SINGLE).read_bytes())
    raw[-1] ^= 1
    (target / SINGLE).write_bytes(raw)
    return target


@case(63, "config", "BCQ-V606", 6, place=CONFIG, seen="validator", why=DIGESTS)
def changed_config(where: Path) -> Path:
    target = folder(where)
    raw = (target / CONFIG).read_bytes()
    (target / CONFIG).write_bytes(raw.replace(b'"vocab_size": 4', b'"vocab_size": 5'))
    return target


@case(63, "size", "BCQ-V605", 6, place=CONFIG, seen="validator", why=DIGESTS)
def changed_size(where: Path) -> Path:
    target = folder(where)
    (target / CONFIG).write_bytes((target / CONFIG).read_bytes() + b"\n")
    return target


@case(63, "manifest", "BCQ-V603", 6, place=MANIFEST, seen="validator", why=DIGESTS)
def wrong_manifest_digest(where: Path) -> Path:
    target = folder(where)
    text = (target / MANIFEST).read_text()
    (target / MANIFEST).write_text(text.replace('"generator":{"name":"bcqfmt"', '"generator":{"name":"bcqfmu"'))
    return target


@case(64, "swapped-length", "BCQ-V102", 4)
def swapped_length(where: Path) -> Path:
    raw = frame(*example())
    return place(where, raw[:8][::-1] + raw[8:])


# -- rows 65 to 67: versions and features -----------------------------------------------------------------------


def _described(row: int, id: str, code: str, exit: int, **keys: Any) -> None:
    @case(row, id, code, exit, place="model.safetensors" if code else "")
    def make(where: Path) -> Path:
        return place(where, frame(*described(example_tensors(), {**example_descriptor(), **keys})))


_described(65, "major", "BCQ-V205", 5, version="2.0")
_described(65, "far-future", "BCQ-V205", 5, version="999999999999999999999.0", features=["holograms"], schemes=None)
_described(65, "no-minor", "BCQ-V205", 5, version="1")
_described(65, "leading-zero", "BCQ-V205", 5, version="01.0")
_described(65, "other-digits", "BCQ-V205", 5, version="\u0661.\u0660")
_described(66, "minor", "", 0, version="1.7")
_described(66, "ignorable", "", 0, ignorable={"anything": [1, {"a": None}]})
_described(67, "feature", "BCQ-V206", 5, features=["holograms"])
_described(67, "key", "BCQ-V208", 4, hologram=True)


def _new_version(target: Path, version: str) -> Path:
    describe_again(target / SINGLE, lambda descriptor: descriptor.update(version=version))
    config = read_json(target / CONFIG)
    config["quantization_config"]["format_version"] = version
    write_json(target / CONFIG, config)
    return seal(target, lambda manifest: manifest.update(version=version))


@case(65, "folder", "BCQ-V205", 5, place=MANIFEST)
def folder_of_version_2(where: Path) -> Path:
    return _new_version(folder(where), "2.0")


@legal(66, "folder")
def folder_of_version_1_7(where: Path) -> Path:
    return _new_version(folder(where), "1.7")


@legal(66, "folder-ignorable")
def folder_ignorable(where: Path) -> Path:
    target = folder(where)
    describe_again(target / SINGLE, lambda descriptor: descriptor.update(ignorable={"a": 1}))
    return seal(target, lambda manifest: manifest.update(ignorable={"b": [2]}))


@case(67, "folder", "BCQ-V206", 5, place=MANIFEST)
def folder_feature(where: Path) -> Path:
    return seal(folder(where), lambda manifest: manifest.update(features=["holograms"]))


# -- row 68: metadata and tensors disagree ----------------------------------------------------------------------


def _disagree(id: str, code: str, change: Any) -> None:
    @case(68, id, code, 4)
    def make(where: Path) -> Path:
        descriptor = example_descriptor()
        change(descriptor["weights"]["w.weight"], descriptor["schemes"][0]["segments"][0])
        return place(where, frame(*described(example_tensors(), descriptor)))


_disagree("bits", "BCQ-V304", lambda weight, segment: segment.update(bits=3))
_disagree("shape", "BCQ-V304", lambda weight, segment: weight.update(shape=[3, 8]))
_disagree("group-size", "BCQ-V212", lambda weight, segment: segment.update(group_size=16))
_disagree("scale-type", "BCQ-V303", lambda weight, segment: segment.update(scale="BF16"))
_disagree("zeros", "BCQ-V301", lambda weight, segment: segment.update(zero={"bits": 2}))
_disagree("scheme", "BCQ-V209", lambda weight, segment: weight.update(scheme=1))


@case(68, "orphan", "BCQ-V302", 4)
def orphan(where: Path) -> Path:
    tensors = {**example_tensors(), "v.bcq_s0_scale": ("F16", [2, 1], f16(1, 1))}
    return place(where, frame(*described(tensors, example_descriptor())))


@case(68, "dense-of-the-same-name", "BCQ-V214", 4)
def same_name(where: Path) -> Path:
    tensors = {**example_tensors(), "w.weight": ("F16", [1], f16(1))}
    return place(where, frame(*described(tensors, example_descriptor())))


@case(68, "features", "BCQ-V207", 4)
def features(where: Path) -> Path:
    return place(where, frame(*described(example_tensors(), {**example_descriptor(), "features": ["perm"]})))


@case(68, "manifest-shape", "BCQ-V608", 4, place=MANIFEST, seen="validator", why=BY_FILES)
def manifest_shape(where: Path) -> Path:
    def change(manifest: Json) -> None:
        manifest["weights"]["model.layers.0.mlp.up_proj.weight"]["shape"] = [8, 128]

    return seal(folder(where), change)


@case(68, "manifest-lacks-a-weight", "BCQ-V608", 4, place=MANIFEST, seen="validator", why=BY_FILES)
def manifest_lacks(where: Path) -> Path:
    def change(manifest: Json) -> None:
        del manifest["weights"]["model.layers.0.mlp.up_proj.weight"]

    return seal(folder(where), change)


@case(68, "config", "BCQ-V512", 4, place=CONFIG, seen="validator", why=NO_CONFIG)
def config_disagrees(where: Path) -> Path:
    target = folder(where)
    write_json(target / CONFIG, {"quantization_config": {"quant_method": "gptq", "bits": 4}})
    return seal(target)


@case(68, "config-says-nothing", "BCQ-V512", 4, place=CONFIG, seen="validator", why=NO_CONFIG)
def config_says_nothing(where: Path) -> Path:
    target = folder(where)
    write_json(target / CONFIG, {"vocab_size": 4})
    return seal(target)


@case(68, "lost-metadata-and-manifest", "BCQ-V201", 5)
def lost_metadata(where: Path) -> Path:
    """Parts are there, but nothing says what they mean."""
    header, data = example()
    del header["__metadata__"]
    return place(where, frame(header, data))


@case(68, "lost-metadata-in-folder", "BCQ-V201", 5, seen="validator", why=FALLBACK)
def lost_metadata_in_folder(where: Path) -> Path:
    target = folder(where)
    header, data = split(target / SINGLE)
    header["__metadata__"] = {"format": "pt"}
    (target / SINGLE).write_bytes(frame(header, data))
    return seal(target)
