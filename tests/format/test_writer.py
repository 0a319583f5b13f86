"""What is written: canonical bytes, the same everywhere, readable by the reference library, never invalid."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given

import bcqfmt
from bcqfmt import BcqError, BcqWeight, StoredTensor
from weights import oracle, samples
from weights.oracle import Plain
from weights.strategies import examples, plain_of, tiled_weights, weights

ROOT = Path(__file__).resolve().parents[2]
Pair = tuple[BcqWeight, Plain]


def save_all(folder: Path, tensors: dict[str, Any] | None = None, **options: Any) -> dict[str, bytes]:
    bcqfmt.save(
        folder, samples.tensors() if tensors is None else tensors, config=samples.CONFIG, files=samples.SIDE, **options
    )
    return samples.tree(folder)


# -- the same bytes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shard", [10**9, 700])
def test_twice_and_in_any_order(tmp_path: Path, shard: int) -> None:
    tensors = samples.tensors()
    first = save_all(tmp_path / "a", tensors, max_shard_size=shard)
    assert save_all(tmp_path / "b", tensors, max_shard_size=shard) == first
    backwards = dict(reversed(tensors.items()))
    assert save_all(tmp_path / "c", backwards, max_shard_size=shard) == first
    swapped = {name: tensors[name] for name in sorted(tensors, key=lambda name: name[::-1])}
    assert save_all(tmp_path / "d", swapped, max_shard_size=shard) == first
    assert (len([name for name in first if name.endswith(".safetensors")]) == 1) == (shard > 10**6)


def test_order_does_not_matter_where_numbers_look_alike(tmp_path: Path) -> None:
    """'x.1' and 'x.01' are equal to a natural sort; the bytes must not follow the order of the caller's dict."""
    tensors = {"x.01": np.arange(64, dtype=np.int32), "x.1": np.arange(32, dtype=np.int32), "x.001": np.arange(16)}
    first = save_all(tmp_path / "a", tensors, max_shard_size=300)
    for i, order in enumerate((["x.1", "x.01", "x.001"], ["x.001", "x.1", "x.01"])):
        assert save_all(tmp_path / f"b{i}", {name: tensors[name] for name in order}, max_shard_size=300) == first


def test_order_of_config_and_side_files_does_not_matter(tmp_path: Path) -> None:
    tensors = samples.tensors()
    bcqfmt.save(
        tmp_path / "a", tensors, config=samples.CONFIG, files=samples.SIDE, ignorable={"b": 1, "a": {"d": 2, "c": 3}}
    )
    bcqfmt.save(
        tmp_path / "b",
        tensors,
        config=dict(reversed(samples.CONFIG.items())),
        files=dict(reversed(samples.SIDE.items())),
        ignorable={"a": {"c": 3, "d": 2}, "b": 1},
    )
    assert samples.tree(tmp_path / "a") == samples.tree(tmp_path / "b")


PROGRAM = """
import sys, os
os.umask(int(sys.argv[2], 8))
import bcqfmt
from weights import samples
bcqfmt.save(sys.argv[1], samples.tensors(), config=samples.CONFIG, files=samples.SIDE, max_shard_size=700)
bcqfmt.save(sys.argv[1] + ".safetensors", samples.tensors())
"""


