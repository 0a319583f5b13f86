"""The GPTQ layout on random words: codes, five zero-point rules, act order, and rebuilding."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import bcqfmt
from bcqfmt.container.stored_tensor import StoredTensor
from bcqfmt.converters.layouts import gptq
from bcqfmt.converters.layouts.gptq import Gptq
from bcqfmt.converters.layouts.gptq_zeros import RULES, choose_rule, decode_zeros, encode_zeros
from bcqfmt.converters.layouts.protocol import Options
from bcqfmt.converters.layouts.rebuild import apply_rule, rebuilds
from bcqfmt.converters.words import codes_to_stream_columns, stream_columns_to_codes
from bcqfmt.errors import BcqError
from sources import conversions
from sources.peers import affine_values, any_words, halves, made_up, words

PLANAR = {2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 7: (4, 2, 1), 8: (8,)}


def stream(column: Any, bits: int, count: int) -> list[int]:
    """Fields of a little-endian bit stream, one bit after the other."""
    whole = sum(int(word) << (32 * i) for i, word in enumerate(column))
    return [(whole >> (bits * j)) & (2**bits - 1) for j in range(count)]


def planar(column: Any, bits: int, count: int) -> list[int]:
    """gptq_p: each block of 32 codes is a run of planes of 4, 2 or 1 bits, the low plane first."""
    codes = []
    for block in range(count // 32):
        at, shift, found = block * bits, 0, [0] * 32
        for width in PLANAR[bits]:
            fields = stream(column[at : at + width], width, 32)
            found = [code | field << shift for code, field in zip(found, fields, strict=True)]
            at, shift = at + width, shift + width
        codes += found
    return codes


def zero_points(row: Any, bits: int, n: int, rule: str, fields: Any) -> list[int]:
    """The five readings, from the definitions."""
    if rule == "v2":
        return list(fields(row, bits, n))
    if rule == "v1-nowrap":
        return [f + 1 for f in fields(row, bits, n)]
    if rule == "v1-wrap":
        return [(f + 1) % 2**bits for f in fields(row, bits, n)]
    if rule == "v1-carry":
        one = sum(1 << (bits * i) for i in range(32 // bits))
        return list(fields([(int(w) + one) % 2**32 for w in row], bits, n))
    constants = (0x24924924, 0x92492492, 0x49249249)
    return list(fields([(int(w) + constants[i % 3]) % 2**32 for i, w in enumerate(row)], bits, n))


def sample(rng: np.random.Generator, bits: int, n: int, k: int, group: int, scatter: bool) -> dict[str, Any]:
    groups = -(-k // group)
    g_idx = np.arange(k) // group
    if scatter:
        rng.shuffle(g_idx)
    return {
        "m.qweight": words(rng, k * bits // 32, n),
        "m.qzeros": words(rng, groups, n * bits // 32),
        "m.scales": halves(rng, groups, n),
        "m.g_idx": g_idx.astype(np.int32),
    }


@st.composite
def cases(draw: st.DrawFn) -> tuple[int, str, str, int, int, int, bool, int | None, int]:
    form = draw(st.sampled_from(["gptq", "gptq_v2", "gptq_p"]))
    bits = draw(st.sampled_from([2, 3, 4, 5, 6, 7, 8] if form == "gptq_p" else [2, 3, 4, 8]))
    v1 = [rule for rule in RULES if rule != "v2" and (rule != "v1-carry" or bits != 3)]
    v1 = [rule for rule in v1 if rule != "v1-gptqmodel-3bit" or bits == 3]
    rule = "v2" if form != "gptq" else draw(st.sampled_from(v1))
    k, n = draw(st.sampled_from([32, 64, 96])), draw(st.sampled_from([32, 64]))
    group = draw(st.sampled_from([8, 16, 32, 40, k]))
    same = draw(st.none() | st.sampled_from([0, 0x77777777, 0x88888888, 0xFFFFFFFF]) | st.integers(0, 2**32 - 1))
    return bits, form, rule, n, k, min(group, k), draw(st.booleans()), same, draw(st.integers(0, 2**32))


@any_words
@given(case=cases())
def test_any_words_come_through_and_back(case: Any, tmp_path: Path) -> None:
    bits, form, rule, n, k, group, scatter, same, seed = case
    tensors = sample(np.random.default_rng(seed), bits, n, k, group, scatter)
    if same is not None:  # one word all over, as symmetric files have it
        tensors["m.qzeros"].view(np.uint32)[:] = same
    config = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group,
        "sym": False,
        "desc_act": scatter,
        "format": form,
    }
    options = Options(zero_point=rule)
    (module,) = Gptq().modules(made_up(tmp_path / "c", tensors, config), options)
    weight, rules, *_ = Gptq().convert(module, options)

    unpack = planar if form == "gptq_p" else stream
    packed, zeros = tensors["m.qweight"].view(np.uint32), tensors["m.qzeros"].view(np.uint32)
    codes = np.array([unpack(packed[:, j], bits, k) for j in range(n)], np.float64)
    zp = np.array([zero_points(row, bits, n, rule, unpack) for row in zeros], np.float64)
    index = tensors["m.g_idx"]
    scale = tensors["m.scales"].astype(np.float64)
    with np.errstate(over="ignore"):
        expected = (scale[index].T * (codes - zp[index].T)).astype(np.float16)
    assert np.array_equal(weight.dequantize().view(np.uint16), expected.view(np.uint16))
    for suffix, how in rules.items():
        rebuilt = np.ascontiguousarray(apply_rule(weight, how, Gptq().rebuilders()))
        assert rebuilt.tobytes() == tensors[f"m.{suffix}"].tobytes(), suffix


@pytest.mark.parametrize("scatter", [False, True])
@pytest.mark.parametrize(("form", "bits"), [("gptq_v2", 3), ("gptq_v2", 4), ("gptq_p", 5)])
def test_words_are_rebuilt_from_some_rows_at_a_time(
    form: str, bits: int, scatter: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gptq, "_STRIP", 1)  # 64 rows: two strips and a short one
    tensors = sample(np.random.default_rng(bits), bits, 160, 128, 32, scatter)
    config = {"quant_method": "gptq", "bits": bits, "group_size": 32, "sym": False, "format": form}
    (module,) = Gptq().modules(made_up(tmp_path / "c", tensors, config), Options())
    weight, rules, *_ = Gptq().convert(module, Options())
    rebuilt = apply_rule(weight, rules["qweight"], Gptq().rebuilders())
    assert rebuilt.tobytes() == tensors["m.qweight"].tobytes()


@pytest.mark.parametrize("rule", ["v2", "v1-nowrap", "v1-carry"])
def test_zero_words_that_modules_share_are_compared_with_each(rule: str, tmp_path: Path) -> None:
    tensors = sample(np.random.default_rng(0), 4, 64, 64, 32, False)
    tensors["m.qzeros"].view(np.uint32)[:] = 0x88888888
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "format": "gptq_v2"}
    (module,) = Gptq().modules(made_up(tmp_path / "c", tensors, config), Options(zero_point=rule))
    weight, rules, *_ = Gptq().convert(module, Options(zero_point=rule))
    gptq._same_words.cache_clear()
    right = tensors["m.qzeros"]
    for expected in (right ^ 1, right, right ^ 16, right):
        tensor = StoredTensor.from_array("m.qzeros", expected)
        assert rebuilds(weight, rules["qzeros"], tensor, Gptq().rebuilders()) == (expected is right)


def test_golden_words_of_the_dialects() -> None:
    """One word of eight 4-bit fields, as four writers left it, read by three rules (zero points 8 0 8 3 8 8 8 8)."""
    clobber, borrow, modular = 0xFFFFFFF7, 0x777726F7, 0x777727F7
    table = {
        (clobber, "v1-nowrap"): [8, 16, 16, 16, 16, 16, 16, 16],
        (clobber, "v1-wrap"): [8, 0, 0, 0, 0, 0, 0, 0],
        (clobber, "v1-carry"): [8, 0, 1, 1, 1, 1, 1, 1],
        (borrow, "v1-nowrap"): [8, 16, 7, 3, 8, 8, 8, 8],
        (borrow, "v1-wrap"): [8, 0, 7, 3, 8, 8, 8, 8],
        (borrow, "v1-carry"): [8, 0, 8, 3, 8, 8, 8, 8],
        (modular, "v1-nowrap"): [8, 16, 8, 3, 8, 8, 8, 8],
        (modular, "v1-wrap"): [8, 0, 8, 3, 8, 8, 8, 8],
        (modular, "v1-carry"): [8, 0, 9, 3, 8, 8, 8, 8],
    }
    for (word, rule), expected in table.items():
        row = np.array([[word]], np.uint32)
        found = decode_zeros(
            row, stream_columns_to_codes(row, 4, 8), 4, rule, lambda w: stream_columns_to_codes(w, 4, 8)
        )
        assert found.tolist() == [expected]
        assert zero_points([word], 4, 8, rule, stream) == expected
        back = encode_zeros(found, 4, rule, lambda fields: codes_to_stream_columns(fields.astype(np.uint8), 4))
        assert back.tolist() == [[word]]


@pytest.mark.parametrize(
    ("version", "bits", "tool", "ones", "expected"),
    [
        ("gptq_v2", 4, None, True, "v2"),
        ("gptq", 4, ("gptqmodel", (7, 6, 0)), True, "v1-carry"),
        ("gptq", 3, ("gptqmodel", (7, 0, 0)), True, "v1-wrap"),
        ("gptq", 3, ("gptqmodel", (6, 0, 3)), False, "v1-gptqmodel-3bit"),
        ("gptq", 8, ("auto-round", (0, 15, 1)), True, "v1-carry"),
        ("gptq", 3, ("auto-round", (0, 15, 1)), True, "v1-wrap"),
        ("gptq", 4, ("auto-gptq", (0, 7, 1)), False, "v1-nowrap"),
        ("gptq", 4, None, False, "v1-nowrap"),
    ],
)
def test_the_table_of_rules(version: str, bits: int, tool: Any, ones: bool, expected: str) -> None:
    assert choose_rule("auto", version, bits, tool, ones) == expected


def test_all_ones_and_no_tool_on_record_is_not_guessed() -> None:
    with pytest.raises(BcqError) as caught:
        choose_rule("auto", "gptq", 4, None, True)
    assert (caught.value.code, caught.value.exit_code) == ("BCQ-E605", 4)
    assert "--zero-point" in caught.value.hint
    assert choose_rule("v1-wrap", "gptq", 4, None, True) == "v1-wrap"


def test_symmetric_files_that_lie_about_their_version_are_refused(tmp_path: Path) -> None:
    tensors = sample(np.random.default_rng(0), 4, 32, 64, 32, False)
    tensors["m.qzeros"][:] = np.int32(-0x77777778)  # every field 8, as v2 has it
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False, "format": "gptq"}
    source = made_up(tmp_path / "c", tensors, config)
    with pytest.raises(BcqError) as caught:
        Gptq().modules(source, Options())
    assert caught.value.code == "BCQ-E605"
    (module,) = Gptq().modules(source, Options(zero_point="v2"))
    assert Gptq().convert(module, Options()).weight.scheme.segments[0].zero == 8


@pytest.mark.parametrize(
    ("method", "stated", "shift"),
    [
        ("intel/auto-round", {"backend": "autoround:exllamav2", "autoround_version": "0.2.1.dev"}, 0),
        ("intel/auto-round", {"backend": "auto_round:exllamav2", "autoround_version": "0.3"}, 0),
        ("intel/auto-round", {"backend": "auto_round:triton"}, 0),
        ("intel/auto-round", {"packing_format": "auto_round", "backend": "auto"}, 0),
        ("intel/auto-round", {"backend": "gptq:exllamav2", "autoround_version": "0.2"}, 1),
        ("intel/auto-round", {"backend": "auto_round:gptq:exllamav2", "autoround_version": "0.4.3"}, 1),
        ("intel/auto-round", {"backend": "auto_gptq:cuda", "autoround_version": "0.4.7"}, 1),
        ("intel/auto-round", {"autoround_version": "0.2"}, 1),
        ("intel/auto-round", {"checkpoint_format": "gptq"}, 1),
        ("auto-round", {"backend": "auto_round:exllamav2"}, 0),
        ("auto-round", {"backend": "auto_round:auto_gptq"}, 1),
        ("auto-round", {"packing_format": "auto_round:gptqmodel"}, 0),
        ("auto-round", {"packing_format": "auto_round", "backend": "gptq:exllamav2"}, 0),
        ("auto-round", {"packing_format": "auto_round:auto_gptq", "backend": "auto_round:triton"}, 1),
        ("auto-round", {}, 0),
    ],
)
def test_zero_points_as_each_auto_round_stored_them(
    method: str, stated: dict[str, Any], shift: int, tmp_path: Path
) -> None:
    """Its own packing stores zero points as they are, AutoGPTQ's minus one, under the old names of both keys too."""
    rng = np.random.default_rng(1)
    tensors = sample(rng, 4, 32, 64, 32, False)
    zeros = rng.integers(1, 15, (2, 32))
    packed = [sum(int(z) - shift << 4 * i for i, z in enumerate(eight)) for eight in zeros.reshape(-1, 8)]
    tensors["m.qzeros"] = np.array(packed, np.uint32).reshape(2, 4).view(np.int32)
    config = {"quant_method": method, "bits": 4, "group_size": 32, "sym": False, **stated}
    source = made_up(tmp_path / "c", tensors, config)
    (module,) = Gptq().modules(source, Options())
    weight = Gptq().convert(module, Options()).weight
    codes = np.array([stream(column, 4, 64) for column in tensors["m.qweight"].view(np.uint32).T])
    expected = affine_values(codes, tensors["m.scales"].T, zeros.T, np.arange(64) // 32)
    assert weight.dequantize().tobytes() == expected.tobytes()
    Gptq().modules(source, Options(zero_point="v1-nowrap" if shift else "v2"))
    assert not source.warnings
    Gptq().modules(source, Options(zero_point="v2" if shift else "v1-nowrap"))
    assert [warning.code for warning in source.warnings] == ["BCQ-E655"]


@pytest.mark.parametrize(
    ("stated", "ones", "offered"),
    [
        ({}, False, ["v2", "v1-nowrap"]),
        ({"autoround_version": "0.4.7"}, True, ["v2", "v1-nowrap", "v1-wrap", "v1-carry"]),
        ({"backend": "exllamav2", "autoround_version": "0.2"}, False, ["v2", "v1-nowrap"]),
        ({"backend": "auto_round:gptqmodel"}, False, ["v2", "v1-nowrap"]),
    ],
)
def test_an_old_auto_round_that_does_not_tell_its_packing_is_not_guessed(
    stated: dict[str, Any], ones: bool, offered: list[str], tmp_path: Path
) -> None:
    """Its first writers left the key out and used AutoGPTQ's packing, its readers took it for their own."""
    tensors = sample(np.random.default_rng(1), 4, 32, 64, 32, False)
    tensors["m.qzeros"].view(np.uint32)[:] = 0xF3333333 if ones else 0x63333333
    config = {"quant_method": "intel/auto-round", "bits": 4, "group_size": 32, "sym": False, **stated}
    source = made_up(tmp_path / "c", tensors, config)
    with pytest.raises(BcqError) as caught:
        Gptq().modules(source, Options())
    assert (caught.value.code, caught.value.exit_code) == ("BCQ-E605", 4)
    assert f"--zero-point {' or '.join(offered)};" in caught.value.hint
    for rule in offered:
        (module,) = Gptq().modules(source, Options(zero_point=rule))
        assert module.settings["zero_point"] == rule
    assert not source.warnings


def test_whole_rows_of_any_width_share_one_scheme(tmp_path: Path) -> None:
    """group_size -1 is stored as "row": the width of a layer is no part of how it was quantized."""
    rng = np.random.default_rng(5)
    tensors = {}
    for k in (64, 128):
        for suffix, array in conversions.gptq_layer(rng, 32, k, k).items():
            tensors[f"layers.{k}.{suffix}"] = array
    made_up(tmp_path / "source", tensors, {**conversions.GPTQ, "group_size": -1})
    conversions.convert(tmp_path / "source", tmp_path / "bcq")
    conversions.proved(tmp_path / "source", tmp_path / "bcq", tmp_path)
    manifest = json.loads((tmp_path / "bcq" / "bcq_manifest.json").read_bytes())
    assert [[s["group_size"] for s in scheme["segments"]] for scheme in manifest["schemes"]] == [["row"]]
    with bcqfmt.open(tmp_path / "bcq") as checkpoint:
        sizes = {name: weight.scheme.segments[0].group_size for name, weight in checkpoint.weights()}
    assert sizes == {"layers.64.weight": 64, "layers.128.weight": 128}
