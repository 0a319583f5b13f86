"""Reports in headless Chromium, light and dark, wide and narrow. `make report-page` and `make soak` run this."""

from __future__ import annotations

import zlib
from pathlib import Path

import numpy as np
import pytest

import bcqfmt
from bcqfmt.converters.report import make_report
from bcqfmt.converters.report.html import report_html
from bcqfmt.converters.report.measure import measure
from bcqfmt.converters.source.checkpoint import open_source
from pages.browser import Picture, chromium, decode, picture
from programs.verbs import tensors
from sources.conversions import convert
from sources.peers import PEERS

pytestmark = pytest.mark.soak
in_chromium = pytest.mark.skipif(chromium() is None, reason="needs Chromium: apt install chromium")
PAPER = {False: (255, 255, 255), True: (0x0D, 0x11, 0x17)}
BARS = {False: (0x00, 0x72, 0xB2), True: (0x56, 0xB4, 0xE9)}  # the first colour of the plots
WIDTHS = (1280, 420)
HEIGHT = 1600
HOSTILE = "</code><style>body{background:red}</style><script>document.body.innerHTML=''</script>"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report on a conversion, measured against the dense model."""
    folder = tmp_path_factory.mktemp("page")
    convert(PEERS / "gptqmodel-gptq-4b-g32-asym" / "source", folder / "bcq")
    with bcqfmt.open(folder / "bcq") as checkpoint:
        errors = measure(checkpoint, open_source(PEERS / "dense-fp16" / "source"))
        (folder / "page.html").write_bytes(report_html(make_report(checkpoint, errors, "dense-fp16")))
    return folder / "page.html"


def share(seen: Picture, colour: tuple[int, int, int]) -> float:
    return float((seen == np.array(colour, np.uint8)).all(axis=2).mean())


def assert_margins(seen: Picture, paper: tuple[int, int, int]) -> None:
    """Nothing runs out of the page on either side: long names are broken, tables scroll in their boxes."""
    for edge in (seen[:, :8], seen[:, -8:]):
        assert share(edge, paper) == 1.0


@in_chromium
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_report_of_a_conversion(page: Path, tmp_path: Path, width: int, dark: bool) -> None:
    seen = picture(page, tmp_path, width, HEIGHT, dark)
    assert seen.shape == (HEIGHT, width, 3)
    assert_margins(seen, PAPER[dark])
    assert 0.5 < share(seen, PAPER[dark]) < 0.98  # a page with something on it
    assert share(seen, BARS[dark]) > 0.005  # plots are drawn, in the colours of the scheme
    ink = (seen.astype(np.int32).mean(axis=2) < 100) if not dark else (seen.astype(np.int32).mean(axis=2) > 150)
    written = ink.any(axis=1)
    assert written[: HEIGHT // 4].mean() > 0.2  # text, from the top on
    gaps = np.diff(np.flatnonzero(written))
    assert gaps.max() < 120  # no holes where a plot keeps its height but not its width


@in_chromium
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_names_change_nothing(tmp_path: Path, dark: bool) -> None:
    arrays = {HOSTILE: np.zeros(8, np.float16), "x" * 200: np.zeros(8, np.float16), **tensors()}
    bcqfmt.save(tmp_path / "m", arrays)
    with bcqfmt.open(tmp_path / "m") as checkpoint:
        made = make_report(checkpoint)
    made.name = HOSTILE
    (tmp_path / "page.html").write_bytes(report_html(made))
    for width in WIDTHS:
        seen = picture(tmp_path / "page.html", tmp_path, width, HEIGHT, dark)
        assert_margins(seen, PAPER[dark])
        assert share(seen, (255, 0, 0)) == 0.0
        assert share(seen, PAPER[dark]) < 0.99


def test_pictures_are_decoded() -> None:
    """Every filter of PNG on known pixels: what the other tests see is what was drawn."""
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 256, (5, 7, 3), dtype=np.uint8)
    above = np.vstack([np.zeros((1, 7, 3), np.int32), pixels[:-1].astype(np.int32)])
    left = np.concatenate([np.zeros((5, 1, 3), np.int32), pixels[:, :-1].astype(np.int32)], axis=1)
    corner = np.vstack([np.zeros((1, 7, 3), np.int32), left[:-1]])
    paeth = np.empty_like(left)
    for place in np.ndindex(left.shape):
        a, b, c = left[place], above[place], corner[place]
        paeth[place] = min((abs(b - c), 0, a), (abs(a - c), 1, b), (abs(a + b - 2 * c), 2, c))[2]
    guesses = [np.zeros_like(left), left, above, (left + above) // 2, paeth]
    lines = b"".join(
        bytes([kind]) + (pixels[kind] - guesses[kind][kind].astype(np.uint8)).tobytes() for kind in range(5)
    )
    header = b"\0\0\0\x07\0\0\0\x05\x08\x02\0\0\0"

    def chunk(name: bytes, body: bytes) -> bytes:
        return len(body).to_bytes(4, "big") + name + body + zlib.crc32(name + body).to_bytes(4, "big")

    data = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(lines)) + chunk(b"IEND", b"")
    assert np.array_equal(decode(data), pixels)
