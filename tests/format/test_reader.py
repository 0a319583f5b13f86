"""Reading: lazy and counted, byte for byte, from threads, with many files, from hub caches (spec sections 3, 6, 9)."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import pickle
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import bcqfmt
from bcqfmt import BcqError, BcqWeight, FormatError, InputError, StoredTensor, UsageError
from bcqfmt.container import files
from bcqfmt.container.dtypes import BITS, numpy_dtype
from weights import oracle, samples


def folder_of(tmp_path: Path, **options: Any) -> Path:
    bcqfmt.save(tmp_path / "model", samples.tensors(), config=samples.CONFIG, files=samples.SIDE, **options)
    return tmp_path / "model"


def header_size(path: Path) -> int:
    with path.open("rb") as file:
        return 8 + int.from_bytes(file.read(8), "little")


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


# -- lazy ------------------------------------------------------------------------------------------------------


def test_opening_a_folder_reads_nothing_of_the_model(tmp_path: Path) -> None:
    with bcqfmt.open(folder_of(tmp_path, max_shard_size=700)) as checkpoint:
        assert checkpoint.bytes_read == 0
        assert checkpoint.features
        assert checkpoint.version == "1.0"
        assert checkpoint.bytes_read == 0


def test_listing_reads_headers_only(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, max_shard_size=700)
    headers = sum(header_size(path) for path in folder.glob("*.safetensors"))
    with bcqfmt.open(folder) as checkpoint:
        for _, weight in checkpoint.weights():
            assert weight.nbytes
            assert weight.bits_per_weight > 1
            assert weight.segments
            weight.parts()
        assert sorted(checkpoint) == sorted(samples.tensors())
        assert checkpoint.bytes_read <= headers + 64 * len(list(folder.glob("*.safetensors")))


def test_one_weight_of_many_shards_opens_one_shard(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, max_shard_size=700)
    with bcqfmt.open(folder) as checkpoint:
        weight = checkpoint.weight("model.layers.2.up.weight")
        assert checkpoint.bytes_read <= header_size(next(iter(weight.parts().values())).file) + 64
        dense = checkpoint["model.norm.weight"]
        assert isinstance(dense, StoredTensor)
        assert len(checkpoint._opened) <= 2


@pytest.mark.parametrize("name", ["plain", "stack", "segments"])
def test_planes_read_their_bytes_and_no_others(tmp_path: Path, name: str) -> None:
    rng = np.random.default_rng(1)
    out, n, q = 5, 70, 4
    if name == "stack":
        weight = BcqWeight.from_affine(
            rng.integers(0, 16, (3, out, n)), np.ones((3, out, 3), np.float16), 8, group_size=32, bits=q
        )
    elif name == "segments":
        weight = BcqWeight.from_segments([samples.affine(out, 64, 3), samples.affine(out, n, q, 2)])
    else:
        weight = samples.affine(out, n, q)
    bcqfmt.save(tmp_path / "a.safetensors", {"w.weight": weight})
    for p in range(1, 7):
        with bcqfmt.open(tmp_path / "a.safetensors") as checkpoint:
            stored = checkpoint.weight("w.weight")
            before = checkpoint.bytes_read
            found = stored.planes(first=p)
            expected = sum(
                4 * min(p, segment.bits) * out * -(-width // 32) * weight.spec.stack
                for segment, width in weight.segments
            )
            assert checkpoint.bytes_read - before == expected
            for mine, whole in zip(found, weight.planes(), strict=True):
                lead = (slice(None),) if name == "stack" else ()
                assert mine.tobytes() == whole[(*lead, slice(0, p))].tobytes()


def test_the_first_planes_are_one_run_of_bytes(tmp_path: Path) -> None:
    """Spec 6.2: what `planes` delivers is what stands in the file from the part's offset on."""
    bcqfmt.save(tmp_path / "a.safetensors", {"w.weight": samples.affine(5, 70, 4)})
    raw = (tmp_path / "a.safetensors").read_bytes()
    weight = bcqfmt.open(tmp_path / "a.safetensors").weight("w.weight")
    part = weight.parts()["s0_planes"]
    assert part.file == tmp_path / "a.safetensors"
    for p in range(1, 5):
        size = 4 * p * 5 * 3
        assert weight.planes(first=p)[0].tobytes() == raw[part.offset : part.offset + size]


