"""The text of the specification against the package and the vectors: same rules, same tables, same bytes."""

from __future__ import annotations

import fnmatch
import re
from pathlib import Path

import numpy as np
import pytest

import bcqfmt
from bcqfmt import BcqWeight, codes, limits
from bcqfmt.container import dtypes
from bcqfmt.weight import scheme
from weights import oracle, samples

SPEC = Path(__file__).resolve().parents[2] / "spec"
TEXT = "\n".join((SPEC / name).read_text(encoding="utf-8") for name in ("bcq-1.0.md", "provenance-1.0.md"))
RULE = re.compile(r"BCQ-V\d{3}")


def section(title: str) -> str:
    """The text under a heading, up to the next one of its level or above."""
    match = re.search(rf"^(#+) {re.escape(title)}.*$", TEXT, re.MULTILINE)
    assert match, title
    rest = TEXT[match.end() :]
    end = re.search(rf"^#{{1,{len(match[1])}}} ", rest, re.MULTILINE)
    return rest[: end.start()] if end else rest


def rows(text: str) -> list[list[str]]:
    """Cells of all table rows, without heads and rules."""
    lines = [line.strip() for line in text.splitlines()]
    found = []
    for i, line in enumerate(lines):
        below = lines[i + 1] if i + 1 < len(lines) else ""
        if line.startswith("|") and not re.fullmatch(r"[|: -]+", line) and not re.fullmatch(r"\|[|: -]+", below):
            found.append([cell.strip() for cell in line.strip("|").split("|")])
    return found


def blocks() -> list[str]:
    """Paragraphs, bullets and table rows; code is left out."""
    prose = re.sub(r"^```.*?^```", "", TEXT, flags=re.MULTILINE | re.DOTALL)
    found: list[str] = []
    for paragraph in re.split(r"\n\s*\n", prose):
        current = ""
        for line in paragraph.splitlines():
            if re.match(r"\s*([-*]|\d+\.) |\|", line):
                found.append(current)
                current = line
            else:
                current += " " + line
        found.append(current)
    return [block for block in found if block.strip()]


# -- rules -----------------------------------------------------------------------------------------------------


def test_rules_of_the_text_the_program_and_the_vectors_are_the_same() -> None:
    retired = {row[0] for row in rows(section("12. Versions")) if RULE.fullmatch(row[0])}
    assert retired == codes.RETIRED
    assert not retired & set(codes.CODES)
    written = set(RULE.findall(TEXT)) - retired
    known = {code for code in codes.CODES if code.startswith("BCQ-V")}
    exercised = {entry["rule"] for entry in samples.vector_index()["invalid"]}
    assert written == known
    assert written == exercised


def listed_rules(cell: str) -> list[str]:
    """`V101 to V103, V105` as ids; the numbers of a range that no rule has are left out."""
    known = {code for code in codes.CODES if code.startswith("BCQ-V")}
    found = []
    for first, last in re.findall(r"V(\d{3})(?: to V(\d{3}))?", cell):
        found += [f"BCQ-V{number}" for number in range(int(first), int(last or first) + 1)]
    return [rule for rule in found if rule in known]


def test_every_rule_has_one_level_and_the_vectors_know_it() -> None:
    levels = {cells[0].split()[0]: listed_rules(cells[2]) for cells in rows(section("1.1 Three levels"))}
    assert list(levels) == ["open", "read", "verify"]
    every = [rule for rules in levels.values() for rule in rules]
    assert sorted(every) == sorted(code for code in codes.CODES if code.startswith("BCQ-V"))
    for entry in samples.vector_index()["invalid"]:
        assert entry["rule"] in levels[entry["level"]], entry["id"]


