"""Our header reader compared with those of safetensors and huggingface_hub: a strict subset, never another meaning."""

from __future__ import annotations

import json
import random
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bcqfmt.container.dtypes import BITS, nbytes_of
from fuzz.header_opinions import of_hub, of_safetensors, ours
from fuzz.inputs import first_inputs, mutate
from pages.soak_figures import record
from weights.strategies import EXPLORE, examples


def compare(path: Path) -> bool:
    """Whether we accept the file; any other reader that does must see the same in it."""
    mine = ours(path)
    if mine is None:
        return False
    for other in (of_safetensors(path), of_hub(path)):
        assert other is not None, path.read_bytes()[:400]
        assert other.tensors == mine.tensors
        assert other.metadata == mine.metadata
    return True


def framed(text: bytes, data: bytes = b"") -> bytes:
    return struct.pack("<Q", len(text)) + text + data


# What they accept and we do not: why the subset is a strict one.
ENTRY = b'{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'
REFUSED = {
    "a key twice": b'{"a":%b,"a":%b}' % (ENTRY, ENTRY),
    "a metadata key twice": b'{"__metadata__":{"a":"1","a":"2"}}',
    "a key of a tensor too many": b'{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0],"more":1}}',
}


@pytest.mark.parametrize("case", REFUSED)
def test_the_subset_is_strict(case: str, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(framed(REFUSED[case]))
    assert ours(path) is None
    assert of_safetensors(path) is not None
    assert of_hub(path) is not None


@pytest.mark.parametrize("number", ["-0", "0.0", "0e1", "1e2", "00", "+1", "NaN", "true", '"0"', "[0]", "9" * 30])
@pytest.mark.parametrize("place", ["shape", "data_offsets"])
def test_numbers_that_readers_see_differently(number: str, place: str, tmp_path: Path) -> None:
    """``-0`` was accepted here and refused by the library, until the fuzzer found it."""
    shape, begin = ("0", number) if place == "data_offsets" else (number, "0")
    text = f'{{"a":{{"dtype":"U8","shape":[{shape}],"data_offsets":[{begin},0]}}}}'
    path = tmp_path / "a.safetensors"
    path.write_bytes(framed(text.encode()))
    assert not compare(path)


def test_the_vectors(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    accepted = 0
    for data in first_inputs():
        path.write_bytes(data)
        accepted += compare(path)
    assert accepted > 100


def changed(path: Path, seed: int, runs: int) -> int:
    """How many of ``runs`` mutated files we accept; every one is compared."""
    rng, inputs, accepted = random.Random(seed), first_inputs(), 0
    for _ in range(runs):
        data = rng.choice(inputs)
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            data = mutate(data, rng)
        path.write_bytes(data)
        accepted += compare(path)
    return accepted


def test_mutated_files(tmp_path: Path) -> None:
    assert changed(tmp_path / "a.safetensors", 7, 2500 * EXPLORE) > 300


names = st.text(st.characters(exclude_categories=("Cs",)), max_size=12)
dims = st.lists(st.sampled_from((0, 1, 2, 3, 8)), max_size=4)


@given(
    st.lists(st.tuples(names, st.sampled_from(sorted(BITS)), dims), max_size=5),
    st.dictionaries(names, names, max_size=3),
    st.sampled_from(((",", ":"), (", ", ": "), (" ,\n", "\t:\r\n"))),
    st.booleans(),
    st.binary(max_size=2),
)
@examples(200)
def test_any_header(
    tmp_path_factory: pytest.TempPathFactory,
    tensors: list[tuple[str, str, list[int]]],
    metadata: dict[str, str],
    separators: tuple[str, str],
    ascii_only: bool,
    more: bytes,
) -> None:
    """Headers of all spellings, with names of all characters, and sometimes bytes too many."""
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    at = 0
    for name, dtype, shape in tensors:
        try:
            size = nbytes_of(dtype, tuple(shape))
        except ValueError:
            continue
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header, separators=separators, ensure_ascii=ascii_only).encode()
    path = tmp_path_factory.mktemp("any") / "a.safetensors"
    path.write_bytes(framed(text, bytes(at) + more))
    assert compare(path) <= (not more)


@pytest.mark.soak
def test_a_hundred_thousand_mutated_files(tmp_path: Path) -> None:
    runs = 100_000
    accepted = changed(tmp_path / "a.safetensors", 8, runs)
    record("differential", files=runs, accepted=accepted, disagreements=0)
