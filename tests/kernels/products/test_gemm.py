"""The product of many vectors in the simulator, and its layout, against the normative decoder."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from bcqfmt import BcqError, BcqWeight
from bcqfmt.container.dtypes import float64_of, round_to
from bcqfmt.kernels.gemm import gemm_operand, obstacle, parts_of
from bcqfmt.kernels.gemm.layout import GemmLayout
from bcqfmt.kernels.gemm.pack import pack_codes
from bcqfmt.kernels.gemm.shape import MANY_TILES, blocks_for, gemm_shape, whole_for
from bcqfmt.kernels.operands import operand
from products import kernel_samples as ks
from products import product_reference as reference
from simulated import sim_gemm
from simulated.cuda_sim import simulate

DOCS = Path(__file__).resolve().parents[3] / "docs"
LIMITS = {"F16": 6e-4, "BF16": 4e-3}
WGMMA, MMA = {"engine": "wgmma", "vectors": 16}, {"engine": "mma", "vectors": 16}
# encoding, q, rows, columns, group size, dtype of x, vectors, options
CASES = [
    ("affine", 4, 70, 200, 64, "F16", 18, {**WGMMA, "depth": 2}),
    ("affine", 3, 70, 136, 32, "F16", 3, {"depth": 2, "height": 2, "groups": 2, "stages": 2}),
    ("affine", 4, 40, 520, 128, "F16", 8, {"depth": 2, "groups": 2, "stages": 2, "early": True}),
    ("affine", 4, 40, 264, 128, "F16", 15, {"vectors": 16, "depth": 2, "height": 2, "groups": 4, "stages": 2}),
    ("affine", 2, 40, 128, 16, "F16", 2, WGMMA),
    ("affine", 8, 64, 72, 72, "F16", 2, MMA),
    ("affine", 2, 290, 64, 64, "F16", 1, {**WGMMA, "stages": 4}),  # tiles of a block alone, then shared ones
    ("affine", 4, 64, 512, 128, "F16", 2, {**WGMMA, "depth": 4}),
    ("affine", 7, 33, 128, 128, "BF16", 5, WGMMA),
    ("affine", 4, 33, 192, 64, "F16", 70, {**WGMMA, "vectors": 64}),  # few in the second tile
    ("offset", 3, 64, 128, 64, "BF16", 2, {}),
    ("float-zero", 5, 64, 128, 64, "F16", 2, {}),
    ("bcq", 3, 200, 200, 128, "F16", 11, {**MMA, "depth": 2, "height": 2}),
    ("bcq", 4, 130, 64, 32, "BF16", 2, {**WGMMA, "groups": 2}),
    ("bcq", 2, 130, 128, 64, "BF16", 2, {**WGMMA, "groups": 2}),
    ("bcq", 4, 64, 200, 64, "F16", 2, {"groups": 3, "height": 2}),
    ("bcq", 5, 64, 64, 64, "F16", 2, {}),
    ("table", 4, 64, 136, 32, "F16", 3, {**WGMMA, "depth": 2}),
    ("table", 4, 64, 128, 16, "BF16", 2, MMA),
    ("short table", 4, 20, 64, 32, "F16", 2, {}),
    ("second-order", 2, 64, 128, 64, "F16", 1, {}),
]


@pytest.mark.parametrize(("encoding", "q", "rows", "columns", "g", "kind", "count", "options"), CASES)
def test_every_encoding(
    encoding: str, q: int, rows: int, columns: int, g: int, kind: str, count: int, options: dict[str, object]
) -> None:
    weight = ks.weight(encoding, q, rows, columns, g, seed=q)
    x = ks.vectors(count, columns, kind)
    found = simulate(sim_gemm.product, weight, x, kind, **options)
    assert (found.same, found.intact) == (True, True)
    assert reference.relative_error(found.value, reference.product(weight, x)) < LIMITS[kind]


def test_segments_reordered_columns_outliers_and_an_addend() -> None:
    weight = ks.mixed(20, 64, 72, outliers="add")
    x = ks.vectors(3, 136, "F16")
    plus = np.random.default_rng(1).normal(size=20).astype(np.float32)
    found = simulate(sim_gemm.product, weight, x, "F16", addend=plus)
    assert (found.same, found.intact) == (True, True)
    assert reference.relative_error(found.value, reference.product(weight, x) + plus) < LIMITS["F16"]


@pytest.mark.parametrize("count", [16, 17])
def test_parts_of_many_vectors(count: int) -> None:
    """Segments, reordered columns, outliers and an addend in each of two."""
    weight, x = ks.mixed(20, 64, 72, outliers="add"), ks.vectors(count, 136, "F16")
    plus = np.random.default_rng(1).normal(size=20).astype(np.float32)
    found = simulate(sim_gemm.in_parts, weight, x, "F16", 8, addend=plus)
    assert (found.same, found.intact) == (True, True)
    assert reference.relative_error(found.value, reference.product(weight, x) + plus) < LIMITS["F16"]


@pytest.mark.parametrize(
    ("count", "shape", "parts"),
    [(0, (4096, 4096), [0]), (3071, (4096, 4096), [3071]), (4096, (4096, 4096), [2048, 2048]),
     (2047, (11008, 4096), [2047]), (2048, (4097, 4096), [1024, 1024]),
     (3000, (4096, 11008), [1408, 1592]), (5000, (2048, 2048), [1664, 1664, 1672])],
)  # fmt: skip
def test_where_parts_begin(count: int, shape: tuple[int, int], parts: list[int]) -> None:
    """At multiples of 128; parts of small matrices are larger."""
    found = parts_of(count, shape)
    assert [end - begin for begin, end in found] == parts
    assert [begin for begin, _ in found] == [sum(parts[:k]) for k in range(len(parts))]
    assert all(begin % 128 == 0 for begin, _ in found)


@pytest.mark.parametrize("q", range(1, 9))
def test_where_every_code_lies(q: int) -> None:
    """As `layout` says it: block, warp, field, lane, word, place in a half."""
    rng = np.random.default_rng(q)
    codes = rng.integers(0, 2**q, (130, 200))
    layout = GemmLayout(q, 200, 64, "affine", "F16")
    bits = codes[None] >> np.arange(q - 1, -1, -1)[:, None, None] & 1
    padded = np.zeros((q, 130, 224), np.uint8)
    padded[:, :, :200] = bits
    planes = np.packbits(padded, axis=-1, bitorder="little").view(np.int32)
    words = pack_codes(layout, torch.from_numpy(planes)).numpy().view(np.uint32).reshape(3, 4, 4, -1)
    for row, column in zip(rng.integers(0, 130, 300), rng.integers(0, 200, 300), strict=True):
        r, c = row % 64, column % 64
        lane, pair, half = r % 16 // 2 * 4 + c % 8 // 2, c // 16 * 4 + c % 16 // 8 * 2 + r % 2, c % 2
        share = words[row // 64, column // 64, r // 16]
        found, start = 0, 0
        for field in layout.fields:
            own = share[start : start + 32 * field].reshape((32, field) if field < 8 else (2, 32, 4))
            own = own[lane] if field < 8 else own[:, lane].reshape(8)
            per, start = 16 // field, start + 32 * field
            if field == 3 and pair == 15:
                value = sum((int(own[i]) >> 16 * half + 15 & 1) << i for i in range(3))
            else:
                value = int(own[pair // per]) >> 16 * half + field * (pair % per) & 2**field - 1
            found = found << field | value
        assert found == codes[row, column]


@pytest.mark.parametrize(("formula", "q"), [("bcq", 2), ("bcq", 3), ("bcq", 4), ("table", 4)])
def test_where_every_selector_lies(formula: str, q: int) -> None:
    """As `layout` says it, of codes that choose a value."""
    rng = np.random.default_rng(q)
    codes = rng.integers(0, 2**q, (64, 64))
    bits = (codes[None] >> np.arange(q - 1, -1, -1)[:, None, None] & 1).astype(np.uint8)
    planes = np.packbits(bits, axis=-1, bitorder="little").view(np.int32)
    layout = GemmLayout(q, 64, 64, formula, "F16", table=tuple(range(16)) if formula == "table" else ())
    words = pack_codes(layout, torch.from_numpy(planes)).numpy().view(np.uint32).reshape(2, 4, 32, q)[0]
    for row, column in np.ndindex(64, 64):
        own = [int(word) for word in words[row // 16, row % 16 // 2 * 4 + column % 8 // 2]]
        i, upper = column // 16, row % 2
        j = column % 16 // 8 * 2 + column % 2
        n = 4 * upper + j
        if q == 2:
            found = own[i // 2] >> 4 * n + 2 * (i % 2) & 3
        elif i < q:
            found = own[i] >> 4 * n & 7
        else:
            found = sum((word >> 4 * n + 3 & 1) << bit for bit, word in enumerate(own))
        if q == 4:
            top = own[i] >> 8 * j + (3 if upper else 7) & 1
            found = found ^ 7 if formula == "bcq" and top else found
            found |= (1 - top if formula == "bcq" else top) << 3
        assert found == codes[row, column]


def test_what_has_no_layout() -> None:
    for encoding, q, g in (("affine", 4, 8), ("bcq", 2, 24)):
        assert f"groups of {g} columns" in obstacle(operand(ks.weight(encoding, q, 8, 96, g)), "F16")
    long = BcqWeight.from_table(
        np.zeros((8, 64), int), np.ones((8, 1), np.float16), [3**i for i in range(16)], group_size=64
    )
    assert "a table with 2187" in obstacle(operand(long), "F16")
    eight = operand(ks.weight("affine", 8, 8, 64, 64))
    assert "BF16 holds 7" in obstacle(eight, "BF16")
    assert "x is F32" in obstacle(eight, "F32")
    assert not obstacle(eight, "F16")
    assert "multiple of 8" in obstacle(operand(ks.weight("affine", 4, 8, 60, 60)), "F16")  # 16-byte pieces of x
    with pytest.raises(BcqError, match=r"BCQ-E553.*codes of 8 bits"):
        gemm_operand(eight, "BF16", "cpu")
    far = BcqWeight.from_bcq(
        np.zeros((1, 2, 64), np.uint8), np.full((1, 2, 1), 2.0**-24, np.float16), np.full((2, 1), 6e4, np.float16),
        group_size=64,
    )  # fmt: skip
    with pytest.raises(BcqError, match=r"BCQ-E553.*relative to its scales, is too large for F16"):
        gemm_operand(operand(far), "F16", "cpu")


@pytest.mark.parametrize(
    ("tiles", "steps", "most", "blocks"),
    [(0, 4, 132, 0), (1, 4, 132, 4), (16, 32, 132, 128), (43, 32, 132, 129), (112, 32, 132, 132), (128, 32, 132, 128),
     (344, 32, 132, 132), (3, 1, 8, 3)],
)  # fmt: skip
def test_blocks_share_tiles_evenly_where_few_would_be_idle(tiles: int, steps: int, most: int, blocks: int) -> None:
    assert blocks_for(tiles, steps, most) == blocks


@pytest.mark.parametrize(
    ("tiles", "most", "blocks"),
    [(116, 132, 116), (112, 132, 0), (258, 132, 129), (3, 2, 0), (5, 2, 0), (0, 2, 0), (512, 132, 128), (1376, 132, 0),
     (2752, 132, 132)],
)  # fmt: skip
def test_blocks_have_whole_tiles_where_few_would_be_idle(tiles: int, most: int, blocks: int) -> None:
    assert whole_for(tiles, most) == blocks


def test_the_tiles_chosen_are_nearly_the_fastest_that_were_measured() -> None:
    shares = []
    for row in json.loads((DOCS / "benchmarks" / "gemm_tiles.json").read_text())["rows"]:
        layout = GemmLayout(4, row["columns"], 128, "affine", "F16")
        shape = gemm_shape(layout, row["vectors"], row["rows"], 1, 1, "wgmma")
        shares.append(min(row["tiles"].values()) / row["tiles"][f"{shape.rows} x {shape.vectors}"])
    assert len(shares) == 63
    assert sum(shares) / len(shares) > 0.997
    assert min(shares) > 0.97


@pytest.mark.parametrize(
    ("rows", "count", "tile"),
    [(4096, 65, (128, 80)), (28672, 80, (128, 80)), (28672, 81, (128, 96)), (4096, 128, (128, 64)),
     (4096, 160, (128, 80)), (4096, 192, (128, 96)), (4096, 257, (128, 80)), (11008, 97, (192, 64)),
     (11008, 128, (192, 64)), (28672, 128, (128, 128)), (5120, 128, (192, 64)), (11008, 129, (192, 96))],
)  # fmt: skip
def test_small_tiles_where_all_processors_have_one(rows: int, count: int, tile: tuple[int, int]) -> None:
    shape = gemm_shape(GemmLayout(4, 4096, 128, "affine", "F16"), count, rows, 1, 1, "wgmma")
    assert (shape.rows, shape.vectors) == tile


@pytest.mark.parametrize("tile", MANY_TILES)
def test_every_tile_can_be_asked_for(tile: tuple[int, int]) -> None:
    for columns in (4096, 8192, 200):
        made = gemm_shape(GemmLayout(4, columns, 128, "affine", "F16"), 300, 4096, 1, 1, "wgmma", tile=tile)
        assert (made.groups, made.vectors, made.engine) == (*tile, "wgmma")
        assert made.stages >= 3
        assert made.shared_bytes <= 227 * 1024


def test_tiles_that_are_chosen_are_among_those_that_can_be_asked_for() -> None:
    for rows, count in itertools.product((512, 4096, 11008, 28672), range(65, 1900, 7)):
        made = gemm_shape(GemmLayout(4, 4096, 128, "affine", "F16"), count, rows, 1, 1, "wgmma")
        assert (made.groups, made.vectors) in MANY_TILES


@pytest.mark.parametrize("engine", ["wgmma", "mma"])
def test_every_shape_fits(engine: str) -> None:
    """Into the shared memory of every GPU since sm_80, and for wgmma of sm_90."""
    limit = 227 if engine == "wgmma" else 99
    for q in range(1, 9):
        for formula, g in (("affine", 16), ("affine", 128), ("bcq", 16), ("bcq", 4096)):
            layout = GemmLayout(q, 4096, g, formula, "F16")
            for count, rows in itertools.product((1, 8, 9, 16, 33, 80, 100, 300, 600, 640, 1200, 2047), (4096, 11008)):
                shape = gemm_shape(layout, count, rows, 1, 1, engine)
                few = shape.engine == "few"
                assert shape.vectors >= min(count, 16)
                assert (1 if few else shape.blocks) * shape.shared_bytes <= limit * 1024
                assert shape.stages >= (2 if few else 3)


@pytest.mark.parametrize(
    ("encoding", "q", "rows", "columns", "g", "numbers", "logical", "kind"),
    [
        ("affine", 4, 70, 200, 64, "F16", "F16", "F16"),
        ("affine", 3, 20, 136, 32, "BF16", "BF16", "F16"),
        ("affine", 2, 20, 136, 16, "F16", "F16", "BF16"),
        ("affine", 8, 20, 72, 72, "F32", "F32", "F16"),
        ("affine", 7, 20, 128, 128, "F16", "F32", "BF16"),
        ("affine", 1, 20, 64, 64, "F16", "F16", "F16"),
        ("bcq", 4, 20, 192, 128, "F16", "F16", "F16"),
        ("bcq", 3, 20, 200, 64, "BF16", "BF16", "F16"),
        ("bcq", 2, 20, 128, 64, "F32", "F32", "BF16"),
        ("bcq", 4, 20, 64, 32, "F16", "F16", "F16"),
        ("bcq", 5, 20, 64, 64, "F16", "F16", "BF16"),
    ],
)
def test_the_dense_matrix_of_codes_has_the_bits_of_the_decoder(
    encoding: str, q: int, rows: int, columns: int, g: int, numbers: str, logical: str, kind: str
) -> None:
    weight = ks.weight(encoding, q, rows, columns, g, seed=q, numbers=numbers, dtype=logical)
    once, twice = simulate(sim_gemm.dense, weight, kind)
    assert once.tobytes() == weight.dequantize(kind).tobytes()
    assert twice.tobytes() == round_to(float64_of(weight.dequantize()), kind).tobytes()  # as a dense copy is loaded
