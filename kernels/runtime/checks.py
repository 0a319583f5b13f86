"""Checks of the arrays that a kernel is given: dtype, shape, alignment, size, device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bcqfmt.errors import BcqError, error

from . import device
from .limits import KINDS, LIMIT

_BYTES = {"U8": 1, "I8": 1, "F16": 2, "BF16": 2, "I16": 2, "U16": 2, "F32": 4, "I32": 4, "U32": 4, "F64": 8, "I64": 8}


def check_array(
    what: str, array: Any, dtypes: Sequence[str], shape: Sequence[int | None], align: int | None = None
) -> device.Described:
    """BCQ-E552 unless ``array`` has one of the dtypes, the shape (None: any size), is contiguous and aligned.

    ``align``: of the address, in bytes; by default an element's size. BCQ-E554 above 2^31 - 1 elements.
    Outside of the simulator it has to be a torch tensor on a GPU.
    """
    found = device.describe(array)
    size = found.size
    if not device.simulated() and found.device < 0:
        raise on_host(what)
    if found.dtype not in dtypes:
        raise _wrong(f"{what} has dtype {found.dtype}", " or ".join(dtypes), f".to({device.torch_name(dtypes[0])})")
    if not _fits(found.shape, shape):
        shown = ", ".join("any" if w is None else str(w) for w in shape)
        raise error("BCQ-E552", found=f"{what} has shape {list(found.shape)}", expected=f"[{shown}]")
    if not found.contiguous:
        raise _wrong(f"{what} is not contiguous", "a contiguous tensor", ".contiguous()")
    align = _BYTES[found.dtype] if align is None else align
    if size and found.address % align:
        raise _wrong(f"{what} starts at an address that is no multiple of {align}", "an aligned tensor", ".clone()")
    if size > LIMIT:
        hint = "take it in parts: fewer vectors at once, or the weight in slices of rows"
        raise error("BCQ-E554", found=f"{what} has {size} elements", expected=f"at most {LIMIT}", hint=hint)
    return found


def _wrong(found: str, expected: str, step: str) -> BcqError:
    """BCQ-E552 with the call that helps: in the message, because a traceback shows nothing else, and as the hint."""
    return error("BCQ-E552", found=found, expected=f"{expected}: {step}", hint=f"call {step}")


def on_host(what: str) -> BcqError:
    """BCQ-E552 for a tensor that has to be on a GPU."""
    made = _wrong(f"{what} is on the host", "a tensor on a CUDA device", ".to('cuda')")
    made.hint += ", or multiply on the host with bcqfmt.kernels.cpu"
    return made


def _fits(shape: Sequence[int], wanted: Sequence[int | None]) -> bool:
    return len(shape) == len(wanted) and all(w in (None, s) for s, w in zip(shape, wanted, strict=True))


def check_product(shape: tuple[int, int], x: Any, out: Any, most: int, align: int = 16) -> tuple[int, str, Any, str]:
    """The vectors of a product and its result, new and of x's dtype where ``out`` is None: (batch, dtype of x, y, its).

    ``shape``: of the matrix. BCQ-E552 unless x is (1..most, in) and y (batch, out), of any type of activations each.
    """
    rows, columns = shape
    seen = check_array("x", x, tuple(KINDS), (None, columns), align)
    batch = seen.shape[0]
    if not 1 <= batch <= most:
        raise error("BCQ-E552", found=f"{batch} vectors", expected=f"1..{most}; matmul takes any number")
    y = device.empty_like(x, (batch, rows)) if out is None else out
    if out is None and batch * rows <= LIMIT:
        return batch, seen.dtype, y, seen.dtype
    return batch, seen.dtype, y, check_array("out", y, tuple(KINDS), (batch, rows)).dtype


def check_same_device(**arrays: Any) -> None:
    """BCQ-E552 unless all arrays (None is skipped) are on one device."""
    places = {name: device.place_of(array) for name, array in arrays.items() if array is not None}
    if len(set(places.values())) > 1:
        shown = ", ".join(f"{name} on {'the host' if i < 0 else f'cuda:{i}'}" for name, i in places.items())
        there = max(places.values() if places.get("weight", -1) < 0 else [places["weight"]])
        steps = [f"{name}.to('cuda:{there}')" for name, place in places.items() if place != there]
        raise _wrong(shown, "one device for all", ", ".join(steps))
