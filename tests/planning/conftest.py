"""The tiny model of the end-to-end tests."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent.parent / "data"))  # small_tokenizers


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tiny_jobs import save_tiny_model

    return save_tiny_model(tmp_path_factory.mktemp("tiny") / "model")
