"""What a model on the hub is, by range reads alone: the same strict rules as for a folder, few bytes, no foreign paths.

The hub is a real HTTP server on loopback and the client is huggingface_hub itself.
"""

import dataclasses
import json
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save

from bcqfmt.converters import hub as client
from bcqfmt.converters.hub import remote as hub_remote
from bcqfmt.converters.source.checkpoint import open_source
from bcqfmt.errors import BcqError
from hub.samples import CONFIG, NAME, files, shard
from hub.server import TOKEN, HubServer, failure, loopback_hub

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    with loopback_hub(monkeypatch, tmp_path / "home") as server:
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        server.commit(NAME, files())
        yield server


def index(**homes: str) -> bytes:
    """An index; the keys are names of layers."""
    return json.dumps(
        {"metadata": {}, "weight_map": {f"{name}.qweight": file for name, file in homes.items()}}
    ).encode()


def look(hub: HubServer, changes: dict[str, bytes | None]) -> client.RemoteHeaders:
    """The headers of the sample after some changes (None: without that file)."""
    new = {**files(), **changes}
    hub.commit(NAME, {name: data for name, data in new.items() if data is not None})
    return client.remote_headers(client.resolve(NAME))


def test_the_same_as_after_a_download(hub: HubServer) -> None:
    repo = client.resolve(NAME)
    remote = client.remote_headers(repo)
    asked = [seen for seen in hub.log if seen.status in (200, 206) and "/api/" not in seen.path]
    assert remote.bytes_read == sum(seen.sent for seen in asked)
    assert remote.requests == len(asked) == 4
    assert {seen.token for seen in hub.log if seen.store} == {""}
    local = open_source(client.download(repo))
    assert remote.headers == {name: model.header for name, model in local.models.items()}
    seen = remote.checkpoint
    assert (seen.config, seen.quant, seen.home, seen.metadata) == (
        local.config,
        local.quant,
        local.home,
        local.metadata,
    )
    assert seen.side_files == local.side_files
    foreign = {"flax_model.msgpack": "another format", "model-Q4.gguf": "another format"}
    others = (".gitattributes", "modeling_evil.py", "tokenizer_evil.py", "original/consolidated.safetensors")
    assert seen.left_out == {**foreign, "pytorch_model.bin": "pickle", **dict.fromkeys(others, "not downloaded")}
    for name, tensor in local.tensors.items():
        assert np.array_equal(seen.tensors[name].array(), tensor.array())
    assert [model.header_bytes() for model in seen.models.values()] == [m.header_bytes() for m in local.models.values()]


def test_one_request_for_a_short_header_two_for_a_long_one(hub: HubServer) -> None:
    short = save({"x": np.zeros(1 << 20, np.uint8)})
    long = save(
        {f"a.long.name.of.a.tensor.{i:06}": np.zeros(1, np.uint8) for i in range(4000)} | {"x": np.zeros(1 << 20)}
    )
    for data, ranges in ((short, 1), (long, 2)):
        hub.log.clear()
        remote = look(hub, {INDEX: None, FIRST: None, SECOND: None, "model.safetensors": data})
        (header_length,) = struct.unpack("<Q", data[:8])
        wanted = [seen for seen in hub.log if seen.store]
        assert len(wanted) == ranges
        assert wanted[0].range == f"bytes=0-{hub_remote.FIRST_READ - 1}"
        assert sum(seen.sent for seen in wanted) == max(hub_remote.FIRST_READ, header_length + 8)
        assert remote.bytes_read == sum(seen.sent for seen in wanted) + len(CONFIG)
    assert wanted[1].range == f"bytes={hub_remote.FIRST_READ}-{header_length + 7}"


@pytest.mark.parametrize(
    "name",
    ["../../x.safetensors", "..", "/etc/passwd", "/x.safetensors", "a/b.safetensors", "C:\\x.safetensors",
     ".x.safetensors", "http://127.0.0.1/x.safetensors", "-x.safetensors", "x.safetensors\n", "x.bin", "",
     "%2e%2e/x.safetensors", "x.safetensors?y"],
)  # fmt: skip
def test_no_foreign_name_is_asked_for(hub: HubServer, name: str) -> None:
    fault = failure(lambda: look(hub, {INDEX: index(layer0=FIRST, layer1=name)}))
    assert (fault.code, fault.exit_code) == ("BCQ-V502", 4)
    assert [seen.path.rsplit("/", 1)[1] for seen in hub.asked("/resolve/")] == [INDEX]
    assert not any(seen.store for seen in hub.log)


