"""A model whose configuration names a class in its own folder: transformers is told not to import it.

Long, because it loads transformers; what `make test` has of it is tests/security/test_no_code.py.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from security.attacks import refused
from security.mutation import without
from sources.conversions import convert
from sources.peers import WITH_TOKENIZER

pytestmark = pytest.mark.soak

EVIL = """
import pathlib
pathlib.Path({mark!r}).touch()
from transformers import LlamaConfig

class EvilConfig(LlamaConfig):
    model_type = "evil"
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A converted model that brings code along, and says so in config.json."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    convert(WITH_TOKENIZER, tmp_path / "bcq")
    (tmp_path / "bcq" / "configuration_evil.py").write_text(EVIL.format(mark=str(tmp_path / "mark")))
    config = json.loads((tmp_path / "bcq" / "config.json").read_text())
    config |= {"model_type": "evil", "auto_map": {"AutoConfig": "configuration_evil.EvilConfig"}}
    (tmp_path / "bcq" / "config.json").write_text(json.dumps(config))
    return tmp_path / "bcq"


def attack(folder: Path) -> None:
    from bcqfmt.integrations.transformers import run as models

    refused(lambda: models.load(folder), "BCQ-E102")
    assert not (folder.parent / "mark").exists(), "code of the checkpoint was run"


def test_it_is_not_imported(folder: Path) -> None:
    attack(folder)


def test_without_the_guard_it_would_be(folder: Path) -> None:
    from bcqfmt.integrations.transformers import run as models

    said = "folder, local_files_only=True, trust_remote_code=False"
    edit = (models._loaded, said, said.replace("False", "True"))
    with without(edit), pytest.raises(AssertionError):
        attack(folder)
