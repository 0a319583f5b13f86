"""Classes by name: the built-in ones and those that other packages add through an entry point, loaded on demand."""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Mapping
from functools import cached_property
from typing import Any

from bcqfmt.errors import error, escape


class Registry:
    """Classes of one kind. ``built_in``: name -> (module, class); ``group``: the entry points of other packages."""

    def __init__(self, group: str, built_in: Mapping[str, tuple[str, str]]) -> None:
        self.group, self.built_in = group, built_in

    def names(self) -> list[str]:
        """Every name, the built-in ones first; BCQ-E302 when two classes have the same."""
        names = [*self.built_in, *sorted(point.name for point in self._points)]
        for i, name in enumerate(names):
            if name in names[:i]:
                raise error("BCQ-E302", found=f"{self.group}: two are called {escape(name)}", expected="distinct names")
        return names

    def load(self, name: str) -> Any:
        """The class of this name, which is one of :meth:`names`."""
        if name in self.built_in:
            module, attribute = self.built_in[name]
            return getattr(importlib.import_module(module), attribute)
        return next(point.load() for point in self._points if point.name == name)

    @cached_property
    def _points(self) -> importlib.metadata.EntryPoints:
        return importlib.metadata.entry_points(group=self.group)