@pytest.mark.parametrize(
    ("changes", "code"),
    [({INDEX: index(layer0=FIRST, layer1="model-3.safetensors")}, "BCQ-V503"), ({INDEX: b"{"}, "BCQ-V501"),
     ({INDEX: b"[]"}, "BCQ-V501"), ({INDEX: b'{"weight_map":{"a":1}}'}, "BCQ-V501"),
     ({INDEX: None, SECOND: None}, "BCQ-V503"), ({INDEX: None, "other.safetensors": shard(2)}, "BCQ-V506"),
     ({"b.safetensors.index.json": index(layer0=FIRST)}, "BCQ-V506"), ({INDEX: index(layer0=FIRST)}, "BCQ-V506"),
     ({INDEX: index(layer0=FIRST, layer1=SECOND, layer2=SECOND)}, "BCQ-V504"), ({SECOND: shard(0)}, "BCQ-V505"),
     ({"config.json": None}, "BCQ-V510"), ({"config.json": b"[]"}, "BCQ-V511"),
     ({"config.json": b'{"a":1,"a":2}'}, "BCQ-V511"), ({SECOND: b""}, "BCQ-V101"), ({SECOND: b"\xff" * 99}, "BCQ-V102"),
     ({SECOND: shard(1)[:-1]}, "BCQ-V116"), ({SECOND: shard(1) + b"x"}, "BCQ-V115"),
     ({SECOND: struct.pack("<Q", 2000) + b"{"}, "BCQ-V103"),
     ({SECOND: struct.pack("<Q", 9) + b'{"a":1.5}'}, "BCQ-V106"),
     ({SECOND: b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n"}, "BCQ-E201"),
     ({FIRST: None, SECOND: None, INDEX: None, "model-Q4.gguf": None}, "BCQ-E105"),
     ({FIRST: None, SECOND: None, INDEX: None}, "BCQ-E601")],
)  # fmt: skip
def test_the_rules_of_a_folder(hub: HubServer, changes: dict[str, bytes | None], code: str) -> None:
    with pytest.raises(BcqError) as caught:
        look(hub, changes)
    assert caught.value.code == code


def test_sizes_are_looked_at_before_requests(hub: HubServer) -> None:
    repo = client.resolve(NAME)
    huge = dataclasses.replace(repo.files["config.json"], size=17_000_000)
    fault = failure(lambda: client.remote_headers(dataclasses.replace(repo, files={**repo.files, "config.json": huge})))
    assert fault.code == "BCQ-V511"
    assert not hub.asked("config.json")


FAULTS = {
    "status 401": ("BCQ-E702", 1), "status 403": ("BCQ-E702", 1), "status 404": ("BCQ-E706", 1),
    "status 416": ("BCQ-E706", 1), "status 429": ("BCQ-E703", 6), "status 500": ("BCQ-E704", 6),
    "half": ("BCQ-E704", 6), "drop": ("BCQ-E704", 6), "slow": ("BCQ-E704", 6), "loop": ("BCQ-E704", 20),
    "shrunk": ("BCQ-E706", 1), "gzip": ("BCQ-E704", 1), "ignore_range": ("BCQ-E704", 1), "wrong_range": ("BCQ-E704", 1),
    "garbage": ("BCQ-E704", 1), "echo": ("BCQ-E702", 1),
}  # fmt: skip


@pytest.mark.parametrize("kind", FAULTS)
def test_faults(hub: HubServer, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], kind: str) -> None:
    if kind == "slow":  # the others must not run out of time on a busy machine
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DOWNLOAD_TIMEOUT", 0.5)
    big = save({"x": np.zeros(1 << 20, np.uint8)})
    hub.commit(NAME, {"config.json": CONFIG, "model.safetensors": big})
    repo = client.resolve(NAME)
    name, _, status = kind.partition(" ")
    place = "resolve/.*/model" if name == "echo" else "/store/"  # the store is never told the token
    hub.fail(name, place, status=int(status or 500))
    fault = failure(lambda: client.remote_headers(repo))
    assert (fault.code, fault.exit_code, hub.count(place, FAULTS[kind][1])) == (FAULTS[kind][0], 8, FAULTS[kind][1])
    assert "Secret0" not in "".join(capfd.readouterr())
    assert sum(seen.sent for seen in hub.log if seen.store) < 3 * len(big)


def test_an_answer_from_another_commit(hub: HubServer) -> None:
    repo = client.resolve(NAME)
    hub.fail("commit", FIRST)
    assert failure(lambda: client.remote_headers(repo)).code == "BCQ-E706"


def test_a_small_file_that_is_shorter_than_listed(hub: HubServer) -> None:
    repo = client.resolve(NAME)
    hub.fail("shrunk", "config.json")
    assert failure(lambda: client.remote_headers(repo)).code == "BCQ-E706"
    assert len(hub.asked("config.json")) == 1


def test_reads_recover(hub: HubServer) -> None:
    hub.fail("half", "/store/", times=1)
    hub.fail("status", "/resolve/", times=3, status=503)
    assert len(client.remote_headers(client.resolve(NAME)).headers) == 2
