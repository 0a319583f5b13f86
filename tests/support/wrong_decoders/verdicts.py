"""What spec/decoder.py, right or wrong, says about every vector, and which vectors it says something wrong about."""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import signal
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from programs import c_reader
from weights import samples

DECODER = samples.VECTORS.parent / "decoder.py"
Judge = Callable[[ModuleType, bool], bool]  # the flag: values too, or only what is read and refused


@dataclass
class Case:
    """A vector: does a decoder say the right thing about it?"""

    name: str
    judge: Judge
    large: bool = False  # takes seconds: asked last
    seconds: float = 0.0
    functions: frozenset[str] = frozenset()  # those of the decoder that it calls


class TooLongError(Exception):
    """A decoder that does not come to an end."""


def load() -> ModuleType:
    """The decoder, each time as a module of its own."""
    spec = importlib.util.spec_from_file_location("decoder_to_be_changed", DECODER)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def cases(scratch: Path) -> list[Case]:
    """All vectors, `numbers` first; files that have to be made are under `scratch`."""
    index = samples.vector_index()
    found = [
        Case("numbers/rounding", lambda decoder, _: all(_rounds(decoder, c) for c in index["numbers"]["rounding"])),
        Case("numbers/packed", lambda decoder, _: all(_packs(decoder, c) for c in index["numbers"]["packed"])),
        Case(
            "numbers/canonical_json",
            lambda decoder, _: all(
                decoder.canonical(c["value"]) == c["text"] for c in index["numbers"]["canonical_json"]
            ),
        ),
    ]
    for group, judged in (("valid", _reads), ("invalid", _refuses)):
        for entry in index[group]:
            folder = scratch / group
            folder.mkdir(exist_ok=True)
            path = c_reader.prepared(entry, folder)
            judge = lambda decoder, values, e=entry, p=path, j=judged: j(decoder, p, e, values)  # noqa: E731
            found.append(Case(entry["id"], judge, large="gzip" in entry))
    return found


def passes(case: Case, decoder: ModuleType, values: bool = True) -> bool:
    """Whether the decoder is right; whatever it raises and whatever takes too long is wrong."""
    try:
        with _limited(300.0 if case.large else 20.0):
            return case.judge(decoder, values)
    except (Exception, RecursionError, MemoryError):  # noqa: BLE001  a wrong decoder may raise anything
        return False


def measure(known: list[Case], decoder: ModuleType) -> None:
    """Note how long a case takes and which functions it calls; it has to pass. Large ones may call any."""
    called: set[str] = set()

    def noted(name: str, function: Any) -> Any:
        def call(*arguments: Any, **more: Any) -> Any:
            called.add(name)
            return function(*arguments, **more)

        return call

    saved = dict(decoder.__dict__)
    decoder.__dict__.update({n: noted(n, f) for n, f in saved.items() if inspect.isfunction(f)})
    for case in known:
        if case.large:
            case.functions = frozenset(name for name in saved)
            continue
        called.clear()
        begin = time.process_time()
        assert case.judge(decoder, True), f"the decoder itself fails {case.name}"
        case.seconds, case.functions = time.process_time() - begin, frozenset(called)
    decoder.__dict__.update(saved)


@contextmanager
def _limited(seconds: float) -> Iterator[None]:
    def end(*_: Any) -> None:
        raise TooLongError

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _open(decoder: ModuleType, path: Path, entry: dict[str, Any]) -> Any:
    return decoder.read_folder(path) if entry["kind"] == "folder" else decoder.read_file(path)


def _refuses(decoder: ModuleType, path: Path, entry: dict[str, Any], _: bool) -> bool:
    try:
        _open(decoder, path, entry)
    except decoder.Refused as refusal:
        return bool(refusal.rule == entry["rule"])
    return False


def _reads(decoder: ModuleType, path: Path, entry: dict[str, Any], values: bool) -> bool:
    content = _open(decoder, path, entry)
    dense = {
        name: {"dtype": dtype, "shape": list(shape), "sha256": hashlib.sha256(data).hexdigest()}
        for name, (dtype, shape, data) in content["dense"].items()
    }
    if content.get("uncovered", []) != entry.get("uncovered", []):
        return False
    if dense != entry["dense"] or set(content["weights"]) != set(entry["weights"]):
        return False
    return all(_decodes(decoder, content["weights"][name], e, values) for name, e in entry["weights"].items())


def _decodes(decoder: ModuleType, weight: Any, expected: dict[str, Any], values: bool) -> bool:
    stated = {"dtype": weight["dtype"], "shape": list(weight["shape"]), "digest": decoder.weight_digest(weight)}
    wanted = {None: expected, **{int(p): value for p, value in expected.get("planes", {}).items()}} if values else {}
    return stated.items() <= expected.items() and all(
        _value(decoder, weight, planes) == (value and value["sha256"]) for planes, value in wanted.items()
    )


def _value(decoder: ModuleType, weight: Any, planes: int | None) -> str | None:
    try:
        return hashlib.sha256(decoder.decode(weight, planes)).hexdigest()
    except decoder.Refused:
        return None


def _rounds(decoder: ModuleType, case: dict[str, str]) -> bool:
    (x,) = struct.unpack(">d", bytes.fromhex(case["binary64"]))
    return all(decoder.round_once(x, dtype) == int(case[dtype], 16) for dtype in ("F16", "BF16", "F32"))


def _packs(decoder: ModuleType, case: dict[str, Any]) -> bool:
    data = struct.pack(f"<{len(case['words'])}I", *(int(word, 16) for word in case["words"]))
    fields, bits = case["fields"], case["bits"]
    return bool(decoder.unpack(data, len(fields), bits) == fields and decoder.pack(fields, len(fields), bits) == data)
