"""Mistakes that readers of BCQ are likely to make, as changes of spec/decoder.py: those that no operator makes.

Each is an exchange of text inside one function. The text must occur there once, so that a change of the decoder that
makes a mistake impossible to state is noticed.
"""

from __future__ import annotations

# Names that the changed texts use.
HELPERS = '''
from fractions import Fraction

def single(x):
    """Rounded to binary32."""
    return rounded(x, "F32")

def fused(a, b, c):
    """a * b + c with one rounding."""
    if not all(map(math.isfinite, (a, b, c))) or abs(a) > 1e100:
        return a * b + c
    return float(Fraction(a) * Fraction(b) + Fraction(c)) or a * b + c

def flushed(x, least):
    """Without subnormal numbers."""
    return x * 0.0 if abs(x) < least else x

def payload(x, kept):
    """The leading bits of a NaN."""
    return (int.from_bytes(struct.pack("<d", x), "little") & (1 << 52) - 1) >> 52 - kept
'''

AFFINE = "s[a] * (float(code) - zp[a])"
FLOAT_ZERO = "s[a] * rounded(float(code) - zero[a], dtype)"
OFFSET = "(s[a] * float(code)) + o[a]"
PLANE = "result[at] = result[at] + value if bits[i * elements + at] else result[at] - value"
SECOND = "scale[at] * (codes[r * groups + a] - zero[at])"
Z = "x * ((float(2**q - 1) - 2.0 * zero) * 0.5)"
BITS = "((exponent + bias - 1) << fraction_bits) + kept"
RESULT = f"return sign | min({BITS}, infinity)"
NAN = "infinity | 1 << (fraction_bits - 1)"
SIGN_BIT = "1 << exponent_bits + fraction_bits"
TERMS = (
    "[value * (1.0 if bits[i * elements + at] else -1.0) for i, value in enumerate(alpha[a :: out * groups][:used])]"
)

