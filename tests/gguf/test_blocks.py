"""Blocks to fields and back for any bytes, and their values: gguf-py, ggml's C code (digests), the float64 formula."""

from __future__ import annotations

import hashlib
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bcqfmt.container.files import SourceFile
from bcqfmt.container.gguf.header import read_gguf
from bcqfmt.container.gguf.types import TYPES
from bcqfmt.converters.gguf.blocks import blocks_of, in_order, numbers_of, planes_of
from bcqfmt.converters.gguf.kinds import KINDS, Kind
from bcqfmt.converters.gguf.values import values_of
from bcqfmt.converters.words import planes_to_codes
from bcqfmt.weight.packing import unpack
from sources.gguf_files import DATA, EXPECTED, FILES

TYPE = {kind.name: kind for kind in TYPES.values()}
IQ4 = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113])
FP4 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12])


def random_rows(name: str, seed: int, rows: int = 3, blocks: int = 2) -> Any:
    """Any bytes; TQ1_0 as its quantizer writes them."""
    rng = np.random.default_rng(seed)
    found = rng.integers(0, 256, (rows, blocks, TYPE[name].nbytes), dtype=np.uint8)
    if name == "TQ1_0":
        five = rng.integers(0, 243, (rows, blocks, 48))
        four = rng.integers(0, 81, (rows, blocks, 4)) * 3
        found[..., :52] = (np.concatenate([five, four], axis=-1) * 256 + 242) // 243
    return found.reshape(rows, -1)


def fields_of(name: str, rows: Any, order: str = "<", proved: bool = True) -> dict[str, Any]:
    """All fields; ``proved``: whether they must say that they give back the blocks."""
    proof: list[bool] = []
    rows = in_order(name, rows, order)
    fields = {**numbers_of(name, rows, proof=proof), "planes": planes_of(name, rows, proof=proof)}
    assert proof
    assert all(proof) == proved
    return fields


@pytest.mark.parametrize("name", KINDS)
def test_a_block_has_the_size_that_the_type_has(name: str) -> None:
    assert KINDS[name].block().itemsize == TYPE[name].nbytes


@pytest.mark.parametrize("name", KINDS)
@settings(max_examples=40, deadline=None)  # loops are compiled at their first call
@given(seed=st.integers(0, 2**32 - 1), order=st.sampled_from("<>"), rows=st.integers(1, 40), blocks=st.integers(1, 3))
def test_any_bytes_come_back(name: str, seed: int, order: str, rows: int, blocks: int) -> None:
    raw = random_rows(name, seed, rows, blocks)
    assert np.array_equal(blocks_of(name, fields_of(name, raw, order), order), raw)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("rows", [1, 5])  # the first are fewer codes than are worked on at once
