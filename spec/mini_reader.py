"""A BCQ reader for learning: affine and bcq weights of one file, standard Python, at most 120 lines.

    python mini_reader.py FILE [PLANES]        prints every weight with its first values

It follows bcq-1.0.md from the bytes of the file (section 3) to the values (section 8), with segments, `perm`, outliers
and fewer planes (8.1). It does not know float-zero, offset, second-order scales, stacks and the layout aligned64, and
refuses a file that uses them; nor folders, shards and manifests. It judges no rule of the format: a file that breaks
one gives wrong values or an error, though nothing outside the file is ever read. decoder.py is the strict reader.
"""

import json
import math
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

KNOWN = {"bcq", "multi-precision", "nonfinite", "outliers", "perm", "segments"}  # features, section 5.4
LETTERS = {"F16": "e", "F32": "f", "BF16": "H", "I32": "I", "U16": "H"}  # for struct; I32 holds words and indices
# Digits of the significand, exponent of the smallest positive number, bits of infinity and of the NaN, bytes.
FORMATS = {"F16": (11, -24, 0x7C00, 0x7E00, 2), "BF16": (8, -133, 0x7F80, 0x7FC0, 2)}
FORMATS["F32"] = (24, -149, 0x7F800000, 0x7FC00000, 4)


class MiniReader:
    """One BCQ file. `weights` maps the name of each weight to its entry: shape, dtype, scheme, widths."""

    def __init__(self, path: str) -> None:
        """Sections 3 and 5: eight bytes with the header's length, the header, the data."""
        whole = Path(path).read_bytes()
        start = 8 + int.from_bytes(whole[:8], "little")
        self.header, self.data = json.loads(whole[8:start]), whole[start:]
        descriptor = json.loads(self.header.pop("__metadata__")["bcqfmt"])
        unknown = set(descriptor["features"]) - KNOWN
        if not descriptor["version"].startswith("1.") or unknown:
            raise ValueError(f"version {descriptor['version']} with {sorted(unknown)}: more than this reader knows")
        self.schemes, self.weights = descriptor["schemes"], descriptor["weights"]

    def part(self, weight: str, part: str) -> list[Any]:
        """Section 6: all numbers of a part in order, floating-point ones as binary64, others as unsigned integers."""
        stem = weight.removesuffix(".weight")
        entry = self.header[(stem + ".bcq_" if stem and stem != weight else weight + "_bcq_") + part]
        begin, end = entry["data_offsets"]
        if not 0 <= begin <= end <= len(self.data):
            raise ValueError(f"{weight}: {part} lies outside the file")
        numbers = struct.unpack(f"<{math.prod(entry['shape'])}{LETTERS[entry['dtype']]}", self.data[begin:end])
        if entry["dtype"] == "BF16":  # the upper half of an F32
            numbers = struct.unpack(f"<{len(numbers)}f", struct.pack(f"<{len(numbers)}I", *(n << 16 for n in numbers)))
        return list(numbers)

    def decode(self, weight: str, planes: int = 8) -> bytes:
        """Section 8: the values in the weight's dtype, row after row; with fewer `planes` section 8.1."""
        entry = self.weights[weight]
        scheme, (out, columns) = self.schemes[entry["scheme"]], entry["shape"]
        values = [0.0] * (out * columns)
        perm = self.part(weight, "perm") if "perm" in scheme else range(columns)
        start = 0  # the first stored column of the segment
        for k, (segment, n) in enumerate(zip(scheme["segments"], entry.get("widths", [columns]), strict=True)):
            for i, value in enumerate(self.elements(weight, f"s{k}_", segment, out, n, planes)):
                values[i // n * columns + perm[start + i % n]] = value  # stored column j holds column perm[j]
            start += n
        if "outliers" in scheme:  # section 6.4: row r has the entries indptr[r] to indptr[r + 1] - 1
            indptr, indices, spikes = (self.part(weight, f"outlier_{x}") for x in ("indptr", "indices", "values"))
            for r in range(out):
                for i in range(indptr[r], indptr[r + 1]):
                    at = r * columns + indices[i]
                    values[at] = values[at] + spikes[i] if scheme["outliers"]["mode"] == "add" else spikes[i]
        return b"".join(rounded(x, entry["dtype"]) for x in values)

    def elements(self, weight: str, own: str, segment: Any, out: int, n: int, planes: int) -> Iterator[float]:
        """Sections 6.1 to 6.3 and 8: E of every element of a segment, before outliers and rounding."""
        q, encoding, g = segment["bits"], segment["encoding"], segment["group_size"]
        g = n if g == "row" else g
        p, groups, row_words = min(q, planes), -(-n // g), -(-n // 32)
        words = self.part(weight, own + "planes")  # [q, out, row_words]: column j is bit j % 32 of word j // 32
        if encoding == "bcq":  # alpha is [p or q, out, groups], bias [out, groups]
            own_set = f"_p{p}" if p in segment.get("precisions", []) else ""
            alpha = self.part(weight, own + "alpha" + own_set)
            bias = self.part(weight, own + "bias" + own_set) if "bias" in segment else [0.0] * (out * groups)
        else:  # scale and zero are [out, groups]; fewer planes of an affine weight are a bcq weight (8.1)
            scale, zero = self.part(weight, own + "scale"), [segment["zero"]] * (out * groups)
            if isinstance(segment["zero"], dict):
                zero = unpacked(self.part(weight, own + "zero"), groups, segment["zero"]["bits"])
            alpha = [s * 2.0 ** (q - 2 - i) for i in range(p) for s in scale]
            bias = [s * ((2**q - 1 - 2 * zp) * 0.5) for s, zp in zip(scale, zero, strict=True)]
        for r, j in (divmod(i, n) for i in range(out * n)):
            at = r * groups + j // g  # the element's group
            bits = [words[(i * out + r) * row_words + j // 32] >> j % 32 & 1 for i in range(p)]
            if encoding == "affine" and p == q:  # plane 0 has the most significant bits of the code
                yield scale[at] * (sum(bit << (q - 1 - i) for i, bit in enumerate(bits)) - zero[at])
            else:
                value = bias[at]
                for i, bit in enumerate(bits):  # the order counts
                    value = value + alpha[i * out * groups + at] if bit else value - alpha[i * out * groups + at]
                yield value


def unpacked(words: list[int], count: int, b: int) -> list[int]:
    """Section 6.1: `count` fields of b bits a row, each row from a new word on."""
    row_words = -(-count * b // 32)
    rows = [words[first : first + row_words] for first in range(0, len(words), row_words)]
    streams = [sum(word << 32 * i for i, word in enumerate(row)) for row in rows]  # the words as one long integer
    return [stream >> b * j & (2**b - 1) for stream in streams for j in range(count)]


def rounded(x: float, dtype: str) -> bytes:
    """Section 8, RN: one rounding from binary64, to nearest, ties to even (as Python's round)."""
    digits, lowest, bits, nan, size = FORMATS[dtype]
    if math.isfinite(x):
        unit = max(math.frexp(x)[1] - digits, lowest) if x else lowest  # the exponent of the last digit that is kept
        bits = min(((unit - lowest) << (digits - 1)) + round(math.ldexp(abs(x), -unit)), bits)
    bits |= (math.copysign(1.0, x) < 0) << (8 * size - 1)
    return (nan if math.isnan(x) else bits).to_bytes(size, "little")


if __name__ == "__main__":
    reader = MiniReader(sys.argv[1] if sys.argv[1:] else sys.exit("usage: mini_reader.py FILE [PLANES]"))
    for name in reader.weights:
        print(name, reader.weights[name], reader.decode(name, int((sys.argv[2:] or ["8"])[0]))[:16].hex())
