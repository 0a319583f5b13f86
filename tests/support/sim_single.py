"""Products that are carried out vector by vector, in the simulator."""

from __future__ import annotations

from typing import Any
from unittest import mock

from bcqfmt import BcqWeight
from bcqfmt.kernels import matmul, mixed
from bcqfmt.kernels.operands import operand
from bcqfmt.kernels.runtime import device


def one_by_one(weight: BcqWeight, x: Any) -> tuple[str, Any]:
    """The path and the product where a launch takes one vector, as with weights whose rows are long."""
    with (
        mock.patch.object(device, "capability", return_value=(9, 0)),
        mock.patch.object(mixed, "batch_limit", return_value=1),
        mock.patch.object(matmul.MatmulWeight, "at_once", return_value=1),
    ):
        placed = matmul.MatmulWeight(operand(weight), None, weight)
        return matmul.path_of(placed, len(x)), matmul.matmul(placed, x)
