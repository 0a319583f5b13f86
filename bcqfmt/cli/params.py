"""click's type of a parameter, with the type that it gives: the oldest click that we take cannot be asked for that."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

__all__ = ["ParamType"]

if TYPE_CHECKING:
    from click import ParamType
else:

    class ParamType(click.ParamType):
        """``ParamType[int]`` is ``ParamType``."""

        def __class_getitem__(cls, given: Any) -> type:
            return cls
