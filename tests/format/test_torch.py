"""What torch is given: types by torch's names, tensors of their own, and the bytes that its reader finds.

The only tests of this folder that need torch: environments without it leave this file out.
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors import safe_open

import bcqfmt
from bcqfmt import BcqWeight, InputError, UsageError
from bcqfmt.container.dtypes import BITS
from weights import samples


@pytest.mark.parametrize("asked", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_types_of_torch_name_the_type_of_the_values(asked: torch.dtype) -> None:
    weight = BcqWeight.from_affine(np.arange(8).reshape(1, 8), np.ones((1, 1), np.float16), 3, group_size=8)
    found = weight.dequantize(asked)
    assert f"torch.{found.dtype.name}" == str(asked)
    assert found.astype(np.float64).tolist() == [[-3, -2, -1, 0, 1, 2, 3, 4]]


def test_tensors_on_the_cpu_are_taken_as_arrays(tmp_path: Path) -> None:
    codes, scale, zero = np.ones((2, 16), np.uint8), np.ones((2, 2), np.float16), np.array([[1, 2], [3, 0]])
    plain = BcqWeight.from_affine(codes, scale, zero, group_size=8)
    given = BcqWeight.from_affine(torch.tensor(codes), torch.tensor(scale), torch.tensor(zero), group_size=8)
    assert given.digest() == plain.digest()
    bcqfmt.save(tmp_path / "m.safetensors", {"w.weight": given, "x": torch.arange(3.0)})
    with bcqfmt.open(tmp_path / "m.safetensors") as checkpoint:
        assert checkpoint["x"].array().tolist() == [0, 1, 2]


@pytest.mark.parametrize("tensor", [torch.ones(2, 1, dtype=torch.bfloat16), torch.ones(2, 1, requires_grad=True)])
def test_tensors_that_numpy_cannot_see(tmp_path: Path, tensor: torch.Tensor) -> None:
    """The hint, obeyed, works."""
    with pytest.raises(UsageError) as caught:
        BcqWeight.from_affine(np.ones((2, 8), int), tensor, 1, group_size=8)
    assert (caught.value.code, caught.value.finding.tensor) == ("BCQ-E302", "scale")
    with pytest.raises(UsageError, match="'x'"):
        bcqfmt.save(tmp_path / "m", {"x": tensor})
    way = (
        caught.value.hint.partition("for bfloat16 ")[2]
        if tensor.dtype == torch.bfloat16
        else "t.detach().cpu().numpy()"
    )
    assert way in caught.value.hint
    array = eval(way, {"t": tensor, "torch": torch, "ml_dtypes": ml_dtypes})
    weight = BcqWeight.from_affine(np.ones((2, 8), int), array, 0, group_size=8)
    assert weight.dequantize("float32").tolist() == [[1.0] * 8] * 2


def test_tensors_of_every_type(tmp_path: Path) -> None:
    tensors = samples.dense_file(tmp_path / "a.safetensors")
    kinds = {
        "BOOL": torch.bool,
        "U8": torch.uint8,
        "I8": torch.int8,
        "I16": torch.int16,
        "U16": torch.uint16,
        "F16": torch.float16,
        "BF16": torch.bfloat16,
        "I32": torch.int32,
        "U32": torch.uint32,
        "F32": torch.float32,
        "I64": torch.int64,
        "U64": torch.uint64,
        "F64": torch.float64,
        "C64": torch.complex64,
        "F8_E4M3": torch.float8_e4m3fn,
        "F8_E5M2": torch.float8_e5m2,
        "F8_E8M0": torch.float8_e8m0fnu,
        "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
        "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
        "F4": torch.uint8,
        "F6_E2M3": torch.uint8,
        "F6_E3M2": torch.uint8,
    }
    assert set(kinds) == set(BITS)
    with bcqfmt.open(tmp_path / "a.safetensors") as checkpoint:
        for name, (dtype, shape, raw) in tensors.items():
            found = checkpoint[name].to_torch()
            assert found.dtype == kinds[dtype]
            if BITS[dtype] >= 8:
                assert list(found.shape) == shape
            assert (
                found.reshape(-1).view(torch.uint8).numpy().tobytes() == raw
                if dtype != "BOOL"
                else found.numpy().tobytes() == raw
            )


def test_tensors_of_a_weight(tmp_path: Path) -> None:
    weight = samples.rich()
    bcqfmt.save(tmp_path / "a.safetensors", {"w.weight": weight})
    stored = bcqfmt.open(tmp_path / "a.safetensors").weight("w.weight")
    for some in (weight, stored):
        found = some.to_torch()
        assert set(found) == set(weight.parts())
        for suffix, part in weight.parts().items():
            assert found[suffix].numpy().tobytes() == part.tobytes()
    changed = weight.to_torch()["s1_scale"]
    changed.zero_()  # a tensor of its own: the weight stays as it is
    assert weight.dequantize().tobytes() == stored.dequantize().tobytes()


def test_tensors_come_without_warnings_and_can_be_written_to(tmp_path: Path) -> None:
    tensors = samples.dense_file(tmp_path / "a.safetensors")
    with bcqfmt.open(tmp_path / "a.safetensors") as checkpoint, warnings.catch_warnings():
        warnings.simplefilter("error")
        for name in tensors:
            checkpoint[name].to_torch().zero_() if "F8" not in name else checkpoint[name].to_torch()
        assert checkpoint["x/U8 \u00e9\n.weight"].tobytes() == tensors["x/U8 \u00e9\n.weight"][2]


def test_a_file_that_was_changed_gives_no_tensor(tmp_path: Path) -> None:
    bcqfmt.save(tmp_path / "a.safetensors", {"dense": samples.tensors()["model.norm.weight"]})
    with bcqfmt.open(tmp_path / "a.safetensors") as checkpoint:
        dense = checkpoint["dense"]
        os.truncate(tmp_path / "a.safetensors", 0)
        with pytest.raises(InputError) as caught:
            dense.to_torch()
    assert caught.value.code == "BCQ-E103"


def test_the_reference_library_reads_the_same_bytes(tmp_path: Path) -> None:
    bcqfmt.save(tmp_path / "m", samples.tensors(), config=samples.CONFIG, files=samples.SIDE, max_shard_size=700)
    ours = bcqfmt.open(tmp_path / "m")
    stored = dict(ours.dense())
    for _, weight in ours.weights():
        stored |= {part.name: part for part in weight.parts().values()}
    seen = 0
    for path in (tmp_path / "m").glob("*.safetensors"):
        with safe_open(path, framework="pt") as theirs:
            assert theirs.metadata()["format"] == "pt"
            for name in theirs.keys():  # noqa: SIM118 (safe_open is no mapping)
                tensor = theirs.get_tensor(name)
                assert list(tensor.shape) == list(stored[name].shape)
                raw = tensor.reshape(-1).contiguous()
                raw = raw.view(torch.int16) if raw.dtype == torch.bfloat16 else raw
                assert raw.numpy(force=True).tobytes() == stored[name].tobytes()
                seen += 1
    assert seen == len(stored)
