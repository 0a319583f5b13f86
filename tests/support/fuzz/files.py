"""Files and folders of the format through four readers: validator, reader, spec/decoder.py, the C reader.

All have to agree: the decoder and the C reader on the first rule that is broken, the package on whether one is. Where
all accept, the values of the C reader are those of the package, bit for bit.
"""

from __future__ import annotations

import contextlib
import importlib.util
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from fuzz.c_reader import Library
from fuzz.folder_mutations import mutate_folder
from fuzz.inputs import VECTORS
from fuzz.target import accepted, look


def load_decoder() -> ModuleType:
    """spec/decoder.py, which is no part of the package."""
    spec = importlib.util.spec_from_file_location("bcq_decoder_of_fuzzers", VECTORS.parent / "decoder.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class SideBySide:
    """One input through all readers of the format; AssertionError where they disagree."""

    def __init__(self, library: Library, place: Path) -> None:
        """``place``: a folder in which inputs are written."""
        self._c, self._decoder, self._place = library, load_decoder(), place
        self._folders = [path for path in sorted((VECTORS / "valid").iterdir()) if path.is_dir()]

    def file(self, data: bytes) -> tuple[str, ...]:
        """The bytes of a file; the codes of the validator."""
        path = self._place / "input.safetensors"
        path.write_bytes(data)
        code, values = self._c.file(data)
        self._agree("decoder.py", self._rule(self._decoder.read_bytes, data), code)
        codes, own = look(path)
        self._agree_to_accept(codes, code)
        if code == 0 and values is not None:
            assert b"".join(own[name] for name in sorted(own, key=str.encode)) == values, "other values in C"
        return codes

    def folder(self, seed: bytes) -> tuple[str, ...]:
        """A folder that a seed makes of a vector; it stays in place until the next one."""
        rng, folder = random.Random(seed), self._place / "model"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(rng.choice(self._folders), folder)
        for _ in range(rng.choice((1, 1, 2))):
            with contextlib.suppress(ArithmeticError, LookupError, OSError, RecursionError, TypeError, ValueError):
                mutate_folder(folder, rng)  # it may make no sense a second time
        code = self._c.folder(folder)
        self._agree("decoder.py", self._rule(self._decoder.read_folder, folder), code)
        codes, _ = look(folder)
        self._agree_to_accept(codes, code)
        return codes

    def _rule(self, read: Callable[[Any], object], what: Any) -> int:
        try:
            read(what)
        except self._decoder.Refused as refusal:
            return int(refusal.rule.removeprefix("BCQ-V"))
        return 0

    @staticmethod
    def _agree(name: str, found: int, code: int) -> None:
        assert found == code, f"{name} says {found}, the C reader {code}"

    @staticmethod
    def _agree_to_accept(codes: tuple[str, ...], code: int) -> None:
        assert accepted(codes) == (code == 0), f"the package says {', '.join(codes) or 'valid'}, the C reader {code}"