def test_the_list_of_changes_names_vectors_that_exist() -> None:
    text = (SPEC / "CHANGES.md").read_text(encoding="utf-8")
    ids = {entry["id"] for group in ("valid", "invalid") for entry in samples.vector_index()[group]}
    named = [name for cells in rows(text) for name in re.findall(r"`([a-z0-9*-]+)`", cells[2]) if name != "level"]
    assert len(named) > 20
    assert [name for name in named if not fnmatch.filter(ids, name)] == []


def stated(block: str) -> list[str]:
    """Sentences with a MUST; the one that explains the key words themselves apart."""
    if "The key words MUST" in block or "Every MUST and MUST NOT is" in block:
        return []
    sentences = re.split(r"(?<=[.;:])\s+(?=[A-Z`])", block)
    return [text for text in sentences if re.search(r"\bMUST\b", text)]


def test_every_must_has_its_rule() -> None:
    lacking = [block.strip() for block in blocks() for text in stated(block) if not RULE.search(text)]
    assert not lacking


def test_every_rule_is_stated_with_a_must_somewhere() -> None:
    stating = {rule for block in blocks() if re.search(r"\bMUST\b", block) for rule in RULE.findall(block)}
    assert set(RULE.findall(TEXT)) - stating == codes.RETIRED


def test_numbers_of_rules_follow_their_sections() -> None:
    homes = {
        "1": "3. Container",
        "2": "5. Descriptor",
        "3": "6. Parts",
        "5": "9. Folder",
        "6": "9.3 Manifest",
        "7": "2. Rules",
    }
    for digit, title in homes.items():
        own = {rule for rule in RULE.findall(TEXT) if rule[5] == digit}
        there = set(RULE.findall(section(title)))
        assert own - there <= {"BCQ-V215"} | codes.RETIRED, (digit, own - there)


def test_words_of_obligation_are_those_of_the_rfc() -> None:
    others = re.findall(r"\b(SHALL|REQUIRED|RECOMMENDED|OPTIONAL)\b", TEXT)
    assert not others


# -- tables ----------------------------------------------------------------------------------------------------


def test_limits() -> None:
    table = {cells[0]: int(cells[1].replace(",", "")) for cells in rows(section("11. Limits"))}
    program = {name: value for name, value in vars(limits).items() if name.isupper()}
    assert table == program


def test_features() -> None:
    table = [name for cells in rows(section("5.4 Features")) for name in re.findall(r"`([a-z0-9-]+)`", cells[0])]
    assert sorted(table) == list(scheme.FEATURES)
    assert len(set(table)) == len(table)


def test_element_types() -> None:
    found = {}
    for cells in rows(section("3. Container")):
        if len(cells) == 2 and cells[1].isdigit():
            found |= dict.fromkeys(re.findall(r"`(\w+)`", cells[0]), int(cells[1]))
    assert found == dtypes.BITS


def test_parts() -> None:
    """Every part of the tables in section 6 and annex A is one that the package knows, and the other way round."""
    table = {
        re.sub(r"[{}]", "", name)
        for name in re.findall(r"^\| `P ([\w{}]+)`", section("6. Parts") + section("Annex A. The layout"), re.MULTILINE)
    }
    known = set()
    F = "F16"
    order = bcqfmt.SecondOrder(4, 8, F, "packed")
    base = {"bits": 3, "group_size": 8}
    segments = (
        bcqfmt.Segment(encoding="affine", scale=F, zero=bcqfmt.PackedZero(2), **base),
        bcqfmt.Segment(encoding="affine", scale=order, zero=1, **base),
        bcqfmt.Segment(encoding="offset", scale=F, offset=F, **base),
        bcqfmt.Segment(encoding="bcq", alpha=F, bias=F, precisions=(1,), **base),
    )
    made = bcqfmt.Scheme(segments=segments, perm=True, outliers=bcqfmt.OutlierRule("add", F, (0,)))
    spec = bcqfmt.WeightSpec(scheme=made, shape=(2, 32), dtype=F, widths=(8,) * 4)
    known |= set(spec.parts())
    low = bcqfmt.Segment(encoding="affine", bits=2, group_size=16, scale=order, zero=bcqfmt.PackedZero(2))
    high = bcqfmt.Segment(encoding="affine", bits=4, group_size=16, scale=F, zero=1)
    tiled = bcqfmt.Scheme(segments=(low, high), aligned64=True)
    known |= set(bcqfmt.WeightSpec(scheme=tiled, shape=(2, 64), dtype=F, widths=(48, 16)).parts())
    general = {re.sub(r"_p\d", "_pp", re.sub(r"^s\d", "sk", name)) for name in known}
    shown = {re.sub(r"^s0_", "sk_", name) for name in table}
    assert general == shown


