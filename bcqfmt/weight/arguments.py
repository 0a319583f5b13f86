"""What callers pass: arrays and whole numbers, or BCQ-E302 with the name of the argument."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from bcqfmt.errors import BcqError, error, escape

_TENSOR = (
    "pass a numpy array; of a torch tensor t it is t.detach().cpu().numpy(), or for bfloat16 "
    "t.detach().cpu().view(torch.int16).numpy().view(ml_dtypes.bfloat16)"
)


def array(given: Any, name: str, expected: str, shape: tuple[int, ...] | None = None) -> npt.NDArray[Any]:
    """An argument as an array of any dtype of numbers, of ``shape`` where one is given.

    Whatever numpy makes into numbers is taken: arrays, lists, torch tensors on the CPU. ``expected``: for the message.
    """
    try:
        found = np.asarray(given)
    except (TypeError, ValueError, RuntimeError) as fault:  # uneven lists; tensors that numpy cannot see
        kind = f"a {type(given).__name__}: {escape(str(fault))}"
        raise error("BCQ-E302", tensor=name, found=kind, expected=expected, hint=_TENSOR) from None
    if found.dtype.kind in "OSU":
        raise wrong(name, f"a {type(given).__name__}", expected)
    if shape is not None and found.shape != shape:
        raise wrong(name, f"shape {list(found.shape)}", f"{list(shape)}, {expected}")
    return found


def integers(given: Any, name: str, expected: str, shape: tuple[int, ...] | None = None) -> npt.NDArray[Any]:
    """Like :func:`array`, of integers."""
    found = array(given, name, expected, shape)
    if found.dtype.kind not in "iu" and found.size:
        raise wrong(name, f"an array of type {found.dtype}", expected)
    return found


def integer(given: Any, name: str, low: int, high: int | None = None, unit: str = "") -> int:
    """A whole number, of Python or numpy, in ``low..high``; ``unit``: what it counts, for the message."""
    expected = f"an integer, at least {low}" if high is None else f"an integer in {low}..{high}"
    if not isinstance(given, int | np.integer):
        raise wrong(name, escape(repr(given), 40), expected)
    if given < low or (high is not None and given > high):
        raise wrong(name, f"{given} {unit}".rstrip(), expected)
    return int(given)


def wrong(name: str, found: str, expected: str, hint: str | None = None) -> BcqError:
    """BCQ-E302 for the argument ``name``."""
    return error("BCQ-E302", tensor=name, found=found, expected=expected, hint=hint)
