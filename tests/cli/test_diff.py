"""`bcqfmt diff`: every way in which two checkpoints can differ."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import bcqfmt
from bcqfmt import BcqWeight
from programs.verbs import DOWN, NORM, UP, Run, affine, binary, tensors


@pytest.fixture
def other(tmp_path: Path) -> Any:
    def save(**changes: Any) -> Path:
        path = tmp_path / "other"
        kept = {name: tensor for name, tensor in (tensors() | changes.get("tensors", {})).items() if tensor is not None}
        bcqfmt.save(path, kept, **{key: value for key, value in changes.items() if key != "tensors"})
        return path

    return save


def test_equal(run: Run, folder: Path, other: Any) -> None:
    result = run("diff", folder, other(max_shard_size=300))
    assert result.exit_code == 0
    assert result.stdout.startswith("equal: 3 tensors (A = ")  # files of other digests: all three were read
    found = json.loads(run("diff", folder, folder, "--json").stdout)
    assert found["equal"] is True
    assert found["counts"] == {"equal": 3, "unread": 3, "only_a": 0, "only_b": 0, "description": 0, "content": 0}


def test_folder_and_lone_file(run: Run, folder: Path, lone_file: Path) -> None:
    assert run("diff", folder, lone_file).exit_code == 0
    assert run("diff", lone_file, folder).exit_code == 0


def test_only_in_one(run: Run, folder: Path, other: Any) -> None:
    result = run("diff", folder, other(tensors={DOWN: None, "extra.weight": affine(3)}))
    assert result.exit_code == 6
    assert f"only in A  {DOWN}" in result.stdout
    assert "only in B  extra.weight" in result.stdout
    assert "1 only in A, 1 only in B; 2 equal" in result.stdout


def test_content_of_a_weight(run: Run, folder: Path, other: Any) -> None:
    changed = other(tensors={UP: affine(7)})
    found = json.loads(run("diff", folder, changed, "--json").stdout)
    (difference,) = found["differences"]
    assert (difference["name"], difference["kind"]) == (UP, "content")
    assert difference["parts"] == ["s0_planes", "s0_scale", "s0_zero"]
    a, b = affine(0).dequantize().astype(float), affine(7).dequantize().astype(float)
    assert difference["values"] == {
        "elements": a.size,
        "different": int((a != b).sum()),
        "max_abs_difference": float(np.abs(a - b).max()),
    }
    assert "values differ, by at most" in run("diff", folder, changed).stdout


def test_one_part_only(run: Run, folder: Path, other: Any) -> None:
    same = binary()
    arrays = {suffix: part.array() for suffix, part in same.parts().items()}
    alpha = arrays["s0_alpha"].copy()
    alpha[0, 0, 0] += np.float16(1)
    bits = np.stack([(same.codes() >> shift) & 1 for shift in (2, 1, 0)]).astype(np.uint8)
    sets: Any = {1: (arrays["s0_alpha_p1"], arrays["s0_bias_p1"])}
    changed = bcqfmt.BcqWeight.from_bcq(bits, alpha, arrays["s0_bias"], group_size=32, scale_sets=sets)
    found = json.loads(run("diff", folder, other(tensors={DOWN: changed}), "--json").stdout)
    (difference,) = found["differences"]
    assert difference["parts"] == ["s0_alpha"]
    assert difference["values"]["different"] == 32


def test_content_of_a_dense_tensor(run: Run, folder: Path, other: Any) -> None:
    changed = np.linspace(-1, 2, 64, dtype=np.float32)
    changed[5] = np.nan
    result = run("diff", folder, other(tensors={NORM: changed}))
    assert result.exit_code == 6
    assert "1 of 64 values differ, by at most inf" in result.stdout
    found = json.loads(run("diff", folder, folder.parent / "other", "--json").stdout)
    assert found["differences"][0]["values"]["max_abs_difference"] is None


def test_descriptions(run: Run, folder: Path, other: Any) -> None:
    dense = np.zeros((16, 64), np.float16)
    changed = other(tensors={UP: dense, DOWN: affine(0), NORM: np.zeros(3, np.int8)})
    result = run("diff", folder, changed)
    assert result.exit_code == 6
    assert "a quantized weight / dense" in result.stdout
    assert "dtype F32 / I8; shape [64] / [3]" in result.stdout
    assert "shape [8, 64] / [16, 64]" in result.stdout
    assert "3 described differently" in result.stdout


def test_values_of_other_descriptions(run: Run, folder: Path, other: Any) -> None:
    """The same values as a dense tensor: another description, and with --values the proof."""
    changed = other(
        tensors={UP: affine(0).dequantize(), NORM: np.linspace(-1, 2, 64, dtype=np.float32).astype(np.float64)}
    )
    assert "values equal" not in run("diff", folder, changed).stdout
    result = run("diff", folder, changed, "--values")
    assert result.exit_code == 6
    assert "all 1,024 values equal" in result.stdout
    assert "all 64 values equal" in result.stdout


def test_number_of_outliers_is_content(run: Run, tmp_path: Path) -> None:
    for name, number in (("a", 1), ("b", 2)):
        indptr = np.array([0] + [number] * 16)
        weight = affine().with_outliers(indptr, np.arange(number), np.ones(number, np.float16))
        bcqfmt.save(tmp_path / name, {"w.weight": weight})
    result = run("diff", tmp_path / "a", tmp_path / "b")
    assert "parts outlier_indices, outlier_indptr, outlier_values; 1 of 1,024 values differ" in result.stdout


def test_blocks_of_rows_see_everything(folder: Path, other: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from bcqfmt.inspect import compare as module
    from bcqfmt.inspect import tensor_details

    changed = other(tensors={UP: affine(7)})
    with bcqfmt.open(folder) as a, bcqfmt.open(changed) as b:
        whole = module.compare(a, b)
        monkeypatch.setattr(tensor_details, "_BLOCK", 3 * 64)
        pieces = module.compare(a, b)
    assert whole.as_dict() == pieces.as_dict()


def test_files_with_the_same_digest_are_not_read(run: Run, folder: Path, tmp_path: Path) -> None:
    """The manifests decide as long as they agree; whether they are right is the validator's question."""
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    model = copy / "model.safetensors"
    raw = bytearray(model.read_bytes())
    raw[-1] ^= 1
    model.write_bytes(raw)
    result = run("diff", folder, copy)
    assert result.exit_code == 0
    assert result.stdout.startswith("equal: 3 tensors, all by the digests in both manifests, not read (A = ")
    assert run("validate", "--deep", copy).exit_code == 6


