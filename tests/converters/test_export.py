"""Export: other layouts hold the same numbers, or the export says why they cannot."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

import bcqfmt
from bcqfmt import BcqError, BcqWeight, StoredTensor
from bcqfmt.converters.convert.conversion import Conversion, ConvertOptions
from bcqfmt.converters.export import TARGETS, Export, export
from bcqfmt.converters.export.names import dense_linears, patterns
from bcqfmt.converters.export.target import dense_unit
from bcqfmt.converters.quantize.quantization import Quantization, QuantizeOptions
from bcqfmt.converters.source.checkpoint import open_source
from bcqfmt.converters.source.quant_config import read_settings
from sources.peers import PEERS, any_words, made_up, references

GPTQ_KINDS = (
    "autogptq-gptq-3b-g64-asym",
    "autogptq-gptq-4b-g32-asym-bf16scales",
    "autogptq-gptq-4b-g32-asym-desc_act",
    "autoround-auto_gptq-4b-g32-asym",
    "gptqmodel-gptq-2b-g32-asym",
    "gptqmodel-gptq-4b-g32-sym-desc_act",
    "gptqmodel-gptq-4b-g32-sym-sharded",
    "gptqmodel-gptq-8b-g-1-sym",
    "gptqmodel-gptq-mixed-g32-sym-dynamic",
    "gptqmodel-gptq_v2-3b-g32-asym",
    "gptqmodel-gptq_v2-4b-g64-asym-desc_act",
)
RAGGED_KINDS = ("autoround-auto_gptq-4b-g128-asym-ragged", "autoround-auto_gptq-4b-g128-sym-ragged")
AWQ_KINDS = (
    "autoawq-gemm-4b-g32-asym",
    "autoawq-gemv-4b-g64-asym-rtn",
    "autoround-auto_awq-4b-g64-sym",
    "autoround-auto_round-4b-g32-asym",
)
CT_KINDS = (
    "compressedtensors0.12-pack_quantized-3b-g32-sym",
    "compressedtensors0.12-pack_quantized-4b-g32-sym-actorder_group",
    "llmcompressor-pack_quantized-3b-g32-asym",
    "llmcompressor-pack_quantized-4b-g64-sym-bf16",
    "llmcompressor-pack_quantized-8b-g-1-sym",
)
NAME = "model.layers.0.mlp.up_proj.weight"
Folder = Callable[..., Path]


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The BCQ folder of a real checkpoint, converted once."""
    made: dict[str, Path] = {}

    def convert_once(kind: str) -> Path:
        if kind not in made:
            made[kind] = convert(PEERS / kind / "source", tmp_path_factory.mktemp("bcq") / kind)
        return made[kind]

    return convert_once


def convert(source: Path, target: Path, **options: Any) -> Path:
    Conversion(open_source(source), ConvertOptions(**options)).run(target)
    return target


def exported(bcq: Path, out: Path, layout: str, **options: Any) -> Export:
    with bcqfmt.open(bcq) as checkpoint:
        return export(checkpoint, out, layout, **options)


def refused(bcq: Path, layout: str, **options: Any) -> BcqError:
    """The refusal; nothing is left behind by it."""
    out = bcq.parent / "refused"
    with pytest.raises(BcqError) as caught:
        exported(bcq, out, layout, **options)
    assert not [path.name for path in out.parent.iterdir() if "refused" in path.name]
    return caught.value


def digests(bcq: Path) -> dict[str, str]:
    with bcqfmt.open(bcq) as checkpoint:
        return {name: weight.digest() for name, weight in checkpoint.weights()}


def values(bcq: Path) -> dict[str, bytes]:
    with bcqfmt.open(bcq) as checkpoint:
        return {name: weight.dequantize().tobytes() for name, weight in checkpoint.weights()}


def tensors(folder: Path) -> dict[str, StoredTensor]:
    return open_source(folder).tensors


def stated(folder: Path) -> dict[str, Any]:
    found = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert isinstance(found, dict)
    return found


# ------------------------------------------------------------------------------------------------ real checkpoints
@pytest.mark.parametrize(
    ("kind", "layout"),
    [(kind, layout) for kind in GPTQ_KINDS for layout in ("gptq", "compressed-tensors")]
    + [(kind, "gptq") for kind in RAGGED_KINDS]
    + [(kind, layout) for kind in AWQ_KINDS for layout in ("awq", "gptq", "compressed-tensors")]
    + [(kind, layout) for kind in CT_KINDS for layout in ("gptq", "compressed-tensors")]
    + [("gptqmodel-gptq_p-6b-g32-sym", "compressed-tensors"), ("llmcompressor-pack_quantized-4b-g64-sym-bf16", "awq")]
    + [("autoround-auto_gptq-4b-g32-sym", "awq"), ("llmcompressor-int_quantized-8b-g-1-sym-w8a8", "gptq")],
)
def test_real_checkpoints_have_the_same_weights_after_export_and_conversion(
    converted: Callable[[str], Path], tmp_path: Path, kind: str, layout: str
) -> None:
    bcq = converted(kind)
    done = exported(bcq, tmp_path / "out", layout)
    back = convert(tmp_path / "out", tmp_path / "back")
    assert digests(back) == digests(bcq)
    assert values(back) == values(bcq)
    assert done.weights == len(digests(bcq))
    assert bcqfmt.validate(back, deep=True).valid
    with bcqfmt.open(bcq) as before, bcqfmt.open(back) as after:
        assert {n: t.tobytes() for n, t in before.dense()} == {n: t.tobytes() for n, t in after.dense()}


