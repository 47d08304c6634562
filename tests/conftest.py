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
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

settings.register_profile("unhurried", deadline=None)  # time says more about the machine than about the code
settings.load_profile("unhurried")


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Workers of `-n auto`: one more than cores, since tests also wait; not more than files are named; none for one."""
    paths = {argument.partition("::")[0] for argument in config.args}
    workers = min((os.cpu_count() or 1) + 1, 4)
    if all(path.endswith(".py") for path in paths):
        workers = min(workers, len(paths))
    return workers if workers > 1 else 0


@pytest.fixture(scope="session")
def ranks() -> Iterator[Any]:
    """`ranks.run(world_size, function, *args)` runs a function on real ranks over Gloo."""
    from tests.ranks import RankPool  # imports torch, which xdist's controller has no use for

    pool = RankPool()
    yield pool
    pool.close()
