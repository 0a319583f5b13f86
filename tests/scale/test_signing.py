"""The signing example, run for real: sign, verify, and what must not pass (needs model_signing; long: `make soak`)."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import bcqfmt
from programs.verbs import ROOT
from sources.conversions import convert
from sources.peers import PEERS

SCRIPT = ROOT / "docs" / "examples" / "sign_folder.sh"


def model_signing() -> str:
    """The program: from the environment's MODEL_SIGNING, from the folder of this Python, or from the path."""
    here = str(Path(sys.executable).parent)
    found = os.environ.get("MODEL_SIGNING") or shutil.which("model_signing", path=f"{here}:{os.environ['PATH']}")
    assert found, "pip install model-signing pyopenssl, or set MODEL_SIGNING to the program of another environment"
    return found


def ran(*words: str | Path) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # bcqfmt of this environment
    environment = {**os.environ, "PATH": path, "MODEL_SIGNING": model_signing()}
    return subprocess.run(words, env=environment, capture_output=True, text=True, timeout=300, check=False)


@pytest.fixture(scope="module")
def signed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder ``bcq``, its signature ``bcq.sig`` and the ``keys``, as the example leaves them."""
    work = tmp_path_factory.mktemp("signed")
    convert(PEERS / "gptqmodel-gptq-4b-g32-sym-sharded" / "source", work / "bcq", max_shard_size=100_000)
    done = ran("sh", SCRIPT, f"{work / 'bcq'}/", work / "keys")
    assert done.returncode == 0, done.stderr
    assert "valid" in done.stdout
    return work


def verify(work: Path, folder: Path, key: Path | None = None) -> subprocess.CompletedProcess[str]:
    public = key or work / "keys" / "public.pem"
    return ran(model_signing(), "verify", "key", folder, "--public_key", public, "--signature", work / "bcq.sig")


@pytest.mark.soak
def test_the_example_signs_and_the_folder_stays_valid(signed: Path) -> None:
    assert verify(signed, signed / "bcq").returncode == 0
    assert bcqfmt.validate(signed / "bcq", deep=True).valid  # the signature is not in the folder
    assert (signed / "keys/private.pem").stat().st_mode & 0o077 == 0


@pytest.mark.soak
def test_the_signature_holds_the_digests_of_the_manifest(signed: Path) -> None:
    bundle = json.loads((signed / "bcq.sig").read_text())
    statement = json.loads(base64.b64decode(bundle["dsseEnvelope"]["payload"]))
    told = {entry["name"]: entry["digest"] for entry in statement["predicate"]["resources"]}
    manifest = json.loads((signed / "bcq/bcq_manifest.json").read_text())
    assert told.keys() == manifest["files"].keys() | {"bcq_manifest.json", "README.md"}
    assert {name: told[name] for name in manifest["files"]} == {
        name: record["sha256"] for name, record in manifest["files"].items()
    }


@pytest.mark.soak
@pytest.mark.parametrize("file", ["model-00002-of-00002.safetensors", "bcq_manifest.json", "config.json"])
def test_one_flipped_bit_is_found(signed: Path, tmp_path: Path, file: str) -> None:
    shutil.copytree(signed / "bcq", tmp_path / "bcq")
    data = bytearray((tmp_path / "bcq" / file).read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / "bcq" / file).write_bytes(data)
    done = verify(signed, tmp_path / "bcq")
    assert done.returncode != 0
    assert "Hash mismatch" in done.stderr
    assert file in done.stderr


@pytest.mark.soak
def test_added_and_removed_files_are_found(signed: Path, tmp_path: Path) -> None:
    shutil.copytree(signed / "bcq", tmp_path / "bcq")
    (tmp_path / "bcq/modeling.py").write_text("print('hello')\n")
    assert verify(signed, tmp_path / "bcq").returncode != 0
    (tmp_path / "bcq/modeling.py").unlink()
    assert verify(signed, tmp_path / "bcq").returncode == 0
    (tmp_path / "bcq/config.json").unlink()
    assert verify(signed, tmp_path / "bcq").returncode != 0


@pytest.mark.soak
def test_another_key_does_not_pass(signed: Path, tmp_path: Path) -> None:
    private, public = tmp_path / "private.pem", tmp_path / "public.pem"
    make = ["openssl", "ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", str(private)]
    subprocess.run(make, check=True, capture_output=True)
    subprocess.run(["openssl", "ec", "-in", private, "-pubout", "-out", public], check=True, capture_output=True)
    assert verify(signed, signed / "bcq", public).returncode != 0
