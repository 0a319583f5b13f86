"""Pages as a browser shows them: headless Chromium, and its pictures as arrays."""

from __future__ import annotations

import shutil
import struct
import subprocess
import zlib
from pathlib import Path

import numba
import numpy as np
import numpy.typing as npt

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
Picture = npt.NDArray[np.uint8]


def chromium() -> str | None:
    """The program, if there is one."""
    return next(filter(None, map(shutil.which, NAMES)), None)


def picture(page: Path, scratch: Path, width: int, height: int, dark: bool) -> Picture:
    """``page`` as RGB (height, width, 3)."""
    program = chromium()
    assert program is not None
    out = scratch / "picture.png"
    scheme = 0 if dark else 1  # of prefers-color-scheme
    command = [
        program, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
        f"--user-data-dir={scratch / 'user'}", f"--blink-settings=preferredColorScheme={scheme}",
        f"--window-size={width},{height}", f"--screenshot={out}", page.as_uri(),
    ]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    return decode(out.read_bytes())


def decode(data: bytes) -> Picture:
    """A PNG of eight bits a channel, RGB or RGBA, not interlaced, as RGB."""
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    at, packed, width, height, kind = 8, b"", 0, 0, 0
    while at < len(data):
        size, name = struct.unpack(">I4s", data[at : at + 8])
        body = data[at + 8 : at + 8 + size]
        if name == b"IHDR":
            width, height, depth, kind, _, _, interlaced = struct.unpack(">IIBBBBB", body)
            assert depth == 8
            assert kind in (2, 6)
            assert not interlaced
        elif name == b"IDAT":
            packed += body
        at += size + 12
    channels = 3 if kind == 2 else 4
    raw = np.array(np.frombuffer(zlib.decompress(packed), np.uint8)).reshape(height, 1 + width * channels)
    rows = np.empty((height, width * channels), np.uint8)
    _unfilter(raw, channels, rows)
    return np.ascontiguousarray(rows.reshape(height, width, channels)[:, :, :3])


@numba.njit("void(uint8[:, ::1], int64, uint8[:, ::1])")
def _unfilter(raw, step, out):  # type: ignore[no-untyped-def]
    """Rows of PNG, each behind the number of its filter, to plain bytes; ``step`` bytes are a pixel."""
    for y in range(out.shape[0]):
        kind = raw[y, 0]
        for x in range(out.shape[1]):
            left = np.int64(out[y, x - step]) if x >= step else 0
            up = np.int64(out[y - 1, x]) if y else 0
            corner = np.int64(out[y - 1, x - step]) if y and x >= step else 0
            guess = 0
            if kind == 1:
                guess = left
            elif kind == 2:
                guess = up
            elif kind == 3:
                guess = (left + up) // 2
            elif kind == 4:
                a, b, c = abs(up - corner), abs(left - corner), abs(left + up - 2 * corner)
                guess = left if a <= b and a <= c else up if b <= c else corner
            out[y, x] = (np.int64(raw[y, x + 1]) + guess) & 255
