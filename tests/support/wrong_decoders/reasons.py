"""Why no vector tells some wrong decoders from the right one: they are the same decoder, or are left out on purpose."""

from __future__ import annotations

import re

EQUIVALENT = "equivalent: "  # no file and no number exists on which the two differ
LEFT = "not asked: "  # a file exists, and why it is no vector

_ORDER = "the order of the steps changes no result"
_OVERWRITTEN = "every element is overwritten"
_UNSIGNED = "the number is never negative"
_EXACT = "the operation is exact in binary32 too"
_SHAPE = "the shape of a part that was already checked or made is not looked at again"
_DIVIDES = "the division has no remainder"
_LARGE = "a file of 100 MB"
_TWO_BYTES = "the header {} breaks BCQ-V117 and BCQ-V201 as well, and a vector breaks one rule"
_DIRECTORY = "how a caller names a file is no property of a file"

# what stands for a mutant (a star for any text) -> the reason
REASONS: dict[str, str] = {
    # JSON
    "canonical: False -> True": EQUIVALENT + "no NaN gets there: parsing refuses it before",
    "json_depth: for match in *without the last": EQUIVALENT + "the last bracket closes",
    "parse_json: kind in *without part 2": EQUIVALENT + "a number there has no meaning, as integer or not",
    'parse_json: text.lstrip("-") -> as it is': EQUIVALENT + "a number there has no meaning, as integer or not",
    "parse_json: parse_integer(text) if *always the first": EQUIVALENT + "int() refuses what is no integer",
    "parse_json: value is None or limited or *without part 1": EQUIVALENT + "what is no integer is beyond the limit",
    # container
    "read_container: 2 <= length <= 25_000_000 -> < at 1": EQUIVALENT
    + "the header {} breaks BCQ-V201 and BCQ-V117 too",
    "read_container: 2 -> 3": LEFT + _TWO_BYTES,
    "read_container: 8 + length -> - (#3)": EQUIVALENT + "the same modulo 8",
    "check_alignment: start % 8 == 0 -> <=": EQUIVALENT + _UNSIGNED,
    'check_alignment: BITS[entry["dtype"]] // 8 -> rounded up': EQUIVALENT + "types below 8 bits count as 1",
    'check_alignment: entry["data_offsets"][0] % size == 0 -> <=': EQUIVALENT + _UNSIGNED,
    "check_alignment: 0 -> * (#2)": EQUIVALENT + "begin and end differ by a multiple of the element's size",
    "check_tensor_entry: bits % 8 == 0 -> <=": EQUIVALENT + _UNSIGNED,
    "check_tensor_entry: bits // 8 -> rounded up": EQUIVALENT + "a remainder is refused in the same line",
    "check_offsets: begin == position -> <=": EQUIVALENT + "the line before refuses a smaller begin",
    # descriptor
    "check_use: len(set(map(canonical, schemes))) == len(schemes) -> >=": EQUIVALENT + "a set is never larger",
    'check_weight: ("widths" in entry) == (len(segments) >= 2) -> <=': (
        EQUIVALENT + "without widths there is one width, which the next rule refuses under the same id"
    ),
    "check_weight: n % g == 0 -> <=": EQUIVALENT + _UNSIGNED,
    "check_weight: k == len(segments) - 1 -> >=": EQUIVALENT + "k is at most that",
    "check_segment: 1 -> 2 (#6)": EQUIVALENT + "-2 stands for an absent exponent as well as -1",
    "check_number: 2 -> 3": EQUIVALENT + "3 stands for absent groups as well as 2",
    "fits_aligned64: len(segments) != 2 or * -> without part 1": EQUIVALENT + "the widths of two are compared next",
    "fits_aligned64: len(segments) != 2 or * -> without part 2": EQUIVALENT
    + "groups of 16 that fill 3/4 of the columns (BCQ-V212) imply it",
    "fits_aligned64: columns // 4 -> rounded up*": EQUIVALENT + _DIVIDES,
    'prefix: name.endswith(".weight") and name != ".weight" -> without part 2': EQUIVALENT + "BCQ-V213 refuses .weight",
    "expected_parts: columns // 64 -> rounded up": EQUIVALENT + _DIVIDES,
    "collect_weights: len(indices) == 1 -> >=": EQUIVALENT + "another rank breaks BCQ-V304 anyway",
    'collect_weights: ("", (), b"") -> *': EQUIVALENT + "it stands for a part that is missing",
    "segment_parts: k == 0 -> <=*": EQUIVALENT + _UNSIGNED,
    "collect_weights: 0 -> -1": EQUIVALENT + "the shape has one dimension",
    "collect_weights: 0 -> * (#2)": EQUIVALENT + "the part is missing or of another rank and is refused anyway",
    "collect_weights: name not in tensors and not owned & full -> without part 2": (
        EQUIVALENT + "no part name holds .bcq_ or _bcq_, so that two weights never share a part"
    ),
    # parts
    "pack: len(fields) // count -> rounded up": EQUIVALENT + _DIVIDES,
    "pack: for i, field in enumerate(fields) -> backwards": EQUIVALENT + _ORDER,
    "to_canonical: columns // 64 -> rounded up": EQUIVALENT + _DIVIDES,
    "to_canonical: groups * 4 -> +": EQUIVALENT + _SHAPE,
    "to_canonical: 4 -> * (#5)": EQUIVALENT + _SHAPE,
    "to_canonical: 32 -> *": EQUIVALENT + _SHAPE,
    "to_canonical: 1 -> *": EQUIVALENT + _SHAPE,
    "to_canonical: groups * b -> +": EQUIVALENT + _SHAPE,
    "to_canonical: 0 -> *": EQUIVALENT + "any zero point: they are all equal, or it is overwritten",
    'to_canonical: for key, value in weight["scheme"].items() -> *': EQUIVALENT
    + "keys have no order, and the first is layout, which is left out",
    "planes_part: 32 -> *": EQUIVALENT + _SHAPE,
    "padding_is_zero: used % 32 == 0 -> <=": EQUIVALENT + _UNSIGNED,
    "padding_is_zero: word >> used % 32 == 0 -> <=": EQUIVALENT + _UNSIGNED,
    "check_outliers: indptr[0] == 0 -> <=": EQUIVALENT + _UNSIGNED,
    "check_outliers: for a, b in pairwise(indptr) -> without the first": EQUIVALENT + "nothing is below the first, 0",
    "check_outliers: set(*) -> as it is": EQUIVALENT + "a list holds the same numbers",
    "check_outliers: first // out -> rounded up": EQUIVALENT + _DIVIDES,
    # values
    "column_segments: 0 -> *": EQUIVALENT + _OVERWRITTEN,
    "column_segments: for stored, column in *without the first": EQUIVALENT
    + "stored column 0 is in segment 0, the default",
    "rounded: 0 -> -1": EQUIVALENT + "there is one number",
    "round_once: rounding: subnormal binary64 is 0": EQUIVALENT + "it is far below half of the smallest F32",
    "round_once: 52 -> 53 (#2)": EQUIVALENT + "the bit is set in the next step",
    "round_once: if field == 0x7FF* -> never": EQUIVALENT + "an infinity overflows in the last line",
    "round_once: field == 0x7FF -> >=": EQUIVALENT + "the field has eleven bits",
    "round_once: 0x7FF -> * (#2)": EQUIVALENT + "such numbers overflow in the last line",
    "round_once: max(field, 1) -> argument 1": EQUIVALENT + "subnormal binary64 numbers are zero in every type",
    "round_once: 1 -> * (#7)": EQUIVALENT + "subnormal binary64 numbers are zero in every type",
    "round_once: if number == 0* -> never": EQUIVALENT + "zero comes out of the last line too",
    "round_once: number == 0 -> <=": EQUIVALENT + _UNSIGNED,
    "round_once: 0 -> *": EQUIVALENT + "zero comes out of the last line too",
    "round_once: lost == half -> >=": EQUIVALENT + "more than half is rounded up before",
    "decode: if planes is not None and planes < 1:*": EQUIVALENT + "the format knows no value of less than one plane",
    "decode: 1 -> 0": EQUIVALENT + "the format knows no value of less than one plane",
    "decode: raise ValueError(*": EQUIVALENT + "the format knows no value of less than one plane",
    "decode: for name, *backwards": EQUIVALENT + _ORDER,
    "decode: len(data) // shape[0] -> rounded up": EQUIVALENT + _DIVIDES,
    "decode_matrix: 0.0 -> *": EQUIVALENT + _OVERWRITTEN,
    "decode_matrix: for *backwards": EQUIVALENT + _ORDER,
    "matrix_outliers: BITS[dtype] // 8 -> rounded up": EQUIVALENT + _DIVIDES,
    "matrix_outliers: 8 -> 7": EQUIVALENT + "16 // 7 and 32 // 7 are 2 and 4 as well",
    "matrix_outliers: for *backwards": EQUIVALENT + _ORDER,
    "byte_float: * -> in binary32": EQUIVALENT + _EXACT,
    "byte_float: e == 0 -> <=": EQUIVALENT + _UNSIGNED,
    "numbers: 0.0 -> -0.0": EQUIVALENT + "no code is -0, and any other minus -0 is itself",
    "decode_segment: for at, a in enumerate(group_of) -> backwards": EQUIVALENT + _ORDER,
    "decode_segment: for i in range(q) -> backwards": EQUIVALENT + "a sum of integers",
    "decode_segment: float(code) - zp[a] -> in binary32": EQUIVALENT + _EXACT,
    "decode_segment: table: product before the step": EQUIVALENT + "a power of two, far from the ends of binary64",
    "decode_segment: table: scale times step first": EQUIVALENT + "a power of two, far from the ends of binary64",
    'plane_scales: floats(parts["alpha" + own])* -> upper end + 1': EQUIVALENT + "the one more is not used",
    "plane_scales: q - 2* -> in binary32": EQUIVALENT + _EXACT,
    "plane_scales: *2**q - 1* -> in binary32": EQUIVALENT + _EXACT,
    "plane_scales: 2.0 * zero -> in binary32": EQUIVALENT + _EXACT,
    # folder
    "read_bytes: set(tensors) -> as it is": EQUIVALENT + "names of one file are there once",
    "read_file: is_missing(Path(path)) or *without part 1": LEFT + _DIRECTORY,
    "list_files: not path.is_symlink() or *without part 1": EQUIVALENT + "what is no link stays inside",
    "read_shards: sorted(set(index.values())) -> as it is": EQUIVALENT + _ORDER,
    "read_shards: set(index.values()) -> as it is": EQUIVALENT + "a file that is named again is read again",
    "read_shards: listed == set(index) -> <=": EQUIVALENT + "each tensor of the index is looked up in its file as well",
    "read_shards: len(listed) == tensors -> >=": EQUIVALENT + "a set is never larger",
    "read_shards: len(set(weights)) == len(weights) -> >=": EQUIVALENT + "a set is never larger",
    'check_manifest: need(manifest["features"] == features*': EQUIVALENT + "features follow from schemes and shapes",
    'check_manifest: manifest["features"] == features -> *': EQUIVALENT + "features follow from schemes and shapes",
    "check_manifest: sorted(map(canonical, *": EQUIVALENT + "the scheme of each weight is compared, and each is in use",
    'check_manifest: need(good, "BCQ-V608", "schemes are*': (
        EQUIVALENT + "the scheme of each weight is compared, and each is in use"
    ),
    "read_source: len(set(map(canonical, rules))) == len(rules) -> >=": EQUIVALENT + "a set is never larger",
    "archived_names: need(path.stat().st_size*": LEFT + _LARGE,
    "archived_names: path.stat().st_size*": LEFT + _LARGE,
    "archived_names: MAX_JSON_FILE + 8 -> -": LEFT + _LARGE,
    "archived_names: 8 -> 7": LEFT + _LARGE,
    "archived_names: 8 -> 9": LEFT + _LARGE,
    "archived_names: len(data) >= 8 *": EQUIVALENT + "the length, or empty JSON, is refused under the same id",
    "archived_names: 8 -> * (#2)": EQUIVALENT + "the length, or empty JSON, is refused under the same id",
    "MAX_JSON_FILE: *": LEFT + _LARGE,
    "check_source: files[name].stat().st_size <= MAX_JSON_FILE*": LEFT + _LARGE,
    "check_source: 0 -> -1 (#2)": EQUIVALENT + "there is one",
    "check_source: len(derived_from) == 1 -> >=": EQUIVALENT + "BCQ-V701 refuses more",
    "check_source: 0 -> -1": EQUIVALENT + "there is one",
    "read_folder: Path(path).resolve() -> as it is": LEFT + _DIRECTORY,
    "read_folder: for name in files -> *": LEFT + "in which order a folder lists its files is no property of a file",
    "read_folder: set(*) -> as it is": EQUIVALENT + "a mapping holds the same names",
}


def reason(name: str) -> str | None:
    """The reason that stands for a mutant."""
    return next((why for pattern, why in _PATTERNS if pattern.fullmatch(name)), None)


_PATTERNS = [(re.compile(".*".join(map(re.escape, key.split("*")))), why) for key, why in REASONS.items()]
