"""An embedding whose table is a BCQ weight: only the rows that are asked for are decoded. And a head that shares it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

import torch
from torch import Tensor, nn

from bcqfmt.errors import error
from bcqfmt.kernels.dequant import dequantize
from bcqfmt.kernels.operands.device import DeviceOperand
from bcqfmt.weight.scheme import SecondOrder, Segment, WeightSpec

from . import linear_op
from .layers import BcqModule
from .parts import TORCH_DTYPES, named_parts, require_tensor, spec_of, suffixes, text_of


class BcqEmbedding(BcqModule):
    """Rows of a BCQ weight (vocabulary, features) in place of :class:`torch.nn.Embedding`.

    ``dtype`` of the result, by default the logical one; conversions of the module change it. Values are rounded once
    to the logical dtype, then to ``dtype``.
    """

    _decodes = True

    def __init__(self, spec: WeightSpec, *, dtype: torch.dtype | None = None, **options: Any) -> None:
        """Empty: for ``load_state_dict``. ``options``: those of :class:`BcqModule`."""
        plain = len(spec.shape) == 2 and not spec.scheme.aligned64 and spec.scheme.outliers is None
        if not plain:
            found = f"a weight of shape {list(spec.shape)}" + (
                " with outliers or tiles" if len(spec.shape) == 2 else ""
            )
            raise error("BCQ-E305", found=found, expected="a plain matrix", hint="bcqfmt export --to dense works")
        super().__init__(spec, **options)
        self.num_embeddings, self.embedding_dim = spec.out, spec.columns
        self.dtype = self.logical if dtype is None else dtype

    def forward(self, ids: Tensor) -> Tensor:
        """Integers of any shape in 0..vocabulary-1 -> (..., features)."""
        require_tensor(ids, "ids")
        found: Tensor = _op(ids.reshape(-1), self.parts(), self.text, self.planes or 0)
        return found.to(self.dtype).reshape(*ids.shape, self.embedding_dim)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        self.dtype = fn(torch.empty(0, dtype=self.dtype)).dtype
        return self

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, {super().extra_repr()}"


class TiedHead(nn.Module):
    """``y = x W^T`` with the weight of an embedding, which keeps it: this module has no tensors of its own."""

    def __init__(self, embedding: BcqEmbedding) -> None:
        super().__init__()
        self.__dict__["embedding"] = embedding  # no submodule: its parts are in the state dict once
        self.in_features, self.out_features = embedding.embedding_dim, embedding.num_embeddings

    def forward(self, x: Tensor) -> Tensor:
        """(..., features) -> (..., vocabulary)."""
        embedding: BcqEmbedding = self.__dict__["embedding"]
        return embedding.product(x)


def _rows_cpu(ids: Tensor, parts: Sequence[Tensor], spec: str, planes: int) -> Tensor:
    logical = TORCH_DTYPES[spec_of(spec).dtype]
    if not ids.numel():
        return torch.empty(0, spec_of(spec).columns, dtype=logical)
    count = 1 << (ids.numel() - 1).bit_length()  # few different sizes: what depends on them is made once
    rows = torch.cat([ids, ids[:1].expand(count - ids.numel())])
    own, tensors = _rows(spec_of(spec), named_parts(spec, parts), rows)
    text = text_of(own)
    values: Tensor = linear_op.values([tensors[name] for name in suffixes(text)], text, planes, 0, logical)
    return values[: ids.numel()]


def _rows_cuda(ids: Tensor, parts: Sequence[Tensor], spec: str, planes: int) -> Tensor:
    """Neither waits for the GPU nor looks at the content: it may be captured in a CUDA graph."""
    whole = linear_op.gpu_operand(parts, spec, planes).exact
    if not ids.numel():
        return torch.empty(0, whole.columns, dtype=TORCH_DTYPES[whole.dtype], device=ids.device)
    found: Tensor = dequantize(rows_of(whole, ids))
    return found


def rows_of(operand: DeviceOperand, ids: Tensor) -> DeviceOperand:
    """The operand of these rows alone; ids (n) on its device."""
    segments = [
        replace(
            segment,
            planes=segment.planes.index_select(1, ids),
            first=segment.first.index_select(-2, ids),
            second=segment.second if segment.formula == "table" else segment.second.index_select(0, ids),
        )
        for segment in operand.segments
    ]
    return replace(operand, shape=(ids.numel(), operand.columns), segments=tuple(segments))


def _rows_fake(ids: Tensor, parts: Sequence[Tensor], spec: str, planes: int) -> Tensor:
    shape = (ids.shape[0], spec_of(spec).columns)
    return parts[0].new_empty(shape, dtype=TORCH_DTYPES[spec_of(spec).dtype])


torch.library.define("bcqfmt::rows", "(Tensor ids, Tensor[] parts, str spec, int planes) -> Tensor")
torch.library.impl("bcqfmt::rows", "CPU", _rows_cpu)
torch.library.impl("bcqfmt::rows", "CUDA", _rows_cuda)
torch.library.register_fake("bcqfmt::rows", _rows_fake)
_op: Any = torch.ops.bcqfmt.rows.default


def _rows(spec: WeightSpec, parts: Mapping[str, Tensor], rows: Tensor) -> tuple[WeightSpec, dict[str, Tensor]]:
    """The weight of these rows alone; rows that share second-order numbers get a copy each."""
    found: dict[str, Tensor] = {}
    for suffix, part in parts.items():
        if suffix == "perm":
            found[suffix] = part
            continue
        carried = part.view(torch.int16) if part.dtype == torch.uint16 else part
        taken = carried.index_select(-2, rows // _shared(spec, suffix))
        found[suffix] = taken.view(part.dtype).contiguous()
    segments = tuple(replace(segment, **_alone(segment)) for segment in spec.scheme.segments)
    scheme = replace(spec.scheme, segments=segments)
    return replace(spec, scheme=scheme, shape=(len(rows), spec.columns)), found


def _alone(segment: Segment) -> dict[str, Any]:
    return {name: kind._replace(rows=1) for name, kind in segment.numbers().items() if isinstance(kind, SecondOrder)}


def _shared(spec: WeightSpec, suffix: str) -> int:
    """How many rows of the weight share a row of a part."""
    number, _, name = suffix[1:].partition("_")
    for kind, numbers in spec.scheme.segments[int(number)].numbers().items():
        if isinstance(numbers, SecondOrder) and name in (f"{kind}_scale", f"{kind}_zero"):
            return numbers.rows
    return 1
