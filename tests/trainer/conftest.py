"""Four ranks that the tests of sequence parallelism share."""

from collections.abc import Iterator

import pytest
import torch

from tests.trainer.rank_pool import RankPool


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[RankPool]:
    """Processes that can talk through gloo; they start with the first call."""
    with RankPool(4) as pool:
        yield pool


@pytest.fixture
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """``torch.empty`` gives NaN: whatever a kernel leaves unwritten shows.

    Deterministic mode is what poisons; the kernels shall not run in it, but for the tests that say so.
    """
    torch.use_deterministic_algorithms(True, warn_only=True)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: False)
    yield
    torch.use_deterministic_algorithms(False)
