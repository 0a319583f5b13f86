"""A small model that runs, and a text for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from sources.word_models import save_model, save_text


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "tiny", initializer_range=0.2)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_text(tmp_path_factory.mktemp("texts") / "text.txt", 400)