def test_fewer_planes_read_less(tmp_path: Path) -> None:
    bcqfmt.save(tmp_path / "a.safetensors", {"w.weight": samples.affine(8, 256, 8)})
    read = []
    for p in (1, 2, 4, 8):
        with bcqfmt.open(tmp_path / "a.safetensors") as checkpoint:
            weight = checkpoint.weight("w.weight")
            before = checkpoint.bytes_read
            weight.dequantize(planes=p)
            read.append(checkpoint.bytes_read - before)
    others = read[0] - 8 * 32  # everything but the planes
    assert [size - others for size in read] == [8 * 32 * p for p in (1, 2, 4, 8)]


@pytest.mark.parametrize("maker", [samples.affine, samples.planes, samples.rich])
def test_rows_read_in_proportion(tmp_path: Path, maker: Callable[[int], BcqWeight]) -> None:
    weight = maker(64)
    bcqfmt.save(tmp_path / "a.safetensors", {"w.weight": weight})
    sizes = []
    for rows in ((0, 64), (8, 40), (10, 11)):
        with bcqfmt.open(tmp_path / "a.safetensors") as checkpoint:
            stored = checkpoint.weight("w.weight")
            before = checkpoint.bytes_read
            found = stored.dequantize(rows=rows)
            sizes.append(checkpoint.bytes_read - before)
            assert found.tobytes() == weight.dequantize()[rows[0] : rows[1]].tobytes()
    indices = [
        part.nbytes
        for suffix, part in weight.parts().items()
        if suffix in ("perm", "outlier_indptr", "outlier_indices")
    ]
    checked = sum(indices)  # read whole, once, before any of them is used
    sizes = [size - checked for size in sizes]
    fixed = weight.parts()["perm"].nbytes + 64 if weight.scheme.perm else 64
    if maker is not samples.planes:  # its second scale set is not needed, but small
        assert sizes[0] <= weight.nbytes
    assert sizes[1] <= sizes[0] / 2 + fixed
    assert sizes[2] <= sizes[0] / 64 + fixed


def test_row_slices_read_in_proportion(tmp_path: Path) -> None:
    bcqfmt.save(tmp_path / "a.safetensors", {"w.weight": samples.affine(64, 256)})
    with bcqfmt.open(tmp_path / "a.safetensors") as checkpoint:
        weight = checkpoint.weight("w.weight")
        before = checkpoint.bytes_read
        sliced = weight.rows(16, 32)
        assert checkpoint.bytes_read - before == weight.nbytes // 4
        assert sliced.nbytes == weight.nbytes // 4


# -- dense tensors ---------------------------------------------------------------------------------------------


def test_dense_tensors_byte_for_byte(tmp_path: Path) -> None:
    tensors = samples.dense_file(tmp_path / "a.safetensors")
    assert not bcqfmt.validate(tmp_path / "a.safetensors", deep=True).errors
    with bcqfmt.open(tmp_path / "a.safetensors") as checkpoint:
        assert set(checkpoint) == set(tensors)
        for name, (dtype, shape, raw) in tensors.items():
            found = checkpoint[name]
            assert (found.dtype, list(found.shape), found.tobytes()) == (dtype, shape, raw)
            assert found.array().tobytes() == raw
            assert found.map().tobytes() == raw
            assert b"".join(chunk.tobytes() for chunk in found.chunks(3)) == raw
            if BITS[dtype] >= 8:
                assert found.array().shape == found.map().shape == tuple(shape)
                assert found.array().dtype == found.map().dtype == numpy_dtype(dtype)


def test_arrays_are_read_only(tmp_path: Path) -> None:
    tensors = samples.dense_file(tmp_path / "a.safetensors")
    with bcqfmt.open(tmp_path / "a.safetensors") as checkpoint:
        for name in tensors:
            assert not checkpoint[name].array().flags.writeable, name
            assert checkpoint[name].nbytes == 0 or not checkpoint[name].map().flags.writeable, name