def in_another_process(target: Path, umask: str, **environment: str) -> None:
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "support")])
    base = {**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1", "PYTHONDONTWRITEBYTECODE": "1", **environment}
    subprocess.run([sys.executable, "-c", PROGRAM, str(target), umask], check=True, env=base, timeout=120)


ENVIRONMENTS = [
    ("022", {"PYTHONHASHSEED": "0", "TZ": "UTC", "LC_ALL": "C"}),
    ("027", {"PYTHONHASHSEED": "1", "TZ": "Asia/Kathmandu", "LC_ALL": "C.UTF-8", "OMP_NUM_THREADS": "1"}),
    (
        "077",
        {
            "PYTHONHASHSEED": "4242",
            "TZ": "America/St_Johns",
            "LANG": "tr_TR.UTF-8",
            "PYTHONUTF8": "0",
            "SOURCE_DATE_EPOCH": "1",
        },
    ),
]


def test_another_process_environment_and_umask(tmp_path: Path) -> None:
    """Hash seed, time zone, locale, umask: nothing of them is in a byte; the umask is in the mode."""
    here = save_all(tmp_path / "here", max_shard_size=700)
    bcqfmt.save(tmp_path / "here.safetensors", samples.tensors())
    for i, (umask, environment) in enumerate(ENVIRONMENTS):
        target = tmp_path / f"there{i}"
        in_another_process(target, umask, **environment)
        assert samples.tree(target) == here
        assert target.with_suffix(".safetensors").read_bytes() == (tmp_path / "here.safetensors").read_bytes()
        mask = int(umask, 8)
        for path in [*target.rglob("*"), target, target.with_suffix(".safetensors")]:
            wanted = (0o777 if path.is_dir() else 0o666) & ~mask
            assert path.stat().st_mode & 0o777 == wanted, path


# -- canonical against the vectors and the oracle --------------------------------------------------------------


def lone_vectors() -> list[str]:
    entries = samples.vector_index()["valid"]
    return [entry["id"] for entry in entries if entry["kind"] == "file"]


@pytest.mark.parametrize("name", lone_vectors())
def test_saving_a_vector_again_gives_its_bytes(tmp_path: Path, name: str) -> None:
    path = samples.VECTORS / "valid" / f"{name}.safetensors"
    raw = path.read_bytes()
    header, data = oracle.split(raw)
    described = json.loads(header["__metadata__"]["bcqfmt"])
    with bcqfmt.open(path) as checkpoint:
        tensors = {entry: checkpoint[entry] for entry in checkpoint}
        bcqfmt.save(tmp_path / "again.safetensors", tensors, ignorable=described.get("ignorable"))
    again = (tmp_path / "again.safetensors").read_bytes()
    assert not bcqfmt.validate(tmp_path / "again.safetensors", deep=True).errors
    order = sorted((n for n in header if n != "__metadata__"), key=lambda n: (-bits(header[n]["dtype"]), n))
    placed = sorted(order, key=lambda n: (header[n]["data_offsets"], order.index(n)))
    as_ours = (
        described["version"] == "1.0"
        and header["__metadata__"].keys() == {"bcqfmt", "format"}
        and raw == oracle.framed(oracle.canonical(header).encode(), data)
        and placed == order
        and described["schemes"] == sorted(described["schemes"], key=oracle.canonical)
    )
    if as_ours:
        assert again == raw
    else:
        with bcqfmt.open(path) as old, bcqfmt.open(tmp_path / "again.safetensors") as new:
            assert set(old) == set(new)
            for entry in old:
                assert content(old[entry]) == content(new[entry])


def bits(dtype: str) -> int:
    from bcqfmt.container.dtypes import BITS

    return BITS[dtype]


def test_most_vectors_are_in_canonical_form() -> None:
    """So that the test above is not empty: all but those that are about other forms."""
    canonical = 0
    for name in lone_vectors():
        header, data = oracle.split((samples.VECTORS / "valid" / f"{name}.safetensors").read_bytes())
        raw = (samples.VECTORS / "valid" / f"{name}.safetensors").read_bytes()
        canonical += raw == oracle.framed(oracle.canonical(header).encode(), data)
    assert canonical >= len(lone_vectors()) - 5


@given(weights(nonfinite=None))
@examples(40)
def test_a_file_is_the_bytes_that_the_oracle_lays_out(tmp_path_factory: pytest.TempPathFactory, pair: Pair) -> None:
    weight, plain = pair
    path = tmp_path_factory.mktemp("save") / "a.safetensors"
    dense = {"norm": ("F32", [2], b"\0\0\x80?\0\0\0@"), "a.mask": ("U8", [3], b"abc")}
    tensors = {"a.weight": weight, "norm": np.array([1, 2], np.float32), "a.mask": np.frombuffer(b"abc", np.uint8)}
    bcqfmt.save(path, tensors)
    assert path.read_bytes() == oracle.file_bytes({"a.weight": plain}, dense)


@given(weights(nonfinite=None), tiled_weights(), weights(stack=True))
@examples(20)
def test_what_is_opened_is_what_was_saved(tmp_path_factory: pytest.TempPathFactory, a: Pair, b: Pair, c: Pair) -> None:
    folder = tmp_path_factory.mktemp("save") / "model"
    pairs = {"a.weight": a, "b": b, "c.0.weight": c}
    bcqfmt.save(folder, {name: weight for name, (weight, _) in pairs.items()}, max_shard_size=2000)
    assert {f.code for f in bcqfmt.validate(folder, deep=True).findings} <= (
        {"BCQ-E503"} if a[0].scheme.nonfinite else set()
    )
    with bcqfmt.open(folder) as checkpoint:
        assert set(checkpoint) == set(pairs)
        for name, (weight, plain) in pairs.items():
            found = checkpoint.weight(name)
            assert plain_of(found) == plain
            assert found.digest() == weight.digest()
            assert checkpoint.manifest.weights[name].spec == weight.spec


def content(entry: BcqWeight | StoredTensor) -> Any:
    if isinstance(entry, BcqWeight):
        return entry.digest()
    return entry.dtype, entry.shape, entry.tobytes()


# -- what the caller gives -------------------------------------------------------------------------------------


def test_arrays_of_any_layout_are_stored_by_value(tmp_path: Path) -> None:
    base = np.arange(24, dtype=np.int32).reshape(4, 6)
    tensors = {
        "fortran": np.asfortranarray(base),
        "strided": base[::2, ::3],
        "reversed": base[:, ::-1],
        "big": base.astype(">i4"),
        "big_float": np.array([1.5, -2.5], ">f2"),
        "scalar": np.array(3.25),
        "read_only": np.frombuffer(b"\1\2\3\4", np.uint8),
        "broadcast": np.broadcast_to(np.float32(2), (3, 2)),
    }
    bcqfmt.save(tmp_path / "a.safetensors", tensors)
    with bcqfmt.open(tmp_path / "a.safetensors") as found:
        for name, array in tensors.items():
            assert found[name].array().tolist() == array.tolist(), name
            assert found[name].shape == array.shape


@pytest.mark.parametrize("order", [">", "<"])
def test_numbers_of_a_weight_in_any_byte_order(order: str) -> None:
    codes = np.arange(16).reshape(2, 8) % 4
    scale = np.array([[0.5], [-3.0]], f"{order}f2")
    weight = BcqWeight.from_affine(codes.astype(f"{order}i4"), scale, np.array([[1], [2]], f"{order}i2"), group_size=8)
    assert weight.dequantize().tolist() == (scale.astype(float) * (codes - [[1], [2]])).tolist()


def test_the_callers_arrays_stay_as_they_were(tmp_path: Path) -> None:
    array = np.arange(8, dtype=np.float32)
    scale = np.ones((1, 1), np.float16)
    weight = BcqWeight.from_affine(np.arange(8)[None], scale, 0, group_size=8)
    bcqfmt.save(tmp_path / "a.safetensors", {"x": array, "w.weight": weight})
    assert array.flags.writeable
    assert scale.flags.writeable


def deep_dict(levels: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(levels):
        value = {"a": value}
    return value


X = np.zeros(4, np.float32)
BAD_INPUTS: dict[str, dict[str, Any]] = {
    "names that differ in case": {"tensors": {"A": X, "a": X}},
    "names that differ in the case of one ASCII letter": {"tensors": {"\u00e9A": X, "\u00e9a": X}},
    "weights that differ in case": {"tensors": {"A.weight": samples.affine(), "a.weight": samples.affine()}},
    "lone surrogate in a name": {"tensors": {"a\ud800": X}},
    "name of 513 bytes": {"tensors": {"n" * 513: X}},
    "name of 257 two-byte letters": {"tensors": {"\u00e9" * 257: X}},
    "__metadata__": {"tensors": {"__metadata__": X}},
    "name of a part": {"tensors": {"w.bcq_s0_planes": X}},
    "seventeen dimensions": {"tensors": {"x": np.zeros((1,) * 17, np.float32)}},
    "type that cannot be stored": {"tensors": {"x": np.zeros(2, np.complex128)}},
    "objects": {"tensors": {"x": np.array([object()])}},
    "text": {"tensors": {"x": np.array(["a"])}},
    "weight with a space in its name": {"tensors": {"a b.weight": samples.affine()}},
    "weight named by dots": {"tensors": {"a..b": samples.affine()}},
    "weight of 481 bytes": {"tensors": {"n" * 481: samples.affine()}},
    "weight without a name": {"tensors": {"": samples.affine()}},
    "fraction in ignorable": {"ignorable": {"x": 1.5}},
    "NaN in ignorable": {"ignorable": {"x": float("nan")}},
    "large integer in ignorable": {"ignorable": {"x": 2**53}},
    "deep ignorable": {"ignorable": deep_dict(20)},
    "ignorable with integer keys": {"ignorable": {9: "x", 10: "y"}},
    "ignorable with keys of two types": {"ignorable": {1: "x", "1": "y"}},
    "lone surrogate in ignorable": {"ignorable": {"x": "\ud800"}},
    "ignorable that is a list": {"ignorable": [1]},
    "ignorable with bytes": {"ignorable": {"x": b"a"}},
    "generator without version": {"generator": {"name": "x"}},
    "generator with a number": {"generator": {"name": "x", "version": 1}},
    "generator with more": {"generator": {"name": "x", "version": "1", "date": "today"}},
    "config that is a list": {"config": [1]},
    "config with an object": {"config": {"x": object()}},
    "config with keys of two types": {"config": {1: "x", "1": "y"}},
    "side file over config": {"files": {"config.json": b"{}"}},
    "side file over the manifest": {"files": {"bcq_manifest.json": b"{}"}},
    "side file over the index": {"files": {"model.safetensors.index.json": b"{}"}},
    "side file that is a shard": {"files": {"model.safetensors": b"{}"}},
    "hidden side file": {"files": {".hidden": b""}},
    "side file in a hidden folder": {"files": {".git/x": b""}},
    "side file above": {"files": {"../x": b""}},
    "absolute side file": {"files": {"/tmp/bcq-should-not-appear": b""}},
    "side file with an empty name": {"files": {"": b""}},
    "file and folder of one name": {"files": {"a": b"", "a/b": b""}},
    "folder and file of one name": {"files": {"a/b": b"", "a": b""}},
    "folder named like config.json": {"files": {"config.json/x": b""}},
    "folder named like the manifest": {"files": {"bcq_manifest.json/x": b""}},
    "side file with a null": {"files": {"a\0b": b""}},
    "side file with a lone surrogate": {"files": {"a\ud800": b""}},
    "side file name too long": {"files": {"n" * 300: b""}},
    "side file of text": {"files": {"x": "text"}},
    "malformed provenance": {"files": {"bcq_source/source.json": b"{}"}},
}


def refused_or_valid(target: Path, arguments: dict[str, Any]) -> None:
    try:
        bcqfmt.save(target, **arguments)
    except (BcqError, TypeError):  # TypeError: what Python itself says about an argument of a wrong type
        assert list(target.parent.iterdir()) == []
    else:
        assert {finding.code for finding in bcqfmt.validate(target, deep=True).findings} <= {"BCQ-E501"}


@pytest.mark.parametrize("case", BAD_INPUTS)
def test_nothing_invalid_is_ever_written(tmp_path: Path, case: str) -> None:
    """An input that would make an invalid folder is refused with an error of ours, and leaves nothing behind."""
    refused_or_valid(tmp_path / "model", {"tensors": {"w.weight": samples.affine()}, **BAD_INPUTS[case]})


@pytest.mark.parametrize(
    "case", [case for case, value in BAD_INPUTS.items() if value.keys() <= {"tensors", "ignorable"}]
)
def test_nor_as_a_lone_file(tmp_path: Path, case: str) -> None:
    refused_or_valid(tmp_path / "model.safetensors", {"tensors": {"w.weight": samples.affine()}, **BAD_INPUTS[case]})


@pytest.mark.parametrize(
    ("tensors", "code", "hint"),
    [
        ([samples.affine()], "BCQ-E302", "save(path, {"),
        (samples.affine(), "BCQ-E302", "save(path, {"),
        ({"": samples.affine()}, "BCQ-V213", "another name"),
        ({"x": [1.0]}, "BCQ-E302", "expected"),
        ({"x": None}, "BCQ-E302", "expected"),
    ],
)
def test_hints_are_about_what_was_passed(tmp_path: Path, tensors: Any, code: str, hint: str) -> None:
    """There is no file yet that a writer could have written wrongly."""
    with pytest.raises(BcqError) as caught:
        bcqfmt.save(tmp_path / "m", tensors)
    assert caught.value.code == code
    assert hint in caught.value.hint
    assert "file" not in caught.value.hint


def test_content_is_checked_before_anything_is_written(tmp_path: Path) -> None:
    bad = BcqWeight.from_affine(np.zeros((1, 8), int), np.array([[np.inf]], np.float16), 0, group_size=8)
    with pytest.raises(BcqError) as caught:
        bcqfmt.save(tmp_path / "m", {"w.weight": bad})
    assert caught.value.code == "BCQ-V405"
    assert list(tmp_path.iterdir()) == []
    bcqfmt.save(tmp_path / "m", {"w.weight": bad.allow_nonfinite()})
    report = bcqfmt.validate(tmp_path / "m", deep=True)
    assert [f.code for f in report.findings] == ["BCQ-E503"]
    assert report.valid


def test_names_that_are_merely_odd(tmp_path: Path) -> None:
    names = [
        "",
        " ",
        "a/b",
        "\u202e",
        "naïve",
        "\U0001f600",
        "a\nb",
        '"quoted\\"',
        "__metadata",
        "x" * 512,
        ".weight",
        "bcq_s0_planes",
    ]
    tensors = {name: np.array([i], np.int16) for i, name in enumerate(names)}
    for target in (tmp_path / "m", tmp_path / "m.safetensors"):
        bcqfmt.save(target, tensors)
        assert not bcqfmt.validate(target, deep=True).errors
        with bcqfmt.open(target) as found:
            assert {name: found[name].array().tolist() for name in found} == {n: [i] for i, n in enumerate(names)}


def test_config_is_kept_and_told_the_format(tmp_path: Path) -> None:
    given = {"hidden_size": 8, "quantization_config": {"quant_method": "gptq"}, "nested": {"list": [1, 2.5, None]}}
    bcqfmt.save(tmp_path / "m", {"w.weight": samples.planes()}, config=given)
    written = json.loads((tmp_path / "m" / "config.json").read_text())
    quantization = written.pop("quantization_config")
    assert quantization == {"quant_method": "bcq", "format_version": "1.0", "features": ["bcq", "multi-precision"]}
    assert "import bcqfmt.integrations.transformers" in written.pop("transformers_weights")
    assert written == {"hidden_size": 8, "nested": {"list": [1, 2.5, None]}}
    assert given["quantization_config"] == {"quant_method": "gptq"}


def test_ignorable_and_generator_come_back(tmp_path: Path) -> None:
    extra = {"note": "naïve \U0001f600", "n": [-(2**53 - 1), None, True, {"": ""}]}
    bcqfmt.save(
        tmp_path / "m", {"w.weight": samples.affine()}, ignorable=extra, generator={"name": "me", "version": "3"}
    )
    manifest = bcqfmt.open(tmp_path / "m").manifest
    assert manifest is not None
    assert (manifest.ignorable, manifest.generator) == (extra, {"name": "me", "version": "3"})
    header, _ = oracle.split((tmp_path / "m" / "model.safetensors").read_bytes())
    assert json.loads(header["__metadata__"]["bcqfmt"])["ignorable"] == extra
    assert not bcqfmt.validate(tmp_path / "m", deep=True).findings


def test_bfloat16_dense_tensor_from_ml_dtypes(tmp_path: Path) -> None:
    array = np.array([1.0, -2.5, 3e38], ml_dtypes.bfloat16)
    bcqfmt.save(tmp_path / "a.safetensors", {"x": array})
    tensor = bcqfmt.open(tmp_path / "a.safetensors")["x"]
    assert tensor.dtype == "BF16"
    assert tensor.tobytes() == array.tobytes()
