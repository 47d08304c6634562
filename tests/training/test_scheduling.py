"""Steps under one policy of the kernel and under another."""

import contextlib
import io
import os
import re
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from benchmarks.runners import Runner
from benchmarks.scheduling import POLICIES, measure, schedule_threads, under
from tests.ranks import RankPool
from training.config import RunConfig
from training.distributed import Ranks

pytestmark = pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="policies are Linux's")


def policies() -> set[int]:
    """Of all threads of this process."""
    found = set()
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(ProcessLookupError):
            found.add(os.sched_getscheduler(int(thread.name)))
    return found


def test_all_threads_of_the_process_have_the_policy() -> None:
    seen: list[set[int]] = []
    runner = Runner(0, lambda count: seen.append(policies()), lambda: None, lambda: 0, 0, lambda: 0.0)
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    before = os.sched_getscheduler(0)
    try:
        for policy in POLICIES.values():
            under(policy, runner).steps(1)
    finally:
        done.set()
        thread.join()
        schedule_threads(next(name for name in ("SCHED_OTHER", "SCHED_BATCH") if getattr(os, name) == before))
    assert seen == [{os.SCHED_OTHER}, {os.SCHED_BATCH}]


def measure_briefly() -> tuple[str, set[int]]:
    config = RunConfig(workload="mlp", depth=2, width=8, global_batch_size=4, train_samples=4, choice="zero2")
    ranks = Ranks(dist.get_rank(), dist.get_world_size(), torch.device("cpu"), "gloo")
    with contextlib.redirect_stdout(io.StringIO()) as said:
        measure(config, 2, ranks)
    return said.getvalue(), policies()


def test_rank_0_says_times_and_their_ratio(ranks: RankPool) -> None:
    (said, left), (nothing, _) = ranks.run(2, measure_briefly)
    assert left == {os.SCHED_BATCH}, "as it was"
    found = re.fullmatch(
        r"zero2 +(.+) ms a step by default, +(.+) ms as batch, ratio (.+) \(quartiles (.+) and (.+), 2 rounds\)\n", said
    )
    assert found and nothing == ""
    default, batch, ratio, low, high = map(float, found.groups())
    assert 0 < low <= ratio <= high and min(default, batch) > 0