@pytest.mark.parametrize("kind", ["autoawq-gemm-4b-g32-asym", "autogptq-gptq-4b-g32-asym-desc_act"])
def test_values_after_two_exports_are_still_those_of_the_tool(
    converted: Callable[[str], Path], tmp_path: Path, kind: str
) -> None:
    exported(converted(kind), tmp_path / "one", "gptq")
    exported(convert(tmp_path / "one", tmp_path / "bcq1"), tmp_path / "two", "compressed-tensors")
    final = values(convert(tmp_path / "two", tmp_path / "bcq2"))
    _, arrays = references(kind)
    assert arrays
    assert {name: final[name] for name in arrays} == {name: array.tobytes() for name, array in arrays.items()}


@pytest.mark.parametrize("kind", [*GPTQ_KINDS, *RAGGED_KINDS])
def test_gptq_again_has_the_tensors_of_the_source(converted: Callable[[str], Path], tmp_path: Path, kind: str) -> None:
    done = exported(converted(kind), tmp_path / "out", "gptq")
    source = open_source(PEERS / kind / "source")
    found = tensors(tmp_path / "out")
    assert set(source.tensors) <= set(found)
    stored_alike = done.format == (read_settings(source).format or "gptq")  # else other zero points, on purpose
    assert stored_alike or "asymmetric" in done.notes[0]
    for name, tensor in source.tensors.items():
        if name.endswith(".qzeros") and not stored_alike:
            continue
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert found[name].tobytes() == tensor.tobytes(), name
    assert all(name.endswith(".g_idx") for name in set(found) - set(source.tensors))
    now, then = stated(tmp_path / "out"), stated(PEERS / kind / "source")
    assert now == json.loads((tmp_path / "out" / "quantize_config.json").read_text())
    for key in ("bits", "group_size", "sym", "desc_act", "lm_head", "pack_dtype"):
        assert now[key] == then.get(key, now[key]), key
    assert "meta" not in now  # auto-round refuses a file that has one


def test_awq_again_has_the_tensors_of_the_source(converted: Callable[[str], Path], tmp_path: Path) -> None:
    kind = "autoawq-gemm-4b-g32-asym"
    exported(converted(kind), tmp_path / "out", "awq")
    source, found = tensors(PEERS / kind / "source"), tensors(tmp_path / "out")
    assert {n: t.tobytes() for n, t in found.items()} == {n: t.tobytes() for n, t in source.items()}
    now, then = stated(tmp_path / "out"), stated(PEERS / kind / "source")
    assert {**now, "modules_to_not_convert": None} == then


def test_compressed_tensors_again_has_the_tensors_and_the_scheme_of_the_source(
    converted: Callable[[str], Path], tmp_path: Path
) -> None:
    kind = "llmcompressor-pack_quantized-4b-g32-asym"
    exported(converted(kind), tmp_path / "out", "compressed-tensors")
    source, found = tensors(PEERS / kind / "source"), tensors(tmp_path / "out")
    assert {n: t.tobytes() for n, t in found.items()} == {n: t.tobytes() for n, t in source.items()}
    now, then = stated(tmp_path / "out"), stated(PEERS / kind / "source")
    for key in ("format", "ignore", "quantization_status", "quant_method"):
        assert now[key] == then[key]
    (mine,), (theirs,) = now["config_groups"].values(), then["config_groups"].values()
    assert mine["targets"] == theirs["targets"] == ["Linear"]
    for key in ("num_bits", "type", "symmetric", "group_size", "strategy", "actorder", "dynamic"):
        assert mine["weights"][key] == theirs["weights"][key]


def test_mixed_widths_become_groups_and_dynamic_rules(converted: Callable[[str], Path], tmp_path: Path) -> None:
    bcq = converted("gptqmodel-gptq-mixed-g32-sym-dynamic")
    exported(bcq, tmp_path / "ct", "compressed-tensors")
    groups = stated(tmp_path / "ct")["config_groups"].values()
    assert sorted((g["weights"]["num_bits"], g["weights"]["group_size"]) for g in groups) == [(4, 32), (8, 32), (8, 64)]
    assert stated(tmp_path / "ct")["ignore"] == ["model.layers.0.self_attn.q_proj"]
    exported(bcq, tmp_path / "gptq", "gptq")
    assert stated(tmp_path / "gptq")["dynamic"] == {
        r"-:model\.layers\.0\.self_attn\.q_proj$": {},
        r"+:lm_head$": {"bits": 8, "group_size": 32},
        r"+:model\.layers\.0\.mlp\.down_proj$": {"bits": 8, "group_size": 64},
    }


