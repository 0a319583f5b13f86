"""The quantization methods by name; each is loaded when it is asked for."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, Final

from bcqfmt.converters.plugins import Registry
from bcqfmt.errors import BcqError, error, escape

from .protocol import Method

# name -> module and class
METHODS: Final = {
    "rtn": ("bcqfmt.converters.methods.rtn", "Rtn"),
    "bcq": ("bcqfmt.converters.methods.bcq", "Bcq"),
    "multi": ("bcqfmt.converters.methods.multi", "Multi"),
    "mixed24": ("bcqfmt.converters.methods.mixed24", "Mixed24"),
    "atom": ("bcqfmt.converters.methods.atom", "Atom"),
    "gptq": ("bcqfmt.converters.methods.gptq", "Gptq"),
}
_REGISTRY: Final = Registry("bcqfmt.methods", METHODS)  # third parties add theirs under this entry point


def method_names() -> list[str]:
    """Every name that :func:`find_method` knows, our own first."""
    return _REGISTRY.names()


def find_method(name: str) -> type[Method]:
    """The class of a method; BCQ-E620 for an unknown name."""
    known = method_names()
    if name in known:
        found: type[Method] = _REGISTRY.load(name)
        return found
    near = difflib.get_close_matches(name, known, 1, 0.5)
    expected = f"{near[0]}, perhaps" if near else f"one of {', '.join(known)}"
    raise error("BCQ-E620", found=f"no method '{escape(name)}'", expected=expected)


def build_method(name: str, settings: Mapping[str, Any], place: str = "") -> Method:
    """The method with these settings; ``place`` says in a message where they were written."""
    try:
        return find_method(name).build(settings)
    except BcqError as fault:
        if not place or fault.code != "BCQ-E620":
            raise
        raise error("BCQ-E620", place, found=fault.finding.found, expected=fault.finding.expected) from None
