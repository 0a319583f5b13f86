"""bcqfmt: quantized LLM weights as bit planes, in a specified format on top of safetensors.

>>> import bcqfmt
>>> ckpt = bcqfmt.open("model/")              # a folder or a file; nothing is read yet
>>> w = ckpt["model.layers.0.mlp.up_proj.weight"]
>>> w.dequantize("float16")                   # exact, one rounding
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from bcqfmt.version import __version__

if TYPE_CHECKING:
    from bcqfmt.errors import (
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
    from bcqfmt.reader import Checkpoint, open
    from bcqfmt.scheme import OutlierRule, PackedZero, Scheme, SecondOrder, Segment, WeightSpec
    from bcqfmt.stored import StoredTensor
    from bcqfmt.validation import Report, validate
    from bcqfmt.weight import BcqWeight
    from bcqfmt.writer import save

__all__ = [
    "BcqError",
    "BcqWeight",
    "Checkpoint",
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

# Names are loaded when they are first used: a runtime that only reads does not pay for the validator and the writer,
# and the command line answers --help without numpy.
_ROOMS = {
    "BcqWeight": "weight",
    "Checkpoint": "reader",
    "OutlierRule": "scheme",
    "PackedZero": "scheme",
    "Report": "validation",
    "Scheme": "scheme",
    "SecondOrder": "scheme",
    "Segment": "scheme",
    "StoredTensor": "stored",
    "WeightSpec": "scheme",
    "open": "reader",
    "save": "writer",
    "validate": "validation",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'bcqfmt' has no attribute {name!r}")
    room = importlib.import_module(f"bcqfmt.{_ROOMS.get(name, 'errors')}")
    globals()[name] = getattr(room, name)
    return globals()[name]


def __dir__() -> list[str]:
    return sorted(__all__)
