"""A small model for the tests of transformers."""

from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama as a BCQ folder, what it was made of beside it (``dense``); for looking only."""
    from sources.tiny_models import bcq_model, dense_model

    place = tmp_path_factory.mktemp("llama")
    return bcq_model(place / "bcq", dense_model(place / "dense"))