def test_quantized_activations_are_told_not_exported(converted: Callable[[str], Path], tmp_path: Path) -> None:
    done = exported(converted("llmcompressor-int_quantized-8b-g-1-sym-w8a8"), tmp_path / "out", "compressed-tensors")
    assert any(note.startswith("activations") for note in done.notes)


# ------------------------------------------------------------------------------------------------------- the folder
@pytest.mark.parametrize("kind", ["gptqmodel-gptq-4b-g32-asym", "hqq-hqq-4b-g64-asym-axis1"])
@pytest.mark.parametrize("dtype", [None, "float16", "bfloat16", "float32"])
def test_dense_is_what_dequantize_gives(
    converted: Callable[[str], Path], tmp_path: Path, kind: str, dtype: str | None
) -> None:
    bcq = converted(kind)
    done = exported(bcq, tmp_path / "out", "dense", dtype=dtype)
    assert done.format == "dense"
    loaded = safetensors.numpy.load_file(tmp_path / "out" / "model.safetensors")
    with bcqfmt.open(bcq) as checkpoint:
        described = {name for name, tensor in checkpoint.dense() if tensor.dtype not in ("F16", "BF16", "F32")}
        assert set(loaded) == set(checkpoint) - described
        assert bool(described) == kind.startswith("hqq") == any("left out" in note for note in done.notes)
        for name, weight in checkpoint.weights():
            wanted = weight.dequantize(dtype)
            assert loaded[name].dtype == wanted.dtype
            assert loaded[name].tobytes() == wanted.tobytes()
        for name, tensor in checkpoint.dense():
            assert name in described or loaded[name].tobytes() == tensor.tobytes()
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    source = json.loads((PEERS / kind / "source" / "config.json").read_text())
    source.pop("quantization_config", None)
    key = "dtype" if "dtype" in source else "torch_dtype"
    assert config == {**source, key: dtype or source[key]}  # else readers would cast the values back


def test_dense_values_come_a_block_of_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bcqfmt.converters.export.target._BLOCK", 100)
    rng = np.random.default_rng(0)
    codes = rng.integers(0, 16, (3, 7, 40))
    stack = BcqWeight.from_affine(codes, rng.normal(size=(3, 7, 2)).astype(np.float16), 3, group_size=32, bits=4)
    ((_, tensor),) = dense_unit(BcqWeight("e.weight", stack.spec, stack.parts()), "F32").tensors.items()
    chunks = list(tensor.chunks())
    assert max(chunk.size for chunk in chunks) == 2 * 40 * 4
    assert b"".join(chunk.tobytes() for chunk in chunks) == stack.dequantize("float32").tobytes() == tensor.tobytes()


@pytest.mark.parametrize("layout", TARGETS)
def test_side_files_go_along_and_what_is_about_bcq_does_not(
    converted: Callable[[str], Path], tmp_path: Path, layout: str
) -> None:
    bcq = converted("gptqmodel-gptq-4b-g32-asym")
    exported(bcq, tmp_path / "out", layout)
    names = {path.relative_to(tmp_path / "out").as_posix() for path in (tmp_path / "out").rglob("*")}
    kept = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "README.md"}
    assert names == kept | {"model.safetensors"} | ({"quantize_config.json"} if layout == "gptq" else set())
    for name in ("generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (bcq / name).read_bytes()
    card = (tmp_path / "out" / "README.md").read_text()
    assert "library_name: bcqfmt" not in card
    assert "base_model:" not in card  # a folder's name says nothing about the hub
    assert "Exported by bcqfmt" in card
    assert ("- quantized" in card) == (layout != "dense")


def test_a_card_of_the_users_own_and_files_in_folders_are_copied(folder: Folder, tmp_path: Path) -> None:
    files = {"README.md": b"# mine\n", "extra/notes.txt": b"", "quant_config.json": b'{"w_bit": 8}'}
    bcq = folder({NAME: affine()}, files=files)
    exported(bcq, tmp_path / "out", "awq")
    assert (tmp_path / "out" / "README.md").read_bytes() == b"# mine\n"
    assert (tmp_path / "out" / "extra" / "notes.txt").read_bytes() == b""
    assert not (tmp_path / "out" / "quant_config.json").exists()


@pytest.mark.parametrize("layout", TARGETS)
def test_shards_have_an_index(converted: Callable[[str], Path], tmp_path: Path, layout: str) -> None:
    bcq = converted("gptqmodel-gptq-4b-g32-asym")
    done = exported(bcq, tmp_path / "many", layout, max_shard_size=40_000)
    exported(bcq, tmp_path / "one", layout)
    assert len(done.files) > 2
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    many, one = tensors(tmp_path / "many"), tensors(tmp_path / "one")
    assert {n: t.tobytes() for n, t in many.items()} == {n: t.tobytes() for n, t in one.items()}
    assert set(index["weight_map"]) == set(many)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in many.values())