def test_dense_tensors_survive_being_saved_again(tmp_path: Path) -> None:
    samples.dense_file(tmp_path / "a.safetensors")
    checkpoint = bcqfmt.open(tmp_path / "a.safetensors")
    bcqfmt.save(tmp_path / "b.safetensors", {name: checkpoint[name] for name in checkpoint})
    assert (tmp_path / "b.safetensors").read_bytes() == (tmp_path / "a.safetensors").read_bytes()


def test_parts_say_where_they_lie(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, max_shard_size=700)
    for name, weight in bcqfmt.open(folder).weights():
        for suffix, part in weight.parts().items():
            assert part.name == oracle.prefix(name) + suffix
            assert part.file is not None
            raw = part.file.read_bytes()
            assert (
                raw[part.offset : part.offset + part.nbytes]
                == part.tobytes()
                == part.map().tobytes()
                == part.array().tobytes()
            )


# -- mapping ---------------------------------------------------------------------------------------------------


def test_a_checkpoint_is_a_mapping(tmp_path: Path) -> None:
    with bcqfmt.open(folder_of(tmp_path, max_shard_size=700)) as checkpoint:
        names = set(samples.tensors())
        assert set(checkpoint) == names
        assert len(checkpoint) == len(names)
        assert all(name in checkpoint for name in names)
        assert "model.layers.0.up.bcq_s0_planes" not in checkpoint
        assert {name for name, _ in checkpoint.weights()} | {name for name, _ in checkpoint.dense()} == names
        assert isinstance(checkpoint["model.layers.0.up.weight"], BcqWeight)
        with pytest.raises(UsageError) as caught:
            checkpoint["model.layers.0.down.weight"]
        assert caught.value.code == "BCQ-E301"
        with pytest.raises(UsageError) as caught:
            checkpoint.weight("model.norm.weight")
        assert caught.value.code == "BCQ-E301"


def test_after_close_it_can_be_read_again(tmp_path: Path) -> None:
    checkpoint = bcqfmt.open(folder_of(tmp_path))
    weight = checkpoint.weight("model.layers.0.up.weight")
    before = weight.dequantize()
    checkpoint.close()
    assert weight.dequantize().tobytes() == before.tobytes()


@pytest.mark.parametrize("lone", [True, False])
def test_weights_can_be_pickled_and_copied(tmp_path: Path, lone: bool) -> None:
    if lone:
        bcqfmt.save(tmp_path / "m.safetensors", samples.tensors())
    checkpoint = bcqfmt.open(tmp_path / "m.safetensors" if lone else folder_of(tmp_path))
    for name, weight in checkpoint.weights():
        for again in (pickle.loads(pickle.dumps(weight)), copy.deepcopy(weight), copy.copy(weight)):
            assert again.name == name
            assert again.dequantize().tobytes() == weight.dequantize().tobytes()
            assert again.digest() == weight.digest()
    memory = samples.rich()
    assert pickle.loads(pickle.dumps(memory)).digest() == memory.digest()
    tensor = checkpoint["model.norm.weight"]
    assert pickle.loads(pickle.dumps(tensor)).tobytes() == tensor.tobytes()


def test_a_pickled_weight_knows_the_file_it_came_from(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    raw = pickle.dumps(bcqfmt.open(folder).weight("model.layers.0.up.weight"))
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes() + b"x")
    with pytest.raises(InputError) as caught:
        pickle.loads(raw).dequantize()
    assert caught.value.code == "BCQ-E103"


def test_errors_can_be_pickled() -> None:
    """They travel from worker processes."""
    for made in (InputError, FormatError, UsageError):
        fault = made(bcqfmt.Finding("BCQ-E103", "a", "b", "c", "d"), "hint")
        again = pickle.loads(pickle.dumps(fault))
        assert (type(again), again.finding, again.hint, str(again)) == (made, fault.finding, "hint", str(fault))


# -- threads and many files ------------------------------------------------------------------------------------


def test_threads_read_the_same(tmp_path: Path) -> None:
    tensors = {f"l{i}.weight": samples.affine(16, 128, 1 + i % 8, i) for i in range(24)}
    bcqfmt.save(tmp_path / "m", tensors, max_shard_size=4000)
    expected = {name: weight.dequantize().tobytes() for name, weight in tensors.items()}
    checkpoint = bcqfmt.open(tmp_path / "m")
    start = threading.Barrier(8)

    def work(seed: int) -> int:
        names = list(tensors)
        np.random.default_rng(seed).shuffle(names)
        start.wait()
        return sum(checkpoint.weight(name).dequantize().tobytes() == expected[name] for name in names)

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(work, range(8))) == [24] * 8


