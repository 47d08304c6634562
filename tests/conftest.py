import os

os.environ.setdefault("KINETO_LOG_LEVEL", "6")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.ranks import RankPool

settings.register_profile("unhurried", deadline=None)  # time says more about the machine than about the code
settings.load_profile("unhurried")


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """`ranks.run(world_size, function, *args)` runs a function on real ranks over Gloo."""
    pool = RankPool()
    yield pool
    pool.close()
