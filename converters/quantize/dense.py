"""Dense checkpoints: which tensors are weights of linear layers, and how one of their matrices is read.

Names, shapes and types decide, nothing else is known of a model. A tensor *can* be quantized when the format can hold
it: floating point, a matrix or a stack of matrices, 8 columns or more, a name that a weight may have. It *is* quantized
by default when it is also called what a linear layer calls its weight:

| rank | name |
|---|---|
| 2 | ends in ``.weight`` |
| 3 | has a component with ``expert`` in it |

and none of `_KEPT` fits. Everything else passes through as it is, and the reason is kept.
"""

from __future__ import annotations

import re
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from bcqfmt.checkpoint.descriptor import allowed_name
from bcqfmt.container.dtypes import EXPONENT, FLOATS
from bcqfmt.container.stored_tensor import StoredTensor
from bcqfmt.converters.layouts.registry import refuse_by_name
from bcqfmt.converters.methods.loops.halves import widen
from bcqfmt.converters.source.checkpoint import SourceCheckpoint
from bcqfmt.converters.source.quant_config import read_settings
from bcqfmt.errors import error, escape

_BLOCK = 1 << 20  # elements converted at a time
_QUANTIZED = (".qweight", ".weight_packed", ".W_q", ".qzeros")

# Reason -> pattern, tried on the whole name; components are separated by dots.
_KEPT: Final = tuple(
    (reason, re.compile(pattern, re.IGNORECASE))
    for reason, pattern in (
        ("bias", r"(^|[._])bias(es)?$"),
        ("embedding", r"(^|\.)[^.]*embed|(^|\.)(wte|wpe|shared)\.weight$|(^|[._])pos(itions?)?[._]|attention_bias"),
        ("output head", r"(^|\.)(lm_head|embed_out|output_layer|score|classifier)(\.[^.]+)?\.weight$"),
        ("output head", r"^((model|transformer)\.)?(output|proj_out)\.weight$|^cls\."),
        ("norm", r"(^|\.)[^.]*norm[^.]*(\.|$)|(^|\.)ln_?[^.]*\.weight$"),
        ("router", r"(^|\.)(gate|router|wg|shared_expert_gate)(\.(weight|wg|gate|layer|classifier|linear))*$"),
        ("convolution", r"(^|\.)[^.]*conv[^.]*(\.|$)"),
    )
)
# Models that store some weights as [in, out]: groups would run along the wrong side.
_TURNED: Final = (
    ({"gpt2", "openai-gpt", "imagegpt", "decision_transformer"}, re.compile(r"(^|\.)(c_attn|c_proj|c_fc|q_attn)\.")),
    ({"gpt_oss", "llama4", "llama4_text"}, re.compile(r"(^|\.)[^.]*experts?(\.|$)")),
)
_FLAT: Final = {0: "scalar", 1: "vector"}
_EXPERTS = re.compile(r"(^|\.)[^.]*expert", re.IGNORECASE)


class Verdict(NamedTuple):
    """``reason``: why a tensor stays dense by default, empty if it does not; ``possible``: whether it need not."""

    reason: str
    possible: bool


def judge(source: SourceCheckpoint) -> dict[str, Verdict]:
    """A verdict on every tensor, in the order of the source."""
    turned = [pattern for kinds, pattern in _TURNED if kinds & _model_types(source.config)]
    return {name: _verdict(tensor, turned) for name, tensor in source.tensors.items()}


def refuse_quantized(source: SourceCheckpoint) -> None:
    """BCQ-E627 for a source that is quantized already; BCQ-E601 for one that `convert` would not take either."""
    refuse_by_name(source)
    marked = [name for name in source.tensors if name.endswith(_QUANTIZED)]
    method = read_settings(source).method
    if marked or method:
        said = f"the configuration says {escape(method)}" if method else f"there is {escape(marked[0])}"
        raise error("BCQ-E627", source.folder.name, found=said, expected="F16, BF16 or F32 weights")


def read_matrix(tensor: StoredTensor, index: int = 0) -> npt.NDArray[np.float32]:
    """``[out, in]`` float32, the exact numbers; ``index`` chooses a matrix of a stack.

    The source's bytes are read block by block, so that no second copy of the whole is held.
    """
    rows, columns = tensor.shape[-2:]
    lead = [(index, index + 1)] if len(tensor.shape) == 3 else []
    out = np.empty((rows, columns), np.float32)
    step = max(1, _BLOCK // columns)
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        block = tensor.read(*lead, (start, stop)).reshape(stop - start, columns)
        if tensor.dtype == "F16":
            widen(np.ascontiguousarray(block).reshape(-1).view(np.uint16), out[start:stop].reshape(-1))
        else:
            out[start:stop] = block
    return out


def check_finite(tensor: StoredTensor, file: str) -> None:
    """BCQ-E622 when a number is NaN or infinite; reads the tensor once, a few megabytes at a time."""
    kind, exponent = EXPONENT[tensor.dtype]
    at = 0
    for chunk in tensor.chunks():
        bits = chunk.view(kind)
        wrong = (bits & kind(exponent)) == exponent
        if wrong.any():
            *_, row, column = np.unravel_index(at + int(np.argmax(wrong)), tensor.shape)
            mantissa = (exponent & -exponent) - 1
            value = "a NaN" if int(bits[np.argmax(wrong)]) & mantissa else "an infinity"
            raise error(
                "BCQ-E622", file, tensor.name, f"{value} in row {row}, column {column}", "finite numbers everywhere"
            )
        at += bits.size


def _verdict(tensor: StoredTensor, turned: list[re.Pattern[str]]) -> Verdict:
    name, shape = tensor.name, tensor.shape
    if tensor.dtype not in FLOATS:
        return Verdict(f"type {tensor.dtype}", False)
    if len(shape) not in (2, 3):
        return Verdict(_FLAT.get(len(shape), f"{len(shape)} dimensions"), False)
    if not all(shape) or shape[-1] < 8:
        return Verdict("fewer than 8 columns", False)
    if not allowed_name(name):
        return Verdict("name that a weight cannot have", False)
    for reason, pattern in _KEPT:
        if pattern.search(name):
            return Verdict(reason, True)
    if any(pattern.search(name) for pattern in turned):
        return Verdict("stored as [in, out]", True)
    if len(shape) == 2 and not name.endswith(".weight"):
        return Verdict("not called .weight", True)
    if len(shape) == 3 and not _EXPERTS.search(name):
        return Verdict("stack, not of experts", True)
    return Verdict("", True)


def _model_types(config: dict[str, Any]) -> set[str]:
    stated = [part.get("model_type") for part in (config, *config.values()) if isinstance(part, dict)]
    return {kind for kind in stated if isinstance(kind, str)}
