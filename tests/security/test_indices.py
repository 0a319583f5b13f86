"""A weight whose indices lead elsewhere is refused by everything that follows them, checked before or not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import bcqfmt
from bcqfmt import BcqWeight
from bcqfmt.converters.layouts.rebuild import apply_rule
from bcqfmt.converters.layouts.registry import rebuilders
from bcqfmt.converters.methods.errors import square_sums
from bcqfmt.converters.report.measure import measure
from bcqfmt.converters.source.checkpoint import open_source
from bcqfmt.kernels import cpu
from bcqfmt.kernels.atom.operands import pack_w4
from bcqfmt.kernels.operands import operand
from bcqfmt.weight import checks
from security.mutation import without
from weights import samples

COLUMNS = 256
NAME = "w.weight"


def ordered() -> BcqWeight:
    """4 bits, columns in another order."""
    return samples.affine(8, COLUMNS).with_perm(np.random.default_rng(0).permutation(COLUMNS))


def mixed() -> BcqWeight:
    """Atom's form: one group of 8 bits after those of 4 bits."""
    rng = np.random.default_rng(0)
    pieces = [
        BcqWeight.from_affine(
            rng.integers(0, 2**bits, (8, 128)), np.ones((8, 1), np.float16), 2 ** (bits - 1), group_size=128, bits=bits
        )
        for bits in (4, 8)
    ]
    return BcqWeight.from_segments(pieces, perm=rng.permutation(COLUMNS))


def with_outliers() -> BcqWeight:
    """Two outliers in a row, allowed in the second segment only."""
    pieces = [samples.affine(8, 128), samples.affine(8, 128, 3)]
    made = BcqWeight.from_segments(pieces)
    values = np.ones(16, np.float16)
    return made.with_outliers(np.arange(9) * 2, np.tile([130, 200], 8), values, segments=[1])


def against(weight: BcqWeight, path: Path) -> None:
    """What ``report --against`` does."""
    dense = path.parent / "dense"
    dense.mkdir(exist_ok=True)
    (dense / "config.json").write_text("{}")
    save_file({NAME: np.ones(weight.shape, np.float32)}, dense / "model.safetensors")
    with bcqfmt.open(path) as checkpoint:
        measure(checkpoint, open_source(dense))


def rule(name: str, **parameters: Any) -> Callable[[BcqWeight, Path], Any]:
    return lambda weight, _: apply_rule(weight, {"rule": name, **parameters}, rebuilders())


USERS: dict[str, Callable[[BcqWeight, Path], Any]] = {
    "report --against": against,
    "errors": lambda weight, _: square_sums(np.ones(weight.shape, np.float32), weight),
    "values": lambda weight, _: weight.dequantize(rows=(0, 1)),
    "rows": lambda weight, _: weight.rows(0, 4),
    "columns": lambda weight, _: weight.columns(0, 128),
    "plane scales": lambda weight, _: weight.alpha_z(),
    "arrays": lambda weight, _: [part.array() for part in weight.parts().values()],
    "maps": lambda weight, _: [part.map() for part in weight.parts().values()],
    "product on the CPU": lambda weight, _: cpu.prepare(weight),
    "operands of kernels": lambda weight, _: operand(weight),
}
OF_PERM = {
    "restore qweight": rule("gptq.qweight", bits=4),
    "restore g_idx": rule("g_idx"),
    "restore weight_packed": rule("compressed.weight_packed", packing="dense"),
}
PERM = {"beyond": (3, COLUMNS + 1), "far": (0, 2**31 - 1), "below": (7, -1), "twice": (9, None)}
OUTLIERS = {
    "falls": ("outlier_indptr", 2, 1, "BCQ-V407"),
    "does not begin at 0": ("outlier_indptr", 0, 1, "BCQ-V407"),
    "ends too far": ("outlier_indptr", 8, 2**31 - 1, "BCQ-V407"),
    "column beyond": ("outlier_indices", 5, COLUMNS, "BCQ-V408"),
    "column twice": ("outlier_indices", 5, 130, "BCQ-V408"),
    "other segment": ("outlier_indices", 4, 3, "BCQ-V409"),
}


def broken(weight: BcqWeight, scratch: Path, part: str, at: int, value: int | None) -> tuple[BcqWeight, Path]:
    """The weight from a file in which one index was overwritten; with the index before it for None."""
    path = scratch / "a.safetensors"
    bcqfmt.save(path, {NAME: weight})
    with bcqfmt.open(path) as checkpoint:
        stored = checkpoint.weight(NAME).parts()[part]
        array = stored.array().copy()
    array[at] = array[at - 1] if value is None else value
    raw = bytearray(path.read_bytes())
    raw[stored.offset : stored.offset + stored.nbytes] = array.tobytes()
    path.write_bytes(raw)
    return bcqfmt.open(path).weight(NAME), path


@pytest.mark.parametrize("fault", PERM)
@pytest.mark.parametrize("user", [*USERS, *OF_PERM])
def test_no_one_follows_a_perm_that_is_none(user: str, fault: str, tmp_path: Path) -> None:
    weight, path = broken(ordered(), tmp_path, "perm", *PERM[fault])
    with pytest.raises(bcqfmt.BcqError) as caught:
        {**USERS, **OF_PERM}[user](weight, path)
    assert caught.value.code == "BCQ-V406"
    assert path.name in caught.value.finding.file or user.startswith(("product", "operands"))
    assert weight.name in caught.value.finding.tensor or "perm" in caught.value.finding.tensor


@pytest.mark.parametrize("fault", PERM)
def test_atom_operands(fault: str, tmp_path: Path) -> None:
    """The perm of a W4A4 product goes to the device, where nothing checks it any more."""
    weight, _ = broken(mixed(), tmp_path, "perm", *PERM[fault])
    with pytest.raises(bcqfmt.BcqError, match="BCQ-V406"):
        pack_w4(weight)


@pytest.mark.parametrize("fault", OUTLIERS)
@pytest.mark.parametrize("user", sorted(USERS.keys()))
def test_no_one_follows_wrong_outliers(user: str, fault: str, tmp_path: Path) -> None:
    part, at, value, code = OUTLIERS[fault]
    weight, path = broken(with_outliers(), tmp_path, part, at, value)
    with pytest.raises(bcqfmt.BcqError) as caught:
        USERS[user](weight, path)
    assert caught.value.code == code


def test_without_the_check_they_would(tmp_path: Path) -> None:
    weight, path = broken(ordered(), tmp_path, "perm", *PERM["beyond"])
    unchecked = without((checks._IndexCheck.__call__, "if self._todo is not None:", "if False:"))
    with unchecked:
        against(weight, path)  # reads beyond the end of a row


def test_bytes_are_given_out_as_they_are(tmp_path: Path) -> None:
    """A copy, a digest or a comparison of files is not stopped by content."""
    weight, _ = broken(ordered(), tmp_path, "perm", *PERM["beyond"])
    part = weight.parts()["perm"]
    assert len(part.tobytes()) == sum(chunk.size for chunk in part.chunks()) == part.nbytes
    assert weight.digest()
