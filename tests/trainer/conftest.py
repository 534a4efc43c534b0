"""Four ranks that the tests of sequence parallelism share."""

from collections.abc import Iterator

import pytest

from tests.trainer.rank_pool import RankPool


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[RankPool]:
    """Processes that can talk through gloo; they start with the first call."""
    with RankPool(4) as pool:
        yield pool
