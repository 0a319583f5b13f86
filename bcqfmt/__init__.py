"""bcqfmt: quantized LLM weights as bit planes, in a specified format on top of safetensors.

>>> import bcqfmt
>>> ckpt = bcqfmt.open("model/")              # a folder or a file; nothing is read yet
>>> w = ckpt["model.layers.0.mlp.up_proj.weight"]
>>> w.dequantize("float16")                   # exact, one rounding
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .version import __version__

if TYPE_CHECKING:
    from bcqfmt.checkpoint.reader import Checkpoint, open
    from bcqfmt.checkpoint.validation import Report, validate
    from bcqfmt.checkpoint.writer import save
    from bcqfmt.container.stored_tensor import StoredTensor
    from bcqfmt.weight.build import Coded
    from bcqfmt.weight.scheme import OutlierRule, PackedZero, Scheme, SecondOrder, Segment, WeightSpec
    from bcqfmt.weight.weight import BcqWeight

    from .errors import (
        BcqError,
        Finding,
        FormatError,
        InputError,
        MismatchError,
        NetworkError,
        OutputError,
        ResourceError,
        UnsupportedError,
        UsageError,
    )

__all__ = [
    "BcqError",
    "BcqWeight",
    "Checkpoint",
    "Coded",
    "Finding",
    "FormatError",
    "InputError",
    "MismatchError",
    "NetworkError",
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

# The names of each module, errors left out. Modules are loaded at the first use of a name: a program that only reads
# loads neither validator nor writer, and the command line answers --help without numpy.
_NAMES = {
    "checkpoint.reader": ("Checkpoint", "open"),
    "checkpoint.validation": ("Report", "validate"),
    "checkpoint.writer": ("save",),
    "container.stored_tensor": ("StoredTensor",),
    "weight.build": ("Coded",),
    "weight.scheme": ("OutlierRule", "PackedZero", "Scheme", "SecondOrder", "Segment", "WeightSpec"),
    "weight.weight": ("BcqWeight",),
}
_HOME_OF = {name: module for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'bcqfmt' has no attribute {name!r}")
    module = importlib.import_module(f"bcqfmt.{_HOME_OF.get(name, 'errors')}")
    globals()[name] = getattr(module, name)
    return globals()[name]


def __dir__() -> list[str]:
    return sorted(__all__)
