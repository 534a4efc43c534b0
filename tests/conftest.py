"""Shared fixtures: where the real corpus is, and a skip that says so when it is absent."""

import os
from pathlib import Path

import pytest

_DEFAULT_CORPUS = Path(__file__).resolve().parents[2] / "shared" / "corpus"


@pytest.fixture(scope="session")
def corpus_dir() -> Path:
    """The real corpus: ``$MEGAFOLD_CORPUS``, or ``../shared/corpus`` beside the checkout."""
    path = Path(os.environ.get("MEGAFOLD_CORPUS", _DEFAULT_CORPUS))
    if not (path / "structures").is_dir():
        pytest.skip(f"needs the real corpus: no structures/ in {path}; set MEGAFOLD_CORPUS to its folder")
    return path


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Name bytes by their argument: gzip writes the time, and test processes must agree about names."""
    return argname if isinstance(val, bytes) else None
