"""bcqfmt: quantized LLM weights as bit planes, in a specified format on top of safetensors.

>>> import bcqfmt
>>> ckpt = bcqfmt.open("model/")              # a folder or a file; nothing is read yet
>>> w = ckpt["model.layers.0.mlp.up_proj.weight"]
>>> w.dequantize("float16")                   # exact, one rounding
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from bcqfmt.errors import (
    BcqError,
    Finding,
    FormatError,
    InputError,
    MismatchError,
    OutputError,
    ResourceError,
    UnsupportedError,
    UsageError,
)
from bcqfmt.reader import Checkpoint, open
from bcqfmt.scheme import OutlierRule, PackedZero, Scheme, SecondOrder, Segment, WeightSpec
from bcqfmt.stored import StoredTensor
from bcqfmt.version import __version__
from bcqfmt.weight import BcqWeight

if TYPE_CHECKING:
    from bcqfmt.validation import Report, validate
    from bcqfmt.writer import save

__all__ = [
    "BcqError",
    "BcqWeight",
    "Checkpoint",
    "Finding",
    "FormatError",
    "InputError",
    "MismatchError",
    "OutlierRule",
    "OutputError",
    "PackedZero",
    "Report",
    "ResourceError",
    "Scheme",
    "SecondOrder",
    "Segment",
    "StoredTensor",
    "UnsupportedError",
    "UsageError",
    "WeightSpec",
    "__version__",
    "open",
    "save",
    "validate",
]

# A runtime that only reads does not pay for the validator and the writer.
_LATER = {"Report": "validation", "save": "writer", "validate": "validation"}


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return getattr(importlib.import_module(f"bcqfmt.{_LATER[name]}"), name)
    raise AttributeError(f"module 'bcqfmt' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
