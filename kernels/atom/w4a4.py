"""W4A4 products: weights and activations on a device, the choice of a tile, every check before a launch::

    weight = atom_to_device(pack_w4(bcq_weight))
    x_q = rmsnorm_reorder_quant(x, gamma, weight.perm, eps=1e-5)         # or quantize_reorder(x, weight.perm)
    y = w4a4(x_q, weight)                                                # [tokens, out]

Products that split their sum count finished blocks with tickets (`runtime.tickets`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from bcqfmt.errors import error
from bcqfmt.kernels.runtime import device
from bcqfmt.kernels.runtime.checks import check_array, check_same_device
from bcqfmt.kernels.runtime.limits import LIMIT, PROCESSORS, SHARED_LIMIT
from bcqfmt.kernels.runtime.tickets import TICKETS, new_tickets
from bcqfmt.kernels.runtime.tickets import tickets as tickets_for

from .activations import WARPS, activation_kernel
from .held_kernel import w4a4_held_kernel
from .kernel import w4a4_kernel
from .operands import GROUP, TOKENS, AtomWeight, padded, step_factor
from .shape import Held, Tile, held_for, tile_for

_FLOATS = ("F16", "BF16", "F32")


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class AtomDevice:
    """A packed weight on a device; ``tickets``, zeros between launches, are for CUDA graphs that it is captured in.

    ``settled``: as in `bits.BitOperand`, all work that wrote these tensors has finished.
    """

    out: int
    columns: int
    words: Any
    scale: Any
    perm: Any
    tickets: Any
    settled: bool = False

    @property
    def groups(self) -> int:
        return self.columns // GROUP

    @property
    def rows(self) -> int:
        return padded(self.out, 32)


@dataclass(frozen=True, kw_only=True, eq=False, slots=True)
class Activations:
    """Quantized activations: ``codes [tiles, G, 256]`` words and ``scale [G, 8 tiles]``, as `operands` says."""

    codes: Any
    scale: Any
    tokens: int
    columns: int


class Plan(NamedTuple):
    """How a product is shared out."""

    tile: Tile | Held
    slices: int


def atom_to_device(packed: AtomWeight, target: Any = None) -> AtomDevice:
    """Upload a packed weight to torch's device ``target``, by default the current GPU."""
    if target is None:
        device.require_cuda()
    made = AtomDevice(
        out=packed.out,
        columns=packed.columns,
        words=device.upload(packed.words, target),
        scale=device.upload(packed.scale, target),
        perm=device.upload(packed.perm, target),
        tickets=new_tickets(target),
        settled=True,
    )
    _check_weight(made)
    device.settle(made.words)
    return made


