"""Coverage feedback without another package: every block of the modules under test marks a byte when it runs.

:func:`watch` must be called before the modules are imported. The loop keeps an input that reaches a block, or a set
of findings, that none before it has reached, and mutates the inputs it has kept.
"""

from __future__ import annotations

import ast
import importlib.abc
import importlib.machinery
import random
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

CORE = ("container", "weight", "checkpoint")
_ROOM = 1 << 14  # more blocks than are watched
_MARK = "__block_hits__"


class Blocks:
    """The blocks of the watched modules: ``hits[n]`` is 1 when block n has run since the last :meth:`clear`."""

    def __init__(self) -> None:
        self.hits = bytearray(_ROOM)
        self.count = 0
        self.modules: list[str] = []

    def clear(self) -> None:
        self.hits[:] = bytes(_ROOM)

    def number(self) -> int:
        self.count += 1
        assert self.count < _ROOM
        return self.count


class _Marks(ast.NodeTransformer):
    """Puts ``hits[n] = 1`` at the start of every block of statements."""

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        if isinstance(node, ast.Module | ast.ClassDef):
            return node
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            if isinstance(block, list) and block:
                at = ast.copy_location(self._mark(), block[0])
                block.insert(0, ast.fix_missing_locations(at))
        return node

    def _mark(self) -> ast.stmt:
        return ast.parse(f"{_MARK}[{self._blocks.number()}] = 1").body[0]


class _Loader(importlib.machinery.SourceFileLoader):
    blocks: Blocks

    def get_code(self, fullname: str) -> Any:
        path = self.get_filename(fullname)
        tree = _Marks(self.blocks).visit(ast.parse(self.get_data(path)))
        return compile(tree, path, "exec", dont_inherit=True)

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__[_MARK] = self.blocks.hits
        self.blocks.modules.append(module.__name__)
        super().exec_module(module)


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, package: str, folders: tuple[str, ...], blocks: Blocks) -> None:
        self._package, self._folders, self._blocks = package, folders, blocks

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        top, _, rest = fullname.partition(".")
        if top != self._package or not any(f"{rest}.".startswith(f"{folder}.") for folder in self._folders):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is not None and type(spec.loader) is importlib.machinery.SourceFileLoader:
            loader = _Loader(spec.loader.name, spec.loader.path)
            loader.blocks = self._blocks
            spec.loader = loader
        return spec


def watch(package: str, folders: tuple[str, ...] = CORE) -> Blocks:
    """Mark the blocks of these folders of ``package``, which must not be imported yet."""
    assert package not in sys.modules, f"{package} is imported already"
    blocks = Blocks()
    sys.meta_path.insert(0, _Finder(package, folders, blocks))
    return blocks


class Guided:
    """The loop: pick an input, mutate, execute, keep it when it reaches something new."""

    def __init__(
        self,
        blocks: Blocks,
        execute: Callable[[bytes], tuple[str, ...]],
        mutate: Callable[[bytes, random.Random], bytes],
        rng: random.Random,
    ) -> None:
        self.corpus: list[bytes] = []
        self._blocks, self._execute, self._mutate, self._rng = blocks, execute, mutate, rng
        self._seen = 0
        self._outcomes: set[tuple[str, ...]] = set()

    @property
    def reached(self) -> int:
        """The number of blocks that some input has reached."""
        return self._seen.bit_count()

    def try_one(self, data: bytes) -> bool:
        """Execute; whether the input was new in what it reached."""
        self._blocks.clear()
        codes = self._execute(data)
        hits = int.from_bytes(self._blocks.hits, "little")
        new = hits & ~self._seen
        if not new and codes in self._outcomes:
            return False
        self._seen |= hits
        self._outcomes.add(codes)
        self.corpus.append(data)
        return True

    def step(self) -> bool:
        """One mutation of an input of the corpus, the later ones more often."""
        size = len(self.corpus)
        at = self._rng.randrange(size) if self._rng.random() < 0.5 else size - 1 - self._rng.randrange(min(size, 64))
        data = self.corpus[at]
        for _ in range(self._rng.choice((1, 1, 1, 2, 4))):
            data = self._mutate(data, self._rng)
        return self.try_one(data)