# function of the decoder -> [(text in it, {name of the mistake: what stands there instead})]
MISTAKES: dict[str, list[tuple[str, dict[str, str]]]] = {
    "decode_segment": [
        (
            AFFINE,
            {
                "affine: product rounded to binary32 first": f"single({AFFINE})",
                "affine: scale rounded to the logical dtype": "rounded(s[a], dtype) * (float(code) - zp[a])",
                "affine: scale rounded to binary32": "single(s[a]) * (float(code) - zp[a])",
                "affine: two products": "s[a] * float(code) - s[a] * zp[a]",
                "affine: two products, fused": "fused(s[a], float(code), -(s[a] * zp[a]))",
                "affine: zero point plus one": "s[a] * (float(code) - zp[a] - 1.0)",
                "affine: zero point 2^q is 0": "s[a] * (float(code) - zp[a] % 2.0**q)",
                "affine: difference as unsigned bytes": "s[a] * ((float(code) - zp[a]) % 256.0)",
                "affine: a scale of zero gives +0": f"{AFFINE} if s[a] else 0.0",
                "affine: code = zero point gives +0": f"{AFFINE} if float(code) != zp[a] else 0.0",
                "affine: subnormal F16 scales are 0": "flushed(s[a], 2.0**-14) * (float(code) - zp[a])",
                "affine: subnormal F32 scales are 0": "flushed(s[a], 2.0**-126) * (float(code) - zp[a])",
                "affine: absolute value of the scale": "abs(s[a]) * (float(code) - zp[a])",
                "affine: scale of the row's first group": "s[a // groups * groups] * (float(code) - zp[a])",
                "affine: zero of the row's first group": "s[a] * (float(code) - zp[a // groups * groups])",
                "affine: scales [G, out]": "s[a % groups * out + a // groups] * (float(code) - zp[a])",
                "affine: zeros [G, out]": "s[a] * (float(code) - zp[a % groups * out + a // groups])",
                "affine: an infinite scale gives no NaN": f"{AFFINE} if float(code) != zp[a] else 0.0 * (s[a] > 0)",
            },
        ),
        (
            FLOAT_ZERO,
            {
                "float-zero: difference not rounded": "s[a] * (float(code) - zero[a])",
                "float-zero: difference rounded to binary32": "s[a] * single(float(code) - zero[a])",
                "float-zero: difference rounded twice": "s[a] * rounded(single(float(code) - zero[a]), dtype)",
                "float-zero: to the zero's type": 's[a] * rounded(float(code) - zero[a], segment["zero"])',
                "float-zero: to F16 always": 's[a] * rounded(float(code) - zero[a], "F16")',
                "float-zero: zero rounded first": "s[a] * rounded(float(code) - rounded(zero[a], dtype), dtype)",
                "float-zero: scale rounded first": "rounded(s[a], dtype) * rounded(float(code) - zero[a], dtype)",
                "float-zero: two products": "s[a] * float(code) - s[a] * zero[a]",
                "float-zero: product rounded to binary32 first": f"single({FLOAT_ZERO})",
            },
        ),
        (
            OFFSET,
            {
                "offset: fused": "fused(s[a], float(code), o[a])",
                "offset: product in binary32": "single(s[a] * float(code)) + o[a]",
                "offset: product rounded to the logical dtype": "rounded(s[a] * float(code), dtype) + o[a]",
                "offset: sum rounded to binary32 first": f"single({OFFSET})",
                "offset: code 0 gives the offset": f"{OFFSET} if code else o[a]",
                "offset: scale rounded to binary32": "single(s[a]) * float(code) + o[a]",
            },
        ),
        (
            PLANE,
            {
                "bcq: rounded to binary32 after each plane": f"{PLANE}; result[at] = single(result[at])",
                "bcq: rounded to dtype after each plane": f"{PLANE}; result[at] = rounded(result[at], dtype)",
                "bcq: signs inverted": PLANE.replace("+ value", "# value")
                .replace("- value", "+ value")
                .replace("#", "-"),
                "bcq: a bit 0 adds nothing": PLANE.replace("- value", "- 0.0"),
            },
        ),
        (
            "for i in range(used):\n",
            {
                "bcq: planes from the last to the first": "for i in reversed(range(used)):\n",
                "bcq: plane 0 last": "for i in [*range(1, used), 0]:\n",
                "bcq: the last two planes swapped": "for i in [*range(used)][:-2] + [*range(used)][-2:][::-1]:\n",
            },
        ),
        (
            "        return result\n",
            {
                "bcq: planes added up first, then the bias": f"""\
        z = plane_scales(segment, parts, out, n, used)[1]
        return [sum({TERMS}) + z[a] for at, a in enumerate(group_of)]
""",
                "bcq: z - sum(alpha) + 2 * (those with bit 1)": f"""\
        z = plane_scales(segment, parts, out, n, used)[1]
        low = [z[a] - sum(alpha[a :: out * groups][:used]) for a in group_of]
        one = [[t for i, t in enumerate({TERMS}) if bits[i * elements + at]] for at, a in enumerate(group_of)]
        return [x + 2.0 * sum(terms) for x, terms in zip(low, one, strict=True)]
""",
                "bcq: sum without rounding in between": f"""\
        z = plane_scales(segment, parts, out, n, used)[1]
        for at, a in enumerate(group_of):
            if all(map(math.isfinite, alpha)) and math.isfinite(z[a]):
                result[at] = math.fsum([z[a], *{TERMS}]) or result[at]
        return result
""",
            },
        ),
        (
            "j // g for r",
            {
                "groups: counted from 1": "min((j + 1) // g, groups - 1) for r",
                "groups: the short last one uses the one before": "min(j // g, max(n // g - 1, 0)) for r",
                "groups: of equal size": "j * groups // n for r",
            },
        ),
        ("<< (q - 1 - i)", {"planes: least significant first": "<< i"}),
        (
            "s[a] * table[code]",
            {
                "table: product rounded to binary32 first": "single(s[a] * table[code])",
                "table: entry rounded to the logical dtype": "s[a] * rounded(table[code], dtype)",
                "table: entry rounded to binary32": "s[a] * single(table[code])",
                "table: scale rounded to the logical dtype": "rounded(s[a], dtype) * table[code]",
                "table: backwards": "s[a] * table[-1 - code]",
                "table: product before the step": "(s[a] * float(segment['table'][code])) * step",
                "table: scale times step first": "(s[a] * step) * float(segment['table'][code])",
            },
        ),
        (
            'if encoding == "bcq" or used < q:',
            {"affine: by the formula of fewer planes": 'if encoding in ("bcq", "affine") or used < q:'},
        ),
    ],
    "numbers": [
        (
            SECOND,
            {
                "second order: difference in binary32": "scale[at] * single(codes[r * groups + a] - zero[at])",
                "second order: scale in binary32": f"single({SECOND})",
                "second order: scale rounded to its type": f'rounded({SECOND}, kind["scale"])',
                "second order: two products": "scale[at] * codes[r * groups + a] - scale[at] * zero[at]",
                "second order: fused": "fused(scale[at], codes[r * groups + a], -(scale[at] * zero[at]))",
                "second order: zero as an integer": "scale[at] * (codes[r * groups + a] - float(int(zero[at])))",
                "second order: zero of the scale not used": "scale[at] * codes[r * groups + a]",
                "second order: code + zero": "scale[at] * (codes[r * groups + a] + zero[at])",
            },
        ),
        ("a // h", {"super-groups: the first for all": "a // groups", "super-groups: interleaved": "a % columns"}),
        (
            'r // kind["rows"]',
            {
                "second order: row-groups interleaved": 'r % ceil_div(out, kind["rows"])',
                "second order: first row-group for all": "r // out",
                "second order: the short last row-group uses the one before": (
                    'min(r // kind["rows"], max(out // kind["rows"] - 1, 0))'
                ),
            },
        ),
    ],
    "byte_float": [
        (
            "2.0 ** (b - 127)",
            {
                "E8M0: 0 is zero": "2.0 ** (b - 127) if b else 0.0",
                "E8M0: 255 is NaN": "2.0 ** (b - 127) if b < 255 else math.nan",
                "E8M0: 255 is infinity": "2.0 ** (b - 127) if b < 255 else math.inf",
                "E8M0: bias 128": "2.0 ** (b - 128)",
                "E8M0: the smallest flushed": "flushed(2.0 ** (b - 127), 2.0**-126)",
            },
        ),
        (
            "m * 2.0**-9 if e == 0 else (8 + m) * 2.0 ** (e - 10)",
            {
                "UE4M3: no subnormals": "(8 + m) * 2.0 ** (e - 10)",
                "UE4M3: subnormals are 0": "0.0 if e == 0 else (8 + m) * 2.0 ** (e - 10)",
                "UE4M3: the largest exponent is infinite": (
                    "m * 2.0**-9 if e == 0 else (8 + m) * 2.0 ** (e - 10) if e < 15 else math.inf"
                ),
            },
        ),
    ],
    "plane_scales": [
        (
            "x * 2.0 ** (q - 2 - i) for i",
            {
                "fewer planes: scale twice as large": "x * 2.0 ** (q - 1 - i) for i",
                "fewer planes: scale of a weight of p bits": "x * 2.0 ** (p - 2 - i) for i",
                "fewer planes: scale in binary32": "single(x * 2.0 ** (q - 2 - i)) for i",
            },
        ),
        (
            Z,
            {
                "fewer planes: z in binary32": f"single({Z})",
                "fewer planes: z of the planes in use": "x * ((float(2**q - 2 ** (q - p)) - 2.0 * zero) * 0.5)",
                "fewer planes: z as two products": "x * (float(2**q - 1) * 0.5) - x * zero",
                "fewer planes: z left out": "0.0",
                "fewer planes: z half a step off": "x * (float(2 ** (q - 1)) - zero)",
            },
        ),
        ('if p in segment.get("precisions", [])', {"fewer planes: scale sets ignored": "if False"}),
        ('"bias" + own', {"fewer planes: bias of all planes": '"bias"'}),
        ('"alpha" + own', {"fewer planes: alpha of all planes": '"alpha"'}),
    ],
    "round_once": [
        (
            "lost > half or (lost == half and kept & 1)",
            {
                "rounding: ties away from zero": "lost >= half",
                "rounding: ties towards zero": "lost > half",
                "rounding: ties to odd": "lost > half or (lost == half and not kept & 1)",
                "rounding: towards zero": "False",
                "rounding: away from zero": "lost",
                "rounding: towards minus infinity": "lost and sign",
                "rounding: towards plus infinity": "lost and not sign",
                "rounding: 16 bits of the rest decide": (
                    "lost << 16 >> shift > 1 << 15 or (lost << 16 >> shift == 1 << 15 and kept & 1)"
                ),
                "rounding: ties among subnormals away": (
                    "lost > half or (lost == half and (kept & 1 or exponent == 1 - bias))"
                ),
            },
        ),
        (
            "    if math.isnan(x):\n",
            {
                "rounding: BF16 through binary32": """\
    if dtype == "BF16":
        x = rounded(x, "F32")
    if math.isnan(x):
""",
                "rounding: F16 through binary32": """\
    if dtype == "F16":
        x = rounded(x, "F32")
    if math.isnan(x):
""",
                "rounding: zero without sign": "    x = x or 0.0\n    if math.isnan(x):\n",
                "rounding: subnormal binary64 is 0": "    x = flushed(x, 2.0**-1022)\n    if math.isnan(x):\n",
            },
        ),
        (
            f"return {NAN}",
            {
                "NaN: with its sign": f"return {NAN} | (math.copysign(1.0, x) < 0) << exponent_bits + fraction_bits",
                "NaN: with its payload": f"return {NAN} | payload(x, fraction_bits)",
                "NaN: all ones": "return infinity | (1 << fraction_bits) - 1",
                "NaN: smallest payload": "return infinity | 1",
                "NaN: negative": f"return {NAN} | {SIGN_BIT}",
                "NaN: as infinity": "return infinity",
                "NaN: as zero": "return 0",
            },
        ),
        (
            "return sign | infinity",
            {
                "infinity: without sign": "return infinity",
                "infinity: the largest number": "return sign | (infinity - 1)",
            },
        ),
        (
            RESULT,
            {
                "overflow: the largest number": f"return sign | min({BITS}, infinity - 1)",
                "overflow: only from the next power of two on": (
                    f"return sign | min({BITS}, infinity - (unit + number.bit_length() - 1 <= bias))"
                ),
                "overflow: above the largest number": (
                    f"return sign | (infinity if {BITS} == infinity - 1 and lost else min({BITS}, infinity))"
                ),
                "overflow: without sign": f"return sign | {BITS} if {BITS} < infinity else infinity",
                "overflow: NaN": f"return sign | {BITS} if {BITS} < infinity else {NAN}",
                "subnormal results: zero": f"{RESULT} if kept >> fraction_bits else sign",
                "subnormal results: +0": f"{RESULT} if kept >> fraction_bits else 0",
                "results rounded to zero: without sign": f"{RESULT} if kept else 0",
                "results rounded to zero: smallest subnormal": f"{RESULT} if kept else sign | 1",
                "smallest normal number: zero": f"{RESULT} if {BITS} != 1 << fraction_bits else sign",
            },
        ),
    ],
    "floats": [
        (
            "[bits << 16 for bits in",
            {
                "BF16: signed shift": "[bits << 16 & 0x7FFFFFFF for bits in",
                "BF16: half a step added": "[bits << 16 | 0x8000 for bits in",
                "BF16: subnormals are 0": "[bits << 16 if bits & 0x7F80 else bits >> 15 << 31 for bits in",
            },
        ),
    ],
    "unpack": [
        (
            "first + bit // 32, bit % 32",
            {
                "packed: most significant bits first": "first + bit // 32, max(32 - b - bit % 32, 0)",
                "packed: fields never straddle": "first + bit // b // (32 // b), bit // b % (32 // b) * b",
            },
        ),
    ],
    "decode_matrix": [
        ("perm[start + j]", {"perm: inverted": "perm.index(start + j)", "perm: ignored": "start + j"}),
        (
            'result[at] + v if scheme["outliers"]["mode"] == "add" else v',
            {
                "outliers: always added": "result[at] + v",
                "outliers: always replace": "v",
                "outliers: added after the rounding": (
                    'rounded(result[at], weight["dtype"]) + v if scheme["outliers"]["mode"] == "add" else v'
                ),
                "outliers: added in binary32": 'single(result[at] + v) if scheme["outliers"]["mode"] == "add" else v',
                "outliers: added to binary32": 'single(result[at]) + v if scheme["outliers"]["mode"] == "add" else v',
                "outliers: replaced ones keep -0 out": (
                    'result[at] + v if scheme["outliers"]["mode"] == "add" else v + 0.0'
                ),
                "outliers: left out with fewer planes": (
                    'result[at] if planes else result[at] + v if scheme["outliers"]["mode"] == "add" else v'
                ),
            },
        ),
        ("r * columns + c\n", {"outliers: stored columns": "r * columns + perm[c]\n"}),
    ],
    "permutation": [("4 * columns * matrix", {"perm: that of the first matrix of a stack": "0"})],
    "column_segments": [("result[column]", {"outliers' segments: of stored columns": "result[stored]"})],
    "matrix_outliers": [
        (
            "4 * out * matrix",
            {
                "outliers: those of the first matrix of a stack": "0",
                "outliers: an end for each matrix": "4 * (out + 1) * matrix",
            },
        ),
    ],
    "to_canonical": [
        (
            "meta[t] >> 10 & 7, meta[t] >> 13 & 7",
            {"aligned64: s1 and s2 swapped": "meta[t] >> 13 & 7, meta[t] >> 10 & 7"},
        ),
        (
            "zeros.append(meta[t] >> 2 * w & 3)",
            {"aligned64: zeros from the top": "zeros.append(meta[t] >> 4 - 2 * w & 3)"},
        ),
        ("extra[t] >> 4 * m & 15", {"aligned64: tile_extra backwards": "extra[t] >> 28 - 4 * m & 15"}),
    ],
    "is_version": [
        (
            're.fullmatch(r"1\\.(0|[1-9][0-9]*)", value)',
            {
                "version: a line feed at its end": 're.match(r"1\\.(0|[1-9][0-9]*)$", value)',
                "version: more after it": 're.match(r"1\\.(0|[1-9][0-9]*)", value)',
                "version: leading zeros": 're.fullmatch(r"1\\.[0-9]+", value)',
                "version: digits of any script": 're.fullmatch(r"1\\.(0|[1-9]\\d*)", value)',
                "version: any character for the point": 're.fullmatch(r"1.(0|[1-9][0-9]*)", value)',
                "version: only 1.0": 're.fullmatch(r"1\\.0", value)',
                "version: MAJOR from 1 on": 're.fullmatch(r"[1-9][0-9]*\\.(0|[1-9][0-9]*)", value)',
                "version: MINOR of one digit": 're.fullmatch(r"1\\.[0-9]", value)',
            },
        ),
    ],
    "is_hex": [
        (
            're.fullmatch(r"[0-9a-f]{64}", value)',
            {
                "digest: upper case": 're.fullmatch(r"[0-9A-Fa-f]{64}", value)',
                "digest: a line feed at its end": 're.match(r"[0-9a-f]{64}$", value)',
                "digest: any length": 're.fullmatch(r"[0-9a-f]*", value)',
            },
        ),
    ],
    "is_weight_name": [
        (
            're.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.:+-]*", name)',
            {
                "weight name: a line feed at its end": 're.match(r"[A-Za-z0-9_][A-Za-z0-9_.:+-]*$", name)',
                "weight name: letters of any script": 're.fullmatch(r"\\w[\\w.:+-]*", name)',
                "weight name: a point first": 're.fullmatch(r"[A-Za-z0-9_.:+-]+", name)',
                "weight name: a slash": 're.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_./:+-]*", name)',
                "weight name: no colon": 're.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*", name)',
                "weight name: no plus": 're.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.:-]*", name)',
                "weight name: no minus": 're.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.:+]*", name)',
                "weight name: no underscore first": 're.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.:+-]*", name)',
                "weight name: no digit first": 're.fullmatch(r"[A-Za-z_][A-Za-z0-9_.:+-]*", name)',
            },
        ),
    ],
    "read_index": [
        (
            're.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]*\\.safetensors", file)',
            {
                "file name: a line feed at its end": 're.match(r"[A-Za-z0-9_][A-Za-z0-9._-]*\\.safetensors$", file)',
                "file name: a path": 're.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._/-]*\\.safetensors", file)',
                "file name: any character for the point": (
                    're.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]*.safetensors", file)'
                ),
                "file name: a point first": 're.fullmatch(r"[A-Za-z0-9._-]*\\.safetensors", file)',
                "file name: any suffix": 're.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]*", file)',
            },
        ),
    ],
    "parse_json": [
        (
            'if kind != "config":\n            raise',
            {"JSON: NaN and infinities everywhere": "if False:\n            raise"},
        ),
        ('(kind == "header" and text == "-0")', {"JSON: -0 in headers": "False"}),
        (
            'strip(" " if kind == "header" else " \\t\\r\\n")',
            {"JSON: any white space after a header": 'strip(" \\t\\r\\n")', "JSON: Unicode white space": "strip()"},
        ),
        ("if len(result) != len(items):", {"JSON: the last of equal keys counts": "if False:"}),
    ],
}
