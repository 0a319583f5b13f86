"""2-bit groups with second-order scales: scale codes of a few bits, one scale_scale for some rows of a group."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from bcqfmt.compiled.rounding import KINDS
from bcqfmt.compiled.threads import each_share
from bcqfmt.container.dtypes import round_to
from bcqfmt.weight.weight import BcqWeight

from .assemble import affine_weight
from .loops.second_order import fit_rows

F64 = npt.NDArray[np.float64]


class SecondOrderFit:
    """Fits group after group, and holds the numbers: a :class:`compensated.GroupRule`.

    ``units`` float64 ``[ceil(out / row_step), G]`` are the scale_scales (F16 numbers), ``codes`` uint8 ``[out, G]`` the
    scale codes, ``zeros`` uint8 ``[out, G]`` the zero points 0..3; the scale of a group is unit * code.
    """

    def __init__(
        self, rows: int, group_size: int, limits: npt.NDArray[np.int64], *, importance: F64, row_step: int,
        search: bool, without: npt.NDArray[np.bool_] | None = None, threads: int = 1,
    ) -> None:  # fmt: skip
        """``limits``: largest scale code of every group. ``importance``: of every column, ``[G * group_size]``.

        ``without``: elements ``[out, G * group_size]`` that have no part in ranges and errors.
        """
        groups = limits.size
        self.group_size, self.limits, self.row_step = group_size, limits, row_step
        self.units = np.zeros((-(-rows // row_step), groups))
        self.codes, self.zeros = np.zeros((rows, groups), np.uint8), np.zeros((rows, groups), np.uint8)
        self._importance, self._without, self._search, self._threads = importance, without, search, threads

    def __call__(self, group: int, first_row: int, target: F64) -> tuple[F64, F64]:
        """Fit rows from ``first_row``, a multiple of ``row_step``, of a group; scale and zero point of every row."""
        rows = slice(first_row, first_row + target.shape[0])
        columns = slice(group * self.group_size, (group + 1) * self.group_size)
        weights = np.repeat(self._importance[None, columns], target.shape[0], axis=0)
        if self._without is not None:
            weights[self._without[rows, columns]] = 0.0
        units = np.empty(-(-target.shape[0] // self.row_step))
        codes, zeros = np.empty(target.shape[0]), np.empty(target.shape[0])

        def share(first: int, stop: int) -> None:
            limit, kind = int(self.limits[group]), KINDS["F16"]
            trial, errors = np.empty((3, codes.size)), np.empty(4)
            fit_rows(
                target, weights, limit, kind, self._search, self.row_step, units, codes, zeros, trial, errors, first,
                stop,
            )  # fmt: skip

        each_share(share, target.shape[0], self.row_step, self._threads)
        start = first_row // self.row_step
        self.units[start : start + units.size, group] = units
        self.codes[rows, group], self.zeros[rows, group] = codes, zeros
        return np.repeat(units, self.row_step)[: codes.size] * codes, zeros

    def scales(self) -> F64:
        """The scales as a reader decodes them, float64 ``[out, G]``."""
        return np.repeat(self.units, self.row_step, axis=0)[: self.codes.shape[0]] * self.codes

    def nearest_codes(self, weight: npt.NDArray[np.float32], columns: npt.NDArray[np.intp]) -> npt.NDArray[np.uint8]:
        """Fit every group and round to the nearest code of the final scales, ``[out, G * group_size]``.

        ``columns``: those of ``weight`` ``[out, in]`` that the groups are made of. They are copied group by group.
        """
        made = np.empty((weight.shape[0], columns.size), np.uint8)
        for group in range(self.limits.size):
            run = slice(group * self.group_size, (group + 1) * self.group_size)
            values = np.ascontiguousarray(weight[:, columns[run]], np.float64)
            scale, zero = self(group, 0, values)
            steps = np.divide(values, scale[:, None], out=np.zeros_like(values), where=scale[:, None] > 0)
            made[:, run] = np.clip(np.rint(steps) + zero[:, None], 0, 3)
        return made

    def values(self, codes: npt.NDArray[np.uint8], group: int) -> F64:
        """What the codes ``[out, group_size]`` of a group decode to in float64, before any rounding."""
        units = np.repeat(self.units[:, group], self.row_step)[: codes.shape[0]]
        steps = np.subtract(codes, self.zeros[:, group, None], dtype=np.float64)
        return np.asarray((units * self.codes[:, group])[:, None] * steps)

    def weight(self, codes: npt.NDArray[np.uint8], bits: int, dtype: str, threads: int = 1) -> BcqWeight:
        """The segment: 2-bit codes, scale codes of ``bits`` bits, F16 scale_scales, packed zeros."""
        ones = np.broadcast_to(np.float16(1), self.codes.shape)
        plain = affine_weight(
            codes, ones, self.zeros, bits=2, group_size=self.group_size, stored="F16", dtype=dtype, threads=threads
        )
        return plain.with_second_order(
            self.codes,
            round_to(self.units, "F16"),
            np.zeros(self.units.shape, np.uint8),
            bits=bits,
            rows=self.row_step,
        )
