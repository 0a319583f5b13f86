"""The pages that show commands tell the truth: they are run, and every output is compared."""

import contextlib
import io
import re
from pathlib import Path

import numpy as np
import pytest

import bcqfmt
from pages.console_blocks import FENCE, matches, play, steps
from programs.verbs import ROOT
from sources.conversions import convert

# page: at least so many steps
PAGES = {
    "README.md": 5,
    "docs/tutorial.md": 20,
    "docs/howto.md": 20,
    "docs/troubleshooting.md": 20,
    "docs/porting.md": 3,
    "docs/architecture.md": 2,
}


@pytest.mark.parametrize("name", PAGES)
def test_page(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert play(ROOT / name, tmp_path, monkeypatch) >= PAGES[name]


def test_python_of_the_readme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    names: dict[str, object] = {}
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        for block in blocks:
            exec(compile(block, "README.md", "exec"), names)
    assert len(blocks) == 1
    assert said.getvalue() == "(256, 512) 4.1875\n"
    assert np.asarray(names["coarse"]).shape == (256, 512)


def test_the_diagram_is_true(tmp_path: Path) -> None:
    """Codes, bits and numbers in the picture are those of row 4 of a weight of the demo."""
    convert(ROOT / "bcqfmt" / "data" / "demo", tmp_path / "bcq")
    with bcqfmt.open(tmp_path / "bcq") as checkpoint:
        weight = checkpoint.weight("model.layers.0.self_attn.k_proj.weight")
        codes = weight.codes()[4, :8].tolist()
        values = weight.dequantize()[4, :8].tolist()
        zero = int(weight.parts()["s0_zero"].array().view(np.uint32)[4, 0]) & 15
        scale = float(weight.parts()["s0_scale"].array()[4, 0])
        bits = [
            (plane[4, 0].view(np.uint32) >> np.arange(8, dtype=np.uint32) & 1).tolist() for plane in weight.planes()[0]
        ]
    picture = (ROOT / "docs" / "format.svg").read_text(encoding="utf-8")
    assert [int(text) for text in re.findall(r'class="mid mono code"[^>]*>(\d+)<', picture)] == codes
    for plane in range(4):
        assert [int(b) for b in re.findall(rf'plane{plane}" [^>]*>([01])<', picture)] == bits[plane]
    assert re.findall(r'class="mid soft" [^>]*>(-?[\d.]+)<', picture) == [f"{value:.2f}" for value in values]
    assert f">{scale:.5f}<" in picture
    assert f'zero">{zero}<' in picture
    assert "prefers-color-scheme:dark" in picture


# ------------------------------------------------------------------------------------------ the machinery can fail
@pytest.mark.parametrize(
    ("expected", "printed", "same"),
    [
        ("a\nb", "a\nb\n", True),
        ("a\nb", "a\nc\n", False),
        ("a", "a\nb\n", False),
        ("a\n...", "a\nb\nc\n", True),
        ("a\n...", "a\n", True),
        ("...\nc", "a\nb\nd\n", False),
        ("a ... c", "a b c", True),
        ("a ... c", "a b\nc", False),
        ("a.c", "abc", False),
        ("", "surprise\n", False),
    ],
)
def test_outputs_are_compared(expected: str, printed: str, same: bool) -> None:
    assert matches(expected, printed) is same


@pytest.mark.parametrize(
    "block",
    [
        "```console\n$ bcqfmt --version\nbcqfmt 99\n```\n",
        "```console\n$ bcqfmt inspect nowhere\n...\n```\n",  # an exit code that is not stated
        "```console\n$ echo b | cat\na\n```\n",
        "```pycon\n>>> 1 + 1\n3\n```\n",
    ],
)
def test_a_page_that_lies_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: str) -> None:
    page = tmp_path / "page.md"
    page.write_text(block)
    (tmp_path / "scratch").mkdir()
    with pytest.raises(AssertionError, match="page"):
        play(page, tmp_path / "scratch", monkeypatch)


def test_no_block_is_forgotten() -> None:
    """Every console block in these pages is one that is run; blocks with options would slip through."""
    for name in PAGES:
        text = (ROOT / name).read_text(encoding="utf-8")
        opened = re.findall(r"^```.*console.*$|^```.*pycon.*$", text, re.MULTILINE)
        assert len(FENCE.findall(text)) == len(opened)
        assert steps(ROOT / name)
