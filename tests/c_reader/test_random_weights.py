"""The package writes weights made of random words; the C reader decodes them to the same bits, rows and planes too."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import bcqfmt
from bcqfmt import BcqWeight, UnsupportedError
from programs import c_reader
from programs.c_reader import Runner
from weights import samples
from weights.strategies import EXPLORE, tiled_weights, weights

pytestmark = pytest.mark.cc

EXAMPLES = 300 * EXPLORE
PER_FILE = 8
NAMES = ("float16", "bfloat16", "float32")
TYPES = ("F16", "BF16", "F32")


def drawn(strategy: st.SearchStrategy[Any], count: int) -> list[BcqWeight]:
    """That many weights, the same ones every time unless BCQ_EXPLORE asks for others."""
    found: list[BcqWeight] = []

    @settings(
        max_examples=count,
        derandomize=EXPLORE == 1,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def collect(pair: tuple[BcqWeight, Any]) -> None:
        found.append(pair[0])

    collect()
    return found


def expected(weight: BcqWeight, **how: Any) -> str:
    """The values in hexadecimal, or how the C reader says that there are none."""
    try:
        return str(np.ascontiguousarray(weight.dequantize(**how)).tobytes().hex())
    except UnsupportedError:
        return "refused\t-4"


def questions(name: str, weight: BcqWeight, rng: random.Random) -> list[tuple[str, Callable[[], str]]]:
    """Commands for one weight: all of it, some rows, fewer planes, another type; each with what is expected."""
    out = weight.spec.out
    first = rng.randrange(out)
    last = rng.randrange(first, out) + 1
    planes = rng.randint(1, 8)
    kind = rng.randrange(3)
    everything, some = (0, out), (first, last)
    return [
        (c_reader.values(name, everything), lambda: expected(weight)),
        (c_reader.values(name, some), lambda: expected(weight, rows=some)),
        (c_reader.values(name, some, planes), lambda: expected(weight, rows=some, planes=planes)),
        (c_reader.values(name, everything, planes), lambda: expected(weight, planes=planes)),
        (c_reader.values(name, everything, 0, TYPES[kind]), lambda: expected(weight, dtype=NAMES[kind])),
    ]


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, Callable[[], str] | None]]:
    """Commands in order; None as expectation: the file has to open."""
    rng = random.Random(6)
    made = drawn(weights(nonfinite=None), EXAMPLES) + drawn(tiled_weights(), EXAMPLES // 5)
    folder = tmp_path_factory.mktemp("random")
    found: list[tuple[str, Callable[[], str] | None]] = []
    for start in range(0, len(made), PER_FILE):
        batch = {f"layer.{i}{rng.choice(('.weight', ''))}": w for i, w in enumerate(made[start : start + PER_FILE])}
        path = folder / f"{start}.safetensors"
        bcqfmt.save(path, batch)
        found.append((f"file\t{path}", None))
        for name, weight in batch.items():
            found += questions(name, weight, rng)
    return found


def check(runner: Runner, cases: list[tuple[str, Callable[[], str] | None]]) -> None:
    answers = runner.ask([command for command, _ in cases])
    for (command, wanted), answer in zip(cases, answers, strict=True):
        if wanted is None:
            assert answer[0].startswith("ok"), (command, answer)
            continue
        (line,) = answer
        bits = wanted()
        assert line == bits or (bits.startswith("refused") and line.startswith(bits)), command


def test_values_of_random_weights(runner: Runner, cases: list[tuple[str, Callable[[], str] | None]]) -> None:
    assert len(cases) > 5 * EXAMPLES
    check(runner, cases)


def test_values_in_every_variant(
    variant: tuple[str, Runner], cases: list[tuple[str, Callable[[], str] | None]]
) -> None:
    check(variant[1], cases)


def test_a_folder_that_the_package_wrote(runner: Runner, tmp_path: Path) -> None:
    """Shards, index, config, manifest with its digests: everything that the writer makes passes every check."""
    made = samples.tensors()
    bcqfmt.save(tmp_path / "out", made, config=samples.CONFIG, files=samples.SIDE, max_shard_size=500)
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 1
    weights_made = {name: tensor for name, tensor in made.items() if isinstance(tensor, BcqWeight)}
    commands = [f"folder\t{tmp_path / 'out'}"]
    commands += [c_reader.values(name, (0, weight.spec.out)) for name, weight in weights_made.items()]
    first, *rest = runner.ask(commands)
    found = c_reader.opened(first)
    assert (found.code, found.message) == (0, "")
    assert set(found.weights) == set(weights_made)
    assert set(found.dense) == set(made) - set(weights_made)
    for (name, weight), (line,) in zip(weights_made.items(), rest, strict=True):
        assert line == expected(weight), name
        assert found.weights[name]["digest"] == weight.digest()
