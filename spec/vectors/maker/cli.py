"""Command line of the generator."""

import argparse
import gzip
import json
import shutil
from pathlib import Path

from . import example, invalid, valid
from .catalogue import Invalid, Valid
from .index import index, load_decoder, path_of

HERE = Path(__file__).resolve().parent.parent
GROUPS = ("valid", "invalid")


def tree(right: list[Valid], wrong: list[Invalid]) -> dict[str, bytes]:
    """Path -> bytes of all vectors, not compressed."""
    files: dict[str, bytes] = {}
    for group, vectors in (("valid", right), ("invalid", wrong)):
        for vector in vectors:
            base = path_of(group, vector.id, vector.content, isinstance(vector, Invalid) and vector.gzip)
            content = vector.content if isinstance(vector.content, dict) else {"": vector.content}
            files.update({f"{base}/{p}" if p else base: data for p, data in content.items()})
    return files


def generate() -> dict[str, bytes]:
    """Path -> bytes of the vectors and the index."""
    right, wrong = valid.vectors(), invalid.vectors()
    decoder = load_decoder(HERE.parent / "decoder.py")
    text = json.dumps(index(right, wrong, decoder), indent=1, sort_keys=True, ensure_ascii=True)
    return {**tree(right, wrong), "index.json": (text + "\n").encode("ascii")}


def present(folder: Path) -> dict[str, Path]:
    """The files that lie there."""
    found = {p.relative_to(folder).as_posix(): p for g in GROUPS for p in (folder / g).rglob("*") if not p.is_dir()}
    if (folder / "index.json").exists():
        found["index.json"] = folder / "index.json"
    return found


def plain_bytes(path: Path) -> bytes:
    """The content; of a compressed vector what it expands to, because zlib builds differ."""
    data = path.read_bytes()
    return gzip.decompress(gzip.decompress(data)) if path.suffix == ".gz" else data


def differences(files: dict[str, bytes], folder: Path) -> list[str]:
    """What is missing, extra or different in a folder."""
    found = present(folder)
    result = [f"missing: {p}" for p in files if p not in found]
    result += [f"extra: {p}" for p in found if p not in files]
    result += [f"different: {p}" for p in files if p in found and plain_bytes(found[p]) != files[p]]
    return sorted(result)


def write(files: dict[str, bytes], folder: Path) -> None:
    """Rewrites the vectors; a compressed one that expands to the right bytes stays as it is."""
    kept = {
        p: f.read_bytes() for p, f in present(folder).items() if p.endswith(".gz") and plain_bytes(f) == files.get(p)
    }
    for group in GROUPS:
        shutil.rmtree(folder / group, ignore_errors=True)
    for path, data in files.items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.endswith(".gz"):
            data = kept.get(path) or gzip.compress(gzip.compress(data, 9, mtime=0), 9, mtime=0)
        target.write_bytes(data)


def main(arguments: list[str] | None = None) -> int:
    """Writes or checks the vectors, or prints the example of section 14."""
    parser = argparse.ArgumentParser(description="Makes the test vectors of the BCQ format.")
    parser.add_argument("--out", type=Path, default=HERE, help="folder to write to or to check (default: here)")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--check", action="store_true", help="compare with the files there; exit 1 and name differences")
    mode.add_argument("--example", action="store_true", help="print the annotated dump of section 14")
    mode.add_argument("--write-example", action="store_true", help="put that dump into the specification")
    options = parser.parse_args(arguments)
    spec = HERE.parent / "bcq-1.0.md"
    if options.example:
        print(example.dump(), end="")
    elif options.write_example:
        example.write(spec)
    elif options.check:
        found = differences(generate(), options.out)
        if not example.is_current(spec):
            found.append("different: the example in section 14 of bcq-1.0.md (make.py --write-example)")
        print("\n".join(found) or "vectors: as generated")
        return 1 if found else 0
    else:
        files = generate()
        write(files, options.out)
        print(f"vectors: {len(files)} files written to {options.out}")
    return 0
