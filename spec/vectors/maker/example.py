"""The annotated hex dump of section 14."""

import json
from pathlib import Path

from .valid.affine import worked

BEGIN, END = "<!-- example:begin -->", "<!-- example:end -->"


def dump() -> str:
    """Offset, bytes, meaning; at most 16 bytes a line."""
    content = worked().content
    assert isinstance(content, bytes)
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    lines = [row(0, content[:8], f"L = {length}: the header ends at byte {8 + length}")]
    for at in range(8, 8 + length, 16):
        chunk = content[at : min(at + 16, 8 + length)]
        lines.append(row(at, chunk, chunk.decode("ascii")))
    meanings = {
        "w.bcq_s0_planes": ["plane 0, row 0", "plane 0, row 1", "plane 1, row 0", "plane 1, row 1"],
        "w.bcq_s0_scale": ["row 0: 0.5", "row 1: -1"],
    }
    names = [name for name in header if name in meanings]
    for name in sorted(names, key=lambda n: int(header[n]["data_offsets"][0])):
        begin, end = header[name]["data_offsets"]
        size = (end - begin) // len(meanings[name])
        for i, meaning in enumerate(meanings[name]):
            at = 8 + length + begin + i * size
            lines.append(row(at, content[at : at + size], f"{name}, {meaning}"))
    return "```text\noffset  bytes                                            meaning\n" + "".join(lines) + "```\n"


def row(offset: int, data: bytes, meaning: str) -> str:
    """One line of the dump."""
    return f"{offset:6d}  {data.hex(' '):<47}  {meaning}".rstrip() + "\n"


def region(text: str) -> tuple[int, int]:
    """Where the dump stands in the specification."""
    return text.index(BEGIN) + len(BEGIN) + 1, text.index(END)


def is_current(spec: Path) -> bool:
    """The specification shows this dump."""
    text = spec.read_text("utf-8")
    start, end = region(text)
    return text[start:end] == dump()


def write(spec: Path) -> None:
    """Puts the dump into the specification."""
    text = spec.read_text("utf-8")
    start, end = region(text)
    spec.write_text(text[:start] + dump() + text[end:], "utf-8")