def test_content_decides_where_file_digests_differ(run: Run, folder: Path, other: Any) -> None:
    """One weight of a file changed: all others of that file are equal."""
    found = json.loads(run("diff", folder, other(tensors={UP: affine(7)}), "--json").stdout)
    assert [difference["name"] for difference in found["differences"]] == [UP]
    assert found["counts"]["equal"] == len(bcqfmt.open(folder)) - 1


def test_limit(run: Run, folder: Path, other: Any) -> None:
    result = run("diff", folder, other(tensors={UP: None, DOWN: None}), "--max-rows", "1")
    assert "... and 1 more" in result.stdout


def test_not_bcq(run: Run, folder: Path, gptq: Path) -> None:
    assert run("diff", folder, gptq).exit_code == 5
    assert run("diff", folder, gptq / "model.safetensors").exit_code == 5
    assert run("diff", folder, folder / "nothing").exit_code == 3


def test_a_group_of_all_columns_and_one_as_long(run: Run, tmp_path: Path) -> None:
    one, other = (
        BcqWeight.from_affine(
            np.zeros((4, 64), np.uint8), np.ones((4, 1), np.float16), np.zeros((4, 1), np.uint8), bits=4, group_size=g
        )
        for g in (64, "row")
    )
    for name, weight in (("a", one), ("b", other)):
        bcqfmt.save(tmp_path / name, {"w": weight})
    result = run("diff", tmp_path / "a", tmp_path / "b")
    assert "group sizes [64] / ['row']" in result.stdout