@pytest.mark.parametrize("feature", scheme.FEATURES)
def test_every_feature_has_a_vector(feature: str) -> None:
    assert any(feature in entry["features"] for entry in samples.vector_index()["valid"])


@pytest.mark.parametrize("encoding", ["affine", "float-zero", "offset", "bcq"])
def test_every_encoding_has_a_vector(encoding: str) -> None:
    assert any(encoding in entry["encodings"] for entry in samples.vector_index()["valid"])


# -- examples --------------------------------------------------------------------------------------------------


def dumped() -> bytes:
    """The bytes of the annotated dump in section 14, offsets checked on the way."""
    region = TEXT.split("<!-- example:begin -->")[1].split("<!-- example:end -->")[0]
    found = b""
    for line in region.splitlines():
        match = re.match(r" *(\d+)  ((?:[0-9a-f]{2} ?){1,16})(?: |$)", line)
        if match:
            assert int(match[1]) == len(found)
            found += bytes.fromhex(match[2])
    return found


def test_the_dump_is_the_file() -> None:
    assert dumped() == (samples.VECTORS / "valid" / "worked-example.safetensors").read_bytes()


def test_the_notes_of_the_dump_are_true() -> None:
    """The text column shows the header's characters; the notes name the parts and their numbers."""
    region = TEXT.split("<!-- example:begin -->")[1].split("<!-- example:end -->")[0]
    header, _ = oracle.split(dumped())
    start = 8 + int.from_bytes(dumped()[:8], "little")
    for line in region.splitlines():
        match = re.match(r" *(\d+)  ((?:[0-9a-f]{2} )+) *(.*)$", line)
        if not match:
            continue
        at, raw, note = int(match[1]), bytes.fromhex(match[2]), match[3]
        if 8 <= at < start:
            assert note == raw.decode().rstrip()
        elif at >= start:
            name = note.split(",")[0]
            begin, end = header[name]["data_offsets"]
            assert start + begin <= at < start + end
            if ": " in note:
                assert np.frombuffer(raw, np.float16)[0] == float(note.split(": ")[1])
        else:
            assert note == f"L = {start - 8}: the header ends at byte {start}"


