"""How a W4A4 product is shared out: the rows and tokens of a block and of its warps, by the number of tokens."""

from __future__ import annotations

from typing import NamedTuple

from bcqfmt.kernels.runtime.limits import PROCESSORS, SHARED_LIMIT


class Tile(NamedTuple):
    """A block of ``warps_m`` x ``warps_n`` warps, each with ``rows`` x ``tokens``.

    ``rows``: 32 or 64; ``tokens``: multiples of 8. Every thread copies as much of each operand (`kernel`).
    """

    rows: int
    tokens: int
    warps_m: int
    warps_n: int
    stages: int
    blocks: int = 1  # that shall fit on a processor at once

    @property
    def threads(self) -> int:
        return 32 * self.warps_m * self.warps_n

    @property
    def block_rows(self) -> int:
        return self.rows * self.warps_m

    @property
    def block_tokens(self) -> int:
        return self.tokens * self.warps_n

    @property
    def stage(self) -> int:
        """Bytes of one buffer: weights (the int8 group is the largest), activations, both scales."""
        return (self.block_rows + self.block_tokens) * (128 + 4)

    @property
    def shared(self) -> int:
        return self.stage * self.stages


class Held(NamedTuple):
    """A block that keeps ``tokens`` (8, 16, 32) in shared memory, for tiles of 32 ``warps`` rows.

    The columns are shared out over ``parts`` warps; each asks for ``ahead`` groups (2 or more) before it needs them.
    """

    tokens: int
    warps: int
    parts: int
    ahead: int

    @property
    def threads(self) -> int:
        return 32 * self.warps * self.parts

    @property
    def block_rows(self) -> int:
        return 32 * self.warps

    def shared(self, groups: int) -> int:
        """Bytes of shared memory: activations with their scales, sums of all parts, barriers."""
        return groups * self.tokens * (128 + 4) + self.parts * self.block_rows * self.tokens * 4 + self.parts * 8


# by the tokens they are meant for, WIDE for more rows than the GPU takes at once; measured, see docs/benchmarks
SMALL, MIDDLE, LARGE = Tile(32, 16, 2, 1, 8, 2), Tile(32, 32, 2, 2, 6, 2), Tile(64, 32, 2, 2, 4, 2)
TILES = {8: Tile(32, 8, 2, 1, 8, 2), 16: SMALL, 32: Tile(32, 16, 2, 2, 6, 2), 64: Tile(32, 32, 2, 1, 4, 4), 128: MIDDLE}
WIDE = {**TILES, 32: Tile(32, 32, 2, 1, 4, 4), 64: Tile(32, 64, 2, 1, 3, 4), 128: Tile(32, 64, 2, 1, 3, 4)}
HELD = {8: Held(8, 1, 8, 4), 16: Held(16, 1, 8, 3), 32: Held(32, 1, 8, 2), 128: Held(32, 2, 4, 3)}
_MOST_TILES = {32: PROCESSORS, 128: 2 * PROCESSORS}  # beyond that the tiles above are faster


def tile_for(tokens: int, out: int) -> Tile:
    """The tile for a number of tokens and rows."""
    return next((tile for most, tile in (WIDE if out > 64 * PROCESSORS else TILES).items() if tokens <= most), LARGE)


def held_for(tokens: int, out: int, groups: int) -> Held | None:
    """The shape that keeps the activations, unless they do not fit or too many tiles of rows would have to wait."""
    for most, shape in HELD.items():
        if tokens <= most:
            tiles = -(-tokens // shape.tokens) * -(-out // shape.block_rows)
            fits = groups >= shape.parts and shape.shared(groups) <= SHARED_LIMIT
            return shape if fits and tiles <= _MOST_TILES.get(most, tiles) else None
    return None
