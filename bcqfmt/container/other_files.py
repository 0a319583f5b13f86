"""Files of other kinds, known by their first bytes: what a download or a wrong name leads to."""

from __future__ import annotations

from bcqfmt.errors import escape

_MAGIC = (
    (b"PK\x03\x04", "a ZIP archive (a pickled torch file or an npz)"),
    (b"PK\x05\x06", "an empty ZIP archive"),
    (b"\x1f\x8b", "gzip-compressed"),
    (b"\x80\x02", "a Python pickle"),
    (b"\x80\x03", "a Python pickle"),
    (b"\x80\x04", "a Python pickle"),
    (b"\x80\x05", "a Python pickle"),
    (b"GGUF", "a GGUF file"),
    (b"\x93NUMPY", "a numpy array file"),
    (b"\x89HDF", "an HDF5 file"),
    (b"BZh", "bzip2-compressed"),
    (b"\xfd7zXZ", "xz-compressed"),
    (b"\x28\xb5\x2f\xfd", "zstd-compressed"),
)


def other_kind(head: bytes, expected: str) -> tuple[str, str, str] | None:
    """(code, found, expected) when the first bytes are known to be those of another kind of file, else None."""
    if head.startswith(b"version https://git-lfs"):
        return "BCQ-E201", "a few lines of text that stand for the file", expected
    for magic, what in _MAGIC:
        if head.startswith(magic):
            return "BCQ-E203", what, expected
    text = head.lstrip()
    if text.startswith((b"<", b'{"error', b"{'error", b"Not Found", b"Access denied", b"Entry not found", b"Invalid")):
        return "BCQ-E202", f"text that begins with {escape(head.decode('latin-1'), 60)}", expected
    return None