def test_the_target_is_taken_whole_or_not_at_all(
    folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bcq, out = folder({NAME: affine()}), tmp_path / "out"
    exported(bcq, out, "gptq")
    with pytest.raises(BcqError) as caught:
        exported(bcq, out, "dense")
    assert caught.value.code == "BCQ-E401"
    before = (out / "config.json").read_bytes()

    def stop(done: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        exported(bcq, out, "dense", overwrite=True, tick=stop)
    assert (out / "config.json").read_bytes() == before
    exported(bcq, out, "dense", overwrite=True)
    assert not (out / "quantize_config.json").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bcq", "out"]


@pytest.mark.parametrize("place", ["", "inside", ".."])
def test_the_checkpoint_itself_is_no_target(folder: Folder, place: str) -> None:
    bcq = folder({NAME: affine()})
    with pytest.raises(BcqError) as caught:
        exported(bcq, bcq / place, "dense", overwrite=True)
    assert (caught.value.code, caught.value.hint) == ("BCQ-E402", "choose another place")
    assert bcqfmt.validate(bcq).valid


def test_arguments_that_make_no_sense(folder: Folder, tmp_path: Path) -> None:
    bcq = folder({NAME: affine()})
    bcqfmt.save(tmp_path / "one.safetensors", {NAME: affine()})
    for arguments in (("gguf", None), ("gptq", "float16"), ("dense", "float64"), ("dense", "int8")):
        with pytest.raises(BcqError) as caught:
            exported(bcq, tmp_path / "out", arguments[0], dtype=arguments[1])
        assert caught.value.code == "BCQ-E302"
    with pytest.raises(BcqError) as caught:
        exported(tmp_path / "one.safetensors", tmp_path / "out", "dense")
    assert caught.value.code == "BCQ-E302"


# ------------------------------------------------------------------------------------------------ made-up weights
@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    """A BCQ folder of these tensors."""

    def save(weights: dict[str, Any], **more: Any) -> Path:
        bcqfmt.save(tmp_path / "bcq", weights, config={"model_type": "llama", "torch_dtype": "float16"}, **more)
        return tmp_path / "bcq"

    return save


def affine(
    rows: int = 32, columns: int = 64, bits: int = 4, group_size: Any = 32, zeros: Any = None, kind: Any = np.float16,
    **more: Any,
) -> BcqWeight:  # fmt: skip
    rng = np.random.default_rng(rows * columns)
    groups = 1 if group_size == "row" else -(-columns // group_size)
    if zeros is None:
        zeros = rng.integers(1, 2**bits, (rows, groups))
    codes = rng.integers(0, 2**bits, (rows, columns))
    scale = rng.normal(size=(rows, groups)).astype(kind)
    return BcqWeight.from_affine(codes, scale, zeros, group_size=group_size, bits=bits, **more)


def scattered(weight: BcqWeight) -> BcqWeight:
    return weight.with_perm(np.random.default_rng(1).permutation(weight.shape[-1]))


def binary(precisions: bool = False) -> BcqWeight:
    rng = np.random.default_rng(2)
    alpha = rng.normal(size=(3, 32, 2)).astype(np.float16)
    sets: Any = {1: (alpha[:1], None)} if precisions else None
    return BcqWeight.from_bcq(rng.integers(0, 2, (3, 32, 64)), alpha, group_size=32, scale_sets=sets)


def second_order() -> BcqWeight:
    ones = np.ones((1, 2), np.float32)
    return affine().with_second_order(np.ones((32, 2), np.uint8), ones, np.ones((1, 2), np.uint8), bits=3, rows=32)


def outliers(weight: BcqWeight, count: int) -> BcqWeight:
    indptr = np.full(weight.shape[0] + 1, count)
    indptr[0] = 0
    return weight.with_outliers(indptr, np.arange(count), np.ones(count, np.float16))


def float_zero() -> BcqWeight:
    scale = np.ones((32, 2), np.float16)
    return BcqWeight.from_float_zero(np.zeros((32, 64), np.uint8), scale, scale, group_size=32, bits=4)


def offset() -> BcqWeight:
    scale = np.ones((32, 2), np.float16)
    return BcqWeight.from_offset(np.zeros((32, 64), np.uint8), scale, scale, group_size=32, bits=4)


def stack() -> BcqWeight:
    rng = np.random.default_rng(3)
    scale = rng.normal(size=(2, 32, 2)).astype(np.float16)
    return BcqWeight.from_affine(rng.integers(0, 16, (2, 32, 64)), scale, 8, group_size=32, bits=4)


def both_ends(bits: int = 4) -> Any:
    zeros = np.full((32, 2), 5)
    zeros[0] = [0, 2**bits]
    return zeros


@pytest.mark.parametrize(
    ("layouts", "make", "reason"),
    [
        ("gac", lambda: BcqWeight.from_segments([affine(), affine()]), r"2 segments \(4 bit affine, 4 bit affine\)"),
        ("gac", lambda: outliers(affine(), 5), "5 outliers"),
        ("gac", binary, "encoding bcq;"),
        ("gac", lambda: binary(precisions=True), r"encoding bcq with scale sets for \[1\] planes \(multi-precision\)"),
        ("gac", float_zero, "encoding float-zero"),
        ("gac", offset, "encoding offset"),
        ("gac", second_order, "second-order scales"),
        ("gac", lambda: affine(dtype="float32"), "values of type F32 from scales of type F16"),
        ("ga", lambda: affine(bits=5), "5 bits"),
        ("gac", lambda: affine(bits=1), "1 bit"),
        ("a", lambda: affine(bits=8), "8 bits"),
        ("ga", stack, "a stack of 2 matrices"),
        ("g", lambda: affine(rows=20, bits=3), "20 rows of 3 bits"),
        ("g", lambda: affine(columns=68, group_size=34), "68 columns of 4 bits"),
        ("a", lambda: affine(rows=12), "12 rows"),
        ("ac", lambda: affine(columns=80), "80 columns in groups of 32"),
        ("a", lambda: affine(kind=np.float32), "F32 scales"),
        ("a", lambda: scattered(affine()), r"reordered columns \(perm\)"),
        ("ac", lambda: affine(zeros=16), "zero point 16"),
        ("c", lambda: affine(bits=3, zeros=8), "zero point 8"),
        ("g", lambda: affine(zeros=both_ends()), "zero point 16 and, in it, zero point 0"),
    ],
)
def test_what_would_lose_something_is_refused_with_the_reason(
    folder: Folder, layouts: str, make: Callable[[], BcqWeight], reason: str
) -> None:
    bcq = folder({"a.0.x.weight": affine(), NAME: make(), "z.0.x.weight": affine()})
    for layout in TARGETS:
        if layout[0] in layouts:
            fault = refused(bcq, layout)
            assert (fault.code, fault.exit_code, fault.finding.tensor) == ("BCQ-E616", 5, NAME)
            assert re.search(reason, str(fault))
            assert "dense" in fault.hint
    exported(bcq, bcq.parent / "out", "dense")


def test_other_refusals(folder: Folder, tmp_path: Path) -> None:
    bcq = folder({"experts.up": affine()})
    assert "does not end in .weight" in str(refused(bcq, "gptq"))
    bcqfmt.save(bcq, {"norm.weight": np.ones(8, np.float16)}, overwrite=True)
    assert "no quantized weight" in str(refused(bcq, "gptq"))
    bcqfmt.save(bcq, {NAME: affine(), NAME.replace("weight", "scales"): np.ones(8, np.float16)}, overwrite=True)
    assert "a dense tensor is called" in str(refused(bcq, "gptq"))
    bcqfmt.save(bcq, {NAME: affine(), "b.weight": affine(group_size=16)}, overwrite=True)
    assert "one group size" in str(refused(bcq, "awq"))
    zero, past = affine(zeros=0), affine(zeros=16)
    bcqfmt.save(bcq, {"a.weight": zero, "b.weight": affine(), "c.weight": past}, overwrite=True)
    fault = refused(bcq, "gptq")
    assert fault.finding.tensor == "c.weight"
    assert "in 'a.weight', zero point 0" in str(fault)


@pytest.mark.parametrize(
    ("zeros", "format", "told"),
    [
        (1, "gptq_v2", "the weight is asymmetric"),
        (8, "gptq", "all are symmetric"),
        (0, "gptq_v2", "the weight is asymmetric"),
        (np.arange(64).reshape(32, 2) % 16, "gptq_v2", "the weight is asymmetric"),
        (16, "gptq", f"there is a zero point 16 ('{NAME}')"),
    ],
)
def test_asymmetric_zero_points_are_v2_where_they_can_be(
    folder: Folder, tmp_path: Path, zeros: Any, format: str, told: str
) -> None:
    bcq = folder({NAME: affine(zeros=zeros)})
    done = exported(bcq, tmp_path / "out", "gptq")
    assert done.format == format
    assert done.notes[0].startswith(f"zero points: {format}, ")
    assert told in done.notes[0]
    assert stated(tmp_path / "out")["checkpoint_format"] == stated(tmp_path / "out")["format"] == format
    assert stated(tmp_path / "out")["sym"] is (np.size(zeros) == 1 and zeros == 8)
    past = np.max(zeros) == 16
    assert any("--zero-point v1-nowrap" in note for note in done.notes) == past
    back = convert(tmp_path / "out", tmp_path / "back", **({"zero_point": "v1-nowrap"} if past else {}))
    assert digests(back) == digests(bcq)


def test_a_v2_source_stays_v2(folder: Folder, tmp_path: Path) -> None:
    first = tmp_path / "source"
    exported(folder({NAME: affine(zeros=0), "b.weight": affine(zeros=7)}), first, "gptq")
    loaded = safetensors.numpy.load_file(first / "model.safetensors")
    loaded = {name: array for name, array in loaded.items() if name.startswith("b.")}
    safetensors.numpy.save_file(loaded, first / "model.safetensors")
    again = exported(convert(first, tmp_path / "v2"), tmp_path / "out", "gptq")
    assert again.format == "gptq_v2"
    assert again.notes == ["zero points: gptq_v2, as the source had them"]
    assert tensors(tmp_path / "out")["b.qzeros"].tobytes() == tensors(first)["b.qzeros"].tobytes()


def test_an_order_within_groups_and_empty_outliers_lose_nothing(folder: Folder, tmp_path: Path) -> None:
    order = np.arange(64).reshape(2, 32)[:, ::-1].reshape(-1)
    bcq = folder({NAME: outliers(affine().with_perm(order), 0)})
    for layout in ("gptq", "compressed-tensors"):
        exported(bcq, tmp_path / layout, layout)
        assert values(convert(tmp_path / layout, tmp_path / f"{layout}-back")) == values(bcq)
    assert stated(tmp_path / "gptq")["desc_act"] is False
    assert "model.layers.0.mlp.up_proj.weight_g_idx" not in tensors(tmp_path / "compressed-tensors")


def test_infinities_go_over_as_they_are(folder: Folder, tmp_path: Path) -> None:
    scale = np.array([[np.inf, 1.0]] * 32, np.float16)
    codes = np.arange(32 * 64).reshape(32, 64) % 16
    weight = BcqWeight.from_affine(codes, scale, 8, group_size=32, bits=4).allow_nonfinite()
    bcq = folder({NAME: weight})
    for layout in ("gptq", "awq", "compressed-tensors"):
        done = exported(bcq, tmp_path / layout, layout)
        assert any(note.startswith("scales: infinities") for note in done.notes)
        back = convert(tmp_path / layout, tmp_path / f"{layout}-back", allow_nonfinite=True)
        assert digests(back) == digests(bcq)


def test_stacks_of_experts_go_to_compressed_tensors(folder: Folder, tmp_path: Path) -> None:
    orders = np.stack([np.random.default_rng(seed).permutation(64) for seed in (0, 1)])
    rng = np.random.default_rng(4)
    scale = rng.normal(size=(2, 32, 2)).astype(ml_dtypes.bfloat16)
    zeros = rng.integers(0, 8, (2, 32, 2))
    weight = BcqWeight.from_affine(rng.integers(0, 8, (2, 32, 64)), scale, zeros, group_size=32, bits=3)
    bcq = folder({"a.experts.up.weight": weight, "b.experts.up.weight": weight.with_perm(orders)})
    exported(bcq, tmp_path / "out", "compressed-tensors")
    assert values(convert(tmp_path / "out", tmp_path / "back")) == values(bcq)


def test_whole_rows_and_groups_side_by_side(folder: Folder, tmp_path: Path) -> None:
    shapes = {"l.0.a": (96, "row"), "l.0.b": (128, 32), "l.1.a": (96, "row"), "l.1.b": (128, 32), "l.0.c": (32, 32)}
    weights = {f"{n}.weight": affine(columns=k, group_size=g, zeros=8) for n, (k, g) in shapes.items()}
    bcq = folder(weights)
    for layout in ("gptq", "compressed-tensors"):
        exported(bcq, tmp_path / layout, layout)
        assert digests(convert(tmp_path / layout, tmp_path / f"{layout}-back")) == digests(bcq)
    assert stated(tmp_path / "gptq")["group_size"] == 32
    assert stated(tmp_path / "gptq")["dynamic"] == {r"+:.*\.a$": {"bits": 4, "group_size": -1}}
    targets = [group["targets"] for group in stated(tmp_path / "compressed-tensors")["config_groups"].values()]
    assert sorted(targets) == [[r"re:.*\.a$"], [r"re:.*\.b$", "l.0.c"]]


def test_skipped_layers_are_named_where_a_tool_would_look_for_them(folder: Folder, tmp_path: Path) -> None:
    dense = np.ones((4, 8), np.float16)
    names = ("model.embed_tokens.weight", "lm_head.weight", "l.0.mlp.gate.weight", "l.1.mlp.gate.weight")
    bcq = folder({"l.0.mlp.gate_proj.weight": affine(), **dict.fromkeys(names, dense), "l.0.norm.weight": dense[0]})
    exported(bcq, tmp_path / "gptq", "gptq")
    assert stated(tmp_path / "gptq")["dynamic"] == {r"-:.*\.gate$": {}}
    assert stated(tmp_path / "gptq")["modules_in_block_to_quantize"] == [["mlp.gate_proj"]]
    exported(bcq, tmp_path / "ct", "compressed-tensors")
    assert stated(tmp_path / "ct")["ignore"] == ["l.0.mlp.gate", "l.1.mlp.gate", "lm_head"]
    done = exported(bcq, tmp_path / "awq", "awq")
    assert stated(tmp_path / "awq")["modules_to_not_convert"] == ["l.1.mlp.gate", "lm_head"]
    assert any("'l.0.mlp.gate'" in note for note in done.notes)


def test_layers_that_all_blocks_have_dense_are_named_as_each_reader_looks_for_them(
    folder: Folder, tmp_path: Path
) -> None:
    dense = np.ones((32, 64), np.float16)
    names = [f"model.layers.{i}.{leaf}.weight" for i in (0, 1) for leaf in ("self_attn.q_proj", "mlp.up_proj")]
    bcq = folder({name: affine() if "mlp" in name else dense for name in names})
    exported(bcq, tmp_path / "awq", "awq")
    assert stated(tmp_path / "awq")["modules_to_not_convert"] == ["self_attn.q_proj"]
    assert stated(tmp_path / "awq")["dynamic"] == {r"-:.*\.q_proj$": {}}
    exported(bcq, tmp_path / "gptq", "gptq")
    assert stated(tmp_path / "gptq")["modules_in_block_to_quantize"] == [["mlp.up_proj"]]
    mixed = {names[0]: dense, names[1]: affine(), names[2]: affine(), names[3]: affine()}
    bcqfmt.save(bcq, mixed, overwrite=True, config={})
    done = exported(bcq, tmp_path / "some", "gptq")
    assert "modules_in_block_to_quantize" not in stated(tmp_path / "some")
    assert "dense layers: in some blocks only, which GPTQModel reads and transformers does not" in done.notes
    done = exported(bcq, tmp_path / "some-awq", "awq")
    assert stated(tmp_path / "some-awq")["modules_to_not_convert"] == ["model.layers.0.self_attn.q_proj"]
    assert any("AutoAWQ does not" in note for note in done.notes)


@pytest.mark.parametrize(
    ("layout", "name", "model_type", "told"),
    [
        ("gptq", "lm_head.weight", "llama", "transformers would run with a random one"),
        ("gptq", "model.layers.0.mlp.experts.3.up_proj.weight", "qwen3_moe", "experts: GPTQModel reads them"),
        ("awq", "model.layers.0.mlp.experts.3.w1.weight", "mixtral", "mixtral: GPTQModel has other names"),
        ("gptq", "model.layers.0.mlp.gate_up_proj.weight", "phi3", "phi3: GPTQModel has other names"),
    ],
)
def test_what_only_some_readers_take_is_told(
    folder: Folder, tmp_path: Path, layout: str, name: str, model_type: str, told: str
) -> None:
    bcq = folder({NAME: affine()})
    assert not any("would run" in note or "other names" in note for note in exported(bcq, tmp_path / "a", layout).notes)
    bcqfmt.save(bcq, {name: affine()}, config={"model_type": model_type}, overwrite=True)
    assert any(told in note for note in exported(bcq, tmp_path / "b", layout).notes)


def test_a_quantized_head_is_refused_where_no_reader_takes_it(folder: Folder) -> None:
    fault = refused(folder({NAME: affine(), "lm_head.weight": affine()}), "awq")
    assert (fault.code, fault.finding.tensor) == ("BCQ-E616", "lm_head.weight")
    assert "export --to compressed-tensors" in fault.hint


def test_gpt2_is_refused_where_its_weights_would_be_read_transposed(folder: Folder, tmp_path: Path) -> None:
    for rows, columns, wrong in ((32, 96, ("gptq", "awq", "compressed-tensors")), (96, 32, ())):
        bcq = folder({"h.0.attn.c_attn.weight": affine(rows=rows, columns=columns, zeros=8)}, overwrite=True)
        (bcq / "config.json").write_text(
            json.dumps(json.loads((bcq / "config.json").read_text()) | {"model_type": "gpt2"})
        )
        for layout in TARGETS:
            if layout in wrong:
                assert "a weight of GPT-2, stored [in, out]" in str(refused(bcq, layout))
            else:
                done = exported(bcq, tmp_path / f"{rows}-{layout}", layout)
                assert any("wants them [in, out]" in note for note in done.notes) == (layout == "dense" and not wrong)


@pytest.mark.parametrize(
    ("bits", "moved", "told"),
    [
        (4, False, None),
        (3, False, "3 bits: read by compressed-tensors 0.18 and later"),
        (4, True, "act order: read by compressed-tensors 0.15 to 0.18; 0.19 and later refuse it"),
        (3, True, "act order: read by compressed-tensors 0.18 only; 0.19 and later refuse it"),
    ],
)
def test_versions_that_read_it_are_told(
    folder: Folder, tmp_path: Path, bits: int, moved: bool, told: str | None
) -> None:
    weight = affine(bits=bits, zeros=2 ** (bits - 1))
    done = exported(folder({NAME: scattered(weight) if moved else weight}), tmp_path / "out", "compressed-tensors")
    assert done.notes == ([told] if told else [])


def test_widths_of_gptq_p_come_with_a_way_back(folder: Folder) -> None:
    assert "bcqfmt restore" in refused(folder({NAME: affine(bits=6)}), "gptq").hint


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_what_was_quantized_from_another_type_exports_too(tmp_path: Path, dtype: str) -> None:
    array = np.random.default_rng(5).normal(size=(32, 64)).astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    made_up(tmp_path / "dense", {NAME: array}, torch_dtype=dtype)
    options = QuantizeOptions(method="rtn", settings={"group_size": 32})
    Quantization(open_source(tmp_path / "dense"), options).run(tmp_path / "bcq")
    for layout in ("gptq", "compressed-tensors"):
        exported(tmp_path / "bcq", tmp_path / layout, layout)
        assert values(convert(tmp_path / layout, tmp_path / f"{layout}-back")) == values(tmp_path / "bcq")


def test_patterns_never_reach_another_module() -> None:
    chosen, others = ["l.0.up", "l.1.up", "l.0.down", "l.0.e.1", "l.0.e.0"], ["l.1.down", "l.0.e.2", "up2"]
    classes, single = patterns(chosen, others)
    assert classes == [r".*\.up$"]
    assert single == ["l.0.down", "l.0.e.0", "l.0.e.1"]
    made = dense_linears(StoredTensor(f"{n}.weight", "F16", (4, 4)) for n in ("wte", "h.0.mlp", "word_embeddings"))
    assert made == ["h.0.mlp"]


# --------------------------------------------------------------------------------------------------- random weights
@any_words
@given(st.data(), st.sampled_from(["gptq", "awq", "compressed-tensors"]))
def test_any_weight_has_the_same_numbers_after_export_and_conversion(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, layout: str
) -> None:
    place = tmp_path_factory.mktemp("any")
    widths = {"gptq": (2, 3, 4, 8), "awq": (4,), "compressed-tensors": (2, 3, 4, 5, 6, 7, 8)}[layout]
    weights = {}
    low = data.draw(st.sampled_from([0, 1])) if layout == "gptq" else 0
    size = data.draw(st.sampled_from([8, 16, 32, 40, 64]))
    for i in range(data.draw(st.integers(1, 3))):
        bits = data.draw(st.sampled_from(widths))
        rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
        rows = 32 * data.draw(st.integers(1, 2))
        columns = size * 4 if layout != "gptq" else 32 * data.draw(st.integers(2, 5))
        groups = -(-columns // size)
        kinds = [np.float16, ml_dtypes.bfloat16] + ([np.float32] if layout != "awq" else [])
        kind = np.dtype(data.draw(st.sampled_from(kinds)))
        scale = rng.integers(0, 2 ** (8 * kind.itemsize), (rows, groups), dtype=np.uint64).astype(f"u{kind.itemsize}")
        with np.errstate(invalid="ignore"):  # signalling NaNs
            scale = np.where(np.isfinite(scale.view(kind)), scale.view(kind), kind.type(-0.0)).astype(kind)
        top = 2**bits + low if data.draw(st.booleans()) else 2 ** (bits - 1) + 1
        zeros = rng.integers(max(low, top - 2**bits), top, (rows, groups))
        weight = BcqWeight.from_affine(
            rng.integers(0, 2**bits, (rows, columns)), scale, zeros, group_size=size, bits=bits
        )
        if layout != "awq" and data.draw(st.booleans()):
            weight = weight.with_perm(rng.permutation(columns))
        weights[f"l.{i}.m.weight"] = weight
    bcqfmt.save(place / "bcq", weights, config={})
    done = exported(place / "bcq", place / "out", layout)
    rule = "auto" if done.format != "gptq" else "v1-nowrap"
    back = convert(place / "out", place / "back", zero_point=rule)
    assert values(back) == values(place / "bcq")
    with bcqfmt.open(back) as after:
        for name, weight in weights.items():
            again = after.weight(name)
            assert again.parts()["s0_scale"].tobytes() == weight.parts()["s0_scale"].tobytes()
            if not weight.scheme.perm:
                assert again.digest() == weight.digest()