def test_some_rows_of_larger_planes(name: str, rows: int) -> None:
    raw = random_rows(name, 2, 7, 1)
    whole = np.full((KINDS[name].bits, 7, KINDS[name].elements // 32), 0xDEADBEEF, np.uint32)
    planes_of(name, raw[1 : 1 + rows], planes=whole[:, 1 : 1 + rows])
    assert np.array_equal(whole[:, 1 : 1 + rows], planes_of(name, raw)[:, 1 : 1 + rows])
    assert (np.delete(whole, np.s_[1 : 1 + rows], axis=1) == 0xDEADBEEF).all()
    fields = {**numbers_of(name, raw[1 : 1 + rows]), "planes": whole[:, 1 : 1 + rows]}
    assert np.array_equal(blocks_of(name, fields), raw[1 : 1 + rows])


@pytest.mark.parametrize("name", KINDS)
def test_single_bits_come_back_in_every_place(name: str) -> None:
    if name == "TQ1_0":
        return  # any byte of it is five codes at once
    size = TYPE[name].nbytes
    raw = np.zeros((8 * size, size), np.uint8)
    at = np.arange(8 * size)
    raw[at, at // 8] = 1 << (at % 8)
    assert np.array_equal(blocks_of(name, fields_of(name, raw)), raw)


def test_bytes_that_no_ternary_quantizer_writes_do_not_come_back() -> None:
    raw = random_rows("TQ1_0", 1)
    raw[0, 0] = 1  # 243 of 256 bytes are written; this one is none of them
    assert not np.array_equal(blocks_of("TQ1_0", fields_of("TQ1_0", raw, proved=False)), raw)


def codes_in(words: Any, kind: Kind) -> Any:
    """Second-order codes by the reference of the format."""
    return unpack(words, kind.scale_bits, 32 * words.shape[1] // kind.scale_bits).astype(float)


def formula(name: str, fields: dict[str, Any]) -> Any:
    """The exact value in float64, rounded once to F32: the rule of the format, from the fields alone."""
    kind = KINDS[name]
    n = fields["planes"].shape[1]
    codes = planes_to_codes(fields["planes"], 32 * fields["planes"].shape[2]).astype(np.float64)
    spread = np.arange(codes.shape[1]) // kind.group_size
    if "scale_scale" in fields:
        shared = spread // kind.groups
        scale = fields["scale_scale"].astype(float)[:, shared]
        scale = scale * (codes_in(fields["scale_codes"], kind) - kind.scale_zero)[:, spread]
    elif name == "MXFP4":
        scale = np.ldexp(1.0, fields["scale"].astype(int) - 128)[:, spread]
    elif name == "NVFP4":
        table = gguf_ue4m3()
        scale = table[fields["scale"]][:, spread]
    else:
        scale = fields["scale"].astype(float)[:, spread]
    if name.startswith("IQ4"):
        codes = IQ4[codes.astype(int)].astype(float)
    elif name.endswith("FP4"):
        codes = FP4[codes.astype(int)].astype(float)
    elif name == "Q1_0":
        codes = 2 * codes - 1
    elif kind.zero is not None:
        codes = codes - kind.zero
    total = scale * codes
    if "offset_scale" in fields:
        total = (
            total + fields["offset_scale"].astype(float)[:, shared] * codes_in(fields["offset_codes"], kind)[:, spread]
        )
    elif "offset" in fields:
        total = total + fields["offset"].astype(float)[:, spread]
    assert total.shape[0] == n
    return total.astype(np.float32)


def gguf_ue4m3() -> Any:
    """Half of an unsigned E4M3 byte, whose bit 7 is ignored; 7F, but not FF, is 0."""
    raw = np.arange(256)
    exponent, mantissa = raw >> 3 & 15, raw & 7
    value = np.where(exponent == 0, mantissa * 2.0**-9, (1 + mantissa / 8) * 2.0 ** (exponent - 7))
    return np.where(raw == 127, 0.0, value) / 2


def finite(name: str, raw: Any) -> Any:
    """The same blocks with F16 numbers that are finite, as models have them."""
    blocks = raw.view(KINDS[name].block())
    for field in ("d", "m", "dd", "dmin"):
        if field in blocks.dtype.fields:
            blocks[field] = np.nan_to_num(blocks[field], nan=1.0, posinf=2.0, neginf=-2.0)
    return raw


@pytest.mark.parametrize("name", KINDS)
@settings(max_examples=40, deadline=None)  # loops are compiled at their first call
@given(seed=st.integers(0, 2**32 - 1))
def test_values_are_those_of_the_formula(name: str, seed: int) -> None:
    raw = finite(name, random_rows(name, seed))
    with np.errstate(over="ignore"):
        assert np.array_equal(values_of(name, raw), formula(name, fields_of(name, raw)))


@pytest.mark.parametrize("name", [name for name in KINDS if name not in ("Q1_0", "Q2_0")])  # gguf 0.19 lacks them
@settings(deadline=None)  # loops are compiled at their first call
@given(seed=st.integers(0, 2**32 - 1))
def test_values_are_those_of_gguf_py(name: str, seed: int) -> None:
    raw = finite(name, random_rows(name, seed))
    with np.errstate(all="ignore"):
        expected = gguf.dequantize(raw, gguf.GGMLQuantizationType[name])
    found = values_of(name, raw)
    assert np.array_equal(found.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("name", KINDS)
def test_the_other_byte_order_has_the_same_values(name: str) -> None:
    raw = finite(name, random_rows(name, 7))
    swapped = np.ascontiguousarray(raw).view(KINDS[name].block())
    swapped = swapped.astype(KINDS[name].block(">")).view(np.uint8).reshape(raw.shape)
    assert np.array_equal(values_of(name, swapped, ">"), values_of(name, raw))
    for field, array in fields_of(name, raw).items():
        assert np.array_equal(fields_of(name, swapped, ">")[field], array)


@pytest.mark.parametrize("file", FILES)
def test_real_blocks_come_back_and_have_the_values_of_other_programs(file: str) -> None:
    data = (DATA / file).read_bytes()
    header = read_gguf(SourceFile(DATA / file))
    seen = 0
    for entry in EXPECTED[file]["tensors"]:
        info = header.tensors[entry["name"]]
        stored = data[info.offset : info.offset + info.nbytes]
        assert hashlib.sha256(stored).hexdigest() == entry["sha256_bytes"]
        if info.type.name not in KINDS:
            continue
        rows = np.frombuffer(stored, np.uint8).reshape(-1, info.row_bytes)
        assert np.array_equal(blocks_of(info.type.name, fields_of(info.type.name, rows)), rows)
        assert hashlib.sha256(values_of(info.type.name, rows).tobytes()).hexdigest() == entry["sha256_f32"]
        seen += 1
    assert seen or file in ("f16.gguf", "bf16.gguf")
