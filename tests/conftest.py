import atexit
import datetime
import os
import shutil
import sys
import tempfile
import zlib
from pathlib import Path

os.environ.setdefault("KINETO_LOG_LEVEL", "6")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HOME", str(Path.home() / ".cache" / "huggingface"))
if "PYTEST_XDIST_WORKER" not in os.environ:  # tokens cached by another version of the code would prove nothing
    os.environ["HF_DATASETS_CACHE"] = tempfile.mkdtemp(prefix="ddp-lab-tests-")
    atexit.register(shutil.rmtree, os.environ["HF_DATASETS_CACHE"], ignore_errors=True)

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
from hypothesis import settings

if sys.dont_write_bytecode:
    # Tests start many processes, and compiling torch and transformers takes 5 s of CPU in each.
    # If Python must not write bytecode beside the sources, it writes it here.
    sys.pycache_prefix = str(Path(__file__).parent.parent / ".pytest_cache" / "bytecode")
    sys.dont_write_bytecode = False
    os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

settings.register_profile("unhurried", deadline=None)  # time says more about the machine than about the code
settings.load_profile("unhurried")


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Workers of `-n auto`: as many as cores, but not more than files are named; none for one."""
    paths = {argument.partition("::")[0] for argument in config.args}
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    workers = min(cores, 4)
    if all(path.endswith(".py") for path in paths):
        workers = min(workers, len(paths))
    return workers if workers > 1 else 0


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--seventh",
        choices=["today", *"0123456"],
        help="run one seventh of the selected cases: the date's, so that a week covers all",
    )

    parser.addoption("--device", choices=["cpu", "cuda"], default="cpu", help="where ranks compute")
    parser.addoption("--backend", default="auto", help="gloo, nccl or nccl-legacy")
    parser.addoption("--share-gpu", action="store_true", help="ranks share GPUs")
    parser.addoption("--ranks", type=int, default=2, help="of tests/on_gpu")
    parser.addoption("--quick", action="store_true", help="less of each test of tests/on_gpu")
    parser.addoption("--only", help="names of tests of tests/on_gpu, with commas between")
    parser.addoption("--check-folder", type=Path, help="where tests/on_gpu leaves its page and logs")


HERE = Path(__file__).parent
LONGEST_IN_CI_S = 60
"""Of a case of the default suite, on whatever machine CI has."""
ON_ANY_PROCESSOR = {
    "planner/simulation/test_meshed.py",
    "planner/simulation/test_simulate.py",
    "planner/test_accounting.py",
    "runtime/checkpoint/test_mesh_runs.py",
    "runtime/link/test_group.py",
    "runtime/profiling/test_memory.py",
    "runtime/test_fp16_runs.py",
    "runtime/test_masks.py",
    "strategies/test_compression.py",
    "strategies/test_hsdp.py",
    "strategies/test_int8.py",
    "strategies/test_late_reads.py",
    "strategies/test_low_precision.py",
    "strategies/test_memory.py",
    "strategies/test_meshes.py",
    "strategies/test_offload.py",
    "strategies/test_parity.py",
    "strategies/test_precision.py",
    "strategies/test_recompute.py",
    "strategies/test_traps.py",
    "tensor_parallel/test_traps.py",
}
"""Files that measure memory, or compare bits of what different code computes: `-m processor` chooses them."""


def is_long(item: pytest.Item) -> bool:
    return any(item.get_closest_marker(name) for name in ("slow", "exhaustive", "gpu"))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks what must hold on any processor, and with `--seventh` selects a seventh of the cases.

    Raises:
        pytest.UsageError: a listed file is gone.
    """
    if missing := [name for name in sorted(ON_ANY_PROCESSOR) if not (HERE / name).is_file()]:
        raise pytest.UsageError(f"tests/conftest.py, ON_ANY_PROCESSOR: no such file: {', '.join(missing)}")
    for item in items:
        if item.path.relative_to(HERE).as_posix() in ON_ANY_PROCESSOR:
            item.add_marker("processor")
    seventh = config.getoption("--seventh")
    if seventh is not None:
        day = datetime.datetime.now(datetime.UTC).toordinal() if seventh == "today" else int(seventh)
        deselected = {item for item in items if zlib.crc32(item.nodeid.encode()) % 7 != day % 7}
        items[:] = [item for item in items if item not in deselected]
        config.hook.pytest_deselected(items=list(deselected))


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """One worker runs all files that use ranks. If each worker had pools, there would be more processes than cores.

    `--dist loadgroup` does not work: pytest-xdist 3.8 reads an attribute that pytest 9.2 no longer has.
    """
    from xdist.scheduler import LoadScopeScheduling

    uses_ranks = cache(lambda path: "RankPool" in (HERE.parent / path).read_text())

    class OneOwner(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "ranks" if uses_ranks(nodeid.partition("::")[0]) else nodeid

    return OneOwner(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """In CI, a case of the default suite that takes very long fails."""
    report: Any = yield
    if os.environ.get("CI") and report.passed and call.duration > LONGEST_IN_CI_S and not is_long(item):
        report.outcome = "failed"
        report.longrepr = f"{call.duration:.0f} s: make it shorter, or mark it slow"
    return report


@pytest.fixture(scope="session")
def ranks(pytestconfig: pytest.Config) -> Iterator[Any]:
    """`ranks.run(world_size, function, *args)` runs a function on real ranks, over Gloo unless `--device` says cuda."""
    from tests.ranks import RankPool  # imports torch, which xdist's controller has no use for

    pool = RankPool(*(pytestconfig.getoption(name) for name in ("device", "backend", "share_gpu")))
    yield pool
    pool.end()
