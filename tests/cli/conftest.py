"""Small checkpoints for the verbs, and a way of running them in this process."""

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result
from safetensors.numpy import save_file

import bcqfmt
from bcqfmt.cli.main import cli
from programs.verbs import Run, assert_clean, tensors
from sources.peers import WITH_TOKENIZER


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GPTQ model of the real tool as a BCQ folder, its dense export beside it (``dense``); for looking only."""
    from sources.conversions import convert
    from sources.tiny_models import as_dense

    place = tmp_path_factory.mktemp("peer")
    convert(WITH_TOKENIZER, place / "bcq")
    as_dense(place / "dense", place / "bcq")
    return place / "bcq"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    bcqfmt.save(path, tensors(), config={"model_type": "test"})
    return path


@pytest.fixture
def lone_file(tmp_path: Path) -> Path:
    path = tmp_path / "lone.safetensors"
    bcqfmt.save(path, tensors())
    return path


@pytest.fixture
def gptq(tmp_path: Path) -> Path:
    """Something that has the names and the config of a GPTQ checkpoint."""
    path = tmp_path / "gptq"
    path.mkdir()
    parts = {
        "layer.qweight": np.zeros((8, 16), np.int32),
        "layer.qzeros": np.zeros((2, 2), np.int32),
        "layer.scales": np.ones((2, 16), np.float16),
        "layer.g_idx": np.zeros(64, np.int32),
    }
    save_file(parts, path / "model.safetensors")
    config = {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 32}}
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.fixture
def run() -> Run:
    """Run a command line in this process; nothing it prints may hold a control byte."""

    def invoke(*args: str | Path) -> Result:
        result = CliRunner().invoke(cli, [str(arg) for arg in args], prog_name="bcqfmt")
        assert isinstance(result.exception, SystemExit | None), result.exception
        for text in (result.stdout, result.stderr):
            assert_clean(text)
            assert "Traceback" not in text
        return result

    return invoke
