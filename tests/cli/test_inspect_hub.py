"""``bcqfmt inspect owner/model``: headers by range requests, from a real server on loopback."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from safetensors.numpy import save

import bcqfmt
from bcqfmt.cli.main import cli
from bcqfmt.converters.hub import download, resolve
from hub.samples import NAME, files
from hub.server import HubServer, loopback_hub


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    with loopback_hub(monkeypatch, tmp_path / "home") as server:
        monkeypatch.chdir(tmp_path)
        yield server


def test_a_gptq_model_is_recognised(hub: HubServer) -> None:
    hub.commit(NAME, files())
    result = CliRunner().invoke(cli, ["inspect", NAME, "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert (found["format"], found["bcq"], found["files"], found["dense"]) == ("gptq", False, 2, 2)
    assert "headers only" in result.stderr


def test_the_command_that_fits_a_model_on_the_hub(hub: HubServer) -> None:
    hub.commit(NAME, files())
    name = NAME.rpartition("/")[2]
    said = CliRunner().invoke(cli, ["inspect", NAME]).stdout
    assert said.splitlines()[-1] == f"hint: convert it, without loss: bcqfmt convert {NAME} {name}-bcq"


@pytest.mark.parametrize("words", [["convert"], ["quantize", "--method", "rtn"]])
def test_an_output_that_exists_is_found_before_anything_is_downloaded(
    hub: HubServer, tmp_path: Path, words: list[str]
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").touch()
    hub.commit(NAME, files())
    result = CliRunner().invoke(cli, [words[0], NAME, "out", *words[1:]])
    assert (result.exit_code, "BCQ-E401" in result.stderr, hub.log) == (7, True, [])


def test_tensors_of_a_dense_model_on_the_hub_are_listed(hub: HubServer) -> None:
    hub.commit(NAME, {"config.json": b"{}", "model.safetensors": save({"a.weight": np.zeros((4, 8), np.float16)})})
    rows = [line.split() for line in CliRunner().invoke(cli, ["inspect", NAME, "--modules"]).stdout.splitlines()]
    assert ["a.weight", "4x8", "F16", "64", "B", "model.safetensors"] in rows


def test_only_the_header_of_a_large_file_is_read(hub: HubServer) -> None:
    large = save({"a.qweight": np.zeros((1024, 1024), np.int32)})
    hub.commit(NAME, {"config.json": b"{}", "model.safetensors": large})
    result = CliRunner().invoke(cli, ["inspect", NAME, "--json"])
    assert result.exit_code == 0, result.output
    sent = sum(seen.sent for seen in hub.asked(r"safetensors$", "GET"))
    assert 0 < sent < len(large) // 8
    assert json.loads(result.stdout)["bytes"] == len(large)


def test_a_bcq_model_is_summed_up(hub: HubServer, tmp_path: Path) -> None:
    codes = np.arange(8 * 64, dtype=np.uint8).reshape(8, 64) % 16
    weight = bcqfmt.BcqWeight.from_affine(codes, np.ones((8, 2), np.float16), 8, group_size=32)
    bcqfmt.save(tmp_path / "made", {"a.weight": weight, "norm": np.ones(64, np.float32)})
    hub.commit(NAME, {path.name: path.read_bytes() for path in (tmp_path / "made").iterdir()})
    result = CliRunner().invoke(cli, ["inspect", NAME, "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert (found["bcq"], found["version"], found["weights"], found["dense"]) == (True, "1.0", 1, 1)
    assert found["bits_per_weight"]["quantized"] == weight.bits_per_weight


def test_an_unknown_model_is_a_network_error(hub: HubServer) -> None:
    result = CliRunner().invoke(cli, ["inspect", "nobody/nothing"])
    assert result.exit_code == 8
    assert "BCQ-E701" in result.stderr


def test_offline_it_reads_the_cache(hub: HubServer) -> None:
    """As `convert --offline` does: what is there is shown, what is not is said, and nothing is sent."""
    hub.commit(NAME, files())
    missing = CliRunner().invoke(cli, ["inspect", NAME, "--offline"])
    assert (missing.exit_code, "BCQ-E705" in missing.stderr) == (8, True)
    online = json.loads(CliRunner().invoke(cli, ["inspect", NAME, "--json"]).stdout)
    download(resolve(NAME))
    before = len(hub.asked(r".", "GET"))
    result = CliRunner().invoke(cli, ["inspect", NAME, "--offline", "--json"])
    assert result.exit_code == 0, result.output
    offline = json.loads(result.stdout)
    assert {key: offline[key] for key in ("path", "format", "files", "bytes", "dense")} == {
        key: online[key] for key in ("path", "format", "files", "bytes", "dense")
    }
    assert len(hub.asked(r".", "GET")) == before
