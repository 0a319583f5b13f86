"""How a W4A4 product is shared out: the rows and tokens of a block and of its warps, by the number of tokens."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["LARGE", "TILES", "Tile"]


class Tile(NamedTuple):
    """A block of ``warps_m`` x ``warps_n`` warps, each with ``rows`` x ``tokens``.

    ``rows``: 32, 64, or 16 with an even ``warps_m``; ``tokens``: multiples of 8.
    """

    rows: int
    tokens: int
    warps_m: int
    warps_n: int
    stages: int
    blocks: int = 1  # that shall fit on a processor at once

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * self.warps_m * self.warps_n

    @property
    def block_rows(self) -> int:
        """Rows of a block."""
        return self.rows * self.warps_m

    @property
    def block_tokens(self) -> int:
        """Tokens of a block."""
        return self.tokens * self.warps_n

    @property
    def stage(self) -> int:
        """Bytes of one buffer: weights (the int8 group is the largest), activations, both scales."""
        return (self.block_rows + self.block_tokens) * (128 + 4)

    @property
    def shared(self) -> int:
        """Bytes of shared memory of a block."""
        return self.stage * self.stages


# by the tokens they are meant for; measured, see docs/benchmarks
SMALL, MIDDLE, LARGE = Tile(32, 16, 2, 1, 8, 2), Tile(32, 32, 2, 2, 6, 2), Tile(64, 32, 2, 2, 4, 2)
TILES = {8: Tile(32, 8, 2, 1, 8, 2), 16: SMALL, 32: Tile(32, 16, 2, 2, 6, 2), 64: Tile(16, 32, 4, 1, 6, 3), 128: MIDDLE}