def test_many_files_and_few_descriptors(tmp_path: Path) -> None:
    """Two hundred files open at once, read in turn and by threads, with at most about 64 descriptors."""
    bcqfmt.save(tmp_path / "0.safetensors", {"w.weight": samples.affine()})
    raw = (tmp_path / "0.safetensors").read_bytes()
    for i in range(1, 200):
        (tmp_path / f"{i}.safetensors").write_bytes(raw)
    before = descriptors()
    opened = [bcqfmt.open(tmp_path / f"{i}.safetensors") for i in range(200)]
    expected = samples.affine().dequantize().tobytes()

    def read(checkpoint: bcqfmt.Checkpoint) -> bool:
        return checkpoint.weight("w.weight").dequantize().tobytes() == expected

    for _ in range(2):
        assert all(read(checkpoint) for checkpoint in opened)
        assert descriptors() - before <= 65
    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(read, opened * 3))
    assert descriptors() - before <= 64 + 8 + 1
    for checkpoint in opened:
        checkpoint.close()
    assert descriptors() <= before


def test_descriptors_are_given_back_without_close(tmp_path: Path) -> None:
    bcqfmt.save(tmp_path / "a.safetensors", {"w.weight": samples.affine()})
    before = descriptors()
    for _ in range(100):
        bcqfmt.open(tmp_path / "a.safetensors").weight("w.weight").dequantize()
    assert descriptors() - before <= 2


# -- lost metadata ---------------------------------------------------------------------------------------------


def test_a_folder_whose_metadata_was_lost_is_readable(tmp_path: Path) -> None:
    """Another tool loads a file and saves it again: `__metadata__` is gone, the manifest still knows."""
    tensors = {name: t for name, t in samples.tensors().items() if name != "model.embed.weight"}
    del tensors["model.layers.2.up.weight"]  # numpy's safetensors knows no bfloat16
    bcqfmt.save(tmp_path / "m", tensors)
    path = tmp_path / "m" / "model.safetensors"
    save_file(load_file(path), path)
    header, _ = oracle.split(path.read_bytes())
    assert "__metadata__" not in header
    with bcqfmt.open(tmp_path / "m") as checkpoint:
        for name, given in tensors.items():
            if isinstance(given, BcqWeight):
                assert checkpoint.weight(name).dequantize().tobytes() == given.dequantize().tobytes()
            else:
                assert checkpoint[name].array().tobytes() == given.tobytes()
        assert [finding.code for finding in checkpoint.warnings] == ["BCQ-E502"]
    assert "BCQ-V201" in {finding.code for finding in bcqfmt.validate(tmp_path / "m").errors}
    with pytest.raises(BcqError) as caught:
        bcqfmt.open(path)
    assert caught.value.code == "BCQ-V201"


# -- links -----------------------------------------------------------------------------------------------------


def hub_cache(tmp_path: Path) -> Path:
    """models--a--b/snapshots/<revision>/ with every file a link into models--a--b/blobs/."""
    folder = folder_of(tmp_path, max_shard_size=1500)
    entry = tmp_path / "models--a--b"
    snapshot = entry / "snapshots" / "0123abcd"
    (entry / "blobs").mkdir(parents=True)
    for i, path in enumerate(p for p in sorted(folder.rglob("*")) if p.is_file()):
        target = snapshot / path.relative_to(folder)
        target.parent.mkdir(parents=True, exist_ok=True)
        blob = entry / "blobs" / f"{i:040x}"
        shutil.move(path, blob)
        target.symlink_to(os.path.relpath(blob, target.parent))
    return snapshot


def test_a_hub_cache_is_a_folder(tmp_path: Path) -> None:
    snapshot = hub_cache(tmp_path)
    report = bcqfmt.validate(snapshot, deep=True)
    assert {f.code for f in report.findings} == {"BCQ-E504"}  # docs/card.md
    with bcqfmt.open(snapshot) as checkpoint:
        for name, weight in samples.tensors().items():
            if isinstance(weight, BcqWeight):
                assert checkpoint.weight(name).dequantize().tobytes() == weight.dequantize().tobytes()


