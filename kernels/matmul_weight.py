"""A weight on a GPU in the layouts of the kernels, and the choice of the kernel for a number of vectors."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any, NamedTuple

from bcqfmt.errors import BcqError, error
from bcqfmt.kernels import bits as bits_of
from bcqfmt.kernels import gemm as gemm_of
from bcqfmt.kernels import lut
from bcqfmt.kernels import mixed as mixed_of
from bcqfmt.kernels.bits.layout import layout_of
from bcqfmt.kernels.dequant import dequantize
from bcqfmt.kernels.gemm.shape import few_alone
from bcqfmt.kernels.lut import BATCH_LIMIT
from bcqfmt.kernels.operands import Operand
from bcqfmt.kernels.operands.device import DeviceOperand, to_device
from bcqfmt.kernels.runtime import device
from bcqfmt.kernels.runtime.limits import KINDS, LIMIT
from bcqfmt.weight.scheme import SecondOrder
from bcqfmt.weight.weight import BcqWeight

__all__ = ["BATCH_LIMIT", "LAUNCHES", "LOOK_UP", "MatmulWeight", "Path", "Product", "path_of"]

# For what `gemm` does not take: launches of the fast product, and vectors by look-up, that are faster than dequantize +
# matmul, measured on an H200; then the same of float32 (launches of four vectors).
LAUNCHES = 3, 7
LOOK_UP = 3, 7
PAIRS = 19, 35  # vectors of 2/4-bit weights; of float32 an estimate
# From this many vectors on `gemm` is faster than the fast product, and up to GEMM_MOST as fast as dequantize + matmul,
# with wgmma for any number; measured on an H200 (docs/benchmarks/gemm.md): where it needs no other layout; matrices of
# up to SMALL elements, and all on GPUs before sm_90 or with less shared memory (older_gpus.md); larger ones; bcq
# weights, and reordered columns, for one launch more.
GEMM_LEAST, SMALL = (1, 2, 3, 5), 1 << 24
GEMM_MOST = {"wgmma": LIMIT, "mma": 256}
MOST = GEMM_MOST["mma"] + 1  # from here on the path is the same


class Path(NamedTuple):
    """How vectors are multiplied.

    ``kernel``: on a GPU "gemm", which is usual, "mixed", "bits", "look-up" or "dequantize"; on a CPU "planes", which is
    usual, or "values". ``why``: the reason for another than the usual one; empty for that.
    """

    kernel: str
    why: str = ""


class Product(NamedTuple):
    """How a number of vectors of one dtype is multiplied.

    ``path``: the kernel of a `Path`; ``array``: a tensor of the weight in its layout, on GPU number ``place``.
    ``multiply(x, y, addend)``: for x (1..step, in) and y (1..step, out). ``start(x, y, addend)``: for all vectors, in
    any dimensions, where that needs no loop here. ``dense()``: the matrix (out, in) that "dequantize" multiplies with;
    then there is neither of them.
    """

    path: str
    array: Any
    place: int
    step: int = BATCH_LIMIT
    multiply: Callable[[Any, Any, Any], None] | None = None
    start: Callable[[Any, Any, Any], None] | None = None
    dense: Callable[[], Any] | None = None


def one_layout() -> bool:
    """Whether a weight is held in one layout only: ``BCQFMT_GPU_LAYOUTS`` is "one", by default "both"."""
    chosen = os.environ.get("BCQFMT_GPU_LAYOUTS") or "both"
    if chosen not in ("one", "both"):
        raise error("BCQ-E302", found=f"BCQFMT_GPU_LAYOUTS={chosen}", expected="one or both")
    return chosen == "one"


class MatmulWeight:
    """A weight on a device in the layouts of the kernels; each is uploaded when it is first used.

    With ``BCQFMT_GPU_LAYOUTS=one`` there is no layout for a few vectors where `gemm` takes the weight: half the memory.
    """

    def __init__(self, operand: Operand, target: Any = None, weight: BcqWeight | None = None) -> None:
        """``target``: torch's device, by default the current GPU. ``weight``: what the operand was made of; without it
        there is no :func:`mixed_gemv`.
        """
        self.operand = operand
        self._target = target
        self._weight = weight
        self._gemm: dict[str, gemm_of.GemmOperand | str] = {}
        self._paths: dict[tuple[int, str], Path] = {}
        self._products: dict[tuple[int, str, str | None, bool], Product] = {}
        self.one = one_layout()

    @cached_property
    def linear(self) -> bool:
        """Whether float32 can hold ``alpha`` and ``z``; if not, the paths are "gemm" and "dequantize"."""
        try:
            return all(segment.alpha.size and segment.z.size for segment in self.operand.segments) and (
                self.operand.outliers is None or self.operand.outliers.added is not None
            )
        except BcqError:
            return False

    @cached_property
    def mixed(self) -> mixed_of.MixedOperand | None:
        """For :func:`mixed_gemv`; None unless the weight (2/4 bits, second-order scales) and the GPU are supported."""
        second = any(isinstance(s.scale, SecondOrder) for s in self._weight.scheme.segments) if self._weight else False
        if self._weight is None or not second or not self.linear or not device.like_sm_90(self._place):
            return None
        try:
            return mixed_of.mixed_operand(self._weight, self._target)
        except BcqError as refusal:
            if refusal.code != "BCQ-E553":
                raise
            return None

    @cached_property
    def bits(self) -> bits_of.BitOperand | None:
        """For :func:`bit_gemv`; None for tables and other group sizes, and where not one vector fits on the GPU."""
        layouts = [layout_of(segment) for segment in self.operand.segments] if self.linear else []
        if not self.linear or not bits_of.fits(layouts, self._place):
            return None
        return bits_of.bit_operand(self.operand, self._target)

    def gemm(self, dtype: str) -> gemm_of.GemmOperand | None:
        """For :func:`gemm`, x of ``dtype``; None where there is an :meth:`obstacle`."""
        found = self._made_for(dtype)
        return None if isinstance(found, str) else found

    def obstacle(self, dtype: str) -> str:
        """Why :func:`gemm` cannot multiply x of ``dtype`` with this weight; empty where it can."""
        found = self._made_for(dtype)
        return found if isinstance(found, str) else ""

    def _made_for(self, dtype: str) -> gemm_of.GemmOperand | str:
        if dtype not in self._gemm:
            try:
                self._gemm[dtype] = gemm_of.gemm_operand(self.operand, dtype, self._target)
            except BcqError as refusal:
                if refusal.code not in ("BCQ-E553", "BCQ-E554"):
                    raise
                told = refusal.finding.found, refusal.finding.expected
                self._gemm[dtype] = ", expected ".join(filter(None, told))
        return self._gemm[dtype]

    @cached_property
    def look_up(self) -> DeviceOperand:
        """For :func:`lut_gemv`."""
        return to_device(self.operand, "lut-gemm", self._target)

    @cached_property
    def exact(self) -> DeviceOperand:
        """For :func:`dequantize`."""
        return to_device(self.operand, "canonical", self._target)

    def decoder(self, dtype: str) -> tuple[Any, Callable[[], Any]]:
        """For products of many vectors: a tensor of the weight, and what makes its dense matrix (out, in) in ``dtype``.

        Values of 16-bit types are rounded to the logical dtype first, as in a dense copy that is loaded in this type.
        """
        made = self.exact
        return made.segments[0].planes, partial(dequantize, made, dtype, twice=dtype != "F32")

    def values(self, dtype: str) -> Any:
        """The matrix (out, in) in ``dtype``, the bits of the normative decoder."""
        return dequantize(self.exact, dtype)

    @cached_property
    def _place(self) -> int | None:
        """The number of the GPU; None for the current one."""
        number = str(self._target).rpartition(":")[2]
        return int(number) if number.isdigit() else None

    def at_once(self, dtype: str) -> int:
        """How many vectors of this type the fast product takes in one launch; 0 where it takes none."""
        return 0 if self.bits is None or dtype not in KINDS else bits_of.batch_limit(self.bits, dtype, dtype)

    def path(self, vectors: int, dtype: str) -> Path:
        """The result of :func:`path_of`, cached."""
        key = (min(vectors, MOST), dtype)
        if key not in self._paths:
            self._paths[key] = _path(self, vectors, dtype)
        return self._paths[key]

    def product(self, vectors: int, dtype: str, path: str | None = None, added: bool = False) -> Product:
        """How that many vectors are multiplied, ``added`` with an addend; cached: choosing takes longer than a product.

        ``path``: by default the one of :meth:`path`.
        """
        key = (min(vectors, MOST), dtype, path, added)
        found = self._products.get(key)
        if found is None:
            found = self._products[key] = _product(
                self, vectors, dtype, path or self.path(vectors, dtype).kernel, added
            )
        return found


def path_of(weight: MatmulWeight, vectors: int, dtype: str = "F16") -> Path:
    """How :func:`matmul` multiplies that many vectors, and why not by `gemm`. Prepares the weight as it does."""
    return weight.path(vectors, dtype)


def _path(weight: MatmulWeight, vectors: int, dtype: str) -> Path:
    if (weight.one or _gemm_alone(weight)) and (only := weight.gemm(dtype)) is not None:  # no other layout is made
        return _many(only, vectors, "dequantize")
    found = _few(weight, vectors, dtype) if weight.linear else "dequantize"
    least = 1 if found in ("look-up", "dequantize") else PAIRS[0] + 1 if found == "mixed" else _gemm_least(weight)
    if vectors < least and not gemm_of.obstacle(weight.operand, dtype):  # not weight.gemm, which makes a layout
        return Path(found, f"fewer than {least} vectors: `{found}` is faster")
    many = weight.gemm(dtype)
    return Path(found, weight.obstacle(dtype)) if many is None else _many(many, vectors, found)


def _many(many: gemm_of.GemmOperand, vectors: int, instead: str) -> Path:
    """The path where `gemm` takes the weight, and no other kernel is faster for this number of vectors."""
    most = _gemm_most(many)
    return Path("gemm") if vectors <= most else Path(instead, f"more than {most} vectors on a GPU that is not sm_90")


def _gemm_most(many: gemm_of.GemmOperand) -> int:
    """Up to how many vectors it is faster than to dequantize."""
    return GEMM_MOST["mma" if many.gpu is None else gemm_of.engine_of(many.gpu)]


def _gemm_alone(weight: MatmulWeight) -> bool:
    """Whether `gemm` is as fast as the fast product with one vector too."""
    return _plain(weight.operand) and all(map(few_alone, weight.operand.segments))


def _plain(operand: Operand) -> bool:
    return operand.perm is None and operand.outliers is None


def _gemm_least(weight: MatmulWeight) -> int:
    """From how many vectors on `gemm` is faster than the fast product."""
    operand, (rows, columns) = weight.operand, weight.operand.shape
    if _gemm_alone(weight):
        return GEMM_LEAST[0]
    if (_plain(operand) and rows * columns <= SMALL) or not device.like_sm_90(weight._place):
        return GEMM_LEAST[1]
    longer = operand.perm is not None or any(segment.formula == "bcq" for segment in operand.segments)
    return GEMM_LEAST[3 if longer else 2]


def _few(weight: MatmulWeight, vectors: int, dtype: str) -> str:
    """The kernel where there is no `gemm`."""
    wide = dtype == "F32"
    if weight.mixed is not None and mixed_of.batch_limit(weight.mixed, dtype):
        return "mixed" if vectors <= PAIRS[wide] else "dequantize"
    at_once = weight.at_once(dtype)
    if vectors <= LAUNCHES[wide and at_once == 4] * at_once:
        return "bits"
    whole_bytes = all(s.group_size % 8 == 0 or s.group_size >= s.width for s in weight.operand.segments)
    return "look-up" if vectors <= (LOOK_UP[wide] if whole_bytes else 1) else "dequantize"


def _product(weight: MatmulWeight, vectors: int, dtype: str, path: str, added: bool) -> Product:
    """The product on a path; by look-ups where the fast kernels do not take the weight or the dtype."""
    if path not in ("mixed", "bits", "gemm", "look-up", "dequantize"):
        raise error("BCQ-E552", found=f"path {path!r}", expected="mixed, bits, gemm, look-up or dequantize")
    single = dtype in KINDS and 1 <= vectors <= BATCH_LIMIT and vectors * max(weight.operand.shape) <= LIMIT
    start: Callable[[Any, Any, Any], None] | None = None
    if path == "gemm" and (many := weight.gemm(dtype)) is not None:
        start = partial(gemm_of.multiply, many) if vectors else None
        array = many.segments[0].codes
        most = _gemm_most(many)
        return Product(path, array, device.place_of(array), most, partial(gemm_of.multiply, many), start)
    if path == "bits" and weight.bits is not None and (step := weight.at_once(dtype)):
        fast, array = weight.bits, weight.bits.segments[0].planes
        if single and vectors in bits_of.USUAL and vectors <= bits_of.fused_limit(fast, dtype, dtype):
            plan = bits_of.plan_of(fast, vectors, dtype, dtype, added=added)
            start = partial(bits_of.launch, fast, plan, vectors)
        return Product(path, array, device.place_of(array), step, partial(bits_of.multiply_padded, fast, dtype), start)
    if path == "mixed" and weight.mixed is not None and (step := mixed_of.batch_limit(weight.mixed, dtype)):
        both, array = weight.mixed, weight.mixed.units
        if single and vectors <= step:
            start = partial(mixed_of.launch, both, mixed_of.plan_of(both, vectors, dtype, dtype))
        return Product(path, array, device.place_of(array), step, partial(mixed_of.multiply, both, dtype), start)
    if path == "dequantize":
        array, dense = weight.decoder(dtype)
        return Product(path, array, device.place_of(array), dense=dense)
    array = weight.look_up.segments[0].planes
    return Product("look-up", array, device.place_of(array), multiply=partial(lut.multiply, weight.look_up))
