"""The example program multiplies; the headers and programs stay what their documents say."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import numpy as np
import pytest

import bcqfmt
from bcqfmt.codes import RETIRED
from programs import c_reader
from weights import samples

pytestmark = pytest.mark.cc


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("example") / "example"
    return c_reader.compile_c("example.c", target, "-std=c99", *c_reader.SANITIZERS)


def run(example: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([example, *arguments], capture_output=True, text=True, check=False, timeout=60)


@pytest.mark.parametrize("name", ["worked-example", "stack", "outliers-add", "bcq", "second-order"])
def test_products(name: str, example: Path) -> None:
    path = samples.VECTORS / "valid" / f"{name}.safetensors"
    with bcqfmt.open(path) as checkpoint:
        for weight_name, weight in checkpoint.weights():
            values = weight.dequantize().astype(np.float64)
            x = np.arange(1, weight.spec.columns + 1, dtype=np.float64)
            products = values.reshape(-1, values.shape[-1]) * x
            wanted = [float(np.add.accumulate(row)[-1]) + 0.0 for row in products]
            done = run(example, path, weight_name)
            assert (done.returncode, done.stderr) == (0, "")
            assert [float(line) for line in done.stdout.split()] == wanted


def test_refusals(example: Path) -> None:
    path = samples.VECTORS / "valid" / "worked-example.safetensors"
    bad = samples.VECTORS / "invalid" / "v405-scale-inf.safetensors"
    asked = run(example)
    assert (asked.returncode, asked.stderr) == (2, "usage: example FILE WEIGHT\n")
    for arguments, message in (((path, "nothing"), "no such weight"), ((bad, "w.weight"), "(405)")):
        done = run(example, *arguments)
        assert done.returncode == 1
        assert done.stdout == ""
        assert message in done.stderr
        assert done.stderr.startswith(f"{arguments[0]}: {arguments[1]}: ")


def test_the_programs_of_the_readme_run_as_they_stand(tmp_path: Path) -> None:
    blocks = re.findall(r"^```c\n(.*?)^```$", (c_reader.SOURCES / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    folder = tmp_path / "model"
    weight = bcqfmt.BcqWeight.from_affine(
        np.ones((4, 32), np.uint8), np.ones((4, 1), np.float16), 1, group_size=32, bits=2
    )
    bcqfmt.save(folder, {"w.weight": weight}, config={})
    (folder / "logo.png").write_bytes(b"x")
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    said = []
    for number, block in enumerate(blocks):
        (tmp_path / f"{number}.c").write_text(block)
        words = [c_reader.compiler(), *c_reader.WARNINGS, "-std=c99", "-I", str(c_reader.SOURCES), *c_reader.SANITIZERS]
        subprocess.run([*words, f"{number}.c", "-o", str(number)], cwd=tmp_path, check=True, timeout=120)
        done = subprocess.run([tmp_path / str(number)], cwd=tmp_path, capture_output=True, text=True, check=True)
        said.append(done.stdout)
    assert said == [
        "2 bits, 32 bytes of planes, 256 bytes of values\n",
        "model.safetensors: 2 tensors\nw.weight is there\n",
    ]
    (folder / "model.safetensors").unlink()
    refused = subprocess.run([tmp_path / "1"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert refused.returncode == 1
    assert "model.safetensors" in refused.stderr


def test_the_example_is_short() -> None:
    assert len((c_reader.SOURCES / "example.c").read_text("ascii").splitlines()) <= 42


def test_the_header_can_be_included_everywhere(tmp_path: Path) -> None:
    """Twice in one file, without the implementation, after other headers, in C and in C++."""
    user = tmp_path / "user.c"
    user.write_text('#include <stdio.h>\n#include "bcq.h"\n#include "bcq.h"\nint main(void) { return BCQ_OK; }\n')
    for command, standard in ((c_reader.compiler(), "-std=c99"), (c_reader.compiler("c++"), "-std=c++17")):
        words = [command, *c_reader.WARNINGS, standard, "-fsyntax-only", "-I", str(c_reader.SOURCES)]
        words += ["-x", "c++" if "++" in standard else "c", str(user)]
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)
        assert (done.returncode, done.stderr) == (0, "")


def test_every_rule_of_the_text_has_its_number_in_the_header() -> None:
    spec = c_reader.ROOT / "spec"
    text = "".join((spec / name).read_text("utf-8") for name in ("bcq-1.0.md", "provenance-1.0.md"))
    rules = {int(number) for number in re.findall(r"BCQ-V(\d{3})", text)} - {int(code[5:]) for code in RETIRED}
    code = (c_reader.SOURCES / "bcq.h").read_text("ascii")
    named = {int(number) for number in re.findall(r"(?<![\w.+-])([1-7]\d\d)(?=[,;} )])", code)}
    assert rules <= named


def test_the_porting_guide_names_vectors_that_exist() -> None:
    text = (c_reader.ROOT / "docs" / "porting.md").read_text("utf-8")
    ids = {entry["id"] for entry in samples.vector_index()["valid"]}
    named = set(re.findall(r"`valid/([a-z0-9*-]+)`", text)) | {"rounding-ties", "single-rounding"}
    assert len(named) > 5
    for name in named:
        pattern = re.compile(name.replace("*", ".*"))
        assert any(pattern.fullmatch(found) for found in ids), name
