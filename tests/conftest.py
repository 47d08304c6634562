import os
import sys

os.environ.setdefault("KINETO_LOG_LEVEL", "6")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

if sys.dont_write_bytecode:
    # Compiling the sources of torch and transformers takes 5 s of CPU in each of the many processes that tests start.
    # Where Python is told to keep no bytecode beside the sources, it is kept here.
    sys.pycache_prefix = str(Path(__file__).parent.parent / ".pytest_cache" / "bytecode")
    sys.dont_write_bytecode = False
    os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix
    del os.environ["PYTHONDONTWRITEBYTECODE"]

settings.register_profile("unhurried", deadline=None)  # time says more about the machine than about the code
settings.load_profile("unhurried")


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Workers of `-n auto`: one more than cores, since tests also wait. None for a single file."""
    paths = [argument.partition("::")[0] for argument in config.args]
    if len(set(paths)) == 1 and paths[0].endswith(".py"):
        return 0
    return min(len(os.sched_getaffinity(0)) + 1, 4)


@pytest.fixture(scope="session")
def ranks() -> Iterator[Any]:
    """`ranks.run(world_size, function, *args)` runs a function on real ranks over Gloo."""
    from tests.ranks import RankPool  # imports torch, which xdist's controller has no use for

    pool = RankPool()
    yield pool
    pool.close()