@pytest.mark.parametrize(
    "name", ["model.safetensors", "config.json", "bcq_manifest.json", "tokenizer.json", "docs/card.md"]
)
def test_other_links_out_of_the_folder_are_refused(tmp_path: Path, name: str) -> None:
    folder = folder_of(tmp_path)
    outside = tmp_path / "outside"
    shutil.move(folder / name, outside)
    (folder / name).symlink_to(outside)
    assert "BCQ-V507" in {finding.code for finding in bcqfmt.validate(folder).errors}
    if name in ("model.safetensors", "bcq_manifest.json"):
        with pytest.raises(FormatError) as caught:
            bcqfmt.open(folder)
        assert caught.value.code == "BCQ-V507"


@pytest.mark.parametrize("place", ["blobs2/x", "other/blobs/x", "x"])
def test_a_link_from_a_snapshot_to_anywhere_but_its_blobs_is_refused(tmp_path: Path, place: str) -> None:
    snapshot = hub_cache(tmp_path)
    path = next(snapshot.glob("*.safetensors"))
    target = tmp_path / "models--a--b" / place
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(path, target)
    path.unlink()
    path.symlink_to(target)
    assert "BCQ-V507" in {finding.code for finding in bcqfmt.validate(snapshot).errors}
    with pytest.raises(FormatError):
        bcqfmt.open(snapshot)


def test_a_link_to_the_folder_and_links_inside_it(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    (tmp_path / "link").symlink_to(folder)
    assert not bcqfmt.validate(tmp_path / "link", deep=True).errors
    shutil.move(folder / "tokenizer.json", folder / "docs" / "tokenizer.json")
    (folder / "tokenizer.json").symlink_to("docs/tokenizer.json")
    found = [(finding.code, finding.file) for finding in bcqfmt.validate(folder, deep=True).findings]
    assert found == [("BCQ-E504", "docs/card.md"), ("BCQ-E505", "docs/tokenizer.json")]  # the link itself is fine
    (tmp_path / "lone.safetensors").symlink_to(folder / "model.safetensors")
    assert bcqfmt.open(tmp_path / "lone.safetensors").weight("model.layers.0.up.weight")


def test_a_link_that_leads_nowhere(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to("gone")
    with pytest.raises(BcqError):
        next(bcqfmt.open(folder).files())
    assert bcqfmt.validate(folder).errors


# -- the manifest stands for a finished folder -----------------------------------------------------------------


def test_a_folder_without_a_manifest_is_refused(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    (folder / "bcq_manifest.json").unlink()
    with pytest.raises(FormatError) as caught:
        bcqfmt.open(folder)
    assert caught.value.code == "BCQ-V601"


def test_nothing_there(tmp_path: Path) -> None:
    for path in (tmp_path / "none", tmp_path / "none.safetensors"):
        with pytest.raises(InputError) as caught:
            bcqfmt.open(path)
        assert caught.value.code == "BCQ-E101"
        with pytest.raises(InputError):
            bcqfmt.validate(path)
    with pytest.raises(InputError) as caught:
        bcqfmt.open(tmp_path)
    assert caught.value.code == "BCQ-E104"


def test_the_manifest_lists_weights_with_their_file_and_files_with_their_digest(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    manifest = json.loads((folder / "bcq_manifest.json").read_text())
    weights = [name for name, tensor in samples.tensors().items() if isinstance(tensor, BcqWeight)]
    assert set(manifest["weights"]) == set(weights)
    assert all(
        set(entry) - {"widths"} == {"scheme", "shape", "dtype", "file"} for entry in manifest["weights"].values()
    )
    for file in {entry["file"] for entry in manifest["weights"].values()}:
        assert manifest["files"][file]["sha256"] == hashlib.sha256((folder / file).read_bytes()).hexdigest()


def test_a_file_that_is_open_when_python_exits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The names of a module may be None by the time its last objects go."""
    (tmp_path / "a").write_bytes(b"x")
    opened = files.SourceFile(tmp_path / "a")
    descriptor = opened._descriptor
    monkeypatch.setattr(files, "os", None)
    monkeypatch.setattr(files, "_open_files", None)
    del opened
    monkeypatch.undo()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
