"""Numbers of a weight entry that cannot be: the decoder and the package name the rule that section 5.1 names."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

import bcqfmt
from bad_files.by_hand import described, example_descriptor, example_tensors, frame, place

DECODER = Path(__file__).resolve().parents[2] / "spec" / "decoder.py"
spec = importlib.util.spec_from_file_location("bcq_decoder_for_entries", DECODER)
assert spec is not None
assert spec.loader is not None
decoder: Any = importlib.util.module_from_spec(spec)
spec.loader.exec_module(decoder)


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"shape": []}, "BCQ-V210"),
        ({"shape": [8]}, "BCQ-V210"),
        ({"shape": [0, 8]}, "BCQ-V210"),
        ({"shape": [-2, 8]}, "BCQ-V208"),
        ({"shape": [2, -8]}, "BCQ-V208"),
        ({"widths": []}, "BCQ-V211"),
        ({"widths": [8]}, "BCQ-V211"),
        ({"widths": [-8]}, "BCQ-V208"),
        ({"scheme": -1}, "BCQ-V208"),
        ({"scheme": 1}, "BCQ-V209"),
    ],
    ids=str,
)
def test_the_rule(changes: dict[str, Any], rule: str, tmp_path: Path) -> None:
    descriptor = example_descriptor()
    descriptor["weights"]["w.weight"].update(changes)
    file = place(tmp_path, frame(*described(example_tensors(), descriptor)))
    with pytest.raises(decoder.Refused) as refusal:
        decoder.read_bytes(file.read_bytes())
    assert refusal.value.rule == rule
    findings = bcqfmt.validate(file).errors
    assert findings[0].code == rule


def test_widths_of_two_segments_may_not_be_empty(tmp_path: Path) -> None:
    descriptor = example_descriptor()
    descriptor["schemes"][0]["segments"] *= 2
    descriptor["features"] = ["segments"]
    descriptor["weights"]["w.weight"]["widths"] = []
    file = place(tmp_path, frame(*described(example_tensors(), descriptor)))
    with pytest.raises(decoder.Refused) as refusal:
        decoder.read_bytes(file.read_bytes())
    assert refusal.value.rule == bcqfmt.validate(file).errors[0].code == "BCQ-V211"


def test_a_header_has_no_negative_zero(tmp_path: Path) -> None:
    whole = frame(*described(example_tensors(), example_descriptor()))
    changed = whole.replace(b'"data_offsets":[0,', b'"data_offsets":[-0,', 1)
    length = int.from_bytes(whole[:8], "little")
    assert changed[8 : 8 + length + 1] != whole[8 : 8 + length + 1]
    changed = (length + 1).to_bytes(8, "little") + changed[8:]
    with pytest.raises(decoder.Refused) as refusal:
        decoder.read_bytes(changed)
    file = place(tmp_path, changed)
    assert refusal.value.rule == bcqfmt.validate(file).errors[0].code == "BCQ-V106"