def plan_for(tokens: int, out: int, groups: int, *, held: bool = False) -> Plan:
    """Shape and slices for a product: enough blocks to occupy the GPU, at least four groups to each slice.

    ``held``: activations may stay in shared memory where that is faster, which takes sm_90.
    """
    shape = held_for(tokens, out, groups) if held else None
    if shape is not None:
        return Plan(shape, shape.parts)
    tile = tile_for(tokens, out)
    blocks = -(-tokens // tile.block_tokens) * -(-padded(out, 32) // tile.block_rows)
    wanted = tile.blocks * PROCESSORS // max(1, blocks) if blocks <= TICKETS else 1
    return Plan(tile, max(1, min(wanted, groups // 4, 8)))


def quantize_reorder(x: Any, perm: Any, *, clip: float = 1.0, rule: str = "absmax") -> Activations:
    """x ``[tokens, in]`` float16, bfloat16 or float32, gathered by ``perm [in]`` and quantized token by token.

    ``clip`` and ``rule`` give the scale of the int4 groups (`operands.step_factor`); the int8 group is not
    clipped. ``in`` has to be a multiple of 128, at least 256.
    """
    device.require_cuda()
    kind, tokens, columns = _check_rows(x, "x")
    check_array("perm", perm, ("I32",), (columns,), 16)
    check_same_device(x=x, perm=perm)
    return _quantize(x, x, perm, kind, tokens, columns, False, 0.0, clip, rule)


def rmsnorm_reorder_quant(
    x: Any, gamma: Any, perm: Any, *, eps: float, clip: float = 1.0, rule: str = "absmax"
) -> Activations:
    """:func:`rmsnorm` and :func:`quantize_reorder` in one launch; the same codes, bit by bit."""
    device.require_cuda()
    kind, tokens, columns = _check_rows(x, "x")
    check_array("gamma", gamma, (kind,), (columns,))
    check_array("perm", perm, ("I32",), (columns,), 16)
    check_same_device(x=x, gamma=gamma, perm=perm)
    return _quantize(x, gamma, perm, kind, tokens, columns, True, _eps(eps), clip, rule)


def rmsnorm(x: Any, gamma: Any, *, eps: float, out: Any = None) -> Any:
    """x ``[tokens, in]`` -> x / sqrt(mean(x^2) + eps) * gamma, in the dtype of x."""
    device.require_cuda()
    kind, tokens, columns = _check_rows(x, "x")
    check_array("gamma", gamma, (kind,), (columns,))
    y = device.empty_like(x, (tokens, columns), kind) if out is None else out
    check_array("out", y, (kind,), (tokens, columns), 16)
    check_same_device(x=x, gamma=gamma, out=y)
    activation_kernel(kind, True, False).launch(
        (tokens,), 32 * WARPS, x, gamma, y, x, x, x, columns, tokens, 0, _eps(eps), 0.0, 0.0
    )
    return y


def w4a4(x: Activations, weight: AtomDevice, *, dtype: str = "F16", out: Any = None, plan: Plan | None = None) -> Any:
    """``[tokens, out]`` in ``dtype`` (F16, BF16, F32), summed in float32 group after group, slice after slice.

    ``plan``: tile and slices instead of :func:`plan_for`'s.
    """
    device.require_cuda()
    kind = device.dtype_name(dtype)
    _check_weight(weight)
    if x.columns != weight.columns:
        raise error("BCQ-E552", found=f"activations of {x.columns} channels", expected=f"{weight.columns}")
    if x.tokens * weight.out > LIMIT:
        found = f"{x.tokens} x {weight.out} results"
        raise error("BCQ-E554", found=found, expected=f"at most {LIMIT}", hint="multiply fewer tokens at once")
    groups, tiles = weight.groups, -(-x.tokens // TOKENS)
    check_array("codes", x.codes, ("I32", "U32"), (tiles, groups, 256), 16)
    check_array("scale", x.scale, ("F32",), (groups, 8 * tiles), 16)
    y = device.empty_like(x.scale, (x.tokens, weight.out), kind) if out is None else out
    check_array("out", y, (kind,), (x.tokens, weight.out), 16)
    check_same_device(codes=x.codes, scale=x.scale, words=weight.words, out=y)
    held = device.like_sm_90(device.gpu_of(weight.words))
    shape, slices = plan_for(x.tokens, weight.out, groups, held=held) if plan is None else plan
    if isinstance(shape, Held):
        _launch_held(shape, slices, x, weight, y, kind)
    else:
        _launch_tiles(shape, slices, x, weight, y, kind)
    return y


def _launch_held(shape: Held, slices: int, x: Activations, weight: AtomDevice, y: Any, kind: str) -> None:
    groups, columns = weight.groups, -(-x.tokens // shape.tokens)
    if slices != shape.parts or slices > groups or shape.shared(groups) > SHARED_LIMIT:
        found = f"{slices} slices of {groups} groups, {shape.shared(groups)} bytes of shared memory"
        raise error("BCQ-E552", found=found, expected=f"{shape.parts} slices, at most {SHARED_LIMIT} bytes")
    row_tiles = -(-weight.rows // shape.block_rows)
    grid = (columns, min(row_tiles, max(1, PROCESSORS // columns)))
    w4a4_held_kernel(shape, kind).launch(
        grid, shape.threads, weight.words, weight.scale, x.codes, x.scale, y,
        groups, weight.rows, weight.out, -(-x.tokens // TOKENS), x.tokens, row_tiles, shared=shape.shared(groups),
        early=weight.settled,
    )  # fmt: skip


def _launch_tiles(tile: Tile, slices: int, x: Activations, weight: AtomDevice, y: Any, kind: str) -> None:
    groups, tiles = weight.groups, -(-x.tokens // TOKENS)
    grid = (-(-x.tokens // tile.block_tokens), -(-weight.rows // tile.block_rows), slices)
    if slices > groups or (slices > 1 and grid[0] * grid[1] > TICKETS):
        raise error("BCQ-E552", found=f"{slices} slices", expected=f"at most {groups}, and {TICKETS} tiles")
    partials, tickets = x.scale, weight.tickets
    if slices > 1:
        if slices * 8 * tiles * weight.rows > LIMIT:
            raise error("BCQ-E554", found=f"a workspace of {slices} x {8 * tiles} x {weight.rows}")
        partials = device.empty_like(x.scale, (slices, 8 * tiles, weight.rows), "F32")
        tickets = tickets_for(weight.tickets, grid[0] * grid[1])
    w4a4_kernel(tile, kind).launch(
        grid, tile.threads, weight.words, weight.scale, x.codes, x.scale, y, partials, tickets,
        groups, weight.rows, weight.out, tiles, x.tokens, shared=tile.shared,
    )  # fmt: skip


def _quantize(
    x: Any, gamma: Any, perm: Any, kind: str, tokens: int, columns: int, norm: bool, eps: float, clip: float, rule: str
) -> Activations:
    factor, outlier = float(step_factor(4, clip, rule)), float(step_factor(8, 1.0, rule))
    tiles, groups = -(-tokens // TOKENS), columns // GROUP
    codes = device.empty_like(x, (tiles, groups, 256), "I32")
    scale = device.empty_like(x, (groups, 8 * tiles), "F32")
    shares = -(-groups // WARPS)
    activation_kernel(kind, norm, True).launch(
        (8 * tiles, shares), 32 * WARPS, x, gamma, x, perm, codes, scale, columns, tokens, tiles, eps, factor, outlier
    )
    return Activations(codes=codes, scale=scale, tokens=tokens, columns=columns)


def _check_rows(x: Any, what: str) -> tuple[str, int, int]:
    found = check_array(what, x, _FLOATS, (None, None), 16)
    tokens, columns = found.shape
    if columns % GROUP or columns < 2 * GROUP:
        raise error("BCQ-E552", found=f"{columns} channels", expected="a multiple of 128, at least 256")
    return found.dtype, tokens, columns


def _check_weight(weight: AtomDevice) -> None:
    groups, rows = weight.groups, weight.rows
    if weight.columns % GROUP or groups < 2 or weight.out < 1:
        raise error("BCQ-E552", found=f"a weight of {weight.out} x {weight.columns}", expected="columns: 128 k + 128")
    check_array("words", weight.words, ("I32", "U32"), (rows // 16, groups + 1, 256), 16)
    check_array("weight scale", weight.scale, ("F32",), (groups, rows), 16)
    check_array("perm", weight.perm, ("I32",), (weight.columns,), 16)
    check_array("tickets", weight.tickets, ("I32",), (TICKETS,), 16)
    check_same_device(words=weight.words, scale=weight.scale, perm=weight.perm, tickets=weight.tickets)


def _eps(eps: float) -> float:
    if not 0.0 <= eps <= 1.0:
        raise error("BCQ-E552", found=f"eps = {eps}", expected="0..1")
    return eps