def test_the_dump_decodes_to_the_table(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(dumped())
    assert not bcqfmt.validate(tmp_path / "a.safetensors", deep=True).errors
    found = bcqfmt.open(tmp_path / "a.safetensors").weight("w.weight")
    table = {
        int(cells[0]): [float(x) for x in cells[1].split()]
        for cells in rows(section("14. A complete file"))
        if cells[0].isdigit()
    }
    assert sorted(table) == [0, 1]
    values = found.dequantize()
    for r, wanted in table.items():
        assert values[r].tobytes() == np.array(wanted, np.float16).tobytes()  # -0 is not 0
    given = re.findall(r"row (\d): ([\d ]+\d)", section("14. A complete file").split("<!--")[0])
    assert {int(r): [int(c) for c in row.split()] for r, row in given} == dict(enumerate(found.codes().tolist()))


def test_the_word_of_section_6_1() -> None:
    text = section("6.1 packed(b)")
    fields = [int(x) for x in re.findall(r"f\d = (\d+) \(", text)]
    word = re.search(r"word = 0x([0-9a-f]{8}), bytes ((?:[0-9a-f]{2} ?){4})", text)
    assert word
    assert oracle.pack(fields, 3) == [int(word[1], 16)]
    assert int(word[1], 16).to_bytes(4, "little").hex(" ") == word[2].strip()
    for value, bits in re.findall(r"f\d = (\d+) \(([01]+)\)", text):
        assert int(bits, 2) == int(value)


def test_the_hex_vector_of_annex_a() -> None:
    text = section("Annex A. The layout aligned64")
    tile = re.search(r"`tile = ((?:[0-9a-f]{8} ?){4})`", text)
    extra, meta = re.search(r"`tile_extra = ([0-9a-f]{8})`", text), re.search(r"`tile_meta = ([0-9a-f]{4})`", text)
    zeros, scales = re.search(r"z = ([\d, ]+\d), s = ([\d, ]+\d)", text).groups()  # type: ignore[union-attr]
    assert tile
    assert extra
    assert meta
    left = BcqWeight.from_affine(
        np.tile(np.arange(16) % 4, 3)[None],
        np.ones((1, 3), np.float16),
        np.array([[int(z) for z in zeros.split(",")]]),
        group_size=16,
        bits=2,
    ).with_second_order(
        np.array([[int(s) for s in scales.split(",")]]),
        np.ones((1, 3), np.float16),
        np.zeros((1, 3), int),
        bits=4,
        rows=1,
    )
    right = BcqWeight.from_affine(np.arange(16)[None], np.ones((1, 1), np.float16), 0, group_size=16, bits=4)
    parts = BcqWeight.from_segments([left, right]).to_aligned64().parts()
    assert parts["tile"].array().view(np.uint32).reshape(-1).tolist() == [int(w, 16) for w in tile[1].split()]
    assert parts["tile_extra"].array().view(np.uint32).reshape(-1).tolist() == [int(extra[1], 16)]
    assert parts["tile_meta"].array().reshape(-1).tolist() == [int(meta[1], 16)]


def test_the_bfloat16_example_of_section_8() -> None:
    text = section("8. Values")
    double = re.search(
        r"`1 \+ 2\^-8 \+ 2\^-40` \(0x([0-9A-F]{16})\) has the BF16 value 0x([0-9A-F]{4}) = ([\d.]+)", text
    )
    wrong = re.search(r"rounding through binary32 gives 0x([0-9A-F]{4})", text)
    assert double
    assert wrong
    x = 1 + 2.0**-8 + 2.0**-40
    assert oracle.bits64(x) == int(double[1], 16)
    right = dtypes.round_to(np.array([x]), "BF16")
    assert int(right.view(np.uint16)[0]) == int(double[2], 16) == oracle.rounded(x, "BF16")
    assert float(right[0]) == float(double[3])
    assert oracle.rounded(float(np.float32(x)), "BF16") == int(wrong[1], 16)


def test_the_canonical_nans_of_section_8() -> None:
    text = section("8. Values")
    shown = {dtype: int(x, 16) for x, dtype in re.findall(r"0x([0-9A-F]+) \((F16|BF16|F32)\)", text)}
    assert shown == oracle.NAN


def test_names_of_parts_in_section_6() -> None:
    text = section("6. Parts")
    for weight, part in re.findall(r"`([\w.]+)` ha(?:s|s the part)\s+(?:the part\s+)?`([\w.]+)`", text):
        assert scheme.part_prefix(weight) + "s0_planes" == part == oracle.prefix(weight) + "s0_planes"
    assert "model.layers.0.mlp.up_proj.bcq_s0_planes" in text


def test_the_version_is_the_packages() -> None:
    from bcqfmt.checkpoint.descriptor import VERSION

    assert re.search(r"^# The BCQ format, version ([\d.]+)$", TEXT, re.MULTILINE)[1] == VERSION  # type: ignore[index]
